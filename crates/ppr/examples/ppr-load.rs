//! Memory-hungry work for a guest under test, which notices any byte that changes by itself.
//!
//! `ppr-load SECONDS MIB`; MIB should be three quarters of the available memory. First it makes
//! huge pages in memory that is full of holes. Then five processes work for SECONDS with about MIB
//! of memory together. Each keeps pieces of memory filled with words that follow from a seed. It
//! makes new ones, checks old ones and frees them, by all paths into the page allocator: single
//! pages and huge pages, pages given back one by one (`MADV_DONTNEED`), forks that copy on write,
//! files (the page cache), and pipes. One process forces compaction, drops caches, and takes and
//! returns huge pages, if the kernel allows it.
//!
//! Ends with `PPR-LOAD PASS checks=N` or, as soon as a byte is wrong, with `PPR-LOAD CORRUPT ...`
//! and exit code 1.
#![allow(unsafe_code, clippy::print_stdout)] // Memory is mapped and processes are forked; a program prints.

use std::io::{Read, Write};
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::time::{Duration, Instant};

/// A random sequence (splitmix64).
struct Random(u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        // Its lowest bit is always set.
        word(self.0, 0) >> 1
    }

    fn below(&mut self, limit: usize) -> usize {
        (self.next() % limit as u64) as usize
    }
}

/// The word at a place in the piece of a seed; never 0.
fn word(seed: u64, at: u64) -> u64 {
    let mut z = seed ^ at.wrapping_mul(0xd6e8_feb8_6659_fd93);
    z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    (z ^ (z >> 27)) | 1
}

/// Memory of its own, filled from a seed.
struct Piece {
    words: &'static mut [u64],
    seed: u64,
    /// Whether every second page was given back.
    half: bool,
}

impl Piece {
    fn new(random: &mut Random, pages: usize, huge: bool) -> Option<Self> {
        let (prot, flags) = (libc::PROT_READ | libc::PROT_WRITE, libc::MAP_PRIVATE | libc::MAP_ANONYMOUS);
        // SAFETY: a mapping that is not fixed replaces nothing.
        let start = unsafe { libc::mmap(std::ptr::null_mut(), pages * 4096, prot, flags, -1, 0) };
        if start == libc::MAP_FAILED {
            return None;
        }
        let advice = if huge { libc::MADV_HUGEPAGE } else { libc::MADV_NOHUGEPAGE };
        // SAFETY: advice about huge pages changes no byte.
        unsafe { libc::madvise(start, pages * 4096, advice) };
        // SAFETY: these bytes were just mapped, are zeros and aligned, and belong to this value,
        // whose `Drop` unmaps them.
        let words = unsafe { std::slice::from_raw_parts_mut(start.cast(), pages * 512) };
        let mut piece = Self { words, seed: random.next(), half: false };
        piece.fill(piece.seed);
        Some(piece)
    }

    fn fill(&mut self, seed: u64) {
        (self.seed, self.half) = (seed, false);
        self.words.iter_mut().enumerate().for_each(|(at, to)| *to = word(seed, at as u64));
    }

    /// Checks all words; those of pages given back are 0.
    fn check(&self, what: &str) {
        for (at, &found) in self.words.iter().enumerate() {
            let expected = if self.half && at / 512 % 2 == 1 { 0 } else { word(self.seed, at as u64) };
            if found != expected {
                corrupt(what, at, found, expected);
            }
        }
        CHECKS.fetch_add(self.words.len() as u64 / 512, Relaxed);
    }

    /// Gives every second page back. The guest's memory is full of holes then, which compaction has
    /// to close.
    fn give_back_half(&mut self) {
        for page in (1..self.words.len() / 512).step_by(2) {
            // SAFETY: a page of this value's mapping; `&mut self`: no reference to it exists.
            unsafe { libc::madvise(self.words[page * 512..].as_mut_ptr().cast(), 4096, libc::MADV_DONTNEED) };
        }
        self.half = true;
        self.check("memory half given back");
    }
}

