//! The table of all metrics of `pageone status`. [`crate::metrics`] says how to read it.
//!
//! `pages_shared`, `pages_sharing`, `pages_unshared`, `pages_volatile`, `full_scans` and
//! `general_profit` are KSM's words, with KSM's meaning (ksm.rst).

use serde::{Deserialize, Serialize};

use crate::metrics::{Kind, Metric, Reading, Unit, Value, if_in, if_sum, metrics};

metrics! {
    [host] {
        /// Time since the daemon started.
        Gauge uptime_seconds: f64 [Seconds];
        /// The merge period: the time between two scans.
        Gauge merge_period_seconds: f64 [Seconds];
        /// CPU time of the daemon.
        Counter daemon_cpu_seconds: f64 [Seconds];
    }
    [host <- client] {
        /// CPU time of the agent; on the host of all agents, those of ended clients too.
        Counter agent_cpu_seconds: f64 [Seconds];
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
        Gauge region_bytes: u64 [Bytes];
        /// Pages that map a frame.
        Gauge pages_merged: u64 [Pages];
    }
    [host <- domain <- client] {
        /// Pages that were given back as zero pages.
        Gauge pages_zero: u64 [Pages];
        /// Pages that a guest has freed, that were taken back, and that are untouched since.
        Gauge pages_recycled: u64 [Pages];
        /// Pages that were looked at and are unique so far.
        Gauge pages_unshared: u64 [Pages];
        /// Pages that change too fast to be merged.
        Gauge pages_volatile: u64 [Pages];
    }
    [host <- domain] {
        /// Bytes saved less every byte of cost: ledgers, index, mappings, empty slots.
        Gauge general_profit: i64 [Bytes];
    }
    [host] {
        /// Memory that would be needed if every page that was merged, or taken back, were written.
        Gauge unmerge_bytes: u64 [Bytes];
        /// What would be left then of the memory that is available and of the free swap space.
        /// Below 0 it would not do.
        Gauge unmerge_headroom_bytes: Option<i64> [Bytes];
    }
    [domain] {
        /// Segments of the domain's store.
        Gauge segments: usize [Count];
        /// Memory that the store takes.
        Gauge store_bytes: u64 [Bytes];
        /// Frames that somebody may map whom no client reports, as a child of a client: their
        /// memory stays until their segment is closed.
        Gauge pages_pinned: u64 [Pages];
        /// Frames without users whose memory is not given back yet.
        Gauge pages_dead: u64 [Pages];
        /// Slots that can become frames, in pieces of the store that have frames already.
        Gauge slots_free: u64 [Count];
        /// Frames that were copied so that the memory around them could be given back.
        Counter pages_compacted_total: u64 [Pages];
        /// Contents in the index.
        Gauge known_contents: u64 [Count];
    }
    [client] {
        /// Pages that could be merged and stay in huge pages, because too few of each can
        /// (`huge_page_share`).
        Gauge pages_kept_huge: u64 [Pages];
        /// Pages in batches that the agent has not finished.
        Gauge pages_pending: u64 [Pages];
        /// Pages that were merged and then written, over the client's life.
        Counter pages_copied_total: u64 [Pages];
        /// Pages that the merge window found different, over the client's life.
        Counter pages_differed_total: u64 [Pages];
        /// Pages that cannot be read, over the client's life: gone, protected, or poisoned by a
        /// memory error. They were left alone.
        Counter pages_unreadable_total: u64 [Pages];
        /// Pages that left management in place, because a device may be writing to them or the
        /// program moved them unseen. They stay in mappings of the store, and their frames are
        /// kept.
        Counter pages_retained_total: u64 [Pages];
        /// Scans by this daemon.
        Counter full_scans: u64 [Count];
        /// Mappings of the process.
        Gauge mappings: u32 [Count];
        /// Whether `vm.max_map_count` keeps pages from being merged.
        Gauge max_map_count_binds: bool [Bool];
        /// The longest merge window.
        Gauge window_max_us: u64 [Microseconds];
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
