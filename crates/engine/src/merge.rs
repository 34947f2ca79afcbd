//! One turn of a client: scan, read what is due, look it up, plan, and send batches.
//!
//! A turn reads candidates in the order of their addresses, in chunks, and keeps the client's lock only to pick a chunk
//! and to record a batch; while the agent works on one batch the worker reads the next. Content that is known as a frame
//! is planned at once. Content that one other page has shown becomes a frame now, from the bytes in hand, and the other
//! page's client gets a *wish* to use it too, to be worked on in a turn of its own.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;

use kmem::PAGE_SIZE;
use kmem::procmem::ReadError;
use wire::{MAX_BATCH_PAGES, RegionId};

use crate::client::{Client, Goal, PlannedRun, Wish, pinned_reason};
use crate::index::{Place, Seen, Sighting};
use crate::ledger::{Entry, Region};
use crate::service::Shared;
use crate::store::{Cursor, Frame, GrowError};

/// Pages read at a time.
const CHUNK: usize = 128;
/// Pages in one batch: a few windows, so that the agent has work while the next is planned.
const BATCH: u32 = 1024;
const BATCH_RUNS: usize = 1024;
/// Pages under way with one agent before its worker waits.
const IN_FLIGHT: u32 = 4096;
/// How long an agent may take for anything before the daemon turns to others.
const PATIENCE: Duration = Duration::from_secs(2);
/// From so many neighbours of one content on, replicas are worth their memory.
const STRETCH: u32 = 16;
/// Pages that were put off are tried again every so many scans.
pub(crate) const RETRY_SCANS: u64 = 16;

/// A worker's buffers.
pub(crate) struct Scratch {
    bytes: Vec<u8>,
    pages: Vec<u32>,
    addresses: Vec<usize>,
}

impl Scratch {
    pub(crate) fn new() -> Self {
        Self { bytes: vec![0; CHUNK * PAGE_SIZE], pages: Vec::new(), addresses: Vec::new() }
    }
}

/// Why a turn ended early; all but `Fatal` are part of life.
enum Stop {
    /// The agent does not answer, or the client is gone.
    Client,
    /// The store is full for now.
    Store(GrowError),
    /// The client can't be read.
    Fatal(String),
}

/// One turn of `client`. `scan`: a merge period has passed, so look what was written first.
pub(crate) fn turn(shared: &Shared, client: &Arc<Client>, scratch: &mut Scratch, scan: bool) {
    if scan && !begin_period(shared, client) {
        return;
    }
    let cursor = Cursor::new(&client.domain.store);
    let mut turn = Turn { shared, client, cursor, asked: HashMap::new(), stretch: Stretch::default() };
    let result = turn.grant_wishes().and_then(|()| turn.read_candidates(scratch)).and_then(|()| turn.grant_wishes());
    let asked = std::mem::take(&mut turn.asked);
    drop(turn);
    for other in asked.into_values() {
        shared.queue.ask(&other, false);
    }
    match result {
        Ok(()) => {
            if client.domain.set_paused(None) {
                tracing::info!(domain = %client.domain.key, "the store can grow again; merging goes on");
            }
        }
        Err(Stop::Client) => {}
        Err(Stop::Store(e)) => {
            if client.domain.set_paused(Some(e.to_string())) {
                tracing::warn!(domain = %client.domain.key, "merging pauses: {e}");
            }
        }
        Err(Stop::Fatal(why)) => {
            let news = client.state().refused.replace(why.clone()).is_none();
            if news {
                tracing::warn!(pid = client.pid, "not merged: {why}");
            }
        }
    }
}

