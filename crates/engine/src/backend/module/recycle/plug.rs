//! Unplugging the device of a guest's pool, and plugging it in again, as [`device`] does it. The
//! daemon is the pool's host. So no new pool is needed: while there is no device, it clears the one
//! that there is. Until then it does not sweep, and a daemon that dies before leaves the device
//! out: the next one does not sweep either.

use std::os::fd::AsFd;
use std::time::Duration;

use wire::PageNo;

use super::known::{Guest, Known};
use super::sweep::Sweeper;
use crate::core::recycle::device::{self, PlugError, SessionError};
use crate::core::recycle::state::Device;
use crate::sync::MutexGuard;
use crate::world::shared::Shared;

/// Recycled pages that are looked at in one go.
const STEP: usize = 1 << 14;
const SWEEP_TIME: Duration = Duration::from_secs(10);

/// A guest, in a session with its monitor. Nobody sweeps meanwhile.
struct InSession<'a> {
    guest: &'a Guest,
    sweeper: MutexGuard<'a, Sweeper>,
}

impl Known {
    /// Unplugs the device, or plugs it in again. `None`: this process is no guest with a pool.
    pub(crate) fn plug(&self, shared: &Shared, pid: i32, act: device::Act) -> Option<Result<(), PlugError>> {
        let (guest, why) = {
            let all = self.all.lock();
            let looked = all.get(&pid)?;
            let (_, recycling) = looked.told.as_ref()?;
            (looked.guest.clone(), recycling.lock().why().map(str::to_owned))
        };
        Some(match (guest, why) {
            (Some(guest), _) => guest.in_session(shared, act),
            (None, Some(why)) => Err(PlugError::OfFile(pid, why)),
            (None, None) => Err(SessionError::Busy(pid).into()),
        })
    }
}

impl Guest {
    pub(super) fn in_session(
        &self,
        shared: &Shared,
        act: impl Fn(&dyn device::Guest, &mut device::Monitor<'_>) -> Result<(), PlugError>,
    ) -> Result<(), PlugError> {
        let pid = self.qemu.owner.pid;
        let sweeper = self.sweeper.try_lock_for(SWEEP_TIME).ok_or(SessionError::Busy(pid))?;
        let goes_on = || !shared.stopping() && self.qemu.owner.lives();
        let mut qmp = device::monitor(pid, self.qemu.monitor.as_fd(), &goes_on)?;
        act(&InSession { guest: self, sweeper }, &mut qmp)
    }

    /// Its device was not there when it was found: see [`device::plug_by_itself`].
    pub(super) fn plug_by_itself(&self, shared: &Shared, is_first: bool) -> Result<(), PlugError> {
        let pid = self.qemu.owner.pid;
        let answer = |error: qmp::QmpError| PlugError::Qemu { pid, why: error.to_string() };
        self.in_session(shared, |guest, qmp| device::plug_by_itself(guest, qmp, is_first).map_err(answer))
    }
}

impl device::Guest for InSession<'_> {
    fn pid(&self) -> i32 {
        self.guest.qemu.owner.pid
    }

    fn renew(&self) -> Result<u32, PlugError> {
        // Should the rest fail: without a device there is nothing to sweep.
        self.set_device(Device::Out);
        let (pid, why) = (self.pid(), |error| format!("its pool cannot be cleared: {error}"));
        self.sweeper.pool.clear().map_err(|error| PlugError::Qemu { pid, why: why(error) })?;
        Ok(self.guest.qemu.pool)
    }

    fn pool_len(&self) -> u64 {
        self.guest.recycling.lock().marks.len()
    }

    fn forget_recycled(&self) {
        for file in &self.guest.files {
            // Others may have its lock between two steps.
            let mut next = Some(PageNo(0));
            while let Some(from) = next {
                next = file.state().region.forget_recycled(from, STEP);
            }
        }
    }

    fn set_device(&self, device: Device) {
        self.guest.recycling.lock().set_device(device);
    }

    fn log(&self, what: &str) {
        tracing::info!(pid = self.pid(), "{what}");
    }
}
