//! One turn of a client: scan, read what is due, look it up, plan, and send batches.
//!
//! A turn reads candidates in the order of their addresses, in chunks, and keeps the client's lock
//! only to pick a chunk and to record a batch; while the agent works on one batch the worker reads
//! the next. Content that is known as a frame is planned at once. Content that one other page has
//! shown becomes a frame now, from the bytes in hand, and the other page's client gets a *wish* to
//! use it too, to be worked on in a turn of its own.
//!
//! *Digests.* Where most of what was read of late had not been seen before, the agent is asked for
//! the digests of the next pages ([`crate::client::digests`]): nothing else is needed of a first sighting.
//! The bytes of a page are read when it becomes a frame after all.
//!
//! *Guesses.* Where page after page turned out to equal frame after frame, the next pages are
//! planned without being read: the agent compares every page in any case. A few pages behind the
//! guessed ones are read, and tell whether the run goes on; then the next guess is longer. A page
//! that was guessed wrong is read next.

use std::collections::{BTreeMap, HashSet, VecDeque};
use std::sync::Arc;
use std::time::Duration;

use rustix::io::Errno;
use wire::{PageNo, RegionId, Run};

use crate::client::batch::{PlannedRun, Target};
use crate::client::{Client, Wish, pinned_reason};
use crate::content::index::{ClientId, Place, Seen, Sighting};
use crate::content::store::{Cursor, GrowError};
use crate::ledger::{Entry, Region};
use crate::merge::plan::{Plan, Row, Stretch};
use crate::world::shared::Shared;

mod read;

pub(crate) use read::Scratch;
use read::{Ahead, Source};

/// Scanning all clients may take one part in so many of a CPU's time: many mappings make it slow,
/// and agents that map, with the program's page faults behind them, wait for it. The first scans,
/// in which every page is new, do not count.
const SCAN_SHARE: u32 = 40;
const FIRST_SCANS: u64 = 3;
/// One page in so many is much that was written at once.
const MUCH: u64 = 16;
/// Pages in one batch: a few windows, so that the agent has work while the next is planned.
const BATCH: u32 = 1024;
const BATCH_RUNS: usize = 1024;
/// How long an agent may take for anything before the daemon turns to others.
const PATIENCE: Duration = Duration::from_secs(2);
/// From so many neighbours of one content on, replicas are worth their memory.
const STRETCH: u32 = 16;

/// Why a turn ended early; all but `Fatal` are part of life.
enum Stop {
    /// The agent does not answer, or the client is gone.
    Client,
    /// The agent has enough to do.
    Full,
    /// The store is full for now.
    Store(GrowError),
    /// The client can't be read.
    Fatal(String),
}

/// One turn of `client`. `scan`: a merge period has passed, so look what was written first.
pub(crate) fn turn(shared: &Shared, client: &Arc<Client>, scratch: &mut Scratch, scan: bool) {
    if scan {
        // All are scanned before any is read: only then is it known how much there is to be read in the
        // time.
        if begin_period(shared, client) {
            shared.queue.ask(client, false);
        }
        return;
    }
    let mut turn = Turn::new(shared, client);
    turn.asked = std::mem::take(&mut client.state().asked);
    // Wishes come last, and others are told of theirs when all is read, or a row is long: many pages
    // together make fewer windows.
    let result = turn.read_candidates(scratch).and_then(|()| turn.grant_wishes());
    let asked = std::mem::take(&mut turn.asked);
    drop(turn);
    if matches!(result, Err(Stop::Full)) {
        client.state().asked = asked;
    } else {
        asked.into_iter().filter_map(|number| shared.client(number)).for_each(|other| shared.queue.ask(&other, false));
    }
    match result {
        Ok(()) => {
            client.state().failed = None;
            if client.domain.set_paused(None) {
                tracing::info!(domain = %client.domain.key, "the store can grow again; merging goes on");
            }
        }
        Err(Stop::Client | Stop::Full) => {}
        Err(Stop::Store(e)) => {
            if client.domain.set_paused(Some(e.to_string())) {
                tracing::warn!(domain = %client.domain.key, "merging pauses: {e}");
            }
        }
        Err(Stop::Fatal(why)) => {
            let mut state = client.state();
            state.refused = Some(why.clone());
            // It is tried again in each period, and said once.
            if state.failed.as_ref() != Some(&why) {
                tracing::warn!(pid = client.pid, "not merged: {why}");
                state.failed = Some(why);
            }
        }
    }
}

