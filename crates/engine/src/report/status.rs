//! What the engine says of itself, in KSM's words.
//!
//! | word | meaning |
//! |---|---|
//! | `pages_shared` | frames kept once |
//! | `pages_sharing` | further pages that use them: the saving |
//! | `pages_unshared` | looked at, unique so far |
//! | `pages_volatile` | changing too fast |
//! | `pages_zero` | given back as zero pages |
//! | `pages_recycled` | freed by a guest, taken back, and untouched since |
//! | `general_profit` | bytes saved less every byte that the system costs: ledgers, index, mappings, empty slots |

use serde::{Deserialize, Serialize};
use std::sync::atomic::Ordering::Relaxed;
use std::time::Duration;

use crate::daemon::service::Engine;
use crate::merge::pass::RETRY_SCANS;

/// Kernel memory for one mapping (`vm_area_struct`), measured.
const MAPPING_BYTES: i64 = 225;
const PAGE: i64 = kmem::PAGE_SIZE as i64;

/// The whole engine.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Status {
    /// Seconds since the daemon started.
    pub uptime_seconds: f64,
    /// Merge period, in seconds.
    pub merge_period_seconds: f64,
    /// CPU time of the daemon, in seconds.
    pub daemon_cpu_seconds: f64,
    /// CPU time of all agents, those of ended clients too, in seconds.
    pub agent_cpu_seconds: f64,
    /// What the governor does, and why.
    pub governor: GovernorStatus,
    /// Pages merged so far, zero pages too.
    pub pages_merged_total: u64,
    /// Pages recycled so far, by this daemon's clients.
    pub pages_recycled_total: u64,
    /// Reclaim period, in seconds.
    pub reclaim_period_seconds: f64,
    /// Sums over the domains.
    #[serde(flatten)]
    pub pages: Pages,
    /// The domains.
    pub domains: Vec<DomainStatus>,
}

/// The governor. A scan begins with the question what was written, and ends when every page that
/// was due then has been looked at.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct GovernorStatus {
    /// `target`, `scan-time` or `none`.
    pub mode: String,
    /// How long a scan is to take.
    pub target_scan_time_seconds: f64,
    /// How long the last scan took that had anything to do …
    pub scan_time_seconds: Option<f64>,
    /// … the pages that it looked at …
    pub scan_pages: u64,
    /// … and the CPU time of daemon and agents from its beginning to that of the next.
    pub scan_cpu_seconds: f64,
    /// Pages that are due in the scan under way and have not been looked at.
    pub pages_due: u64,
    /// The pace; none in mode `none`.
    pub pages_per_second: Option<f64>,
    /// CPU time over the last 10 s, in percent of one CPU.
    pub cpu_percent: f64,
    /// Its limit at present; 0: none.
    pub max_cpu_percent: f64,
    /// The limit is that under memory pressure.
    pub memory_is_short: bool,
    /// The last decision, in words and figures.
    pub reason: String,
}

/// Counts of pages.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Pages {
    /// Frames kept once.
    pub pages_shared: u64,
    /// Further pages that use them.
    pub pages_sharing: u64,
    /// Looked at, unique so far.
    pub pages_unshared: u64,
    /// Changing too fast.
    pub pages_volatile: u64,
    /// Given back as zero pages.
    pub pages_zero: u64,
    /// Recycled: freed by a guest, taken back, and untouched since.
    pub pages_recycled: u64,
    /// Bytes saved less own cost.
    pub general_profit: i64,
}

/// One domain.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct DomainStatus {
    /// Its name.
    pub name: String,
    /// Its pages.
    #[serde(flatten)]
    pub pages: Pages,
    /// Segments of its store.
    pub segments: usize,
    /// Memory that its store takes, in bytes.
    pub store_bytes: u64,
    /// Frames that a child of a client may map still.
    pub pages_pinned: u64,
    /// Contents in the index.
    pub known_contents: u64,
    /// Why no frames can be made for now.
    pub paused: Option<String>,
    /// Its clients.
    pub clients: Vec<ClientStatus>,
}

/// One client.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct ClientStatus {
    /// Process.
    pub pid: i32,
    /// Program.
    pub name: String,
    /// Owner.
    pub uid: u32,
    /// Regions under management.
    pub regions: usize,
    /// Their bytes.
    pub region_bytes: u64,
    /// Pages that map a frame.
    pub pages_merged: u64,
    /// Looked at, unique so far.
    pub pages_unshared: u64,
    /// Changing too fast.
    pub pages_volatile: u64,
    /// Given back as zero pages.
    pub pages_zero: u64,
    /// Recycled, and untouched since.
    pub pages_recycled: u64,
    /// What its recycler does, if its guest marks free pages.
    pub recycling: Option<crate::client::recycling::RecycleStatus>,
    /// Pages that can be merged and are left in huge pages, of which too few can
    /// (`huge_page_share`).
    pub pages_kept_huge: u64,
    /// Pages in batches under way.
    pub pages_pending: u64,
    /// Pages that were merged and written since, over the client's life.
    pub pages_copied_total: u64,
    /// Pages that the window found different, over the client's life.
    pub pages_differed_total: u64,
    /// Scans so far.
    pub full_scans: u64,
    /// Mappings of the process.
    pub mappings: u32,
    /// Whether `vm.max_map_count` keeps pages from being merged.
    pub max_map_count_binds: bool,
    /// The longest merge window, in microseconds.
    pub window_max_us: u64,
    /// CPU time of its agent, in seconds.
    pub agent_cpu_seconds: f64,
    /// `merging`, `disconnected`, `stalled` or `detached`.
    pub state: String,
    /// Why nothing of it is merged at present.
    pub refused: Option<String>,
}

