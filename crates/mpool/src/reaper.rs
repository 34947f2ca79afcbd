//! The cache that maps share: how much memory there is for them, who serves their faults, and the
//! reaper.
//!
//! # How much memory
//!
//! `total` is what the maps hold and what could still be had: the least of the system's available
//! memory, the headroom of the memory control group (both less 4 MiB for the rest of the program),
//! and [`Settings::max_bytes`]. Three marks, shares of `total`, say what to do when less than that
//! is available:
//!
//! - below `high`: uses of pages are watched;
//! - below `low`: the reaper evicts until `high` is available again;
//! - `floor` is never used: whoever wants a page waits for the reaper, or evicts.
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
//! hot one a hundred times. Heat stays with a page after it is evicted: what is read often, though
//! rarely in a row, wins against what was read last. (With a zipfian load, a quarter of the data in
//! memory, this misses a fifth less often than the page cache does.)
//!
//! # Real uses, not only faults
//!
//! Asking for a page counts. Of memory that is just read the kernel tells nothing; so once in
//! [`Settings::watch`] the reaper looks into the page tables which pages are there, counts those as
//! used, and takes them out of the page tables (not out of memory): a page that is used again comes
//! back in a fraction of a microsecond, and shows next time.

mod evict;
mod levels;

use std::collections::BTreeMap;
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError, RwLock, RwLockReadGuard};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use kmem::uffd::Uffd;
use rustix::event::EventfdFlags;

use crate::error::{During, MapError};
use crate::map::{MapInner, fill, window};
use crate::{BLOCK, Temperature};
use levels::Levels;

/// The knobs of a cache.
#[derive(Clone, Debug, PartialEq)]
pub struct Settings {
    /// The most bytes that the maps may hold together. Default: none but what the system allows.
    pub max_bytes: Option<u64>,
    /// Share of the total below which the reaper begins. Default: 0.05.
    pub low: f64,
    /// Share of the total at which it ends. Default: 0.07.
    pub high: f64,
    /// Share of the total that is never used. Default: 0.02.
    pub floor: f64,
    /// How long a page of a cold map keeps some heat without being used, while there is no
    /// pressure; less when the others are used a lot. Default: 640 s.
    pub ttl: Duration,
    /// By how much full pressure divides the time to live. Default: 25.
    pub ttl_divisor: f64,
    /// How often page tables are looked at for uses, while memory is below `high`. `None`: never.
    /// Default: 1 s.
    pub watch: Option<Duration>,
    /// How often memory is looked at. Default: 10 ms while it is short, ten times that while not.
    pub tick: Duration,
    /// Threads that serve faults. Default: 4.
    pub fault_threads: usize,
    /// How long a fault is delayed at full pressure. Default: 1 ms.
    pub max_delay: Duration,
    /// Pages that a fault loads, without pressure, when nothing was advised. Default: 8.
    pub read_ahead: usize,
    /// Whether there is a reaper. Without, whoever needs memory evicts pages in the order of their
    /// addresses, faults are not delayed, and read-ahead is not cut. Default: yes.
    pub reaper: bool,
}

impl Default for Settings {
    fn default() -> Self {
        Self {
            max_bytes: None,
            low: 0.05,
            high: 0.07,
            floor: 0.02,
            ttl: Duration::from_secs(640),
            ttl_divisor: 25.0,
            watch: Some(WATCH),
            tick: Duration::from_millis(10),
            fault_threads: 4,
            max_delay: Duration::from_millis(1),
            read_ahead: 8,
            reaper: true,
        }
    }
}

/// What a cache did and has.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct CacheStats {
    /// Maps.
    pub maps: usize,
    /// Bytes that they hold in memory.
    pub resident_bytes: u64,
    /// Bytes that they could hold.
    pub total_bytes: u64,
    /// Bytes still to be had.
    pub available_bytes: u64,
    /// 0 to 1.
    pub pressure: f64,
    /// Pages loaded.
    pub loaded: u64,
    /// Times that some were: what was missing of one call, or for one fault, read together.
    pub loads: u64,
    /// How long, of all loads together, loading was delayed under pressure.
    pub delayed: Duration,
    /// How long it waited for memory: for the reaper, or for evicting something itself.
    pub waited: Duration,
    /// How long it read from the media, and checked what it had read.
    pub reading: Duration,
    /// How long it put pages in their place.
    pub placing: Duration,
    /// Faults that a thread of the cache served.
    pub faults: u64,
    /// Pages that the reaper evicted.
    pub reaped: u64,
    /// Pages that whoever needed memory had to evict.
    pub evicted_directly: u64,
    /// Times that somebody waited for memory.
    pub waits: u64,
    /// Pages seen used in page tables.
    pub seen_used: u64,
    /// Pages that could not be read, so that touching them raises SIGBUS.
    pub poisoned: u64,
    /// Huge pages made of pages that were loaded ahead.
    pub huge: u64,
}

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

