//! A program that is merged: maps memory, marks it as mergeable, and checks that it stays what it
//! was.
//!
//! `pageone-test-client SCENARIO [ARGS…]`. It prints `ready` when its memory is filled, waits for
//! `go`, does what the scenario says, prints `ok` or what is wrong, and ends when its standard
//! input does.
#![allow(unsafe_code, reason = "it maps and writes raw memory, as the programs that it stands for do")]
#![allow(clippy::unwrap_used, reason = "a test program fails by panicking")]

mod recycle;

use std::io::{BufRead, Write};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::*};
use std::time::{Duration, Instant};

const PAGE: usize = 4096;
/// Pages of a huge page.
const HUGE: usize = 512;
const WORDS: usize = PAGE / 8;

/// Memory marked as mergeable.
struct Region {
    start: *mut u64,
    pages: usize,
}

// SAFETY: the memory is raw and lives until the process ends; threads share it as they would any
// raw memory, each on pages of its own.
unsafe impl Sync for Region {}

impl Region {
    fn new(pages: usize, dontfork: bool) -> Self {
        let region = Self::unmarked(pages);
        if dontfork {
            region.advise(0..pages, libc::MADV_DONTFORK).unwrap();
        }
        region.advise(0..pages, libc::MADV_MERGEABLE).unwrap();
        region
    }

    /// Huge pages, as far as the kernel gives any.
    fn huge(count: usize) -> Self {
        let all = Self::unmarked((count + 1) * HUGE);
        let skipped = all.start.addr().next_multiple_of(HUGE * PAGE) - all.start.addr();
        let region = Self { start: all.start.wrapping_byte_add(skipped), pages: count * HUGE };
        region.advise(0..region.pages, libc::MADV_HUGEPAGE).unwrap();
        region.advise(0..region.pages, libc::MADV_MERGEABLE).unwrap();
        region
    }

    fn unmarked(pages: usize) -> Self {
        let (prot, flags) = (libc::PROT_READ | libc::PROT_WRITE, libc::MAP_PRIVATE | libc::MAP_ANONYMOUS);
        // SAFETY: a fresh anonymous mapping; nothing else knows its address.
        let start = unsafe { libc::mmap(std::ptr::null_mut(), pages * PAGE, prot, flags, -1, 0) };
        assert_ne!(start, libc::MAP_FAILED);
        Self { start: start.cast(), pages }
    }

    fn address(&self, page: usize) -> *mut libc::c_void {
        assert!(page <= self.pages);
        self.start.wrapping_add(page * WORDS).cast()
    }

    fn read(&self, page: usize, word: usize) -> u64 {
        assert!(page < self.pages && word < WORDS);
        // SAFETY: in bounds; volatile, since the memory under it is exchanged while this runs.
        unsafe { self.start.add(page * WORDS + word).read_volatile() }
    }

    fn write(&self, page: usize, word: usize, value: u64) {
        assert!(page < self.pages && word < WORDS);
        // SAFETY: in bounds; see `read`.
        unsafe { self.start.add(page * WORDS + word).write_volatile(value) }
    }

    fn fill(&self, page: usize, seed: u64) {
        (0..WORDS).for_each(|word| self.write(page, word, pattern(seed, word)));
    }

    /// How many of the pages are not as filled.
    fn wrong(&self, pages: std::ops::Range<usize>, seed: impl Fn(usize) -> u64) -> usize {
        pages.filter(|&page| (0..WORDS).any(|word| self.read(page, word) != pattern(seed(page), word))).count()
    }

    fn nonzero(&self, pages: std::ops::Range<usize>) -> usize {
        pages.filter(|&page| (0..WORDS).any(|word| self.read(page, word) != 0)).count()
    }

    fn advise(&self, pages: std::ops::Range<usize>, advice: i32) -> Result<(), i32> {
        // SAFETY: a range of this mapping; what the advice does to its content is what the scenario is
        // about.
        match unsafe { libc::madvise(self.address(pages.start), pages.len() * PAGE, advice) } {
            0 => Ok(()),
            _ => Err(std::io::Error::last_os_error().raw_os_error().unwrap_or(0)),
        }
    }
}

/// Content of a word; seed 0 is a page of zeros.
fn pattern(seed: u64, word: usize) -> u64 {
    if seed == 0 { 0 } else { (seed ^ (word as u64) << 40).wrapping_mul(0x9e37_79b9_7f4a_7c15) }
}

fn say(line: &str) {
    println!("{line}");
    std::io::stdout().flush().unwrap();
}

fn hear() -> Option<String> {
    let mut line = String::new();
    match std::io::stdin().lock().read_line(&mut line) {
        Ok(n) if n > 0 => Some(line.trim_end().to_string()),
        _ => None,
    }
}

fn wait_go() {
    say("ready");
    if hear().is_none() {
        std::process::exit(0);
    }
}

