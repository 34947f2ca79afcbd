//! The pages of a pool: those in data mblocks, and those that are still in memory.
//!
//! New pages are collected in memory until a data mblock is full ([`Pages`]). Whoever filled it
//! writes it ([`Full`]); until it is on the medium, its pages stay in memory for the others.
//!
//! Pages on the medium are read only to be compared. Then all pages needed from a *chunk* are read
//! at once ([`Compared::bring`]). A page that cannot be read counts as lost and is stored again.

use std::collections::BTreeMap;
use std::io::IoSlice;
use std::ops::Range;
use std::sync::Arc;

use mpool::{AlignedBuf, BLOCK, MblockWriter, ObjectError, Pool};

use super::classes::{Holds, allocate};
use super::compressed::{DataMblock, Reader};
use super::index::Known;
use super::list::Data;
use super::{HASH, PAGES, PageFlaw};

/// Pages of a data mblock that are read at once for comparing, at most: 1 MiB. A divisor of 65536.
const CHUNK: usize = 256;

/// The pages of a data mblock in memory. It has its identity from the start, so that maps can name
/// them.
pub(super) struct Contents {
    pub(super) id: u64,
    /// Buffers of [`CHUNK`] pages, allocated when needed: most second checkpoints need one.
    bytes: Vec<AlignedBuf>,
    pub(super) hashes: Vec<u128>,
}

impl Contents {
    fn page(&self, number: usize) -> Option<&[u8]> {
        let page = || &self.bytes[number / CHUNK][number % CHUNK * BLOCK..][..BLOCK];
        (number < self.hashes.len()).then(page)
    }
}

/// A data mblock that gets no more pages, and is to be written.
pub(super) struct Full {
    pub(super) contents: Arc<Contents>,
    pub(super) writer: MblockWriter,
}

impl Full {
    /// Writes the pages and their hashes, but does not commit them.
    pub(super) fn write(&mut self) -> Result<(), ObjectError> {
        let Contents { bytes, hashes, .. } = &*self.contents;
        for (i, piece) in bytes.iter().enumerate() {
            let pages = (hashes.len() - i * CHUNK).min(CHUNK);
            self.writer.write(&[IoSlice::new(&piece[..pages * BLOCK])])?;
        }
        let hashes: Vec<u8> = hashes.iter().flat_map(|hash| hash.to_le_bytes()).collect();
        self.writer.write(&[IoSlice::new(&hashes)])
    }

    /// Writes and commits it.
    pub(super) fn store(mut self) -> Result<(), ObjectError> {
        self.write()?;
        self.writer.commit().map(drop)
    }
}

/// The pages that are in memory until they are on the medium.
pub(super) struct Pages {
    pool: Pool,
    /// Whether the pages are new or moved.
    holds: Holds,
    /// The data mblock that is being filled.
    open: Option<(Contents, MblockWriter)>,
    /// Data mblocks that are being written.
    written: Vec<Arc<Contents>>,
}

/// The hashes of a data mblock's pages.
pub(super) fn hashes(pool: &Pool, id: u64, data: Data) -> Result<Vec<u128>, PageFlaw> {
    let (mblock, pages) = (pool.mblock(id)?, data.pages);
    let mblock = match DataMblock::new(mblock, data) {
        DataMblock::Plain(mblock) => mblock,
        DataMblock::Compressed(mblock) => return mblock.hashes(),
    };
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
    /// Those that are not on the medium yet.
    pub(super) pages: Option<&'a Pages>,
}

impl InPool<'_> {
    fn in_memory(&self, mblock: u64) -> Option<&Contents> {
        self.pages?.in_memory().find(|contents| contents.id == mblock)
    }
}

impl Known for InPool<'_> {
    fn pages(&self, mblock: u64) -> u32 {
        let stored = || self.data.get(&mblock).map_or(0, |data| data.pages);
        self.in_memory(mblock).map_or_else(stored, |contents| contents.hashes.len() as u32)
    }

    fn hashes(&self, mblock: u64) -> Result<Vec<u128>, PageFlaw> {
        match self.in_memory(mblock) {
            Some(contents) => Ok(contents.hashes.clone()),
            None => hashes(self.pool, mblock, self.data.get(&mblock).copied().unwrap_or(Data::plain(0))),
        }
    }
}

impl Pages {
    pub(super) fn new(pool: &Pool, holds: Holds) -> Self {
        Self { pool: pool.clone(), holds, open: None, written: Vec::new() }
    }

    /// The data mblocks in memory.
    pub(super) fn in_memory(&self) -> impl Iterator<Item = &Contents> {
        self.open.iter().map(|(contents, _)| contents).chain(self.written.iter().map(|contents| &**contents))
    }

    /// The page at a place, if it is in memory.
    pub(super) fn get(&self, at: u64) -> Option<&[u8]> {
        self.in_memory().find(|contents| contents.id == at >> 16)?.page((at & 0xFFFF) as usize)
    }