/// Refuses pinned memory, scans. `false`: nothing to do for this client now.
fn begin_period(shared: &Shared, client: &Client) -> bool {
    let status = kmem::procfs::status(Some(client.pid));
    let mut state = client.state();
    if !state.connected || state.detached || state.outstanding > 0 {
        return false;
    }
    match status {
        Ok(status) if status.vm_pin_kib > 0 || status.vm_lck_kib > 0 => {
            if state.refused.is_none() {
                let why = pinned_reason(client.pid);
                tracing::warn!(pid = client.pid, "not merged: {why}");
                state.refused = Some(why);
            }
            return false;
        }
        Ok(_) => state.refused = None,
        Err(_) => return false,
    }
    if let Err(e) = client.scan(&mut state) {
        tracing::warn!(pid = client.pid, "cannot scan its memory: {e}");
        return false;
    }
    if state.rested.elapsed().as_secs_f64() >= shared.config.direct_io_seconds {
        state.rested = std::time::Instant::now();
        state.regions.values_mut().for_each(Region::end_rest);
    }
    if state.totals.full_scans.is_multiple_of(RETRY_SCANS) {
        state.min_run = if state.maps_bound { state.min_run } else { 1 };
        state.maps_bound = false;
        state.regions.values_mut().for_each(Region::retry_deferred);
    }
    true
}

struct Turn<'a> {
    shared: &'a Shared,
    client: &'a Arc<Client>,
    cursor: Cursor<'a>,
    /// Clients that were asked for a page by a wish.
    asked: HashMap<u32, Arc<Client>>,
    stretch: Stretch,
}

/// Neighbouring pages with one content, up to the page looked up last.
#[derive(Default)]
struct Stretch {
    region: RegionId,
    page: u32,
    digest: u64,
    /// The frame that the last page uses.
    frame: Option<Frame>,
    len: u32,
}

impl Stretch {
    fn add(&mut self, region: RegionId, page: u32, digest: u64) {
        if (self.region, self.page + 1, self.digest) == (region, page, digest) {
            self.len += 1;
        } else {
            *self = Self { region, digest, frame: None, len: 1, page };
        }
        self.page = page;
    }
}

