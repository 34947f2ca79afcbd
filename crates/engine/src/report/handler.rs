//! The engine answers what arrives at the control socket.

use std::sync::Arc;

use control::{ClientMap, DirtyStatus, Handler, Peer, Refusal, SharingMatrix, Status};

use crate::access::Access;
use crate::backend::agent;
use crate::backend::module::Owner;
use crate::core::recycle::device::{self, PlugError};
use crate::daemon::detach::{DetachError, Detaching, detach};
use crate::daemon::engine::Engine;
use crate::daemon::freeze::{Freeze, FreezeError, PATIENCE, freeze};
use crate::report::{map, rates, sharing, status};

impl Engine {
    /// Whether the peer may touch this process, as client or as guest whose free pages are punched.
    /// Else the answer is that for a process which is neither: it is not told what others run.
    fn covers(&self, access: &Access, pid: i32) -> bool {
        if let Some(client) = self.shared.client_of(pid) {
            return access.covers_client(&client);
        }
        let config = self.shared.config();
        let is_covered = |owner: Arc<Owner>| access.covers_process(&config.tenants, owner.uid, pid, || owner.lives());
        *access == Access::All || self.files.guests.owner(pid).is_some_and(is_covered)
    }

    fn plug(&self, pid: i32, access: &Access, act: device::Act) -> Result<(), Refusal> {
        let none = PlugError::NotAClient(pid);
        if !self.covers(access, pid) {
            return Err(none.into());
        }
        let done = match self.files.guests.plug(&self.shared, pid, act) {
            Some(done) => done,
            None => agent::device::plug(&self.shared, &self.shared.client_of(pid).ok_or(none)?, act),
        };
        Ok(done?)
    }
}

impl Handler for Engine {
    type Access = Access;
    type Detaching = Detaching;
    type Freeze = Freeze;

    fn is_in_place(&self) -> bool {
        !self.ended() && self.place.is_ours()
    }

    fn access(&self, peer: &Peer) -> Access {
        Access::of(&self.shared.config().tenants, peer)
    }

    fn status(&self, access: &Access) -> Status {
        status::status(&self.shared, &self.files, access)
    }

    fn dirty(&self, pids: &[i32], access: &Access) -> Result<Vec<DirtyStatus>, Refusal> {
        rates::dirty(&self.shared, pids, access).map_err(|e| Refusal::Unknown(e.to_string()))
    }

    fn map(&self, pid: i32, access: &Access) -> Result<ClientMap, Refusal> {
        let client = self.shared.client_of(pid).filter(|client| access.covers_client(client));
        Ok(map::map(&*client.ok_or(DetachError::NotAClient(pid))?))
    }

    fn sharing(&self, access: &Access) -> SharingMatrix {
        sharing::sharing(&self.shared, access)
    }

    fn detach(&self, pid: i32, access: &Access) -> Result<Detaching, Refusal> {
        if !self.covers(access, pid) {
            return Err(DetachError::NotAClient(pid).into());
        }
        Ok(detach(&self.shared, pid)?)
    }

    /// When this returns the guest can be saved and migrated, and no mark from before will ever be
    /// applied.
    fn pause(&self, pid: i32, access: &Access) -> Result<(), Refusal> {
        self.plug(pid, access, device::unplug)
    }

    fn resume(&self, pid: i32, access: &Access) -> Result<(), Refusal> {
        self.plug(pid, access, device::plug_again)
    }

    fn freeze(&self, pid: i32, access: &Access) -> Result<Freeze, Refusal> {
        if !self.covers(access, pid) {
            return Err(FreezeError::NotAClient(pid).into());
        }
        Ok(freeze(&self.shared, pid, PATIENCE)?)
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
