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

use std::collections::{BTreeSet, VecDeque};
use std::sync::OnceLock;
use std::sync::atomic::{AtomicU64, Ordering::*};

use kmem::atomics::AtomicWords;
use sdtree::{Handle, Insert, KeySource, SdTree};
use wire::{PageNo, RegionId};

use crate::core::content::frame::Frame;
use crate::sync::Mutex;

/// Slots in a chunk, which is allocated as a whole: 1 MiB.
const CHUNK: u32 = 1 << 16;
/// Chunks at most: 2^30 contents, as many as a ledger's entry can name.
const CHUNKS: u32 = 1 << 14;
/// A freed slot is reused only when this many more of its chunk have been freed, or all.
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

struct Slot<'s> {
    digest: &'s AtomicU64,
    place: &'s AtomicU64,
}

struct Slots {
    chunks: Box<[OnceLock<AtomicWords>]>,
    unused: Mutex<Unused>,
}

/// Slots that can be taken, and those that soon can.
#[derive(Default)]
struct Unused {
    chunks: Vec<UnusedOf>,
    /// Chunks of which one can be taken.
    ready: BTreeSet<u32>,
}

/// Those of a chunk.
#[derive(Default)]
struct UnusedOf {
    /// The first that was not taken since the chunk was given back.
    fresh: u32,
    /// The oldest first.
    freed: VecDeque<u16>,
}

impl UnusedOf {
    fn is_ready(&self) -> bool {
        self.fresh < CHUNK || self.freed.len() > QUARANTINE
    }
}

impl Slots {
    fn get(&self, handle: u32) -> Option<Slot<'_>> {
        let words = self.chunks.get((handle / CHUNK) as usize)?.get()?;
        let [digest, place] = words.as_chunks::<2>().0.get((handle % CHUNK) as usize)?;
        Some(Slot { digest, place })
    }

    fn take(&self) -> Option<u32> {
        let Unused { chunks, ready } = &mut *self.unused.lock();
        let chunk = ready.first().copied().unwrap_or(chunks.len() as u32);
        if chunk as usize == chunks.len() {
            let place = self.chunks.get(chunk as usize)?;
            let _ = place.set(AtomicWords::new(2 * CHUNK as usize).ok()?);
            chunks.push(UnusedOf::default());
        }
        let of_chunk = &mut chunks[chunk as usize];
        let slot = if of_chunk.freed.len() > QUARANTINE { of_chunk.freed.pop_front().map(u32::from) } else { None };
        let slot = slot.unwrap_or_else(|| {
            of_chunk.fresh += 1;
            of_chunk.fresh - 1
        });
        if of_chunk.is_ready() {
            ready.insert(chunk)
        } else {
            ready.remove(&chunk)
        };
        Some(chunk * CHUNK + slot)
    }

    /// A chunk without a used slot gives its memory back.
    fn give_back(&self, handle: u32) {
        let Unused { chunks, ready } = &mut *self.unused.lock();
        let chunk = handle / CHUNK;
        let of_chunk = &mut chunks[chunk as usize];
        of_chunk.freed.push_back((handle % CHUNK) as u16);
        if of_chunk.freed.len() == CHUNK as usize {
            *of_chunk = UnusedOf::default();
            self.chunks[chunk as usize].get().into_iter().for_each(AtomicWords::give_back);
        }
        if of_chunk.is_ready() {
            ready.insert(chunk);
        }
    }

    fn bytes(&self) -> u64 {
        let used = self.unused.lock().chunks.iter().filter(|of_chunk| of_chunk.fresh > 0).count();
        used as u64 * u64::from(CHUNK) * 16
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
        Self { tree: SdTree::new(Slots { chunks, unused: Mutex::default() }) }
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
        self.tree.stats().bytes + self.slots().bytes()
    }
}

#[cfg(test)]
mod tests;
