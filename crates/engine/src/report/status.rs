//! Fills in the daemon's status, whose types and metrics `control` defines.
//!
//! Every client is read under its own lock, one after the other, so the sums are not of one moment.

use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;
use std::time::Duration;

use control::{ClientMetrics, ClientStatus, DomainMetrics, DomainStatus, HostMetrics, RefusedStatus, Status};

use crate::client::recycling::Recycling;
use crate::client::{Client, State};
use crate::content::domain::Domain;
use crate::daemon::engine::Engine;
use crate::users::Refused;
use crate::world::shared::Shared;

/// Bytes of kernel memory for one mapping (`vm_area_struct`), measured.
const MAPPING_BYTES: i64 = 225;
const PAGE: i64 = kmem::PAGE_SIZE as i64;

impl Engine {
    /// The state of everything now. `uid`: only what belongs to this user; sums are over all users.
    pub fn status(&self, uid: Option<u32>) -> Status {
        let shared = &self.shared;
        let clients = shared.clients();
        let mut status = Status { metrics: host(shared), governor: shared.pacer.status(), ..Status::default() };
        for user in shared.users.all().iter().filter(|user| uid.is_none_or(|uid| uid == user.uid)) {
            status.refused.extend(user.refused().into_iter().map(|refused| refused_status(user.uid, refused)));
        }
        for domain in shared.domains() {
            let clients = clients.iter().filter(|client| Arc::ptr_eq(&client.domain, &domain));
            let mut out = domain_status(&domain, clients, &mut status.metrics);
            status.metrics += &out.metrics;
            for client in out.clients.iter_mut().filter(|client| client.refused.is_none()) {
                client.refused = shared.stalls.why(client.uid);
            }
            if let Some(uid) = uid {
                out.clients.retain(|client| client.uid == uid);
            }
            if uid.is_none() || !out.clients.is_empty() {
                status.domains.push(out);
            }
        }
        let metrics = &mut status.metrics;
        metrics.unmerge_bytes = (metrics.pages_sharing + metrics.pages_zero + metrics.pages_recycled) * PAGE as u64;
        metrics.unmerge_headroom_bytes = kmem::procfs::meminfo()
            .ok()
            .map(|memory| ((memory.available_kib + memory.swap_free_kib) << 10) as i64 - metrics.unmerge_bytes as i64);
        status
    }
}

fn refused_status(uid: u32, refused: Refused) -> RefusedStatus {
    let Refused { pid, name, reason, times } = refused;
    RefusedStatus { uid, pid, name, reason, times }
}

/// The daemon's own metrics, and what ended clients leave behind.
fn host(shared: &Shared) -> HostMetrics {
    HostMetrics {
        uptime_seconds: shared.started.elapsed().as_secs_f64(),
        merge_period_seconds: shared.config().merge_period,
        reclaim_period_seconds: shared.config().reclaim_period,
        pages_recycled_total: shared.reaped_recycled.load(Relaxed),
        daemon_cpu_seconds: own_cpu().as_secs_f64(),
        agent_cpu_seconds: shared.reaped_cpu_ns.load(Relaxed) as f64 / 1e9,
        pages_merged_total: shared.reaped_merged.load(Relaxed),
        ..HostMetrics::default()
    }
}

