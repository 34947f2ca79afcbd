//! A file under management: its ledger, and what it has been through.

use std::sync::Arc;

use kmem::pageonefs::{File as Listed, Plain};
use parking_lot::Mutex;
use wire::{PageNo, RegionId, Run};

use super::contents::Contents;
use super::kernel::Kernel;
use super::owner::Owner;
use crate::client::recycling::Recycling;
use crate::core::content::frame::Frame;
use crate::core::content::index::{ClientId, Sighting};
use crate::core::ledger::{Entry, LedgerError, Region};

/// Sums over a file's life.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Totals {
    pub(crate) scans: u64,
    pub(crate) merged: u64,
    /// Merged pages that were written, or punched.
    pub(crate) unmerged: u64,
    /// Merges that the kernel refused because the content was another.
    pub(crate) differed: u64,
    /// Pages that were punched because their guest had freed them; of guests that are gone.
    pub(crate) recycled: u64,
}

impl std::ops::AddAssign for Totals {
    fn add_assign(&mut self, more: Self) {
        self.scans += more.scans;
        self.merged += more.merged;
        self.unmerged += more.unmerged;
        self.differed += more.differed;
        self.recycled += more.recycled;
    }
}

/// What changes of a file.
pub(crate) struct State {
    /// What is known of its pages. [`Entry::Merged`] holds the *handle* of a content in the index,
    /// where clients' ledgers have a frame of the store: which frame it is, the kernel knows.
    pub(crate) region: Region,
    pub(crate) totals: Totals,
    /// For each word of dirty bits whether the last harvest of it found all of them.
    pub(super) all_written: Vec<bool>,
    /// Why nothing of it is merged.
    pub(crate) plain: Option<Plain>,
    /// The process that has it open.
    pub(crate) owner: Option<Owner>,
    /// Of the guest whose first file this is, if it marks its free pages.
    pub(crate) recycling: Option<Arc<Mutex<Recycling>>>,
}

/// A file under management.
pub(crate) struct File {
    /// The kernel's id.
    pub(super) id: u64,
    /// Its number in the index, below 2^16.
    pub(super) number: ClientId,
    pub(crate) inode: u64,
    /// In bytes; another length makes another file of it.
    pub(super) size: u64,
    pub(super) contents: Arc<Contents>,
    /// It is a segment of a store: its pages are lent, and merged with no frame.
    pub(super) lends: bool,
    pub(super) kernel: Arc<dyn Kernel>,
    state: Mutex<State>,
}

/// An entry of a page that is merged with the content behind this handle.
pub(super) fn merged(handle: u32) -> Entry {
    Entry::Merged(Frame(handle))
}

impl File {
    /// # Errors
    /// There is no memory for its ledger, or it is too long for one.
    pub(super) fn new(
        listed: &Listed,
        number: ClientId,
        contents: Arc<Contents>,
        kernel: Arc<dyn Kernel>,
    ) -> Result<Self, LedgerError> {
        let pages = u32::try_from(listed.size.div_ceil(kmem::PAGE_SIZE as u64)).unwrap_or(u32::MAX);
        let state = State {
            region: Region::new(0, pages)?,
            totals: Totals::default(),
            all_written: vec![false; pages.div_ceil(64) as usize],
            plain: listed.plain(),
            owner: None,
            recycling: None,
        };
        Ok(Self {
            id: listed.id,
            number,
            inode: listed.inode,
            size: listed.size,
            contents,
            lends: false,
            kernel,
            state: Mutex::new(state),
        })
    }

    /// It is a segment of a store.
    pub(super) fn of_store(self) -> Self {
        self.contents.loans.open(self.number);
        Self { lends: true, ..self }
    }

    pub(crate) fn state(&self) -> parking_lot::MutexGuard<'_, State> {
        self.state.lock()
    }

    /// Whether its guest is about to say which of its pages are free: it is not merged yet.
    pub(super) fn is_awaited(&self) -> bool {
        self.state().recycling.as_ref().is_some_and(|recycling| recycling.lock().is_awaited())
    }

    /// The guest of which this is told is gone.
    pub(super) fn untold(&self, recycling: &Arc<Mutex<Recycling>>) {
        self.state().recycling.take_if(|told| Arc::ptr_eq(told, recycling));
    }

    pub(super) fn sighting(&self, page: PageNo) -> Sighting {
        Sighting { client: self.number, region: RegionId(0), page }
    }

    /// Drops what was known of a page. Whether it was merged.
    pub(super) fn drop_entry(&self, page: PageNo, entry: Entry) -> bool {
        match entry {
            Entry::Merged(Frame(handle)) => {
                if self.lends {
                    self.contents.loans.end(handle, self.sighting(page));
                }
                self.contents.leave(handle);
            }
            Entry::Unshared(handle) => self.contents.unsight(handle, self.sighting(page)),
            _ => {}
        }
        matches!(entry, Entry::Merged(_))
    }

    /// These pages hold something else now. Returns how many were merged.
    pub(super) fn forget(&self, state: &mut State, pages: Run) -> u64 {
        let known: Vec<PageNo> = state.region.known(pages).collect();
        let dropped = known.into_iter().filter(|&page| {
            let entry = state.region.set(page, Entry::Fresh);
            self.drop_entry(page, entry)
        });
        dropped.count() as u64
    }

    /// The file is gone.
    pub(super) fn reap(&self) {
        let mut state = self.state();
        let all = state.region.all();
        self.forget(&mut state, all);
        if self.lends {
            self.contents.loans.close(self.number);
        }
    }
}
