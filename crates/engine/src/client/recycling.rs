//! What an agent says of its guest's free pages: the pool, and the results of sweeps.
//!
//! An agent announces a pool once, with QEMU's monitor, and with the extents of the guest's RAM if
//! they are known. When the device is unplugged or plugged in, a new pool takes its place.
//!
//! The agent reports each run of pages that it has taken back, and the end of each sweep. The
//! ledger hears of every page: a recycled page leaves its frame or its place in the index, and
//! counts as recycled until the guest writes to it again. A page that is marked is no candidate
//! for merging ([`FreePages`]).

use std::os::fd::OwnedFd;
use std::sync::Arc;

use wire::recycle::{Extent, Pool, Sweep};

use super::sweeps::{Monitor, Sweeps};
use super::{Client, Next, ProtocolError, State};
use crate::core::ledger::free_pages::{FreePages, Marks, MarksError};
use crate::core::recycle::device::SessionError;
use crate::core::recycle::state::Recycling;
use crate::users::log_of;

impl State {
    /// The guest's RAM lies there: from now on it is recycled, and what it marks is not merged.
    pub(crate) fn set_extents(&mut self, extents: Vec<Extent>) {
        let Some(recycling) = &mut self.recycling else { return };
        let marks = recycling.marks.clone();
        recycling.locate(extents.clone());
        for (&id, region) in &mut self.regions {
            let own: Vec<Extent> = extents.iter().filter(|extent| extent.region == id).copied().collect();
            if !own.is_empty() {
                region.free = Some(FreePages::new(marks.clone(), own));
            }
        }
    }
}

impl Client {
    /// Begins a session with its QEMU's monitor.
    pub(crate) fn session(&self) -> Result<Arc<Monitor>, SessionError> {
        self.state().recycling.as_ref().ok_or(SessionError::NoMonitor(self.pid))?.session(self.pid)
    }

    /// The marks in a pool; why there are none is logged.
    fn marks(&self, fd: &OwnedFd) -> Option<Arc<Marks>> {
        let log = |why: &MarksError| log_of!(self.user, warn, pid = self.pid, "not recycled: {why}");
        Marks::open(fd).inspect_err(log).ok().map(Arc::new)
    }

    /// The client has a new, empty pool.
    pub(super) fn renew_pool(
        &self,
        state: &mut State,
        descriptor: u32,
        fds: &[OwnedFd],
    ) -> Result<Next, ProtocolError> {
        let fd = fds.first().ok_or(ProtocolError::PoolWithoutDescriptor)?;
        let recycling = state.recycling.as_mut().ok_or(ProtocolError::RenewedWithoutPool)?;
        let Some(marks) = self.marks(fd) else { return Ok(Next::Nothing) };
        recycling.marks = marks;
        recycling.renewed = Some(descriptor);
        let extents = recycling.extents.clone();
        state.set_extents(extents);
        Ok(Next::Reclaim)
    }

    pub(super) fn add_pool(
        &self,
        state: &mut State,
        pool: Pool,
        fds: &mut Vec<OwnedFd>,
    ) -> Result<Next, ProtocolError> {
        let fd = fds.first().ok_or(ProtocolError::PoolWithoutDescriptor)?;
        if state.recycling.is_some() {
            return Err(ProtocolError::PoolTwice);
        }
        check_extents(state, &pool.extents)?;
        let period = Recycling::period_of(pool.period_ms, self.reclaim_period);
        let Some(marks) = self.marks(fd) else { return Ok(Next::Reclaim) };
        // An agent that knows where the RAM lies has served an earlier daemon, or a program that
        // marks pages of its own.
        let boots = pool.extents.is_empty();
        if boots && fds.len() < 2 {
            return Err(ProtocolError::PoolWithoutPlace);
        }
        let recycling = Recycling::new(marks, period);
        let recycling = if boots { recycling.booting() } else { recycling };
        let fd = (fds.len() > 1).then(|| fds.swap_remove(1));
        let monitor = fd.map(|fd| Arc::new(Monitor::new(fd, self.user.clone())));
        let has_monitor = monitor.is_some();
        state.recycling = Some(Sweeps::new(recycling, monitor));
        state.set_extents(pool.extents);
        Ok(if has_monitor { Next::AskMonitor } else { Next::Reclaim })
    }

    /// A sweep has ended.
    pub(super) fn swept(&self, state: &mut State, sweep: &Sweep) -> Result<Next, ProtocolError> {
        let recycling = state.recycling.as_mut().ok_or(ProtocolError::SweptWithoutPool)?;
        state.flight.credit.grant(std::mem::take(&mut recycling.granted));
        state.flight.credit.charge(sweep.cpu_ns);
        recycling.requested = None;
        if let Some(why) = recycling.swept(sweep) {
            log_of!(self.user, warn, pid = self.pid, "not recycled: {why}");
        }
        Ok(if sweep.more { Next::Reclaim } else { Next::Nothing })
    }
}

fn check_extents(state: &State, extents: &[Extent]) -> Result<(), ProtocolError> {
    let inside = |extent: &Extent| {
        let region = state.regions.get(&extent.region);
        region.is_some_and(|region| extent.run.end().0 <= region.pages)
    };
    // A region may have been given back since the agent learnt of it.
    match extents.iter().filter(|extent| state.regions.contains_key(&extent.region)).find(|extent| !inside(extent)) {
        Some(extent) => Err(ProtocolError::RamLeavesRegion(extent.region)),
        None => Ok(()),
    }
}
