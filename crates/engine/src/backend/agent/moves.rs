//! Moving pages from frames that are evacuated to those that take their place
//! ([`crate::store::compact`]): merge requests of the store's own.
//!
//! Which pages map a frame is not noted anywhere, so a pass looks through all that are known of its
//! client. It does so once a merge period: a client may have many passes in that time.

use std::time::Instant;

use wire::{PageNo, RegionId, Run};

use super::Stop;
use super::plan::{BATCH, Plan};
use crate::client::Client;
use crate::client::batch::Target;
use crate::core::ledger::Entry;
use crate::world::shared::Shared;

/// Pages that are looked at in one go, with the client's lock held.
const WALK: usize = 1 << 16;

/// Plans and sends the pages of `client` that map frames of pieces that are evacuated, as long as
/// its agent has room. Each is a user of both frames until its agent has reported.
pub(super) fn serve(shared: &Shared, client: &Client) -> Result<(), Stop> {
    let begin = Instant::now();
    if !client.domain.compaction.is_active() || begin < client.state().schedule.next_walk {
        return Ok(());
    }
    let regions: Vec<RegionId> = client.state().regions.keys().copied().collect();
    for id in regions {
        let mut from = PageNo(0);
        while let Some((plan, next)) = plan(client, id, from) {
            if !plan.runs.is_empty() {
                plan.send(shared, client, id)?;
                if client.is_full() {
                    return Err(Stop::Full);
                }
            }
            from = next;
        }
    }
    // The first pass of the next period may come a little sooner after its beginning than this one.
    client.state().schedule.next_walk = begin + shared.config().period() / 2;
    Ok(())
}

/// Plans pages of a region from one on. Also returns where to go on; `None`: none is left.
fn plan(client: &Client, id: RegionId, from: PageNo) -> Option<(Plan, PageNo)> {
    let domain = &client.domain;
    let state = client.state();
    let region = state.regions.get(&id).filter(|region| region.counts().merged > 0 && from < region.all().end())?;
    let (mut plan, end) = (Plan::default(), region.all().end());
    let next = domain.compaction.with_moves(|moves| {
        for (looked_at, page) in region.known(Run::between(from, end)).enumerate() {
            if plan.pages == BATCH || looked_at == WALK {
                return page;
            }
            if let Entry::Merged(old) = region.entry(page)
                && let Some(new) = moves.of(old)
                && domain.store.try_ref(new)
            {
                plan.push(page, Target::Frame(new));
            }
        }
        end
    });
    Some((plan, next))
}

#[cfg(test)]
mod tests {
    use kmem::PAGE_SIZE;
    use wire::ToDaemon;

    use super::*;
    use crate::client::scanning::tests::client;
    use crate::store::Cursor;
    use crate::world::shared::tests::shared;

    const ID: RegionId = RegionId(1);

    #[test]
    fn all_pages_of_an_evacuated_frame_move_and_are_looked_for_once_a_period() {
        let shared = shared();
        let (client, _agent) = client();
        let region = ToDaemon::RegionAdded { region: ID, start: 1 << 30, len: (PAGE_SIZE as u64) << 20 };
        client.apply(region, &mut Vec::new()).unwrap();
        let pages = [3, WALK as u32 + 2, 1 << 19].map(PageNo);
        let [old, new] =
            [3, 1].map(|users| Cursor::new(&client.domain.store, None).put(&[7; PAGE_SIZE], users).unwrap());
        client.domain.compaction.begin_move(old, new);
        let map = |page| {
            client.state().regions.get_mut(&ID).unwrap().set(page, Entry::Merged(old));
        };
        pages.into_iter().for_each(map);
        let moved = || {
            assert!(serve(&shared, &client).is_ok());
            pages.map(|page| client.state().regions[&ID].entry(page) == Entry::Pending)
        };
        assert_eq!(moved(), [true; 3]);
        map(pages[0]);
        assert_eq!(moved(), [false, true, true], "another pass of the period does not look");
        client.state().schedule.next_walk = Instant::now();
        assert_eq!(moved(), [true; 3], "the next period does");
    }
}
