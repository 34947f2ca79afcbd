//! What programs do with their memory by system calls, and with signals.

use std::sync::atomic::{AtomicU64, Ordering::*};
use std::time::Duration;

use crate::region::{PAGE, Region};
use crate::{check, hear, say, verdict, wait_go};

/// Discards merged pages in every way there is: zeros must come back, never a frame's bytes.
pub(crate) fn dontneed() {
    let region = Region::new(4096, true);
    let seed = |page: usize| 1 + (page % 512) as u64;
    (0..region.pages).for_each(|page| region.fill(page, seed(page)));
    wait_go();
    let mut problems = Vec::new();
    // One range over many runs, then page by page as a balloon does.
    assert_eq!(region.advise(100..1100, libc::MADV_DONTNEED), Ok(()));
    check(&mut problems, "zeros after DONTNEED", region.nonzero(100..1100));
    for page in 1200..1300 {
        assert_eq!(region.advise(page..page + 1, libc::MADV_DONTNEED), Ok(()));
    }
    check(&mut problems, "zeros after DONTNEED page by page", region.nonzero(1200..1300));
    assert_eq!(region.advise(1400..1500, libc::MADV_FREE), Ok(()));
    let freed = (1400..1500).filter(|&p| region.nonzero(p..p + 1) > 0 && region.wrong(p..p + 1, seed) > 0).count();
    check(&mut problems, "zeros or the old content after FREE", freed);
    if region.advise(1600..1700, libc::MADV_REMOVE) != Err(libc::EINVAL) {
        problems.push("MADV_REMOVE does not fail as on anonymous memory".into());
    }
    check(&mut problems, "untouched", region.wrong(0..100, seed) + region.wrong(1500..region.pages, seed));
    // Filled anew they may merge again, and be discarded again.
    (100..1100).for_each(|page| region.fill(page, seed(page)));
    verdict(&problems);
    while hear().is_some() {
        let mut problems = Vec::new();
        check(&mut problems, "filled anew", region.wrong(100..1100, seed));
        assert_eq!(region.advise(100..1100, libc::MADV_DONTNEED), Ok(()));
        check(&mut problems, "zeros the second time", region.nonzero(100..1100));
        (100..1100).for_each(|page| region.fill(page, seed(page)));
        verdict(&problems);
    }
    std::process::exit(0);
}

/// Forks with merged memory. The parent rewrites all of its own and ends; the child, which outlives
/// it, checks.
pub(crate) fn fork() {
    let region = Region::new(4096, false);
    let seed = |page: usize| 77_000_000 + (page % 1024) as u64;
    (0..region.pages).for_each(|page| region.fill(page, seed(page)));
    wait_go();
    // SAFETY: the process has no other thread of its own that holds a lock; the child only reads,
    // prints and exits.
    match unsafe { libc::fork() } {
        0 => {
            // The child has not touched its memory yet. `go` comes when the store has been reused.
            say("child");
            hear();
            let mut problems = Vec::new();
            check(&mut problems, "the child's copy", region.wrong(0..region.pages, seed));
            assert_eq!(region.advise(0..16, libc::MADV_DONTNEED), Ok(()));
            check(&mut problems, "the child's zeros", region.nonzero(0..16));
            verdict(&problems);
            std::process::exit(0);
        }
        child => {
            assert!(child > 0);
            (0..region.pages).for_each(|page| region.fill(page, 99_000_000 + page as u64));
            // Without running exit handlers: as a crash would.
            // SAFETY: ends the process.
            unsafe { libc::_exit(0) }
        }
    }
}

