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
