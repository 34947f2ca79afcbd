//! Segments of stores, as files: their frames are lent to the files of mounts.
//!
//! Where clients and mounts have a domain of one name, the store's segments are files of the
//! kernel's ([`crate::store`]). They take part in rounds as the others do: a slot that
//! changed is scanned, digested and looked up. What differs is here: the daemon itself knows which
//! slots changed, and only slots that are frames are looked at. A frame has a user more while the
//! kernel is told to lend it. What was a frame is written once, so what is lent is never written.

use std::sync::{Arc, Weak};

use kmem::PAGE_SIZE;
use kmem::pageonefs::{Ask, Entry, File as Listed, Store};
use rustix::io::Errno;
use wire::{Run, SEGMENT_PAGES};

use super::contents::Contents;
use super::file::File;
use super::kernel::Kernel;
use super::round::free;
use super::{Files, Mount};
use crate::core::content::frame::Frame;
use crate::core::content::index::{ClientId, MAX_CLIENTS};
use crate::store::domain::Domain;
use crate::store::{Lending, Segment};
use crate::world::shared::Shared;

/// The calls on the kernel's store.
struct OnStore(Arc<Store>);

impl Kernel for OnStore {
    fn harvest(&self, id: u64, start: u64, bits: &mut [u64]) -> Result<u64, Errno> {
        self.0.mount().harvest(id, start, bits)
    }

    fn digest(&self, ask: &Ask<'_>, out: &mut [u64]) -> Result<u64, Errno> {
        self.0.mount().digest(ask, out)
    }

    fn merge(&self, id: u64, entries: &mut [Entry]) -> Result<u32, Errno> {
        self.0.mount().merge(id, entries)
    }

    fn punch(&self, _: u64, _: &[Run], _: &mut dyn FnMut(Run)) -> Result<(), Errno> {
        Err(Errno::OPNOTSUPP)
    }
}

/// What the kernel does for a segment. It keeps neither the segment nor its domain.
pub(super) struct StoreKernel {
    domain: Weak<Domain>,
    segment: Weak<Segment>,
    first: Frame,
    calls: Arc<dyn Kernel>,
}

impl StoreKernel {
    /// Of the segment whose first frame this is.
    pub(super) fn new(domain: &Arc<Domain>, first: Frame, segment: &Arc<Segment>, calls: Arc<dyn Kernel>) -> Self {
        Self { domain: Arc::downgrade(domain), segment: Arc::downgrade(segment), first, calls }
    }

    /// The segment, which is not closed as long as the caller keeps it.
    fn segment(&self) -> Result<(Arc<Domain>, Arc<Segment>), Errno> {
        let domain = self.domain.upgrade().ok_or(Errno::SRCH)?;
        // Another may have its place in the store by now.
        let is_it = |segment: &Arc<Segment>| std::ptr::eq(Arc::as_ptr(segment), self.segment.as_ptr());
        let segment = domain.store.segment(self.first).filter(is_it).ok_or(Errno::SRCH)?;
        Ok((domain, segment))
    }
}

impl Kernel for StoreKernel {
    fn harvest(&self, _: u64, start: u64, bits: &mut [u64]) -> Result<u64, Errno> {
        let (_domain, segment) = self.segment()?;
        segment.lending().map(|lending| lending.take_changed(start, bits)).ok_or(Errno::SRCH)
    }

    /// Slots that are no frames are not looked at.
    fn digest(&self, ask: &Ask<'_>, out: &mut [u64]) -> Result<u64, Errno> {
        let (_domain, segment) = self.segment()?;
        let mut only = vec![0u64; out.len().div_ceil(64)];
        for (at, word) in only.iter_mut().enumerate() {
            let asked = ask.only.map_or(!0, |asked| asked.get(at).copied().unwrap_or_default());
            let is_frame = |bit: &usize| segment.is_frame(ask.start as usize + at * 64 + bit);
            *word = (0..64).filter(|bit| asked >> bit & 1 == 1).filter(is_frame).fold(0, |word, bit| word | 1 << bit);
        }
        out.fill(0);
        if only.iter().all(|&word| word == 0) {
            return Ok(0);
        }
        self.calls.digest(&Ask { only: Some(&only), ..*ask }, out)
    }