/// Refuses pinned memory, scans. `false`: nothing to do for this client now.
fn begin_period(shared: &Shared, client: &Client) -> bool {
    let status = kmem::procfs::status(Some(client.pid));
    let mut state = client.state();
    let now = std::time::Instant::now();
    state.stalled = state.outstanding > 0 && now.duration_since(state.reported) > PATIENCE;
    if !state.connected || state.detached || state.held || state.outstanding > 0 || now < state.next_scan {
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
    if state.recycling.as_mut().is_some_and(|recycling| recycling.is_awaited()) {
        return false;
    }
    let cpu = kmem::cpu::thread_time();
    match client.scan(&mut state, true) {
        // Where much is written or new the scan was dear once, for that, and what it found must not wait long for the
        // scans in which it has to rest.
        Ok(found)
            if state.totals.full_scans > FIRST_SCANS
                && found * MUCH < state.regions.values().map(|region| u64::from(region.pages)).sum() =>
        {
            let took = kmem::cpu::thread_time() - cpu;
            state.next_scan = now + took * SCAN_SHARE * shared.clients().len() as u32;
        }
        Ok(_) => {}
        Err(e) => {
            tracing::warn!(pid = client.pid, "cannot scan its memory: {e}");
            return false;
        }
    }
    if state.rested.elapsed().as_secs_f64() >= shared.config.direct_io_seconds {
        state.rested = std::time::Instant::now();
        state.regions.values_mut().for_each(Region::end_rest);
    }
    state.retry_deferred();
    shared.pacer.found(state.regions.values().map(Region::due).sum());
    true
}

struct Turn<'a> {
    shared: &'a Shared,
    client: &'a Arc<Client>,
    /// The NUMA node of the page in hand, where nodes are kept apart.
    node: Option<u32>,
    /// Where frames of each node are made.
    cursors: BTreeMap<Option<u32>, Cursor<'a>>,
    /// Clients that have wishes of this one.
    asked: HashSet<ClientId>,
    stretch: Stretch,
    row: Row,
    /// The handle that the next page's content may stand under: contents that were sighted one
    /// after the other have handles in a row.
    hint: u32,
    wished: Wished,
    /// What the agent was asked about, in the order of the pages.
    ahead: VecDeque<Ahead>,
    /// Contents of the chunk in hand that nobody had shown.
    firsts: usize,
    /// Whether that were most of the last chunk: then digests will do for the next.
    digests_do: bool,
}

impl<'a> Turn<'a> {
    fn new(shared: &'a Shared, client: &'a Arc<Client>) -> Self {
        Self {
            shared,
            client,
            node: None,
            cursors: BTreeMap::new(),
            asked: HashSet::new(),
            stretch: Stretch::default(),
            row: Row::default(),
            hint: 0,
            wished: Wished::default(),
            ahead: VecDeque::new(),
            firsts: 0,
            digests_do: false,
        }
    }

