//! Fills in the daemon's status, whose types and metrics `control` defines.
//!
//! Every client is read under its own lock, one after the other, so the sums are not of one moment.

use std::cmp::Reverse;
use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;
use std::time::Duration;

use control::{
    ClientMetrics, ClientStatus, DomainMetrics, DomainStatus, HostMetrics, Reason, RefusedStatus, Remarks, Status,
};

use crate::access::Access;
use crate::backend::module::{Files, Owner};
use crate::client::{Client, State};
use crate::config::bounds::REFUSALS;
use crate::report::why::{Known, why};
use crate::store::domain::Domain;
use crate::users::{Refused, User};
use crate::world::headroom::View;
use crate::world::shared::{Shared, Sums};

/// Bytes of kernel memory for one mapping (`vm_area_struct`), measured.
const MAPPING_BYTES: i64 = 225;
const PAGE: i64 = kmem::PAGE_SIZE as i64;

/// The state of what the peer has access to, now; sums are over all users.
pub(super) fn status(shared: &Shared, files: &Files, access: &Access) -> Status {
    let (clients, gone) = shared.clients_and_gone();
    let of_host = OfHost {
        mappings_limit: kmem::procfs::max_map_count().unwrap_or(0) as u32,
        cpu_limit: shared.pacer.binding_limit(),
        headroom: shared.headroom(),
    };
    let mut status = Status {
        version: env!("CARGO_PKG_VERSION").into(),
        metrics: host(shared, &gone),
        no_agents: crate::backend::module::no_agents(),
        governor: shared.pacer.status(),
        writer_stall: gone.stalls,
        ..Status::default()
    };
    let config = shared.config();
    let rules = &config.tenants;
    let covers = |one: &Refused| access.covers_process(rules, one.uid, one.pid, || one.lives());
    let of_user = |user: Arc<User>| user.refused().into_iter().filter(covers).map(refused_status).collect();
    (status.refused, status.refused_left_out) = latest(shared.users.all().into_iter().map(of_user));
    for domain in shared.domains() {
        let of_domain = || clients.iter().filter(|client| Arc::ptr_eq(&client.domain, &domain));
        let mut out = domain_status(shared, &of_host, &domain, of_domain(), &mut status.metrics);
        status.metrics += &out.metrics;
        out.clients.iter().for_each(|client| status.writer_stall += &client.writer_stall);
        // In this order they were told. By their numbers an ended one could be taken for another.
        let mut seen = of_domain().map(|client| access.covers_client(client));
        out.clients.retain(|_| seen.next() == Some(true));
        if *access == Access::All || !out.clients.is_empty() {
            status.domains.push(out);
        }
    }
    add_files(shared, files, &mut status, &of_host, access);
    headroom(&of_host.headroom, &mut status);
    status
}

/// Files that are merged below their mappings.
fn add_files(shared: &Shared, files: &Files, status: &mut Status, of_host: &OfHost, access: &Access) {
    let mounts = files.tell();
    let config = shared.config();
    let rules = &config.tenants;
    let host = super::files::OfHost { headroom: &of_host.headroom, cpu_limit: of_host.cpu_limit };
    let covers = |owner: Option<&Owner>| match owner {
        Some(owner) => access.covers_process(rules, owner.uid, owner.pid, || owner.lives()),
        None => *access == Access::All,
    };
    for (mut domain, owners) in super::files::domains(&mounts, &host) {
        status.metrics += &domain.metrics;
        for client in &domain.clients {
            status.metrics += &client.metrics;
            client.recycling.iter().for_each(|recycling| status.metrics += &recycling.metrics);
        }
        let mut seen = owners.iter().map(|owner| covers(owner.as_deref()));
        domain.clients.retain(|_| seen.next() == Some(true));
        if *access == Access::All || !domain.clients.is_empty() {
            status.domains.push(domain);
        }
    }
    status.refused.extend(super::files::left_out(&mounts, access));
    let mut totals = files.gone();
    mounts.iter().flat_map(|mount| &mount.files).for_each(|file| totals += file.state().totals);
    status.metrics.pages_merged_total += totals.merged;
    status.metrics.scans_total += totals.scans;
    status.metrics.pages_recycled_total += totals.recycled;
}

