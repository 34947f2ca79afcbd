//! Why not more of a client is merged: one word, and a sentence with the remedy.
//!
//! Many things may keep pages from being merged at a time. The first that holds, in the order of
//! [`why`], is told: what keeps everything out comes before what keeps a part.

use control::{ClientMetrics, ClientState, Reason, Why};
use kmem::PAGE_SIZE;
use kmem::procfs::ADVISED_MAP_COUNT;

/// No reason is told when this part of what could be merged is.
const WELL: f64 = 0.9;
/// Scans after which pages can be candidates.
const SCANS: u64 = 3;

#[derive(Default)]
pub(super) struct Known<'a> {
    pub(super) pid: i32,
    pub(super) metrics: Option<&'a ClientMetrics>,
    pub(super) state: ClientState,
    /// A checkpoint has frozen it, or it is being detached.
    pub(super) is_frozen: bool,
    pub(super) is_pinned: bool,
    /// Why nothing of it is merged.
    pub(super) refused: Option<&'a str>,
    /// Why nothing is merged on the host.
    pub(super) host_paused: Option<&'a str>,
    /// Why its domain's store cannot grow.
    pub(super) domain_paused: Option<&'a str>,
    /// Why a part is left out.
    pub(super) limited: Option<(Reason, &'a str)>,
    /// Through what it does direct I/O.
    pub(super) cooling: Option<&'a str>,
    pub(super) due: u64,
    /// The CPU limit in percent, if it binds.
    pub(super) cpu_limit: Option<f64>,
    /// Resident shared memory, if nothing of the client is marked.
    pub(super) shared_bytes: u64,
}

fn of(code: Reason, text: impl Into<String>) -> Option<Why> {
    Some(Why { code, text: text.into() })
}

/// The most important reason. `None`: most of what could be merged is.
pub(super) fn why(known: &Known<'_>) -> Option<Why> {
    match known.state {
        ClientState::Detached => {
            return of(Reason::Detached, "it was detached; start the program again to have it merged");
        }
        ClientState::Disconnected => {
            return of(Reason::Disconnected, "its agent has no connection to the daemon; it comes back within 30 s");
        }
        ClientState::Stalled => {
            let text = "its agent does not report: the program is stopped, or gets no CPU; let it go on";
            return of(Reason::Stalled, text);
        }
        ClientState::Merging | ClientState::Unknown => {}
    }
    if known.is_frozen {
        return of(Reason::Frozen, "a checkpoint of it is being taken, or it is being detached; this ends by itself");
    }
    if let Some(text) = known.refused {
        return of(if known.is_pinned { Reason::Pinned } else { Reason::Refused }, text);
    }
    if let Some(text) = known.host_paused {
        return of(Reason::Headroom, text);
    }
    if let Some(text) = known.domain_paused {
        return of(Reason::Paused, text);
    }
    let metrics = known.metrics?;
    if metrics.region_bytes == 0 {
        return nothing_marked(known);
    }
    if metrics.max_map_count_binds {
        let text = format!(
            "vm.max_map_count leaves no room for more mappings, so only long runs are merged; \
             `sysctl vm.max_map_count={ADVISED_MAP_COUNT}` would let more in"
        );
        return of(Reason::Mappings, text);
    }
    if let Some((code, text)) = known.limited {
        return of(code, text);
    }
    unmerged(known, metrics)
}

/// No memory of the client is under management.
fn nothing_marked(known: &Known<'_>) -> Option<Why> {
    let shared = known.shared_bytes >> 20;
    if shared >= 64 {
        return of(
            Reason::Shared,
            format!(
                "{shared} MiB of it are shared memory, which cannot be merged: give the guest private memory (no share=on, \
                 no vhost-user, no virtiofs)"
            ),
        );
    }
    let pid = known.pid;
    of(
        Reason::Unmarked,
        format!(
            "process {pid} has marked no memory as mergeable; start QEMU with mem-merge=on (its default), or see \
             `pageone doctor`"
        ),
    )
}

/// The largest part of what is not merged.
fn unmerged(known: &Known<'_>, metrics: &ClientMetrics) -> Option<Why> {
    let merged = metrics.pages_merged + metrics.pages_zero + metrics.pages_recycled;
    let waiting = known.due + metrics.pages_pending;
    let rest = metrics.pages_unshared + metrics.pages_volatile + waiting;
    if metrics.full_scans < SCANS {
        let text = "it is new: pages that do not change for two merge periods (merge_period) will be merged";
        return of(Reason::New, text);
    }
    let mib = |pages: u64| (pages * PAGE_SIZE as u64) >> 20;
    let kept = metrics.pages_kept_huge;
    // Pages that stay in huge pages count as looked at, too.
    if merged as f64 >= WELL * (merged + rest) as f64 && kept * 10 <= merged {
        return None;
    }
    if kept > 0 && kept * 2 >= rest {
        return of(
            Reason::KeptHuge,
            format!(
                "{} MiB more could be merged and stay in huge pages, since few of each could; a lower huge_page_share \
                 gives their memory back, and costs the guest time",
                mib(kept)
            ),
        );
    }
    let largest = waiting.max(metrics.pages_volatile).max(metrics.pages_unshared);
    if largest == waiting {
        return match known.cpu_limit {
            Some(limit) => of(
                Reason::Budget,
                format!(
                    "{} MiB wait to be looked at, and the CPU limit of {limit} % binds; a higher max_cpu lets them in sooner",
                    mib(waiting)
                ),
            ),
            None => of(
                Reason::Pending,
                format!("{} MiB wait to be looked at; the governor spreads that over target_scan_time", mib(waiting)),
            ),
        };
    }
    if largest == metrics.pages_volatile {
        return match known.cooling {
            Some(over) => of(
                Reason::Cooling,
                format!(
                    "{} MiB were written lately, and pages wait direct_io_seconds after a write, since it does direct I/O \
                     over {over}",
                    mib(largest)
                ),
            ),
            None => of(
                Reason::Volatile,
                format!(
                    "{} MiB were written within the last two merge periods; what rests for longer is merged, and a shorter \
                     merge_period merges what rests in between",
                    mib(largest)
                ),
            ),
        };
    }
    of(
        Reason::Unique,
        format!(
            "no other page of its domain equals {} MiB of it; guests that should share must be in one domain",
            mib(metrics.pages_unshared)
        ),
    )
}

#[cfg(test)]
mod tests;
