//! The reaper's thread: it evicts before the kernel must, ages pages, and watches their uses.

use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use super::Core;

/// The default of [`Settings::watch`].
const WATCH: Duration = Duration::from_secs(1);

/// Uses remembered for each page that there is memory for; with more, a half-life has passed. Fewer
/// uses distinguish popular pages badly from lucky ones; with more it takes longer to notice newly
/// popular pages.
const USES: u64 = 16;

impl Core {
    /// Runs the reaper until the cache ends.
    pub(crate) fn reap(&self) {
        let mut watched = Instant::now();
        let mut aged = Instant::now();
        let mut half_lives = 0.0;
        while !self.reaper.stopping.load(Ordering::Acquire) {
            self.reaper.alarmed.store(false, Ordering::Relaxed);
            let levels = self.look_at_memory();
            let near = levels.is_below(self.settings.high * 1.5);
            self.marks.full.store(near, Ordering::Relaxed);
            if levels.is_below(self.settings.low) {
                let gone = self.evict();
                self.stats.reaped.fetch_add(gone as u64, Ordering::Relaxed);
                self.look_at_memory();
                *self.reaper.room.0.lock() += 1;
                self.reaper.room.1.notify_all();
            }
            // Time passes faster under pressure.
            let speed = 1.0 + self.pressure() * (self.settings.ttl_divisor - 1.0).max(0.0);
            half_lives += aged.elapsed().as_secs_f64() * speed * 8.0 / self.settings.ttl.as_secs_f64().max(1e-3);
            aged = Instant::now();
            self.age(half_lives as u64);
            if near && watched.elapsed() >= self.settings.watch.unwrap_or(WATCH) {
                if self.settings.watch.is_some() {
                    self.watch();
                }
                // Counted in uses, since a half-life by the clock is too short for one load and too
                // long for another.
                if self.heat() > USES * self.resident.load(Ordering::Relaxed) as u64 {
                    half_lives += 1.0;
                }
                watched = Instant::now();
            }
            let pause = self.settings.tick * if near { 1 } else { 10 };
            let mut asked = self.reaper.work.0.lock();
            self.reaper.work.1.wait_while_for(&mut asked, |asked| !*asked, pause);
            *asked = false;
        }
    }
}
