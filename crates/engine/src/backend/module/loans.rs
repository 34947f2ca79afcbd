//! Loans: which slots of stores the kernel lends as frames, one for each content.
//!
//! A store's slot is merged with no frame: it *becomes* the frame, and stays where it is. So one
//! slot of each content is lent, and another slot with the same bytes is left alone until that one
//! is gone. Where the files had a frame of the content before, or a page that was sighted, their
//! pages are to *join* the lent frame; that is done at the end of the round ([`super::join`]).

use std::collections::{BTreeMap, HashMap, HashSet};

use kmem::pageonefs::Entry as Pairing;
use parking_lot::{Mutex, RwLock};
use rustix::io::Errno;

use super::contents::Contents;
use super::file::{File, merged};
use super::merge::{Wanted, settle};
use crate::core::content::index::{ClientId, Place, Sighting};
use crate::store::domain::InFiles;

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
    /// The numbers of the stores' files.
    stores: RwLock<HashSet<ClientId>>,
}

impl Loans {
    /// A store's file has this number.
    pub(super) fn open(&self, store: ClientId) {
        self.stores.write().insert(store);
    }

    /// A store's file is gone.
    pub(super) fn close(&self, store: ClientId) {
        self.stores.write().remove(&store);
    }

    /// Whether a page is a store's slot.
    pub(super) fn is_slot(&self, there: Sighting) -> bool {
        self.stores.read().contains(&there.client)
    }

    /// The slot is about to be lent as the frame of this content, which counts it as a user.
    /// `false`: another slot is.
    fn begin(&self, handle: u32, slot: Sighting) -> bool {
        self.loans.lock().entry(handle).or_insert(Loan { slot, frame: None }).slot == slot
    }

    /// The slot is lent, as this frame.
    fn set(&self, handle: u32, slot: Sighting, frame: u64) {
        if let Some(loan) = self.loans.lock().get_mut(&handle).filter(|loan| loan.slot == slot) {
            loan.frame = Some(frame);
        }
    }

    /// The slot stands for the content no more.
    pub(super) fn end(&self, handle: u32, slot: Sighting) {
        let mut loans = self.loans.lock();
        if loans.get(&handle).is_some_and(|loan| loan.slot == slot) {
            loans.remove(&handle);
        }
    }

    /// The frame that a store lends for this content.
    pub(super) fn frame(&self, handle: u32) -> Option<u64> {
        self.loans.lock().get(&handle)?.frame
    }

    fn join(&self, handle: u32) {
        self.joins.lock().insert(handle, 0);
    }

    /// Some pages could not join now: they are asked in the next round.
    pub(super) fn join_later(&self, handle: u32, rounds: u8) {
        if rounds + 1 < ROUNDS {
            self.joins.lock().entry(handle).or_insert(rounds + 1);
        }
    }

    /// Takes the contents whose pages are to join the lent frame, and in how many rounds they were
    /// asked before.
    pub(super) fn take_joins(&self) -> BTreeMap<u32, u8> {
        std::mem::take(&mut *self.joins.lock())
    }
}

impl Contents {
    /// A slot may be lent as the frame of this content now. It counts as a user already.
    pub(super) fn begin_loan(&self, handle: u32, slot: Sighting) -> bool {
        self.loans.begin(handle, slot)
    }

    /// A slot is lent: this is the content's frame, wherever it was before.
    pub(super) fn is_lent(&self, handle: u32, slot: Sighting, frame: u64) {
        // First: a thread that makes another frame meanwhile looks here last.
        self.loans.set(handle, slot, frame);
        while let Some((_, place)) = self.index.get(handle).filter(|&(_, place)| place != Place::Below(frame)) {
            if self.index.change(handle, place, Place::Below(frame)) {
                if place != Place::Sighted(slot) {
                    self.loans.join(handle);
                }
                break;
            }
        }
    }

    /// The content has this frame, too, which was made of a file's page.
    pub(super) fn has_frame(&self, handle: u32, frame: u64) {
        if self.loans.frame(handle).is_some_and(|lent| lent != frame) {
            self.loans.join(handle);
        }
    }
}

impl InFiles for Contents {
    /// A store's slots are no pages of files.
    fn has(&self, digest: u64) -> bool {
        let Some(handle) = self.index.handle_of(digest) else { return false };
        match self.index.place(handle, digest) {
            Some(Place::Sighted(there)) => !self.loans.is_slot(there),
            // A lent slot is a user itself.
            Some(Place::Below(_)) => self.users_of(handle) > u32::from(self.loans.frame(handle).is_some()),
            Some(Place::Frame(_)) | None => false,
        }
    }
}

/// Lends slots of a store, in ascending order, whose contents are known. Others with these contents
/// join them later.
///
/// # Errors
/// The segment is gone, or the kernel has no memory.
pub(super) fn lend(store: &File, wanted: &[Wanted]) -> Result<(), Errno> {
    let contents = &store.contents;
    let (mut slots, mut pairings) = (Vec::new(), Vec::new());
    for &wanted in wanted {
        let Wanted { page, handle, place } = wanted;
        // Two slots and no file's page: the slot that was sighted will be lent if a page comes.
        let is_slot = matches!(place, Place::Sighted(there) if contents.loans.is_slot(there));
        let entered = !is_slot && contents.enter(handle);
        // With a user it stays known, unless it was forgotten before.
        if entered && contents.index.get(handle).is_some() && contents.begin_loan(handle, store.sighting(page)) {
            pairings.push(Pairing::new(page.into(), None));
            slots.push(wanted);
            continue;
        }
        if entered {
            contents.leave(handle);
        }
        // When that slot is gone, this one may be lent.
        settle(store, &mut store.state(), wanted, Err(Errno::AGAIN));
    }
    if slots.is_empty() {
        return Ok(());
    }
    let result = store.kernel.merge(store.id, &mut pairings);
    let mut state = store.state();
    for (wanted, pairing) in slots.into_iter().zip(pairings) {
        let Wanted { page, handle, .. } = wanted;
        match pairing.result() {
            Ok(()) | Err(Errno::EXIST) => {
                contents.is_lent(handle, store.sighting(page), pairing.frame);
                settle(store, &mut state, wanted, Ok(()));
            }
            outcome => {
                if state.region.entry(page) != merged(handle) {
                    contents.loans.end(handle, store.sighting(page));
                }
                contents.leave(handle);
                settle(store, &mut state, wanted, outcome);
            }
        }
    }
    result.map(drop)
}