/// Unmaps, moves, protects parts of a merged region.
pub(crate) fn mappings() {
    let region = Region::new(4096, true);
    let seed = |page: usize| 1 + (page % 512) as u64;
    (0..region.pages).for_each(|page| region.fill(page, seed(page)));
    wait_go();
    let mut problems = Vec::new();
    // SAFETY: parts of our own mapping; after each call only what is still mapped is touched.
    unsafe {
        assert_eq!(libc::munmap(region.address(512), 256 * PAGE), 0);
        let again = libc::mmap(
            region.address(512),
            256 * PAGE,
            libc::PROT_READ | libc::PROT_WRITE,
            libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_FIXED,
            -1,
            0,
        );
        assert_eq!(again, region.address(512));
        check(&mut problems, "mapped anew", region.nonzero(512..768));
        (512..768).for_each(|page| region.fill(page, 5_000_000 + page as u64));

        let moved = libc::mremap(region.address(1024), 300 * PAGE, 600 * PAGE, libc::MREMAP_MAYMOVE);
        if moved == libc::MAP_FAILED {
            problems.push(format!("mremap: {}", std::io::Error::last_os_error()));
        } else {
            let other = Region { start: moved.cast(), pages: 600 };
            check(&mut problems, "moved", other.wrong(0..300, |page| seed(1024 + page)));
            check(&mut problems, "grown", other.nonzero(300..600));
        }
        assert_eq!(libc::mprotect(region.address(2048), 128 * PAGE, libc::PROT_READ), 0);
    }
    check(&mut problems, "protected", region.wrong(2048..2176, seed));
    check(&mut problems, "the rest", region.wrong(0..512, seed) + region.wrong(2176..region.pages, seed));
    verdict(&problems);
    // Told again: after some periods everything is still so, and the protection holds.
    while hear().is_some() {
        let mut problems = Vec::new();
        check(&mut problems, "protected", region.wrong(2048..2176, seed));
        check(&mut problems, "refilled", region.wrong(512..768, |page| 5_000_000 + page as u64));
        check(&mut problems, "the rest", region.wrong(0..512, seed) + region.wrong(2176..region.pages, seed));
        let mut protected = false;
        kmem::procfs::for_each_map(None, |map| {
            let page = region.address(2100) as usize;
            protected |= map.range.start <= page && page < map.range.end() && !map.perms.write;
        })
        .unwrap();
        if !protected {
            problems.push("the protection is gone".into());
        }
        verdict(&problems);
    }
    std::process::exit(0);
}

static HANDLED_BY: AtomicU64 = AtomicU64::new(0);

extern "C" fn on_signal(_: libc::c_int) {
    // SAFETY: gettid has no preconditions and may be called from a handler.
    HANDLED_BY.store(unsafe { libc::gettid() } as u64, Relaxed);
}

/// A signal to the process waits for the program's own thread; the agent's threads take none.
pub(crate) fn signals() {
    let region = Region::new(1024, true);
    (0..region.pages).for_each(|page| region.fill(page, 1 + (page % 64) as u64));
    wait_go();
    let mut problems = Vec::new();
    // SAFETY: plain signal handling; every structure is initialised by the calls that are meant for
    // it.
    unsafe {
        let mut action: libc::sigaction = std::mem::zeroed();
        action.sa_sigaction = on_signal as extern "C" fn(libc::c_int) as usize;
        libc::sigaction(libc::SIGUSR1, &action, std::ptr::null_mut());
        let mut set: libc::sigset_t = std::mem::zeroed();
        libc::sigemptyset(&mut set);
        libc::sigaddset(&mut set, libc::SIGUSR1);
        libc::pthread_sigmask(libc::SIG_BLOCK, &set, std::ptr::null_mut());
        libc::kill(libc::getpid(), libc::SIGUSR1);
        std::thread::sleep(Duration::from_millis(300));
        if HANDLED_BY.load(Relaxed) != 0 {
            problems.push("another thread took the signal".into());
        }
        libc::pthread_sigmask(libc::SIG_UNBLOCK, &set, std::ptr::null_mut());
        if HANDLED_BY.load(Relaxed) != libc::gettid() as u64 {
            problems.push("the program's thread did not get the signal".into());
        }
    }
    verdict(&problems);
}

/// Locks one page.
pub(crate) fn locked() {
    let region = Region::new(1024, true);
    let other = [0u8; 64];
    // Before there is anything to merge.
    // SAFETY: a readable range.
    assert_eq!(unsafe { libc::mlock(other.as_ptr().cast(), 1) }, 0, "{}", std::io::Error::last_os_error());
    (0..region.pages).for_each(|page| region.fill(page, 1 + (page % 64) as u64));
    wait_go();
    let mut problems = Vec::new();
    check(&mut problems, "locked", region.wrong(0..region.pages, |page| 1 + (page % 64) as u64));
    verdict(&problems);
}

/// Registers part of the region as an io_uring buffer, which pins it; the kernel then writes
/// through the pin.
pub(crate) fn pinned() {
    let region = Region::new(4096, true);
    let seed = |page: usize| 1 + (page % 512) as u64;
    // Before there is anything to merge.
    // SAFETY: io_uring_setup(2) writes 120 bytes of parameters; io_uring_register(2), opcode 0,
    // reads one iovec.
    unsafe {
        let mut params = [0u64; 15];
        let ring = libc::syscall(libc::SYS_io_uring_setup, 4, params.as_mut_ptr());
        if ring < 0 {
            say("SKIPPED");
            return;
        }
        let buffer = libc::iovec { iov_base: region.address(0), iov_len: 64 * PAGE };
        if libc::syscall(libc::SYS_io_uring_register, ring, 0, &buffer, 1) < 0 {
            say("SKIPPED");
            return;
        }
    }
    (0..region.pages).for_each(|page| region.fill(page, seed(page)));
    wait_go();
    let mut problems = Vec::new();
    check(&mut problems, "pinned", region.wrong(0..region.pages, seed));
    verdict(&problems);
}

