//! Planning a client's pages unread, where they follow a sequence
//! ([`crate::core::merge::predict`]).
//!
//! A few pages behind the predicted ones are read. They tell whether the sequence goes on.

use wire::{PageNo, RegionId, Run};

use super::plan::{BATCH, Plan};
use super::read::nodes_of;
use crate::client::Client;
use crate::client::batch::Target;
use crate::core::ledger::Region;
use crate::core::merge::predict::Prediction;

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
