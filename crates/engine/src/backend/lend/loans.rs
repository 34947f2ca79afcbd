//! Loans: which slots of stores the kernel lends as frames, one for each content.
//!
//! A store's slot is merged with no frame: it *becomes* the frame, and stays where it is. So one
//! slot of each content is lent, and another slot with the same bytes is left alone until that one
//! is gone. Where the files had a frame of the content before, or a page that was sighted, their
//! pages are to *join* the lent frame; that is done at the end of the round ([`super::join`]).

use std::collections::{BTreeMap, HashMap, HashSet};
use std::sync::Arc;

use rustix::io::Errno;
use wire::PageNo;

use crate::backend::module::contents::Contents;
use crate::backend::module::file::{File, Kind};
use crate::backend::module::look::{Lookup, candidates};
use crate::backend::module::settle::{become_frames, settle};
use crate::core::content::index::{ClientId, Place, Sighting};
use crate::core::merge::pass::Steps;
use crate::sync::{Mutex, RwLock};

/// Rounds in which pages are asked to join a frame, at most: some are held all the time.
const ROUNDS: u8 = 8;

/// A slot that is lent, or about to be.
struct Loan {
    slot: Sighting,
    /// The handle of the kernel's frame, when it is lent.
    frame: Option<u64>,
}

/// What stores lend to the files of a domain.
#[derive(Default)]
pub(super) struct Loans {
    /// By the handles of the contents.
    loans: Mutex<HashMap<u32, Loan>>,
    /// Contents whose pages are to join the lent frame, and the rounds in which they were asked.
    joins: Mutex<BTreeMap<u32, u8>>,
    segments: RwLock<HashSet<ClientId>>,
}

impl Loans {
    pub(super) fn open(&self, segment: ClientId) {
        self.segments.write().insert(segment);
    }

    pub(super) fn close(&self, segment: ClientId) {
        self.segments.write().remove(&segment);
    }

    /// Whether a page is a store's slot.
    pub(super) fn is_slot(&self, there: Sighting) -> bool {
        self.segments.read().contains(&there.client)
    }

    /// The frame that a store lends for this content.
    pub(super) fn frame(&self, handle: u32) -> Option<u64> {
        self.loans.lock().get(&handle)?.frame
    }

    /// The content has this frame, too, which was made of a file's page.
    pub(super) fn has_frame(&self, handle: u32, frame: u64) {
        if self.frame(handle).is_some_and(|lent| lent != frame) {
            self.joins.lock().insert(handle, 0);
        }
    }

    /// Some pages could not join now: they are asked in the next round.
    pub(super) fn join_later(&self, handle: u32, rounds: u8) {
        if rounds + 1 < ROUNDS {
            self.joins.lock().entry(handle).or_insert(rounds + 1);
        }
    }

    /// Takes the contents whose pages are to join, and in how many rounds they were asked before.
    pub(super) fn take_joins(&self) -> BTreeMap<u32, u8> {
        std::mem::take(&mut *self.joins.lock())
    }
}

/// A segment, as a file: its slots are lent, and merged with no frame.
pub(super) type Segment = File<Slots>;

pub(super) struct Slots(pub(super) Arc<Loans>);

impl Kind for Slots {
    fn begin(&self, handle: u32, slot: Sighting) -> bool {
        self.0.loans.lock().entry(handle).or_insert(Loan { slot, frame: None }).slot == slot
    }

    /// This is the content's frame, wherever it was before.
    fn made(&self, contents: &Contents, handle: u32, slot: Sighting, frame: u64) {
        // First: a thread that makes another frame meanwhile looks here last.
        if let Some(loan) = self.0.loans.lock().get_mut(&handle).filter(|loan| loan.slot == slot) {
            loan.frame = Some(frame);
        }
        let index = &contents.index;
        while let Some((_, place)) = index.get(handle).filter(|&(_, place)| place != Place::Below(frame)) {
            if index.change(handle, place, Place::Below(frame)) {
                if place != Place::Sighted(slot) {
                    self.0.joins.lock().insert(handle, 0);
                }
                break;
            }
        }
    }

    fn left(&self, handle: u32, slot: Sighting) {
        let mut loans = self.0.loans.lock();
        if loans.get(&handle).is_some_and(|loan| loan.slot == slot) {
            loans.remove(&handle);
        }
    }
}

/// Looks at every slot that changed once.
/// `Err`: the segment is gone, or the kernel has no memory.
pub(super) struct Lend<'a> {
    segment: &'a Segment,
    loans: &'a Loans,
    lookup: Lookup,
}

impl<'a> Lend<'a> {
    pub(super) fn new(segment: &'a Segment) -> Self {
        Self { segment, loans: &segment.kind.0, lookup: Lookup::default() }
    }
}

impl Steps for Lend<'_> {
    type Next = Vec<PageNo>;
    type Stop = Errno;

    fn next(&mut self, from: PageNo) -> Result<Option<(Vec<PageNo>, u64)>, Errno> {
        let pages = candidates(self.segment, from);
        let count = pages.len() as u64;
        Ok((count > 0).then_some((pages, count)))
    }

    /// Lends slots whose contents are known. Others with these contents join them later.
    fn merge(&mut self, pages: Vec<PageNo>) -> Result<Option<PageNo>, Errno> {
        let (segment, contents) = (self.segment, &self.segment.contents);
        let mut begun = Vec::new();
        for wanted in self.lookup.look_up(segment, &pages)?.wanted {
            let handle = wanted.handle;
            // Two slots and no file's page: the slot that was sighted will be lent if a page comes.
            let is_slot = matches!(wanted.place, Place::Sighted(there) if self.loans.is_slot(there));
            let entered = !is_slot && contents.enter(handle);
            // With a user it stays known, unless it was forgotten before.
            if entered
                && contents.index.get(handle).is_some()
                && segment.kind.begin(handle, segment.sighting(wanted.page))
            {
                begun.push(wanted);
                continue;
            }
            if entered {
                contents.leave(handle);
            }
            // When that slot is gone, this one may be lent.
            settle(segment, &mut segment.state(), wanted, Err(Errno::AGAIN));
        }
        become_frames(segment, begun).1?;
        Ok(pages.last().map(|&last| last + 1))
    }
}
