//! Files that were merged before this daemon began: the kernel knows which page uses which frame,
//! and the frames are digested once each.

use std::collections::{BTreeMap, HashMap};

use kmem::pageonefs::Page;
use rustix::io::Errno;
use wire::PageNo;

use super::file::{CHUNK, Digests, File, Kind};
use crate::core::content::index::{Content, Place, Seen};
use crate::core::ledger::Entry;

/// The handles of contents, by the kernel's handles of their frames.
pub(super) type Known = HashMap<u64, u32>;

impl<K: Kind> File<K> {
    /// Enters the pages that are merged into the ledger, and their contents into the index. `pause`
    /// is called before each chunk: the kernel digests the private pages in it, too.
    /// `Err`: the file is gone, or its mount.
    pub(super) fn adopt(&self, known: &mut Known, pause: impl Fn()) -> Result<(), Errno> {
        let pages = self.state().region.pages;
        let mut from = 0;
        while from < pages {
            pause();
            let end = from.saturating_add(CHUNK as u32).min(pages);
            let chunk: Vec<PageNo> = (from..end).map(PageNo).collect();
            let words = self.digest(&chunk, Digests::Private)?;
            let used = chunk.iter().zip(words).filter_map(|(&page, word)| match Page::from_word(word) {
                Page::Frame(frame) => Some((page, frame)),
                _ => None,
            });
            self.adopt_pages(&used.collect::<Vec<_>>(), known)?;
            from = end;
        }
        Ok(())
    }

    /// These pages use these frames, and the ledger does not know it.
    /// `Err`: the file is gone, or its mount.
    pub(super) fn adopt_pages(&self, used: &[(PageNo, u64)], known: &mut Known) -> Result<(), Errno> {
        let new = used.iter().filter(|(_, frame)| !known.contains_key(frame));
        // One page of each frame, in the order of the pages.
        let new: BTreeMap<u64, PageNo> = new.map(|&(page, frame)| (frame, page)).collect();
        let mut new: Vec<(PageNo, u64)> = new.into_iter().map(|(frame, page)| (page, frame)).collect();
        new.sort_unstable();
        let pages: Vec<PageNo> = new.iter().map(|&(page, _)| page).collect();
        let index = &self.contents.index;
        for ((_, frame), word) in new.into_iter().zip(self.digest(&pages, Digests::All)?) {
            let Page::Digest(digest) = Page::from_word(word) else { continue };
            match index.see(digest, Place::Below(frame)) {
                Some(Seen::First(handle)) => drop(known.insert(frame, handle)),
                Some(Seen::Known(handle)) => {
                    // Sighted in a file that was looked at before, or another frame of this
                    // content.
                    if let Some(place @ Place::Sighted(_)) = index.place(handle, digest) {
                        index.change(handle, place, Place::Below(frame));
                    }
                    known.insert(frame, handle);
                }
                None => {}
            }
        }
        let mut state = self.state();
        for &(page, frame) in used {
            if let Some(&handle) = known.get(&frame)
                && self.contents.enter(handle)
            {
                let before = state.region.set(page, Entry::Merged(Content(handle)));
                self.drop_entry(page, before);
            } else {
                // The page of the frame that was digested has changed just now.
                state.region.ages.restart(page);
            }
        }
        Ok(())
    }
}
