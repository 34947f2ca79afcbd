//! Moving pages from frames that are evacuated to those that take their place
//! ([`crate::content::compact`]): merge requests of the store's own.

use wire::{PageNo, RegionId};

use super::plan::{BATCH, Plan};
use super::requests::Unserved;
use super::send;
use crate::client::Client;
use crate::client::batch::Target;
use crate::ledger::Entry;
use crate::world::shared::Shared;

/// Pages that are looked at in one go, with the client's lock held.
const WALK: u32 = 1 << 16;

/// Plans and sends the pages of `client` that map frames of pieces that are evacuated, as long as
/// its agent has room. Each is a user of both frames until its agent has reported.
pub(super) fn serve(shared: &Shared, client: &Client) -> Result<(), Unserved> {
    if !client.domain.compaction.is_active() {
        return Ok(());
    }
    let regions: Vec<RegionId> = client.state().regions.keys().copied().collect();
    for id in regions {
        let mut from = PageNo(0);
        while let Some((plan, next)) = plan(client, id, from) {
            if !plan.runs.is_empty() {
                send::send(shared, client, id, plan)?;
                if client.is_full() {
                    return Err(Unserved::Full);
                }
            }
            from = next;
        }
    }
    Ok(())
}

/// Plans the next pages of a region, from a page on. Also returns where to go on; `None`: none are
/// left.
fn plan(client: &Client, id: RegionId, from: PageNo) -> Option<(Plan, PageNo)> {
    let domain = &client.domain;
    let state = client.state();
    let region = state.regions.get(&id).filter(|region| region.counts().merged > 0)?;
    let mut plan = Plan::default();
    let mut next = from;
    domain.compaction.with_moves(|moves| {
        while next < region.all().end() && plan.pages < BATCH && next - from < WALK {
            if let Entry::Merged(old) = region.entry(next)
                && let Some(new) = moves.of(old)
                && domain.store.try_ref(new)
            {
                plan.push(next, Target::Frame(new));
            }
            next += 1;
        }
    });
    (next > from).then_some((plan, next))
}
