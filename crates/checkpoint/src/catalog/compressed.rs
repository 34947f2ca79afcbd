//! Data mblocks that are compressed: chunks of [`CHUNK`] pages, each a zstd frame of its own.
//!
//! | bytes | contents |
//! |---|---|
//! | the chunks | zstd frames; plain pages where a frame saves less than an eighth |
//! | 16 for each page | their hashes, as in every data mblock |
//! | 4 for each chunk | where it ends |
//!
//! Where a chunk lies is known from the table at the end, which is read once. So a page is read by
//! one read of its chunk, and decoded once. What is read was checked by mpool before: a frame that
//! does not decode to its pages was not written by this program, and is refused like a damaged
//! page.
//!
//! *The size of a chunk.* Of a chunk that is read for one page the others are decoded in vain. 16
//! pages instead of 8 take 1 or 2 % less on the medium, and twice the time.

mod matches;
mod write;

use std::collections::VecDeque;
use std::sync::OnceLock;

use mpool::{AlignedBuf, BLOCK, Mblock};
use ruzstd::decoding::FrameDecoder;

use super::list::Data;
use super::{HASH, PAGES, PageFlaw};

pub(super) use write::{Compressor, Stored};

/// Pages of a chunk.
const CHUNK: usize = 8;
/// Bytes of an entry of the table.
const END: usize = 4;
/// Chunks that a reader keeps: 1 MiB. What the kernel asks for lies in one order in a guest, and in
/// a somewhat other one in the pool.
const KEPT: usize = 32;
/// Bytes of a frame's window, at most: the decoder allocates what a frame says.
const WINDOW: u64 = 1 << 16;

/// A data mblock that is open for reading.
pub(super) enum DataMblock {
    Plain(Mblock),
    Compressed(Compressed),
}

/// A compressed one.
pub(super) struct Compressed {
    mblock: Mblock,
    pub(super) pages: u32,
    /// Where each chunk ends. Read when it is first needed.
    ends: OnceLock<Box<[u32]>>,
}

impl DataMblock {
    pub(super) fn new(mblock: Mblock, data: Data) -> Self {
        if data.compressed { Self::compressed(mblock, data.pages) } else { Self::Plain(mblock) }
    }

    pub(super) fn compressed(mblock: Mblock, pages: u32) -> Self {
        Self::Compressed(Compressed { mblock, pages, ends: OnceLock::new() })
    }

    /// Reads whole pages from number `first` on, and checks them.
    pub(super) fn read(&self, first: u64, into: &mut [u8], reader: &mut Reader) -> Result<(), PageFlaw> {
        match self {
            Self::Plain(mblock) => Ok(mblock.read(first * BLOCK as u64, into)?),
            Self::Compressed(mblock) => mblock.read(first, into, reader),
        }
    }
}

impl Compressed {
    fn id(&self) -> u64 {
        self.mblock.props().id
    }

    fn flaw(&self, chunk: usize) -> PageFlaw {
        PageFlaw::Chunk { mblock: self.id(), chunk }
    }

    /// Number of chunks, and where the hashes and the table begin.
    fn layout(&self) -> Result<(usize, u64, u64), PageFlaw> {
        let (len, pages) = (self.mblock.props().len, self.pages as usize);
        let chunks = pages.div_ceil(CHUNK);
        let table = len.checked_sub((chunks * END) as u64);
        let hashes = table.and_then(|table| table.checked_sub((pages * HASH) as u64));
        match (hashes, table) {
            (Some(hashes), Some(table)) if pages <= PAGES => Ok((chunks, hashes, table)),
            _ => Err(PageFlaw::Table { mblock: self.id(), pages: self.pages }),
        }
    }

    /// Where each chunk ends.
    fn ends(&self) -> Result<&[u32], PageFlaw> {
        if let Some(ends) = self.ends.get() {
            return Ok(ends);
        }
        let (chunks, hashes, table) = self.layout()?;
        let mut bytes = vec![0; chunks * END];
        self.mblock.read(table, &mut bytes)?;
        let ends: Box<[u32]> = bytes.as_chunks::<END>().0.iter().map(|end| u32::from_le_bytes(*end)).collect();
        let ascend = ends.iter().try_fold(0, |start, end| (start < *end).then_some(*end));
        if ascend.map(u64::from) != Some(hashes) {
            return Err(PageFlaw::Table { mblock: self.id(), pages: self.pages });
        }
        Ok(self.ends.get_or_init(|| ends))
    }

