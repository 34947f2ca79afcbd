//! What an agent is asked for, of a guest whose free pages it takes back.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::time::{Duration, Instant};

use crate::core::recycle::device::SessionError;
use crate::core::recycle::state::Recycling;
use crate::users::User;

/// QEMU's monitor. It is closed elsewhere: closing what a client sent may take for ever. Who has
/// it, beside the table, has a session; there is one at a time.
pub(crate) struct Monitor {
    fd: Option<OwnedFd>,
    user: Arc<User>,
}

impl Monitor {
    pub(crate) fn socket(&self) -> Option<BorrowedFd<'_>> {
        self.fd.as_ref().map(AsFd::as_fd)
    }

    pub(super) fn new(fd: OwnedFd, user: Arc<User>) -> Self {
        Self { fd: Some(fd), user }
    }
}

impl Drop for Monitor {
    fn drop(&mut self) {
        self.user.close(self.fd.take().into_iter().collect());
    }
}

/// A guest whose pages an agent takes back, and what it was asked for.
pub(crate) struct Sweeps {
    recycling: Recycling,
    /// QEMU's monitor, if the agent of a QEMU has sent it. A session has it, too.
    monitor: Option<Arc<Monitor>>,
    /// The number of the new pool's descriptor in the agent's process, once it has answered.
    pub(crate) renewed: Option<u32>,
    /// When a sweep was requested that has not ended.
    pub(crate) requested: Option<Instant>,
    /// CPU time that the sweeps since the last answer may take.
    pub(crate) granted: Duration,
}

impl std::ops::Deref for Sweeps {
    type Target = Recycling;

    fn deref(&self) -> &Recycling {
        &self.recycling
    }
}

impl std::ops::DerefMut for Sweeps {
    fn deref_mut(&mut self) -> &mut Recycling {
        &mut self.recycling
    }
}

impl Sweeps {
    pub(super) fn new(recycling: Recycling, monitor: Option<Arc<Monitor>>) -> Self {
        Self { recycling, monitor, renewed: None, requested: None, granted: Duration::ZERO }
    }

    pub(crate) fn session(&self, pid: i32) -> Result<Arc<Monitor>, SessionError> {
        let monitor = self.monitor.clone().ok_or(SessionError::NoMonitor(pid))?;
        // The table has it, and this.
        if Arc::strong_count(&monitor) > 2 { Err(SessionError::Busy(pid)) } else { Ok(monitor) }
    }

    /// The monitor, while no session needs what QEMU says.
    pub(crate) fn idle_monitor(&self) -> Option<BorrowedFd<'_>> {
        self.monitor.as_ref().filter(|monitor| Arc::strong_count(monitor) == 1)?.socket()
    }
}
