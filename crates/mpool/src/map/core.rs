//! The core of a cache: how much memory its maps may hold, and which pages are evicted.
//!
//! # How much memory
//!
//! `total` is the memory that the maps hold plus the memory still available: the least of the
//! system's available memory, the headroom of the memory control group (both less 4 MiB for the
//! rest of the program), and [`Settings::max_bytes`]. Three marks, shares of `total`, rule what
//! happens when less than that is available:
//!
//! - below `high`: uses of pages are watched;
//! - below `low`: the reaper evicts until `high` is available again;
//! - `floor` is never used: a thread that needs a page waits for the reaper, or evicts.
//!
//! *Pressure* is 0 at `low` and 1 at `floor`, or follows the kernel's pressure stall information
//! when that is worse. Read-ahead shrinks with it, faults are delayed, and pages age faster.
//!
//! # Which pages go
//!
//! Each page has a *heat*: a use adds 1, and every half-life halves it. A half-life has passed when
//! 16 uses are remembered for each page that there is memory for, or an eighth of the time to live
//! ([`Settings::ttl`]) is over. A page that was not used for a whole time to live has no heat left;
//! those go first. Beyond that the coldest pages go, a page of a warm map counting ten times, of a
//! hot one a hundred times. Heat stays with a page after it is evicted: a page that is read often,
//! though rarely in a row, wins against the page that was read last. (With a zipfian load, a
//! quarter of the data in memory, this misses a fifth less often than the page cache does.)
//!
//! # Real uses, not only faults
//!
//! Asking for a page counts. Plain reads of mapped memory are not reported by the kernel. So once
//! in [`Settings::watch`] the reaper looks into the page tables of maps that are read so which
//! pages are there, counts those as used, and takes them out of the page tables (not out of
//! memory): a page that is used again comes back in a fraction of a microsecond, and shows next
//! time.

mod evict;
mod levels;
mod reaper;

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use kmem::uffd::Uffd;
use parking_lot::{Condvar, Mutex, RwLock, RwLockReadGuard};

use super::settings::Settings;
use super::state::MapState;
use super::window;
use crate::BLOCK;
use crate::error::MapError;
use levels::Levels;

#[derive(Default)]
pub(crate) struct Counters {
    pub(crate) loaded: AtomicU64,
    pub(crate) loads: AtomicU64,
    /// Nanoseconds.
    pub(crate) delayed: AtomicU64,
    pub(crate) waited: AtomicU64,
    pub(crate) reading: AtomicU64,
    pub(crate) placing: AtomicU64,
    pub(crate) faults: AtomicU64,
    pub(crate) reaped: AtomicU64,
    pub(crate) direct: AtomicU64,
    pub(crate) waits: AtomicU64,
    pub(crate) seen: AtomicU64,
    pub(crate) poisoned: AtomicU64,
    pub(crate) huge: AtomicU64,
}

/// The state that the maps and the threads of a cache share.
pub(crate) struct Core {
    pub(crate) uffd: Uffd,
    process: window::Process,
    pub(crate) settings: Settings,
    pub(crate) stats: Counters,
    /// Pages that threads are dropping: they count as resident until their memory is back.
    pub(crate) dropping: AtomicUsize,
    maps: RwLock<BTreeMap<usize, Arc<MapState>>>,
    /// Pages in memory.
    resident: AtomicUsize,
    /// Pages that are being loaded.
    loading: AtomicUsize,
    levels: Mutex<Levels>,
    marks: Marks,
    reaper: Signals,
    /// One thread chooses at a time.
    hand: Mutex<evict::Hand>,
}

/// What follows from the last look at memory.
#[derive(Default)]
struct Marks {
    /// The most pages in memory and being loaded.
    limit: AtomicUsize,
    /// The number of pages that wakes the reaper.
    alarm: AtomicUsize,
    /// `f64` bits of the pressure.
    pressure: AtomicU64,
    /// Less than the low mark is available.
    short: AtomicBool,
    /// Loading a page evicts another.
    full: AtomicBool,
}

/// How the reaper and other threads wake each other.
#[derive(Default)]
struct Signals {
    /// The alarm has woken it, and it has not looked at memory since.
    alarmed: AtomicBool,
    /// It is to end.
    stopping: AtomicBool,
    /// Wakes it.
    work: (Mutex<bool>, Condvar),
    /// Says that it has evicted.
    room: (Mutex<u64>, Condvar),
}

