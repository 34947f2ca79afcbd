//! A client as the daemon knows it: its regions' ledgers, the batches under way, and what its agent
//! reports.

pub(crate) mod batch;
pub(crate) mod changes;
pub(crate) mod digests;
mod protocol;
pub(crate) mod recycling;
pub(crate) mod requests;
pub(crate) mod scanning;
pub(crate) mod watch;

use std::collections::{BTreeMap, HashMap, HashSet};
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering::*};

use kmem::PAGE_SIZE;
use kmem::memfd::SharedMap;
use kmem::pagemap::Pagemap;
use kmem::pidfd::PidFd;
use kmem::seqpacket::Conn;
use parking_lot::{Condvar, Mutex, MutexGuard};
use wire::{Merge, MergeRun, Outcome, PageNo, RegionId, Report, Run, SegmentId, ToAgent, ToDaemon};

use crate::client::batch::{Batch, PlannedRun, Target};
use crate::client::digests::Answers;
pub(crate) use crate::client::protocol::ProtocolError;
use crate::client::recycling::Recycling;
use crate::client::requests::Requests;
use crate::client::watch::Watch;
use crate::content::domain::Domain;
use crate::content::frame::Frame;
use crate::content::index::{ClientId, MAX_REGIONS, Place, Sighting};
use crate::ledger::{Entry, Region};
use wire::HugePages;

/// Pages under way with one agent before a turn ends.
const IN_FLIGHT: u32 = 3072;

/// Pages that were put off are tried again every so many scans.
const RETRY_SCANS: u64 = 16;

/// Sums over a client's life.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Totals {
    pub(crate) full_scans: u64,
    pub(crate) merged: u64,
    pub(crate) zeroed: u64,
    pub(crate) differed: u64,
    pub(crate) copied: u64,
    pub(crate) agent_cpu_ns: u64,
    pub(crate) window_max_ns: u64,
}

/// The changing half of a client.
pub(crate) struct State {
    pub(crate) connected: bool,
    pub(crate) detached: bool,
    pub(crate) regions: BTreeMap<RegionId, Region>,
    batches: HashMap<u64, Batch>,
    next_batch: u64,
    /// Pages in batches under way.
    pub(crate) outstanding: u32,
    sent: HashSet<SegmentId>,
    /// Why nothing of this client is merged at present.
    pub(crate) refused: Option<String>,
    /// Why its memory could not be read the last time.
    pub(crate) failed: Option<String>,
    /// A scan now would take too great a part of the time.
    pub(crate) next_scan: std::time::Instant,
    /// A prediction was wrong, so there are candidates that no pass has been asked for.
    pub(crate) mispredicted: bool,
    /// A turn ended because the agent had enough to do; another is due when it has done half.
    pub(crate) full: bool,
    /// Clients that got merge requests from a pass of this one that is not over.
    pub(crate) to_notify: HashSet<ClientId>,
    /// When the agent last reported, or was given something to do after it had been idle.
    pub(crate) reported: std::time::Instant,
    /// When copies last had a turn of rest.
    pub(crate) rested: std::time::Instant,
    /// Its agent did not answer in time.
    pub(crate) stalled: bool,
    /// Somebody holds it: no scan, no merge; see `hold`.
    pub(crate) held: bool,
    /// What it has changed since a checkpoint.
    pub(crate) since: Option<crate::client::changes::Log>,
    /// A scan that is under way, without the lock.
    scanning: Option<scanning::Scanning>,
    /// It was held, so written pages may have gone unseen.
    pub(crate) unsure: bool,
    /// Runs shorter than this are left out: the budget of mappings is short.
    pub(crate) min_run: u32,
    /// Whether the budget of mappings has bound since `min_run` was last thought over.
    pub(crate) maps_bound: bool,
    /// The scan at which something was last left out for want of mappings.
    pub(crate) left_out: Option<u64>,
    pub(crate) maps: u32,
    pub(crate) first_maps: u32,
    pub(crate) totals: Totals,
    /// Somebody wants to know what it writes.
    pub(crate) watch: Option<Watch>,
    /// Its guest marks free pages.
    pub(crate) recycling: Option<Recycling>,
}

impl State {
    /// Whether, of late, pages were left out because the budget of mappings is short.
    pub(crate) fn is_short_of_maps(&self) -> bool {
        self.left_out.is_some_and(|scan| scan + 2 * RETRY_SCANS >= self.totals.full_scans)
    }

    /// After every [`RETRY_SCANS`]th scan: what was put off becomes a candidate again.
    pub(crate) fn retry_deferred(&mut self) {
        if self.totals.full_scans.is_multiple_of(RETRY_SCANS) {
            self.min_run = if self.maps_bound { self.min_run } else { 1 };
            self.maps_bound = false;
            self.regions.values_mut().for_each(Region::retry_deferred);
        }
    }
}

