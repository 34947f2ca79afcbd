//! What the files of a domain hold: an index of digests, and how many pages use each content.
//! Clients of a domain of the same name lend them frames ([`crate::backend::lend`]).

use std::collections::{BTreeMap, HashMap};
use std::sync::atomic::{AtomicU32, Ordering::*};
use std::sync::{Arc, OnceLock, Weak};

use rustix::io::Errno;
use wire::PageNo;

use crate::core::content::index::{ClientId, Index, Place, Sighting};
use crate::core::content::seed::Seed;
use crate::sync::Mutex;
use crate::world::shared::Shared;

/// Counts in a chunk, which is allocated as a whole: 256 KiB.
const CHUNK: u32 = 1 << 16;
/// Chunks at most: as many contents as the index can have.
const CHUNKS: usize = 1 << 14;
/// The content is being forgotten: nobody may use it any more.
const LEAVING: u32 = u32::MAX;

/// What the other back end does about what files hold. Each call is about many pages.
pub(crate) trait Neighbour: Send + Sync {
    /// Contents with these digests are new in files.
    fn sighted(&self, shared: &Shared, digests: &[u64]);

    /// This page, which is no file's, is to be looked at again.
    fn look_again(&self, there: Sighting);

    /// These contents, by their handles, have these frames, which were made of files' pages.
    fn framed(&self, frames: &[(u32, u64)]);

    /// Makes frames of pages that are no file's, and enters them. Each was sighted with the content
    /// behind its handle.
    /// `Err`: the segment is gone, or the kernel has no memory.
    fn make_frames(
        &self,
        number: ClientId,
        pages: BTreeMap<PageNo, u32>,
        frames: &mut HashMap<u32, u64>,
    ) -> Result<(), Errno>;
}

pub(crate) struct Contents {
    pub(crate) index: Index,
    /// Pages that use each content, by its handle.
    users: Box<[OnceLock<Box<[AtomicU32]>>]>,
    /// Of the digests: that of the clients' domain with the same name.
    pub(crate) seed: Seed,
    /// The clients of the domain with the same name.
    neighbour: Mutex<Option<Weak<dyn Neighbour>>>,
}

impl Contents {
    pub(crate) fn new(seed: Seed) -> Self {
        Self {
            index: Index::new(),
            users: (0..CHUNKS).map(|_| OnceLock::new()).collect(),
            seed,
            neighbour: Mutex::default(),
        }
    }

    pub(crate) fn set_neighbour(&self, neighbour: Weak<dyn Neighbour>) {
        *self.neighbour.lock() = Some(neighbour);
    }

    pub(super) fn neighbour(&self) -> Option<Arc<dyn Neighbour>> {
        self.neighbour.lock().as_ref()?.upgrade()
    }

    /// These contents, by their handles, have frames that were made of files' pages.
    pub(super) fn framed(&self, frames: &[(u32, u64)]) {
        if let Some(neighbour) = self.neighbour().filter(|_| !frames.is_empty()) {
            neighbour.framed(frames);
        }
    }

    fn users(&self, handle: u32) -> Option<&AtomicU32> {
        let chunk = self.users.get((handle / CHUNK) as usize)?;
        let chunk = chunk.get_or_init(|| (0..CHUNK).map(|_| AtomicU32::new(0)).collect());
        chunk.get((handle % CHUNK) as usize)
    }

    pub(crate) fn users_of(&self, handle: u32) -> u32 {
        let users = self.users(handle).map_or(0, |users| users.load(Acquire));
        if users == LEAVING { 0 } else { users }
    }

    /// One more page uses the content, which then stays. `false`: it is being forgotten just now.
    pub(crate) fn enter(&self, handle: u32) -> bool {
        let more = |users: u32| (users < LEAVING - 1).then(|| users + 1);
        self.users(handle).is_some_and(|users| users.fetch_update(AcqRel, Acquire, more).is_ok())
    }

    /// A page uses the content no more. The last one takes it out of the index, unless it is only
    /// sighted: the kernel has freed its frame, or is about to.
    pub(crate) fn leave(&self, handle: u32) {
        let Some(users) = self.users(handle) else { return };
        let less = |users: u32| match users {
            0 | LEAVING => None,
            1 => Some(LEAVING),
            _ => Some(users - 1),
        };
        if users.fetch_update(AcqRel, Acquire, less) != Ok(1) {
            return;
        }
        // Its frame may be changed for an equal one meanwhile.
        while let Some((_, place @ Place::Below(_))) = self.index.get(handle) {
            if self.index.forget(handle, place) {
                break;
            }
        }
        users.store(0, Release);
    }

    /// The content is not in this page any more. Forgets it, if it stands for this sighting alone.
    pub(super) fn unsight(&self, handle: u32, there: Sighting) {
        let Some(users) = self.users(handle) else { return };
        if users.compare_exchange(0, LEAVING, AcqRel, Acquire).is_ok() {
            self.index.forget(handle, Place::Sighted(there));
            users.store(0, Release);
        }
    }

    pub(crate) fn bytes(&self) -> u64 {
        let chunks = self.users.iter().filter(|chunk| chunk.get().is_some()).count() as u64;
        self.index.bytes() + chunks * u64::from(CHUNK) * size_of::<AtomicU32>() as u64
    }
}

#[cfg(test)]
mod tests;