/// Adds the time since `start` to a counter; gives the time now.
pub(crate) fn add_time(counter: &AtomicU64, start: Instant) -> Instant {
    let now = Instant::now();
    counter.fetch_add((now - start).as_nanos() as u64, Ordering::Relaxed);
    now
}

/// Pause in which another thread gives memory back.
const DROPPING: Duration = Duration::from_micros(50);
/// How long a thread waits for the reaper before it evicts pages itself.
const PATIENCE: Duration = Duration::from_micros(500);

impl Core {
    /// A cache without maps.
    ///
    /// # Errors
    /// `Userfaultfd`.
    pub(crate) fn new(settings: Settings) -> Result<Self, MapError> {
        Ok(Self {
            uffd: window::userfaultfd()?,
            process: window::Process::this(),
            settings,
            stats: Counters::default(),
            dropping: AtomicUsize::new(0),
            maps: RwLock::default(),
            resident: AtomicUsize::new(0),
            loading: AtomicUsize::new(0),
            levels: Mutex::default(),
            marks: Marks::default(),
            reaper: Signals::default(),
            hand: Mutex::default(),
        })
    }

    /// Memory as it was last looked at.
    pub(crate) fn levels(&self) -> Levels {
        self.levels.lock().clone()
    }

    /// Pages in memory.
    pub(crate) fn resident_pages(&self) -> usize {
        self.resident.load(Ordering::Relaxed)
    }

    /// Ends the reaper.
    pub(crate) fn stop(&self) {
        self.reaper.stopping.store(true, Ordering::Release);
        self.wake_reaper();
    }