/// A domain with its clients. What is summed over clients only is added to `host`.
fn domain_status<'a>(
    domain: &Domain,
    clients: impl Iterator<Item = &'a Arc<Client>>,
    host: &mut HostMetrics,
) -> DomainStatus {
    let usage = domain.store.usage();
    let frames = usage.frames as i64;
    let mut cost = domain.index.bytes() as i64 + usage.resident_bytes as i64 - frames * PAGE;
    let mut merged = 0;
    let mut metrics = DomainMetrics {
        segments: usage.segments,
        store_bytes: usage.resident_bytes,
        pages_pinned: usage.pinned,
        pages_dead: usage.dead,
        slots_free: usage.free,
        pages_compacted_total: domain.compaction.copied(),
        known_contents: domain.index.len(),
        ..DomainMetrics::default()
    };
    let mut out = DomainStatus { name: domain.key.to_string(), paused: domain.paused(), ..DomainStatus::default() };
    for client in clients {
        let state = client.state();
        let one = client_status(client, &state);
        cost += client_cost(&state);
        merged += one.metrics.pages_merged;
        metrics += &one.metrics;
        *host += &one.metrics;
        if let Some(recycling) = &one.recycling {
            cost += recycling.metrics.pool_bytes as i64;
            *host += &recycling.metrics;
        }
        host.pages_merged_total += state.totals.merged + state.totals.zeroed;
        out.clients.push(one);
    }
    metrics.pages_shared = usage.frames;
    metrics.pages_sharing = merged.saturating_sub(usage.frames);
    let given_back = (metrics.pages_zero + metrics.pages_recycled) as i64;
    metrics.general_profit = (merged as i64 - frames + given_back) * PAGE - cost;
    out.metrics = metrics;
    out
}

fn client_status(client: &Client, state: &State) -> ClientStatus {
    let mut metrics = ClientMetrics {
        regions: state.regions.len(),
        pages_copied_total: state.totals.copied,
        pages_differed_total: state.totals.differed,
        pages_unreadable_total: state.totals.unreadable,
        pages_retained_total: state.detach.pages_retained(),
        full_scans: state.totals.full_scans,
        mappings: state.budget.maps(),
        max_map_count_binds: state.is_short_of_maps(),
        window_max_us: state.totals.window_max_ns / 1000,
        agent_cpu_seconds: state.totals.agent_cpu_ns as f64 / 1e9,
        ..ClientMetrics::default()
    };
    for region in state.regions.values() {
        let counts = region.counts();
        metrics.region_bytes += u64::from(region.managed) * PAGE as u64;
        metrics.pages_merged += counts.merged;
        metrics.pages_unshared += counts.unshared;
        metrics.pages_zero += counts.zero;
        metrics.pages_pending += counts.pending;
        metrics.pages_recycled += counts.recycled;
        metrics.pages_volatile += region.volatile;
        metrics.pages_kept_huge += region.huge.as_ref().map_or(0, |huge| huge.kept());
    }
    ClientStatus {
        pid: client.pid,
        name: client.name.clone(),
        uid: client.user.uid,
        manager: client.verdict.manager.map(str::to_owned),
        guest: client.verdict.guest.clone(),
        guest_name: client.verdict.name.clone(),
        rule: client.verdict.rule.clone(),
        unknown: client.verdict.unknown.clone(),
        metrics,
        recycling: state.recycling.as_ref().map(Recycling::status),
        state: state.link.name().into(),
        refused: state.refusals.why().cloned(),
        cooling: state.direct_io.why().cloned(),
        limited: state.flight.why_left_out(),
        outdated: outdated(client, state),
    }
}

/// What there is to say of an agent that is not of this daemon's build.
fn outdated(client: &Client, state: &State) -> Option<String> {
    const OURS: &str = env!("CARGO_PKG_VERSION");
    if client.version < wire::VERSION {
        let (theirs, ours) = (client.version, wire::VERSION);
        return Some(format!(
            "it speaks protocol {theirs}, and this daemon {theirs} and {ours}; a daemon of the next version may refuse \
             it: start the program again before"
        ));
    }
    let theirs = state.library.as_ref().filter(|theirs| *theirs != OURS)?;
    Some(format!("it is of version {theirs}, and this daemon of {OURS}, until the program is started again"))
}

/// Bytes that managing a client costs, without its recycler's pool.
fn client_cost(state: &State) -> i64 {
    // The agent's own bitmap is one bit a page.
    let regions = state.regions.values().map(|region| region.bytes() as i64 + i64::from(region.pages) / 8);
    regions.sum::<i64>() + i64::from(state.budget.more_maps()) * MAPPING_BYTES
}

fn own_cpu() -> Duration {
    kmem::procfs::cpu_time(std::process::id() as i32).unwrap_or_default()
}