fn verdict(problems: &[String]) {
    if problems.is_empty() { say("ok") } else { say(&problems.join("; ")) }
}

fn check(problems: &mut Vec<String>, what: &str, wrong: usize) {
    if wrong > 0 {
        problems.push(format!("{what}: {wrong} pages are wrong"));
    }
}

/// Takes memory from one NUMA node only, as under `numactl --membind`.
fn bind_to_node(node: u32) {
    let mask = 1u64 << node;
    // SAFETY: the kernel reads 64 bits of the mask, one fewer than it is told.
    let result = unsafe { libc::syscall(libc::SYS_set_mempolicy, libc::MPOL_BIND as usize, &raw const mask, 65usize) };
    assert_eq!(result, 0, "{}", std::io::Error::last_os_error());
}

fn main() {
    if let Ok(node) = std::env::var("PAGEONE_TEST_NODE") {
        bind_to_node(node.parse().unwrap());
    }
    let args: Vec<String> = std::env::args().skip(1).collect();
    let number = |at: usize, default: usize| args.get(at).map_or(default, |a| a.parse().unwrap());
    match args.first().map(String::as_str) {
        Some("recycle") => recycle::run(number(1, 4096), number(2, 3)),
        Some("hold") => hold(number(1, 4096), number(2, 4), number(3, 1) as u64, number(4, 0)),
        Some("huge") => huge(&args[1..].iter().map(|part| part.parse().unwrap()).collect::<Vec<_>>()),
        Some("shuffled") => shuffled(number(1, 4096)),
        Some("writers") => writers(number(1, 16_384), number(2, 10)),
        Some("churn") => churn(number(1, 8192), number(2, 10)),
        Some("steps") => steps(number(1, 16_384)),
        Some("zeros") => zeros(number(1, 4096)),
        Some("dontneed") => dontneed(),
        Some("fork") => fork(),
        Some("mappings") => mappings(),
        Some("signals") => signals(),
        Some("locked") => locked(),
        Some("pinned") => pinned(),
        Some("advice") => advice(),
        other => panic!("no scenario {other:?}"),
    }
    // Until the test lets go.
    while hear().is_some() {}
}

/// `hold PAGES COPIES BASE [OWN]`: each content COPIES times, but every OWN-th page has one that
/// nobody else has; checks it whenever it is told to. `rewrite` gives every page new content.
fn hold(pages: usize, copies: usize, base: u64, own: usize) {
    let region = Region::new(pages, true);
    let mut base = base << 32;
    let mine = u64::from(std::process::id()) << 40;
    let seed = |base: u64, page: usize| match own {
        1.. if page % own == own - 1 => mine + page as u64,
        _ => base + 1 + (page % (pages / copies)) as u64,
    };
    let fill = |base| (0..pages).for_each(|page| region.fill(page, seed(base, page)));
    fill(base);
    say("ready");
    while let Some(line) = hear() {
        if line == "rewrite" {
            base += 1 << 20;
            fill(base);
        }
        let mut problems = Vec::new();
        check(&mut problems, "held", region.wrong(0..pages, |page| seed(base, page)));
        verdict(&problems);
    }
    std::process::exit(0);
}

/// `huge PERCENT…`: a huge page for each number; so many percent of its pages hold what every
/// client of this scenario holds there. Checks all whenever it is told to; `write` writes to each
/// huge page first.
fn huge(shares: &[usize]) {
    let region = Region::huge(shares.len());
    let mine = u64::from(std::process::id()) << 40;
    let seed =
        |page: usize| if page % HUGE * 100 < shares[page / HUGE] * HUGE { 1 + page as u64 } else { mine + page as u64 };
    (0..region.pages).for_each(|page| region.fill(page, seed(page)));
    say("ready");
    while let Some(line) = hear() {
        if line == "write" {
            (0..shares.len())
                .for_each(|huge| region.fill(huge * HUGE + HUGE - 1, mine + (huge * HUGE + HUGE - 1) as u64));
        }
        let mut problems = Vec::new();
        check(&mut problems, "huge", region.wrong(0..region.pages, seed));
        verdict(&problems);
    }
    std::process::exit(0);
}

/// `shuffled PAGES`: every content twice, in an order that leaves no runs.
fn shuffled(pages: usize) {
    let region = Region::new(pages, true);
    let half = pages / 2;
    let seed = |page: usize| 1 + if page < half { page as u64 } else { ((page - half) * 7919 % half) as u64 };
    (0..pages).for_each(|page| region.fill(page, seed(page)));
    wait_go();
    let mut problems = Vec::new();
    check(&mut problems, "shuffled", region.wrong(0..pages, seed));
    verdict(&problems);
}

