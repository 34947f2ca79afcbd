//! A program as QEMU is one to those who attach it: its first thread waits for events, and others
//! work.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::*};
use std::time::Duration;

use crate::region::{PAGE, Region};
use crate::{check, hear, say, verdict};

/// Pages that one thread discards, and another writes, again and again.
const BUSY: usize = 64;

/// `events PAGES COPIES [KIND]`: each content COPIES times; checks them whenever it is told to,
/// while threads allocate, discard and write. KIND: `inherited`, `shared`, `locked`, `unmarked`, or
/// how long ppoll(2) waits at a time, in milliseconds.
pub(crate) fn events(pages: usize, copies: usize, kind: &str) {
    // A thread that fails ends the program: the others would wait for it.
    let report = std::panic::take_hook();
    std::panic::set_hook(Box::new(move |panic| {
        report(panic);
        std::process::abort();
    }));
    let region = match kind {
        "shared" => shared(pages),
        "unmarked" => Region::unmarked(pages),
        _ => Region::new(pages, kind != "inherited"),
    };
    let seed = |page: usize| 1 + (page % (pages / copies)) as u64;
    (0..pages).for_each(|page| region.fill(page, seed(page)));
    if kind == "locked" {
        // SAFETY: the region is mapped.
        assert_eq!(unsafe { libc::mlock(region.address(pages - 1), PAGE) }, 0);
    }
    let (end, turns, wrong) = (AtomicBool::new(false), AtomicU64::new(0), AtomicU64::new(0));
    std::thread::scope(|scope| {
        scope.spawn(|| allocate(&end));
        if kind != "shared" {
            scope.spawn(|| discard(&region, &end, &turns, &wrong));
        }
        say("ready");
        let limit = kind.parse().ok().map(Duration::from_millis);
        while wait(limit) {
            let Some(line) = hear() else { break };
            let mut problems = Vec::new();
            match line.as_str() {
                "rewrite" => (2 * BUSY..pages).for_each(|page| region.fill(page, seed(page))),
                "fork" => fork(&mut problems),
                _ => {}
            }
            check(&mut problems, "held", region.wrong(2 * BUSY..pages, seed));
            check(&mut problems, "discarded", wrong.load(Relaxed) as usize);
            let before = turns.load(Relaxed);
            // The other thread gets its turn, so that discarding cannot hang unseen.
            while kind != "shared" && turns.load(Relaxed) < before + 2 {
                std::thread::yield_now();
            }
            verdict(&problems);
        }
        end.store(true, Relaxed);
    });
    std::process::exit(0);
}

fn shared(pages: usize) -> Region {
    let (prot, flags) = (libc::PROT_READ | libc::PROT_WRITE, libc::MAP_SHARED | libc::MAP_ANONYMOUS);
    // SAFETY: a fresh mapping; nothing else knows its address.
    let start = unsafe { libc::mmap(std::ptr::null_mut(), pages * PAGE, prot, flags, -1, 0) };
    assert_ne!(start, libc::MAP_FAILED);
    let region = Region { start: start.cast(), pages };
    // The kernel takes no shared memory, and says nothing.
    let _ = region.advise(0..pages, libc::MADV_MERGEABLE);
    region
}

/// Holds the locks of malloc most of the time, and those of the loader now and then.
fn allocate(end: &AtomicBool) {
    let mut kept: Vec<Vec<u8>> = Vec::new();
    for turn in 0u64.. {
        if end.load(Relaxed) {
            return;
        }
        kept.push(vec![1; 64 + turn.wrapping_mul(7919) as usize % 300_000]);
        if kept.len() > 40 {
            kept.swap_remove(turn as usize % 40);
        }
        if turn % 64 == 0 {
            // SAFETY: the name is a C string; the library is part of the C library.
            unsafe {
                let library = libc::dlopen(c"libm.so.6".as_ptr(), libc::RTLD_NOW);
                assert!(!libc::dlsym(library, c"cos".as_ptr()).is_null());
                libc::dlclose(library);
            }
        }
    }
}

