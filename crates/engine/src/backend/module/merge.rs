//! Merging a file: candidates are digested and looked up, and the kernel is told which pages hold
//! the same.
//!
//! A chunk of candidates goes through these steps:
//!
//! 1. The kernel digests them. Holes are passed over; pages that are swapped out are put off.
//! 2. Each digest is looked up. A content that is new is *sighted* here.
//! 3. Pages that were sighted, and whose content has come again, become frames. They are the other
//!    files', or this one's.
//! 4. The chunk's pages are merged with their frames. A frame that has as many users as it may, or
//!    that has gone meanwhile, is replaced by one that is made of the page in hand.
//!
//! A store's slot is not merged: it is lent, and becomes the frame ([`super::loans`]).
//!
//! The kernel compares each page with its frame, in full, while nobody can write to it. So nothing
//! here must be right for memory to be right.

use std::collections::{BTreeMap, HashMap, HashSet};
use std::sync::Arc;

use kmem::pageonefs::{Ask, Entry as Pairing, Page};
use rustix::io::Errno;
use wire::PageNo;

use super::USER;
use super::adopt::Known;
use super::file::{File, State, merged};
use super::loans::lend;
use super::predict::Prediction;
use crate::core::content::index::{ClientId, Place, Seen, Sighting};
use crate::core::ledger::Entry;
use crate::world::shared::Shared;

/// Pages that are digested and merged together: those of one call's result, 4 KiB.
pub(super) const CHUNK: usize = 512;
/// How often frames are replaced within a chunk.
const TRIES: usize = 8;

/// A page that is to be merged, and with which content.
#[derive(Clone, Copy, Debug)]
pub(super) struct Wanted {
    pub(super) page: PageNo,
    /// The handle of its content.
    pub(super) handle: u32,
    /// Where that is.
    pub(super) place: Place,
}

/// The files of one round, by their numbers.
pub(super) type ByNumber = BTreeMap<ClientId, Arc<File>>;

/// The work on one file in a round.
pub(super) struct Merge<'a> {
    shared: &'a Shared,
    file: &'a File,
    all: &'a ByNumber,
    prediction: Prediction,
    /// The handle that the next content may have.
    hint: u32,
}

impl<'a> Merge<'a> {
    pub(super) fn new(shared: &'a Shared, file: &'a File, all: &'a ByNumber) -> Self {
        Self { shared, file, all, prediction: Prediction::default(), hint: 0 }
    }

    /// Looks at every candidate once.
    ///
    /// # Errors
    /// The file is gone, or its mount; or the kernel has no memory.
    pub(super) fn run(&mut self) -> Result<(), Errno> {
        let mut from = PageNo(0);
        while !self.shared.stopping() {
            self.shared.pacer.pause(USER, || self.shared.stopping());
            // What a store holds is lent, and compared with nothing.
            let predicted = if self.file.lends { Vec::new() } else { self.prediction.next(self.file, from) };
            if let Some(last) = predicted.last().map(|wanted| wanted.page) {
                self.shared.pacer.took(USER, predicted.len() as u64);
                let wrong = self.merge(&predicted, true)?;
                self.prediction.was(wrong.is_none());
                from = wrong.unwrap_or(last + 1);
                continue;
            }
            let pages = self.pick(from);
            let Some(&last) = pages.last() else { break };
            self.shared.pacer.took(USER, pages.len() as u64);
            from = last + 1;
            let wanted = self.look_up(&pages)?;
            if self.file.lends {
                lend(self.file, &wanted)?;
            } else {
                self.merge(&wanted, false)?;
            }
        }
        Ok(())
    }

    /// The next candidates, of pages that one call can digest.
    fn pick(&self, from: PageNo) -> Vec<PageNo> {
        let mut pages = Vec::new();
        self.file.state().region.candidates(from, CHUNK, &mut pages);
        if let Some(end) = pages.first().map(|&first| window(first) + CHUNK as u32) {
            pages.retain(|&page| page < end);
        }
        pages
    }

