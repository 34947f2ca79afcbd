//! The contents that are known: an SD tree over page digests.
//!
//! A key is the 64-bit digest (xxh3, seeded at random) of a page, computed from bytes that were
//! read anyway. So a look-up reads no second process (about 1 µs), and no key changes while it is
//! compared. A digest does not prove equality, and need not: the merge window compares every byte
//! while writers wait. Two contents with one digest cost a missed merge.
//!
//! Behind each key stands a *handle*, a slot here with the digest and the *place* of the content:
//! where a page with it was sighted, or the frame that holds it. The second sighting promotes the
//! place by one compare-and-swap; the tree does not change. Slots are reused, the oldest first,
//! and every reader checks the digest. A late reader sees another content at worst, which the
//! window tells apart.

use std::collections::VecDeque;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering::*};

use parking_lot::Mutex;
use sdtree::{Handle, Insert, KeySource, SdTree};
use wire::{PageNo, RegionId};

use crate::core::content::frame::Frame;

/// Slots in a chunk, which is allocated as a whole: 1 MiB.
const CHUNK: u32 = 1 << 16;
/// Chunks at most: 2^30 contents, as many as a ledger's entry can name.
const CHUNKS: u32 = 1 << 14;
/// A freed slot is reused only when this many more have been freed.
const QUARANTINE: usize = 4096;

/// Number of a client, below [`MAX_CLIENTS`]; given to another when it is gone.
#[repr(transparent)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(crate) struct ClientId(pub(crate) u32);

/// A content that an index knows, by its handle.
#[repr(transparent)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct Content(pub(crate) u32);

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub(crate) struct Sighting {
    /// The client's number, below 2^16.
    pub client: ClientId,
    pub region: RegionId,
    pub page: PageNo,
}

pub(crate) const MAX_CLIENTS: u32 = 1 << 16;
pub(crate) const MAX_REGIONS: u32 = 1 << 12;

/// Where a content is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Place {
    Sighted(Sighting),
    Frame(Frame),
    /// In a frame of the kernel's, by its handle: see [`crate::backend::module`].
    Below(u64),
}

const FRAME: u64 = 1 << 63;
const SIGHTED: u64 = 1 << 62;
const BELOW: u64 = FRAME | SIGHTED;

impl Place {
    fn word(self) -> u64 {
        match self {
            Place::Frame(frame) => FRAME | u64::from(frame.0),
            Place::Sighted(s) => {
                SIGHTED | u64::from(s.client.0) << 44 | u64::from(s.region.0) << 32 | u64::from(s.page)
            }
            Place::Below(handle) => BELOW | handle,
        }
    }

    fn from_word(word: u64) -> Option<Self> {
        let low = word as u32;
        if word & BELOW == BELOW {
            Some(Place::Below(word & !BELOW))
        } else if word & FRAME != 0 {
            Some(Place::Frame(Frame(low)))
        } else if word & SIGHTED != 0 {
            let (client, region) = ((word >> 44) as u32 & (MAX_CLIENTS - 1), (word >> 32) as u32 & (MAX_REGIONS - 1));
            Some(Place::Sighted(Sighting { client: ClientId(client), region: RegionId(region), page: PageNo(low) }))
        } else {
            None
        }
    }
}

#[derive(Default)]
struct Slot {
    digest: AtomicU64,
    place: AtomicU64,
}

struct Slots {
    chunks: Box<[OnceLock<Box<[Slot]>>]>,
    next: AtomicU32,
    freed: Mutex<VecDeque<u32>>,
}

impl Slots {
    fn get(&self, handle: u32) -> Option<&Slot> {
        self.chunks.get((handle / CHUNK) as usize)?.get()?.get((handle % CHUNK) as usize)
    }

    fn take(&self) -> Option<u32> {
        {
            let mut freed = self.freed.lock();
            if freed.len() > QUARANTINE {
                return freed.pop_front();
            }
        }
        let handle = self.next.fetch_add(1, Relaxed);
        if handle >= CHUNK * CHUNKS {
            self.next.fetch_sub(1, Relaxed);
            return None;
        }
        self.chunks[(handle / CHUNK) as usize].get_or_init(|| (0..CHUNK).map(|_| Slot::default()).collect());
        Some(handle)
    }

