//! Merging a file: candidates are digested and looked up, and the kernel is told which pages hold
//! the same.
//!
//! 1. The kernel digests a chunk. Holes are passed over; pages that are swapped out are put off.
//! 2. Each digest is looked up ([`super::look`]). A content that is new is *sighted* here.
//! 3. Pages that were sighted, of this file or others, and whose content has come again, become
//!    frames.
//! 4. The chunk's pages are merged with their frames. A frame that is full, or gone meanwhile, is
//!    replaced by one that is made of the page in hand.
//!
//! The kernel compares each page with its frame, in full, while nobody can write to it. So nothing
//! here must be right for memory to be right.

use std::collections::{BTreeMap, HashMap, HashSet};
use std::sync::Arc;

use kmem::pageonefs::Entry as Pairing;
use rustix::io::Errno;
use wire::PageNo;

use super::file::File;
use super::look::{Lookup, candidates};
use super::settle::{Wanted, make_frames_of, settle};
use crate::core::content::index::{ClientId, Place, Sighting};
use crate::core::merge::pass::Steps;
use crate::core::merge::predict::Prediction;
use crate::world::shared::Shared;

/// How often frames are replaced within a chunk.
const TRIES: usize = 8;

/// The files of one round, by their numbers.
pub(crate) type ByNumber = BTreeMap<ClientId, Arc<File>>;

/// Looks at every candidate of a file once.
/// `Err`: the file is gone, or its mount; or the kernel has no memory.
pub(crate) struct Merge<'a> {
    shared: &'a Shared,
    file: &'a File,
    all: &'a ByNumber,
    lookup: Lookup,
}

/// What comes next in a file.
pub(crate) enum Next {
    Predicted(Vec<Wanted>),
    Candidates(Vec<PageNo>),
}

impl Steps for Merge<'_> {
    type Next = Next;
    type Stop = Errno;

    fn next(&mut self, from: PageNo) -> Result<Option<(Next, u64)>, Errno> {
        let predicted = self.predict(from);
        if !predicted.is_empty() {
            let pages = predicted.len() as u64;
            return Ok(Some((Next::Predicted(predicted), pages)));
        }
        let pages = candidates(self.file, from);
        let count = pages.len() as u64;
        Ok((count > 0).then_some((Next::Candidates(pages), count)))
    }

    fn merge(&mut self, next: Next) -> Result<Option<PageNo>, Errno> {
        let _held = self.file.kernel.hold();
        match next {
            Next::Predicted(wanted) => {
                let wrong = self.merge_all(&wanted)?;
                match wrong {
                    None => self.lookup.prediction.goes_on(),
                    Some(_) => self.lookup.prediction = Prediction::default(),
                }
                Ok(wrong.or(wanted.last().map(|wanted| wanted.page + 1)))
            }
            Next::Candidates(pages) => {
                let found = self.lookup.look_up(self.file, &pages)?;
                let neighbour = self.file.contents.neighbour();
                for there in found.adopted.again {
                    match (self.all.get(&there.client), &neighbour) {
                        (Some(file), _) => file.state().region.restart(there.page),
                        (None, Some(neighbour)) => neighbour.look_again(there),
                        (None, None) => {}
                    }
                }
                if let Some(neighbour) = neighbour {
                    neighbour.sighted(self.shared, &found.new);
                }
                let mut moves = found.adopted.moves;
                if !moves.is_empty() {
                    // Whichever does not go stays where it is.
                    self.file.kernel.merge(self.file.id, &mut moves)?;
                }
                self.merge_all(&found.wanted)?;
                Ok(pages.last().map(|&last| last + 1))
            }
        }
    }
}

impl<'a> Merge<'a> {
    pub(crate) fn new(shared: &'a Shared, file: &'a File, all: &'a ByNumber) -> Self {
        Self { shared, file, all, lookup: Lookup::default() }
    }

    /// The pages from `from` on that are predicted, and with which contents.
    fn predict(&mut self, from: PageNo) -> Vec<Wanted> {
        let mut wanted = Vec::new();
        if self.lookup.prediction.reach(from) == 0 {
            return wanted;
        }
        let (file, mut state) = (self.file, self.file.state());
        self.lookup.prediction.each(from, |page, handle| {
            let place = file.contents.index.get(handle).map(|(_, place)| place);
            let place = place.filter(|&place| place != Place::Sighted(file.sighting(page)));
            let place = place.filter(|_| state.region.predict(page));
            wanted.extend(place.map(|place| Wanted { page, handle, place }));
            place.is_some()
        });
        wanted
    }

    /// Merges pages, which are in ascending order. Returns the first that held another content.
    fn merge_all(&self, wanted: &[Wanted]) -> Result<Option<PageNo>, Errno> {
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
        result.map(|()| wrong)
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
        let mut framed = Vec::new();
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
                        framed.push((wanted.handle, frame));
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
        drop(state);
        contents.framed(&framed);
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
                let (made, result) = make_frames_of(there, pages, frames);
                there.contents.framed(&made);
                result?;
            } else if let Some(neighbour) = self.file.contents.neighbour() {
                neighbour.make_frames(number, pages, frames)?;
            }
        }
        Ok(())
    }
}
