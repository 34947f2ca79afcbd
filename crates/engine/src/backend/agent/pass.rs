//! One merge pass of a client: reads what is due, looks it up, plans, and sends batches.
//!
//! A pass reads candidates in the order of their addresses, in chunks. It keeps the client's lock
//! only to pick a chunk and to record its verdicts; while the agent works on one batch, the worker
//! reads the next. Content that is known as a frame is planned at once. Content that one other page
//! holds becomes a frame now, from the bytes at hand, and the other page's client gets a *merge
//! request*, to be served in a pass of its own.
//!
//! *Digests.* Where most contents were new, the next pages are not read but the agent is asked for
//! their digests ([`super::read`]). *Predictions.* Where page after page equalled frame after
//! frame, the next pages are planned without being read ([`crate::core::merge::predict`]).

use std::sync::Arc;
use std::time::Instant;

use wire::{PageNo, RegionId, Run};

use super::lookup::Lookup;
use super::plan::{Plan, nodes, plan_ahead, undo};
use super::read::{Picked, Reader};
use super::{Stop, moves, period, read, requests};
use crate::client::Client;
use crate::client::batch::Target;
use crate::client::send::Then;
use crate::config::bounds::TURN;
use crate::core::merge::pass::{self, Steps};
use crate::core::merge::predict::Prediction;
use crate::world::queue;
use crate::world::shared::Shared;

pub(crate) use read::Buffers;

/// One pass of `client`. Where a merge period has passed it only looks which pages were written,
/// and another follows that reads.
///
/// Nothing is done where a worker is held up in the memory of one of the user's clients. While the
/// headroom is short, clients are scanned and nothing is merged.
pub(crate) fn run(shared: &Shared, client: &Arc<Client>, buffers: &mut Buffers, kind: queue::Pass) {
    if let Some(why) = shared.stalls.why(client.user.owner) {
        return client.state().refusals.held_up(&client.user, client.pid, why);
    }
    if kind == queue::Pass::Scan {
        // All clients are scanned before any is read: only then is it known how many pages there
        // are to read in the time.
        if period::begin(shared, client) {
            if let Err(e) = client.domain.compact(Instant::now()) {
                tracing::debug!(domain = %client.domain.key, "compaction waits: {e}");
            }
            shared.queue.ask(client, queue::Pass::GoOn);
        }
        return;
    }
    if shared.headroom().pauses(Some(client.user.owner)).is_some() {
        return;
    }
    let mut pass = Pass::new(shared, client);
    pass.lookup.requests.notify = std::mem::take(&mut client.state().flight.to_notify);
    // Requests come last, and other clients are notified of theirs when all is read, or when many
    // are consecutive: many pages together make fewer windows.
    let read = pass.read_candidates(buffers);
    let result = match read {
        Ok(()) | Err(Stop::Turn) => {
            let served = requests::serve(shared, client).and_then(|()| moves::serve(shared, client)).and(read);
            served.and(pass.lookup.full.take().map_or(Ok(()), |why| Err(Stop::Store(why))))
        }
        Err(stop) => Err(stop),
    };
    let to_notify = std::mem::take(&mut pass.lookup.requests.notify);
    // Gives back the slots that were reserved for frames.
    drop(pass);
    if matches!(result, Err(Stop::Turn)) {
        shared.queue.ask(client, queue::Pass::GoOn);
    }
    if matches!(result, Err(Stop::Full | Stop::Turn)) {
        client.state().flight.to_notify = to_notify;
    } else {
        to_notify
            .into_iter()
            .filter_map(|number| shared.client(number))
            .for_each(|other| shared.queue.ask(&other, queue::Pass::GoOn));
    }
    conclude(client, result);
}

/// Notes how a pass ended, for the client's and the domain's status, and logs what is new of it.
fn conclude(client: &Client, result: Result<(), Stop>) {
    match result {
        Ok(()) => {
            client.state().refusals.readable();
            if client.domain.set_paused(None) {
                tracing::info!(domain = %client.domain.key, "the store can grow again");
            }
        }
        Err(Stop::Client | Stop::Full | Stop::Turn) => {}
        Err(Stop::Store(e)) => {
            if client.domain.set_paused(Some(e.to_string())) {
                tracing::warn!(domain = %client.domain.key, "no new frames, only those that are there: {e}");
            }
        }
        Err(Stop::Fatal(why)) => client.state().refusals.unreadable(&client.user, client.pid, why),
    }
}

/// A pass under way: the stages, and what each remembers from chunk to chunk.
struct Pass<'a> {
    shared: &'a Shared,
    client: &'a Arc<Client>,
    began: Instant,
    reader: Reader<'a>,
    prediction: Prediction<Target>,
    lookup: Lookup<'a>,
}

impl<'a> Pass<'a> {
    fn new(shared: &'a Shared, client: &'a Arc<Client>) -> Self {
        Self {
            shared,
            client,
            began: Instant::now(),
            reader: Reader::new(client),
            prediction: Prediction::default(),
            lookup: Lookup::new(shared, client),
        }
    }