    /// Where frames for the page in hand are made.
    fn cursor(&mut self) -> &mut Cursor<'a> {
        let (client, node) = (self.client, self.node);
        self.cursors.entry(node).or_insert_with(|| Cursor::new(&client.domain.store, node))
    }

    /// Looks pages up; `keys`: their digests, which become their keys in the index.
    fn look_up_all(
        &mut self,
        id: RegionId,
        (pages, addresses): (&[PageNo], &[usize]),
        mut source: Source<'_>,
        keys: &mut [u64],
        handles: &mut Vec<Option<u32>>,
        plan: &mut Plan,
    ) -> Result<(), Stop> {
        let nodes = self.nodes_of(addresses)?;
        let node_of = |at: usize| nodes.get(at).copied().flatten();
        let mut unknown = Vec::new();
        for (at, key) in keys.iter_mut().enumerate() {
            match self.client.domain.key_of(*key, node_of(at)) {
                Some(known) => *key = known,
                None => unknown.push(at),
            }
        }
        self.client.domain.index.find(keys, self.hint, handles);
        if let Source::Read { sighted, .. } = &mut source {
            let index = &self.client.domain.index;
            let is_sighted =
                |key: u64, handle: Option<u32>| matches!(index.place(handle?, key)?, Place::Sighted(_)).then_some(());
            sighted.extend(keys.iter().zip(&*handles).map(|(&key, &handle)| is_sighted(key, handle).is_some()));
        }
        let mut findings = Vec::with_capacity(pages.len());
        let mut in_huge = Vec::new();
        if self.client.huge_page_share > 0.0
            && let Some(region) = self.client.state().regions.get(&id)
        {
            in_huge.extend(pages.iter().copied().filter(|&page| region.keeps_huge(page)));
        }
        for (at, &page) in pages.iter().enumerate() {
            if unknown.binary_search(&at).is_ok() {
                // The kernel is moving it, say. As content without a node it would never meet its likes.
                self.row.add(page, None);
                findings.push((page, Found::Nothing));
                continue;
            }
            if in_huge.binary_search(&page).is_ok() {
                self.row.add(page, None);
                findings.push((page, self.look_up_huge((id, page), keys[at], handles[at])));
                continue;
            }
            self.node = node_of(at);
            match self.look_up((id, page), (&mut source, at), keys[at], handles[at]) {
                Ok(found) => {
                    let target = if let Found::Target(target) = found { Some(target) } else { None };
                    self.row.add(page, target);
                    self.firsts += usize::from(matches!(found, Found::First(_)));
                    findings.push((page, found));
                }
                Err(e) => {
                    self.record(id, &findings, plan);
                    return Err(Stop::Store(e));
                }
            }
        }
        self.record(id, &findings, plan);
        Ok(())
    }

    /// The NUMA nodes that pages of this client lie on, one for one; empty where nodes are not kept
    /// apart.
    fn nodes_of(&self, addresses: &[usize]) -> Result<Vec<Option<u32>>, Stop> {
        let mut nodes = Vec::new();
        if self.client.domain.store.by_node
            && let Err(e) = kmem::numa::nodes_of(self.client.pid, addresses, &mut nodes)
        {
            return Err(match Errno::from_io_error(&e) {
                Some(Errno::SRCH) => Stop::Client,
                _ => Stop::Fatal(format!(
                    "the kernel does not tell the NUMA nodes of its pages (move_pages: {e}), and merge_across_nodes = false keeps nodes apart; \
                     run the daemon with CAP_SYS_NICE and CAP_SYS_PTRACE and without a filter on that call, or set merge_across_nodes = true"
                )),
            });
        }
        Ok(nodes)
    }

    /// What is to be done about a page, whose bytes are in a source; `known`: the handle under
    /// which the content was found.
    fn look_up(
        &mut self,
        (region, page): (RegionId, PageNo),
        (source, at): (&mut Source<'_>, usize),
        key: u64,
        known: Option<u32>,
    ) -> Result<Found, GrowError> {
        let domain = &self.client.domain;
        if key == domain.zero_digest() {
            return Ok(Found::Target(Target::Zero));
        }
        self.stretch.add(region, page, key);
        if self.stretch.len >= STRETCH
            && let Some(before) = self.stretch.frame
            && let Some(bytes) = self.bytes(source, at, key)
            && let Some(frame) = domain.next_replica(key, before, bytes, self.cursor())?
        {
            self.stretch.frame = Some(frame);
            return Ok(Found::Target(Target::Frame(frame)));
        }
        let found = self.find((region, page), (source, at), key, known)?;
        if let Found::Target(Target::Frame(frame)) = found {
            self.stretch.frame = Some(frame);
        }
        Ok(found)
    }

    /// Whether a page could be merged that is in a huge page which is not to be split yet.
    fn look_up_huge(&mut self, (region, page): (RegionId, PageNo), key: u64, known: Option<u32>) -> Found {
        let domain = &self.client.domain;
        let here = Place::Sighted(Sighting { client: self.client.number, region, page });
        if key == domain.zero_digest() {
            return Found::Kept;
        }
        let handle = match known.map(Seen::Known).or_else(|| domain.index.add(key, here)) {
            Some(Seen::First(handle)) => return Found::First(handle),
            Some(Seen::Known(handle)) => handle,
            None => return Found::Nothing,
        };
        self.hint = handle + 1;
        match domain.index.place(handle, key) {
            Some(place) if place == here => Found::First(handle),
            Some(Place::Sighted(there)) => {
                if let Some(other) = self.shared.client(there.client).filter(|other| Arc::ptr_eq(&other.domain, domain))
                {
                    other.shown_elsewhere(there, handle);
                    self.asked.insert(there.client);
                }
                Found::Kept
            }
            Some(Place::Frame(_)) => Found::Kept,
            None => Found::Nothing,
        }
    }

    fn find(
        &mut self,
        (region, page): (RegionId, PageNo),
        (source, at): (&mut Source<'_>, usize),
        key: u64,
        known: Option<u32>,
    ) -> Result<Found, GrowError> {
        let domain = &self.client.domain;
        let here = Sighting { client: self.client.number, region, page };
        let handle = match known {
            Some(handle) => handle,
            None => match domain.index.add(key, Place::Sighted(here)) {
                Some(Seen::First(handle)) => return Ok(Found::First(handle)),
                Some(Seen::Known(handle)) => handle,
                None => return Ok(Found::Nothing),
            },
        };
        self.hint = handle + 1;
        // A second try settles the case that somebody promoted the sighting meanwhile.
        for _ in 0..2 {
            match domain.index.place(handle, key) {
                Some(Place::Frame(frame)) if domain.store.try_ref(frame) => {
                    return Ok(Found::Target(Target::Frame(frame)));
                }
                Some(Place::Sighted(there)) if there == here => return Ok(Found::First(handle)),
                Some(Place::Sighted(there)) => {
                    self.cursor().expect(source.sighted(at))?;
                    let Some(bytes) = self.bytes(source, at, key) else { return Ok(Found::Nothing) };
                    let frame = self.cursor().put(bytes, 2)?;
                    if domain.promote(handle, there, frame) {
                        if self.shared.wish(domain, there, handle, frame) {
                            self.asked.insert(there.client);
                            self.wished.add(there);
                        }
                        return Ok(Found::Target(Target::Frame(frame)));
                    }
                    self.cursor().undo(frame, 2);
                }
                _ => return Ok(Found::Nothing),
            }
        }
        Ok(Found::Nothing)
    }

    /// Enters what was found into the ledger and the plan.
    fn record(&self, id: RegionId, found: &[(PageNo, Found)], plan: &mut Plan) {
        let mut state = self.client.state();
        let min_run = state.min_run;
        let mut given_up = false;
        let Some(region) = state.regions.get_mut(&id) else {
            drop(state);
            for &(page, found) in found {
                self.give_up(id, page, found);
            }
            return;
        };
        for &(page, found) in found {
            region.looked_at(page);
            if region.is_written(Run::one(page)) {
                self.give_up(id, page, found);
                continue;
            }
            match found {
                Found::First(handle) => {
                    region.set(page, Entry::Unshared(handle));
                }
                Found::Nothing => region.restart(page),
                Found::Kept => given_up |= region.can_merge(page),
                Found::Target(target) => {
                    // Sighted here once, in a huge page that was given up since, and shown by somebody else.
                    if let entry @ Entry::Unshared(_) = region.entry(page) {
                        region.set(page, Entry::Fresh);
                        self.client.drop_entry(id, page, entry);
                    }
                    plan.push(page, target);
                }
            }
        }
        plan.min_run = min_run;
        if given_up {
            self.shared.queue.ask(self.client, false);
        }
    }

    fn give_up(&self, region: RegionId, page: PageNo, found: Found) {
        match found {
            Found::First(handle) => {
                let here = Sighting { client: self.client.number, region, page };
                self.client.domain.index.forget(handle, Place::Sighted(here));
            }
            Found::Target(Target::Frame(frame)) => self.client.domain.release(frame, false),
            Found::Target(Target::Zero) | Found::Kept | Found::Nothing => {}
        }
    }

    /// Grants the wishes of a client that has a long row of them, so that its agent need not wait
    /// until all is read here.
    fn grant_row(&mut self) {
        if self.wished.len < BATCH {
            return;
        }
        self.wished.len = 0;
        let Some(other) = self.shared.client(self.wished.client) else { return };
        if !Arc::ptr_eq(&other.domain, &self.client.domain) || !self.shared.queue.claim(&other) {
            return;
        }
        // What can't be granted now stays, and the other client was asked.
        let _ = Turn::new(self.shared, &other).grant_wishes();
        self.shared.queue.done(other);
    }

    /// Plans the pages that other turns made frames of, as long as the agent has room.
    fn grant_wishes(&mut self) -> Result<(), Stop> {
        if self.client.count_shown() {
            self.shared.queue.ask(self.client, false);
        }
        let mut wishes = self.client.take_wishes();
        // What was left the last time is sorted, which this sort knows to use.
        wishes.sort_by_key(|w| (w.region, w.page));
        let mut left = wishes.as_slice();
        while let Some(id) = left.first().map(|wish| wish.region) {
            if self.client.is_full() {
                left.iter().for_each(|&wish| {
                    self.client.wish(wish).unwrap_or_else(|w| self.client.domain.release(w.frame, false))
                });
                return Err(Stop::Full);
            }
            let count = left.partition_point(|wish| wish.region == id).min(BATCH as usize);
            let (now, later) = left.split_at(count);
            left = later;
            let plan = self.plan_wishes(id, now);
            if let Err(stop) = self.send(id, plan) {
                left.iter().for_each(|wish| self.client.domain.release(wish.frame, false));
                return Err(stop);
            }
        }
        Ok(())
    }

    fn plan_wishes(&self, id: RegionId, wishes: &[Wish]) -> Plan {
        let mut state = self.client.state();
        let mut plan = Plan { min_run: state.min_run, ..Plan::default() };
        let mut given_up = false;
        for wish in wishes {
            let region = state.regions.get_mut(&id).filter(|r| r.entry(wish.page) == Entry::Unshared(wish.handle));
            match region {
                Some(region) if region.keeps_huge(wish.page) => {
                    region.set(wish.page, Entry::Fresh);
                    given_up |= region.can_merge(wish.page);
                    self.client.domain.release(wish.frame, false);
                }
                Some(region) => {
                    region.set(wish.page, Entry::Fresh);
                    region.looked_at(wish.page);
                    plan.push(wish.page, Target::Frame(wish.frame));
                }
                // Written since, discarded, or sighted anew: the wish has come too late.
                None => self.client.domain.release(wish.frame, false),
            }
        }
        if given_up {
            self.shared.queue.ask(self.client, false);
        }
        plan
    }

    /// Sends a plan as a batch, waiting for room. What can't be sent is undone.
    fn send(&self, id: RegionId, plan: Plan) -> Result<(), Stop> {
        let (runs, short) = plan.into_runs();
        self.undo(id, &short, true);
        if runs.is_empty() {
            return Ok(());
        }
        let mut runs = runs;
        let deadline = std::time::Instant::now() + PATIENCE;
        loop {
            match self.client.send_batch(id, runs) {
                Ok(()) => {
                    self.shared.charge_agents();
                    return Ok(());
                }
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

    /// See [`Client::undo`].
    fn undo(&self, id: RegionId, runs: &[PlannedRun], later: bool) {
        self.client.undo(&mut self.client.state(), id, runs, later);
    }
}

/// Pages of another client, one after the other, that it was asked to merge.
#[derive(Default)]
struct Wished {
    client: ClientId,
    /// The page behind the last.
    next: (RegionId, PageNo),
    len: u32,
}

impl Wished {
    fn add(&mut self, there: Sighting) {
        if (self.client, self.next) != (there.client, (there.region, there.page)) {
            *self = Self { client: there.client, ..Self::default() };
        }
        self.next = (there.region, there.page + 1);
        self.len += 1;
    }
}

/// What a look-up says of a page.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Found {
    /// Nobody else has it: it is unshared, under this handle.
    First(u32),
    /// Merge it.
    Target(Target),
    /// It could be merged, but is in a huge page.
    Kept,
    /// Its content is on its way out; look again later.
    Nothing,
}
