//! The engine answers what arrives at the control socket.

use control::{ChangeLog, DirtyStatus, Handler, Refusal, Status};

use crate::daemon::freeze::{Hold, HoldError};
use crate::daemon::service::{DetachError, Engine};

impl Engine {
    /// Whether a process belongs to another user. Such a process gets the same answer as one that is
    /// not a client: what other users run stays their business.
    fn is_hidden(&self, pid: i32, uid: Option<u32>) -> bool {
        uid.is_some() && self.owner(pid) != uid
    }
}

impl Handler for Engine {
    type Freeze = Hold;

    fn status(&self, uid: Option<u32>) -> Status {
        Engine::status(self, uid)
    }

    fn dirty(&self, pids: &[i32], uid: Option<u32>) -> Result<Vec<DirtyStatus>, Refusal> {
        Engine::dirty(self, pids, uid).map_err(|e| Refusal::Unknown(e.to_string()))
    }

    fn detach(&self, pid: i32, uid: Option<u32>) -> Result<(), Refusal> {
        if self.is_hidden(pid, uid) {
            return Err(DetachError::NotAClient(pid).into());
        }
        Ok(Engine::detach(self, pid)?)
    }

    fn is_client(&self, pid: i32) -> bool {
        Engine::is_client(self, pid)
    }

    fn freeze(&self, pid: i32, uid: Option<u32>) -> Result<Hold, Refusal> {
        if self.is_hidden(pid, uid) {
            return Err(HoldError::NotAClient(pid).into());
        }
        Ok(self.hold(pid)?)
    }
}

impl control::Freeze for Hold {
    fn changes(&mut self) -> Option<ChangeLog> {
        self.since()
    }

    fn mark(&self, label: &str, written: Option<&[(u64, u64)]>) {
        Hold::mark(self, label, written);
    }
}

impl From<DetachError> for Refusal {
    fn from(e: DetachError) -> Self {
        match e {
            DetachError::NotAClient(_) => Refusal::Unknown(e.to_string()),
            DetachError::Agent { .. } => Refusal::Failed(e.to_string()),
        }
    }
}

impl From<HoldError> for Refusal {
    fn from(e: HoldError) -> Self {
        match e {
            HoldError::NotAClient(_) => Refusal::Unknown(e.to_string()),
            HoldError::Held(_) => Refusal::Busy(e.to_string()),
            HoldError::Busy { .. } => Refusal::Failed(e.to_string()),
        }
    }
}
