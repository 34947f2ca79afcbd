//! A program that is merged: maps memory, marks it as mergeable, and checks that it stays what it
//! was.
//!
//! `pageone-test-client SCENARIO [ARGS…]`. It prints `ready` when its memory is filled, waits for
//! `go`, does what the scenario says, prints `ok` or what is wrong, and ends when its standard
//! input does.

#![allow(clippy::print_stdout, clippy::print_stderr, reason = "prints for who runs it")]
#![allow(unsafe_code, reason = "it maps and writes raw memory, as the programs that it stands for do")]
#![allow(clippy::unwrap_used, reason = "a test program fails by panicking")]

mod calls;
mod events;
mod files;
mod poison;
mod raw;
mod recycle;
mod region;

use std::collections::HashMap;
use std::io::{BufRead, Write};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::*};
use std::time::{Duration, Instant};

use calls::{advice, dontneed, fork, guards, locked, mappings, pinned, signals, spliced};
use e2e::pattern;
use region::{HUGE, PAGE, Region, WORDS};

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
    if let Ok(uid) = std::env::var(e2e::user::ENV_UID) {
        e2e::user::become_user(uid.parse().unwrap()).unwrap();
    }
    if std::env::var_os("PAGEONE_TEST_DUMPABLE").is_some() {
        // SAFETY: takes numbers.
        unsafe { libc::prctl(libc::PR_SET_DUMPABLE, 0) };
    }
    if let Ok(node) = std::env::var("PAGEONE_TEST_NODE") {
        bind_to_node(node.parse().unwrap());
    }
    let args: Vec<String> = std::env::args().skip(1).collect();
    let number = |at: usize, default: usize| args.get(at).map_or(default, |a| a.parse().unwrap());
    match args.first().map(String::as_str) {
        Some("recycle") => recycle::run(number(1, 4096), number(2, 3)),
        Some("sibling") => raw::sibling(number(1, 4096), number(2, 4)),
        Some("stuck") => raw::stuck(&args[1], number(2, 1024), &args[3]),
        Some("misplaced") => raw::misplaced(&args[1], &args[2]),
        Some("exec") => raw::exec(&args[1], number(2, 1024), number(3, 1) as u64),
        Some("other") => raw::other(number(1, 0) as i32, number(2, 1024), number(3, 1) as u64),
        Some("hold") => hold(number(1, 4096), number(2, 4), number(3, 1) as u64, number(4, 0)),
        Some("events") => events::events(number(1, 4096), number(2, 4), args.get(3).map_or("", |kind| kind)),
        Some("huge") => huge(&args[1..].iter().map(|part| part.parse().unwrap()).collect::<Vec<_>>()),
        Some("shuffled") => shuffled(number(1, 4096)),
        Some("writers") => writers(number(1, 16_384), number(2, 10)),
        Some("churn") => churn(number(1, 8192), number(2, 10)),
        Some("steps") => steps(number(1, 16_384)),
        Some("thin") => thin(number(1, 4096), number(2, 16)),
        Some("zeros") => zeros(number(1, 4096)),
        Some("dontneed") => dontneed(),
        Some("fork") => fork(),
        Some("mappings") => mappings(),
        Some("signals") => signals(),
        Some("locked") => locked(),
        Some("pinned") => pinned(),
        Some("advice") => advice(),
        Some("guards") => guards(),
        Some("spliced") => spliced(number(1, 256), number(2, 1) as u64),
        Some("fread") => files::fread(&args[1]),
        Some("poison") => poison::poison(number(1, 1024), number(2, 1) as u64),
        other => panic!("no scenario {other:?}"),
    }
    // Until the test lets go.
    while hear().is_some() {}
}

/// `hold PAGES COPIES BASE [OWN]`: each content COPIES times, but every OWN-th page has one that
/// no other client has; checks it whenever it is told to. `rewrite` gives every page new content,
/// and so does `refill`, which checks nothing. `drop` makes it another user, `chroot` takes all
/// files away.
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
        if line == "rewrite" || line == "refill" {
            base += 1 << 20;
            fill(base);
        }
        match line.as_str() {
            "drop" => e2e::user::give_up_privileges(65534).unwrap(),
            "chroot" => e2e::user::enter_empty_directory().unwrap(),
            _ => {}
        }
        let mut problems = Vec::new();
        if line == "refill" {
            verdict(&problems);
            continue;
        }
        check(&mut problems, "held", region.wrong(0..pages, |page| seed(base, page)));
        verdict(&problems);
    }
    std::process::exit(0);
}

/// `thin PAGES EVERY`: what every client of this scenario has. At `thin` all pages but every
/// EVERY-th get contents of their own. Checks all at each line.
fn thin(pages: usize, every: usize) {
    let region = Region::new(pages, true);
    let mine = u64::from(std::process::id()) << 40;
    let mut thinned = false;
    (0..pages).for_each(|page| region.fill(page, 1 + page as u64));
    say("ready");
    while let Some(line) = hear() {
        if line == "thin" {
            thinned = true;
            (0..pages)
                .filter(|page| !page.is_multiple_of(every))
                .for_each(|page| region.fill(page, mine + page as u64));
        }
        let seed =
            |page: usize| if thinned && !page.is_multiple_of(every) { mine + page as u64 } else { 1 + page as u64 };
        let mut problems = Vec::new();
        check(&mut problems, "thin", region.wrong(0..pages, seed));
        verdict(&problems);
    }
    std::process::exit(0);
}

/// `huge PERCENT…`: a huge page for each number; that percentage of its pages holds what every
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
                        // Most writes put back what was there, so that the page can merge again;
                        // each is counted.
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
/// Frames come and go as fast as the daemon can follow. At last it says how many pages are like
/// another one.
fn churn(pages: usize, seconds: usize) {
    let region = Region::new(pages, true);
    wait_go();
    let end = Instant::now() + Duration::from_secs(seconds as u64);
    let mut problems = Vec::new();
    std::thread::scope(|scope| {
        let half = pages / 2;
        let threads: Vec<_> = (0..2usize)
            .map(|part| {
                let region = &region;
                scope.spawn(move || churn_part(region, part, half, end))
            })
            .collect();
        let mut all = HashMap::new();
        for thread in threads {
            let (wrong, seeds) = thread.join().unwrap();
            check(&mut problems, "churn", wrong);
            seeds.into_iter().filter(|&seed| seed != 0).for_each(|seed| *all.entry(seed).or_insert(0) += 1);
        }
        say(&format!("alike {}", all.into_values().filter(|&pages| pages > 1).sum::<usize>()));
    });
    verdict(&problems);
}

/// Changes and checks one half of the region until `end`. Returns how many pages were wrong, and
/// what they hold.
fn churn_part(region: &Region, part: usize, half: usize, end: Instant) -> (usize, Vec<u64>) {
    const CONTENTS: u64 = 2048;
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
    (wrong + region.wrong(first..first + half, |page| seeds[page - first]), seeds)
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
