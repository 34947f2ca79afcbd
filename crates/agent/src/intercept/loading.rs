//! The memory of a clone that is attached is loaded while its guest runs.
//!
//! The private memory that takes the place of its mapping ([`replace`]) is registered with a
//! userfaultfd of its own: a thread that touches a page which is not there yet waits. The *loader*,
//! a thread, reads such pages first, and then all others, from the mapping that was put aside. In
//! the end it unregisters the memory, and takes it as a region.
//!
//! Pages of zeros are left out: unregistered, that is what they read as. So is what the program
//! gives back meanwhile (`EVENT_REMOVE`); the kernel refuses copies until that event is read. A
//! page that cannot be read is poisoned: its reader gets SIGBUS. Nobody is ever given other bytes:
//! where that cannot be ensured, the program is ended.

#![allow(unsafe_code)] // Fills the program's memory.

mod replace;

use std::fs::File;
use std::io::Write;
use std::os::unix::fs::FileExt;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::Ordering;
use std::thread;
use std::time::Duration;

use kmem::range::Range;
use kmem::uffd::{Event, Features, Uffd};
use kmem::{PAGE_SIZE, mm};
use rustix::io::Errno;
use wire::{PageNo, Run};

use crate::intercept::mark;
use crate::runtime::descriptors::Descriptor;
use crate::runtime::lifecycle::LOADING;
use crate::runtime::log;
use crate::runtime::state::bitmap::Bitmap;
use crate::service::start;

pub(super) use replace::{ReplaceError, replace};

const AT_ONCE: usize = 16;
/// How often filling a page is tried before the program is ended, and the time between.
const TRIES: u32 = 10_000;
const PAUSE: Duration = Duration::from_micros(100);
static ZEROS: [u8; PAGE_SIZE] = [0; PAGE_SIZE];

/// Ends the program: it would see zeros where its memory was.
fn end(why: std::fmt::Arguments<'_>) -> ! {
    let _ =
        writeln!(std::io::stderr(), "pageone-agent: the snapshot's memory cannot be loaded, and the guest ends: {why}");
    std::process::abort();
}

/// Starts the loader. `aside`: what is unmapped afterwards.
fn spawn(loader: Loader, file: Descriptor<File>, aside: Range) -> Result<(), start::StartError> {
    start::spawn("pageone-loader", move || load(loader, &file, aside))
}

fn load(mut loader: Loader, file: &Descriptor<File>, aside: Range) {
    if catch_unwind(AssertUnwindSafe(|| loader.run(file))).is_err() {
        end(format_args!("its thread has panicked"));
    }
    let range = loader.range;
    drop(loader);
    // SAFETY: the loader alone knows this mapping, and has read it.
    let _ = unsafe { mm::unmap(aside) };
    mark::set_loading(None);
    log::line(format_args!("{} MiB of a clone are loaded", range.len >> 20));
    mark::mergeable(range.start, range.len);
    LOADING.store(false, Ordering::Release);
}

/// What is done with a page of zeros.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Zeros {
    /// It is zeros already.
    LeaveOut,
    /// Somebody waits for it.
    Fill,
}

struct Loader {
    uffd: Descriptor<Uffd>,
    range: Range,
    /// Where the first page lies in the file, in bytes.
    base: u64,
    /// Pages that the program has given back.
    removed: Bitmap,
    /// Pages for which somebody waits.
    waiting: Vec<PageNo>,
}

impl Loader {
    fn new(range: Range, base: u64) -> Result<Self, String> {
        let pages = u32::try_from(range.pages()).ok().and_then(Bitmap::new);
        let removed = pages.ok_or("no memory for its bitmap")?;
        let features = Features::EVENT_REMOVE;
        let uffd = Uffd::new(features | Features::POISON).or_else(|_| Uffd::new(features));
        let uffd = Descriptor::new(uffd.map_err(|error| error.to_string())?).map_err(|error| error.to_string())?;
        uffd.register_missing(range).map_err(|error| error.to_string())?;
        Ok(Self { uffd, range, base, removed, waiting: Vec::new() })
    }

    fn run(&mut self, file: &Descriptor<File>) {
        let pages = self.removed.bits();
        let mut next = 0;
        loop {
            self.read_events();
            if let Some(page) = self.waiting.pop() {
                self.load(file, Run::one(page), Zeros::Fill);
                let _ = self.uffd.wake(self.bytes(page));
            } else if next < pages {
                let run = Run::new(PageNo(next), (pages - next).min(AT_ONCE as u32));
                self.load(file, run, Zeros::LeaveOut);
                next += run.len;
            } else {
                break;
            }
        }
        // What is missing still is zeros, and threads that wait go on. If the program has unmapped
        // a part, the rest is unregistered when the descriptor is closed.
        let _ = self.uffd.unregister(self.range);
    }

    fn bytes(&self, page: PageNo) -> Range {
        Range::new(self.range.start + page.index() * PAGE_SIZE, PAGE_SIZE)
    }

    /// Reads what has happened. Before this nothing is copied that the program has given back.
    fn read_events(&mut self) {
        if !self.uffd.is_intact() {
            end(format_args!("the program has closed the userfaultfd"));
        }
        loop {
            match self.uffd.read_event() {
                Ok(Some(Event::Pagefault { address, .. })) => self.waiting.push(self.page_at(address)),
                Ok(Some(Event::Remove(range))) => {
                    if let Some(both) = self.range.intersect(&range) {
                        self.removed.set(Run::new(self.page_at(both.start), both.pages() as u32));
                    }
                }
                Ok(Some(_)) => {}
                Ok(None) => return,
                Err(error) => end(format_args!("its events: {error}")),
            }
        }
    }

