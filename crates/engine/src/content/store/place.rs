//! Where segments are made: as memfds, or on a mount of `pageonefs` for stores.
//!
//! Where a mount with the domain's name is there, its files and the clients share one store: a
//! segment lies on a mount of the same domain that is the store's own. The kernel then lends pages
//! of it to the files ([`crate::files`]). What is lent stays in the segment as it is.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::*};

use kmem::PAGE_SIZE;
use kmem::memfd::{self, StoreFile};
use kmem::pageonefs::{self, StoreMount};
use parking_lot::Mutex;
use rustix::io::Errno;
use wire::SEGMENT_PAGES;

use super::error::GrowError;
use super::ids::Id;

/// Bytes of a segment.
const LEN: usize = SEGMENT_PAGES as usize * PAGE_SIZE;
/// Files that are made, at most, to get one whose number no other segment has.
const TRIES: usize = 10_000;

/// What it takes to lend the slots of a segment.
pub(crate) struct Lending {
    /// The mount that its file lies on; tests have none.
    pub(crate) mount: Option<Arc<StoreMount>>,
    /// The kernel's id of its file.
    pub(crate) file: u64,
    /// Slots that became frames, or lost their last user, since this was taken: a bit each.
    changed: Box<[AtomicU64]>,
}

impl Lending {
    pub(super) fn new(mount: Option<Arc<StoreMount>>, file: u64) -> Self {
        let changed = (0..SEGMENT_PAGES / u64::BITS).map(|_| AtomicU64::new(0)).collect();
        Self { mount, file, changed }
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

/// Where a store makes its segments.
pub(super) struct Ground {
    /// The whole name of the domain.
    domain: String,
    mount: Mutex<OfStore>,
}

/// The mount of a store.
#[derive(Default)]
struct OfStore {
    /// Made when it is needed first.
    mount: Option<Arc<StoreMount>>,
    /// That it could not be made has been told.
    told: bool,
}

impl Ground {
    pub(super) fn new(domain: &str) -> Self {
        Self { domain: domain.into(), mount: Mutex::default() }
    }

    /// Makes the file of a segment. `name`: a memfd's.
    pub(super) fn make(&self, name: &str) -> Result<(Id, StoreFile, Option<Lending>), GrowError> {
        if pageonefs::is_loaded() && has_mount(&self.domain) {
            // Locked until the file has no name any more: the next one has the same.
            let mut of_store = self.mount.lock();
            match of_store.mount(&self.domain).map(|mount| on(&mount, name)) {
                Some(Ok((id, file, lending))) => return Ok((id, file, Some(lending))),
                Some(Err(why)) => tracing::warn!(domain = self.domain, "a segment is lent to no file: {why}"),
                None => {}
            }
        }
        let (id, file) = make(|| Ok(memfd::create_store(name, LEN)?))?;
        Ok((id, file, None))
    }
}

impl OfStore {
    fn mount(&mut self, domain: &str) -> Option<Arc<StoreMount>> {
        if self.mount.is_none() {
            match StoreMount::new(domain) {
                Ok(made) => self.mount = Some(Arc::new(made)),
                Err(why) if !self.told => tracing::warn!(domain, "no segment is lent to files: {why}"),
                Err(_) => {}
            }
            self.told = self.mount.is_none();
        }
        self.mount.clone()
    }
}

/// Whether a mount with this `domain=` is there.
fn has_mount(domain: &str) -> bool {
    let is_one = |info: pageonefs::MountInfo| match pageonefs::Mount::open(&info.path) {
        Ok(mount) => mount.domain() == domain,
        Err(why) => {
            tracing::debug!("{why}");
            false
        }
    };
    !domain.is_empty() && pageonefs::mounts().is_ok_and(|mounts| mounts.into_iter().any(is_one))
}

/// Makes the file of a segment on a mount for stores.
fn on(mount: &Arc<StoreMount>, name: &str) -> Result<(Id, StoreFile, Lending), GrowError> {
    let (id, file) = make(|| Ok(memfd::create_store_in(mount.dir(), name, LEN)?))?;
    let listed = mount.mount().files().map_err(|errno| GrowError::Allocate(errno.into()))?;
    let listed = listed.into_iter().find(|listed| listed.inode == id.get());
    let listed = listed.ok_or(GrowError::Allocate(Errno::NOENT.into()))?;
    Ok((id, file, Lending::new(Some(mount.clone()), listed.id)))
}

/// Makes files until the number of one is no other segment's.
fn make(file: impl Fn() -> Result<StoreFile, GrowError>) -> Result<(Id, StoreFile), GrowError> {
    for _ in 0..TRIES {
        let file = file()?;
        let inode = memfd::identity(&file.reader).map_err(GrowError::Allocate)?.ino;
        if let Some(id) = Id::new(inode) {
            return Ok((id, file));
        }
    }
    Err(GrowError::Allocate(Errno::EXIST.into()))
}

#[cfg(test)]
impl super::Store {
    /// A segment that can be lent to files, of a memfd; `file`: the id of its file.
    pub(crate) fn grow_lendable(&self, file: u64) {
        let (id, store) = make(|| Ok(memfd::create_store("pageone:test", LEN)?)).unwrap();
        let lending = Some(Lending::new(None, file));
        self.add(super::Segment::of(id, super::Memory::Own(store), None, lending)).unwrap();
    }
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
        let ground = Ground::new("a domain that no mount has");
        let (first, _, lending) = ground.make("pageone:test").unwrap();
        assert!(lending.is_none());
        let (second, ..) = ground.make("pageone:test").unwrap();
        assert_ne!(first.get(), second.get());
    }
}