impl Drop for Piece {
    fn drop(&mut self) {
        // SAFETY: the whole mapping of this value, to which no reference is left.
        unsafe { libc::munmap(self.words.as_mut_ptr().cast(), self.words.len() * 8) };
    }
}

/// Pages checked by this process.
static CHECKS: AtomicU64 = AtomicU64::new(0);

fn corrupt(what: &str, at: usize, found: u64, expected: u64) -> ! {
    println!("PPR-LOAD CORRUPT in {what}: word {at} is {found:#x}, should be {expected:#x}");
    std::process::exit(1)
}

/// Anonymous memory.
fn churn(random: &mut Random, pieces: &mut Vec<Piece>, budget: usize) {
    let used: usize = pieces.iter().map(|piece| piece.words.len() / if piece.half { 1024 } else { 512 }).sum();
    let pages = [1, 3, 16, 64, 512, 1024][random.below(6)] * (1 + random.below(4));
    if used + pages < budget {
        let huge = random.below(2) == 0;
        pieces.extend(Piece::new(random, pages, huge));
    }
    let Some(last) = pieces.len().checked_sub(1) else { return };
    let chosen = random.below(last + 1);
    pieces[chosen].check("anonymous memory");
    match random.below(8) {
        0 => pieces[chosen].fill(random.next()),
        1..=3 if !pieces[chosen].half => pieces[chosen].give_back_half(),
        _ if used * 4 > budget * 3 => drop(pieces.swap_remove(chosen)),
        // Now and then all at once.
        _ if random.below(200) == 0 => pieces.clear(),
        _ => {}
    }
}

/// Fills memory with small pages, gives every second one back, and then requests huge pages. There
/// are none: the kernel has to compact memory for the request. It captures each huge page as it
/// forms, with free pages in it that never were allocated.
fn capture(random: &mut Random, budget: usize) {
    let mut holes = Piece::new(random, budget * 11 / 10, false);
    holes.iter_mut().for_each(Piece::give_back_half);
    let huge = Piece::new(random, budget * 2 / 5, true);
    // Gives a faulty host time to do damage.
    std::thread::sleep(Duration::from_millis(500));
    huge.iter().chain(&holes).for_each(|piece| piece.check("huge pages made of small ones"));
}

/// Forks a child that sees the same memory and changes its copy, which must not change the
/// parent's.
fn fork(random: &mut Random, pieces: &mut [Piece]) {
    let seed = random.next();
    // SAFETY: this process has one thread, so the child may run any code.
    match unsafe { libc::fork() } {
        0 => {
            for piece in pieces.iter_mut() {
                piece.check("a fork");
                piece.fill(seed);
                piece.check("a fork's copy");
            }
            std::process::exit(0);
        }
        child if child > 0 => wait(child),
        _ => {}
    }
    pieces.iter().for_each(|piece| piece.check("memory after a fork"));
}

/// Waits for a child; ends with the child's exit code if it failed.
fn wait(child: i32) {
    let mut status = 0;
    // SAFETY: `status` outlives the call.
    while unsafe { libc::waitpid(child, &raw mut status, 0) } < 0 {}
    if libc::WIFSIGNALED(status) {
        println!("PPR-LOAD FAILED: a process was killed by signal {}", libc::WTERMSIG(status));
        std::process::exit(1);
    }
    if libc::WEXITSTATUS(status) != 0 {
        std::process::exit(1);
    }
}

/// A file that is written, read back and removed.
fn file(random: &mut Random, name: &str, pages: usize) {
    let seed = random.next();
    let bytes: Vec<u8> = (0..pages as u64 * 512).flat_map(|at| word(seed, at).to_le_bytes()).collect();
    if std::fs::write(name, &bytes).is_ok() {
        let mut back = Vec::new();
        if std::fs::File::open(name).and_then(|mut file| file.read_to_end(&mut back)).is_ok() && back != bytes {
            let at = back.chunks(8).zip(bytes.chunks(8)).position(|(a, b)| a != b).unwrap_or(0);
            let found = |bytes: &[u8]| u64::from_le_bytes(std::array::from_fn(|i| bytes[at * 8 + i]));
            corrupt("a file", at, found(&back), found(&bytes));
        }
        CHECKS.fetch_add(pages as u64, Relaxed);
    }
    let _ = std::fs::remove_file(name);
}