/// Whether the host could give back what was saved.
fn headroom(view: &View, status: &mut Status) {
    let metrics = &mut status.metrics;
    metrics.unmerge_bytes = (metrics.pages_sharing + metrics.pages_zero + metrics.pages_recycled) * PAGE as u64;
    let memory = kmem::procfs::meminfo().ok();
    metrics.memory_total_bytes = memory.map(|memory| memory.total_kib << 10);
    metrics.memory_available_bytes = memory.map(|memory| memory.available_kib << 10);
    metrics.swap_free_bytes = memory.map(|memory| memory.swap_free_kib << 10);
    let available = memory.map(|memory| (memory.available_kib + memory.swap_free_kib) << 10);
    // Of the one reading whose bytes are shown beside it.
    metrics.unmerge_headroom_seconds = available.and_then(|available| view.seconds(available));
    metrics.unmerge_headroom_bytes = available.map(|available| available as i64 - metrics.unmerge_bytes as i64);
    metrics.unmerge_bytes_per_second = view.bytes_per_second;
    metrics.headroom_is_short = view.short.is_some();
    status.paused = view.short.clone();
}

/// What is the same for all clients.
struct OfHost {
    mappings_limit: u32,
    cpu_limit: Option<f64>,
    headroom: Arc<View>,
}

/// The latest refused clients, the same number of each user: as many as there is room for, and how
/// many more there are.
fn latest(users: impl Iterator<Item = Vec<RefusedStatus>>) -> (Vec<RefusedStatus>, u64) {
    let mut rows: Vec<_> = users.flat_map(|of_user| of_user.into_iter().rev().enumerate()).collect();
    rows.sort_by_key(|&(newer, _)| newer);
    let left_out = rows.len().saturating_sub(REFUSALS);
    rows.truncate(REFUSALS);
    rows.sort_by_key(|&(newer, ref row)| (row.uid, Reverse(newer)));
    (rows.into_iter().map(|(_, row)| row).collect(), left_out as u64)
}

fn refused_status(refused: Refused) -> RefusedStatus {
    let Refused { uid, pid, name, reason, times, .. } = refused;
    RefusedStatus { uid, pid, name, reason, times }
}

/// The daemon's own metrics, and what ended clients leave behind.
fn host(shared: &Shared, gone: &Sums) -> HostMetrics {
    let pressure = |read: fn() -> std::io::Result<Option<kmem::psi::Pressure>>| {
        read().ok().flatten().map(|pressure| pressure.some.avg10 / 100.0)
    };
    HostMetrics {
        uptime_seconds: shared.started.elapsed().as_secs_f64(),
        merge_period_seconds: shared.config().merge_period,
        reclaim_period_seconds: shared.config().reclaim_period,
        pages_recycled_total: gone.recycled,
        daemon_cpu_seconds: own_cpu().as_secs_f64(),
        agent_cpu_seconds: gone.cpu_ns as f64 / 1e9,
        pages_merged_total: gone.merged,
        scans_total: gone.scans,
        memory_pressure_ratio: pressure(kmem::psi::memory),
        cpu_pressure_ratio: pressure(kmem::psi::cpu),
        ..HostMetrics::default()
    }
}

/// A domain with its clients, whose sums go to `host`. Also returns the pages unmerged so far.
fn domain_status<'a>(
    shared: &Shared,
    of_host: &OfHost,
    domain: &Domain,
    clients: impl Iterator<Item = &'a Arc<Client>>,
    host: &mut HostMetrics,
) -> DomainStatus {
    let usage = domain.store.usage();
    let mut metrics = DomainMetrics {
        segments: usage.segments,
        store_bytes: usage.resident_bytes,
        pages_pinned: usage.pinned,
        pages_dead: usage.dead,
        slots_free: usage.free,
        slots_quarantined: usage.quarantined,
        frames_doubted_total: domain.store.doubted.load(Relaxed),
        pages_compacted_total: domain.compaction.copied.load(Relaxed),
        known_contents: domain.index.len(),
        ..DomainMetrics::default()
    };
    let mut out = DomainStatus { name: domain.key.to_string(), paused: domain.paused(), ..DomainStatus::default() };
    for client in clients {
        let one = {
            let state = client.state();
            host.pages_merged_total += state.totals.merged + state.totals.zeroed;
            host.scans_total += state.totals.full_scans;
            client_status(shared, of_host, client, &state, out.paused.as_deref())
        };
        metrics += &one.metrics;
        *host += &one.metrics;
        if let Some(recycling) = &one.recycling {
            *host += &recycling.metrics;
        }
        out.clients.push(one);
    }
    // Without the lock: the process may be slow to answer.
    for client in &mut out.clients {
        client.metrics.faults_total = kmem::procfs::minor_faults(client.pid).unwrap_or(0);
    }
    let fixed = domain.index.bytes() as i64 + usage.resident_bytes as i64;
    share_costs(&mut out.clients, fixed);
    let merged: u64 = out.clients.iter().map(|client| client.metrics.pages_merged).sum();
    metrics.pages_shared = usage.frames;
    metrics.pages_sharing = merged.saturating_sub(usage.frames);
    metrics.general_profit = match out.clients.is_empty() {
        true => -fixed,
        false => out.clients.iter().map(|client| client.metrics.general_profit).sum(),
    };
    out.metrics = metrics;
    out
}

