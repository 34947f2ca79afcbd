//! The pages of a pool: those in data mblocks, and those of the data mblock that is being filled.
//!
//! Pages are read only to be compared. Then all pages needed from a *chunk* are read at once
//! ([`Pages::bring`]). A page that cannot be read counts as lost and is stored again.

use std::collections::BTreeMap;
use std::io::IoSlice;
use std::ops::Range;

use mpool::{AlignedBuf, Allocation, BLOCK, MblockWriter, ObjectError, Pool};

use super::index::Known;
use super::list::Data;
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
    fn page(&self, number: usize) -> Option<&[u8]> {
        let page = || &self.bytes[number / CHUNK][number % CHUNK * BLOCK..][..BLOCK];
        (number < self.pages).then(page)
    }
}

/// The pages of a pool.
pub(super) struct Pages {
    pool: Pool,
    open: Option<OpenData>,
    /// Identity and number of pages of each filled data mblock.
    filled: Vec<(u64, u32)>,
    /// The pages read last for comparing, and their places.
    cache: Option<AlignedBuf>,
    cached: Range<u64>,
    /// Data mblocks that could not be read in part, and why.
    damaged: Vec<(u64, PageFlaw)>,
}

/// The hashes of a data mblock's pages.
pub(super) fn hashes(pool: &Pool, id: u64, pages: u32) -> Result<Vec<u128>, PageFlaw> {
    let mblock = pool.mblock(id)?;
    let (expected, is) = (u64::from(pages) * (BLOCK + HASH) as u64, mblock.props().len);
    if expected != is || pages as usize > PAGES {
        return Err(PageFlaw::Length { mblock: id, is, expected, pages });
    }
    let mut hashes = vec![0; pages as usize * HASH];
    mblock.read(u64::from(pages) * BLOCK as u64, &mut hashes)?;
    Ok(hashes.as_chunks::<HASH>().0.iter().map(|hash| u128::from_le_bytes(*hash)).collect())
}

/// Whether the medium does not have what it should.
fn is_loss(error: &ObjectError) -> bool {
    use ObjectError::{Damaged, NoClass, NotFound, PastEnd};
    matches!(error, Damaged(_) | PastEnd { .. } | NotFound(_) | NoClass(_))
}

/// The data mblocks of a catalogue, for the index.
pub(super) struct InPool<'a> {
    pub(super) pool: &'a Pool,
    pub(super) data: &'a BTreeMap<u64, Data>,
    /// The data mblock that is being filled, and its pages: [`Pages::open`].
    pub(super) open: Option<(u64, u32)>,
}

impl Known for InPool<'_> {
    fn pages(&self, mblock: u64) -> u32 {
        let open = self.open.filter(|(id, _)| *id == mblock).map(|(_, pages)| pages);
        open.or_else(|| Some(self.data.get(&mblock)?.pages)).unwrap_or(0)
    }

    fn hashes(&self, mblock: u64) -> Result<Vec<u128>, PageFlaw> {
        hashes(self.pool, mblock, self.data.get(&mblock).map_or(0, |data| data.pages))
    }
}

impl Pages {
    pub(super) fn new(pool: &Pool) -> Self {
        let (filled, damaged) = (Vec::new(), Vec::new());
        Self { pool: pool.clone(), open: None, filled, cache: None, cached: 0..0, damaged }
    }

    /// The data mblock that is being filled, and the number of its pages.
    pub(super) fn open(&self) -> Option<(u64, u32)> {
        self.open.as_ref().map(|open| (open.writer.id(), open.pages as u32))
    }

    /// Whether a place is in the data mblock that is being filled.
    pub(super) fn is_open(&self, at: u64) -> bool {
        self.open.as_ref().is_some_and(|open| open.writer.id() == at >> 16)
    }

