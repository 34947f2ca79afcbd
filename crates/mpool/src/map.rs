//! mcache maps: any number of mblocks, of any class and size, as one mapping.
//!
//! The mblocks of a map lie one behind the other, each from a page boundary on, in one [`window`].
//! Pages are loaded when they are asked for ([`McacheMap::get`], [`McacheMap::get_pages`],
//! [`McacheMap::advise`]): then the caller's own thread reads them, with no fault at all. Or when
//! they are touched: then a thread of the [`Mcache`] reads them while the touching thread waits.
//!
//! A bit for each page says whether it is resident; a byte, its *heat*, how often it was used
//! lately. Both cover the whole map, so a page's past is still known when it comes back.

pub(crate) mod cache;
mod core;
mod fill;
pub(crate) mod settings;
pub(crate) mod state;
mod window;

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU8, AtomicU64, AtomicUsize, Ordering};

use parking_lot::RwLock;

use crate::BLOCK;
use crate::disk::checksum;
use crate::error::{During, MapError, Object, ObjectError};
use crate::objects::mblock::Mblock;
use crate::pool::Pool;
use cache::{Handle, Mcache};
use fill::Loader;
use state::{Advice, HUGE_PAGES, MapState, Placed, Temperature, hold, release};
use window::{Backing, Window, zeroed_u8, zeroed_u64};

/// A map. Dropping it unmaps it; borrowed slices cannot outlive it.
///
/// A page that cannot be read, or does not match its checksum, is an error of the `get` functions;
/// touching it raises `SIGBUS`, as with a mapped file. A child of `fork(2)` does not have the
/// mapping.
///
/// ```compile_fail
/// # fn f(map: mpool::McacheMap) {
/// let slice = map.mblock(0);
/// drop(map);
/// println!("{}", slice[0]); // It cannot outlive its map.
/// # }
/// ```
pub struct McacheMap {
    pub(crate) inner: Arc<MapState>,
    pub(crate) handle: Arc<Handle>,
}

impl std::fmt::Debug for McacheMap {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let (mblocks, bytes) = (self.inner.placed.len(), self.virtual_bytes());
        f.debug_struct("McacheMap").field("mblocks", &mblocks).field("bytes", &bytes).finish_non_exhaustive()
    }
}

impl Mcache {
    /// Maps committed mblocks as one mapping, for a program that asks before it reads (the `get`
    /// functions). They cannot be deleted while it is there.
    ///
    /// Touching works too. But only what is asked for counts as used: a page that is touched again
    /// and again is evicted, and loaded again. [`Mcache::map_touched`] sees those uses, and
    /// evicting costs it more.
    ///
    /// # Errors
    /// `Empty`; `NotFound`, `NoClass`; `Damaged`: the data file is too short; `Io`: no memory,
    /// descriptor or mapping is left.
    pub fn map(&self, pool: &Pool, ids: &[u64], temperature: Temperature) -> Result<McacheMap, MapError> {
        self.map_backed(pool, ids, temperature, Backing::Anonymous)
    }

    /// As [`Mcache::map`], for a program that reads the slices of [`McacheMap::mblock`] without
    /// asking: uses show in the page tables ([`crate::Settings::watch`]).
    ///
    /// # Errors
    /// Those of [`Mcache::map`].
    pub fn map_touched(&self, pool: &Pool, ids: &[u64], temperature: Temperature) -> Result<McacheMap, MapError> {
        self.map_backed(pool, ids, temperature, Backing::Memfd)
    }

