//! Pages that were merged before this daemon began: the kernel names the frames that they use. Each
//! frame is digested once for each file.

use std::collections::{BTreeMap, HashMap};

use kmem::pageonefs::{Entry as Pairing, Page};
use rustix::io::Errno;
use wire::PageNo;

use super::file::{Digests, File, Kind};
use crate::core::content::index::{Content, Place, Seen, Sighting};
use crate::core::ledger::Entry;

/// Frames that are remembered at most, for each file that is being merged: 0.8 MiB.
const FRAMES: usize = 1 << 14;

/// The handles of contents and their digests, by the kernel's handles of their frames.
#[derive(Default)]
pub(super) struct Known(HashMap<u64, (u32, u64)>);

/// What is still to be done for pages that were adopted.
#[derive(Default)]
pub(super) struct Adopted {
    /// Pages that were sighted with their contents: they are to be looked at again, and merged.
    pub(super) again: Vec<Sighting>,
    /// Pages whose contents have another frame by now: they are to move to that, if they can.
    pub(super) moves: Vec<Pairing>,
}

impl<K: Kind> File<K> {
    /// These pages, in ascending order, use these frames, and the ledger does not know it.
    /// `Err`: the file is gone, or its mount.
    pub(super) fn adopt(&self, used: &[(PageNo, u64)], known: &mut Known) -> Result<Adopted, Errno> {
        let (mut adopted, mut framed) = (Adopted::default(), Vec::new());
        if used.is_empty() {
            return Ok(adopted);
        }
        let index = &self.contents.index;
        let known = &mut known.0;
        if known.len() >= FRAMES {
            known.clear();
        }
        // A content may have been forgotten since.
        let is_known = |known: &HashMap<u64, (u32, u64)>, frame| {
            known.get(frame).is_some_and(|&(handle, digest)| index.place(handle, digest).is_some())
        };
        let new = used.iter().filter(|(_, frame)| !is_known(known, frame));
        // One page of each frame, in the order of the pages.
        let new: BTreeMap<u64, PageNo> = new.map(|&(page, frame)| (frame, page)).collect();
        let mut new: Vec<(PageNo, u64)> = new.into_iter().map(|(frame, page)| (page, frame)).collect();
        new.sort_unstable();
        let pages: Vec<PageNo> = new.iter().map(|&(page, _)| page).collect();
        for ((_, frame), word) in new.into_iter().zip(self.digest(&pages, Digests::All)?) {
            known.remove(&frame);
            let Page::Digest(digest) = Page::from_word(word) else { continue };
            match index.see(digest, Place::Below(frame)) {
                Some(Seen::First(handle)) => drop(known.insert(frame, (handle, digest))),
                Some(Seen::Known(handle)) => {
                    match index.place(handle, digest) {
                        Some(place @ Place::Sighted(there)) if index.change(handle, place, Place::Below(frame)) => {
                            adopted.again.push(there);
                        }
                        // Another frame of this content.
                        Some(_) => framed.push((handle, frame)),
                        None => {}
                    }
                    known.insert(frame, (handle, digest));
                }
                None => {}
            }
        }
        self.contents.framed(&framed);
        let mut state = self.state();
        for &(page, frame) in used {
            if let Some(&(handle, _)) = known.get(&frame)
                && self.contents.enter(handle)
            {
                let before = state.region.set(page, Entry::Merged(Content(handle)));
                self.drop_entry(page, before);
                if let Some((_, Place::Below(other))) =
                    index.get(handle).filter(|&(_, place)| place != Place::Below(frame))
                {
                    adopted.moves.push(Pairing::new(page.into(), Some(other)));
                }
            } else {
                // The page of the frame that was digested has changed just now.
                state.region.restart(page);
            }
        }
        Ok(adopted)
    }
}
