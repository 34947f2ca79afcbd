//! The program: maps memory, marks it, and does with it what it is told.

use super::{PAGE, PATTERNS, descriptors, forks, limits, pattern, pattern_of, places, threads};
use std::io::{BufRead, Write};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread::JoinHandle;

/// The role's name in the environment.
pub const ROLE: &str = "PAGEONE_TEST_CLIENT";

/// Runs the program if this process has its role; returns whether it had.
pub fn run_if_asked() -> bool {
    if std::env::var_os(ROLE).is_none() {
        return false;
    }
    // A program that hangs shall fail its test.
    // SAFETY: takes a number; the signal ends the process.
    unsafe { libc::alarm(120) };
    let mut client = Client::default();
    for line in std::io::stdin().lock().lines() {
        let line = line.unwrap();
        let words: Vec<&str> = line.split(' ').collect();
        let answer = client
            .obey(words[0], &words[1..].iter().map(|word| word.parse::<isize>().unwrap() as usize).collect::<Vec<_>>());
        println!("> {answer}");
        std::io::stdout().flush().unwrap();
    }
    true
}

#[derive(Default)]
struct Client {
    start: usize,
    pages: usize,
    writers: Vec<JoinHandle<u64>>,
    readers: Vec<JoinHandle<isize>>,
}

static STOP: AtomicBool = AtomicBool::new(false);
/// Makes the agent's own mappings of segments unreadable.
fn hide_frames() -> String {
    let maps = std::fs::read_to_string("/proc/self/maps").unwrap();
    let is_segment = |line: &&str| line.contains("r--s") && line.contains("memfd:pageone-test");
    let results = maps.lines().filter(is_segment).map(|line| {
        let (start, end) = line.split(' ').next().unwrap().split_once('-').unwrap();
        let [start, end] = [start, end].map(|text| usize::from_str_radix(text, 16).unwrap());
        // SAFETY: nothing but the agent reads these mappings, and asks the kernel before.
        unsafe { libc::syscall(libc::SYS_mprotect, start, end - start, libc::PROT_NONE) as i32 }
    });
    code(results.max().expect("there is a segment"))
}

/// What each page's last word must be.
static COUNTS: std::sync::OnceLock<Vec<AtomicU64>> = std::sync::OnceLock::new();

impl Client {
    fn at(&self, page: usize) -> *mut u8 {
        self.start.wrapping_add(page.wrapping_mul(PAGE)) as *mut u8
    }

    fn words(&self, page: usize) -> *mut u64 {
        self.at(page).cast()
    }

    fn bytes(&self, page: usize) -> Vec<u64> {
        // SAFETY: reads a mapped page.
        (0..PAGE / 8).map(|i| unsafe { self.words(page).add(i).read_volatile() }).collect()
    }

    /// A `mremap` onto pages that fails after the kernel has unmapped them: the old place is to
    /// stay mapped, and the address space may not grow. Returns 0 if it fails like that.
    fn fail_to_move_onto(&self, page: usize, len: usize) -> i32 {
        let flags = libc::MREMAP_MAYMOVE | libc::MREMAP_FIXED | libc::MREMAP_DONTUNMAP;
        let statm = std::fs::read_to_string("/proc/self/statm").unwrap();
        let size = statm.split(' ').next().unwrap().parse::<u64>().unwrap() * PAGE as u64;
        // SAFETY: this client's own mappings; no reference into them is held. The limit changes no
        // memory.
        unsafe {
            let other = libc::mmap(std::ptr::null_mut(), len, 3, libc::MAP_PRIVATE | libc::MAP_ANONYMOUS, -1, 0);
            let mut before: libc::rlimit = std::mem::zeroed();
            libc::getrlimit(libc::RLIMIT_AS, &mut before);
            let less = libc::rlimit { rlim_cur: size - len as u64, ..before };
            libc::setrlimit(libc::RLIMIT_AS, &less);
            let place = libc::mremap(other, len, len, flags, self.at(page).cast::<libc::c_void>());
            let errno = std::io::Error::last_os_error().raw_os_error();
            libc::setrlimit(libc::RLIMIT_AS, &before);
            i32::from(place != libc::MAP_FAILED || errno != Some(libc::ENOMEM))
        }
    }

