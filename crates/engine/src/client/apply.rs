//! Applying what an agent says: the one place where its messages are told apart.

use std::collections::{BTreeMap, VecDeque};
use std::os::fd::OwnedFd;
use std::sync::Arc;

use kmem::PAGE_SIZE;
use wire::recycle::Recycled;
use wire::{PageNo, RegionId, Run, ToDaemon};

use super::link::{Link, Tracking};
use super::{Client, ProtocolError, State};
use crate::config::bounds::SLICE;
use crate::core::content::index::MAX_REGIONS;
use crate::core::ledger::{Entry, Region};
use crate::users::{Kind, User, log_of};

/// What a message of an agent leads to.
pub(crate) enum Next {
    Nothing,
    /// The message is applied in part: [`Client::go_on`] before the next one.
    Rest,
    /// The client needs another merge pass.
    Pass,
    /// It is time to look whether a sweep is due.
    Reclaim,
    /// QEMU's monitor has come: ask it for the RAM and the device; then as [`Next::Reclaim`].
    AskMonitor,
}

/// What a message says of pages.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum What {
    Discarded,
    Shrunk,
    /// They leave management, and may map their frames for as long as the process lives.
    Retained,
    Recycled,
    /// They were given back before the agent came to this daemon.
    Zeros,
}

/// The part of a message about pages that is not applied yet: it can name as many as a region has,
/// so it is applied in slices, and others are served between two of them.
pub(super) struct Rest {
    what: What,
    region: RegionId,
    runs: VecDeque<Run>,
}

