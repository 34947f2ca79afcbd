//! Plans: verdicts on pages, entered into the ledger and gathered into runs, which become a batch
//! of the agent's or are undone.
//!
//! Pages that follow a sequence are planned unread ([`crate::core::merge::predict`]). A few behind
//! them are read, which tells whether the sequence goes on.

use std::time::{Duration, Instant};

use wire::{MAX_BATCH_PAGES, PageNo, RegionId, Run, Slot};

use super::Stop;
use super::read::nodes_of;
use crate::client::Client;
use crate::client::batch::{PlannedRun, Target};
use crate::client::send::Then;
use crate::core::content::index::{Place, Sighting};
use crate::core::ledger::{Entry, Region};
use crate::core::merge::predict::Prediction;
use crate::world::shared::Shared;
use crate::world::stall::wait;

/// How long an agent may take to make room in its socket, before the worker turns to other clients.
const PATIENCE: Duration = Duration::from_secs(2);
/// Pause between two attempts.
const STEP: Duration = Duration::from_millis(1);

/// Pages in one batch: a few windows, so that the agent has work while the next is planned.
pub(super) const BATCH: u32 = 1024;
const BATCH_RUNS: usize = 1024;

/// The result of a look-up, for one page.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Verdict {
    /// No other page has this content: it is unshared, under this handle.
    First(u32),
    /// Merge it. A frame is counted as used once more already.
    Merge(Target),
    /// It could be merged, but is in a huge page.
    Kept,
    /// Its content is on its way out, or cannot be told. Look again later.
    Nothing,
}

impl Verdict {
    /// The frame or zeros to merge the page with.
    pub(super) fn target(self) -> Option<Target> {
        if let Self::Merge(target) = self { Some(target) } else { None }
    }

    /// Gives back what a verdict holds, when nothing comes of it.
    fn give_up(self, client: &Client, region: RegionId, page: PageNo) {
        match self {
            Self::First(handle) => {
                let here = Sighting { client: client.number, region, page };
                client.domain.index.forget(handle, Place::Sighted(here));
            }
            Self::Merge(Target::Frame(frame)) => client.domain.release(frame),
            Self::Merge(Target::Zero) | Self::Kept | Self::Nothing => {}
        }
    }
}

/// Pages of one region, ascending, gathered into runs.
#[derive(Default)]
pub(super) struct Plan {
    pub(super) runs: Vec<PlannedRun>,
    pub(super) pages: u32,
    /// Shorter runs are left out: the budget of mappings is short.
    pub(super) min_run: u32,
}

impl Plan {
    pub(super) fn push(&mut self, page: PageNo, target: Target) {
        self.pages += 1;
        if let Some(PlannedRun { run, target: first }) = self.runs.last_mut()
            && run.end() == page
            && run.len < MAX_BATCH_PAGES
        {
            let follows = match (*first, target) {
                (Target::Zero, Target::Zero) => true,
                (Target::Frame(first), Target::Frame(next)) => next.0 == first.0 + run.len && next.slot() != Slot(0),
                _ => false,
            };
            if follows {
                run.len += 1;
                return;
            }
        }
        self.runs.push(PlannedRun { run: Run::one(page), target });
    }

    /// Enters verdicts, ascending, into ledger and plan, but for pages written since they were
    /// read. Returns whether a huge page is given up, so that there are new candidates.
    pub(super) fn record(&mut self, client: &Client, id: RegionId, verdicts: &[(PageNo, Verdict)]) -> bool {
        let mut state = client.state();
        self.min_run = state.budget.min_run;
        let mut given_up = false;
        let Some(region) = state.regions.get_mut(&id) else {
            drop(state);
            verdicts.iter().for_each(|&(page, verdict)| verdict.give_up(client, id, page));
            return false;
        };
        for &(page, verdict) in verdicts {
            region.ages.looked_at(page);
            if region.ages.is_written(Run::one(page)) {
                verdict.give_up(client, id, page);
                continue;
            }
            match verdict {
                Verdict::First(handle) => {
                    region.set(page, Entry::Unshared(handle));
                }
                Verdict::Nothing => region.ages.restart(page),
                Verdict::Kept => given_up |= region.can_merge(page),
                Verdict::Merge(target) => {
                    // Sighted here once, in a huge page that was given up since, and seen
                    // elsewhere.
                    if let entry @ Entry::Unshared(_) = region.entry(page) {
                        region.set(page, Entry::Fresh);
                        client.drop_entry(id, page, entry);
                    }
                    self.push(page, target);
                }
            }
        }
        given_up
    }

