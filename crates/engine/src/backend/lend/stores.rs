//! Segments of stores, as files: their frames are lent to the files of mounts.
//!
//! Where clients and mounts have a domain of one name, the store's segments are files of the
//! kernel's ([`crate::store`]). They take part in rounds as the others do: a slot that
//! changed is scanned, digested and looked up. What differs is here: the daemon itself knows which
//! slots changed, and only slots that are frames are looked at. A frame has a user more while the
//! kernel is told to lend it. What was a frame is written once, so what is lent is never written.

use std::sync::{Arc, Weak};

use kmem::PAGE_SIZE;
use kmem::pageonefs::{Ask, Bits, Entry, File as Listed, Harvest, Store};
use rustix::io::Errno;
use wire::{Run, SEGMENT_PAGES};

use super::bridge::Bridge;
use super::loans::{Segment as Slots, Slots as OfStore};
use crate::backend::module::file::File;
use crate::backend::module::kernel::Kernel;
use crate::backend::module::mounts::Files;
use crate::core::content::frame::Frame;
use crate::core::content::index::{ClientId, MAX_CLIENTS};
use crate::core::ledger::PAGES;
use crate::store::domain::Domain;
use crate::store::{Lending, Segment};
use crate::world::shared::Shared;

/// The calls on the kernel's store.
impl Kernel for Store {
    fn harvest(&self, id: u64, start: u64, of: Bits, bits: &mut [u64]) -> Result<Harvest, Errno> {
        self.mount().harvest(id, start, of, bits)
    }

    fn digest(&self, ask: &Ask<'_>, out: &mut [u64]) -> Result<u64, Errno> {
        self.mount().digest(ask, out)
    }

    fn merge(&self, id: u64, entries: &mut [Entry]) -> Result<u32, Errno> {
        self.mount().merge(id, entries)
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
    fn harvest(&self, _: u64, start: u64, of: Bits, bits: &mut [u64]) -> Result<Harvest, Errno> {
        let (_domain, segment) = self.segment()?;
        if of == Bits::All {
            segment.changes_all();
        }
        let dirty = segment.lending.as_ref().map(|lending| lending.take_changed(start, bits)).ok_or(Errno::SRCH)?;
        // A segment has fewer pages than a call is for.
        Ok(Harvest { dirty, next: u64::MAX })
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
            domain.release(frame(&entry));
            entries[at] = entry;
        }
        result
    }

    fn punch(&self, id: u64, runs: &[Run], punched: &mut dyn FnMut(Run)) -> Result<(), Errno> {
        self.calls.punch(id, runs, punched)
    }
}

/// The bridges between domains and mounts, as of the last look.
#[derive(Default)]
pub(super) struct Stores {
    bridges: Vec<Arc<Bridge>>,
}

impl Stores {
    pub(super) fn bridges(&self) -> &[Arc<Bridge>] {
        &self.bridges
    }

    /// The segments that are lent, of all domains.
    pub(super) fn segments(&self) -> impl Iterator<Item = Arc<Slots>> {
        self.bridges.iter().flat_map(|bridge| bridge.segments.read().values().cloned().collect::<Vec<_>>())
    }

    pub(super) fn pages_lent(&self) -> u64 {
        self.segments().map(|segment| segment.state().region.counts().merged).sum()
    }

    /// Domains that have the name of a mount's are bridged. Takes in their segments that can be
    /// lent to files, and lets those go that are gone.
    pub(super) fn find(&mut self, files: &Files, shared: &Shared) {
        let of_mounts = files.domains();
        let pairs: Vec<_> = shared
            .domains()
            .into_iter()
            .filter_map(|domain| {
                let contents = of_mounts.get(&domain.key.to_string())?.clone();
                Some((contents, domain))
            })
            .collect();
        self.bridges.retain(|bridge| {
            let stays = pairs.iter().any(|(contents, domain)| bridge.is_between(contents, domain));
            if !stays {
                bridge.update(files, Vec::new());
            }
            stays
        });
        for (contents, domain) in pairs {
            let known = self.bridges.iter().find(|bridge| bridge.is_between(&contents, &domain)).cloned();
            let bridge = known.unwrap_or_else(|| {
                let bridge = Bridge::new(contents, &domain);
                self.bridges.push(bridge.clone());
                bridge
            });
            let found = |(first, segment): (Frame, Arc<Segment>)| {
                let Some(Lending { store: Some(kernel), file, .. }) = &segment.lending else { return None };
                let (kernel, file) = (kernel.clone(), *file);
                Some(Found { domain: domain.clone(), first, segment, kernel, file })
            };
            bridge.update(files, domain.store.lendable().into_iter().filter_map(found).collect());
        }
    }
}

struct Found {
    domain: Arc<Domain>,
    first: Frame,
    segment: Arc<Segment>,
    kernel: Arc<Store>,
    file: u64,
}

impl Bridge {
    /// These are the segments that can be lent now.
    fn update(&self, files: &Files, mut found: Vec<Found>) {
        let mut gone = Vec::new();
        let mut segments = self.segments.write();
        segments.retain(|_, slots| {
            let same = |found: &Found| found.file == slots.id;
            let here = found.iter().position(same).map(|at| found.swap_remove(at)).is_some();
            if !here {
                gone.push(slots.clone());
            }
            here
        });
        for found in found {
            let Some(number) = files.take_number() else {
                tracing::warn!("more than {MAX_CLIENTS} files: a store is not lent to the others");
                break;
            };
            segments.insert(number, Arc::new(self.slots(&found, number)));
        }
        drop(segments);
        for slots in gone {
            slots.reap();
            self.loans.close(slots.number);
            files.give_number_back(slots.number);
        }
    }

    fn slots(&self, found: &Found, number: ClientId) -> Slots {
        let Found { domain, first, segment, kernel, file } = found;
        let mut listed = Listed::default();
        (listed.id, listed.inode, listed.size) = (*file, segment.id, u64::from(SEGMENT_PAGES) * PAGE_SIZE as u64);
        let slots = self.open(&listed, number, Arc::new(StoreKernel::new(domain, *first, segment, kernel.clone())));
        // What changed before was told to another file, or to none.
        segment.changes_all();
        slots
    }

    /// A file whose pages are slots.
    pub(super) fn open(&self, listed: &Listed, number: ClientId, kernel: Arc<dyn Kernel>) -> Slots {
        let slots = File::new(listed, number, self.contents.clone(), kernel, OfStore(self.loans.clone()));
        // The slots that are frames have bits from the beginning.
        slots.state().asked = PAGES;
        self.loans.open(number);
        slots
    }
}