    /// Digests pages and looks them up. Returns those whose contents were known.
    fn look_up(&mut self, pages: &[PageNo]) -> Result<Vec<Wanted>, Errno> {
        let words = digest(self.file, pages, false)?;
        let mut known: Vec<(PageNo, u64)> = Vec::new();
        let mut used = Vec::new();
        {
            let mut state = self.file.state();
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
        // Written just when it was merged, and yet the same.
        self.file.adopt_pages(&used, &mut Known::new())?;
        let contents = &self.file.contents;
        let digests: Vec<u64> = known.iter().map(|&(_, digest)| digest).collect();
        let mut handles = Vec::new();
        contents.index.find(&digests, self.hint, &mut handles);
        let (mut wanted, mut new) = (Vec::new(), Vec::new());
        // Locked until the ledger has what the index has: other files' threads look at both.
        let mut state = self.file.state();
        for (&(page, digest), handle) in known.iter().zip(handles) {
            let here = Place::Sighted(self.file.sighting(page));
            let handle = match handle.map(Seen::Known).or_else(|| contents.index.add(digest, here)) {
                Some(Seen::Known(handle)) => handle,
                Some(Seen::First(handle)) => {
                    let before = state.region.set(page, Entry::Unshared(handle));
                    self.file.drop_entry(page, before);
                    self.prediction.ends();
                    new.push(digest);
                    continue;
                }
                None => continue,
            };
            self.hint = handle + 1;
            match contents.index.place(handle, digest) {
                // The other page's file sights it anew when it changes; so does this one.
                None => state.region.restart(page),
                Some(place) if place == here => {}
                Some(place) => {
                    self.prediction.add(page, handle);
                    wanted.push(Wanted { page, handle, place });
                }
            }
        }
        drop(state);
        if !self.file.lends {
            self.ask_clients(&new);
        }
        Ok(wanted)
    }

    /// Contents that are new in files: a page of a client that was sighted with one is looked up
    /// again. Then it becomes a frame, since files have its content ([`crate::backend::agent`]).
    fn ask_clients(&self, digests: &[u64]) {
        let Some(domain) = self.file.contents.clients().filter(|domain| domain.can_be_lent()) else { return };
        // The kernel's digests lack the lowest bit.
        for key in digests.iter().flat_map(|digest| [*digest, digest | 1]) {
            let Some(handle) = domain.index.handle_of(key) else { continue };
            let Some(Place::Sighted(there)) = domain.index.place(handle, key) else { continue };
            let Some(client) = self.shared.client(there.client).filter(|it| Arc::ptr_eq(&it.domain, &domain)) else {
                continue;
            };
            if let Some(region) = client.state().regions.get_mut(&there.region)
                && region.entry(there.page) == Entry::Unshared(handle)
            {
                region.restart(there.page);
            }
        }
    }

    /// Merges pages, which are in ascending order. Returns the first that held another content, of
    /// pages that were predicted.
    fn merge(&mut self, wanted: &[Wanted], predicted: bool) -> Result<Option<PageNo>, Errno> {
        let mut frames = HashMap::new();
        let mut result = self.make_frames(wanted, &mut frames);
        let mut rest: Vec<Wanted> = Vec::with_capacity(wanted.len());
        let contents = &self.file.contents;
        for &wanted in wanted {
            let entered = contents.enter(wanted.handle);
            // With a user it stays known, unless it was forgotten before.
            if entered && contents.index.get(wanted.handle).is_some() {
                rest.push(wanted);
                continue;
            }
            if entered {
                contents.leave(wanted.handle);
            }
            settle(self.file, &mut self.file.state(), wanted, Err(Errno::AGAIN));
        }
        let mut wrong = None;
        for _ in 0..TRIES {
            if rest.is_empty() || result.is_err() {
                break;
            }
            (rest, result) = self.merge_once(rest, &mut frames, &mut wrong);
        }
        let mut state = self.file.state();
        for wanted in rest {
            contents.leave(wanted.handle);
            settle(self.file, &mut state, wanted, Err(Errno::AGAIN));
        }
        result.map(|()| wrong.filter(|_| predicted))
    }

    /// One call. Returns the pages whose frames have to be replaced first.
    fn merge_once(
        &self,
        wanted: Vec<Wanted>,
        frames: &mut HashMap<u32, u64>,
        wrong: &mut Option<PageNo>,
    ) -> (Vec<Wanted>, Result<(), Errno>) {
        let (mut made, mut later) = (HashSet::new(), Vec::new());
        let mut now = Vec::with_capacity(wanted.len());
        let mut pairings = Vec::with_capacity(wanted.len());
        for wanted in wanted {
            let frame = frames.get(&wanted.handle).copied();
            if frame.is_some() || made.insert(wanted.handle) {
                pairings.push(Pairing::new(wanted.page.into(), frame));
                now.push(wanted);
            } else {
                later.push(wanted);
            }
        }
        let result = self.file.kernel.merge(self.file.id, &mut pairings).map(drop);
        let contents = &self.file.contents;
        let mut state = self.file.state();
        for (wanted, pairing) in now.into_iter().zip(pairings) {
            let (mut outcome, frame) = (pairing.result(), pairing.frame);
            if outcome == Err(Errno::EXIST) && frames.get(&wanted.handle) == Some(&frame) {
                // It was written just when it was merged, and yet the same.
                outcome = Ok(());
            }
            match outcome {
                Ok(()) => {
                    if frames.insert(wanted.handle, frame) != Some(frame)
                        && let Some((_, place)) = contents.index.get(wanted.handle)
                    {
                        // Where another thread was first, there are two frames of one content.
                        contents.index.change(wanted.handle, place, Place::Below(frame));
                        contents.has_frame(wanted.handle, frame);
                    }
                }
                Err(Errno::MLINK | Errno::NOENT) => {
                    if frames.get(&wanted.handle) == Some(&frame) {
                        frames.remove(&wanted.handle);
                    }
                    later.push(wanted);
                    continue;
                }
                Err(why) => {
                    contents.leave(wanted.handle);
                    if why == Errno::STALE {
                        wrong.get_or_insert(wanted.page);
                    }
                }
            }
            settle(self.file, &mut state, wanted, outcome);
        }
        later.sort_by_key(|wanted| wanted.page);
        (later, result)
    }

    /// Makes frames of the pages in which these contents were sighted. Enters all frames that there
    /// are, by the handles of their contents.
    fn make_frames(&self, wanted: &[Wanted], frames: &mut HashMap<u32, u64>) -> Result<(), Errno> {
        let mut sighted: BTreeMap<ClientId, BTreeMap<PageNo, u32>> = BTreeMap::new();
        for wanted in wanted {
            match wanted.place {
                Place::Below(frame) => drop(frames.insert(wanted.handle, frame)),
                Place::Sighted(Sighting { client, page, .. }) => {
                    sighted.entry(client).or_default().insert(page, wanted.handle);
                }
                Place::Frame(_) => {}
            }
        }
        for (number, pages) in sighted {
            if let Some(there) = self.all.get(&number) {
                make_frames_of(there, pages, frames)?;
            }
        }
        Ok(())
    }
}

/// Makes frames of pages of a file. Each was sighted with the content behind its handle.
fn make_frames_of(there: &File, pages: BTreeMap<PageNo, u32>, frames: &mut HashMap<u32, u64>) -> Result<(), Errno> {
    let contents = &there.contents;
    let mut pairings = Vec::with_capacity(pages.len());
    let mut handles = Vec::with_capacity(pages.len());
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
                if there.lends && !contents.begin_loan(handle, there.sighting(page)) {
                    contents.leave(handle);
                    continue;
                }
                pairings.push(Pairing::new(page.into(), None));
                handles.push(handle);
            }
        }
    }
    let result = if pairings.is_empty() { Ok(0) } else { there.kernel.merge(there.id, &mut pairings) };
    let mut state = there.state();
    for (handle, pairing) in handles.into_iter().zip(pairings) {
        let page = PageNo(pairing.index as u32);
        let sighted = Place::Sighted(there.sighting(page));
        let wanted = Wanted { page, handle, place: sighted };
        match pairing.result() {
            Ok(()) | Err(Errno::EXIST) => {
                if there.lends {
                    contents.is_lent(handle, there.sighting(page), pairing.frame);
                } else {
                    contents.index.change(handle, sighted, Place::Below(pairing.frame));
                    contents.has_frame(handle, pairing.frame);
                }
                frames.insert(handle, pairing.frame);
                settle(there, &mut state, wanted, Ok(()));
            }
            outcome => {
                // Not now. Its content gets a frame of another page, and this one comes again.
                if there.lends && state.region.entry(page) != merged(handle) {
                    contents.loans.end(handle, there.sighting(page));
                }
                contents.leave(handle);
                settle(there, &mut state, wanted, outcome);
            }
        }
    }
    result.map(drop)
}