impl Engine {
    /// The state of everything now. `uid`: only what belongs to this user.
    pub fn status(&self, uid: Option<u32>) -> Status {
        let shared = &self.shared;
        let clients = shared.clients();
        let mut status = Status {
            uptime_seconds: shared.started.elapsed().as_secs_f64(),
            merge_period_seconds: shared.config.merge_period,
            reclaim_period_seconds: shared.config.reclaim_period,
            pages_recycled_total: shared.buried_recycled.load(Relaxed),
            governor: shared.pacer.status(),
            daemon_cpu_seconds: own_cpu().as_secs_f64(),
            agent_cpu_seconds: shared.buried_cpu_ns.load(Relaxed) as f64 / 1e9,
            pages_merged_total: shared.buried_merged.load(Relaxed),
            ..Status::default()
        };
        for domain in shared.domains() {
            let usage = domain.store.usage();
            let mut out = DomainStatus {
                name: domain.key.to_string(),
                segments: usage.segments,
                store_bytes: usage.resident_bytes,
                pages_pinned: usage.pinned,
                known_contents: domain.index.len(),
                paused: domain.paused(),
                ..DomainStatus::default()
            };
            let mut cost = domain.index.bytes() as i64 + usage.resident_bytes as i64 - usage.frames as i64 * PAGE;
            let mut merged = 0;
            for client in clients.iter().filter(|c| std::sync::Arc::ptr_eq(&c.domain, &domain)) {
                let state = client.state();
                let mut one = ClientStatus {
                    pid: client.pid,
                    name: client.name.clone(),
                    uid: client.uid,
                    regions: state.regions.len(),
                    pages_copied_total: state.totals.copied,
                    pages_differed_total: state.totals.differed,
                    full_scans: state.totals.full_scans,
                    mappings: state.maps,
                    max_map_count_binds: state
                        .left_out
                        .is_some_and(|scan| scan + 2 * RETRY_SCANS >= state.totals.full_scans),
                    window_max_us: state.totals.window_max_ns / 1000,
                    agent_cpu_seconds: state.totals.agent_cpu_ns as f64 / 1e9,
                    refused: state.refused.clone(),
                    recycling: state.recycling.as_ref().map(crate::client::recycling::Recycling::status),
                    ..ClientStatus::default()
                };
                one.state = match (state.detached, state.connected, state.stalled) {
                    (true, ..) => "detached",
                    (_, false, _) => "disconnected",
                    (_, _, true) => "stalled",
                    _ => "merging",
                }
                .into();
                for region in state.regions.values() {
                    let counts = region.counts();
                    one.region_bytes += u64::from(region.managed) * PAGE as u64;
                    one.pages_merged += counts.merged;
                    one.pages_unshared += counts.unshared;
                    one.pages_zero += counts.zero;
                    one.pages_pending += counts.pending;
                    one.pages_recycled += counts.recycled;
                    one.pages_volatile += region.volatile;
                    one.pages_kept_huge += region.huge.as_ref().map_or(0, |huge| huge.kept());
                    // The agent's own bitmap is one bit a page.
                    cost += region.bytes() as i64 + i64::from(region.pages) / 8;
                }
                cost += one.recycling.as_ref().map_or(0, |recycling| recycling.pool_bytes as i64);
                cost += i64::from(state.maps.saturating_sub(state.first_maps)) * MAPPING_BYTES;
                status.agent_cpu_seconds += one.agent_cpu_seconds;
                status.pages_merged_total += state.totals.merged + state.totals.zeroed;
                merged += one.pages_merged;
                out.pages.pages_unshared += one.pages_unshared;
                out.pages.pages_volatile += one.pages_volatile;
                out.pages.pages_zero += one.pages_zero;
                out.pages.pages_recycled += one.pages_recycled;
                status.pages_recycled_total += one.recycling.as_ref().map_or(0, |r| r.pages_recycled_total);
                if uid.is_none_or(|uid| uid == client.uid) {
                    out.clients.push(one);
                }
            }
            out.pages.pages_shared = usage.frames;
            out.pages.pages_sharing = merged.saturating_sub(usage.frames);
            out.pages.general_profit =
                (merged as i64 - usage.frames as i64 + (out.pages.pages_zero + out.pages.pages_recycled) as i64) * PAGE
                    - cost;
            add(&mut status.pages, &out.pages);
            if uid.is_none() || !out.clients.is_empty() {
                status.domains.push(out);
            }
        }
        status
    }
}

fn add(sum: &mut Pages, more: &Pages) {
    sum.pages_shared += more.pages_shared;
    sum.pages_sharing += more.pages_sharing;
    sum.pages_unshared += more.pages_unshared;
    sum.pages_volatile += more.pages_volatile;
    sum.pages_zero += more.pages_zero;
    sum.pages_recycled += more.pages_recycled;
    sum.general_profit += more.general_profit;
}

fn own_cpu() -> Duration {
    kmem::procfs::cpu_time(std::process::id() as i32).unwrap_or_default()
}