impl Turn<'_> {
    /// Reads every candidate once. Each client begins at another place of its regions: two that hold the same content in the same
    /// order would else be read side by side, be first by turns, and leave frames of both in a pattern without runs.
    fn read_candidates(&mut self, scratch: &mut Scratch) -> Result<(), Stop> {
        let regions: Vec<(RegionId, u32)> = self.client.state().regions.iter().map(|(&id, r)| (id, r.pages)).collect();
        // Multiples of the golden ratio lie far apart.
        let place = self.client.number.wrapping_mul(0x9e37_79b9);
        for (id, pages) in regions {
            let begin = ((u64::from(place) * u64::from(pages)) >> 32) as u32;
            self.read_range(id, begin..pages, scratch)?;
            self.read_range(id, 0..begin, scratch)?;
        }
        Ok(())
    }

    fn read_range(&mut self, id: RegionId, pages: std::ops::Range<u32>, scratch: &mut Scratch) -> Result<(), Stop> {
        let mut plan = Plan::default();
        let mut from = pages.start;
        while !self.shared.stopping() {
            let going_on = {
                let state = self.client.state();
                let Some(region) = state.regions.get(&id) else { break };
                region.candidates(from, CHUNK, &mut scratch.pages);
                scratch.pages.retain(|&page| page < pages.end);
                scratch.addresses.clear();
                scratch.addresses.extend(scratch.pages.iter().map(|&page| region.address(page)));
                state.connected && state.refused.is_none()
            };
            if !going_on {
                self.undo(id, &plan.runs, false);
                return Err(Stop::Client);
            }
            let Some(&last) = scratch.pages.last() else { break };
            from = last + 1;
            let result = self.read_chunk(id, scratch, &mut plan);
            if let Err(stop) = result {
                self.send(id, plan)?;
                return Err(stop);
            }
            if plan.pages >= BATCH || plan.runs.len() >= BATCH_RUNS {
                self.send(id, std::mem::take(&mut plan))?;
            }
        }
        self.send(id, plan)
    }

    fn read_chunk(&mut self, id: RegionId, scratch: &mut Scratch, plan: &mut Plan) -> Result<(), Stop> {
        let mut done = 0;
        while done < scratch.pages.len() {
            let read = match kmem::procmem::read_pages(self.client.pid, &scratch.addresses[done..], &mut scratch.bytes)
            {
                Ok(read) => read,
                Err(ReadError::Gone { .. }) => return Err(Stop::Client),
                Err(e @ ReadError::NoPermission { .. }) => return Err(Stop::Fatal(e.to_string())),
                Err(_) => 0,
            };
            let mut fates = Vec::with_capacity(read);
            for at in 0..read {
                let page = scratch.pages[done + at];
                let Some(bytes) = scratch.bytes[at * PAGE_SIZE..].first_chunk::<PAGE_SIZE>() else { break };
                match self.look_up(id, page, bytes) {
                    Ok(fate) => fates.push((page, fate)),
                    Err(e) => {
                        self.record(id, &fates, plan);
                        return Err(Stop::Store(e));
                    }
                }
            }
            self.record(id, &fates, plan);
            done += read;
            if done < scratch.pages.len() && read == 0 {
                // This page can't be read: it was unmapped just now. The next scan will tell.
                self.record(id, &[(scratch.pages[done], Found::Nothing)], plan);
                done += 1;
            }
        }
        Ok(())
    }

    /// What is to be done about a page with these bytes.
    fn look_up(&mut self, region: RegionId, page: u32, bytes: &[u8; PAGE_SIZE]) -> Result<Found, GrowError> {
        let domain = &self.client.domain;
        let digest = domain.digest(bytes);
        if digest == domain.zero_digest() {
            return Ok(Found::Goal(Goal::Zero));
        }
        self.stretch.add(region, page, digest);
        if self.stretch.len >= STRETCH
            && let Some(before) = self.stretch.frame
            && let Some(frame) = domain.next_replica(digest, before, bytes, &mut self.cursor)?
        {
            self.stretch.frame = Some(frame);
            return Ok(Found::Goal(Goal::Frame(frame)));
        }
        let found = self.find(region, page, digest, bytes)?;
        if let Found::Goal(Goal::Frame(frame)) = found {
            self.stretch.frame = Some(frame);
        }
        Ok(found)
    }

    fn find(&mut self, region: RegionId, page: u32, digest: u64, bytes: &[u8; PAGE_SIZE]) -> Result<Found, GrowError> {
        let domain = &self.client.domain;
        let here = Sighting { client: self.client.number, region, page };
        let handle = match domain.index.see(digest, Place::Sighted(here)) {
            Some(Seen::First(handle)) => return Ok(Found::First(handle)),
            Some(Seen::Known(handle)) => handle,
            None => return Ok(Found::Nothing),
        };
        // A second try settles the case that somebody promoted the sighting meanwhile.
        for _ in 0..2 {
            match domain.index.place(handle, digest) {
                Some(Place::Frame(frame)) if domain.store.try_ref(frame) => return Ok(Found::Goal(Goal::Frame(frame))),
                Some(Place::Sighted(there)) if there == here => return Ok(Found::First(handle)),
                Some(Place::Sighted(there)) => {
                    let frame = self.cursor.put(bytes, 2)?;
                    domain.store.set_handle(frame, handle);
                    if domain.index.promote(handle, there, frame) {
                        self.ask_for(there, handle, frame);
                        return Ok(Found::Goal(Goal::Frame(frame)));
                    }
                    domain.store.set_handle(frame, crate::store::NO_HANDLE);
                    self.cursor.undo(frame, 2);
                }
                _ => return Ok(Found::Nothing),
            }
        }
        Ok(Found::Nothing)
    }

    /// Asks the client of the first sighting to use the frame too.
    fn ask_for(&mut self, there: Sighting, handle: u32, frame: Frame) {
        let wish = Wish { region: there.region, page: there.page, handle, frame };
        let client = self.asked.get(&there.client).cloned().or_else(|| self.shared.client(there.client));
        let granted = client
            .as_ref()
            .is_some_and(|other| Arc::ptr_eq(&other.domain, &self.client.domain) && other.wish(wish).is_ok());
        match client {
            Some(other) if granted => drop(self.asked.insert(there.client, other)),
            _ => self.client.domain.release(frame, false),
        }
    }

    /// Enters what was found into the ledger and the plan.
    fn record(&self, id: RegionId, found: &[(u32, Found)], plan: &mut Plan) {
        let mut state = self.client.state();
        let min_run = state.min_run;
        let Some(region) = state.regions.get_mut(&id) else {
            drop(state);
            for &(page, found) in found {
                self.give_up(id, page, found);
            }
            return;
        };
        for &(page, found) in found {
            region.looked_at(page);
            match found {
                Found::First(handle) => {
                    region.set(page, Entry::Unshared(handle));
                }
                Found::Nothing => region.restart(page),
                Found::Goal(goal) => plan.push(page, goal),
            }
        }
        plan.min_run = min_run;
    }

    fn give_up(&self, region: RegionId, page: u32, found: Found) {
        match found {
            Found::First(handle) => {
                let here = Sighting { client: self.client.number, region, page };
                self.client.domain.index.forget(handle, Place::Sighted(here));
            }
            Found::Goal(Goal::Frame(frame)) => self.client.domain.release(frame, false),
            Found::Goal(Goal::Zero) | Found::Nothing => {}
        }
    }

    /// Plans the pages that other turns made frames of.
    fn grant_wishes(&mut self) -> Result<(), Stop> {
        let mut wishes = self.client.take_wishes();
        wishes.sort_unstable_by_key(|w| (w.region, w.page));
        let mut plans: Vec<(RegionId, Plan)> = Vec::new();
        {
            let mut state = self.client.state();
            let min_run = state.min_run;
            for wish in wishes {
                let region = state.regions.get_mut(&wish.region);
                // Written since, discarded, or sighted anew: the wish has come too late.
                let Some(region) = region.filter(|r| r.entry(wish.page) == Entry::Unshared(wish.handle)) else {
                    self.client.domain.release(wish.frame, false);
                    continue;
                };
                region.set(wish.page, Entry::Fresh);
                match plans.last_mut() {
                    Some((id, plan)) if *id == wish.region && plan.pages < BATCH && plan.runs.len() < BATCH_RUNS => {
                        plan.push(wish.page, Goal::Frame(wish.frame));
                    }
                    _ => {
                        let mut plan = Plan { min_run, ..Plan::default() };
                        plan.push(wish.page, Goal::Frame(wish.frame));
                        plans.push((wish.region, plan));
                    }
                }
            }
        }
        let mut result = Ok(());
        for (id, plan) in plans {
            match &result {
                Ok(()) => result = self.send(id, plan),
                Err(_) => self.undo(id, &plan.runs, false),
            }
        }
        result
    }

    /// Sends a plan as a batch, waiting for room. What can't be sent is undone.
    fn send(&self, id: RegionId, plan: Plan) -> Result<(), Stop> {
        let (runs, short) = plan.into_runs();
        self.undo(id, &short, true);
        if runs.is_empty() {
            return Ok(());
        }
        if !self.client.wait_settled(IN_FLIGHT - BATCH, PATIENCE) {
            self.undo(id, &runs, false);
            return Err(Stop::Client);
        }
        let mut runs = runs;
        let deadline = std::time::Instant::now() + PATIENCE;
        loop {
            match self.client.send_batch(id, runs) {
                Ok(()) => return Ok(()),
                Err((back, e))
                    if e.kind() == std::io::ErrorKind::WouldBlock && std::time::Instant::now() < deadline =>
                {
                    runs = back;
                    std::thread::sleep(Duration::from_millis(1));
                }
                Err((back, _)) => {
                    self.undo(id, &back, false);
                    return Err(Stop::Client);
                }
            }
        }
    }

    /// Nothing came of these runs: their frames lose the user that was counted ahead. `later`: try again some time.
    fn undo(&self, id: RegionId, runs: &[PlannedRun], later: bool) {
        let mut state = self.client.state();
        if later && !runs.is_empty() {
            state.left_out = Some(state.totals.full_scans);
        }
        for run in runs {
            for page in run.page..run.page + run.len {
                if let Some(region) = state.regions.get_mut(&id) {
                    if later { region.defer(page) } else { region.restart(page) }
                }
            }
            if let Goal::Frame(first) = run.goal {
                (0..run.len).for_each(|i| self.client.domain.release(Frame(first.0 + i), false));
            }
        }
    }
}

