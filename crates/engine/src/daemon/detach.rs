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
use crate::daemon::engine::Engine;

impl Engine {
    /// Asks a client's agent to unmerge everything and give its regions back. Nothing of the client
    /// is scanned or merged from then on. The value tells of the end.
    ///
    /// # Errors
    ///
    /// [`DetachError`]: no such client, a checkpoint of it is being taken, or its agent cannot be
    /// reached.
    pub fn detach(&self, pid: i32) -> Result<Detaching, DetachError> {
        let client = self.shared.clients().into_iter().find(|c| c.pid == pid).ok_or(DetachError::NotAClient(pid))?;
        let mut state = client.settled();
        match state.tracking {
            Tracking::Frozen => return Err(DetachError::Frozen(pid)),
            // Another request has begun it.
            Tracking::Detaching => {}
            Tracking::Complete | Tracking::Interrupted => {
                let sent = client.conn.send(&wire::encode(&ToAgent::Detach), &[]);
                sent.map_err(|source| DetachError::Agent { pid, source })?;
                state.tracking = Tracking::Detaching;
                state.detach.begin();
            }
        }
        drop(state);
        Ok(Detaching(client))
    }
}

/// A client that is being detached.
pub struct Detaching(Arc<Client>);

impl control::Detaching for Detaching {
    fn step(&self) -> Step {
        let state = self.0.state();
        let pages_retained = state.detach.pages_retained();
        match (state.link, state.detach.error(), state.detach.waiting()) {
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

/// Why a client could not be detached.
#[derive(Debug, thiserror::Error)]
pub enum DetachError {
    /// No such client.
    #[error("process {0} is no client of this daemon; `pageone status` lists them")]
    NotAClient(i32),
    /// A checkpoint of it is being taken.
    #[error("a checkpoint of process {0} is being taken; wait for its end")]
    Frozen(i32),
    /// Its agent can't be reached.
    #[error("the agent in process {pid} can't be reached: {source}")]
    Agent {
        /// The process.
        pid: i32,
        /// Why not.
        source: std::io::Error,
    },
}

#[cfg(test)]
mod tests {
    use kmem::PAGE_SIZE;
    use kmem::seqpacket::Conn;
    use wire::{PageNo, RegionId, Run, ToDaemon};

    use super::*;
    use crate::client::batch::{PlannedRun, Target};
    use crate::client::scanning::tests::client;
    use crate::config::Config;
    use crate::daemon::freeze::FreezeError;

    /// An engine with one client, which is this process; the other end of its connection.
    fn engine() -> (tempfile::TempDir, Engine, Arc<Client>, Conn) {
        let directory = tempfile::tempdir().unwrap();
        let engine = Engine::start(Config { directory: directory.path().into(), ..Config::default() }).unwrap();
        let (client, agent) = client();
        let client = Arc::new(client);
        engine.shared.add_client(&client);
        (directory, engine, client, agent)
    }

    #[test]
    fn a_client_is_frozen_or_detached_one_at_a_time() {
        let own = std::process::id() as i32;
        let (_directory, engine, client, agent) = engine();
        let freeze = engine.freeze(own).unwrap();
        assert!(matches!(engine.detach(own), Err(DetachError::Frozen(pid)) if pid == own));
        drop(freeze);
        drop(agent);
        let why = engine.detach(own).err().unwrap();
        assert!(matches!(why, DetachError::Agent { .. }), "{why}");
        assert!(client.state().tracking != Tracking::Detaching, "it may be tried again");

        let (_directory, engine, _client, _agent) = self::engine();
        let _detaching = engine.detach(own).unwrap();
        let why = engine.freeze(own).err().unwrap();
        assert!(matches!(why, FreezeError::Detaching(pid) if pid == own), "{why}");
    }

    #[test]
    fn an_agent_that_does_not_report_is_not_waited_for_for_ever() {
        let own = std::process::id() as i32;
        let (_directory, engine, client, _agent) = engine();
        let start = kmem::mm::map_anonymous(PAGE_SIZE).unwrap() as u64;
        let region = ToDaemon::RegionAdded { region: RegionId(1), start, len: PAGE_SIZE as u64 };
        assert!(client.apply(region, &mut Vec::new()).is_ok());
        let planned = PlannedRun { run: Run::new(PageNo(0), 1), target: Target::Zero };
        assert!(client.send_batch(RegionId(1), vec![planned]).is_ok());
        let why = engine.freeze_within(own, Duration::from_millis(20)).err().unwrap();
        assert!(matches!(why, FreezeError::Busy { pid } if pid == own), "{why}");
        assert!(!client.state().tracking.is_frozen(), "it goes on");
    }
}