    /// Adds a page to the data mblock that is being filled; gives its place.
    pub(super) fn put(&mut self, page: &[u8], hash: u128) -> Result<u64, ObjectError> {
        let (open, _) = match &mut self.open {
            Some(open) => open,
            none => {
                let capacity = (PAGES * (BLOCK + HASH)) as u64;
                let writer = allocate(&self.pool, self.holds, capacity)?;
                none.insert((Contents { id: writer.id(), bytes: Vec::new(), hashes: Vec::new() }, writer))
            }
        };
        let number = open.hashes.len();
        if number == open.bytes.len() * CHUNK {
            open.bytes.push(AlignedBuf::zeroed(CHUNK * BLOCK));
        }
        open.bytes[number / CHUNK][number % CHUNK * BLOCK..][..BLOCK].copy_from_slice(page);
        open.hashes.push(hash);
        Ok(open.id << 16 | number as u64)
    }

    /// The data mblock that is being filled, if it is full: it is to be written.
    pub(super) fn take_full(&mut self) -> Option<Full> {
        let is_full = self.open.as_ref().is_some_and(|(contents, _)| contents.hashes.len() >= PAGES);
        if is_full { self.take_open() } else { None }
    }

    /// The data mblock that is being filled, to be written as it is.
    pub(super) fn take_open(&mut self) -> Option<Full> {
        let (contents, writer) = self.open.take()?;
        let contents = Arc::new(contents);
        self.written.push(contents.clone());
        Some(Full { contents, writer })
    }

    /// Whether a data mblock is being filled, which has this identity.
    pub(super) fn is_open(&self, id: u64) -> bool {
        self.open.as_ref().is_some_and(|(contents, _)| contents.id == id)
    }

    /// Whether a data mblock is being written.
    pub(super) fn is_written(&self, id: u64) -> bool {
        self.written.iter().any(|contents| contents.id == id)
    }

    /// A data mblock has been written, or was not.
    pub(super) fn landed(&mut self, id: u64) {
        self.written.retain(|contents| contents.id != id);
    }

    /// Forgets the data mblock that is being filled.
    pub(super) fn give_up(&mut self) {
        self.open = None;
    }
}

/// Pages that are read from the medium to be compared.
pub(super) struct Compared {
    pool: Pool,
    /// The pages read last, and their places.
    cache: Option<AlignedBuf>,
    cached: Range<u64>,
    /// Data mblocks that could not be read in part, and why.
    pub(super) damaged: Vec<(u64, PageFlaw)>,
    /// The compressed data mblocks. While checkpoints are stored there come no others.
    compressed: BTreeMap<u64, Data>,
    /// The data mblock that was read last: a compressed one reads its table only once.
    last: Option<(u64, DataMblock)>,
    reader: Reader,
}

impl Compared {
    pub(super) fn new(pool: &Pool, data: &BTreeMap<u64, Data>) -> Self {
        let compressed = data.iter().filter(|(_, data)| data.compressed).map(|(id, data)| (*id, *data)).collect();
        let (cache, last, damaged, reader) = Default::default();
        Self { pool: pool.clone(), cache, cached: 0..0, damaged, compressed, last, reader }
    }

    /// The page at a place, if it is cached.
    fn page(&self, at: u64) -> Option<&[u8]> {
        let start = self.cached.contains(&at).then(|| (at - self.cached.start) as usize * BLOCK)?;
        self.cache.as_ref()?.get(start..start + BLOCK)
    }

    /// Caches the pages `first..=last` of one chunk; if they are damaged, none of them.
    fn fetch(&mut self, first: u64, last: u64) -> Result<(), ObjectError> {
        self.cached = 0..0;
        let cache = self.cache.get_or_insert_with(|| AlignedBuf::zeroed(CHUNK * BLOCK));
        let (id, len) = (first >> 16, (last - first + 1) as usize * BLOCK);
        let mut read = || -> Result<(), PageFlaw> {
            let mblock = match self.last.take().filter(|(last, _)| *last == id) {
                Some((_, mblock)) => mblock,
                None => {
                    let plain = Data::plain(0);
                    DataMblock::new(self.pool.mblock(id)?, self.compressed.get(&id).copied().unwrap_or(plain))
                }
            };
            mblock.read(first & 0xFFFF, &mut cache[..len], &mut self.reader)?;
            self.last = Some((id, mblock));
            Ok(())
        };
        match read() {
            Ok(()) => self.cached = first..last + 1,
            Err(PageFlaw::Object(e)) if !is_loss(&e) => return Err(e),
            Err(flaw) => self.damaged.push((id, flaw)),
        }
        Ok(())
    }

    /// Whether the page at a place has these bytes. A page that cannot be read has not.
    pub(super) fn is(&mut self, at: u64, bytes: &[u8]) -> Result<bool, ObjectError> {
        if self.page(at).is_none() {
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

    /// Data mblocks that could not be read in part since the last call, and why.
    pub(super) fn take_damaged(&mut self) -> Vec<(u64, PageFlaw)> {
        std::mem::take(&mut self.damaged)
    }
}