/// What a look-up says of a page.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Found {
    /// Nobody else has it: it is unshared, under this handle.
    First(u32),
    /// Merge it.
    Goal(Goal),
    /// Its content is on its way out; look again later.
    Nothing,
}

/// Pages of one region, ascending, gathered into runs.
#[derive(Default)]
struct Plan {
    runs: Vec<PlannedRun>,
    pages: u32,
    min_run: u32,
}

impl Plan {
    fn push(&mut self, page: u32, goal: Goal) {
        self.pages += 1;
        if let Some(run) = self.runs.last_mut()
            && run.page + run.len == page
            && run.len < MAX_BATCH_PAGES
        {
            let follows = match (run.goal, goal) {
                (Goal::Zero, Goal::Zero) => true,
                (Goal::Frame(first), Goal::Frame(next)) => next.0 == first.0 + run.len && next.slot() != 0,
                _ => false,
            };
            if follows {
                run.len += 1;
                return;
            }
        }
        self.runs.push(PlannedRun { page, len: 1, goal });
    }

    /// The runs to send, and those too short for a short budget of mappings. Zero pages cost no mapping.
    fn into_runs(self) -> (Vec<PlannedRun>, Vec<PlannedRun>) {
        let min_run = self.min_run;
        self.runs.into_iter().partition(|run| run.goal == Goal::Zero || run.len >= min_run)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn runs(pages: &[(u32, Goal)]) -> Vec<(u32, u32)> {
        let mut plan = Plan::default();
        pages.iter().for_each(|&(page, goal)| plan.push(page, goal));
        plan.runs.iter().map(|r| (r.page, r.len)).collect()
    }

    #[test]
    fn pages_join_a_run_when_they_and_their_frames_are_consecutive() {
        let f = |n| Goal::Frame(Frame(n));
        assert_eq!(runs(&[(1, f(7)), (2, f(8)), (3, f(9))]), [(1, 3)]);
        assert_eq!(runs(&[(1, f(7)), (3, f(8))]), [(1, 1), (3, 1)], "a gap in the pages");
        assert_eq!(runs(&[(1, f(7)), (2, f(9))]), [(1, 1), (2, 1)], "a gap in the frames");
        assert_eq!(runs(&[(1, Goal::Zero), (2, Goal::Zero), (3, f(9))]), [(1, 2), (3, 1)]);
        let end = wire::SEGMENT_PAGES - 1;
        assert_eq!(runs(&[(1, f(end)), (2, f(end + 1))]), [(1, 1), (2, 1)], "two segments");
    }

    #[test]
    fn a_short_budget_leaves_short_runs_out() {
        let mut plan = Plan { min_run: 2, ..Plan::default() };
        let f = |n| Goal::Frame(Frame(n));
        for (page, goal) in [(1, f(1)), (2, f(2)), (5, f(9)), (7, Goal::Zero)] {
            plan.push(page, goal);
        }
        let (sent, short) = plan.into_runs();
        assert_eq!(sent.iter().map(|r| r.page).collect::<Vec<_>>(), [1, 7]);
        assert_eq!(short.iter().map(|r| r.page).collect::<Vec<_>>(), [5]);
    }
}
