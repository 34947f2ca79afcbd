//! The engine answers what arrives at the control socket.

use control::{ChangeLog, ClientMap, DirtyStatus, Handler, Peer, Refusal, SharingMatrix, Status};

use crate::access::Access;
use crate::core::recycle::device::PlugError;
use crate::daemon::detach::{DetachError, Detaching};
use crate::daemon::engine::Engine;
use crate::daemon::freeze::{Freeze, FreezeError};
use crate::report::map;

impl Engine {
    /// Whether the peer may not touch this process, as client or as guest whose free pages are
    /// punched. The answer is that for a process which is neither: what others run stays their
    /// business.
    fn is_hidden(&self, pid: i32, access: &Access) -> bool {
        if let Some(client) = self.shared.clients().iter().find(|client| client.pid == pid) {
            return !access.covers_client(client);
        }
        let config = self.shared.config();
        let is_covered = |uid| access.covers_process(&config.tenants, uid, pid);
        *access != Access::All && !self.files.guests.owner(pid).is_some_and(is_covered)
    }
}

impl Handler for Engine {
    type Access = Access;
    type Detaching = Detaching;
    type Freeze = Freeze;

    fn access(&self, peer: &Peer) -> Access {
        Access::of(&self.shared.config().tenants, peer)
    }

    fn status(&self, access: &Access) -> Status {
        Engine::status(self, access)
    }

    fn dirty(&self, pids: &[i32], access: &Access) -> Result<Vec<DirtyStatus>, Refusal> {
        Engine::dirty(self, pids, access).map_err(|e| Refusal::Unknown(e.to_string()))
    }

    fn map(&self, pid: i32, access: &Access) -> Result<ClientMap, Refusal> {
        let clients = self.shared.clients();
        let client = clients.iter().find(|client| client.pid == pid && access.covers_client(client));
        Ok(map::map(client.ok_or(DetachError::NotAClient(pid))?))
    }

    fn sharing(&self, access: &Access) -> SharingMatrix {
        Engine::sharing(self, access)
    }

    fn detach(&self, pid: i32, access: &Access) -> Result<Detaching, Refusal> {
        if self.is_hidden(pid, access) {
            return Err(DetachError::NotAClient(pid).into());
        }
        Ok(Engine::detach(self, pid)?)
    }

    fn pause(&self, pid: i32, access: &Access) -> Result<(), Refusal> {
        if self.is_hidden(pid, access) {
            return Err(PlugError::NotAClient(pid).into());
        }
        Ok(Engine::pause(self, pid)?)
    }

    fn resume(&self, pid: i32, access: &Access) -> Result<(), Refusal> {
        if self.is_hidden(pid, access) {
            return Err(PlugError::NotAClient(pid).into());
        }
        Ok(Engine::resume(self, pid)?)
    }

    fn freeze(&self, pid: i32, access: &Access) -> Result<Freeze, Refusal> {
        if self.is_hidden(pid, access) {
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