    fn obey(&mut self, command: &str, args: &[usize]) -> String {
        let arg = |i: usize| args[i];
        if let Some(result) = self.call(command, args) {
            return code(result);
        }
        match command {
            "map" => self.map(arg(0)),
            "fresh" => {
                let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_FIXED;
                // SAFETY: this client's own mapping; no reference into it is held.
                let place = unsafe { libc::mmap(self.at(arg(0)).cast(), arg(1) * PAGE, 3, flags, -1, 0) };
                code(if place == libc::MAP_FAILED { -1 } else { 0 })
            }
            "move" => {
                // SAFETY: this client's own mapping; no reference into it is held.
                let place =
                    unsafe { libc::mremap(self.at(arg(0)).cast(), arg(1) * PAGE, arg(2) * PAGE, arg(3) as i32) };
                if place == libc::MAP_FAILED {
                    code(-1)
                } else {
                    format!("{}", (place as isize - self.start as isize) / PAGE as isize)
                }
            }
            "move-onto" => code(self.fail_to_move_onto(arg(0), arg(1) * PAGE)),
            "raw-move" => {
                let len = arg(1) * PAGE;
                let flags = libc::MREMAP_MAYMOVE | libc::MREMAP_FIXED;
                let reserved = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE;
                // SAFETY: this client's own mappings; no reference into them is held.
                let place = unsafe {
                    let place = libc::mmap(std::ptr::null_mut(), len, 0, reserved, -1, 0);
                    libc::syscall(libc::SYS_mremap, self.at(arg(0)), len, len, flags, place)
                };
                if place == -1 {
                    code(-1)
                } else {
                    format!("{}", (place as isize - self.start as isize) / PAGE as isize)
                }
            }
            "leave" => {
                let flags = libc::MREMAP_MAYMOVE | libc::MREMAP_DONTUNMAP;
                let (place, none) = (self.at(arg(0)).cast(), std::ptr::null_mut::<u8>());
                // SAFETY: this client's own mapping; no reference into it is held.
                code(match unsafe { libc::mremap(place, PAGE, PAGE, flags, none) } {
                    libc::MAP_FAILED => -1,
                    _ => 0,
                })
            }
            "start" => self.start.to_string(),
            "write" => {
                // SAFETY: this client's own mapping; no reference into it is held.
                unsafe { self.words(arg(0)).add(PAGE / 8 - 1).write_volatile(arg(1) as u64) };
                "0".into()
            }
            // SAFETY: this client's own mapping; no reference into it is held.
            "word" => unsafe { self.words(arg(0)).add(PAGE / 8 - 1).read_volatile() }.to_string(),
            "discard-each" => {
                // Every other page, so that nothing can be told together.
                let failed = (arg(0)..arg(0) + arg(1)).step_by(2).find(|&page| {
                    // SAFETY: this client's own mapping; no reference into it is held.
                    unsafe { libc::madvise(self.at(page).cast(), PAGE, libc::MADV_DONTNEED) != 0 }
                });
                format!("{failed:?}")
            }
            "check" => self.check(arg(0), arg(1)),
            "zeros" => {
                let bad = (0..arg(1))
                    .map(|i| arg(0).wrapping_add(i))
                    .filter(|&page| self.bytes(page).iter().any(|&word| word != 0))
                    .count();
                format!("{bad}")
            }
            "start-writers" => self.start_writers(),
            "stop-writers" => self.stop_writers(),
            "files" => self.files_mapped(),
            "hide-frames" => hide_frames(),
            "fork" => self.fork(),
            "forks" => forks::many(arg(0)),
            "fork-raw" => forks::then(forks::raw, || self.check_in_child(false)),
            "fork-handlerless" => forks::then(forks::without_handlers, || self.check_in_child(true)),
            "fork-raw-twice" => forks::twice(|| {
                // SAFETY: the child's own memory.
                (0..self.pages).for_each(|page| unsafe { self.words(page).add(PAGE / 8 - 1).write_volatile(0) });
                self.check(0, self.pages).parse().unwrap()
            }),
            "fork-cloned" => forks::cloned(|| self.check_in_child(false)),
            "close-all" => descriptors::close_all(arg(0)),
            "replace" => descriptors::replace(arg(0)),
            "own-files" => descriptors::own_files(),
            "limit" => limits::limit(arg(0), arg(1)),
            "refuse" => limits::refuse(arg(0)),
            "confine" => places::confine(arg(0)),
            "become" => places::become_user(arg(0)),
            "become-capable" => places::become_capable_user(arg(0)),
            "chroot" => places::change_root(),
            "end-first-thread" => places::end_first_thread(),
            "tracer" => places::choose_tracer(arg(0)),
            "tracers" => places::tracers(),
            "watch-tracers" => places::watch_tracers(),
            "ksm-all" => limits::ksm_all(arg(0)),
            "ksm-has" => limits::mergeable_by_kernel(self.start, self.pages * PAGE),
            "mark-malloc" => limits::mark_malloc(),
            "fork-raw-here" => forks::then(forks::raw, || self.check(arg(0), arg(1)).parse().unwrap()),
            "allocator" => forks::start_allocator(),
            "deadline" => {
                // SAFETY: takes a number; the signal ends the process.
                unsafe { libc::alarm(arg(0) as u32) };
                "0".into()
            }
            "share" => self.share_pool(),
            "leave-process" => threads::leave_process(self.at(arg(0)) as usize, arg(1)),
            "vfork" => threads::vfork(self.at(arg(0)), arg(1) * PAGE),
            "spawn" => threads::spawn(),
            "forking-handlers" => threads::register_forking_handlers(),
            "wrong" => threads::wrong(),
            "storm" => threads::storm(self.at(arg(0)), arg(1)),
            "parked" => threads::parked(self.at(arg(0))),
            "exiting" => threads::exiting(self.at(arg(0)), arg(1), arg(2)),
            "drop-ptrace" => forks::drop_ptrace(),
            "fork-full" => self.fork_without_descriptors(),
            "mappings" => make_mappings(arg(0)),
            "read" => self.read(arg(0)),
            "map-dma" => self.map_for_device(),
            "read-done" => self.readers.pop().unwrap().join().unwrap().to_string(),
            "bytes" => format!("{:x}", self.bytes(arg(0)).iter().fold(0, |or, word| or | word)),
            "pin" => pin(self.at(arg(0)), arg(1) * PAGE),
            "threads" => std::fs::read_dir("/proc/self/task").unwrap().count().to_string(),
            _ => panic!("{command}"),
        }
    }

