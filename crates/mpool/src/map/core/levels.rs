//! How much memory there is.

use std::sync::Arc;
use std::time::{Duration, Instant};

use kmem::cgroup::MemoryGroups;
use kmem::{procfs, psi};

use crate::map::settings::Settings;

/// Share of time lost to memory, in percent, that counts as full pressure.
const FULL_STALL: f64 = 40.0;
/// Bytes left to the rest of the program, which may take them before memory is looked at again:
/// the maps' memory cannot be swapped out, and a full control group kills.
const RESERVE: u64 = 4 << 20;
/// The kernel's averages change slowly, and processes rarely move to another control group: looking
/// more often shows nothing new.
const SLOW_PERIOD: Duration = Duration::from_secs(1);

/// The memory levels last read, bytes.
#[derive(Clone, Debug, Default)]
pub(crate) struct Levels {
    /// Memory that the maps hold, plus available memory.
    pub(crate) total: u64,
    /// Available memory.
    pub(crate) available: u64,
    stall: f64,
    groups: Arc<MemoryGroups>,
    looked: Option<Instant>,
    looked_at_slow: Option<Instant>,
}

impl Levels {
    /// Reads the memory levels. A level that cannot be read keeps its last value.
    pub(super) fn look(&mut self, resident: u64, settings: &Settings) {
        if self.looked_at_slow.is_none_or(|at| at.elapsed() >= SLOW_PERIOD) {
            self.stall = psi::memory().ok().flatten().map_or(0.0, |pressure| pressure.some.avg10);
            self.groups = MemoryGroups::find().map_or_else(|_| self.groups.clone(), Arc::new);
            self.looked_at_slow = Some(Instant::now());
        }
        let system = procfs::meminfo().ok().map(|m| m.available_kib << 10);
        let available = system.into_iter().chain(self.groups.headroom()).min().unwrap_or(self.available);
        self.set(resident, available.saturating_sub(RESERVE), settings);
        self.looked = Some(Instant::now());
    }

    fn set(&mut self, resident: u64, available: u64, settings: &Settings) {
        self.total = (resident + available).min(settings.max_bytes.unwrap_or(u64::MAX));
        self.available = self.total.saturating_sub(resident);
    }

    pub(super) fn age(&self) -> Duration {
        self.looked.map_or(Duration::MAX, |at| at.elapsed())
    }

    fn mark(&self, share: f64) -> u64 {
        (self.total as f64 * share.clamp(0.0, 1.0)) as u64
    }

    /// Whether less than this share of the total is available.
    pub(super) fn is_below(&self, share: f64) -> bool {
        self.available < self.mark(share)
    }

    /// Bytes that must go for this share to be available.
    pub(super) fn missing_to(&self, share: f64) -> u64 {
        self.mark(share).saturating_sub(self.available)
    }

    /// Bytes that the maps hold when this share is available.
    pub(super) fn until(&self, share: f64) -> u64 {
        self.total - self.mark(share)
    }

    /// Bytes that the maps may hold.
    pub(super) fn limit(&self, settings: &Settings) -> u64 {
        self.until(settings.floor)
    }

    /// 0 to 1.
    pub(super) fn pressure(&self, settings: &Settings) -> f64 {
        let (low, floor) = (self.mark(settings.low), self.mark(settings.floor));
        let span = low.saturating_sub(floor).max(1) as f64;
        let memory = low.saturating_sub(self.available) as f64 / span;
        memory.max(self.stall / FULL_STALL).min(1.0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn marks_and_pressure() {
        let settings = Settings { low: 0.2, high: 0.3, floor: 0.1, ..Settings::default() };
        let mut levels = Levels::default();
        levels.set(700, 300, &settings);
        assert_eq!((levels.total, levels.limit(&settings), levels.pressure(&settings)), (1000, 900, 0.0));
        assert!(!levels.is_below(0.3));
        levels.set(850, 150, &settings);
        assert!(levels.is_below(settings.low) && levels.missing_to(settings.high) == 150);
        assert_eq!(levels.pressure(&settings), 0.5);
        levels.set(950, 50, &settings);
        assert_eq!(levels.pressure(&settings), 1.0);
        levels.stall = 20.0;
        levels.set(100, 900, &settings);
        assert_eq!(levels.pressure(&settings), 0.5, "the kernel's word counts too");
        levels.set(100, 900, &Settings { max_bytes: Some(150), ..settings });
        assert_eq!((levels.total, levels.available), (150, 50));
        levels.set(200, 900, &Settings { max_bytes: Some(150), ..Settings::default() });
        assert_eq!(levels.available, 0);
    }

    #[test]
    fn looks_at_this_system() {
        let mut levels = Levels::default();
        levels.look(0, &Settings::default());
        assert!(levels.total > 1 << 20 && levels.age() < Duration::from_secs(60));
    }
}