    fn map_backed(
        &self,
        pool: &Pool,
        ids: &[u64],
        temperature: Temperature,
        backing: Backing,
    ) -> Result<McacheMap, MapError> {
        let mut placed = Vec::with_capacity(ids.len());
        let mut pages = 0;
        let mut classes = [const { None }; 3];
        {
            let meta = pool.inner.meta();
            for &id in ids {
                let info = meta.tables.mblocks.get(&id).filter(|info| !info.leaving.load(Ordering::Acquire));
                let info = info.cloned().ok_or(ObjectError::NotFound(Object::Mblock(id)))?;
                let class = &mut classes[info.record.class as usize];
                if class.is_none() {
                    let open = pool.inner.class(info.record.class)?;
                    let len = open.data.len().during("looking at the data of class", info.record.class)?;
                    *class = Some((open, len));
                }
                let Some((class, len)) = class.clone() else { continue };
                if info.extent().end() > len {
                    return Err(ObjectError::from(info.cut_off()).into());
                }
                let (count, len) = (checksum::blocks(info.record.len) as usize, info.record.len as usize);
                placed.push(Placed { mblock: Mblock { info, class }, first: pages, pages: count, len });
                pages += count;
            }
            if pages == 0 {
                return Err(MapError::Empty);
            }
            // Of each page a byte and a bit.
            claims::memory(pages as u64 / 8 * 9).during("mapping", format_args!("{} mblocks", ids.len()))?;
            // Under the lock, so that none of them is deleted in between.
            hold(&placed);
        }
        let core = &self.handle.core;
        let window =
            match Window::new(&core.uffd, pages, backing).during("mapping", format_args!("{} mblocks", ids.len())) {
                Ok(window) => window,
                Err(e) => {
                    release(&placed);
                    return Err(e.into());
                }
            };
        let inner = Arc::new(MapState {
            window,
            placed,
            pages,
            resident: zeroed_u64(pages.div_ceil(64)),
            resident_pages: AtomicUsize::new(0),
            heat: zeroed_u8(pages),
            temperature,
            advice: AtomicU8::new(Advice::Normal as u8),
            loaded_to: AtomicUsize::new(0),
            aged: AtomicU64::new(0),
            huge: (0..pages / HUGE_PAGES).map(|_| AtomicBool::new(false)).collect(),
            shape: RwLock::default(),
            gone: RwLock::new(false),
        });
        core.add(&inner);
        Ok(McacheMap { inner, handle: self.handle.clone() })
    }
}

impl McacheMap {
    fn loader<'a>(&'a self, placed: &'a Placed) -> Loader<'a> {
        Loader { core: &self.handle.core, map: &self.inner, placed }
    }

    fn placed(&self, index: usize, offset: u64, len: u64) -> Result<&Placed, MapError> {
        let placed = self.inner.placed.get(index).ok_or(MapError::Outside { index, offset: 0 })?;
        let inside = offset.checked_add(len).is_some_and(|end| end <= placed.len as u64);
        if inside { Ok(placed) } else { Err(MapError::Outside { index, offset: offset.saturating_add(len) }) }
    }

    /// How many mblocks it shows.
    #[allow(clippy::len_without_is_empty)] // There are no empty maps.
    pub fn len(&self) -> usize {
        self.inner.placed.len()
    }

    /// All data of the mblock at this position of the list. Its first byte is the mblock's base
    /// address.
    ///
    /// Nothing is loaded. Touching a page that is not there waits until a thread of the cache has
    /// read it; where that matters, ask first: [`McacheMap::get`].
    ///
    /// # Panics
    /// When there is no such position.
    pub fn mblock(&self, index: usize) -> &[u8] {
        let placed = &self.inner.placed[index];
        &self.inner.window.bytes()[placed.first * BLOCK..][..placed.len]
    }

    /// Bytes of an mblock, loaded first where need be.
    ///
    /// # Errors
    /// `Outside`; `Damaged`, `Io`.
    #[inline]
    pub fn get(&self, index: usize, offset: u64, len: usize) -> Result<&[u8], MapError> {
        // The ordinary case, short: a part of one page, and it is there.
        let start = offset as usize;
        if let Some(placed) = self.inner.placed.get(index)
            && start < placed.len
            && len <= placed.len - start
            && start % BLOCK + len <= BLOCK
        {
            let page = placed.first + start / BLOCK;
            if self.inner.is_resident(page) {
                self.inner.warm(page, 1);
                return Ok(&self.inner.window.bytes()[placed.first * BLOCK + start..][..len]);
            }
        }
        self.get_any(index, offset, len)
    }

