//! The pages of a pool as ONE's objects: those in data mblocks, and those of the data mblock that
//! is being filled.
//!
//! ONE finds a page by its hash and reads it only to compare it. Then all pages needed from its
//! *chunk* are read at once ([`Pages::bring`]). A page that cannot be read counts as lost and is
//! stored again. Pages are not removed one by one: a data mblock is removed when no checkpoint's
//! map names any of its pages.

use std::cell::RefCell;
use std::io::IoSlice;
use std::ops::Range;

use mpool::{AlignedBuf, Allocation, BLOCK, MblockWriter, ObjectError, Pool};
use one::{ObjectId, ObjectStore, One};

use super::{HASH, PAGES, PageFlaw};

/// Pages of a data mblock that are read at once for comparing, at most: 1 MiB. A divisor of 65536.
const CHUNK: usize = 256;

/// A data mblock that is being filled. It has its identity from the start, so that the map can name
/// its pages.
struct OpenData {
    writer: MblockWriter,
    /// Buffers of [`CHUNK`] pages, allocated when needed: most second checkpoints need one.
    bytes: Vec<AlignedBuf>,
    pages: usize,
    hashes: Vec<u128>,
}

impl OpenData {
    fn page(&self, number: usize) -> &[u8] {
        &self.bytes[number / CHUNK][number % CHUNK * BLOCK..][..BLOCK]
    }
}

#[derive(Default)]
struct State {
    /// The place of each object, see [`Pages::place`].
    places: Vec<u64>,
    open: Option<OpenData>,
    /// Identity and number of pages of each filled data mblock.
    filled: Vec<(u64, u32)>,
    /// The pages read last for comparing, and their places.
    cache: Option<AlignedBuf>,
    cached: Range<u64>,
    /// Data mblocks that could not be read in part, and why.
    damaged: Vec<(u64, PageFlaw)>,
    /// Why the last page asked for was not read, other than damage.
    failed: Option<ObjectError>,
}

/// The store of ONE.
pub(super) struct Pages {
    pool: Pool,
    state: RefCell<State>,
}

impl State {
    fn open_page(&self, at: u64) -> Option<&[u8]> {
        let open = self.open.as_ref().filter(|open| open.writer.id() == at >> 16)?;
        Some(open.page((at & 0xFFFF) as usize))
    }

    fn page(&self, at: u64) -> Option<&[u8]> {
        self.open_page(at).or_else(|| {
            let start = self.cached.contains(&at).then(|| (at - self.cached.start) as usize * BLOCK)?;
            self.cache.as_ref()?.get(start..start + BLOCK)
        })
    }

    /// Caches the pages `first..=last` of one chunk; if they are damaged, none of them.
    fn fetch(&mut self, pool: &Pool, first: u64, last: u64) -> Result<(), ObjectError> {
        self.cached = 0..0;
        let cache = self.cache.get_or_insert_with(|| AlignedBuf::zeroed(CHUNK * BLOCK));
        let len = (last - first + 1) as usize * BLOCK;
        let mblock = pool.mblock(first >> 16)?;
        match mblock.read((first & 0xFFFF) * BLOCK as u64, &mut cache[..len]) {
            Ok(()) => self.cached = first..last + 1,
            Err(e @ ObjectError::Damaged(_)) => self.damaged.push((first >> 16, e.into())),
            Err(e) => return Err(e),
        }
        Ok(())
    }
}

/// The hashes of a data mblock's pages.
fn hashes(pool: &Pool, id: u64, pages: u32) -> Result<Vec<u8>, PageFlaw> {
    let mblock = pool.mblock(id)?;
    let (expected, is) = (u64::from(pages) * (BLOCK + HASH) as u64, mblock.props().len);
    if expected != is || pages as usize > PAGES {
        return Err(PageFlaw::Length { mblock: id, is, expected, pages });
    }
    let mut hashes = vec![0; pages as usize * HASH];
    mblock.read(u64::from(pages) * BLOCK as u64, &mut hashes)?;
    Ok(hashes)
}

/// ONE over the pages of these data mblocks, given by identity and number of pages. Reads only
/// their hashes.
pub(super) fn open(pool: &Pool, data: &[(u64, u32)]) -> One<Pages> {
    let mut damaged = Vec::new();
    let mut places = Vec::with_capacity(data.iter().map(|(_, pages)| PAGES.min(*pages as usize)).sum());
    // The latest last: a page that was damaged and stored again is found at its new place.
    let known = data.iter().flat_map(|&(id, pages)| {
        let hashes = hashes(pool, id, pages).unwrap_or_else(|e| {
            damaged.push((id, e));
            Vec::new()
        });
        let count = hashes.len() / HASH;
        places.extend((0..count as u64).map(|page| id << 16 | page));
        (0..count).map(move |i| u128::from_le_bytes(std::array::from_fn(|byte| hashes[i * HASH + byte])))
    });
    let one = One::over(Pages { pool: pool.clone(), state: RefCell::default() }, known);
    let mut state = one.store().state.borrow_mut();
    (state.places, state.damaged) = (places, damaged);
    drop(state);
    one
}