    /// Commands that are one system call.
    fn call(&self, command: &str, args: &[usize]) -> Option<i32> {
        let (start, len) = match args {
            [] => (self.at(0), self.pages * PAGE),
            [page] => (self.at(*page), PAGE),
            [page, pages, ..] => (self.at(*page), pages.wrapping_mul(PAGE)),
        };
        let extra = || args[2] as i32;
        // SAFETY: the program's own memory, which it uses as raw pointers only.
        Some(unsafe {
            match command {
                "mark" => libc::madvise(start.cast(), len, libc::MADV_MERGEABLE),
                "advise" => libc::madvise(start.cast(), len, extra()),
                "advise-process" => advise_process(start.cast(), len, extra()),
                "unmap" => libc::munmap(start.cast(), len),
                "raw-unmap" => libc::syscall(libc::SYS_munmap, start, len) as i32,
                "protect" => libc::mprotect(start.cast(), len, extra()),
                "raw-protect" => libc::syscall(libc::SYS_mprotect, start, len, extra()) as i32,
                "raw-lock" => libc::syscall(libc::SYS_mlock, start, len) as i32,
                "lock" => libc::mlock(start.cast(), len),
                "unlock" => libc::munlock(start.cast(), len),
                _ => return None,
            }
        })
    }

    fn map(&mut self, pages: usize) -> String {
        let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS;
        // SAFETY: new memory.
        let place = unsafe { libc::mmap(std::ptr::null_mut(), pages * PAGE, 3, flags, -1, 0) };
        assert_ne!(place, libc::MAP_FAILED);
        (self.start, self.pages) = (place as usize, pages);
        // SAFETY: this client's own mapping; no reference into it is held.
        unsafe { libc::madvise(place, pages * PAGE, libc::MADV_NOHUGEPAGE) };
        let patterns: Vec<_> = (0..PATTERNS).map(pattern).collect();
        for page in 0..pages {
            let words = &patterns[pattern_of(page) as usize];
            // SAFETY: within the new memory.
            unsafe { std::ptr::copy_nonoverlapping(words.as_ptr(), self.words(page), PAGE / 8) };
        }
        format!("{}", self.start)
    }

    /// Starts reading the file that the environment names into a page.
    fn read(&mut self, page: usize) -> String {
        let path = std::env::var("PAGEONE_TEST_FILE").unwrap();
        let place = self.at(page) as usize;
        self.readers.push(std::thread::spawn(move || {
            use std::os::fd::AsRawFd;
            let file = std::fs::File::open(path).unwrap();
            // SAFETY: the kernel writes to one page of the program's memory.
            unsafe { libc::read(file.as_raw_fd(), place as *mut _, PAGE) }
        }));
        "0".into()
    }

    /// Asks the file that the environment names to map memory for a device (`VFIO_IOMMU_MAP_DMA`).
    fn map_for_device(&mut self) -> String {
        let path = std::env::var("PAGEONE_TEST_FILE").unwrap();
        self.readers.push(std::thread::spawn(move || {
            use std::os::fd::AsRawFd;
            let file = std::fs::File::open(path).unwrap();
            // SAFETY: the file's server takes no argument and changes no memory.
            unsafe { libc::ioctl(file.as_raw_fd(), 0x3b71, 0) as isize }
        }));
        "0".into()
    }

