//! Sending: a plan becomes a batch of the agent's, or is undone.

use std::time::{Duration, Instant};

use wire::RegionId;

use super::plan::Plan;
use crate::client::Client;
use crate::client::batch::PlannedRun;
use crate::client::send::Then;
use crate::world::shared::Shared;
use crate::world::stall::wait;

/// How long an agent may take to make room in its socket, before the worker turns to other clients.
const PATIENCE: Duration = Duration::from_secs(2);
/// Pause between two attempts.
const STEP: Duration = Duration::from_millis(1);

/// The client is gone, or does not answer.
pub(super) struct Gone;

/// Sends a plan as a batch, waiting for room. What cannot be sent is undone.
pub(super) fn send(shared: &Shared, client: &Client, id: RegionId, plan: Plan) -> Result<(), Gone> {
    let (mut runs, short) = plan.into_runs();
    undo(client, id, &short, Then::Defer);
    if runs.is_empty() {
        return Ok(());
    }
    let deadline = Instant::now() + PATIENCE;
    loop {
        match wait(client.user.uid, || client.send_batch(id, runs)) {
            Ok(()) => {
                shared.charge_agents();
                return Ok(());
            }
            Err((back, e)) if e.kind() == std::io::ErrorKind::WouldBlock && Instant::now() < deadline => {
                runs = back;
                std::thread::sleep(STEP);
            }
            Err((back, _)) => {
                undo(client, id, &back, Then::Restart);
                return Err(Gone);
            }
        }
    }
}

/// See [`Client::undo`].
pub(super) fn undo(client: &Client, id: RegionId, runs: &[PlannedRun], then: Then) {
    client.undo(&mut client.state(), id, runs, then);
}