/// Who a client is and how it is reached; this does not change.
pub(crate) struct Identity {
    pub(crate) number: ClientId,
    pub(crate) pid: i32,
    pub(crate) uid: u32,
    pub(crate) name: String,
    pub(crate) domain: Arc<Domain>,
    pub(crate) conn: Conn,
    pub(crate) pidfd: PidFd,
    pub(crate) control: SharedMap,
    /// Forks with regions that its children inherited, before it was a client of this daemon.
    pub(crate) forks_before: u64,
    pub(crate) pagemap: Pagemap,
    pub(crate) huge_pages: HugePages,
    pub(crate) huge_page_share: f64,
    /// Reclaim period in seconds, unless its agent names another.
    pub(crate) reclaim_period: f64,
}

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

/// One client.
pub(crate) struct Client {
    identity: Identity,
    state: Mutex<State>,
    /// [`State::scanning`] became `None`.
    scan_ended: Condvar,
    pub(crate) requests: Requests,
    /// What its agent says of its pages.
    pub(crate) answers: Answers,
    /// Turns asked of the workers; see [`crate::world::queue::Queue`].
    turns: AtomicU32,
}

impl crate::world::queue::TakesTurns for Client {
    fn turns(&self) -> &AtomicU32 {
        &self.turns
    }
}

impl std::ops::Deref for Client {
    type Target = Identity;
    fn deref(&self) -> &Identity {
        &self.identity
    }
}

impl Client {
    /// `held`: segments whose descriptors its agent has.
    pub(crate) fn new(identity: Identity, held: HashSet<SegmentId>) -> Self {
        let maps = kmem::procfs::count_maps(Some(identity.pid)).unwrap_or(0) as u32;
        let state = State {
            connected: true,
            detached: false,
            regions: BTreeMap::new(),
            batches: HashMap::new(),
            next_batch: 1,
            outstanding: 0,
            sent: held,
            refused: None,
            failed: None,
            next_scan: std::time::Instant::now(),
            mispredicted: false,
            full: false,
            to_notify: HashSet::new(),
            reported: std::time::Instant::now(),
            rested: std::time::Instant::now(),
            stalled: false,
            held: false,
            since: None,
            scanning: None,
            unsure: false,
            min_run: 1,
            maps_bound: false,
            left_out: None,
            maps,
            first_maps: maps,
            totals: Totals::default(),
            watch: None,
            recycling: None,
        };
        Self {
            identity,
            state: Mutex::new(state),
            scan_ended: Condvar::new(),
            requests: Requests::default(),
            answers: Answers::default(),
            turns: AtomicU32::new(0),
        }
    }