impl Client {
    /// Applies one message and returns what it leads to. `Err` says what was wrong with it; the
    /// connection is then closed. Descriptors that it needs are taken out of `fds`.
    pub(crate) fn apply(&self, message: ToDaemon, fds: &mut Vec<OwnedFd>) -> Result<Next, ProtocolError> {
        let mut state = self.state();
        match message {
            ToDaemon::RegionAdded { region, start, len } => {
                add_region(&self.user, &mut state.regions, region, start, len)?;
            }
            ToDaemon::RegionShrunk { region, run } => return self.begin(&mut state, What::Shrunk, region, vec![run]),
            ToDaemon::Discarded { region, run } => return self.begin(&mut state, What::Discarded, region, vec![run]),
            ToDaemon::Report(report) => {
                self.report(&mut state, &report)?;
                return Ok(if state.flight.take_due() { Next::Pass } else { Next::Nothing });
            }
            ToDaemon::Digests(answer) => {
                let (said_ns, pages) = (answer.cpu_ns, answer.digests.len());
                if self.answers.put(answer) {
                    state.flight.credit.digests(pages);
                }
                state.flight.credit.charge(said_ns);
            }
            ToDaemon::Retained { region, run } => return self.begin(&mut state, What::Retained, region, vec![run]),
            ToDaemon::SegmentLeftOut { segment, most } => {
                if state.flight.leave_out(segment, most) {
                    let why = state.flight.why_left_out().unwrap_or_default();
                    log_of!(self.user, warn, pid = self.pid, "merged in part: {why}");
                }
            }
            ToDaemon::Detaching(waits) => state.detach.waits = Some(waits),
            ToDaemon::DetachFailed { errno } => {
                state.detach.errno = Some(errno);
                state.tracking = Tracking::Interrupted;
            }
            ToDaemon::Detached => state.link = Link::Detached,
            ToDaemon::Ready => {}
            ToDaemon::Hello { .. } | ToDaemon::SegmentHeld { .. } | ToDaemon::Mapped { .. } => {
                return Err(ProtocolError::IntroducedTwice);
            }
            ToDaemon::Pool(pool) => return self.add_pool(&mut state, pool, fds),
            ToDaemon::Recycled(Recycled { region, runs }) => {
                return self.begin(&mut state, What::Recycled, region, runs);
            }
            ToDaemon::PoolRenewed { descriptor } => return self.renew_pool(&mut state, descriptor, fds),
            ToDaemon::Swept(sweep) => return self.swept(&mut state, &sweep),
            ToDaemon::CpuTime { cpu_ns } => {
                state.flight.credit.charge(cpu_ns);
            }
            ToDaemon::Zeros(Recycled { region, runs }) => return self.begin(&mut state, What::Zeros, region, runs),
            ToDaemon::Library { version } => state.library = Some(version.chars().take(64).collect()),
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

    /// Begins to apply a message about pages, and applies the first slice.
    fn begin(&self, state: &mut State, what: What, id: RegionId, runs: Vec<Run>) -> Result<Next, ProtocolError> {
        for &run in &runs {
            Self::checked(state, id, run)?;
        }
        state.rest = Some(Rest { what, region: id, runs: runs.into() });
        self.apply_slice(state)
    }

    /// Applies another slice of a message. [`Next::Rest`]: more of it is left.
    pub(crate) fn go_on(&self) -> Result<Next, ProtocolError> {
        self.apply_slice(&mut self.state())
    }

    fn apply_slice(&self, state: &mut State) -> Result<Next, ProtocolError> {
        let Some(Rest { what, region: id, mut runs }) = state.rest.take() else { return Ok(Next::Nothing) };
        let mut left = SLICE;
        while let Some(run) = runs.pop_front() {
            if left == 0 {
                runs.push_front(run);
                break;
            }
            let now = Run::new(run.page, run.len.min(left));
            if now.len < run.len {
                runs.push_front(Run::between(now.end(), run.end()));
            }
            // A run of no pages takes time, too.
            left = left.saturating_sub(now.len.max(1));
            self.apply_run(state, what, id, now)?;
        }
        if !runs.is_empty() {
            state.rest = Some(Rest { what, region: id, runs });
            return Ok(Next::Rest);
        }
        if what == What::Shrunk || what == What::Retained {
            state.drop_unmanaged(id);
        }
        Ok(Next::Nothing)
    }

    /// These pages hold nothing that the ledger knows any more.
    fn apply_run(&self, state: &mut State, what: What, id: RegionId, run: Run) -> Result<(), ProtocolError> {
        let unseen = state.totals.peak.saturating_sub(state.totals.unseen);
        let mut most = unseen;
        let region = Self::checked(state, id, run)?;
        if what == What::Recycled {
            region.recycle(run, &mut most, |page, entry| self.drop_entry(id, page, entry));
        } else if what == What::Zeros {
            region.count_zeros(run, &mut most);
        } else {
            region.forget_ages(run);
            let known: Vec<PageNo> = region.known(run).collect();
            for page in known {
                let entry = region.entry(page);
                if let (What::Retained, Entry::Merged(frame)) = (what, entry) {
                    self.domain.store.pin(frame);
                }
                // A pending page is settled by its batch's report, which is on its way.
                if entry != Entry::Fresh && entry != Entry::Pending {
                    region.set(page, Entry::Fresh);
                    self.drop_entry(id, page, entry);
                }
            }
        }
        match what {
            What::Discarded => {
                region.emptied.add(run);
                state.totals.discarded += u64::from(run.len);
            }
            What::Recycled | What::Zeros => {
                region.emptied.add(run);
                state.totals.unseen += unseen - most;
            }
            What::Shrunk => region.shrink(run)?,
            What::Retained => {
                region.shrink(run)?;
                state.detach.retained += u64::from(run.len);
            }
        }
        // A page on its way from one frame to another does not map the first any more, unless it is
        // retained: then it has not been moved, and will not be.
        for frame in state.flight.take_origins(id, run) {
            if what == What::Retained {
                self.domain.store.pin(frame);
            }
            self.release(frame);
        }
        state.overtake(id, run);
        Ok(())
    }
}

impl State {
    /// Drops a region if nothing of it is managed, nor under way.
    pub(super) fn drop_unmanaged(&mut self, id: RegionId) {
        if self.regions.get(&id).is_some_and(|region| region.managed == 0 && region.counts().pending == 0) {
            self.regions.remove(&id);
        }
    }
}

/// Enters a region that an agent announced. It counts for the user.
pub(crate) fn add_region(
    user: &Arc<User>,
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
    let claim = user.claim(Kind::Pages, pages.into())?;
    regions.insert(id, Region::new(start, pages)?.counted(claim));
    Ok(())
}

#[cfg(test)]
mod tests;