/// Takes what a domain costs as a whole off its clients' profits: from each by its part of the
/// merged pages, or of the memory while nothing is merged. The parts add up to the whole.
fn share_costs(clients: &mut [ClientStatus], fixed: i64) {
    let merged: u64 = clients.iter().map(|client| client.metrics.pages_merged).sum();
    let weight = |client: &ClientStatus| match merged {
        0 => client.metrics.region_bytes.max(1),
        _ => client.metrics.pages_merged,
    };
    let all = clients.iter().map(weight).map(i128::from).sum::<i128>().max(1);
    let up_to = |weight: i128| (i128::from(fixed) * weight / all) as i64;
    let mut so_far = 0;
    for client in clients {
        let before = up_to(so_far);
        so_far += i128::from(weight(client));
        client.metrics.general_profit -= up_to(so_far) - before;
    }
}

fn client_status(
    shared: &Shared,
    of_host: &OfHost,
    client: &Client,
    state: &State,
    domain_paused: Option<&str>,
) -> ClientStatus {
    let mut metrics = ClientMetrics {
        mappings_limit: of_host.mappings_limit,
        dirty_pages_per_second: state.schedule.dirty.per_second(),
        regions: state.regions.len(),
        pages_copied_total: state.totals.copied,
        pages_discarded_total: state.totals.discarded,
        pages_differed_total: state.totals.differed,
        pages_unreadable_total: state.totals.unreadable,
        pages_retained_total: state.detach.retained,
        full_scans: state.totals.full_scans,
        mappings: state.budget.maps,
        max_map_count_binds: state.budget.is_short(state.totals.full_scans),
        window_max_us: state.totals.window_max_ns / 1000,
        agent_cpu_seconds: state.flight.credit.charged_ns as f64 / 1e9,
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
        metrics.pages_volatile += region.ages.volatile;
        metrics.pages_kept_huge += region.huge.as_ref().map_or(0, |huge| huge.kept());
    }
    let recycling = state.recycling.as_ref().map(|recycling| recycling.status());
    let saved = metrics.pages_merged + metrics.pages_zero + metrics.pages_recycled;
    let pool = recycling.as_ref().map_or(0, |recycling| recycling.metrics.pool_bytes as i64);
    // The domain's costs, its frames among them, come off later.
    metrics.general_profit = saved as i64 * PAGE - client_cost(state) - pool;
    let refused = state.refusals.why.clone().or_else(|| shared.stalls.why(client.user.owner));
    let limited = state.flight.why_left_out();
    let known = Known {
        pid: client.pid,
        metrics: Some(&metrics),
        state: state.link.state(),
        is_frozen: state.tracking.is_frozen(),
        is_pinned: state.refusals.is_pinned,
        refused: refused.as_deref(),
        host_paused: of_host.headroom.pauses(Some(client.user.owner)),
        domain_paused,
        limited: limited.as_deref().map(|text| (Reason::Files, text)),
        cooling: state.schedule.direct_io.why().map(String::as_str),
        due: state.regions.values().map(|region| region.ages.due()).sum(),
        cpu_limit: of_host.cpu_limit,
        shared_bytes: if state.regions.is_empty() { shared_bytes(client.pid) } else { 0 },
    };
    let why = why(&known);
    ClientStatus {
        pid: client.pid,
        name: client.name.clone(),
        uid: client.uid,
        manager: client.verdict.manager.map(str::to_owned),
        guest: client.verdict.guest.clone(),
        guest_name: client.verdict.name.clone(),
        own_name: client.own.name.clone(),
        own_uuid: client.own.uuid.clone(),
        rule: client.verdict.rule.clone(),
        metrics,
        recycling,
        state: state.link.state(),
        remarks: Remarks {
            unknown: client.verdict.unknown.clone(),
            refused,
            cooling: state.schedule.direct_io.why().cloned(),
            limited,
            outdated: outdated(client, state),
        },
        why,
        writer_stall: state.totals.stalls,
    }
}

fn shared_bytes(pid: i32) -> u64 {
    kmem::procfs::status(Some(pid)).map_or(0, |status| status.rss_shmem_kib << 10)
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
    // The agent's own bitmaps are three bits a page.
    let regions = state.regions.values().map(|region| region.bytes() as i64 + i64::from(region.pages) * 3 / 8);
    regions.sum::<i64>() + i64::from(state.budget.more_maps()) * MAPPING_BYTES
}

fn own_cpu() -> Duration {
    kmem::procfs::cpu_time(std::process::id() as i32).unwrap_or_default()
}

#[cfg(test)]
mod tests;