/// Gives pages content that others have too, waits until they may have been merged, and discards
/// them: they must read as zeros.
fn discard(region: &Region, end: &AtomicBool, turns: &AtomicU64, wrong: &AtomicU64) {
    while !end.load(Relaxed) {
        for turn in 0..40 {
            // These are never merged.
            (BUSY..2 * BUSY).for_each(|page| region.write(page, 5, turn));
            wrong.fetch_add((BUSY..2 * BUSY).filter(|&page| region.read(page, 5) != turn).count() as u64, Relaxed);
            std::thread::sleep(Duration::from_millis(10));
        }
        assert_eq!(region.advise(0..BUSY, libc::MADV_DONTNEED), Ok(()));
        wrong.fetch_add(region.nonzero(0..BUSY) as u64, Relaxed);
        (0..BUSY).for_each(|page| region.fill(page, 1 + page as u64));
        turns.fetch_add(1, Relaxed);
    }
}

fn fork(problems: &mut Vec<String>) {
    // SAFETY: the child executes another program at once, and the path and the list are C strings.
    unsafe {
        let child = libc::fork();
        if child == 0 {
            libc::close_range(3, u32::MAX, 0);
            libc::execv(c"/bin/true".as_ptr(), [c"true".as_ptr(), std::ptr::null()].as_ptr());
            libc::_exit(1);
        }
        let mut status = 0;
        libc::waitpid(child, &mut status, 0);
        if status != 0 {
            problems.push(format!("the child ended with {status}"));
        }
    }
}

/// Waits for a line in ppoll(2), with a signal mask of its own, and sees that registers are as they
/// were. False: standard input has ended.
fn wait(limit: Option<Duration>) -> bool {
    let mut fds = libc::pollfd { fd: 0, events: libc::POLLIN, revents: 0 };
    loop {
        let limit = limit.map(|limit| libc::timespec { tv_sec: 0, tv_nsec: limit.as_nanos() as i64 });
        let limit = limit.as_ref().map_or(std::ptr::null(), |limit| &raw const *limit);
        let begin = std::time::Instant::now();
        let before = mask();
        let ready = ppoll(&mut fds, limit, &before);
        assert!(mask() == before, "the signal mask has changed");
        if ready > 0 {
            return fds.revents & libc::POLLIN != 0;
        }
        assert_eq!(ready, 0, "{}", std::io::Error::last_os_error());
        assert!(!limit.is_null(), "ppoll(2) without a limit came back empty after {:?}", begin.elapsed());
    }
}

/// The signal mask: SIGUSR1 is blocked, but in ppoll(2).
fn mask() -> u64 {
    let mut set = 0u64;
    let own = 1u64 << (libc::SIGUSR1 - 1);
    // SAFETY: the kernel reads and writes sets of 8 bytes.
    unsafe {
        libc::syscall(libc::SYS_rt_sigprocmask, libc::SIG_BLOCK, &raw const own, &raw mut set, 8);
        libc::syscall(libc::SYS_rt_sigprocmask, libc::SIG_BLOCK, 0usize, &raw mut set, 8);
    }
    set
}

/// ppoll(2) by the C library, with patterns in registers.
fn ppoll(fds: &mut libc::pollfd, limit: *const libc::timespec, mask: &u64) -> i32 {
    let none = mask & !(1 << (libc::SIGUSR1 - 1));
    // The C library's set is larger than the kernel's.
    let mut set = [0u64; 16];
    set[0] = none;
    #[cfg(target_arch = "x86_64")]
    {
        let pattern = [0x0123_4567_89ab_cdefu64, 0xfedc_ba98_7654_3210];
        let (mut found, mut kept) = ([0u64; 2], 0x5555_aaaa_1234_u64);
        let ready: i32;
        // SAFETY: the call gets what ppoll(2) takes; all that it may change is named.
        unsafe {
            std::arch::asm!(
                "movdqu xmm15, [{pattern}]",
                "call {ppoll}",
                "movdqu [r12], xmm15",
                ppoll = sym libc::ppoll,
                pattern = in(reg) &raw const pattern,
                in("r12") &raw mut found,
                inout("r13") kept,
                inout("rdi") &raw mut *fds => _,
                inout("rsi") 1usize => _,
                inout("rdx") limit => _,
                inout("rcx") set.as_ptr() => _,
                lateout("eax") ready,
                clobber_abi("C"),
            );
        }
        assert_eq!((found, kept), (pattern, 0x5555_aaaa_1234), "registers have changed in ppoll(2)");
        ready
    }
    #[cfg(not(target_arch = "x86_64"))]
    // SAFETY: the arguments are those of ppoll(2).
    unsafe {
        libc::ppoll(fds, 1, limit, set.as_ptr().cast())
    }
}
