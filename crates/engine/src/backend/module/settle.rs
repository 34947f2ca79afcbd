//! Settling: what became of a page enters the ledger.

use rustix::io::Errno;
use wire::PageNo;

use super::file::{File, Kind, State};
use crate::core::content::index::{Content, Place};
use crate::core::ledger::Entry;

/// A page that is to be merged, and with which content.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Wanted {
    pub(crate) page: PageNo,
    /// The handle of its content.
    pub(crate) handle: u32,
    /// Where that is.
    pub(crate) place: Place,
}

/// What became of a page enters the ledger. Where it is merged, it counts as a user already.
pub(crate) fn settle<K: Kind>(file: &File<K>, state: &mut State, wanted: Wanted, outcome: Result<(), Errno>) {
    let Wanted { page, handle, .. } = wanted;
    let (region, totals) = (&mut state.region, &mut state.totals);
    let entry = match outcome {
        Ok(()) => {
            totals.merged += 1;
            region.ages.looked_at(page);
            Entry::Merged(Content(handle))
        }
        Err(Errno::STALE) => {
            totals.differed += 1;
            if !region.ages.settle_prediction(page, true) {
                region.ages.restart(page);
            }
            Entry::Fresh
        }
        // It uses a frame that the ledger does not know: its digest will say which.
        Err(Errno::EXIST) => {
            region.ages.looked_at(page);
            region.ages.restart(page);
            Entry::Fresh
        }
        Err(Errno::AGAIN | Errno::BUSY | Errno::NOMEM) => {
            region.ages.looked_at(page);
            // Its content may still stand for others.
            return region.ages.defer(page);
        }
        Err(_) => {
            region.ages.looked_at(page);
            Entry::Fresh
        }
    };
    match region.set(page, entry) {
        // It uses this content already, and is no user more for that.
        before @ Entry::Merged(_) if before == entry => file.contents.leave(handle),
        // Its content is where the page was merged to: it must not be forgotten.
        Entry::Unshared(before) if before == handle && entry == Entry::Merged(Content(handle)) => {}
        before => drop(file.drop_entry(page, before)),
    }
}