    /// The hashes of its pages.
    pub(super) fn hashes(&self) -> Result<Vec<u128>, PageFlaw> {
        let (_, at, _) = self.layout()?;
        let mut hashes = vec![0; self.pages as usize * HASH];
        self.mblock.read(at, &mut hashes)?;
        Ok(hashes.as_chunks::<HASH>().0.iter().map(|hash| u128::from_le_bytes(*hash)).collect())
    }

    fn read(&self, first: u64, into: &mut [u8], reader: &mut Reader) -> Result<(), PageFlaw> {
        let (mut page, mut into) = (usize::try_from(first).unwrap_or(usize::MAX), into);
        while !into.is_empty() {
            let chunk = reader.chunk(self, page / CHUNK)?;
            let start = page % CHUNK * BLOCK;
            // The last chunk may be shorter.
            let there = chunk.get(start..).filter(|there| !there.is_empty()).ok_or_else(|| self.flaw(page / CHUNK))?;
            let (now, later) = into.split_at_mut(there.len().min(into.len()));
            now.copy_from_slice(&there[..now.len()]);
            (page, into) = (page + now.len() / BLOCK, later);
        }
        Ok(())
    }

    /// Reads and decodes all chunks.
    pub(super) fn check(&self, reader: &mut Reader) -> Result<(), PageFlaw> {
        (0..self.ends()?.len()).try_for_each(|chunk| reader.chunk(self, chunk).map(drop))
    }
}

/// What reading compressed pages takes: a decoder, and the chunks that were read last.
pub(super) struct Reader {
    decoder: FrameDecoder,
    stored: AlignedBuf,
    /// The mblock and the number of each, and its pages; the oldest first.
    chunks: VecDeque<((u64, usize), Vec<u8>)>,
}

impl Default for Reader {
    fn default() -> Self {
        Self { decoder: decoder(), stored: AlignedBuf::zeroed(0), chunks: VecDeque::new() }
    }
}

impl Reader {
    /// The pages of a chunk.
    fn chunk(&mut self, of: &Compressed, chunk: usize) -> Result<&[u8], PageFlaw> {
        let now = (of.id(), chunk);
        let at = match self.chunks.iter().rposition(|(known, _)| *known == now) {
            Some(at) => at,
            None => {
                let ends = of.ends()?;
                let &end = ends.get(chunk).ok_or_else(|| of.flaw(chunk))?;
                let start = chunk.checked_sub(1).map_or(0, |before| ends[before]);
                let oldest = (self.chunks.len() >= KEPT).then(|| self.chunks.pop_front()).flatten();
                let mut pages = oldest.map_or_else(Vec::new, |(_, pages)| pages);
                pages.resize((of.pages as usize - chunk * CHUNK).min(CHUNK) * BLOCK, 0);
                self.fetch(of, start.into(), end.into(), &mut pages)?.ok_or_else(|| of.flaw(chunk))?;
                self.chunks.push_back((now, pages));
                self.chunks.len() - 1
            }
        };
        Ok(&self.chunks[at].1)
    }

    /// Reads the bytes `start..end` of the mblock, and makes pages of them. `None`: they are not
    /// the pages of this length.
    fn fetch(&mut self, of: &Compressed, start: u64, end: u64, pages: &mut [u8]) -> Result<Option<()>, PageFlaw> {
        let len = (end - start) as usize;
        if len > pages.len() {
            return Ok(None);
        }
        if self.stored.is_empty() {
            self.stored = AlignedBuf::zeroed((CHUNK + 2) * BLOCK);
        }
        // Whole blocks are read without being copied.
        let skip = start as usize % BLOCK;
        let blocks = end.next_multiple_of(BLOCK as u64).min(of.mblock.props().len) - (start - skip as u64);
        of.mblock.read(start - skip as u64, &mut self.stored[..blocks as usize])?;
        let stored = &self.stored[skip..skip + len];
        if len == pages.len() {
            pages.copy_from_slice(stored);
            return Ok(Some(()));
        }
        Ok(decode(&mut self.decoder, stored, pages))
    }
}

fn decoder() -> FrameDecoder {
    let mut decoder = FrameDecoder::new();
    decoder.set_max_window_size(WINDOW);
    decoder
}

/// Decodes a frame. `None`: it is none, or has another length.
fn decode(decoder: &mut FrameDecoder, frame: &[u8], into: &mut [u8]) -> Option<()> {
    let len = decoder.decode_all(frame, into).ok()?;
    let sums = (decoder.get_checksum_from_data(), decoder.get_calculated_checksum());
    (len == into.len() && sums.0.is_some() && sums.0 == sums.1).then_some(())
}