    fn give_back(&self, handle: u32) {
        self.freed.lock().push_back(handle);
    }
}

impl KeySource for Slots {
    fn with_key<R>(&self, handle: Handle, f: impl FnOnce(Option<&[u8]>) -> R) -> R {
        let digest = self.get(handle.0 as u32).map(|slot| slot.digest.load(Acquire).to_be_bytes());
        f(digest.as_ref().map(|bytes| bytes.as_slice()))
    }
}

/// What a look-up found.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Seen {
    /// It was not known: this sighting stands for it now.
    First(u32),
    /// It was known, under this handle.
    Known(u32),
}

/// The contents that a domain knows.
pub(crate) struct Index {
    tree: SdTree<Slots>,
}

impl Index {
    pub(crate) fn new() -> Self {
        let chunks = (0..CHUNKS).map(|_| OnceLock::new()).collect();
        Self { tree: SdTree::new(Slots { chunks, next: AtomicU32::new(0), freed: Mutex::default() }) }
    }

    fn slots(&self) -> &Slots {
        self.tree.keys()
    }

    /// Looks `digest` up; one that is not known stands for `place` then. `None`: the index is full.
    pub(crate) fn see(&self, digest: u64, place: Place) -> Option<Seen> {
        match self.tree.query(&digest.to_be_bytes()) {
            Some(handle) => Some(Seen::Known(handle.0 as u32)),
            None => self.add(digest, place),
        }
    }

    pub(crate) fn handle_of(&self, digest: u64) -> Option<u32> {
        self.tree.query(&digest.to_be_bytes()).map(|handle| handle.0 as u32)
    }

    /// Looks up neighbours' digests together, so that the tree waits for memory once for many.
    /// `hint`: the likely handle of the first; neighbours' are consecutive, which saves the search.
    pub(crate) fn find(&self, digests: &[u64], hint: u32, found: &mut Vec<Option<u32>>) {
        found.clear();
        found.extend(digests.iter().zip(0..).map(|(&digest, at)| {
            let hint = hint.wrapping_add(at);
            self.is(hint, digest).then_some(hint)
        }));
        let unknown: Vec<usize> = (0..digests.len()).filter(|&at| found[at].is_none()).collect();
        let bytes: Vec<[u8; 8]> = unknown.iter().map(|&at| digests[at].to_be_bytes()).collect();
        let keys: Vec<&[u8]> = bytes.iter().map(|key| key.as_slice()).collect();
        let mut handles = vec![None; keys.len()];
        self.tree.query_many(&keys, &mut handles);
        for (at, handle) in unknown.into_iter().zip(handles) {
            found[at] = handle.map(|handle| handle.0 as u32);
        }
    }

    /// As [`Index::see`] of what was not known a moment ago.
    pub(crate) fn add(&self, digest: u64, place: Place) -> Option<Seen> {
        let handle = self.slots().take()?;
        let slot = self.slots().get(handle)?;
        slot.digest.store(digest, Release);
        slot.place.store(place.word(), Release);
        match self.tree.insert(&digest.to_be_bytes(), Handle(u64::from(handle))) {
            Insert::Inserted => Some(Seen::First(handle)),
            Insert::Exists(known) => {
                slot.place.store(0, Release);
                self.slots().give_back(handle);
                Some(Seen::Known(known.0 as u32))
            }
        }
    }

    /// Whether a handle stands for `digest`: the check of a hint, which saves a search.
    pub(crate) fn is(&self, handle: u32, digest: u64) -> bool {
        self.slots()
            .get(handle)
            .is_some_and(|slot| slot.digest.load(Acquire) == digest && slot.place.load(Acquire) != 0)
    }

    /// Where the content behind a handle is, if the handle still stands for `digest`.
    pub(crate) fn place(&self, handle: u32, digest: u64) -> Option<Place> {
        let slot = self.slots().get(handle)?;
        let place = Place::from_word(slot.place.load(Acquire))?;
        (slot.digest.load(Acquire) == digest).then_some(place)
    }

