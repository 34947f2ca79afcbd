//! Dirty rates: how many pages clients write, and where.
//!
//! While a client is watched, its regions keep a stamp for each page: when a scan last found it
//! written. Each question ([`dirty`]) scans the clients first, so the interval between questions
//! is the resolution of the answers. Such a scan makes no page older, and its findings are kept
//! for the next merge period's: watching does not change what is merged. It costs what any scan
//! costs, and the next write to each page that it protects takes a microsecond longer.
//!
//! A page that a scan finds was written at some time since the scan before. A window of time
//! counts the page if the middle of that time lies in the window.

use std::time::Instant;

use control::{DirtyStatus, Heat, Window};

use crate::access::Access;
use crate::backend::agent::scan::ScanFor;
use crate::client::link::Link;
use crate::client::{Client, State};
use crate::sync::MutexGuard;
use crate::world::shared::Shared;

/// Lengths of the windows in which distinct pages are counted, in tenths of a second.
const WINDOWS: [u16; 9] = [2, 5, 10, 20, 50, 100, 200, 300, 600];
/// Length of the heat map's window, in tenths of a second.
const HEAT: u16 = 100;

/// Begins or goes on watching. Scans, if it is time and the agent has nothing left to do.
fn ask(client: &Client, state: &mut MutexGuard<'_, State>) -> Result<(), rustix::io::Errno> {
    let now = Instant::now();
    let due = state.observers.request_watch(now);
    if !due || !state.link.is_up() || !state.flight.is_empty() {
        return Ok(());
    }
    client.scan(state, ScanFor::Watch)?;
    let State { observers, regions, .. } = &mut **state;
    observers.watched(regions, now);
    Ok(())
}

/// The process is not a client.
#[derive(Debug, thiserror::Error)]
#[error(
    "process {0} is no client of this daemon, so its writes are not recorded: attach it, or start it with `pageone run`; `pageone status` lists clients"
)]
pub(super) struct NotAClient(i32);

/// Which pages these processes write; all clients if `pids` is empty. Scans them first. Only what
/// the peer has access to. `Err`: the first process that is not a client.
pub(super) fn dirty(shared: &Shared, pids: &[i32], access: &Access) -> Result<Vec<DirtyStatus>, NotAClient> {
    let mut clients = shared.clients();
    clients.retain(|client| access.covers_client(client) && (pids.is_empty() || !client.pidfd.has_exited()));
    if let Some(&pid) = pids.iter().find(|&&pid| !clients.iter().any(|client| client.pid == pid)) {
        return Err(NotAClient(pid));
    }
    clients.retain(|client| pids.is_empty() || pids.contains(&client.pid));
    Ok(clients.iter().map(|client| status(client)).collect())
}

fn status(client: &Client) -> DirtyStatus {
    let mut state = client.settled();
    let failed = ask(client, &mut state).err();
    let (name, called) = (client.name.clone(), client.called());
    let guest_name = (*called != name).then(|| called.to_owned());
    let mut out = DirtyStatus { pid: client.pid, name, guest_name, ..DirtyStatus::default() };
    out.held_up = match (failed, state.link, state.flight.outstanding) {
        (Some(e), ..) => Some(format!("its memory can't be scanned: {e}")),
        (_, Link::Detached, _) => Some("it is detached".into()),
        (_, Link::Disconnected, _) => Some("its agent is not connected".into()),
        (.., pages @ 1..) => Some(format!("{pages} pages are being merged")),
        _ => None,
    };
    let Some(watch) = &state.observers.watch else { return out };
    out.watched_seconds = watch.scanned.duration_since(watch.since).as_secs_f64();
    out.interval_seconds = watch.interval.as_secs_f64();
    if !watch.interval.is_zero() {
        out.pages_per_second = watch.found as f64 / out.interval_seconds;
    }
    let mut histogram = [0; WINDOWS[WINDOWS.len() - 1] as usize + 1];
    // Half of the time that a scan stands for.
    let half = (out.interval_seconds * 5.0) as u16;
    let youngest = |window: u16| window.saturating_sub(half + 1);
    for region in state.regions.values() {
        out.pages += u64::from(region.managed);
        let Some(stamps) = &region.stamps else { continue };
        stamps.ages(&mut histogram);
        let (part_pages, parts) = stamps.heat(youngest(HEAT));
        out.regions.push(Heat { start: region.start, pages: region.pages, part_pages, parts });
    }
    for window in WINDOWS.into_iter().filter(|&window| f64::from(window) >= out.interval_seconds * 9.0) {
        let seconds = f64::from(window) / 10.0;
        let pages = histogram[..=usize::from(youngest(window))].iter().sum();
        out.windows.push(Window {
            seconds,
            pages,
            complete: out.watched_seconds + 0.5 * out.interval_seconds >= seconds,
        });
    }
    out
}