    fn page_at(&self, address: usize) -> PageNo {
        PageNo(((address - self.range.start) / PAGE_SIZE) as u32)
    }

    fn load(&mut self, file: &Descriptor<File>, run: Run, zeros: Zeros) {
        let mut buffer = [0; AT_ONCE * PAGE_SIZE];
        let buffer = &mut buffer[..run.len as usize * PAGE_SIZE];
        let base = self.base;
        let place = |page: PageNo| base + (page.index() * PAGE_SIZE) as u64;
        let is_whole = file.read_exact_at(buffer, place(run.page)).is_ok();
        for (page, bytes) in run.pages().zip(buffer.chunks_exact_mut(PAGE_SIZE)) {
            let read = if is_whole { Ok(()) } else { file.read_exact_at(bytes, place(page)) };
            // The program may have given its number to another file.
            if !file.is_intact() {
                end(format_args!("the program has closed its file"));
            }
            match read {
                Ok(()) => self.fill(page, bytes, zeros),
                Err(error) => self.poison(page, &error),
            }
        }
    }

    fn fill(&mut self, page: PageNo, bytes: &[u8], zeros: Zeros) {
        self.until_done(page, |loader, place| {
            let is_zero = bytes == ZEROS || loader.removed.any(Run::one(page));
            if is_zero && zeros == Zeros::LeaveOut {
                return Ok(());
            }
            // SAFETY: the place has no page, and threads that touch it wait: none has seen zeros
            // there. The agent has no reference into that memory.
            unsafe { loader.uffd.copy(place, if is_zero { &ZEROS } else { bytes }) }.map(drop)
        });
    }

    /// Has readers of a page end with SIGBUS.
    fn poison(&mut self, page: PageNo, why: &std::io::Error) {
        log::line(format_args!("page {} of the snapshot cannot be read: {why}", page.0));
        self.until_done(page, |loader, place| {
            if loader.removed.any(Run::one(page)) {
                return Ok(());
            }
            // SAFETY: what the page held is lost.
            unsafe { loader.uffd.poison(place) }
        });
    }

    /// Tries something until it is done. The program may give the page back while the kernel
    /// refuses.
    fn until_done(&mut self, page: PageNo, step: impl Fn(&Self, usize) -> Result<(), Errno>) {
        for _ in 0..TRIES {
            match step(self, self.bytes(page).start) {
                // It is there, or the program has unmapped it.
                Ok(()) | Err(Errno::EXIST | Errno::NOENT | Errno::SRCH) => return,
                // A thread that gives memory back is about to go on; or there is no free memory.
                Err(Errno::AGAIN | Errno::NOMEM) => {
                    thread::sleep(PAUSE);
                    self.read_events();
                }
                Err(error) => end(format_args!("page {}: {error}", page.0)),
            }
        }
        end(format_args!("page {} cannot be filled", page.0));
    }
}

#[cfg(test)]
mod tests {
    use kmem::{mm, raw};

    use super::*;

    const PAGES: usize = 300;

    /// Memory that is registered, and a file: page 3 is zeros, and the last pages are missing.
    fn prepare() -> (Loader, Descriptor<File>, File) {
        let mut file = tempfile::tempfile().unwrap();
        for page in 0..PAGES - 4 {
            file.write_all(&[if page == 3 { 0 } else { page as u8 | 1 }; PAGE_SIZE]).unwrap();
        }
        let start = mm::map_anonymous(PAGES * PAGE_SIZE).unwrap();
        let loader = Loader::new(Range::new(start, PAGES * PAGE_SIZE), 0).unwrap();
        let memory = File::options().read(true).write(true).open("/proc/self/mem").unwrap();
        (loader, Descriptor::new(file).unwrap(), memory)
    }

    #[test]
    fn memory_is_loaded_while_it_is_used_and_what_is_given_back_stays_zeros() {
        let (mut loader, file, memory) = prepare();
        let range = loader.range;
        let place = |page: usize| (range.start + page * PAGE_SIZE) as u64;
        thread::scope(|scope| {
            // It waits until the loader has read that, and so does the reader of page 200.
            let discards = scope.spawn(|| {
                // SAFETY: the memory is the test's.
                unsafe {
                    raw::madvise(place(100) as usize, 2 * PAGE_SIZE, libc::MADV_DONTNEED).unwrap();
                    (place(101) as *mut [u8; 10]).write([9; 10]);
                }
            });
            // SAFETY: as above, and the page is mapped.
            let reads = scope.spawn(|| unsafe { (place(200) as *const u8).read_volatile() });
            thread::sleep(Duration::from_millis(50));
            assert!(!discards.is_finished() && !reads.is_finished());
            loader.run(&file);
            assert_eq!(reads.join().unwrap(), 200 | 1);
            discards.join().unwrap();
        });
        let mut page = [1; PAGE_SIZE];
        for number in 0..PAGES - 4 {
            memory.read_exact_at(&mut page, place(number)).unwrap();
            let (mut want, is_zero) = ([number as u8 | 1; PAGE_SIZE], number == 3 || (100..102).contains(&number));
            if is_zero {
                want = ZEROS;
            }
            if number == 101 {
                want[..10].fill(9);
            }
            assert!(page == want, "page {number}: {}", page[0]);
        }
        // What cannot be read is an error and no other bytes.
        for number in PAGES - 4..PAGES {
            assert!(memory.read_exact_at(&mut page, place(number)).is_err(), "page {number}");
        }
    }
}
