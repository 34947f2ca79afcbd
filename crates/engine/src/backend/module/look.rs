//! Looking up: which contents pages have, by the kernel's digests.

use kmem::pageonefs::Page;
use rustix::io::Errno;
use wire::PageNo;

use super::adopt::{Adopted, Known};
use super::file::{CHUNK, Digests, File, Kind, window};
use super::settle::Wanted;
use crate::core::ledger::Entry;
use crate::core::merge::lookup as merge;
use crate::core::merge::predict::Prediction;

/// What look-ups remember from chunk to chunk of a file.
#[derive(Default)]
pub(crate) struct Lookup {
    pub(super) prediction: Prediction<u32>,
    known: merge::Lookup,
    frames: Known,
}

/// What was found of a chunk.
#[derive(Default)]
pub(crate) struct Found {
    /// Pages whose contents were known.
    pub(crate) wanted: Vec<Wanted>,
    /// Digests that were new: these pages stand for them.
    pub(super) new: Vec<u64>,
    pub(super) adopted: Adopted,
}

/// The next candidates of a file, of pages that one call can digest.
pub(crate) fn candidates<K: Kind>(file: &File<K>, from: PageNo) -> Vec<PageNo> {
    let mut pages = Vec::new();
    file.state().region.candidates(from, CHUNK, &mut pages);
    if let Some(end) = pages.first().map(|&first| window(first) + CHUNK as u32) {
        pages.retain(|&page| page < end);
    }
    pages
}

impl Lookup {
    /// Digests pages and looks them up.
    /// `Err`: the file is gone, or its mount; or the kernel has no memory.
    pub(crate) fn look_up<K: Kind>(&mut self, file: &File<K>, pages: &[PageNo]) -> Result<Found, Errno> {
        let words = file.digest(pages, Digests::Private)?;
        let mut known: Vec<(PageNo, u64)> = Vec::new();
        let mut used = Vec::new();
        {
            let mut state = file.state();
            for (&page, &word) in pages.iter().zip(&words) {
                state.region.looked_at(page);
                match Page::from_word(word) {
                    Page::Digest(digest) => known.push((page, digest)),
                    Page::Away => state.region.defer(page),
                    Page::Frame(frame) => used.push((page, frame)),
                    Page::None => {}
                }
            }
        }
        // Merged before this daemon began; or written just when it was merged, and yet the same.
        let adopted = file.adopt(&used, &mut self.frames)?;
        let index = &file.contents.index;
        let digests: Vec<u64> = known.iter().map(|&(_, digest)| digest).collect();
        self.known.begin(index, &digests);
        let mut found = Found { adopted, ..Found::default() };
        // Locked until the ledger has what the index has: other files' threads look at both.
        let mut state = file.state();
        for (at, &(page, digest)) in known.iter().enumerate() {
            match self.known.see(index, at, digest, file.sighting(page)) {
                merge::Found::New(handle) => {
                    let before = state.region.set(page, Entry::Unshared(handle));
                    file.drop_entry(page, before);
                    self.prediction.add(page, None);
                    found.new.push(digest);
                }
                merge::Found::Own(_) | merge::Found::Full => {}
                merge::Found::At(handle, place) => {
                    self.prediction.add(page, Some(handle));
                    found.wanted.push(Wanted { page, handle, place });
                }
                // The other page's file sights it anew when it changes; so does this one.
                merge::Found::Leaving => state.region.restart(page),
            }
        }
        Ok(found)
    }
}