/// What the maps and the threads of a cache share.
pub(crate) struct Core {
    pub(crate) uffd: Uffd,
    pub(crate) settings: Settings,
    pub(crate) stats: Counters,
    maps: RwLock<BTreeMap<usize, Arc<MapInner>>>,
    /// Pages in memory.
    resident: AtomicUsize,
    /// Pages about to be.
    loading: AtomicUsize,
    /// Pages that may be there and about to be.
    limit: AtomicUsize,
    /// From so many on the reaper is woken.
    alarm: AtomicUsize,
    alarmed: AtomicBool,
    levels: Mutex<Levels>,
    /// `f64` bits of the pressure.
    pressure: AtomicU64,
    short: AtomicBool,
    full: AtomicBool,
    /// Wakes the reaper.
    work: (Mutex<bool>, Condvar),
    /// Says that the reaper has evicted.
    room: (Mutex<u64>, Condvar),
    /// One chooses at a time.
    hand: Mutex<evict::Hand>,
    stopping: AtomicBool,
}

/// Memory for maps, with the threads that serve faults and evict. Clones are the same cache; it
/// ends with the last of them and of its maps.
#[derive(Clone)]
pub struct Mcache {
    pub(crate) handle: Arc<Handle>,
}

impl std::fmt::Debug for Mcache {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_tuple("Mcache").field(&self.stats()).finish()
    }
}

/// Keeps the threads running.
pub(crate) struct Handle {
    pub(crate) core: Arc<Core>,
    stop: Arc<OwnedFd>,
    threads: Vec<JoinHandle<()>>,
}

