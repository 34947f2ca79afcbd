//! Where segments are made: as memfds, or in a store of `pageonefs`.
//!
//! Where a mount with the domain's name is there, its files and the clients share one store: its
//! segments are files of the kernel's store of this domain ([`kmem::pageonefs::Store`]). The kernel
//! then lends pages of them to the mount's files ([`crate::backend::module`]). What is lent stays
//! in the segment as it is.

use std::sync::atomic::{AtomicU64, Ordering::*};
use std::sync::{Arc, Weak};

use kmem::PAGE_SIZE;
use kmem::memfd::{self, StoreFile};
use kmem::pageonefs::{self, Mount, Payer, Store as KernelStore};
use rustix::io::Errno;
use wire::{SEGMENT_PAGES, SegmentId};

use crate::sync::Mutex;

use super::error::GrowError;

pub(super) const LEN: usize = SEGMENT_PAGES as usize * PAGE_SIZE;

/// What it takes to lend the slots of a segment.
pub(crate) struct Lending {
    /// The kernel's store that its file is of; tests have none.
    pub(crate) store: Option<Arc<KernelStore>>,
    /// The kernel's id of its file.
    pub(crate) file: u64,
    /// Slots that became frames, or lost their last user, since this was taken: a bit each.
    changed: Box<[AtomicU64]>,
}

impl Lending {
    pub(super) fn new(store: Option<Arc<KernelStore>>, file: u64) -> Self {
        let changed = (0..SEGMENT_PAGES / u64::BITS).map(|_| AtomicU64::new(0)).collect();
        Self { store, file, changed }
    }

    /// Gives a slot memory, if it has none. `payer` pays for it.
    pub(super) fn make(&self, slot: usize, payer: Payer) -> Result<(), GrowError> {
        let made = self.store.as_ref().map_or(Ok(()), |store| store.make(self.file, slot as u64, payer));
        made.map_err(|errno| match errno {
            Errno::NOMEM | Errno::SRCH => GrowError::Payer(errno),
            other => GrowError::Allocate(other.into()),
        })
    }

    /// A slot became a frame, or lost its last user.
    pub(super) fn changes(&self, slot: usize) {
        self.changed[slot / 64].fetch_or(1 << (slot % 64), AcqRel);
    }

    /// Takes the bits of the slots from `start` on, 64 for each word. Returns how many there were.
    pub(crate) fn take_changed(&self, start: u64, bits: &mut [u64]) -> u64 {
        bits.fill(0);
        let words = self.changed.iter().skip((start / 64) as usize);
        bits.iter_mut().zip(words).for_each(|(bits, word)| *bits = word.swap(0, AcqRel));
        bits.iter().map(|word| u64::from(word.count_ones())).sum()
    }
}

pub(super) struct SegmentFiles {
    /// The whole name of the domain.
    domain: String,
    kernel: Mutex<OfKernel>,
}

/// The kernel's store that stands for this one.
#[derive(Default)]
struct OfKernel {
    /// Made when it is needed, and kept by the segments: the module can be unloaded without them.
    store: Weak<KernelStore>,
    /// A warning has said that it cannot be made.
    warned: bool,
}

impl SegmentFiles {
    pub(super) fn new(domain: &str) -> Self {
        Self { domain: domain.into(), kernel: Mutex::default() }
    }

    /// Makes the file of a segment. `name`: a memfd's.
    pub(super) fn make(&self, name: &str) -> Result<(SegmentId, StoreFile, Option<Lending>), GrowError> {
        if let Some(mount) = mount_of(&self.domain) {
            // Locked until the file has no name any more: the next one has the same.
            let mut kernel = self.kernel.lock();
            match kernel.store(&mount).map(|store| lendable(&store, name)) {
                Some(Ok((id, file, lending))) => return Ok((id, file, Some(lending))),
                Some(Err(why)) => tracing::warn!(domain = self.domain, "a segment is lent to no file: {why}"),
                None => {}
            }
        }
        let file = memfd::create_store(name, LEN)?;
        Ok((id(&file)?, file, None))
    }
}

impl OfKernel {
    /// The store of the domain that this mount has.
    fn store(&mut self, mount: &Mount) -> Option<Arc<KernelStore>> {
        if let Some(made) = self.store.upgrade() {
            return Some(made);
        }
        let made = KernelStore::new(mount).map(Arc::new);
        if let (Err(why), false) = (&made, self.warned) {
            tracing::warn!(domain = mount.domain(), "no segment is lent to files: {why}");
        }
        self.warned = made.is_err();
        let made = made.ok()?;
        self.store = Arc::downgrade(&made);
        Some(made)
    }
}

/// A mount with this `domain=`.
fn mount_of(domain: &str) -> Option<Mount> {
    if domain.is_empty() || !pageonefs::is_loaded() {
        return None;
    }
    let mounts = pageonefs::mounts().ok()?.into_iter();
    let mut opened = mounts.filter_map(|info| Mount::open(&info.path).inspect_err(|why| tracing::debug!("{why}")).ok());
    opened.find(|mount| mount.domain() == domain)
}

/// Makes the file of a segment in the kernel's store.
fn lendable(store: &Arc<KernelStore>, name: &str) -> Result<(SegmentId, StoreFile, Lending), GrowError> {
    let file = memfd::create_store_in(store.dir(), name, LEN)?;
    let id = id(&file)?;
    let listed = store.mount().files().map_err(|errno| GrowError::Allocate(errno.into()))?;
    let listed = listed.into_iter().find(|listed| listed.inode == id);
    let listed = listed.ok_or(GrowError::Allocate(Errno::NOENT.into()))?;
    Ok((id, file, Lending::new(Some(store.clone()), listed.id)))
}

/// A file's number, by which clients name its segment. The kernel's are no memfd's.
pub(super) fn id(file: &StoreFile) -> Result<SegmentId, GrowError> {
    Ok(memfd::identity(&file.reader).map_err(GrowError::Allocate)?.ino)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn slots_that_changed_are_told_once() {
        let lending = Lending::new(None, 1);
        [0, 63, 64, 16_383].into_iter().for_each(|slot| lending.changes(slot));
        let mut bits = [0; 2];
        assert_eq!((lending.take_changed(64, &mut bits), bits), (1, [1, 0]));
        let mut bits = [!0; 300];
        assert_eq!(lending.take_changed(0, &mut bits), 3);
        assert_eq!((bits[0], bits[1], bits[255], bits[256]), (1 | 1 << 63, 0, 1 << 63, 0));
        assert_eq!(lending.take_changed(0, &mut bits), 0);
    }

    #[test]
    fn a_domain_without_files_has_memfds() {
        let files = SegmentFiles::new("a domain that no mount has");
        let (first, _, lending) = files.make("pageone:test").unwrap();
        assert!(lending.is_none());
        let (second, ..) = files.make("pageone:test").unwrap();
        assert_ne!(first, second);
    }
}
