//! Settling: pages whose contents have come again become frames, in the kernel, and what became of
//! a page enters the ledger.

use std::collections::{BTreeMap, HashMap};

use kmem::pageonefs::Entry as Pairing;
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
    pub(crate) place: Place,
}

/// What became of a page enters the ledger. Where it is merged, it counts as a user already.
pub(crate) fn settle<K: Kind>(file: &File<K>, state: &mut State, wanted: Wanted, outcome: Result<(), Errno>) {
    let Wanted { page, handle, .. } = wanted;
    let (region, totals) = (&mut state.region, &mut state.totals);
    let entry = match outcome {
        Ok(()) => {
            totals.merged += 1;
            region.looked_at(page);
            Entry::Merged(Content(handle))
        }
        Err(Errno::STALE) => {
            totals.differed += 1;
            if !region.differs(page) {
                region.restart(page);
            }
            Entry::Fresh
        }
        // It uses a frame that the ledger does not know: its digest will say which.
        Err(Errno::EXIST) => {
            region.looked_at(page);
            region.restart(page);
            Entry::Fresh
        }
        Err(Errno::AGAIN | Errno::BUSY | Errno::NOMEM) => {
            region.looked_at(page);
            // Its content may still stand for others.
            return region.defer(page);
        }
        Err(_) => {
            region.looked_at(page);
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

/// Makes frames of pages of a file. Each was sighted with the content behind its handle. Enters all
/// frames that there are; returns those that were made, by the handles of their contents.
pub(crate) fn make_frames_of<K: Kind>(
    there: &File<K>,
    pages: BTreeMap<PageNo, u32>,
    frames: &mut HashMap<u32, u64>,
) -> (Vec<(u32, u64)>, Result<(), Errno>) {
    let contents = &there.contents;
    let mut begun = Vec::with_capacity(pages.len());
    {
        let state = there.state();
        for (page, handle) in pages {
            let sighted = Place::Sighted(there.sighting(page));
            let place = contents.index.get(handle).map(|(_, place)| place);
            if let Some(Place::Below(frame)) = place {
                // Another thread was first.
                frames.insert(handle, frame);
            } else if place == Some(sighted)
                && state.region.entry(page) == Entry::Unshared(handle)
                && contents.enter(handle)
            {
                if there.kind.begin(handle, there.sighting(page)) {
                    begun.push(Wanted { page, handle, place: sighted });
                } else {
                    contents.leave(handle);
                }
            }
        }
    }
    let (made, result) = become_frames(there, begun);
    frames.extend(made.iter().copied());
    (made, result)
}

/// These pages, in ascending order, become frames of their contents, whose users they are already.
/// Returns the frames, by the handles of their contents.
pub(crate) fn become_frames<K: Kind>(file: &File<K>, pages: Vec<Wanted>) -> (Vec<(u32, u64)>, Result<(), Errno>) {
    let mut made = Vec::with_capacity(pages.len());
    if pages.is_empty() {
        return (made, Ok(()));
    }
    let mut pairings: Vec<Pairing> = pages.iter().map(|wanted| Pairing::new(wanted.page.into(), None)).collect();
    let result = file.kernel.merge(file.id, &mut pairings).map(drop);
    let mut state = file.state();
    for (wanted, pairing) in pages.into_iter().zip(pairings) {
        let Wanted { page, handle, .. } = wanted;
        let there = file.sighting(page);
        match pairing.result() {
            Ok(()) | Err(Errno::EXIST) => {
                file.kind.made(&file.contents, handle, there, pairing.frame);
                made.push((handle, pairing.frame));
                settle(file, &mut state, wanted, Ok(()));
            }
            outcome => {
                // Not now. Its content gets a frame of another page, and this one comes again.
                if state.region.entry(page) != Entry::Merged(Content(handle)) {
                    file.kind.left(handle, there);
                }
                file.contents.leave(handle);
                settle(file, &mut state, wanted, outcome);
            }
        }
    }
    (made, result)
}
