//! Writing compressed data mblocks.

use std::io::{Cursor, IoSlice};

use mpool::{BLOCK, MblockWriter, ObjectError, Pool};
use ruzstd::decoding::FrameDecoder;
use ruzstd::encoding::{CompressionLevel, FrameCompressor};

use super::super::classes::{Holds, allocate};
use super::matches::Matches;
use super::{CHUNK, END, HASH, PAGES, decode, decoder};

/// A compressed data mblock that was stored.
pub(in super::super) struct Stored {
    pub(in super::super) id: u64,
    /// The hashes of its pages.
    pub(in super::super) hashes: Vec<u128>,
    /// Its bytes.
    pub(in super::super) bytes: u64,
}

/// The data mblock that is being filled.
struct Open {
    writer: MblockWriter,
    /// The pages of the last chunk.
    chunk: Vec<u8>,
    hashes: Vec<u128>,
    ends: Vec<u32>,
}

/// Collects pages, and writes them compressed.
pub(in super::super) struct Compressor {
    pool: Pool,
    encoder: Encoder,
    open: Option<Open>,
}

impl Compressor {
    pub(in super::super) fn new(pool: &Pool) -> Self {
        Self { pool: pool.clone(), encoder: Encoder::new(), open: None }
    }

    /// Adds a page to the data mblock that is being filled; gives its place.
    pub(in super::super) fn put(&mut self, page: &[u8], hash: u128) -> Result<u64, ObjectError> {
        let open = match &mut self.open {
            Some(open) => open,
            none => {
                // What is not needed is free again when it is committed.
                let capacity = (PAGES * (BLOCK + HASH) + PAGES / CHUNK * END) as u64;
                let writer = allocate(&self.pool, Holds::Moved, capacity)?;
                none.insert(Open { writer, chunk: Vec::new(), hashes: Vec::new(), ends: Vec::new() })
            }
        };
        open.chunk.extend_from_slice(page);
        open.hashes.push(hash);
        let at = open.writer.id() << 16 | (open.hashes.len() - 1) as u64;
        if open.chunk.len() == CHUNK * BLOCK {
            open.end_chunk(&mut self.encoder)?;
        }
        Ok(at)
    }

    /// Stores the data mblock that is being filled, if it is full.
    pub(in super::super) fn store_full(&mut self) -> Result<Option<Stored>, ObjectError> {
        let is_full = self.open.as_ref().is_some_and(|open| open.hashes.len() >= PAGES);
        if is_full { self.store() } else { Ok(None) }
    }

    /// Stores the data mblock that is being filled, as it is.
    pub(in super::super) fn store(&mut self) -> Result<Option<Stored>, ObjectError> {
        let Some(mut open) = self.open.take() else { return Ok(None) };
        if !open.chunk.is_empty() {
            open.end_chunk(&mut self.encoder)?;
        }
        let Open { mut writer, hashes, ends, .. } = open;
        let all: Vec<u8> = hashes.iter().flat_map(|hash| hash.to_le_bytes()).collect();
        let table: Vec<u8> = ends.iter().flat_map(|end| end.to_le_bytes()).collect();
        writer.write(&[IoSlice::new(&all), IoSlice::new(&table)])?;
        let (id, bytes) = (writer.id(), writer.len());
        writer.commit()?;
        Ok(Some(Stored { id, hashes, bytes }))
    }
}

impl Open {
    fn end_chunk(&mut self, encoder: &mut Encoder) -> Result<(), ObjectError> {
        let stored = encoder.encode(&self.chunk).unwrap_or(&self.chunk);
        self.writer.write(&[IoSlice::new(stored)])?;
        self.ends.push(self.writer.len() as u32);
        self.chunk.clear();
        Ok(())
    }
}

/// Makes frames.
struct Encoder {
    compressor: FrameCompressor<Cursor<Vec<u8>>, Vec<u8>, Matches>,
    decoder: FrameDecoder,
    frame: Vec<u8>,
    again: Vec<u8>,
}

impl Encoder {
    fn new() -> Self {
        // Of its levels this is the one that it has; the search is ours.
        let compressor = FrameCompressor::new_with_matcher(Matches::new(), CompressionLevel::Fastest);
        let (frame, again) = (Vec::new(), Vec::new());
        Self { compressor, decoder: decoder(), frame, again }
    }

    /// The frame of some pages; `None` if it is not an eighth smaller. It was decoded and compared:
    /// nobody's pages depend on the encoder's being right.
    fn encode(&mut self, pages: &[u8]) -> Option<&[u8]> {
        self.again.clear();
        self.again.extend_from_slice(pages);
        self.compressor.set_source(Cursor::new(std::mem::take(&mut self.again)));
        self.frame.clear();
        self.compressor.set_drain(std::mem::take(&mut self.frame));
        self.compressor.compress();
        self.frame = self.compressor.take_drain()?;
        self.again = self.compressor.take_source()?.into_inner();
        let is_smaller = self.frame.len() <= pages.len() - pages.len() / 8;
        (is_smaller && self.is_of(pages)).then_some(&self.frame)
    }

    /// Whether the frame decodes to these pages.
    fn is_of(&mut self, pages: &[u8]) -> bool {
        self.again.clear();
        self.again.resize(pages.len(), 0);
        decode(&mut self.decoder, &self.frame, &mut self.again).is_some() && self.again == pages
    }
}

#[cfg(test)]
mod tests;