    pub(crate) fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock()
    }

    /// Whether the process has ever forked with regions that its children inherit. Frames that it
    /// leaves from then on may be mapped by a child.
    fn forked(&self) -> bool {
        self.forks_before > 0 || self.control.atomic_u64(wire::control::FORKS).load(Acquire) > 0
    }

    /// Whether its agent may have pages taken away just now.
    pub(crate) fn is_in_window(&self) -> bool {
        self.control.atomic_u64(wire::control::WINDOW).load(Acquire) > 0
    }

    /// One page leaves its frame.
    pub(crate) fn release(&self, frame: Frame) {
        self.domain.release(frame, self.forked());
    }

    fn sighting(&self, region: RegionId, page: PageNo) -> Sighting {
        Sighting { client: self.number, region, page }
    }

    /// Whatever the ledger says of a page ends here: its frame loses a user, the index forgets it.
    pub(crate) fn drop_entry(&self, region: RegionId, page: PageNo, entry: Entry) {
        match entry {
            Entry::Merged(frame) => self.release(frame),
            Entry::Unshared(handle) => {
                self.domain.index.forget(handle, Place::Sighted(self.sighting(region, page)));
            }
            Entry::Fresh | Entry::Zero | Entry::Pending | Entry::Recycled => {}
        }
    }

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
                let room = state.full && state.outstanding <= IN_FLIGHT / 2;
                if room || state.outstanding == 0 {
                    state.full = false;
                    let pass = room | std::mem::take(&mut state.mispredicted);
                    return Ok(if pass { Next::Pass } else { Next::Nothing });
                }
            }
            ToDaemon::Digests(answer) => {
                state.totals.agent_cpu_ns = state.totals.agent_cpu_ns.max(answer.cpu_ns);
                drop(state);
                self.answers.put(answer);
            }
            ToDaemon::Detached => state.detached = true,
            ToDaemon::Ready => {}
            ToDaemon::Hello { .. } | ToDaemon::SegmentHeld { .. } => return Err(ProtocolError::IntroducedTwice),
            ToDaemon::Pool(pool) => return self.add_pool(&mut state, pool, fds),
            ToDaemon::Recycled(recycled) => self.recycled(&mut state, &recycled)?,
            ToDaemon::Swept(sweep) => return self.swept(&mut state, &sweep),
        }
        Ok(Next::Nothing)
    }

    pub(crate) fn checked(state: &mut State, id: RegionId, run: Run) -> Result<&mut Region, ProtocolError> {
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

    fn report(&self, state: &mut State, report: &Report) -> Result<(), ProtocolError> {
        state.stalled = false;
        state.reported = std::time::Instant::now();
        state.maps = report.maps;
        state.totals.agent_cpu_ns = state.totals.agent_cpu_ns.max(report.cpu_ns);
        state.totals.window_max_ns = state.totals.window_max_ns.max(report.window_ns);
        if report.outcomes.iter().map(|outcome| u64::from(outcome.run.len)).sum::<u64>()
            > u64::from(wire::MAX_BATCH_PAGES)
        {
            return Err(ProtocolError::ReportTooLong(report.batch));
        }
        let Some(mut batch) = state.batches.remove(&report.batch) else {
            return Err(ProtocolError::UnknownBatch(report.batch));
        };
        for outcome in &report.outcomes {
            for page in outcome.run.pages() {
                self.settle(state, &mut batch, page, outcome.outcome);
            }
        }
        let id = batch.region;
        if report.last {
            self.settle_rest(state, batch);
        } else {
            state.batches.insert(report.batch, batch);
        }
        if let Some(region) = state.regions.get(&id)
            && region.managed == 0
            && region.counts().pending == 0
        {
            state.regions.remove(&id);
        }
        Ok(())
    }

    /// Whatever of a batch was not settled was not done.
    fn settle_rest(&self, state: &mut State, mut batch: Batch) {
        for page in batch.left() {
            self.settle(state, &mut batch, page, Outcome::Gone);
        }
    }

    /// A page of a batch has met its outcome, unless it had met one before.
    fn settle(&self, state: &mut State, batch: &mut Batch, page: PageNo, outcome: Outcome) {
        let Some(target) = batch.settle(page) else { return };
        let Some(region) = state.regions.get_mut(&batch.region) else { return };
        debug_assert_eq!(region.entry(page), Entry::Pending, "page {page}");
        state.outstanding = state.outstanding.saturating_sub(1);
        if region.settle_prediction(page, outcome == Outcome::Differs) {
            state.mispredicted = true;
            region.set(page, Entry::Fresh);
            if let Target::Frame(frame) = target {
                self.release(frame);
            }
            return;
        }
        if outcome == Outcome::Merged {
            match target {
                Target::Frame(frame) => {
                    state.totals.merged += 1;
                    region.set(page, Entry::Merged(frame));
                }
                Target::Zero => {
                    state.totals.zeroed += 1;
                    region.set(page, Entry::Zero);
                }
            }
            return;
        }
        region.set(page, Entry::Fresh);
        match outcome {
            Outcome::Differs => {
                state.totals.differed += 1;
                region.restart(page);
            }
            Outcome::NoMaps => {
                region.defer(page);
                state.left_out = Some(state.totals.full_scans);
                if !state.maps_bound {
                    state.maps_bound = true;
                    state.min_run = (state.min_run * 2).clamp(4, 512);
                }
            }
            Outcome::Pinned => state.refused = Some(pinned_reason(self.pid)),
            Outcome::Locked => state.refused = Some(pinned_reason(self.pid)),
            Outcome::Gone | Outcome::Failed | Outcome::Merged => {}
        }
        if matches!(outcome, Outcome::Pinned | Outcome::Locked | Outcome::Failed | Outcome::Gone) {
            region.restart(page);
        }
        if let Target::Frame(frame) = target {
            self.release(frame);
        }
    }

    /// Nothing came of these runs: their frames lose the user that was counted ahead. `later`: try
    /// again some time.
    pub(crate) fn undo(&self, state: &mut State, id: RegionId, runs: &[PlannedRun], later: bool) {
        if later && !runs.is_empty() {
            state.left_out = Some(state.totals.full_scans);
        }
        for PlannedRun { run, target } in runs {
            for page in run.pages() {
                if let Some(region) = state.regions.get_mut(&id) {
                    if later { region.defer(page) } else { region.restart(page) }
                }
            }
            if let Target::Frame(first) = *target {
                // No child can map what was never mapped.
                (0..run.len).for_each(|i| self.domain.release(Frame(first.0 + i), false));
            }
        }
    }

    /// Records a batch and sends it. The pages' entries become pending; their frames' users were
    /// counted by the caller. Runs with a page that was found written meanwhile are left out.
    /// `Err` gives the other runs back: nothing was sent.
    pub(crate) fn send_batch(
        &self,
        id: RegionId,
        runs: Vec<PlannedRun>,
    ) -> Result<(), (Vec<PlannedRun>, std::io::Error)> {
        let mut state = self.settled();
        let ready = state.connected && !state.held;
        let Some(region) = state.regions.get_mut(&id).filter(|_| ready) else {
            return Err((runs, std::io::ErrorKind::NotConnected.into()));
        };
        let (written, runs): (Vec<_>, Vec<_>) = runs.into_iter().partition(|run| region.is_written(run.run));
        self.undo(&mut state, id, &written, false);
        if runs.is_empty() {
            return Ok(());
        }
        let mut wire_runs = Vec::with_capacity(runs.len());
        for &PlannedRun { run, target } in &runs {
            let target = match target {
                Target::Zero => wire::Target::Zero,
                Target::Frame(frame) => match self.announce_segment(&mut state, frame) {
                    Ok(segment) => wire::Target::Frames { segment, slot: frame.slot() },
                    Err(e) => return Err((runs, e)),
                },
            };
            wire_runs.push(MergeRun { run, target });
        }
        let batch = state.next_batch;
        let message = wire::encode(&ToAgent::Merge(Merge { batch, region: id, runs: wire_runs, calm: true }));
        if let Err(e) = self.conn.send(&message, &[]) {
            return Err((runs, e));
        }
        state.next_batch += 1;
        let state = &mut *state;
        let Some(region) = state.regions.get_mut(&id) else { return Ok(()) };
        if let Some(since) = &mut state.since {
            since.batch(region.start, &runs);
        }
        let mut pages = 0;
        for PlannedRun { run, .. } in &runs {
            for page in run.pages() {
                let before = region.set(page, Entry::Pending);
                debug_assert!(
                    matches!(before, Entry::Fresh | Entry::Zero | Entry::Recycled),
                    "page {page} was {before:?}"
                );
            }
            pages += run.len;
        }
        if state.outstanding == 0 {
            state.reported = std::time::Instant::now();
        }
        state.outstanding += pages;
        state.batches.insert(batch, Batch::new(id, runs));
        Ok(())
    }

    fn announce_segment(&self, state: &mut State, frame: Frame) -> std::io::Result<SegmentId> {
        let segment = self.domain.store.segment(frame).ok_or(std::io::ErrorKind::NotFound)?;
        if !state.sent.contains(&segment.id) {
            self.conn.send(&wire::encode(&ToAgent::Segment { segment: segment.id }), &[segment.fd()])?;
            state.sent.insert(segment.id);
        }
        Ok(segment.id)
    }

    /// The store closed a segment.
    pub(crate) fn drop_segment(&self, segment: SegmentId) {
        if self.state().sent.remove(&segment) {
            // A full socket leaves the client with a descriptor more than it needs, until it reconnects.
            let _ = self.conn.send(&wire::encode(&ToAgent::DropSegment { segment }), &[]);
        }
    }

    /// Whether the agent has enough to do; then a turn is asked for when it has done half of it.
    pub(crate) fn is_full(&self) -> bool {
        let mut state = self.state();
        state.full |= state.outstanding > IN_FLIGHT;
        state.full
    }

    /// The connection is gone; the process may live. Its frames stay its own.
    pub(crate) fn disconnected(&self) {
        self.state().connected = false;
        self.answers.close();
    }

    /// The process is gone, or a newer connection has taken its place: gives back all that it held.
    pub(crate) fn bury(&self) {
        self.requests.close().iter().for_each(|request| self.release(request.frame));
        self.answers.close();
        let mut state = self.state();
        state.connected = false;
        let batches = std::mem::take(&mut state.batches);
        for batch in batches.into_values() {
            self.settle_rest(&mut state, batch);
        }
        let regions = std::mem::take(&mut state.regions);
        for (id, region) in &regions {
            for page in region.all().pages() {
                self.drop_entry(*id, page, region.entry(page));
            }
        }
    }
}

/// Why a client with pinned or locked memory is left alone.
pub(crate) fn pinned_reason(pid: i32) -> String {
    let (pin, lck) = kmem::procfs::status(Some(pid)).map_or((0, 0), |s| (s.vm_pin_kib, s.vm_lck_kib));
    let what =
        if pin > 0 || lck == 0 { format!("pinned (VmPin {pin} KiB)") } else { format!("locked (VmLck {lck} KiB)") };
    format!(
        "its memory is {what}: a device or a promise holds on to these frames, so nothing more is merged; start it without mlock, VFIO or registered buffers"
    )
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
