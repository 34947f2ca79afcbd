//! The beginning of a merge period for a client: may it be merged at all? If so, it is scanned.

use std::time::{Duration, Instant};

use rustix::io::Errno;

use super::scan::ScanFor;
use super::verify;
use crate::client::{Client, State};
use crate::users::log_of;
use crate::world::shared::Shared;
use crate::world::stall::{touch, wait};

/// Scanning all clients may take one part in 40 of a CPU's time, of which each user has the same.
/// Many mappings make it slow, and agents that map, with the program's page faults behind them,
/// wait for it.
const SCAN_SHARE: u32 = 40;
/// Scans that do not count for that: in them every page is new.
const FIRST_SCANS: u64 = 3;
/// A scan that finds more than one page in 16 was slow for that, and does not count either.
const MUCH: u64 = 16;
/// How long an agent may work on its batches before it counts as stalled.
const PATIENCE: Duration = Duration::from_secs(2);

/// Refuses pinned memory, and scans. `false`: there is nothing to do for this client now.
pub(super) fn begin(shared: &Shared, client: &Client) -> bool {
    if is_left_out(&mut client.state()) {
        return false;
    }
    if client.state().schedule.next_scan <= Instant::now() {
        look_for_direct_io(client, shared.config().direct_io_seconds);
    }
    let Some(status) = touch(client.user.owner, || kmem::procfs::status(Some(client.pid))) else { return false };
    let mut state = wait(client.user.owner, || client.settled());
    let now = Instant::now();
    if state.flight.is_late(now, PATIENCE) {
        state.link.stall()
    } else {
        state.link.resume()
    }
    let is_idle = |state: &State| state.link.is_up() && !state.tracking.is_frozen() && state.flight.is_empty();
    if !is_idle(&state) || now < state.schedule.next_scan {
        return false;
    }
    let Ok(status) = status else { return false };
    state.totals.peak = state.totals.peak.max((status.vm_hwm_kib << 10) / kmem::PAGE_SIZE as u64);
    if !state.refusals.check(&client.user, client.pid, &status) {
        return false;
    }
    if state.recycling.as_mut().is_some_and(|recycling| recycling.is_awaited()) {
        return false;
    }
    if let Err(why) = verify::regions(client, &mut state) {
        tracing::debug!(pid = client.pid, "not scanned: {why}");
        return false;
    }
    // The state was unlocked meanwhile.
    if !is_idle(&state) {
        return false;
    }
    let cpu = kmem::cpu::thread_time();
    let scanned = client.scan(&mut state, ScanFor::Period);
    let is_idle = scanned == Ok(0) && state.regions.values().all(|region| region.ages.is_idle());
    state.schedule.calm.scanned(!is_idle);
    match scanned {
        // A scan that finds many written or new pages is slow for that reason, once. Its pages must
        // not wait long for the two scans in which they have to be clean.
        Ok(found)
            if state.totals.full_scans > FIRST_SCANS
                && found * MUCH < state.regions.values().map(|region| u64::from(region.pages)).sum() =>
        {
            let took = kmem::cpu::thread_time() - cpu;
            state.schedule.next_scan = now + took * SCAN_SHARE * shared.users.share(&client.user);
        }
        Ok(_) => {}
        Err(Errno::BUSY) => return false,
        Err(e) => {
            log_of!(client.user, warn, pid = client.pid, "cannot scan its memory: {e}");
            return false;
        }
    }
    if state.schedule.cooldown_began.elapsed().as_secs_f64() >= shared.config().direct_io_seconds {
        state.schedule.cooldown_began = Instant::now();
        state.regions.values_mut().for_each(|region| region.ages.end_cooldown());
    }
    state.retry_deferred();
    shared.pacer.found(client.user.owner, state.regions.values().map(|region| region.ages.due()).sum());
    true
}

/// Whether nothing has happened for long: then every second period is.
fn is_left_out(state: &mut State) -> bool {
    let is_known = state.flight.is_empty() && state.regions.values().all(|region| region.verified);
    is_known && state.schedule.calm.rests()
}

/// Looks for direct I/O, unless that is known. Takes the client's lock, but not while it looks.
/// `cooldown`: `direct_io_seconds`; 0: pages do not cool down.
fn look_for_direct_io(client: &Client, cooldown: f64) {
    if cooldown == 0.0 || !client.state().schedule.direct_io.is_due(Instant::now()) {
        return;
    }
    let held_up = || Some("files that do not answer".to_owned());
    let why = touch(client.user.owner, || kmem::procfs::unpinned_io(client.pid)).unwrap_or_else(held_up);
    let mut state = client.state();
    if state.schedule.direct_io.looked(why, Duration::from_secs_f64(cooldown), Instant::now()) {
        let over = state.schedule.direct_io.why().map_or("", String::as_str);
        tracing::info!(pid = client.pid, "pages wait {cooldown} s after a write: direct I/O over {over}");
    }
}
