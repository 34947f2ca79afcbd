//! A thread that times its own loads and stores, as a guest's would be, while its memory is merged.
//!
//! Each millisecond it does a burst: loads at random pages of the whole memory, stores at random
//! pages among the written ones ([`crate::harness::content::written`]), of the value that is there
//! already. Every written page is written ten times a second on average, so that most are found
//! quiet now and then and merged under the writer's hands. What is timed is the access alone,
//! without the thread's waking up: page faults, copying, waiting for a window.
//!
//! *Unqueued* times leave out how long the thread stood in line for a CPU that others had, which
//! the kernel counts for each thread (`/proc/thread-self/schedstat`, the second number). A host
//! with an idle CPU would see about that, or less: an agent that had to wait for a CPU in the midst
//! of its window is not left out.

#![allow(unsafe_code)] // Raw memory that is exchanged while it is used.

use std::fs::File;
use std::os::unix::fs::FileExt;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, anyhow};
use bench_common::random::Random;
use hdrhistogram::Histogram;

/// Between two bursts.
const STEP: Duration = Duration::from_millis(1);
/// In a burst.
const LOADS: usize = 40;
/// Slower accesses are asked for the time in line.
const SLOW: u64 = 20_000;
/// More time than this between two accesses of a burst means that another task had the CPU.
const GAP: u64 = 10_000;
/// A written page is written so often, a second.
const STORES_A_SECOND: usize = 10;

/// Times in nanoseconds, up to 17 s, to 1 %.
type Times = Histogram<u64>;

/// As they were, and unqueued.
fn both() -> Result<[Times; 2]> {
    let times = || Histogram::new_with_bounds(1, 1 << 34, 2);
    Ok([times()?, times()?])
}

/// What was timed of one kind of access.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(crate) struct Timing {
    /// How many.
    pub(crate) count: u64,
    /// 99.99 % are not slower, in nanoseconds.
    pub(crate) p9999: u64,
    /// The slowest, in nanoseconds.
    pub(crate) max: u64,
    /// 99.99 % of the unqueued times are not longer, in nanoseconds.
    pub(crate) unqueued_p9999: u64,
    /// The longest unqueued time, in nanoseconds.
    pub(crate) unqueued_max: u64,
}

impl Timing {
    fn of([all, unqueued]: &[Times; 2]) -> Self {
        Self {
            count: all.len(),
            p9999: all.value_at_quantile(0.9999),
            max: all.max(),
            unqueued_p9999: unqueued.value_at_quantile(0.9999),
            unqueued_max: unqueued.max(),
        }
    }

    /// As a client says it.
    pub(crate) fn say(&self) -> String {
        format!("{} {} {} {} {}", self.count, self.p9999, self.max, self.unqueued_p9999, self.unqueued_max)
    }

    /// What a client has said of loads and of stores.
    pub(crate) fn hear(line: &str) -> Result<[Timing; 2]> {
        let numbers: Vec<u64> = line.split_whitespace().filter_map(|word| word.parse().ok()).collect();
        let timing =
            |of: &[u64]| Timing { count: of[0], p9999: of[1], max: of[2], unqueued_p9999: of[3], unqueued_max: of[4] };
        match numbers.len() {
            10 => Ok([timing(&numbers[..5]), timing(&numbers[5..])]),
            _ => Err(anyhow!("a client says {line:?} of its times")),
        }
    }
}

/// Memory to probe; it outlives the thread.
pub(crate) struct Target {
    /// A word of each page to load.
    pub(crate) loads: Vec<usize>,
    /// Addresses of words to store to, and their values.
    pub(crate) stores: Vec<(usize, u64)>,
}

/// The running thread.
pub(crate) struct Probe {
    stop: Arc<AtomicBool>,
    thread: JoinHandle<Result<[Timing; 2]>>,
}