/// What became of a page enters the ledger. Where it is merged, it counts as a user already.
pub(super) fn settle(file: &File, state: &mut State, wanted: Wanted, outcome: Result<(), Errno>) {
    let Wanted { page, handle, .. } = wanted;
    let (region, totals) = (&mut state.region, &mut state.totals);
    let entry = match outcome {
        Ok(()) => {
            totals.merged += 1;
            region.looked_at(page);
            merged(handle)
        }
        Err(Errno::STALE) => {
            totals.differed += 1;
            if !region.settle_prediction(page, true) {
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
        Entry::Unshared(before) if before == handle && entry == merged(handle) => {}
        before => drop(file.drop_entry(page, before)),
    }
}

/// The first page of those that are digested with this one.
pub(super) fn window(page: PageNo) -> PageNo {
    PageNo(page.0 / 64 * 64)
}

/// Digests pages, which lie within [`CHUNK`] pages from the first one's word of bits on. `frames`:
/// also those that are merged. Returns a word for each.
pub(super) fn digest(file: &File, pages: &[PageNo], frames: bool) -> Result<Vec<u64>, Errno> {
    let Some(&first) = pages.first() else { return Ok(Vec::new()) };
    let start = window(first);
    let at = |page: PageNo| (page.0 - start.0) as usize;
    let (mut only, mut out) = ([0u64; CHUNK / 64], [0u64; CHUNK]);
    pages.iter().for_each(|&page| only[at(page) / 64] |= 1 << (at(page) % 64));
    let last = pages.last().map_or(0, |&page| at(page));
    let words = last / 64 + 1;
    let ask =
        Ask { id: file.id, start: start.0.into(), only: Some(&only[..words]), seed: file.contents.seed.get(), frames };
    file.kernel.digest(&ask, &mut out[..words * 64])?;
    Ok(pages.iter().map(|&page| out[at(page)]).collect())
}