/// `writers PAGES SECONDS`: two threads write to pages that merge all the time; an oracle counts
/// every write. Prints the longest time that a write took.
fn writers(pages: usize, seconds: usize) {
    let region = Region::new(pages, true);
    let seed = |page: usize| 1 + (page % (pages / 8)) as u64;
    (0..pages).for_each(|page| region.fill(page, seed(page)));
    wait_go();
    let stop = AtomicBool::new(false);
    let longest = AtomicU64::new(0);
    let mut problems = Vec::new();
    let mut counts = vec![0u64; pages];
    std::thread::scope(|scope| {
        let threads: Vec<_> = (0..2usize)
            .map(|parity| {
                let (region, stop, longest) = (&region, &stop, &longest);
                scope.spawn(move || {
                    let mut counts = vec![0u64; region.pages];
                    let mut random = 0x1234_5678_9abc_def1u64 + parity as u64;
                    let mut lost = 0;
                    while !stop.load(Relaxed) {
                        random ^= random << 13;
                        random ^= random >> 7;
                        random ^= random << 17;
                        let page = (random % (region.pages as u64 / 2)) as usize * 2 + parity;
                        // Most writes put back what was there, so that the page can merge again; each is counted.
                        let value = pattern(seed(page), 7);
                        let at = Instant::now();
                        region.write(page, 7, !value);
                        lost += usize::from(region.read(page, 7) != !value);
                        region.write(page, 7, value);
                        if random >> 60 == 0 {
                            counts[page] += 1;
                            region.write(page, WORDS - 1, counts[page]);
                        }
                        longest.fetch_max(at.elapsed().as_micros() as u64, Relaxed);
                        if random >> 58 & 3 == 0 {
                            std::thread::sleep(Duration::from_micros(200));
                        }
                    }
                    (counts, lost)
                })
            })
            .collect();
        std::thread::sleep(Duration::from_secs(seconds as u64));
        stop.store(true, Relaxed);
        for thread in threads {
            let (mine, lost) = thread.join().unwrap();
            counts.iter_mut().zip(mine).for_each(|(all, mine)| *all += mine);
            check(&mut problems, "lost at once", lost);
        }
    });
    let last = |page: usize| {
        if counts[page] > 0 { counts[page] } else { pattern(seed(page), WORDS - 1) }
    };
    check(&mut problems, "lost writes", (0..pages).filter(|&page| region.read(page, WORDS - 1) != last(page)).count());
    let body = |page: usize| (0..WORDS - 1).any(|word| region.read(page, word) != pattern(seed(page), word));
    check(&mut problems, "corrupt", (0..pages).filter(|&page| body(page)).count());
    say(&format!("longest {}", longest.load(Relaxed)));
    verdict(&problems);
}

/// `churn PAGES SECONDS`: rows of pages get contents that other rows, and other clients, have in
/// the same order; single words change, rows are discarded; everything is checked all the time.
/// Frames come and go as fast as the daemon can follow.
fn churn(pages: usize, seconds: usize) {
    const CONTENTS: u64 = 2048;
    let region = Region::new(pages, true);
    wait_go();
    let end = Instant::now() + Duration::from_secs(seconds as u64);
    let mut problems = Vec::new();
    std::thread::scope(|scope| {
        let half = pages / 2;
        let threads: Vec<_> = (0..2usize)
            .map(|part| {
                let region = &region;
                scope.spawn(move || {
                    let first = part * half;
                    let mut seeds = vec![0u64; half];
                    let mut random = (u64::from(std::process::id()) << 20) + 0x1234_5671 + part as u64;
                    let mut below = move |n: usize| {
                        random ^= random << 13;
                        random ^= random >> 7;
                        random ^= random << 17;
                        (random % n as u64) as usize
                    };
                    let mut wrong = 0;
                    while Instant::now() < end && wrong == 0 {
                        let start = below(half);
                        let row = start..(start + 1 + below(200)).min(half);
                        let content = below(CONTENTS as usize) as u64;
                        match below(10) {
                            0 => {
                                region.advise(first + row.start..first + row.end, libc::MADV_DONTNEED).unwrap();
                                row.for_each(|page| seeds[page] = 0);
                            }
                            1 => {
                                let own = (u64::from(std::process::id()) << 32) + below(1 << 30) as u64;
                                seeds[start] = own;
                                region.fill(first + start, own);
                            }
                            2 | 3 => {
                                for page in row {
                                    wrong += region.wrong(first + page..first + page + 1, |_| seeds[page]);
                                }
                            }
                            _ => {
                                for (i, page) in row.enumerate() {
                                    wrong += region.wrong(first + page..first + page + 1, |_| seeds[page]);
                                    seeds[page] = 1 + (content + i as u64) % CONTENTS;
                                    region.fill(first + page, seeds[page]);
                                }
                            }
                        }
                        std::thread::sleep(Duration::from_millis(below(10) as u64));
                    }
                    wrong + region.wrong(first..first + half, |page| seeds[page - first])
                })
            })
            .collect();
        for thread in threads {
            check(&mut problems, "churn", thread.join().unwrap());
        }
    });
    verdict(&problems);
}