    /// Gives the agent a pool for all of the memory.
    fn share_pool(&self) -> String {
        use rustix::fs::{MemfdFlags, SealFlags};
        use std::os::fd::AsRawFd;
        let len = ppr::Layout::for_frames(self.pages as u64).unwrap().pool_bytes();
        let fd = rustix::fs::memfd_create("pool", MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING).unwrap();
        rustix::fs::ftruncate(&fd, len as u64).unwrap();
        rustix::fs::fcntl_add_seals(&fd, SealFlags::SHRINK | SealFlags::GROW).unwrap();
        let map = kmem::memfd::map_shared(&fd, len).unwrap();
        let start = std::ptr::NonNull::new(map.as_ptr()).unwrap();
        // SAFETY: it stays mapped as long as the pool is used; the file cannot shrink.
        unsafe { ppr::Pool::from_mapping(start, map.len()) }.unwrap().initialise();
        // SAFETY: a symbol of the agent, with this signature; it takes a descriptor and memory of
        // this process, none of which the program marks.
        unsafe {
            let symbol = libc::dlsym(libc::RTLD_DEFAULT, c"pageone_ppr_share".as_ptr());
            let share: extern "C" fn(i32, *mut u8, usize) -> i32 = std::mem::transmute(symbol);
            share(fd.as_raw_fd(), self.at(0), self.pages * PAGE).to_string()
        }
    }

    /// How many pages are not what they must be.
    fn check(&self, from: usize, pages: usize) -> String {
        let counts = COUNTS.get();
        let bad = (from..from + pages).filter(|&page| {
            let mut wanted = pattern(pattern_of(page));
            wanted[PAGE / 8 - 1] = counts.map_or(0, |counts| counts[page].load(Ordering::SeqCst));
            self.bytes(page) != wanted
        });
        format!("{}", bad.count())
    }

    fn start_writers(&mut self) -> String {
        STOP.store(false, Ordering::SeqCst);
        let pages = self.pages;
        COUNTS.get_or_init(|| (0..pages).map(|_| AtomicU64::new(0)).collect());
        for parity in 0..2 {
            let words = self.words(0) as usize;
            self.writers.push(std::thread::spawn(move || write(words as *mut u64, pages, parity)));
        }
        "0".into()
    }

    fn stop_writers(&mut self) -> String {
        STOP.store(true, Ordering::SeqCst);
        let writes: u64 = self.writers.drain(..).map(|writer| writer.join().unwrap()).sum();
        format!("{writes}")
    }

    /// Pages of the memory that lie in mappings of files.
    fn files_mapped(&self) -> String {
        let maps = std::fs::read_to_string("/proc/self/maps").unwrap();
        let mut pages = 0;
        for line in maps.lines() {
            let fields: Vec<&str> = line.split_ascii_whitespace().collect();
            let (start, end) = fields[0].split_once('-').unwrap();
            let bound =
                |text: &str| usize::from_str_radix(text, 16).unwrap().clamp(self.start, self.start + self.pages * PAGE);
            if fields[4] != "0" {
                pages += (bound(end) - bound(start)) / PAGE;
            }
        }
        format!("{pages}")
    }

    /// Forks; the child checks everything, discards some and moves some. Answers how many things
    /// were wrong.
    fn fork(&self) -> String {
        // SAFETY: the child makes system calls, and uses the heap only after the C library's own
        // handlers put it in order.
        forks::then(|| unsafe { libc::fork() }, || self.check_in_child(true))
    }

    /// What a child finds wrong.
    fn check_in_child(&self, closed: bool) -> i32 {
        let mut wrong: i32 = self.check(0, self.pages).parse().unwrap();
        if closed {
            wrong += forks::inherited_descriptors();
        }
        // SAFETY: the child's own memory.
        unsafe {
            wrong += i32::from(libc::madvise(self.at(64).cast(), 64 * PAGE, libc::MADV_DONTNEED) != 0);
            wrong += i32::from(self.bytes(64).iter().chain(&self.bytes(127)).any(|&word| word != 0));
            wrong += i32::from(self.check(128, 64) != "0");
            let moved = libc::mremap(self.at(128).cast(), 64 * PAGE, 128 * PAGE, libc::MREMAP_MAYMOVE);
            // A child without tables cannot grow what consists of several mappings.
            if closed || moved != libc::MAP_FAILED {
                wrong += i32::from(moved == libc::MAP_FAILED);
                wrong += i32::from(*moved.cast::<[u64; 512]>() != pattern(pattern_of(128)));
            }
        }
        wrong
    }
}

