//! Detaching a client: its agent gives everything back.
//!
//! From the request on nothing of the client is scanned: while copies cool down, the kernel's notes
//! of writes are the agent's.

use std::sync::Arc;
use std::time::Duration;

use control::DetachStep as Step;
use wire::ToAgent;

use crate::client::Client;
use crate::client::link::{Link, Tracking};
use crate::world::shared::Shared;

/// Asks a client's agent to unmerge everything and give its regions back. Nothing of the client is
/// scanned or merged from then on. The value tells of the end.
pub(crate) fn detach(shared: &Shared, pid: i32) -> Result<Detaching, DetachError> {
    let client = shared.client_of(pid).ok_or(DetachError::NotAClient(pid))?;
    let mut state = client.settled();
    match state.tracking {
        Tracking::Frozen => return Err(DetachError::Frozen(pid)),
        // Another request has begun it.
        Tracking::Detaching => {}
        Tracking::Complete | Tracking::Interrupted => {
            let sent = client.conn.send(&wire::encode(&ToAgent::Detach), &[]);
            sent.map_err(|source| DetachError::Agent { pid, source })?;
            state.tracking = Tracking::Detaching;
            (state.detach.waits, state.detach.errno) = (None, None);
        }
    }
    drop(state);
    Ok(Detaching(client))
}

/// A client that is being detached.
pub struct Detaching(Arc<Client>);

impl control::Detaching for Detaching {
    fn step(&self) -> Step {
        let state = self.0.state();
        let pages_retained = state.detach.retained;
        match (state.link, state.detach.errno, state.detach.waits) {
            (Link::Detached, ..) => Step::Done { pages_retained },
            (Link::Disconnected, ..) => {
                Step::Failed(format!("process {} has ended, or its agent has closed the connection", self.0.pid))
            }
            (_, Some(errno), _) => {
                let error = std::io::Error::from_raw_os_error(errno);
                Step::Failed(format!(
                    "process {}: the kernel refused to give memory back ({error}); its memory stays managed",
                    self.0.pid
                ))
            }
            (.., Some(waits)) => Step::Waits { pages: waits.cooling, at_most: Duration::from_millis(waits.wait_ms) },
            _ => Step::Works,
        }
    }
}

#[derive(Debug, thiserror::Error)]
pub(crate) enum DetachError {
    #[error("process {0} is no client of this daemon; `pageone status` lists them")]
    NotAClient(i32),
    #[error("a checkpoint of process {0} is being taken; wait for its end")]
    Frozen(i32),
    #[error("the agent in process {pid} can't be reached: {source}")]
    Agent { pid: i32, source: std::io::Error },
}

#[cfg(test)]
mod tests {
    use kmem::PAGE_SIZE;
    use kmem::seqpacket::Conn;
    use wire::{PageNo, RegionId, Run, ToDaemon};

    use super::*;
    use crate::client::batch::{PlannedRun, Target};
    use crate::client::scanning::tests::client;
    use crate::daemon::freeze::{FreezeError, PATIENCE, freeze};
    use crate::world::shared::tests::shared;

    /// A world with one client, which is this process; the other end of its connection.
    fn world() -> (Arc<Shared>, Arc<Client>, Conn) {
        let (client, agent) = client();
        let (shared, client) = (Arc::new(shared()), Arc::new(client));
        shared.add_client(&client);
        (shared, client, agent)
    }

    #[test]
    fn a_client_is_frozen_or_detached_one_at_a_time() {
        let own = std::process::id() as i32;
        let (shared, client, agent) = world();
        let frozen = freeze(&shared, own, PATIENCE).unwrap();
        assert!(matches!(detach(&shared, own), Err(DetachError::Frozen(pid)) if pid == own));
        drop(frozen);
        drop(agent);
        let why = detach(&shared, own).err().unwrap();
        assert!(matches!(why, DetachError::Agent { .. }), "{why}");
        assert!(client.state().tracking != Tracking::Detaching, "it may be tried again");

        let (shared, _client, _agent) = world();
        let _detaching = detach(&shared, own).unwrap();
        let why = freeze(&shared, own, PATIENCE).err().unwrap();
        assert!(matches!(why, FreezeError::Detaching(pid) if pid == own), "{why}");
    }

    #[test]
    fn an_agent_that_does_not_report_is_not_waited_for_for_ever() {
        let own = std::process::id() as i32;
        let (shared, client, _agent) = world();
        let start = kmem::mm::map_anonymous(PAGE_SIZE).unwrap() as u64;
        let region = ToDaemon::RegionAdded { region: RegionId(1), start, len: PAGE_SIZE as u64 };
        assert!(client.apply(region, &mut Vec::new()).is_ok());
        let planned = PlannedRun { run: Run::new(PageNo(0), 1), target: Target::Zero };
        assert!(client.send_batch(RegionId(1), vec![planned]).is_ok());
        let why = freeze(&shared, own, Duration::from_millis(20)).err().unwrap();
        assert!(matches!(why, FreezeError::Busy { pid } if pid == own), "{why}");
        assert!(!client.state().tracking.is_frozen(), "it goes on");
    }
}