    /// What a handle stands for: its digest, and where the content is.
    pub(crate) fn get(&self, handle: u32) -> Option<(u64, Place)> {
        let slot = self.slots().get(handle)?;
        Some((slot.digest.load(Acquire), Place::from_word(slot.place.load(Acquire))?))
    }

    /// A content is at another place, unless the handle stands for something else by now.
    pub(crate) fn change(&self, handle: u32, from: Place, to: Place) -> bool {
        let (from, to) = (from.word(), to.word());
        self.slots().get(handle).is_some_and(|s| s.place.compare_exchange(from, to, AcqRel, Acquire).is_ok())
    }

    /// A sighting becomes a frame, unless another promotion came first or it was forgotten.
    pub(crate) fn promote(&self, handle: u32, from: Sighting, to: Frame) -> bool {
        self.change(handle, Place::Sighted(from), Place::Frame(to))
    }

    /// Forgets what a handle stands for, if that is still `place`.
    pub(crate) fn forget(&self, handle: u32, place: Place) -> bool {
        let Some(slot) = self.slots().get(handle) else { return false };
        if slot.place.compare_exchange(place.word(), 0, AcqRel, Acquire).is_err() {
            return false;
        }
        let digest = slot.digest.load(Acquire);
        self.tree.remove(&digest.to_be_bytes(), Handle(u64::from(handle)));
        self.slots().give_back(handle);
        true
    }

    pub(crate) fn len(&self) -> u64 {
        self.tree.len()
    }

    pub(crate) fn bytes(&self) -> u64 {
        let slots = u64::from(self.slots().next.load(Relaxed).div_ceil(CHUNK)) * u64::from(CHUNK) * 16;
        self.tree.stats().bytes + slots
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sighting(page: u32) -> Sighting {
        Sighting { client: ClientId(MAX_CLIENTS - 1), region: RegionId(MAX_REGIONS - 1), page: PageNo(page) }
    }

    #[test]
    fn places_survive_their_word() {
        for place in [Place::Sighted(sighting(u32::MAX)), Place::Sighted(sighting(0)), Place::Frame(Frame(u32::MAX))] {
            assert_eq!(Place::from_word(place.word()), Some(place));
        }
        assert_eq!(Place::from_word(0), None);
    }

    #[test]
    fn the_second_sighting_finds_the_first_and_promotes_it_once() {
        let index = Index::new();
        let Some(Seen::First(handle)) = index.see(42, Place::Sighted(sighting(1))) else { panic!("first") };
        assert_eq!(index.see(42, Place::Sighted(sighting(2))), Some(Seen::Known(handle)));
        assert_eq!(index.place(handle, 42), Some(Place::Sighted(sighting(1))));
        assert_eq!(index.place(handle, 43), None, "another content");
        assert!(index.promote(handle, sighting(1), Frame(5)));
        assert!(!index.promote(handle, sighting(1), Frame(6)), "only once");
        assert_eq!(index.place(handle, 42), Some(Place::Frame(Frame(5))));
        assert!(!index.forget(handle, Place::Sighted(sighting(1))), "it is a frame now");
        assert!(index.forget(handle, Place::Frame(Frame(5))));
        assert!(matches!(index.see(42, Place::Sighted(sighting(3))), Some(Seen::First(_))));
    }

    #[test]
    fn neighbours_are_found_together() {
        let index = Index::new();
        for digest in 10..20u64 {
            index.see(digest * 3, Place::Sighted(sighting(digest as u32)));
        }
        let digests: Vec<u64> = [30, 33, 34, 39, 57, 0].into();
        let mut found = Vec::new();
        for hint in [0, 1, 7, u32::MAX - 1] {
            index.find(&digests, hint, &mut found);
            assert_eq!(found, [Some(0), Some(1), None, Some(3), Some(9), None], "hint {hint}");
        }
    }

    #[test]
    fn a_freed_handle_is_not_reused_at_once() {
        let index = Index::new();
        let Some(Seen::First(handle)) = index.see(1, Place::Sighted(sighting(1))) else { panic!("first") };
        assert!(index.forget(handle, Place::Sighted(sighting(1))));
        for digest in 2..100 {
            assert_ne!(index.see(digest, Place::Sighted(sighting(1))), Some(Seen::First(handle)));
        }
    }
}