    fn merge(&self, id: u64, entries: &mut [Entry]) -> Result<u32, Errno> {
        let (domain, _segment) = self.segment()?;
        let frame = |entry: &Entry| Frame(self.first.0 + entry.index as u32);
        let is_held = |&at: &usize| domain.store.try_ref(frame(&entries[at]));
        let held: Vec<usize> = (0..entries.len()).filter(is_held).collect();
        let mut lent: Vec<Entry> = held.iter().map(|&at| entries[at]).collect();
        let result = if lent.is_empty() { Ok(0) } else { self.calls.merge(id, &mut lent) };
        for (at, entry) in held.into_iter().zip(lent) {
            domain.release(frame(&entry), false);
            entries[at] = entry;
        }
        result
    }

    fn punch(&self, id: u64, runs: &[Run], punched: &mut dyn FnMut(Run)) -> Result<(), Errno> {
        self.calls.punch(id, runs, punched)
    }
}

/// A segment that is there now.
struct Found {
    domain: Arc<Domain>,
    contents: Arc<Contents>,
    first: Frame,
    segment: Arc<Segment>,
}

impl Files {
    /// Takes in the segments that can be lent to files, and lets those go that are gone.
    pub(super) fn find_stores(&self, shared: &Shared) {
        let mut found = self.lendable(shared);
        let mut gone = Vec::new();
        let mut state = self.state.lock();
        let mut numbers = state.numbers();
        state.stores.retain(|&id, file| {
            let same = |found: &Found| {
                found.segment.lending().is_some_and(|lending| lending.file == id)
                    && Arc::ptr_eq(&found.contents, &file.contents)
            };
            let here = found.iter().position(same).map(|at| found.swap_remove(at)).is_some();
            if !here {
                gone.push(file.clone());
            }
            here
        });
        for found in found {
            let Some(Lending { store: Some(kernel), file: id, .. }) = found.segment.lending() else { continue };
            let Some(number) = free(&mut numbers) else {
                tracing::warn!("more than {MAX_CLIENTS} files: a store is not lent to the others");
                break;
            };
            match store(&found, number, *id, Arc::new(OnStore(kernel.clone()))) {
                Ok(file) => drop(state.stores.insert(*id, Arc::new(file))),
                Err(why) => tracing::warn!("a segment is not lent to files: {why}"),
            }
        }
        drop(state);
        gone.iter().for_each(|file| file.reap());
    }

    /// Segments of domains that have the name of a mount's. These domains are told of the files.
    fn lendable(&self, shared: &Shared) -> Vec<Found> {
        let of_mounts: Vec<(String, Arc<Contents>)> = {
            let state = self.state.lock();
            let of = |mount: &Mount| (mount.point.domain().to_owned(), mount.contents.clone());
            state.mounts.values().map(of).filter(|(name, _)| !name.is_empty()).collect()
        };
        let mut found = Vec::new();
        for domain in shared.domains() {
            let name = domain.key.to_string();
            let contents = of_mounts.iter().find(|(of_mount, _)| *of_mount == name).map(|(_, contents)| contents);
            let Some(contents) = contents else {
                domain.set_files(None);
                continue;
            };
            let files: Weak<Contents> = Arc::downgrade(contents);
            domain.set_files(Some(files));
            contents.set_clients(&domain);
            for (first, segment) in domain.store.lendable() {
                found.push(Found { domain: domain.clone(), contents: contents.clone(), first, segment });
            }
        }
        found
    }
}

/// A segment, as a file.
fn store(
    found: &Found,
    number: ClientId,
    id: u64,
    calls: Arc<dyn Kernel>,
) -> Result<File, crate::core::ledger::LedgerError> {
    let Found { domain, contents, first, segment } = found;
    let mut listed = Listed::default();
    (listed.id, listed.inode, listed.size) = (id, segment.id, u64::from(SEGMENT_PAGES) * PAGE_SIZE as u64);
    let kernel = Arc::new(StoreKernel::new(domain, *first, segment, calls));
    let file = File::new(&listed, number, contents.clone(), kernel)?.of_store();
    // What changed before was told to another file, or to none.
    segment.changes_all();
    Ok(file)
}
