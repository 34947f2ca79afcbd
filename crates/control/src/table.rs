//! The table of all metrics of `pageone status`. [`crate::metrics`] says how to read it.
//!
//! `pages_shared`, `pages_sharing`, `pages_unshared`, `pages_volatile`, `full_scans` and
//! `general_profit` are KSM's words, with KSM's meaning (ksm.rst).

use serde::{Deserialize, Serialize};

use crate::metrics::{Kind, Metric, Reading, Scope, Unit, Value, if_in, if_sum, metrics};

metrics! {
    [host] {
        /// Time since the daemon started.
        Gauge uptime_seconds: f64 [Seconds];
        /// The merge period: the time between two scans.
        Gauge merge_period_seconds: f64 [Seconds];
        /// CPU time of the daemon.
        Counter daemon_cpu_seconds: f64 [Seconds];
        /// Scans of clients so far, those of ended clients too.
        Counter scans_total: u64 [Count];
        /// The host's memory (`MemTotal`).
        Gauge memory_total_bytes: Option<u64> [Bytes];
        /// Memory that the host could give to programs without swapping (`MemAvailable`).
        Gauge memory_available_bytes: Option<u64> [Bytes];
        /// Free swap space (`SwapFree`).
        Gauge swap_free_bytes: Option<u64> [Bytes];
        /// Part of the last 10 s in which some task waited for memory (`/proc/pressure/memory`).
        Gauge memory_pressure_ratio: Option<f64> [Ratio];
        /// Part of the last 10 s in which some task waited for a CPU (`/proc/pressure/cpu`).
        Gauge cpu_pressure_ratio: Option<f64> [Ratio];
    }
    [host] {
        /// Pages merged so far, zero pages too.
        Counter pages_merged_total: u64 [Pages];
    }
    [host <- recycler] {
        /// Pages taken back so far because a guest had freed them; on the host those of ended
        /// clients too.
        Counter pages_recycled_total: u64 [Pages];
    }
    [host recycler] {
        /// The reclaim period: a page that a guest frees is back within it.
        Gauge reclaim_period_seconds: f64 [Seconds];
    }
    [governor] {
        /// The time over which the work of a scan is spread.
        Gauge target_scan_time_seconds: f64 [Seconds];
        /// Duration of the last scan that had anything to do.
        Gauge scan_time_seconds: Option<f64> [Seconds];
        /// Pages that this scan looked at.
        Gauge scan_pages: u64 [Pages];
        /// CPU time of daemon and agents from the beginning of this scan to that of the next.
        Gauge scan_cpu_seconds: f64 [Seconds];
        /// Pages that the present scan has not looked at yet.
        Gauge pages_due: u64 [Pages];
        /// The pace that the governor holds; none in mode `none`.
        Gauge pages_per_second: Option<f64> [PagesPerSecond];
        /// CPU time over the last 10 s.
        Gauge cpu_percent: f64 [Percent];
        /// The CPU limit at present; 0: no limit.
        Gauge max_cpu_percent: f64 [Percent];
        /// Whether the CPU limit is that under memory pressure.
        Gauge memory_is_short: bool [Bool];
    }
    [host <- domain] {
        /// Frames that are kept once.
        Gauge pages_shared: u64 [Pages];
        /// Further pages that use those frames: the saving.
        Gauge pages_sharing: u64 [Pages];
    }
    [client] {
        /// Regions under management.
        Gauge regions: usize [Count];
        /// Bytes of those regions.
        Gauge region_bytes: u64 [Bytes, "REGION" 6, "under management"];
        /// Pages that map a frame.
        Gauge pages_merged: u64 [Pages, "MERGED" 6, "maps a shared page"];
    }
    [host <- domain <- client] {
        /// Pages that were given back as zero pages.
        Gauge pages_zero: u64 [Pages, "ZERO" 5, "given back as zeros"];
        /// Pages that a guest has freed, that were taken back, and that are untouched since.
        Gauge pages_recycled: u64 [Pages, "RECYC" 5, "freed by it, taken back"];
        /// Pages that were looked at and are unique so far.
        Gauge pages_unshared: u64 [Pages, "UNSHARED" 8, "unique so far"];
        /// Pages that were written within the last two merge periods.
        Gauge pages_volatile: u64 [Pages, "VOLAT" 5, "written lately"];
    }
    [host <- domain client] {
        /// Bytes saved less every byte of cost: ledgers, index, mappings, empty slots. A client's
        /// frames, and the costs of its domain, count for it as far as it uses frames: by its part
        /// of the domain's merged pages. So the domain's is the sum over its clients, and what it
        /// costs without merged pages.
        Gauge general_profit: i64 [Bytes, "PROFIT" 6, "saved, less every cost"];
    }
    [client] {
        /// Mappings of the process.
        Gauge mappings: u32 [Count, "MAPPINGS" 8, "mappings of the process"];
        /// Mappings that it may have (`vm.max_map_count`).
        Gauge mappings_limit: u32 [Count, "LIMIT" 5, "mappings that it may have"];
    }
    [host <- client] {
        /// CPU time of the agent; on the host of all agents, those of ended clients too.
        Counter agent_cpu_seconds: f64 [Seconds, "CPU" 6, "CPU time of its agent"];
    }
    [host] {
        /// Memory that would be needed if every page that was merged, or taken back, were written.
        Gauge unmerge_bytes: u64 [Bytes];
        /// What would be left then of the memory that is available and of the free swap space.
        /// Below 0 it would not do.
        Gauge unmerge_headroom_bytes: Option<i64> [Bytes];
        /// Memory that writes to such pages have taken a second, over the last minute.
        Gauge unmerge_bytes_per_second: f64 [BytesPerSecond];
        /// How long the available memory and the free swap space last at that rate. No value: the
        /// rate is 0.
        Gauge unmerge_headroom_seconds: Option<f64> [Seconds];
        /// Whether nothing is merged because the headroom is short.
        Gauge headroom_is_short: bool [Bool];
    }
    [domain] {
        /// Segments of the domain's store.
        Gauge segments: usize [Count];
    }
    [host <- domain] {
        /// Memory that the store takes; on the host all stores.
        Gauge store_bytes: u64 [Bytes];
        /// Memory of the frames that the module's files use; on the host of all domains. Those
        /// that a store lends count in `store_bytes`, too.
        Gauge frame_bytes: u64 [Bytes];
        /// Frames that were taken out of use, since their memory has failed or a count of their
        /// users was wrong.
        Counter frames_doubted_total: u64 [Count];
    }
    [domain] {
        /// Frames that somebody may map whom no client reports, as a child of a client: their
        /// memory stays until their segment is closed.
        Gauge pages_pinned: u64 [Pages];
        /// Frames without users whose memory is not given back yet.
        Gauge pages_dead: u64 [Pages];
        /// Slots that can become frames, in pieces of the store that have frames already.
        Gauge slots_free: u64 [Count];
        /// Slots that were frames and rest until nobody can map them any more. `pages_dead` has
        /// them too.
        Gauge slots_quarantined: u64 [Count];
        /// Frames that were copied so that the memory around them could be given back.
        Counter pages_compacted_total: u64 [Pages];
        /// Contents in the index.
        Gauge known_contents: u64 [Count];
    }
    [client] {
        /// Pages found written a second, over the last scans.
        Gauge dirty_pages_per_second: f64 [PagesPerSecond, "DIRTY" 7, "written a second"];
        /// Page faults of the process that read no disk (`minflt` of `/proc/PID/stat`).
        Counter faults_total: u64 [Count, "FAULT" 7, "page faults a second"];
        /// The longest merge window.
        Gauge window_max_us: u64 [Microseconds, "WINDOW" 6, "longest merge window"];
        /// Pages that could be merged and stay in huge pages, because too few of each can
        /// (`huge_page_share`).
        Gauge pages_kept_huge: u64 [Pages, "HUGE" 5, "could merge, stays huge"];
        /// Pages in batches that the agent has not finished.
        Gauge pages_pending: u64 [Pages, "PEND" 5, "waits for the agent"];
        /// Pages that were merged and then written.
        Counter pages_copied_total: u64 [Pages];
        /// Pages that the program gave back itself: what QEMU discards when
        /// its guest reports free pages, or fills its balloon.
        Counter pages_discarded_total: u64 [Pages];
        /// Pages that the merge window found different.
        Counter pages_differed_total: u64 [Pages];
        /// Pages that cannot be read: gone, protected, or poisoned by a
        /// memory error. They were left alone.
        Counter pages_unreadable_total: u64 [Pages];
        /// Pages that left management in place, because a device may be writing to them or the
        /// program moved them unseen. They stay in mappings of the store, and their frames are
        /// kept.
        Counter pages_retained_total: u64 [Pages];
        /// Scans by this daemon.
        Counter full_scans: u64 [Count];
        /// Whether `vm.max_map_count` keeps pages from being merged.
        Gauge max_map_count_binds: bool [Bool];
    }
    [recycler] {
        /// Guest memory that can be recycled.
        Gauge managed_bytes: u64 [Bytes];
        /// Bytes of the pool in which the guest marks its free pages.
        Gauge pool_bytes: u64 [Bytes];
        /// Pages taken back a second, over the last seconds.
        Gauge pages_recycled_per_second: f64 [PagesPerSecond];
        /// Runs of consecutive pages that were taken back.
        Counter runs_total: u64 [Count];
        /// Pages that the guest took into use between the look at its marks and the claim.
        Counter pages_lost_total: u64 [Pages];
        /// Sweeps so far.
        Counter sweeps_total: u64 [Count];
        /// CPU time of all sweeps.
        Counter sweep_seconds: f64 [Seconds];
        /// The longest time for which pages were claimed.
        Gauge claim_max_us: u64 [Microseconds];
    }
}

/// The metrics of a client that have columns on screens, from left to right. On a narrow screen the
/// last are left out first.
pub fn columns() -> impl Iterator<Item = &'static Metric> {
    METRICS.iter().filter(|metric| !metric.title.is_empty() && metric.is_in(Scope::Client))
}
