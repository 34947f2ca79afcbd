//! When agents are to take back what their guests have marked as free.
//!
//! The work is the agent's, in the client's own process (see [`ppr`] on why). Recycling goes first,
//! being some hundred times cheaper for a page: its CPU time is charged to the budget, and merging
//! waits ([`crate::core::recycle::state`]).

use std::time::{Duration, Instant};

use wire::ToAgent;

use crate::client::Client;
use crate::client::sweeps::Sweeps;
use crate::world::shared::Shared;

/// An agent that has not answered for this long is asked again.
const PATIENCE: Duration = Duration::from_secs(10);
/// How often to look at a client while the guest's RAM is being located.
const START_STEP: Duration = Duration::from_millis(200);

/// Asks for the sweeps that are due. Returns when to come again; `None`: no client has a pool.
pub(crate) fn tick(shared: &Shared) -> Option<Instant> {
    let now = Instant::now();
    let mut next: Option<Instant> = None;
    for client in shared.clients() {
        let mut state = client.state();
        let connected = state.link.is_up();
        if let Some(sweeps) = state.recycling.as_mut().filter(|_| connected)
            && let Some(due) = look(shared, &client, sweeps, now)
        {
            next = Some(next.map_or(due, |next| next.min(due)));
        }
    }
    shared.charge_agents();
    next
}

/// Asks one client for a sweep where one is due. Returns when to look again; `None`: never.
fn look(shared: &Shared, client: &Client, sweeps: &mut Sweeps, now: Instant) -> Option<Instant> {
    if now >= sweeps.due
        && let Some(monitor) = sweeps.idle_monitor()
    {
        qmp::drain(monitor);
    }
    if sweeps.is_dropped() || !sweeps.is_located() {
        let is_over = sweeps.why().is_some();
        if is_over {
            sweeps.rest(now)
        } else {
            sweeps.due = now + START_STEP
        }
        return (!is_over || sweeps.idle_monitor().is_some()).then_some(sweeps.due);
    }
    let waits = |requested: Instant| now < requested + PATIENCE;
    if sweeps.is_due(now)
        && !sweeps.requested.is_some_and(waits)
        && let Some(budget) = sweeps.budget(&shared.pacer)
    {
        let message = wire::encode(&ToAgent::Recycle { budget_ns: budget.as_nanos() as u64 });
        // A full socket: the next look tries again.
        if client.conn.send(&message, &[]).is_ok() {
            (sweeps.requested, sweeps.granted) = (Some(now), budget);
        }
    }
    Some(sweeps.due)
}
