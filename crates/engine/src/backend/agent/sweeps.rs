//! When agents are to take back what their guests have marked as free.
//!
//! The work is the agent's, in the client's own process (see [`ppr`] on why). Here is the policy.
//! In each *reclaim period* the daemon looks at the summary of a client's pool, 4 KiB for 8 GiB of
//! guest. Where it says that something is marked, the daemon asks the agent for a sweep, with as
//! much CPU time as the budget that merging and recycling share allows. Recycling goes first, being
//! some hundred times cheaper for a page: its CPU time is charged to the budget, and merging waits.

use std::time::{Duration, Instant};

use wire::ToAgent;

use crate::client::Client;
use crate::client::recycling::Recycling;
use crate::core::recycle::policy::{LOOK_AFTER, SWEEP_SHARE};
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
        if let Some(recycling) = state.recycling.as_mut().filter(|_| connected)
            && let Some(due) = look(shared, &client, recycling, now)
        {
            next = Some(next.map_or(due, |next| next.min(due)));
        }
    }
    shared.charge_agents();
    next
}

/// Looks at one client, and asks for a sweep where one is due. Returns when to look again; `None`:
/// never.
fn look(shared: &Shared, client: &Client, recycling: &mut Recycling, now: Instant) -> Option<Instant> {
    if now >= recycling.due
        && let Some(monitor) = recycling.idle_monitor()
    {
        qmp::drain(monitor);
    }
    if recycling.is_dropped() || !recycling.is_located() {
        let is_over = recycling.is_dropped() || recycling.is_refused();
        recycling.due = now + if is_over { recycling.period } else { START_STEP };
        return (!is_over || recycling.idle_monitor().is_some()).then_some(recycling.due);
    }
    if now >= recycling.due {
        recycling.due = now + recycling.period.mul_f64(LOOK_AFTER);
        let waits = recycling.requested.is_some_and(|requested| now < requested + PATIENCE);
        if !waits
            && recycling.has_marks()
            && let Some(budget) = shared.pacer.allowance(recycling.period.mul_f64(SWEEP_SHARE))
        {
            let message = wire::encode(&ToAgent::Recycle { budget_ns: budget.as_nanos() as u64 });
            // A full socket: the next look tries again.
            if client.conn.send(&message, &[]).is_ok() {
                recycling.requested = Some(now);
                recycling.granted = budget;
            }
        }
    }
    Some(recycling.due)
}
