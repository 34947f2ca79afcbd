//! Sequential prediction: planning pages without reading them.
//!
//! Two copies of the same memory lie side by side: where page after page equalled frame after
//! frame, the next page will most likely equal the next frame. Such pages are planned unread, since
//! the agent compares every page in any case. A few pages behind the predicted ones are read. They
//! tell whether the sequence goes on; each time it does, the next prediction is twice as long. A
//! page that was predicted wrong is a candidate again, and is read next.

use wire::{PageNo, RegionId, Run};

use super::plan::{BATCH, Plan};
use super::read::nodes_of;
use crate::client::Client;
use crate::client::batch::Target;
use crate::core::ledger::Region;

/// Pages predicted at a time, first and most.
const PAGES: std::ops::RangeInclusive<u32> = 64..=512;
/// Consecutive pages that must have matched consecutive frames before the next ones are predicted.
const PROVEN: u32 = 8;

/// Consecutive pages that equal consecutive frames (or zeros), up to the page looked at last.
pub(super) struct Prediction {
    /// The last of these pages.
    pub(super) page: PageNo,
    /// What it equals.
    target: Target,
    /// Pages of the sequence that were read.
    len: u32,
    /// How many pages to predict next.
    ahead: u32,
}

impl Default for Prediction {
    fn default() -> Self {
        Self { page: PageNo(0), target: Target::Zero, len: 0, ahead: *PAGES.start() }
    }
}

impl Prediction {
    /// A page was read. `None`: it equals no frame that was there before.
    pub(super) fn add(&mut self, page: PageNo, target: Option<Target>) {
        match target {
            Some(target) if self.len > 0 && page == self.page + 1 && target == self.target.next() => self.len += 1,
            Some(target) => *self = Self { target, len: 1, ..Self::default() },
            None => *self = Self::default(),
        }
        (self.page, self.target) = (page, target.unwrap_or(self.target));
    }

    /// The NUMA nodes of the pages that may be planned next, up to `end`; `None` where nodes are
    /// not kept apart. The kernel may take its time, so the caller must not hold the client's
    /// lock.
    pub(super) fn nodes(&self, client: &Client, id: RegionId, end: PageNo) -> Option<Vec<Option<u32>>> {
        if self.len < PROVEN || !client.domain.store.by_node {
            return None;
        }
        let next = self.page + 1;
        let pages = Run::between(next, (next + self.ahead).min(end));
        let addresses: Vec<usize> = {
            let state = client.state();
            let region = state.regions.get(&id)?;
            pages.pages().map(|page| region.address(page)).collect()
        };
        // Where the nodes cannot be told the pages are read next, which tells why.
        Some(nodes_of(client, &addresses).unwrap_or_default())
    }

    /// Plans pages that follow the sequence, up to `end`, without reading them; `nodes`: what
    /// [`Prediction::nodes`] gave. Returns how many.
    pub(super) fn plan_ahead(
        &mut self,
        client: &Client,
        region: &mut Region,
        end: PageNo,
        nodes: Option<&[Option<u32>]>,
        plan: &mut Plan,
    ) -> u32 {
        if self.len < PROVEN {
            return 0;
        }
        let store = &client.domain.store;
        // A page of another node does not belong to the sequence, whatever it holds. A page of
        // which nothing is known may be on any.
        let nodes = if store.by_node { nodes.or(Some(&[])) } else { None };
        let mut predicted = 0;
        while predicted < self.ahead && self.page + 1 < end && plan.pages < BATCH {
            let (page, target) = (self.page + 1, self.target.next());
            if let Target::Frame(frame) = target {
                let near = nodes.is_none_or(|nodes| nodes.get(predicted as usize) == Some(&store.node(frame)));
                if !near || !store.try_ref(frame) {
                    break;
                }
            }
            if !region.predict(page) {
                if let Target::Frame(frame) = target {
                    client.domain.release(frame, false);
                }
                break;
            }
            plan.push(page, target);
            (self.page, self.target) = (page, target);
            predicted += 1;
        }
        self.ahead = (self.ahead * 2).min(*PAGES.end());
        predicted
    }
}
