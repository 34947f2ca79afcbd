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
        let region = Self::checked(state, id, run)?;
        if what == What::Recycled {
            region.recycle(run, |page, entry| self.drop_entry(id, page, entry));
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
            What::Recycled => region.emptied.add(run),
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
mod tests {
    use std::time::{Duration, Instant};

    use rustix::fs::SealFlags;
    use wire::recycle::{Extent, Pool, Sweep};
    use wire::{Outcome, Report, RunOutcome};

    use super::*;
    use crate::client::scanning::tests::client;
    use crate::core::ledger::free_pages::tests::pool;
    use crate::store::Cursor;

    const ID: RegionId = RegionId(1);

    fn announce(client: &Client, pages: u64) -> Result<Next, ProtocolError> {
        client
            .apply(ToDaemon::RegionAdded { region: ID, start: 1 << 30, len: pages * PAGE_SIZE as u64 }, &mut Vec::new())
    }

    /// Applies a message to its end. Returns the slices, and the time that the longest took.
    fn apply(client: &Client, message: ToDaemon) -> (u32, Duration) {
        let (mut slices, mut longest) = (1, Duration::ZERO);
        let mut begin = Instant::now();
        let mut next = client.apply(message, &mut Vec::new());
        loop {
            longest = longest.max(begin.elapsed());
            match next {
                Ok(Next::Rest) => slices += 1,
                Ok(_) => return (slices, longest),
                Err(why) => panic!("{why}"),
            }
            begin = Instant::now();
            next = client.go_on();
        }
    }

    #[test]
    fn a_message_about_many_pages_is_applied_in_slices() {
        let (client, _agent) = client();
        assert!(announce(&client, 1 << 22).is_ok());
        for page in 0..5000 {
            client.state().regions.get_mut(&ID).unwrap().set(PageNo(page), Entry::Zero);
        }
        let all = Run::new(PageNo(0), 1 << 22);
        let (slices, longest) = apply(&client, ToDaemon::Discarded { region: ID, run: all });
        assert_eq!(slices, (1 << 22) / SLICE);
        assert_eq!(client.state().totals.discarded, 1 << 22);
        assert!(longest < Duration::from_millis(100), "{longest:?} for one slice");
        assert_eq!(client.state().regions[&ID].counts().zero, 0);
        let runs = vec![all; 3];
        let (slices, _) = apply(&client, ToDaemon::Recycled(Recycled { region: ID, runs }));
        assert_eq!(slices, 3 * (1 << 22) / SLICE);
        assert_eq!(client.state().regions[&ID].counts().recycled, 1 << 22);
        apply(&client, ToDaemon::RegionShrunk { region: ID, run: all });
        assert!(client.state().regions.is_empty(), "nothing of it is managed");
    }

    #[test]
    fn a_region_that_is_shrunk_twice_on_one_half_keeps_the_other() {
        let (client, _agent) = client();
        assert!(announce(&client, 8).is_ok());
        client.state().regions.get_mut(&ID).unwrap().set(PageNo(6), Entry::Zero);
        let half = ToDaemon::RegionShrunk { region: ID, run: Run::new(PageNo(0), 4) };
        apply(&client, half.clone());
        apply(&client, half);
        assert_eq!(client.state().regions[&ID].managed, 4);
        assert_eq!(client.state().regions[&ID].counts().zero, 1, "what it holds is still known");
        apply(&client, ToDaemon::RegionShrunk { region: ID, run: Run::new(PageNo(3), 5) });
        assert!(client.state().regions.is_empty());
    }

    #[test]
    fn what_a_client_announces_counts_for_its_user_until_it_is_dropped() {
        let user = Arc::new(User::new(7, 100, 1));
        let mut regions = BTreeMap::new();
        let mut add = |id, pages: u64| add_region(&user, &mut regions, RegionId(id), 4096, pages * PAGE_SIZE as u64);
        assert!(add(1, 60).is_ok());
        let over = add(2, 60).unwrap_err().to_string();
        assert!(over.contains("uid 7") && over.contains("user_memory"), "{over}");
        assert!(add(3, 1 << 32).is_err(), "16 TiB");
        assert!(add(4, 40).is_ok());
        regions.clear();
        assert_eq!(user.taken(Kind::Pages), 0);
    }

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
        apply(&client, ToDaemon::Retained { region: id, run: Run::new(PageNo(0), 2) });
        apply(&client, ToDaemon::RegionShrunk { region: id, run: Run::new(PageNo(2), 1) });
        let usage = client.domain.store.usage();
        assert_eq!((usage.frames, usage.pinned), (0, 2), "the program may read two of them for ever");
        let state = client.state();
        assert_eq!((state.detach.retained, state.regions[&id].managed), (2, 5));
        drop(state);
        assert!(client.apply(ToDaemon::Retained { region: id, run: Run::new(PageNo(7), 2) }, &mut Vec::new()).is_err());
    }

    #[test]
    fn what_the_protocol_does_not_allow_is_named() {
        let (pool, _map) = pool(SealFlags::SHRINK | SealFlags::GROW);
        let hello = ToDaemon::Hello { version: wire::VERSION, domain: None, name: "a".into(), forks: 0 };
        let region = |id, pages: u64| ToDaemon::RegionAdded {
            region: RegionId(id),
            start: 1 << 30,
            len: pages * PAGE_SIZE as u64,
        };
        let discarded = |id, len| ToDaemon::Discarded { region: RegionId(id), run: Run::new(PageNo(0), len) };
        let report = |batch, len| {
            let outcomes = vec![RunOutcome { run: Run::new(PageNo(0), len), outcome: Outcome::Gone }];
            ToDaemon::Report(Report { batch, last: true, outcomes, cpu_ns: 0, window_ns: 0, maps: 0 })
        };
        let announced = |len: Option<u32>| {
            let extent = |len| Extent { frame: 256, region: ID, run: Run::new(PageNo(0), len) };
            ToDaemon::Pool(Pool { extents: len.map(extent).into_iter().collect(), period_ms: 0 })
        };
        // A client with a region of eight pages says this; descriptors come with each message.
        let cases = [
            (vec![hello], 0, "it introduced itself twice"),
            (vec![discarded(2, 1)], 0, "it spoke of region 2, which it never announced"),
            (vec![discarded(1, 9)], 0, "it spoke of pages 0+9 of region 1, which has 8"),
            (vec![region(MAX_REGIONS, 1)], 0, "it announced region 4096; there can be 4096"),
            (vec![region(2, 1 << 32)], 0, "it announced a region of over 16 TiB"),
            (vec![region(1, 1)], 0, "it announced region 1 twice"),
            (vec![report(1, wire::MAX_BATCH_PAGES + 1)], 0, "names more pages than a batch can have"),
            (vec![report(7, 1)], 0, "it reported on batch 7, which is not under way"),
            (vec![announced(Some(8))], 0, "a pool came without its descriptor"),
            (vec![announced(Some(8)), announced(Some(8))], 1, "it announced a pool twice"),
            (vec![announced(None)], 1, "a pool came without extents and without QMP"),
            (vec![announced(Some(9))], 1, "its guest's RAM leaves region 1"),
            (vec![ToDaemon::Swept(Sweep::default())], 0, "it swept without a pool"),
            (vec![ToDaemon::PoolRenewed { descriptor: 3 }], 1, "it renewed a pool without one"),
        ];
        for (messages, descriptors, expected) in cases {
            let (client, _agent) = client();
            assert!(announce(&client, 8).is_ok());
            let mut why = String::new();
            for message in messages {
                assert_eq!(why, "", "{expected}: only the last breaks a rule");
                let mut fds = (0..descriptors).map(|_| pool.try_clone().unwrap()).collect();
                why = client.apply(message, &mut fds).err().map_or_else(String::new, |why| why.to_string());
            }
            assert!(why.contains(expected), "{expected}: {why}");
        }
    }
}