/// `steps PAGES`: most pages are unlike all others. At each line that it hears, some get new
/// content, some one that others have, some are discarded, and some of these read; then it says
/// whether all are as they should be.
fn steps(pages: usize) {
    const CONTENTS: usize = 64;
    let region = Region::new(pages, true);
    let own = u64::from(std::process::id()) << 32;
    let mut seeds: Vec<u64> = (0..pages as u64).map(|page| own + page + 1).collect();
    (0..pages).for_each(|page| region.fill(page, seeds[page]));
    let (mut random, mut news) = (0x1234_5671u64, own + (1 << 24));
    let mut below = move |n: usize| {
        random ^= random << 13;
        random ^= random >> 7;
        random ^= random << 17;
        (random % n as u64) as usize
    };
    say("ready");
    while hear().is_some() {
        for _ in 0..pages / 100 {
            let start = below(pages);
            let row = start..(start + 1 + below(8)).min(pages);
            match below(4) {
                0 => {
                    region.advise(row.clone(), libc::MADV_DONTNEED).unwrap();
                    row.clone().for_each(|page| seeds[page] = 0);
                    if below(2) == 0 {
                        row.for_each(|page| assert_eq!(region.read(page, 5), 0));
                    }
                }
                1 => {
                    for page in row {
                        news += 1;
                        seeds[page] = news;
                        region.fill(page, news);
                    }
                }
                _ => {
                    let content = below(CONTENTS);
                    for (i, page) in row.enumerate() {
                        seeds[page] = 1 + ((content + i) % CONTENTS) as u64;
                        region.fill(page, seeds[page]);
                    }
                }
            }
        }
        let mut problems = Vec::new();
        check(&mut problems, "steps", region.wrong(0..pages, |page| seeds[page]));
        verdict(&problems);
    }
    std::process::exit(0);
}

/// `zeros PAGES`: pages of written zeros; they read as zeros ever after, and take new content.
fn zeros(pages: usize) {
    let region = Region::new(pages, true);
    (0..pages).for_each(|page| region.fill(page, 0));
    wait_go();
    let mut problems = Vec::new();
    check(&mut problems, "zeros", region.nonzero(0..pages));
    (0..pages).step_by(3).for_each(|page| region.fill(page, 9));
    check(&mut problems, "filled", region.wrong(0..pages, |page| if page % 3 == 0 { 9 } else { 0 }));
    verdict(&problems);
}

/// Discards merged pages in every way there is: zeros must come back, never a frame's bytes.
fn dontneed() {
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
fn fork() {
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
fn mappings() {
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
fn signals() {
    let region = Region::new(1024, true);
    (0..region.pages).for_each(|page| region.fill(page, 1 + (page % 64) as u64));
    wait_go();
    let mut problems = Vec::new();
    // SAFETY: plain signal handling; every structure is initialised by the calls that are meant for it.
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
fn locked() {
    let region = Region::new(1024, true);
    (0..region.pages).for_each(|page| region.fill(page, 1 + (page % 64) as u64));
    let other = [0u8; 64];
    // SAFETY: a readable range.
    assert_eq!(unsafe { libc::mlock(other.as_ptr().cast(), 1) }, 0, "{}", std::io::Error::last_os_error());
    wait_go();
    let mut problems = Vec::new();
    check(&mut problems, "locked", region.wrong(0..region.pages, |page| 1 + (page % 64) as u64));
    verdict(&problems);
}

/// Registers part of the region as an io_uring buffer, which pins it; the kernel then writes
/// through the pin.
fn pinned() {
    let region = Region::new(4096, true);
    let seed = |page: usize| 1 + (page % 512) as u64;
    (0..region.pages).for_each(|page| region.fill(page, seed(page)));
    const SETUP: libc::c_long = 425;
    const REGISTER: libc::c_long = 427;
    // SAFETY: io_uring_setup(2) writes 120 bytes of parameters; io_uring_register(2), opcode 0, reads
    // one iovec.
    unsafe {
        let mut params = [0u64; 15];
        let ring = libc::syscall(SETUP, 4, params.as_mut_ptr());
        if ring < 0 {
            say("SKIPPED");
            return;
        }
        let buffer = libc::iovec { iov_base: region.address(0), iov_len: 64 * PAGE };
        if libc::syscall(REGISTER, ring, 0, &buffer, 1) < 0 {
            say("SKIPPED");
            return;
        }
    }
    wait_go();
    let mut problems = Vec::new();
    check(&mut problems, "pinned", region.wrong(0..region.pages, seed));
    verdict(&problems);
}

/// What was advised for the region holds for the merged memory too: children do not inherit it.
fn advice() {
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
