//! The knobs of a cache, and what it reports.

use std::time::Duration;

/// The knobs of a cache.
#[derive(Clone, Debug, PartialEq)]
pub struct Settings {
    /// The most bytes that the maps may hold together. Default: as much as the system allows.
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
    /// Whether there is a reaper. Without one, threads that need memory evict pages in the order of
    /// their addresses, faults are not delayed, and read-ahead is not cut. Default: yes.
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
            watch: Some(Duration::from_secs(1)),
            tick: Duration::from_millis(10),
            fault_threads: 4,
            max_delay: Duration::from_millis(1),
            read_ahead: 8,
            reaper: true,
        }
    }
}

/// The memory of a cache.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct CacheMemory {
    /// Bytes that the maps hold in memory.
    pub resident: u64,
    /// Bytes that they could hold.
    pub total: u64,
    /// Bytes still available.
    pub available: u64,
    /// 0 to 1.
    pub pressure: f64,
}

/// Where the time of all loads together went.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct LoadTimes {
    /// Delayed under pressure.
    pub delayed: Duration,
    /// Waiting for memory: for the reaper, or for evicting something itself.
    pub waited: Duration,
    /// Reading from the media and checking the bytes.
    pub reading: Duration,
    /// Putting pages in their place.
    pub placing: Duration,
}

/// Statistics of a cache.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct CacheStats {
    /// Maps.
    pub maps: usize,
    /// Their memory.
    pub memory: CacheMemory,
    /// Pages loaded.
    pub loaded: u64,
    /// Loads: the missing pages of one call, or of one fault, are read together.
    pub loads: u64,
    /// How long they took.
    pub times: LoadTimes,
    /// Faults that a thread of the cache served.
    pub faults: u64,
    /// Pages that the reaper evicted.
    pub reaped: u64,
    /// Pages that threads in need of memory evicted themselves.
    pub evicted_directly: u64,
    /// Times that a thread waited for memory.
    pub waits: u64,
    /// Pages seen used in page tables.
    pub seen_used: u64,
    /// Pages that could not be read, so that touching them raises SIGBUS.
    pub poisoned: u64,
    /// Huge pages made of pages that were loaded ahead.
    pub huge: u64,
}