    fn get_any(&self, index: usize, offset: u64, len: usize) -> Result<&[u8], MapError> {
        let placed = self.placed(index, offset, len as u64)?;
        let start = offset as usize;
        let (mut page, last) = (start / BLOCK, (start + len.max(1) - 1) / BLOCK);
        while page <= last && len > 0 {
            let at = placed.first + page;
            self.inner.warm(at, 1);
            if !self.inner.is_resident(at) {
                let missing = (at..=placed.first + last).take_while(|&at| !self.inner.is_resident(at)).count();
                self.loader(placed).load_run(page, missing.max(1))?;
            }
            page += 1;
        }
        Ok(&self.inner.window.bytes()[placed.first * BLOCK + start..][..len])
    }

    /// Loads the pages of these numbers of an mblock, those that are missing several at a time, and
    /// adds them to `out`. The last page of an mblock ends with zeros.
    ///
    /// # Errors
    /// `Outside`; `Damaged`, `Io`.
    pub fn get_pages<'a>(&'a self, index: usize, pages: &[usize], out: &mut Vec<&'a [u8]>) -> Result<(), MapError> {
        let placed = self.placed(index, 0, 0)?;
        let mut missing = Vec::new();
        for &page in pages {
            if page >= placed.pages {
                return Err(MapError::Outside { index, offset: page.saturating_mul(BLOCK) as u64 });
            }
            self.inner.warm(placed.first + page, 1);
            if !self.inner.is_resident(placed.first + page) && !missing.contains(&page) {
                missing.push(page);
            }
        }
        if !missing.is_empty() {
            self.loader(placed).load_scattered(&missing)?;
        }
        let bytes = self.inner.window.bytes();
        out.extend(pages.iter().map(|page| &bytes[(placed.first + page) * BLOCK..][..BLOCK]));
        Ok(())
    }

    /// Says how the map will be read. `Normal`, `Random` and `Sequential` are for all of it;
    /// `WillNeed` and `DontNeed` for `len` bytes from `offset` of an mblock on.
    ///
    /// # Errors
    /// `Outside`; for `WillNeed` those of [`McacheMap::get`].
    pub fn advise(&self, index: usize, offset: u64, len: u64, advice: Advice) -> Result<(), MapError> {
        let placed = self.placed(index, offset, len)?;
        let (first, end) = ((offset / BLOCK as u64) as usize, checksum::blocks(offset + len) as usize);
        match advice {
            Advice::WillNeed => self.loader(placed).load_ahead(first, end - first),
            Advice::DontNeed => {
                self.handle.core.drop_pages(&self.inner, placed.first + first, end - first);
                Ok(())
            }
            _ => {
                self.inner.advice.store(advice as u8, Ordering::Relaxed);
                Ok(())
            }
        }
    }

    /// Drops all of it from memory, pinned pages too.
    pub fn purge(&self) {
        self.handle.core.drop_pages(&self.inner, 0, self.inner.pages);
    }

    /// Bytes of it that are in memory.
    pub fn resident_bytes(&self) -> u64 {
        (self.inner.resident_pages.load(Ordering::Relaxed) * BLOCK) as u64
    }

    /// Bytes of address space that it takes.
    pub fn virtual_bytes(&self) -> u64 {
        (self.inner.pages * BLOCK) as u64
    }
}

impl Drop for McacheMap {
    fn drop(&mut self) {
        self.handle.core.remove(&self.inner);
        // Here, not when the last thread of the cache is done: from now on the mblocks can be
        // deleted.
        release(&self.inner.placed);
    }
}