    pub(super) fn is_full(&self) -> bool {
        self.pages >= BATCH || self.runs.len() >= BATCH_RUNS
    }

    /// The runs to send, and those too short for a short budget of mappings; zeros cost none.
    fn into_runs(self) -> (Vec<PlannedRun>, Vec<PlannedRun>) {
        let min_run = self.min_run;
        self.runs.into_iter().partition(|run| run.target == Target::Zero || run.run.len >= min_run)
    }

    /// Sends the plan as a batch, waiting for room. What cannot be sent is undone.
    pub(super) fn send(self, shared: &Shared, client: &Client, id: RegionId) -> Result<(), Stop> {
        let (mut runs, short) = self.into_runs();
        undo(client, id, &short, Then::Defer);
        shared.note_segments(&client.domain, &client.new_segments(&runs));
        let deadline = Instant::now() + PATIENCE;
        while !runs.is_empty() {
            match wait(client.user.owner, || client.send_batch(id, runs)) {
                Ok(()) => {
                    shared.charge_agents();
                    break;
                }
                Err((back, e)) if e.kind() == std::io::ErrorKind::WouldBlock && Instant::now() < deadline => {
                    runs = back;
                    std::thread::sleep(STEP);
                }
                Err((back, _)) => {
                    undo(client, id, &back, Then::Restart);
                    return Err(Stop::Client);
                }
            }
        }
        Ok(())
    }
}

/// The NUMA nodes of the pages that may be planned next, within `range`; `None` where nodes are not
/// kept apart. The kernel may take its time, so the caller must not hold the client's lock.
pub(super) fn nodes(
    prediction: &Prediction<Target>,
    client: &Client,
    id: RegionId,
    range: Run,
) -> Option<Vec<Option<u32>>> {
    let reach = prediction.reach(range.page);
    if reach == 0 || !client.domain.store.by_node {
        return None;
    }
    let pages = Run::between(range.page, (range.page + reach).min(range.end()));
    let addresses: Vec<usize> = {
        let state = client.state();
        let region = state.regions.get(&id)?;
        pages.pages().map(|page| region.address(page)).collect()
    };
    // Where the nodes cannot be told the pages are read next, which tells why.
    Some(nodes_of(client, &addresses).unwrap_or_default())
}

/// Plans pages that follow the sequence, within `range`, without reading them; `nodes`: what
/// [`nodes`] gave. Returns how many.
pub(super) fn plan_ahead(
    prediction: &mut Prediction<Target>,
    client: &Client,
    region: &mut Region,
    range: Run,
    nodes: Option<&[Option<u32>]>,
    plan: &mut Plan,
) -> u32 {
    let (store, end) = (&client.domain.store, range.end());
    // A page of another node does not belong to the sequence, whatever it holds. A page of which
    // nothing is known may be on any.
    let nodes = if store.by_node { nodes.or(Some(&[])) } else { None };
    let take = |page: PageNo, target: Target| {
        if page >= end || plan.pages >= BATCH {
            return false;
        }
        if let Target::Frame(frame) = target {
            let node = (page - range.page) as usize;
            let near = nodes.is_none_or(|nodes| nodes.get(node) == Some(&store.node(frame)));
            if !near || !store.try_ref(frame) {
                return false;
            }
        }
        let planned = region.predict(page);
        if planned {
            plan.push(page, target);
        } else if let Target::Frame(frame) = target {
            client.domain.release(frame);
        }
        planned
    };
    let planned = prediction.each(range.page, take);
    prediction.goes_on();
    planned
}

/// See [`Client::undo`].
pub(super) fn undo(client: &Client, id: RegionId, runs: &[PlannedRun], then: Then) {
    client.undo(&mut client.state(), id, runs, then);
}

#[cfg(test)]
mod tests;
