//! A map as the threads of its cache see it: which pages are resident, and how hot they are.

use std::sync::atomic::{AtomicBool, AtomicU8, AtomicU64, AtomicUsize, Ordering};

use parking_lot::{RwLock, RwLockReadGuard};

use super::window::{self, Window};
use crate::BLOCK;
use crate::objects::mblock::Mblock;

/// Pages of a huge page.
pub(crate) const HUGE_PAGES: usize = window::HUGE / BLOCK;

/// How long unused pages stay in memory.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Temperature {
    /// Forever: the reaper never evicts them.
    Pinned,
    /// A hundred times as long as cold ones.
    Hot,
    /// Ten times as long.
    #[default]
    Warm,
    /// As long as [`crate::Settings::ttl`] says.
    Cold,
}

/// How a map will be read.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Advice {
    /// A fault loads some pages behind the touched one too ([`crate::Settings::read_ahead`]); when
    /// memory is full only if it goes on where the last one ended.
    #[default]
    Normal,
    /// A fault loads one page.
    Random,
    /// A fault loads a megabyte.
    Sequential,
    /// The range is loaded now, as far as there is memory; with huge pages where the kernel can.
    WillNeed,
    /// The range can go now; a huge page that is partly in it goes whole.
    DontNeed,
}

/// One mblock of a map.
pub(crate) struct Placed {
    pub(crate) mblock: Mblock,
    /// Its first page in the window.
    pub(crate) first: usize,
    pub(crate) pages: usize,
    /// Bytes of data.
    pub(crate) len: usize,
}

/// Keeps mblocks from being deleted.
pub(crate) fn hold(placed: &[Placed]) {
    for placed in placed {
        placed.mblock.info.maps.fetch_add(1, Ordering::AcqRel);
    }
}

pub(crate) fn release(placed: &[Placed]) {
    for placed in placed {
        placed.mblock.info.maps.fetch_sub(1, Ordering::AcqRel);
    }
}

/// The state of a map that the threads of its cache work on.
pub(crate) struct MapState {
    pub(crate) window: Window,
    pub(crate) placed: Vec<Placed>,
    pub(crate) pages: usize,
    pub(crate) resident: Box<[AtomicU64]>,
    pub(crate) resident_pages: AtomicUsize,
    pub(crate) heat: Box<[AtomicU8]>,
    pub(crate) temperature: Temperature,
    pub(crate) advice: AtomicU8,
    /// The page behind those that the last fault loaded.
    pub(crate) loaded_to: AtomicUsize,
    /// Half-lives that this map's heat has seen, in units of the reaper's own.
    pub(crate) aged: AtomicU64,
    /// For each aligned part of the size of a huge page, whether it is a huge page.
    pub(crate) huge: Box<[AtomicBool]>,
    /// Held for reading while pages are dropped, for writing while pages are made one.
    pub(crate) shape: RwLock<()>,
    /// Held for reading by the cache's threads while they load or drop pages; `true` once the map
    /// has been dropped.
    pub(crate) gone: RwLock<bool>,
}

impl MapState {
    #[inline]
    pub(crate) fn is_resident(&self, page: usize) -> bool {
        self.resident[page / 64].load(Ordering::Acquire) >> (page % 64) & 1 == 1
    }

    /// Keeps the map while pages of it are loaded or dropped by a thread that has not borrowed it.
    /// `None`: the map is being dropped. Never waits: a thread may hold this for one map
    /// and ask for another.
    pub(crate) fn enter(&self) -> Option<RwLockReadGuard<'_, bool>> {
        self.gone.try_read().filter(|gone| !**gone)
    }

    /// Waits until no thread works on the map any more, and lets none begin.
    pub(crate) fn close(&self) {
        *self.gone.write() = true;
    }

    /// Whether a page is part of a huge page.
    pub(crate) fn is_huge(&self, page: usize) -> bool {
        self.huge.get(page / HUGE_PAGES).is_some_and(|huge| huge.load(Ordering::Acquire))
    }

    /// Counts one more use of a page. Two at the same time may count as one.
    #[inline]
    pub(crate) fn warm(&self, page: usize, by: u8) {
        let heat = &self.heat[page];
        let now = heat.load(Ordering::Relaxed);
        if now < u8::MAX {
            heat.store(now.saturating_add(by), Ordering::Relaxed);
        }
    }

    /// The mblock that a page of the window belongs to.
    pub(crate) fn placed_at(&self, page: usize) -> &Placed {
        &self.placed[self.placed.partition_point(|p| p.first <= page) - 1]
    }
}