    pub(crate) fn maps(&self) -> RwLockReadGuard<'_, BTreeMap<usize, Arc<MapState>>> {
        self.maps.read()
    }

    pub(crate) fn add(&self, map: &Arc<MapState>) {
        let mut maps = self.maps.write();
        maps.insert(map.window.range().start, map.clone());
    }

    pub(crate) fn remove(&self, map: &Arc<MapState>) {
        let mut maps = self.maps.write();
        maps.remove(&map.window.range().start);
        drop(maps);
        // A fault thread may still be loading pages, the reaper dropping some. Pages counted after
        // this would be counted forever.
        map.close();
        if Arc::strong_count(map) > 1 {
            // Another thread still uses it: its memory is freed now, its addresses when that thread
            // is done.
            let _ = map.window.drop_pages(0, map.pages);
        }
        let mut gone = 0;
        for word in &map.resident {
            gone += word.swap(0, Ordering::AcqRel).count_ones() as usize;
        }
        map.resident_pages.fetch_sub(gone, Ordering::Relaxed);
        self.resident.fetch_sub(gone, Ordering::Relaxed);
    }

    pub(crate) fn map_at(&self, address: usize) -> Option<Arc<MapState>> {
        let maps = self.maps();
        let (_, map) = maps.range(..=address).next_back()?;
        (address < map.window.range().end()).then(|| map.clone())
    }

    pub(crate) fn pressure(&self) -> f64 {
        f64::from_bits(self.marks.pressure.load(Ordering::Relaxed))
    }

    /// Less than the low mark is available.
    pub(crate) fn is_short(&self) -> bool {
        self.marks.short.load(Ordering::Relaxed)
    }

    /// Whether loading a page evicts another, as the reaper last found.
    pub(crate) fn is_full(&self) -> bool {
        self.marks.full.load(Ordering::Relaxed)
    }

    /// Read-ahead of up to `pages` pages: less under pressure, at least one. Without a reaper it is
    /// not cut.
    pub(crate) fn throttled(&self, pages: usize) -> usize {
        if !self.settings.reaper {
            return pages.max(1);
        }
        ((pages as f64 * (1.0 - self.pressure())) as usize).max(1)
    }

    fn wake_reaper(&self) {
        *self.reaper.work.0.lock() = true;
        self.reaper.work.1.notify_one();
    }

    /// Waits until `pages` more may be loaded; [`Core::settle`] ends their loading. Gives the time
    /// when it was done.
    pub(crate) fn admit(&self, pages: usize) -> Instant {
        let start = Instant::now();
        let pressure = self.pressure();
        if pressure > 0.5 && self.settings.reaper {
            std::thread::sleep(self.settings.max_delay.mul_f64((pressure - 0.5) * 2.0));
        }
        self.stats.loads.fetch_add(1, Ordering::Relaxed);
        let start = add_time(&self.stats.delayed, start);
        self.make_room(pages);
        add_time(&self.stats.waited, start)
    }

    fn make_room(&self, pages: usize) {
        // Also with a reaper: it may not have run for long.
        self.look_if_stale();
        let mut waited = false;
        loop {
            let wanted =
                self.loading.fetch_add(pages, Ordering::AcqRel) + pages + self.resident.load(Ordering::Acquire);
            if wanted <= self.marks.limit.load(Ordering::Relaxed) {
                if wanted > self.marks.alarm.load(Ordering::Relaxed)
                    && self.settings.reaper
                    && !self.reaper.alarmed.swap(true, Ordering::Relaxed)
                {
                    self.wake_reaper();
                }
                return;
            }
            self.loading.fetch_sub(pages, Ordering::AcqRel);
            if self.settings.reaper && !waited {
                waited = true;
                self.stats.waits.fetch_add(1, Ordering::Relaxed);
                let mut seen = self.reaper.room.0.lock();
                self.wake_reaper();
                self.reaper.room.1.wait_for(&mut seen, PATIENCE);
                continue;
            }
            if self.excess(pages) <= self.dropping.load(Ordering::Acquire) {
                // Their memory is about to be there. What could be evicted meanwhile is warmer.
                std::thread::sleep(DROPPING);
                continue;
            }
            if self.evict_directly(pages) == 0 {
                // All resident pages are pinned, or other maps'. The page is needed, so the limit
                // yields.
                self.loading.fetch_add(pages, Ordering::AcqRel);
                return;
            }
        }
    }

    /// By how many pages `pages` more would exceed the limit.
    fn excess(&self, pages: usize) -> usize {
        let wanted = self.loading.load(Ordering::Acquire) + pages + self.resident.load(Ordering::Acquire);
        wanted.saturating_sub(self.marks.limit.load(Ordering::Relaxed))
    }

    /// The pages are loaded, or not.
    pub(crate) fn settle(&self, pages: usize) {
        self.loading.fetch_sub(pages, Ordering::AcqRel);
    }

    pub(crate) fn mark_resident(&self, map: &MapState, page: usize) {
        let bit = 1 << (page % 64);
        // Counted before the bit is set, so that a thread that drops the page at once finds it
        // counted.
        map.resident_pages.fetch_add(1, Ordering::Relaxed);
        self.resident.fetch_add(1, Ordering::Relaxed);
        if map.resident[page / 64].fetch_or(bit, Ordering::AcqRel) & bit == 0 {
            self.stats.loaded.fetch_add(1, Ordering::Relaxed);
        } else {
            map.resident_pages.fetch_sub(1, Ordering::Relaxed);
            self.resident.fetch_sub(1, Ordering::Relaxed);
        }
    }

    /// Looks at how much memory there is, and sets the limit and the pressure.
    pub(crate) fn look_at_memory(&self) -> Levels {
        let mut levels = self.levels.lock();
        levels.look((self.resident.load(Ordering::Relaxed) * BLOCK) as u64, &self.settings);
        let (limit, pressure) = (levels.limit(&self.settings), levels.pressure(&self.settings));
        self.marks.limit.store((limit / BLOCK as u64) as usize, Ordering::Relaxed);
        self.marks.alarm.store((levels.until(self.settings.low) / BLOCK as u64) as usize, Ordering::Relaxed);
        self.marks.pressure.store(pressure.to_bits(), Ordering::Relaxed);
        self.marks.short.store(levels.is_below(self.settings.low), Ordering::Relaxed);
        levels.clone()
    }

    fn look_if_stale(&self) {
        // The reaper looks first.
        let due = self.settings.tick * (1 + u32::from(self.settings.reaper));
        let stale = self.levels.try_lock().is_some_and(|levels| levels.age() > due);
        if stale {
            self.look_at_memory();
        }
    }
}