/// Advice by `process_madvise(2)` through a pidfd of this process, on both halves of a range. The
/// answer is 0, or the error.
///
/// # Safety
///
/// The contract of madvise(2).
unsafe fn advise_process(start: *mut libc::c_void, len: usize, advice: i32) -> i32 {
    unsafe extern "C" {
        /// Not in the `libc` crate (process_madvise(2), glibc 2.36).
        fn process_madvise(pidfd: i32, ranges: *const libc::iovec, count: usize, advice: i32, flags: u32) -> isize;
    }
    let half = |from: usize, len| libc::iovec { iov_base: start.wrapping_byte_add(from), iov_len: len };
    let ranges = [half(0, len / 2), half(len / 2, len - len / 2)];
    // SAFETY: opens a descriptor; the ranges are a local list; the contract covers the advice.
    unsafe {
        let pidfd = libc::syscall(libc::SYS_pidfd_open, libc::getpid(), 0) as i32;
        let done = process_madvise(pidfd, ranges.as_ptr(), 2, advice, 0);
        let errno = *libc::__errno_location();
        libc::close(pidfd);
        if done == len as isize { 0 } else { errno }
    }
}

impl Client {
    /// Forks when no descriptor is free.
    fn fork_without_descriptors(&self) -> String {
        let mut taken: Vec<_> = std::iter::from_fn(|| std::fs::File::open("/dev/null").ok()).collect();
        // SAFETY: the child ends at once.
        match unsafe { libc::fork() } {
            // SAFETY: ends the child; no destructor runs.
            0 => unsafe { libc::_exit(0) },
            child => {
                taken.clear();
                // SAFETY: waits for the child made above.
                code(unsafe { libc::waitpid(child, std::ptr::null_mut(), 0) })
            }
        }
    }
}

pub(super) fn code(result: i32) -> String {
    if result == -1 { format!("{}", std::io::Error::last_os_error().raw_os_error().unwrap()) } else { "0".into() }
}

/// Writes to pages of one parity, each time checking that the last write is still there. Most
/// writes put back what a frame holds, so that pages come and go.
fn write(words: *mut u64, pages: usize, parity: usize) -> u64 {
    let counts = COUNTS.get().unwrap();
    let (mut seed, mut writes) = (parity as u64 * 77 + 1, 0);
    while !STOP.load(Ordering::Relaxed) {
        seed = seed.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
        let page = (seed >> 33) as usize % (pages / 2) * 2 + parity;
        let value = if writes % 4 == 0 { writes + 1 } else { 0 };
        // SAFETY: the last word of a page that only this thread writes.
        unsafe {
            let word = words.add(page * (PAGE / 8) + PAGE / 8 - 1);
            assert_eq!(word.read_volatile(), counts[page].load(Ordering::Relaxed), "a write to page {page} was lost");
            counts[page].store(value, Ordering::Relaxed);
            word.write_volatile(value);
            assert_eq!(word.read_volatile(), value, "a write to page {page} was lost at once");
        }
        writes += 1;
        if writes % 64 == 0 {
            std::thread::sleep(std::time::Duration::from_micros(50));
        }
    }
    writes
}

/// Makes that many mappings more.
fn make_mappings(count: usize) -> String {
    let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE;
    // SAFETY: new memory, cut into mappings by protecting every other page.
    unsafe {
        let place = libc::mmap(std::ptr::null_mut(), count * PAGE, 3, flags, -1, 0);
        for page in (0..count).step_by(2) {
            if libc::mprotect(place.byte_add(page * PAGE), PAGE, libc::PROT_READ) != 0 {
                return code(-1);
            }
        }
    }
    "0".into()
}

/// Registers memory with io_uring, which pins it (`io_uring_register(2)`).
fn pin(start: *mut u8, len: usize) -> String {
    let mut params = [0u8; 120];
    let buffer = libc::iovec { iov_base: start.cast(), iov_len: len };
    // SAFETY: io_uring_setup takes a zeroed io_uring_params of 120 bytes; IORING_REGISTER_BUFFERS
    // (0) an array of iovecs.
    unsafe {
        let ring = libc::syscall(libc::SYS_io_uring_setup, 2, params.as_mut_ptr());
        if ring < 0 {
            return code(-1);
        }
        code(libc::syscall(libc::SYS_io_uring_register, ring, 0, &raw const buffer, 1) as i32)
    }
}
