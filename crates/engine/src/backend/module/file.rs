//! A file under management: its ledger, and what it has been through.

use std::sync::Arc;

use kmem::pageonefs::{Ask, File as Listed, Plain};
use rustix::io::Errno;
use wire::{PageNo, RegionId, Run};

use super::contents::Contents;
use super::kernel::Kernel;
use super::owner::Owner;
use crate::core::content::index::{ClientId, Content, Place, Sighting};
use crate::core::ledger::{ALL, Entry, PAGES, Sparse};
use crate::core::recycle::state::Recycling;
use crate::sync::Mutex;
use crate::world::headroom::Who;

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
    /// What is known of its pages: which contents they have. Which frame that is, the kernel knows.
    pub(crate) region: Sparse<Content>,
    pub(crate) totals: Totals,
    /// As of the last look: bytes, merged pages, and all pages that are there.
    pub(crate) size: u64,
    pub(crate) merged: u64,
    pub(super) there: u64,
    /// Looks in a row that found no page.
    pub(super) empty: u32,
    /// From this page on the kernel is asked for all that is there, and not only for what was
    /// written: nobody, or another daemon, has asked before.
    pub(crate) asked: u32,
    /// Candidates that the pacer has been told of.
    pub(super) told: u64,
    /// Scans in a row that ended before the file did.
    pub(super) cut: u32,
    pub(crate) plain: Option<Plain>,
    pub(crate) owner: Option<Arc<Owner>>,
    /// Of the guest whose first file this is, if it marks its free pages.
    pub(crate) recycling: Option<Arc<Mutex<Recycling>>>,
}

impl State {
    /// The kernel lists it so now. A file's ledger is bounded by what is there.
    pub(super) fn listed(&mut self, listed: &Listed) {
        (self.size, self.merged) = (listed.size, listed.merged_pages);
        self.there = listed.private_pages + listed.merged_pages;
        self.region.most = self.windows() * PARTS;
    }

    /// Windows of 128 MiB in which a scan may find something. A guest has thousands of pages in
    /// each; who has one page in each pays less for them than it costs to look there.
    pub(super) fn windows(&self) -> usize {
        16 + (self.there / 128) as usize
    }

    /// Why a part of the file is not merged.
    pub(crate) fn unmanaged(&self) -> Option<String> {
        let limit = u64::from(PAGES) * kmem::PAGE_SIZE as u64;
        if self.cut >= CUT {
            Some("only its beginning, as its pages lie scattered over too much of it".into())
        } else if self.size > limit && self.plain.is_none() {
            Some(format!("only its first {} TiB", limit.div_ceil(1 << 40)))
        } else {
            None
        }
    }
}

/// Parts of a ledger in a window of scans.
const PARTS: usize = 16;
/// Scans that were cut in a row, from which on it is told: a file that is filled soon is not.
pub(super) const CUT: u32 = 4;

/// Pages that are digested and merged together: those of one call's result, 4 KiB.
pub(crate) const CHUNK: usize = 512;

/// Whose file it is, and so what else is to be done where its pages become frames.
pub(crate) trait Kind: Send + Sync {
    /// A page is about to become the frame of this content. `false`: another page is that.
    fn begin(&self, handle: u32, there: Sighting) -> bool;

    /// The page is the frame of the content.
    fn made(&self, contents: &Contents, handle: u32, there: Sighting, frame: u64);

    /// The page uses the content no more, or has not become its frame.
    fn left(&self, handle: u32, there: Sighting);
}

/// It is a mount's.
pub(crate) struct Mounted;

impl Kind for Mounted {
    fn begin(&self, _: u32, _: Sighting) -> bool {
        true
    }

    fn made(&self, contents: &Contents, handle: u32, there: Sighting, frame: u64) {
        contents.index.change(handle, Place::Sighted(there), Place::Below(frame));
    }

    fn left(&self, _: u32, _: Sighting) {}
}

pub(crate) struct File<K = Mounted> {
    pub(crate) id: u64,
    /// Its number in the index, below 2^16.
    pub(crate) number: ClientId,
    pub(crate) inode: u64,
    /// Whose it is, as the kernel says.
    pub(super) uid: u32,
    pub(crate) contents: Arc<Contents>,
    pub(crate) kernel: Arc<dyn Kernel>,
    pub(crate) kind: K,
    state: Mutex<State>,
}

impl<K: Kind> File<K> {
    pub(crate) fn new(
        listed: &Listed,
        number: ClientId,
        contents: Arc<Contents>,
        kernel: Arc<dyn Kernel>,
        kind: K,
    ) -> Self {
        let state = State {
            region: Sparse::new(),
            totals: Totals::default(),
            size: 0,
            merged: 0,
            there: 0,
            empty: 0,
            asked: 0,
            told: 0,
            cut: 0,
            plain: listed.plain(),
            owner: None,
            recycling: None,
        };
        let state = Mutex::new(state);
        let file = Self { id: listed.id, number, inode: listed.inode, uid: listed.uid, contents, kernel, kind, state };
        file.state().listed(listed);
        file
    }

    pub(crate) fn state(&self) -> crate::sync::MutexGuard<'_, State> {
        self.state.lock()
    }

    /// Whose it is.
    pub(crate) fn who(&self) -> Who {
        Some(claims::Owner::of(self.uid))
    }

    /// Whether its guest is about to say which of its pages are free: it is not merged yet.
    pub(super) fn is_awaited(&self) -> bool {
        self.state().recycling.as_ref().is_some_and(|recycling| recycling.lock().is_awaited())
    }

    /// The guest of which this is told is gone.
    pub(super) fn untold(&self, recycling: &Arc<Mutex<Recycling>>) {
        self.state().recycling.take_if(|told| Arc::ptr_eq(told, recycling));
    }

    pub(crate) fn sighting(&self, page: PageNo) -> Sighting {
        Sighting { client: self.number, region: RegionId(0), page }
    }

    /// Drops what was known of a page. Whether it was merged.
    pub(crate) fn drop_entry(&self, page: PageNo, entry: Entry<Content>) -> bool {
        match entry {
            Entry::Merged(Content(handle)) => {
                self.kind.left(handle, self.sighting(page));
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

    pub(crate) fn reap(&self) {
        self.forget(&mut self.state(), ALL);
    }

    /// Digests pages within [`CHUNK`] of the first one's word of bits; a word for each.
    pub(super) fn digest(&self, pages: &[PageNo], of: Digests) -> Result<Vec<u64>, Errno> {
        let Some(&first) = pages.first() else { return Ok(Vec::new()) };
        let start = window(first);
        let at = |page: PageNo| (page.0 - start.0) as usize;
        let (mut only, mut out) = ([0u64; CHUNK / 64], [0u64; CHUNK]);
        pages.iter().for_each(|&page| only[at(page) / 64] |= 1 << (at(page) % 64));
        let last = pages.last().map_or(0, |&page| at(page));
        let words = last / 64 + 1;
        let only = Some(&only[..words]);
        let (seed, frames) = (self.contents.seed.get(), of == Digests::All);
        let ask = Ask { id: self.id, start: start.0.into(), only, seed, frames };
        self.kernel.digest(&ask, &mut out[..words * 64])?;
        Ok(pages.iter().map(|&page| out[at(page)]).collect())
    }
}

/// Which pages are digested. Of a merged one the kernel names the frame otherwise.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Digests {
    Private,
    All,
}

/// The first page of those that are digested with this one.
pub(super) fn window(page: PageNo) -> PageNo {
    PageNo(page.0 / 64 * 64)
}
