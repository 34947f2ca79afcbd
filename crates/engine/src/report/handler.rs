//! The engine answers what arrives at the control socket.

use control::{ChangeLog, ClientMap, DirtyStatus, Handler, Refusal, SharingMatrix, Status};

use crate::core::recycle::device::PlugError;
use crate::daemon::detach::{DetachError, Detaching};
use crate::daemon::engine::Engine;
use crate::daemon::freeze::{Freeze, FreezeError};
use crate::report::map;

impl Engine {
    /// Whether a process belongs to another user. Such a process gets the same answer as one that
    /// is not a client: what other users run stays their business.
    fn is_hidden(&self, pid: i32, uid: Option<u32>) -> bool {
        uid.is_some() && self.owner(pid) != uid
    }
}

impl Handler for Engine {
    type Detaching = Detaching;
    type Freeze = Freeze;

    fn status(&self, uid: Option<u32>) -> Status {
        Engine::status(self, uid)
    }

    fn dirty(&self, pids: &[i32], uid: Option<u32>) -> Result<Vec<DirtyStatus>, Refusal> {
        Engine::dirty(self, pids, uid).map_err(|e| Refusal::Unknown(e.to_string()))
    }

    fn map(&self, pid: i32, uid: Option<u32>) -> Result<ClientMap, Refusal> {
        let clients = self.shared.clients();
        let client = clients.iter().find(|client| client.pid == pid && uid.is_none_or(|uid| uid == client.user.uid));
        Ok(map::map(client.ok_or(DetachError::NotAClient(pid))?))
    }

    fn sharing(&self, uid: Option<u32>) -> SharingMatrix {
        Engine::sharing(self, uid)
    }

    fn detach(&self, pid: i32, uid: Option<u32>) -> Result<Detaching, Refusal> {
        if self.is_hidden(pid, uid) {
            return Err(DetachError::NotAClient(pid).into());
        }
        Ok(Engine::detach(self, pid)?)
    }

    fn pause(&self, pid: i32, uid: Option<u32>) -> Result<(), Refusal> {
        if self.is_hidden(pid, uid) {
            return Err(PlugError::NotAClient(pid).into());
        }
        Ok(Engine::pause(self, pid)?)
    }

    fn resume(&self, pid: i32, uid: Option<u32>) -> Result<(), Refusal> {
        if self.is_hidden(pid, uid) {
            return Err(PlugError::NotAClient(pid).into());
        }
        Ok(Engine::resume(self, pid)?)
    }

    fn freeze(&self, pid: i32, uid: Option<u32>) -> Result<Freeze, Refusal> {
        if self.is_hidden(pid, uid) {
            return Err(FreezeError::NotAClient(pid).into());
        }
        Ok(Engine::freeze(self, pid)?)
    }
}

impl control::Freeze for Freeze {
    fn changes(&mut self) -> Option<ChangeLog> {
        Freeze::changes(self)
    }

    fn mark(&self, label: &str, written: Option<&[(u64, u64)]>) {
        Freeze::mark(self, label, written);
    }
}

impl From<DetachError> for Refusal {
    fn from(e: DetachError) -> Self {
        match e {
            DetachError::NotAClient(_) => Refusal::Unknown(e.to_string()),
            DetachError::Frozen(_) => Refusal::Busy(e.to_string()),
            DetachError::Agent { .. } => Refusal::Failed(e.to_string()),
        }
    }
}

impl From<PlugError> for Refusal {
    fn from(e: PlugError) -> Self {
        match e {
            PlugError::NotAClient(_) => Refusal::Unknown(e.to_string()),
            PlugError::Busy(_) | PlugError::Incoming(_) => Refusal::Busy(e.to_string()),
            _ => Refusal::Failed(e.to_string()),
        }
    }
}

impl From<FreezeError> for Refusal {
    fn from(e: FreezeError) -> Self {
        match e {
            FreezeError::NotAClient(_) => Refusal::Unknown(e.to_string()),
            FreezeError::Frozen(_) | FreezeError::Detaching(_) => Refusal::Busy(e.to_string()),
            FreezeError::Busy { .. } => Refusal::Failed(e.to_string()),
        }
    }
}