impl Pages {
    /// The place of an object: the data mblock's identity and the page in it, `id << 16 | page`.
    pub(super) fn place(&self, object: ObjectId) -> u64 {
        self.state.borrow().places[object.0 as usize]
    }

    /// Whether an object is in the data mblock that is being filled.
    pub(super) fn is_open(&self, object: ObjectId) -> bool {
        self.state.borrow().open_page(self.place(object)).is_some()
    }

    /// Caches the first of these objects and all others in its chunk, unless it is cached. The
    /// objects are sorted.
    pub(super) fn bring(&self, mut objects: impl Iterator<Item = ObjectId>) -> Result<(), ObjectError> {
        let Some(first) = objects.next().map(|object| self.place(object)) else { return Ok(()) };
        let mut state = self.state.borrow_mut();
        if state.page(first).is_some() {
            return Ok(());
        }
        let others = objects.map(|object| state.places[object.0 as usize]);
        let in_chunk = others.take_while(|at| at / CHUNK as u64 == first / CHUNK as u64);
        let last = in_chunk.fold(first, u64::max);
        state.fetch(&self.pool, first, last)
    }

    /// Adds the hash of the page that was put last. Writes and commits the data mblock if it is
    /// full.
    pub(super) fn put_hash(&self, hash: u128) -> Result<(), ObjectError> {
        let is_full = self.state.borrow_mut().open.as_mut().is_some_and(|open| {
            open.hashes.push(hash);
            open.hashes.len() == PAGES
        });
        if is_full && let Some(writer) = self.finish()? {
            writer.commit()?;
        }
        Ok(())
    }

    /// Writes the data mblock that is being filled, but does not commit it.
    pub(super) fn finish(&self) -> Result<Option<MblockWriter>, ObjectError> {
        let mut state = self.state.borrow_mut();
        let Some(mut open) = state.open.take() else { return Ok(None) };
        let hashes: Vec<u8> = open.hashes.iter().flat_map(|hash| hash.to_le_bytes()).collect();
        for (i, piece) in open.bytes.iter().enumerate() {
            let pages = (open.pages - i * CHUNK).min(CHUNK);
            open.writer.write(&[IoSlice::new(&piece[..pages * BLOCK])])?;
        }
        open.writer.write(&[IoSlice::new(&hashes)])?;
        state.filled.push((open.writer.id(), open.pages as u32));
        Ok(Some(open.writer))
    }

    /// Identity and number of pages of each filled data mblock.
    pub(super) fn filled(&self) -> Vec<(u64, u32)> {
        self.state.borrow().filled.clone()
    }

    /// Data mblocks that could not be read in part since the last call, and why.
    pub(super) fn take_damaged(&self) -> Vec<(u64, PageFlaw)> {
        std::mem::take(&mut self.state.borrow_mut().damaged)
    }
}

impl ObjectStore for Pages {
    type Error = ObjectError;

    fn put(&self, id: ObjectId, page: &[u8]) -> Result<(), ObjectError> {
        let mut state = self.state.borrow_mut();
        if let Some(failed) = state.failed.take() {
            return Err(failed);
        }
        let open = match &mut state.open {
            Some(open) => open,
            none => {
                let capacity = (PAGES * (BLOCK + HASH)) as u64;
                let writer = self.pool.mblock_alloc(Allocation { capacity, ..Allocation::default() })?;
                none.insert(OpenData { writer, bytes: Vec::new(), pages: 0, hashes: Vec::new() })
            }
        };
        let number = open.pages;
        if number == open.bytes.len() * CHUNK {
            open.bytes.push(AlignedBuf::zeroed(CHUNK * BLOCK));
        }
        open.bytes[number / CHUNK][number % CHUNK * BLOCK..][..BLOCK].copy_from_slice(page);
        open.pages += 1;
        let (at, index) = (open.writer.id() << 16 | number as u64, id.0 as usize);
        if state.places.len() <= index {
            state.places.resize(index + 1, 0);
        }
        state.places[index] = at;
        Ok(())
    }

    fn with_object<R>(&self, id: ObjectId, f: impl FnOnce(Option<&[u8]>) -> R) -> R {
        let mut state = self.state.borrow_mut();
        let Some(at) = state.places.get(id.0 as usize).copied() else { return f(None) };
        if state.page(at).is_none()
            && let Err(e) = state.fetch(&self.pool, at, at)
        {
            state.failed = Some(e);
        }
        f(state.page(at))
    }

    fn remove(&self, _: ObjectId) {}
}
