use std::io::Write;
use std::os::fd::AsRawFd;
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use kmem::PAGE_SIZE;

use super::*;
use crate::intercept::probe::probe_file;

const PAGES: usize = 500;
/// There is one loader in a process.
static ONE: Mutex<()> = Mutex::new(());

/// A file's private mapping, of which every third page is written, and what it holds.
fn mapped() -> (Range, Vec<u8>) {
    let mut file = tempfile::tempfile().unwrap();
    let mut bytes: Vec<u8> =
        (0..PAGES).flat_map(|page| [if page % 7 == 0 { 0 } else { page as u8 | 1 }; PAGE_SIZE]).collect();
    file.write_all(&bytes).unwrap();
    let (len, protection) = (PAGES * PAGE_SIZE, libc::PROT_READ | libc::PROT_WRITE);
    // SAFETY: a new mapping replaces nothing, and the writes are within it.
    let start = unsafe { raw::mmap(0, len, protection, libc::MAP_PRIVATE, file.as_raw_fd(), 0) }.unwrap();
    for page in (0..PAGES).step_by(3) {
        // SAFETY: the page lies in the mapping, which can be written.
        unsafe { ((start + page * PAGE_SIZE + 7) as *mut u8).write_volatile(0xee) };
        bytes[page * PAGE_SIZE + 7] = 0xee;
    }
    (Range::new(start, len), bytes)
}

/// What the program sees. Pages that are not there yet are waited for.
fn bytes_of(range: Range) -> Vec<u8> {
    // SAFETY: the range is mapped, and nobody writes there meanwhile.
    unsafe { std::slice::from_raw_parts(range.start as *const u8, range.len) }.to_vec()
}

#[test]
fn memory_of_its_own_holds_what_the_mapping_held_and_its_later_writes() {
    let _one = ONE.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
    let (range, mut bytes) = mapped();
    let sticky = probe_file(range).unwrap();
    // SAFETY: only this test knows the mapping.
    unsafe { replace(range, Sticky { dont_fork: true, ..sticky }) }.unwrap();
    // Before all is there: what is written stays, and what is read is right.
    for page in [1, 3, 499, 250] {
        // SAFETY: the page lies in the memory that took the mapping's place, and can be read.
        let read = unsafe { ((range.start + page * PAGE_SIZE) as *const u8).read_volatile() };
        assert_eq!(read, bytes[page * PAGE_SIZE], "page {page}");
        // SAFETY: the same page can be written.
        unsafe { ((range.start + page * PAGE_SIZE + 9) as *mut u8).write_volatile(0xdd) };
        bytes[page * PAGE_SIZE + 9] = 0xdd;
    }
    assert!(bytes_of(range) == bytes);
    let begin = Instant::now();
    while mark::is_loading(range) {
        assert!(begin.elapsed() < Duration::from_secs(60), "the loader does not end");
        std::thread::sleep(Duration::from_millis(1));
    }
    assert!(bytes_of(range) == bytes);
    assert!(probe_file(range).is_err(), "it is no file's any more");
}

#[test]
fn a_mapping_that_cannot_be_replaced_stays_as_it_was() {
    let _one = ONE.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
    let (range, bytes) = mapped();
    let sticky = probe_file(range).unwrap();
    // No userfaultfd, when it has been moved already.
    let refused = || {
        kmem::seccomp::answer(libc::SYS_ioctl, None, libc::EPERM)?;
        // SAFETY: only this test knows the mapping.
        Ok::<_, std::io::Error>(unsafe { replace(range, sticky) }.unwrap_err())
    };
    match std::thread::scope(|scope| scope.spawn(refused).join()).unwrap() {
        Ok(error) => assert!(matches!(error, ReplaceError::Load(_)), "{error}"),
        Err(error) => return println!("SKIPPED: no system call can be refused: {error}"),
    }
    assert!(bytes_of(range) == bytes && !mark::is_loading(range));
    assert!(probe_file(range).is_ok(), "it is the file's still");
    // Of two mappings the kernel might move one only.
    let advised = range.start + range.len / PAGE_SIZE / 2 * PAGE_SIZE;
    // SAFETY: the advice leaves the memory as it is.
    unsafe { raw::madvise(advised, range.end() - advised, libc::MADV_RANDOM) }.unwrap();
    assert!(probe_file(range).is_err(), "two mappings");
}

#[test]
fn no_other_thread_gets_memory_in_its_place() {
    let _one = ONE.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
    let ends = AtomicBool::new(false);
    // As the C library does for a thread's arena.
    let map = || {
        while !ends.load(Ordering::Relaxed) {
            let own = Range::new(mm::map_anonymous(PAGES * PAGE_SIZE).unwrap(), PAGES * PAGE_SIZE);
            let last = own.end() - 1;
            // SAFETY: mapped just now, and known to this thread alone.
            unsafe {
                [own.start, last].iter().for_each(|place| (*place as *mut u8).write_volatile(7));
                std::thread::yield_now();
                let read = [own.start, last].map(|place| (place as *const u8).read_volatile());
                assert_eq!(read, [7, 7]);
                mm::unmap(own).unwrap();
            }
        }
    };
    std::thread::scope(|scope| {
        (0..3).for_each(|_| drop(scope.spawn(map)));
        for _ in 0..100 {
            let (range, bytes) = mapped();
            let sticky = probe_file(range).unwrap();
            // SAFETY: only this thread knows the mapping.
            unsafe { replace(range, sticky) }.unwrap();
            assert!(bytes_of(range) == bytes);
            while mark::is_loading(range) {
                std::thread::yield_now();
            }
            // SAFETY: only this thread knows the memory.
            unsafe { mm::unmap(range) }.unwrap();
        }
        ends.store(true, Ordering::Relaxed);
    });
}