impl Drop for Handle {
    fn drop(&mut self) {
        self.core.stopping.store(true, Ordering::Release);
        let _ = rustix::io::write(&*self.stop, &u64::MAX.saturating_sub(1).to_ne_bytes());
        self.core.wake_reaper();
        self.threads.drain(..).for_each(|thread| drop(thread.join()));
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Mcache {
    /// A cache without maps.
    ///
    /// # Errors
    ///
    /// `Userfaultfd`: not permitted, or the kernel is older than 6.6; `Io`.
    pub fn new(settings: Settings) -> Result<Self, MapError> {
        let reaper = settings.reaper;
        let threads = settings.fault_threads.max(1);
        let core = Arc::new(Core {
            uffd: window::userfaultfd()?,
            settings,
            stats: Counters::default(),
            maps: RwLock::default(),
            resident: AtomicUsize::new(0),
            loading: AtomicUsize::new(0),
            limit: AtomicUsize::new(0),
            alarm: AtomicUsize::new(0),
            alarmed: AtomicBool::new(false),
            levels: Mutex::default(),
            pressure: AtomicU64::new(0),
            short: AtomicBool::new(false),
            full: AtomicBool::new(false),
            work: Default::default(),
            room: Default::default(),
            hand: Mutex::default(),
            stopping: AtomicBool::new(false),
        });
        core.look_at_memory();
        let stop = rustix::event::eventfd(0, EventfdFlags::CLOEXEC).map_err(io::Error::from);
        let stop = Arc::new(stop.during("making", "an eventfd")?);
        let mut handle = Handle { core: core.clone(), stop: stop.clone(), threads: Vec::new() };
        let mut start = |name: String, run: Box<dyn FnOnce() + Send>| -> Result<(), MapError> {
            let run = move || {
                // Only a wish: where it is refused these threads wait longer for the processor.
                let _ = kmem::sched::slice::request(SLICE);
                run();
            };
            let thread = std::thread::Builder::new().name(name).spawn(run).during("starting", "a thread")?;
            handle.threads.push(thread);
            Ok(())
        };
        for i in 0..threads {
            let (core, stop) = (core.clone(), stop.clone());
            start(format!("mcache-fault-{i}"), Box::new(move || fill::serve_faults(&core, stop.as_fd())))?;
        }
        if reaper {
            start("mcache-reaper".into(), Box::new(move || core.reap()))?;
        }
        Ok(Self { handle: Arc::new(handle) })
    }

    /// What it did and has.
    pub fn stats(&self) -> CacheStats {
        let core = &self.handle.core;
        let levels = lock(&core.levels).clone();
        let get = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
        let time = |counter: &AtomicU64| Duration::from_nanos(get(counter));
        CacheStats {
            maps: core.maps().len(),
            resident_bytes: (core.resident.load(Ordering::Relaxed) * BLOCK) as u64,
            total_bytes: levels.total,
            available_bytes: levels.available,
            pressure: core.pressure(),
            loaded: get(&core.stats.loaded),
            loads: get(&core.stats.loads),
            delayed: time(&core.stats.delayed),
            waited: time(&core.stats.waited),
            reading: time(&core.stats.reading),
            placing: time(&core.stats.placing),
            faults: get(&core.stats.faults),
            reaped: get(&core.stats.reaped),
            evicted_directly: get(&core.stats.direct),
            waits: get(&core.stats.waits),
            seen_used: get(&core.stats.seen),
            poisoned: get(&core.stats.poisoned),
            huge: get(&core.stats.huge),
        }
    }
}

/// Adds the time since `start` to a counter; gives the time now.
pub(crate) fn add_time(counter: &AtomicU64, start: Instant) -> Instant {
    let now = Instant::now();
    counter.fetch_add((now - start).as_nanos() as u64, Ordering::Relaxed);
    now
}

/// What the threads of a cache ask the scheduler for: they run often and briefly, and others wait
/// for them; the reaper runs longer, and should not keep others from the processor for so long.
const SLICE: Duration = Duration::from_micros(100);

/// The default of [`Settings::watch`].
const WATCH: Duration = Duration::from_secs(1);

/// So many uses are remembered for each page that there is memory for; when there are more, a
/// half-life has passed. Fewer tell popular pages from lucky ones badly; with more it takes longer
/// to notice that others have become popular.
const USES: u64 = 16;

/// How long to wait for the reaper before helping oneself.
const PATIENCE: Duration = Duration::from_micros(500);

impl Core {
    fn maps(&self) -> RwLockReadGuard<'_, BTreeMap<usize, Arc<MapInner>>> {
        self.maps.read().unwrap_or_else(PoisonError::into_inner)
    }

    pub(crate) fn add(&self, map: &Arc<MapInner>) {
        let mut maps = self.maps.write().unwrap_or_else(PoisonError::into_inner);
        maps.insert(map.window.range().start, map.clone());
    }

    pub(crate) fn remove(&self, map: &Arc<MapInner>) {
        let mut maps = self.maps.write().unwrap_or_else(PoisonError::into_inner);
        maps.remove(&map.window.range().start);
        drop(maps);
        // A fault thread may still be loading pages, the reaper dropping some: what is counted after this
        // would be counted for ever, what was not taken off yet would still be there.
        map.close();
        if Arc::strong_count(map) > 1 {
            // Somebody has it in hand yet: its memory goes now, its addresses when they let go.
            let _ = map.window.punch(0, map.pages);
        }
        let mut gone = 0;
        for word in &map.resident {
            gone += word.swap(0, Ordering::AcqRel).count_ones() as usize;
        }
        map.resident_pages.fetch_sub(gone, Ordering::Relaxed);
        self.resident.fetch_sub(gone, Ordering::Relaxed);
    }

    pub(crate) fn map_at(&self, address: usize) -> Option<Arc<MapInner>> {
        let maps = self.maps();
        let (_, map) = maps.range(..=address).next_back()?;
        (address < map.window.range().end()).then(|| map.clone())
    }

    pub(crate) fn pressure(&self) -> f64 {
        f64::from_bits(self.pressure.load(Ordering::Relaxed))
    }

    /// Less than the low mark is available.
    pub(crate) fn is_short(&self) -> bool {
        self.short.load(Ordering::Relaxed)
    }

    /// What is loaded drives something out; so the reaper says.
    pub(crate) fn is_full(&self) -> bool {
        self.full.load(Ordering::Relaxed)
    }

    /// So many pages of read-ahead, less under pressure, but one. It is the reaper that sees to it.
    pub(crate) fn throttled(&self, pages: usize) -> usize {
        if !self.settings.reaper {
            return pages.max(1);
        }
        ((pages as f64 * (1.0 - self.pressure())) as usize).max(1)
    }

    fn wake_reaper(&self) {
        *lock(&self.work.0) = true;
        self.work.1.notify_one();
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
        // Also when there is a reaper: it may not have had the processor for long.
        self.look_if_stale();
        let mut waited = false;
        loop {
            let wanted =
                self.loading.fetch_add(pages, Ordering::AcqRel) + pages + self.resident.load(Ordering::Acquire);
            if wanted <= self.limit.load(Ordering::Relaxed) {
                if wanted > self.alarm.load(Ordering::Relaxed)
                    && self.settings.reaper
                    && !self.alarmed.swap(true, Ordering::Relaxed)
                {
                    self.wake_reaper();
                }
                return;
            }
            self.loading.fetch_sub(pages, Ordering::AcqRel);
            if self.settings.reaper && !waited {
                waited = true;
                self.stats.waits.fetch_add(1, Ordering::Relaxed);
                let seen = lock(&self.room.0);
                self.wake_reaper();
                drop(self.room.1.wait_timeout(seen, PATIENCE));
                continue;
            }
            if self.evict_directly(pages) == 0 {
                // All that there is is pinned, or others'. Pages must come, so the limit gives.
                self.loading.fetch_add(pages, Ordering::AcqRel);
                return;
            }
        }
    }

    /// How many pages too many there would be with so many more.
    fn excess(&self, pages: usize) -> usize {
        let wanted = self.loading.load(Ordering::Acquire) + pages + self.resident.load(Ordering::Acquire);
        wanted.saturating_sub(self.limit.load(Ordering::Relaxed))
    }

    /// The pages are loaded, or not.
    pub(crate) fn settle(&self, pages: usize) {
        self.loading.fetch_sub(pages, Ordering::AcqRel);
    }

    pub(crate) fn mark_resident(&self, map: &MapInner, page: usize) {
        let bit = 1 << (page % 64);
        // Counted before the bit says so: who drops the page at once takes off what is there.
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
    fn look_at_memory(&self) -> Levels {
        let mut levels = lock(&self.levels);
        levels.look((self.resident.load(Ordering::Relaxed) * BLOCK) as u64, &self.settings);
        let (limit, pressure) = (levels.limit(&self.settings), levels.pressure(&self.settings));
        self.limit.store((limit / BLOCK as u64) as usize, Ordering::Relaxed);
        self.alarm.store((levels.until(self.settings.low) / BLOCK as u64) as usize, Ordering::Relaxed);
        self.pressure.store(pressure.to_bits(), Ordering::Relaxed);
        self.short.store(levels.is_below(self.settings.low), Ordering::Relaxed);
        levels.clone()
    }

    fn look_if_stale(&self) {
        // A reaper has its turn first.
        let due = self.settings.tick * (1 + u32::from(self.settings.reaper));
        let stale = self.levels.try_lock().is_ok_and(|levels| levels.age() > due);
        if stale {
            self.look_at_memory();
        }
    }

    /// The reaper's life.
    fn reap(&self) {
        let mut watched = Instant::now();
        let mut aged = Instant::now();
        let mut half_lives = 0.0;
        while !self.stopping.load(Ordering::Acquire) {
            self.alarmed.store(false, Ordering::Relaxed);
            let levels = self.look_at_memory();
            let near = levels.is_below(self.settings.high * 1.5);
            self.full.store(near, Ordering::Relaxed);
            if levels.is_below(self.settings.low) {
                let gone = self.evict();
                self.stats.reaped.fetch_add(gone as u64, Ordering::Relaxed);
                self.look_at_memory();
                *lock(&self.room.0) += 1;
                self.room.1.notify_all();
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
                // However fast or slow pages are used: a half-life by the clock is too short for one and too long
                // for another.
                if self.heat() > USES * self.resident.load(Ordering::Relaxed) as u64 {
                    half_lives += 1.0;
                }
                watched = Instant::now();
            }
            let pause = self.settings.tick * if near { 1 } else { 10 };
            let asked = lock(&self.work.0);
            let (mut asked, _) =
                self.work.1.wait_timeout_while(asked, pause, |asked| !*asked).unwrap_or_else(PoisonError::into_inner);
            *asked = false;
        }
    }
}

/// How much a page of such a map weighs against one of a cold map; `None`: it never goes.
fn weight(temperature: Temperature) -> Option<usize> {
    match temperature {
        Temperature::Pinned => None,
        Temperature::Hot => Some(100),
        Temperature::Warm => Some(10),
        Temperature::Cold => Some(1),
    }
}