/// Pages that pass through the kernel's pipes.
fn pipe(random: &mut Random) {
    if let Ok((mut from, mut to)) = std::io::pipe() {
        let seed = random.next();
        let bytes: Vec<u8> = (0..512 * 12).flat_map(|at| word(seed, at).to_le_bytes()).collect();
        let mut back = vec![0; bytes.len()];
        if to.write_all(&bytes).is_ok() && from.read_exact(&mut back).is_ok() && back != bytes {
            corrupt("a pipe", 0, 0, 0);
        }
        CHECKS.fetch_add(12, Relaxed);
    }
}

/// Makes the kernel move pages.
fn disturb(random: &mut Random, mib: u64) {
    let say = |path: &str, what: &str| drop(std::fs::write(path, what));
    match random.below(8) {
        0 if random.below(4) == 0 => say("/proc/sys/vm/compact_memory", "1"),
        0 | 1 => say("/proc/sys/vm/drop_caches", "3"),
        2..=4 => say("/proc/sys/vm/nr_hugepages", &(mib / 32).to_string()),
        5 | 6 => say("/proc/sys/vm/nr_hugepages", "0"),
        _ => say("/sys/kernel/mm/transparent_hugepage/khugepaged/scan_sleep_millisecs", "10"),
    }
    std::thread::sleep(Duration::from_millis(50 + random.next() % 200));
}

fn main() {
    let number = |at| std::env::args().nth(at).and_then(|arg| arg.parse::<u64>().ok());
    let (Some(seconds), Some(mib)) = (number(1), number(2)) else {
        println!("usage: ppr-load SECONDS MIB");
        std::process::exit(2);
    };
    let budget = (mib << 20) as usize / 4096;
    // Disabled by default in guests of less than 512 MiB.
    for (file, word) in [("enabled", "madvise"), ("defrag", "always")] {
        let _ = std::fs::write(format!("/sys/kernel/mm/transparent_hugepage/{file}"), word);
    }
    let _ = std::fs::write("/proc/sys/vm/nr_hugepages", "0");
    capture(&mut Random(mib), budget);
    let end = Instant::now() + Duration::from_secs(seconds);
    let (mut sum_from, mut sum_to) = std::io::pipe().expect("a pipe");
    let mut children = Vec::new();
    for role in 0..5u64 {
        // SAFETY: this process has one thread, so the child may run any code.
        let child = unsafe { libc::fork() };
        if child != 0 {
            children.push(child);
            continue;
        }
        let mut random = Random(role << 32 | u64::from(std::process::id()));
        let mut pieces = Vec::new();
        while Instant::now() < end {
            match role {
                0 | 1 => churn(&mut random, &mut pieces, budget * 3 / 8),
                2 => {
                    churn(&mut random, &mut pieces, budget / 16);
                    fork(&mut random, &mut pieces);
                }
                3 => {
                    let pages = 1 + random.below(budget / 16);
                    file(&mut random, "/tmp/ppr-load", pages);
                    pipe(&mut random);
                }
                _ => disturb(&mut random, mib),
            }
        }
        pieces.iter().for_each(|piece| piece.check("memory at the end"));
        let _ = sum_to.write_all(&CHECKS.load(Relaxed).to_le_bytes());
        std::process::exit(0);
    }
    drop(sum_to);
    children.into_iter().for_each(wait);
    let (mut checks, mut one) = (0, [0; 8]);
    while sum_from.read_exact(&mut one).is_ok() {
        checks += u64::from_le_bytes(one);
    }
    println!("PPR-LOAD PASS checks={checks}");
}