    /// The page at a place, if it is in memory.
    fn page(&self, at: u64) -> Option<&[u8]> {
        if let Some(open) = self.open.as_ref().filter(|open| open.writer.id() == at >> 16) {
            return open.page((at & 0xFFFF) as usize);
        }
        let start = self.cached.contains(&at).then(|| (at - self.cached.start) as usize * BLOCK)?;
        self.cache.as_ref()?.get(start..start + BLOCK)
    }

    /// Caches the pages `first..=last` of one chunk; if they are damaged, none of them.
    fn fetch(&mut self, first: u64, last: u64) -> Result<(), ObjectError> {
        self.cached = 0..0;
        let cache = self.cache.get_or_insert_with(|| AlignedBuf::zeroed(CHUNK * BLOCK));
        let len = (last - first + 1) as usize * BLOCK;
        let read = self
            .pool
            .mblock(first >> 16)
            .and_then(|mblock| mblock.read((first & 0xFFFF) * BLOCK as u64, &mut cache[..len]));
        match read {
            Ok(()) => self.cached = first..last + 1,
            Err(e) if is_loss(&e) => self.damaged.push((first >> 16, e.into())),
            Err(e) => return Err(e),
        }
        Ok(())
    }

    /// Whether the page at a place has these bytes. A page that cannot be read has not.
    pub(super) fn is(&mut self, at: u64, bytes: &[u8]) -> Result<bool, ObjectError> {
        if self.page(at).is_none() && !self.is_open(at) {
            self.fetch(at, at)?;
        }
        Ok(self.page(at) == Some(bytes))
    }

    /// Caches the page at the first of these places and all others in its chunk, unless it is
    /// cached. The places are sorted.
    pub(super) fn bring(&mut self, mut places: impl Iterator<Item = u64>) -> Result<(), ObjectError> {
        let Some(first) = places.next().filter(|first| self.page(*first).is_none()) else { return Ok(()) };
        let in_chunk = places.take_while(|at| at / CHUNK as u64 == first / CHUNK as u64);
        let last = in_chunk.fold(first, u64::max);
        self.fetch(first, last)
    }

    /// Stores a page in the data mblock that is being filled; gives its place.
    pub(super) fn put(&mut self, page: &[u8], hash: u128) -> Result<u64, ObjectError> {
        let open = match &mut self.open {
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
        open.hashes.push(hash);
        open.pages += 1;
        Ok(open.writer.id() << 16 | number as u64)
    }

    /// Writes and commits the data mblock if it is full; gives its identity and number of pages.
    pub(super) fn finish_full(&mut self) -> Result<Option<(u64, u32)>, ObjectError> {
        if self.open.as_ref().is_none_or(|open| open.pages < PAGES) {
            return Ok(None);
        }
        if let Some(writer) = self.finish()? {
            writer.commit()?;
        }
        Ok(self.filled.last().copied())
    }

    /// Writes the data mblock that is being filled, but does not commit it.
    pub(super) fn finish(&mut self) -> Result<Option<MblockWriter>, ObjectError> {
        let Some(mut open) = self.open.take() else { return Ok(None) };
        let hashes: Vec<u8> = open.hashes.iter().flat_map(|hash| hash.to_le_bytes()).collect();
        for (i, piece) in open.bytes.iter().enumerate() {
            let pages = (open.pages - i * CHUNK).min(CHUNK);
            open.writer.write(&[IoSlice::new(&piece[..pages * BLOCK])])?;
        }
        open.writer.write(&[IoSlice::new(&hashes)])?;
        self.filled.push((open.writer.id(), open.pages as u32));
        Ok(Some(open.writer))
    }

    /// Identity and number of pages of each filled data mblock.
    pub(super) fn filled(&self) -> &[(u64, u32)] {
        &self.filled
    }

    /// Data mblocks that could not be read in part since the last call, and why.
    pub(super) fn take_damaged(&mut self) -> Vec<(u64, PageFlaw)> {
        std::mem::take(&mut self.damaged)
    }
}
