//! A thread that writes something new into some pages each second, as a guest at work does.

#![allow(unsafe_code)] // Raw memory that is exchanged while it is used.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, anyhow};
use bench_common::random::Random;

/// Between two bursts.
const STEP: Duration = Duration::from_millis(10);

/// The running thread.
pub(crate) struct Rewriting {
    stop: Arc<AtomicBool>,
    thread: JoinHandle<u64>,
}

impl Rewriting {
    /// Starts it: `a_second` of the words at these addresses, at random, get a new value each
    /// second.
    ///
    /// # Safety
    ///
    /// They are words of memory of this process that stays mapped and writable until
    /// [`Rewriting::end`], and no other code uses them.
    pub(crate) unsafe fn start(words: Vec<usize>, a_second: u64) -> Result<Self> {
        let stop = Arc::new(AtomicBool::new(false));
        let seen = stop.clone();
        let body = move || {
            // SAFETY: as promised by the caller.
            unsafe { run(&words, a_second, &seen) }
        };
        let thread = std::thread::Builder::new().name("bench-rewrite".into()).spawn(body).context("no thread")?;
        Ok(Self { stop, thread })
    }

    /// Ends it; how many words were written.
    pub(crate) fn end(self) -> Result<u64> {
        self.stop.store(true, Ordering::Relaxed);
        self.thread.join().map_err(|_| anyhow!("the rewriting thread panicked"))
    }
}

/// # Safety
///
/// As [`Rewriting::start`].
unsafe fn run(words: &[usize], a_second: u64, stop: &AtomicBool) -> u64 {
    // Another sequence in each process: they would write the same.
    let mut random = Random::new(std::process::id().into());
    let (start, mut done) = (Instant::now(), 0);
    while !stop.load(Ordering::Relaxed) {
        let due = (start.elapsed().as_secs_f64() * a_second as f64) as u64;
        while done < due {
            let word = words[random.below(words.len())];
            // SAFETY: as promised by the caller; volatile, since the memory under it is exchanged.
            unsafe { (word as *mut u64).write_volatile(random.next()) }
            done += 1;
        }
        std::thread::sleep(STEP);
    }
    done
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn words_are_rewritten_at_the_pace() {
        let mut memory = vec![0u64; 1000];
        let words = memory.iter_mut().map(|word| std::ptr::from_mut(word) as usize).collect();
        // SAFETY: `memory` outlives the thread, and is not touched meanwhile.
        let rewriting = unsafe { Rewriting::start(words, 500) }.unwrap();
        let start = Instant::now();
        std::thread::sleep(Duration::from_millis(300));
        let done = rewriting.end().unwrap();
        assert!(done > 0 && done <= (start.elapsed().as_secs_f64() * 500.0) as u64, "{done}");
        let changed = memory.iter().filter(|&&word| word != 0).count() as u64;
        assert!(changed > 0 && changed <= done);
    }
}