impl Probe {
    /// Starts it.
    ///
    /// # Safety
    ///
    /// All addresses are of words in memory of this process that stays mapped, readable and
    /// writable, until [`Probe::end`], and no other code writes to the words to store to.
    pub(crate) unsafe fn start(target: Target) -> Result<Self> {
        let stop = Arc::new(AtomicBool::new(false));
        let seen = stop.clone();
        let body = move || {
            // SAFETY: as promised by the caller.
            unsafe { run(&target, &seen) }
        };
        let thread = std::thread::Builder::new().name("bench-probe".into()).spawn(body).context("no thread")?;
        Ok(Self { stop, thread })
    }

    /// Ends it: loads and stores.
    pub(crate) fn end(self) -> Result<[Timing; 2]> {
        self.stop.store(true, Ordering::Relaxed);
        self.thread.join().map_err(|_| anyhow!("the probing thread panicked"))?
    }
}

/// The time that the calling thread has stood in line for a CPU.
struct Line {
    schedstat: Option<File>,
    /// In nanoseconds, when it was last asked.
    stood: u64,
    /// When the last access was over.
    since: Instant,
}

impl Line {
    fn new() -> Self {
        let path = "/proc/thread-self/schedstat";
        let schedstat =
            File::open(path).inspect_err(|e| eprintln!("unqueued times include waiting for a CPU: {path}: {e}")).ok();
        Self { schedstat, stood: 0, since: Instant::now() }
    }

    /// Nanoseconds since this was last asked.
    fn more(&mut self) -> u64 {
        let mut text = [0; 64];
        let len = self.schedstat.as_ref().and_then(|file| file.read_at(&mut text, 0).ok()).unwrap_or(0);
        let text = String::from_utf8_lossy(&text[..len]);
        let stood = text.split_whitespace().nth(1).and_then(|number| number.parse().ok()).unwrap_or(self.stood);
        stood - std::mem::replace(&mut self.stood, stood)
    }

    /// Times an access, and enters how long it took, as it was and unqueued.
    fn time(&mut self, into: &mut [Times; 2], access: impl FnOnce()) {
        let mut start = Instant::now();
        if start.duration_since(self.since).as_nanos() as u64 > GAP {
            self.more();
            start = Instant::now();
        }
        access();
        let ns = start.elapsed().as_nanos() as u64;
        let queued = if ns > SLOW { self.more() } else { 0 };
        into[0].saturating_record(ns);
        into[1].saturating_record(ns.saturating_sub(queued));
        self.since = Instant::now();
    }
}

/// # Safety
///
/// As [`Probe::start`].
unsafe fn run(target: &Target, stop: &AtomicBool) -> Result<[Timing; 2]> {
    let (mut loads, mut stores) = (both()?, both()?);
    let mut line = Line::new();
    let mut random = Random::new(0);
    let mut next = Instant::now();
    // Fractions of a store are carried over.
    let (mut due, a_step) = (0, target.stores.len() * STORES_A_SECOND * STEP.as_millis() as usize);
    while !stop.load(Ordering::Relaxed) {
        due += a_step;
        for _ in 0..LOADS.min(target.loads.len()) {
            let address = target.loads[random.below(target.loads.len())];
            // SAFETY: a word of mapped memory, as promised by the caller; volatile, since the
            // memory under it is exchanged.
            line.time(&mut loads, || _ = std::hint::black_box(unsafe { (address as *const u64).read_volatile() }));
        }
        while due >= 1000 {
            due -= 1000;
            let (address, value) = target.stores[random.below(target.stores.len())];
            // SAFETY: the address is mapped and writable until the probe ends; no other code writes
            // to it.
            line.time(&mut stores, || unsafe { (address as *mut u64).write_volatile(value) });
        }
        // Bursts that a stall has delayed are not made up for.
        next = (next + STEP).max(Instant::now());
        std::thread::sleep(next - Instant::now().min(next));
    }
    Ok([Timing::of(&loads), Timing::of(&stores)])
}

#[cfg(test)]
mod tests;