    /// Reads every candidate once. Each client begins at another place of its regions: else two
    /// with the same contents would be first by turns, which leaves frames of both without runs.
    fn read_candidates(&mut self, buffers: &mut Buffers) -> Result<(), Stop> {
        let regions: Vec<(RegionId, u32)> = self.client.state().regions.iter().map(|(&id, r)| (id, r.pages)).collect();
        // Multiples of the golden ratio lie far apart.
        let place = self.client.number.0.wrapping_mul(0x9e37_79b9);
        for (id, pages) in regions {
            let begin = PageNo(((u64::from(place) * u64::from(pages)) >> 32) as u32);
            self.read_range(id, Run::between(begin, PageNo(pages)), buffers)?;
            self.read_range(id, Run::between(PageNo(0), begin), buffers)?;
        }
        Ok(())
    }

    /// Takes the candidates of some pages of a region through all stages.
    fn read_range(&mut self, id: RegionId, pages: Run, buffers: &mut Buffers) -> Result<(), Stop> {
        self.prediction = Prediction::default();
        self.reader.forget_ahead();
        let (shared, client) = (self.shared, self.client);
        let mut range = OfRange { pass: self, id, end: pages.end(), plan: Plan::default(), buffers };
        let result = pass::run(&mut range, &shared.pace(client.user.owner), pages.page);
        range.plan.send(shared, client, id)?;
        result
    }

    /// Predicts, and picks the next candidates in `range`. Returns how many pages were predicted,
    /// and what was picked, if the client may be merged. `None`: the region is gone.
    fn pick(
        &mut self,
        id: RegionId,
        range: Run,
        plan: &mut Plan,
        buffers: &mut Buffers,
    ) -> Option<(u32, Option<Picked>)> {
        let nodes = nodes(&self.prediction, self.client, id, range);
        let mut state = self.client.state();
        let goes_on = state.link.is_up() && !state.tracking.is_frozen() && state.refusals.why.is_none();
        let ahead = if state.flight.is_empty() { read::AHEAD } else { 0 };
        let region = state.regions.get_mut(&id)?;
        let predicted = match self.prediction.reach(range.page) {
            0 => 0,
            _ => plan_ahead(&mut self.prediction, self.client, region, range, nodes.as_deref(), plan),
        };
        let picked = self.reader.pick(region, range, predicted, ahead, buffers);
        Some((predicted, goes_on.then_some(picked)))
    }

    /// Reads what was picked and looks it up, chunk by chunk: pages with digests at once, the
    /// others when they are read.
    fn take_chunks(&mut self, id: RegionId, plan: &mut Plan, buffers: &mut Buffers) -> Result<(), Stop> {
        let mut done = 0;
        self.lookup.firsts = 0;
        while let Some(mut chunk) = self.reader.next_chunk(id, &mut done, buffers)? {
            self.lookup.look_up(&mut chunk);
            for &(page, verdict) in &self.lookup.verdicts {
                self.prediction.add(page, verdict.target());
            }
            if plan.record(self.client, id, &self.lookup.verdicts) {
                self.shared.queue.ask(self.client, queue::Pass::GoOn);
            }
        }
        self.reader.were_new(self.lookup.firsts, buffers);
        Ok(())
    }
}

struct OfRange<'p, 'a> {
    pass: &'p mut Pass<'a>,
    id: RegionId,
    end: PageNo,
    plan: Plan,
    buffers: &'p mut Buffers,
}

impl Steps for OfRange<'_, '_> {
    /// `None`: the client is not to be merged now.
    type Next = Option<Picked>;
    type Stop = Stop;

    fn next(&mut self, from: PageNo) -> Result<Option<(Option<Picked>, u64)>, Stop> {
        let &mut Pass { shared, client, began, .. } = self.pass;
        if self.plan.runs.is_empty() && client.is_full() {
            return Err(Stop::Full);
        }
        if began.elapsed() > TURN && shared.queue.others_wait(client.user.owner) {
            return Err(Stop::Turn);
        }
        let range = Run::between(from, self.end);
        let Some((predicted, picked)) = self.pass.pick(self.id, range, &mut self.plan, self.buffers) else {
            return Ok(None);
        };
        Ok(Some((picked, u64::from(predicted) + self.buffers.pages.len() as u64)))
    }

    fn merge(&mut self, picked: Option<Picked>) -> Result<Option<PageNo>, Stop> {
        let Self { pass, id, plan, buffers, .. } = self;
        let Some(picked) = picked else {
            undo(pass.client, *id, &std::mem::take(plan).runs, Then::Restart);
            return Err(Stop::Client);
        };
        let Some(last) = picked.last else { return Ok(None) };
        pass.reader.exchange(*id, picked, buffers);
        let result = pass.take_chunks(*id, plan, buffers);
        pass.lookup.requests.serve_long_run(pass.shared, pass.client);
        result?;
        if plan.is_full() {
            std::mem::take(plan).send(pass.shared, pass.client, *id)?;
        }
        Ok(Some(last + 1))
    }
}
