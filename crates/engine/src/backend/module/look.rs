//! Looking up: which contents pages have, by the kernel's digests.

use kmem::pageonefs::Page;
use rustix::io::Errno;
use wire::PageNo;

use super::adopt::Known;
use super::file::{CHUNK, Digests, File, Kind, window};
use super::settle::Wanted;
use crate::core::content::index::{Place, Seen};
use crate::core::ledger::Entry;
use crate::core::merge::predict::Prediction;

/// What look-ups remember from chunk to chunk of a file.
#[derive(Default)]
pub(crate) struct Lookup {
    pub(super) prediction: Prediction<u32>,
    /// The handle that the next content may have.
    hint: u32,
}

/// What was found of a chunk.
#[derive(Default)]
pub(crate) struct Found {
    /// Pages whose contents were known.
    pub(crate) wanted: Vec<Wanted>,
    /// Digests that were new: these pages stand for them.
    pub(super) new: Vec<u64>,
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
    ///
    /// # Errors
    /// The file is gone, or its mount; or the kernel has no memory.
    pub(crate) fn look_up<K: Kind>(&mut self, file: &File<K>, pages: &[PageNo]) -> Result<Found, Errno> {
        let words = file.digest(pages, Digests::Private)?;
        let mut known: Vec<(PageNo, u64)> = Vec::new();
        let mut used = Vec::new();
        {
            let mut state = file.state();
            for (&page, &word) in pages.iter().zip(&words) {
                state.region.ages.looked_at(page);
                match Page::from_word(word) {
                    Page::Digest(digest) => known.push((page, digest)),
                    Page::Away => state.region.ages.defer(page),
                    Page::Frame(frame) => used.push((page, frame)),
                    Page::None => {}
                }
            }
        }
        // Written just when it was merged, and yet the same.
        file.adopt_pages(&used, &mut Known::new())?;
        let index = &file.contents.index;
        let digests: Vec<u64> = known.iter().map(|&(_, digest)| digest).collect();
        let mut handles = Vec::new();
        index.find(&digests, self.hint, &mut handles);
        let mut found = Found::default();
        // Locked until the ledger has what the index has: other files' threads look at both.
        let mut state = file.state();
        for (&(page, digest), handle) in known.iter().zip(handles) {
            let here = Place::Sighted(file.sighting(page));
            let handle = match handle.map(Seen::Known).or_else(|| index.add(digest, here)) {
                Some(Seen::Known(handle)) => handle,
                Some(Seen::First(handle)) => {
                    let before = state.region.set(page, Entry::Unshared(handle));
                    file.drop_entry(page, before);
                    self.prediction.add(page, None);
                    found.new.push(digest);
                    continue;
                }
                None => continue,
            };
            self.hint = handle + 1;
            match index.place(handle, digest) {
                // The other page's file sights it anew when it changes; so does this one.
                None => state.region.ages.restart(page),
                Some(place) if place == here => {}
                Some(place) => {
                    self.prediction.add(page, Some(handle));
                    found.wanted.push(Wanted { page, handle, place });
                }
            }
        }
        Ok(found)
    }
}
