//! Applying what an agent says: the one place where its messages are told apart.

use std::collections::BTreeMap;
use std::os::fd::OwnedFd;

use kmem::PAGE_SIZE;
use wire::{RegionId, Run, ToDaemon};

use super::link::{Link, Tracking};
use super::{Client, ProtocolError, State};
use crate::content::index::MAX_REGIONS;
use crate::ledger::{Entry, Region};

/// What a message of an agent leads to.
pub(crate) enum Next {
    Nothing,
    /// The client needs another merge pass.
    Pass,
    /// It is time to look whether a sweep is due.
    Reclaim,
    /// Where its guest's RAM lies is to be found out from QEMU's monitor, at this socket; then as
    /// [`Next::Reclaim`].
    FindRam(OwnedFd),
}

impl Client {
    /// Applies one message and returns what it leads to. `Err` says what was wrong with it; the
    /// connection is then closed.
    pub(crate) fn apply(&self, message: ToDaemon, fds: Vec<OwnedFd>) -> Result<Next, ProtocolError> {
        let mut state = self.state();
        match message {
            ToDaemon::RegionAdded { region, start, len } => {
                add_region(&mut state.regions, region, start, len)?;
            }
            ToDaemon::RegionShrunk { region, run } => self.shrink(&mut state, region, run)?,
            ToDaemon::Discarded { region, run } => self.discard(&mut state, region, run)?,
            ToDaemon::Report(report) => {
                self.report(&mut state, &report)?;
                return Ok(if state.flight.take_due() { Next::Pass } else { Next::Nothing });
            }
            ToDaemon::Digests(answer) => {
                state.totals.agent_cpu_ns = state.totals.agent_cpu_ns.max(answer.cpu_ns);
                drop(state);
                self.answers.put(answer);
            }
            ToDaemon::Retained { region, run } => self.retain(&mut state, region, run)?,
            ToDaemon::Detaching(waits) => state.detach.waits(waits),
            ToDaemon::DetachFailed { errno } => {
                state.detach.failed(errno);
                state.tracking = Tracking::Interrupted;
            }
            ToDaemon::Detached => state.link = Link::Detached,
            ToDaemon::Ready => {}
            ToDaemon::Hello { .. } | ToDaemon::SegmentHeld { .. } | ToDaemon::Mapped { .. } => {
                return Err(ProtocolError::IntroducedTwice);
            }
            ToDaemon::Pool(pool) => return self.add_pool(&mut state, pool, fds),
            ToDaemon::Recycled(recycled) => self.recycled(&mut state, &recycled)?,
            ToDaemon::Swept(sweep) => return self.swept(&mut state, &sweep),
        }
        Ok(Next::Nothing)
    }

    /// The region that a message names, if the pages lie in it.
    pub(super) fn checked(state: &mut State, id: RegionId, run: Run) -> Result<&mut Region, ProtocolError> {
        let region = state.regions.get_mut(&id).ok_or(ProtocolError::UnknownRegion(id))?;
        if !run.is_bounded() || run.end().0 > region.pages {
            return Err(ProtocolError::OutsideRegion { region: id, run, pages: region.pages });
        }
        Ok(region)
    }

    fn shrink(&self, state: &mut State, id: RegionId, run: Run) -> Result<(), ProtocolError> {
        self.discard(state, id, run)?;
        let region = Self::checked(state, id, run)?;
        region.managed = region.managed.saturating_sub(run.len);
        if region.managed == 0 && region.counts().pending == 0 {
            state.regions.remove(&id);
        }
        Ok(())
    }

    /// Pages leave management, and may map their frames for as long as the process lives.
    fn retain(&self, state: &mut State, id: RegionId, run: Run) -> Result<(), ProtocolError> {
        let region = Self::checked(state, id, run)?;
        for page in run.pages() {
            if let Entry::Merged(frame) = region.entry(page) {
                self.domain.store.pin(frame);
            }
        }
        state.detach.retained(run.len);
        self.shrink(state, id, run)
    }

    fn discard(&self, state: &mut State, id: RegionId, run: Run) -> Result<(), ProtocolError> {
        let region = Self::checked(state, id, run)?;
        region.forget_ages(run);
        for page in run.pages() {
            let entry = region.entry(page);
            // A pending page is settled by its batch's report, which is on its way.
            if entry != Entry::Fresh && entry != Entry::Pending {
                region.set(page, Entry::Fresh);
                self.drop_entry(id, page, entry);
            }
        }
        state.overtake(id, run);
        Ok(())
    }
}

/// Enters a region that an agent announced.
pub(crate) fn add_region(
    regions: &mut BTreeMap<RegionId, Region>,
    id: RegionId,
    start: u64,
    len: u64,
) -> Result<(), ProtocolError> {
    if id.0 >= MAX_REGIONS {
        return Err(ProtocolError::TooManyRegions(id));
    }
    let pages = u32::try_from(len / PAGE_SIZE as u64).map_err(|_| ProtocolError::RegionTooLarge)?;
    if regions.contains_key(&id) {
        return Err(ProtocolError::RegionTwice(id));
    }
    regions.insert(id, Region::new(start, pages)?);
    Ok(())
}

#[cfg(test)]
mod tests {
    use wire::PageNo;

    use super::*;
    use crate::client::scanning::tests::client;
    use crate::content::store::Cursor;

    #[test]
    fn frames_of_pages_that_leave_in_place_are_kept_for_good() {
        let (client, _agent) = client();
        let id = RegionId(1);
        let frames: Vec<_> = {
            let mut cursor = Cursor::new(&client.domain.store, None);
            (1..=3).map(|byte| cursor.put(&[byte; PAGE_SIZE], 1).unwrap()).collect()
        };
        let mut region = Region::new(1 << 30, 8).unwrap();
        for (&frame, page) in frames.iter().zip(0..) {
            region.set(PageNo(page), Entry::Merged(frame));
        }
        client.state().regions.insert(id, region);
        client.apply(ToDaemon::Retained { region: id, run: Run::new(PageNo(0), 2) }, Vec::new()).unwrap();
        client.apply(ToDaemon::RegionShrunk { region: id, run: Run::new(PageNo(2), 1) }, Vec::new()).unwrap();
        let usage = client.domain.store.usage();
        assert_eq!((usage.frames, usage.pinned), (0, 2), "the program may read two of them for ever");
        let state = client.state();
        assert_eq!((state.detach.pages_retained(), state.regions[&id].managed), (2, 5));
        drop(state);
        assert!(client.apply(ToDaemon::Retained { region: id, run: Run::new(PageNo(7), 2) }, Vec::new()).is_err());
    }
}