/// What was advised for the region holds for the merged memory too: children do not inherit it.
pub(crate) fn advice() {
    let region = Region::new(1024, true);
    (0..region.pages).for_each(|page| region.fill(page, 1 + (page % 64) as u64));
    wait_go();
    let mut problems = Vec::new();
    let mut inherited = 0;
    let range = kmem::range::Range::new(region.address(0) as usize, region.pages * PAGE);
    let text = std::fs::read_to_string("/proc/self/smaps").unwrap();
    let mut inside = false;
    for line in text.lines() {
        let mut words = line.split_whitespace();
        let first = words.next().unwrap_or("");
        if let Some((start, _)) = first.split_once('-')
            && let Ok(start) = usize::from_str_radix(start, 16)
        {
            inside = start >= range.start && start < range.end();
        }
        if inside && first == "VmFlags:" && !words.any(|flag| flag == "dc") {
            inherited += 1;
        }
    }
    check(&mut problems, "inherited mappings", inherited);
    verdict(&problems);
}

/// Guards pages that are merged, and pages that left management with their copies in place: they
/// read as zeros afterwards. Where the kernel knows no guard pages, all bytes stay.
pub(crate) fn guards() {
    const GUARD_INSTALL: i32 = 102;
    const GUARD_REMOVE: i32 = 103;
    let region = Region::new(1024, true);
    let mut seeds: Vec<u64> = (0..region.pages as u64).map(|page| 1 + page % 64).collect();
    seeds.iter().enumerate().for_each(|(page, &seed)| region.fill(page, seed));
    wait_go();
    (100..200).for_each(|page| region.fill(page, 1000 + page as u64));
    seeds.splice(100..200, 1100..1200);
    // What was written lately stays where it is, and is managed no more.
    for protection in [libc::PROT_READ, libc::PROT_READ | libc::PROT_WRITE] {
        // SAFETY: the scenario's own pages; nothing writes to them meanwhile.
        assert_eq!(unsafe { libc::mprotect(region.address(100), 100 * PAGE, protection) }, 0);
    }
    let answer = region.advise(50..250, GUARD_INSTALL);
    if answer == Ok(()) {
        assert_eq!(region.advise(50..250, GUARD_REMOVE), Ok(()));
        seeds[50..250].fill(0);
    }
    let mut problems = Vec::new();
    if !matches!(answer, Ok(()) | Err(libc::EINVAL)) {
        problems.push(format!("guards are refused: {answer:?}"));
    }
    check(&mut problems, "guarded", region.wrong(0..region.pages, |page| seeds[page]));
    verdict(&problems);
}

/// `spliced PAGES BASE`: each content twice. At `splice` all pages go into two pipes, as references
/// and not as copies; it says the numbers of the ends to read from. At `unmap` its memory goes.
pub(crate) fn spliced(pages: usize, base: u64) {
    let region = Region::new(pages, true);
    (0..pages).for_each(|page| region.fill(page, (base << 32) + 1 + (page % (pages / 2)) as u64));
    say("ready");
    while let Some(line) = hear() {
        match line.as_str() {
            "splice" => {
                let [one, other] = [(); 2].map(|()| full_pipe(&region));
                say(&format!("{one} {other}"));
            }
            "unmap" => {
                // SAFETY: the scenario's own memory, which it does not use any more.
                assert_eq!(unsafe { libc::munmap(region.address(0), pages * PAGE) }, 0);
                say("ok");
            }
            _ => break,
        }
    }
    std::process::exit(0);
}

/// A pipe that refers to all pages of a region; the end to read from.
fn full_pipe(region: &Region) -> i32 {
    let len = region.pages * PAGE;
    let mut ends = [0; 2];
    let part = libc::iovec { iov_base: region.address(0), iov_len: len };
    // SAFETY: the kernel writes two descriptors, and reads one part that describes the region.
    unsafe {
        assert_eq!(libc::pipe2(ends.as_mut_ptr(), libc::O_CLOEXEC), 0);
        assert!(libc::fcntl(ends[1], libc::F_SETPIPE_SZ, len) >= len as i32);
        assert_eq!(libc::vmsplice(ends[1], &raw const part, 1, 0), len as isize);
    }
    ends[0]
}
