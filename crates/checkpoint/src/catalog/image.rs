//! The memory of a checkpoint, read from start to end ([`View::each_run`]), or page by page in any
//! order ([`Image`]).

use std::collections::HashMap;
use std::fs::File;
use std::io;
use std::num::NonZeroU64;

use mpool::{Advice, BLOCK, Leased, MapError, Mcache, PoolError, Temperature};
use parking_lot::Mutex;
use serde::{Deserialize, Serialize};

use super::compressed::{DataMblock, Reader};
use super::{Checkpoint, Flaw, LEAF, ReadError, View};

/// Pages given to the caller of [`View::each_run`] at a time, at most.
const RUN: usize = 256;

/// Why a lease is not understood.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs, reason = "each sentence says what it is")]
pub enum LeaseError {
    #[error(transparent)]
    Pool(#[from] PoolError),
    #[error("the lease is not about a checkpoint")]
    Foreign,
    #[error("the lease cannot be used: {0}")]
    Claim(#[from] claims::ClaimError),
}

/// A checkpoint that is open for reading. What it needs must stay in the pool: keep the pool open,
/// or a lease.
pub struct Image {
    /// The pool's name.
    pool: String,
    name: String,
    /// The place of each page; 0 is zeros. 8 bytes for 4 KiB.
    places: Vec<u64>,
    /// The data mblocks. Kept open, since each reads its checksums only once.
    mblocks: HashMap<u64, DataMblock>,
    /// Readers that no thread uses.
    readers: Mutex<Vec<Reader>>,
}

impl View {
    /// Calls `each` for every run of pages of a checkpoint, ascending, with its offset in bytes and
    /// its contents. Between the runs are zeros. The pages come from one mcache map of all data
    /// mblocks that the checkpoint needs.
    ///
    /// # Errors
    /// If the checkpoint cannot be read, or `each` fails.
    pub fn each_run(
        &self,
        cache: &Mcache,
        checkpoint: &Checkpoint,
        mut each: impl FnMut(u64, &[u8]) -> io::Result<()>,
    ) -> Result<(), ReadError> {
        let flawed = |flaw: Flaw| self.damaged(&checkpoint.name, flaw);
        let unreadable = |error: MapError| flawed(error.into());
        let root = self.root(checkpoint).map_err(flawed)?;
        let (compressed, ids): (Vec<u64>, Vec<u64>) =
            root.data().of(&self.data).partition(|id| self.data.get(id).is_some_and(|data| data.compressed));
        let open = |id: u64| Ok((id, self.data_mblock(id)?));
        let compressed: HashMap<u64, DataMblock> =
            compressed.into_iter().map(open).collect::<Result<_, Flaw>>().map_err(flawed)?;
        let map = (!ids.is_empty()).then(|| cache.map(&self.pool, &ids, Temperature::Cold));
        let map = map.transpose().map_err(unreadable)?;
        map.iter().try_for_each(|map| map.advise(0, 0, 0, Advice::Sequential))?;
        let (mut reader, mut decoded) = (Reader::default(), vec![0; RUN * BLOCK]);
        for (number, places) in self.leaves(root.named()) {
            let places = places.map_err(flawed)?;
            let mut page = 0;
            while page < LEAF {
                let at = places[page];
                if at == 0 {
                    page += 1;
                    continue;
                }
                // Pages with consecutive places are one run.
                let run =
                    (1..RUN).take_while(|&i| places.get(page + i) == Some(&at.wrapping_add(i as u64))).count() + 1;
                let bytes = if let Some(mblock) = compressed.get(&(at >> 16)) {
                    let bytes = &mut decoded[..run * BLOCK];
                    mblock.read(at & 0xFFFF, bytes, &mut reader).map_err(|flaw| flawed(flaw.into()))?;
                    &*bytes
                } else if let (Some(map), Ok(index)) = (&map, ids.binary_search(&(at >> 16))) {
                    map.get(index, (at & 0xFFFF) * BLOCK as u64, run * BLOCK).map_err(unreadable)?
                } else {
                    return Err(flawed(Flaw::NoPage { page: at & 0xFFFF, mblock: at >> 16 }));
                };
                each(((number * LEAF + page) * BLOCK) as u64, bytes)?;
                page += run;
            }
        }
        Ok(())
    }

    /// Opens the memory of a checkpoint: all regions, one after the other. Reads its map.
    ///
    /// # Errors
    /// If the map cannot be read, or a data mblock that it names is not there.
    pub fn image(&self, checkpoint: &Checkpoint) -> Result<Image, ReadError> {
        let flawed = |flaw: Flaw| self.damaged(&checkpoint.name, flaw);
        let root = self.root(checkpoint).map_err(flawed)?;
        let places = claims::zeroed(checkpoint.bytes() / BLOCK as u64);
        let mut places = places.map_err(|e| flawed(e.into()))?;
        for (number, leaf) in self.leaves(root.named()) {
            let pages = places.iter_mut().skip(number * LEAF);
            pages.zip(*leaf.map_err(flawed)?).for_each(|(to, at)| *to = at);
        }
        let mblocks: Result<_, Flaw> = root.data().of(&self.data).map(|id| Ok((id, self.data_mblock(id)?))).collect();
        let mblocks = mblocks.map_err(flawed)?;
        let (pool, name) = (self.pool.props().name, checkpoint.name.clone());
        Ok(Image { pool, name, places, mblocks, readers: Mutex::default() })
    }
}

/// A note that names compressed data mblocks begins so. It is no number of postcard's: a program
/// that does not know them refuses the note, and does not take their bytes for pages.
const COMPRESSED: [u8; 11] = [0xFF; 11];

/// An image as it stands in a lease, beside the mblocks.
#[derive(Serialize, Deserialize)]
struct Note {
    pool: String,
    name: String,
    /// The places in runs: the first one and its length in pages. 0 stays 0 in a run, other places
    /// ascend.
    runs: Vec<(u64, u32)>,
}

impl Note {
    fn places(&self) -> Result<Vec<u64>, claims::ClaimError> {
        let pages: u64 = self.runs.iter().map(|(_, count)| u64::from(*count)).sum();
        claims::memory(pages * size_of::<u64>() as u64)?;
        let run = |&(first, count): &(u64, u32)| {
            (0..u64::from(count)).map(move |page| if first == 0 { 0 } else { first.saturating_add(page) })
        };
        Ok(self.runs.iter().flat_map(run).collect())
    }
}

/// Whether a place goes on where a run of this length ends.
fn continues((first, count): (u64, u32), at: u64) -> bool {
    count < u32::MAX && at == if first == 0 { 0 } else { first + u64::from(count) }
}

impl Image {
    /// Leases what it needs: as long as the file is open, also in another process, it can be read
    /// ([`Image::of_lease`]), whatever becomes of the pool's checkpoints. The pool, which must be
    /// open with [`Access::Shared`](mpool::Access), may be closed.
    ///
    /// # Errors
    /// If the pool's medium cannot be written.
    pub fn lease(&self, pool: &mpool::Pool) -> Result<File, PoolError> {
        let mut runs: Vec<(u64, u32)> = Vec::new();
        for &at in &self.places {
            match runs.last_mut() {
                Some(run) if continues(*run, at) => run.1 += 1,
                _ => runs.push((at, 1)),
            }
        }
        let note = Note { pool: self.pool.clone(), name: self.name.clone(), runs };
        let mut ids: Vec<u64> = self.mblocks.keys().copied().collect();
        ids.sort_unstable();
        let compressed = self.mblocks.iter().filter_map(|(id, mblock)| match mblock {
            DataMblock::Plain(_) => None,
            DataMblock::Compressed(mblock) => Some((*id, mblock.pages)),
        });
        let compressed: Vec<(u64, u32)> = compressed.collect();
        // Numbers and text: it can be encoded.
        let note = if compressed.is_empty() {
            postcard::to_allocvec(&note).unwrap_or_default()
        } else {
            [&COMPRESSED[..], &postcard::to_allocvec(&(note, compressed)).unwrap_or_default()].concat()
        };
        Ok(pool.lease(&ids, &note)?.into())
    }

    /// The image that a lease is about.
    ///
    /// # Errors
    /// If the file is no lease of an image, or the pool is not where it was.
    pub fn of_lease(lease: &File) -> Result<Self, LeaseError> {
        let leased = Leased::open(lease)?;
        let (note, compressed): (Note, Vec<(u64, u32)>) = match leased.note().strip_prefix(&COMPRESSED) {
            Some(note) => postcard::from_bytes(note),
            None => postcard::from_bytes(leased.note()).map(|note| (note, Vec::new())),
        }
        .map_err(|_| LeaseError::Foreign)?;
        let (places, compressed) = (note.places()?, HashMap::<u64, u32>::from_iter(compressed));
        let open = |(id, mblock)| match compressed.get(&id) {
            Some(pages) => (id, DataMblock::compressed(mblock, *pages)),
            None => (id, DataMblock::Plain(mblock)),
        };
        let mblocks = leased.into_mblocks().into_iter().map(open).collect();
        Ok(Self { pool: note.pool, name: note.name, places, mblocks, readers: Mutex::default() })
    }

    /// Number of pages.
    pub fn pages(&self) -> u64 {
        self.places.len() as u64
    }

    /// The numbers of the pages that are not zeros, in ascending order.
    pub fn filled(&self) -> impl Iterator<Item = u64> + '_ {
        (0..).zip(&self.places).filter(|(_, at)| **at != 0).map(|(page, _)| page)
    }

    /// Which page of the pool this one is: those with equal places have equal bytes. `None`: zeros.
    pub fn place(&self, page: u64) -> Option<NonZeroU64> {
        NonZeroU64::new(self.places.get(page as usize).copied().unwrap_or(0))
    }

    /// Reads whole pages from number `first` on, and checks them. Pages behind the last one are
    /// zeros.
    ///
    /// # Errors
    /// If the pool does not hold what was stored. `into` holds anything then.
    ///
    /// # Panics
    /// If `into` is not whole pages.
    pub fn read(&self, first: u64, into: &mut [u8]) -> Result<(), ReadError> {
        assert!(into.len().is_multiple_of(BLOCK), "whole pages are read");
        let places: Vec<u64> = (first..)
            .take(into.len() / BLOCK)
            .map(|page| self.places.get(page as usize).copied().unwrap_or(0))
            .collect();
        let mut reader = self.readers.lock().pop().unwrap_or_default();
        let read = self.read_places(&places, into, &mut reader);
        self.readers.lock().push(reader);
        read
    }

    fn read_places(&self, places: &[u64], into: &mut [u8], reader: &mut Reader) -> Result<(), ReadError> {
        let mut done = 0;
        while done < places.len() {
            let at = places[done];
            if at != 0 && done > 0 && places[done - 1] == at {
                // Memory that the guest has poisoned is one page many times.
                into.copy_within((done - 1) * BLOCK..done * BLOCK, done * BLOCK);
                done += 1;
                continue;
            }
            // Pages with consecutive places are read at once.
            let follows = |i: &usize| places.get(done + i) == Some(&if at == 0 { 0 } else { at + *i as u64 });
            let run = (1..).take_while(follows).count() + 1;
            let bytes = &mut into[done * BLOCK..(done + run) * BLOCK];
            if at == 0 {
                bytes.fill(0)
            } else {
                let damaged = |source| ReadError::Damaged { name: self.name.clone(), pool: self.pool.clone(), source };
                self.read_run(at, bytes, reader).map_err(damaged)?
            }
            done += run;
        }
        Ok(())
    }

    fn read_run(&self, at: u64, bytes: &mut [u8], reader: &mut Reader) -> Result<(), Flaw> {
        let gone = || Flaw::NoPage { page: at & 0xFFFF, mblock: at >> 16 };
        let mblock = self.mblocks.get(&(at >> 16)).ok_or_else(gone)?;
        Ok(mblock.read(at & 0xFFFF, bytes, reader)?)
    }
}

/// Whether a program that does not know compressed data mblocks refuses a note.
#[cfg(test)]
pub(super) fn is_unknown_to_older(note: &[u8]) -> bool {
    postcard::from_bytes::<Note>(note).is_err()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Some kilobytes of runs say anything about the number of pages.
    #[test]
    fn more_pages_than_there_is_memory_for_are_refused_before_it_is_allocated() {
        let note = |runs| Note { pool: "p".into(), name: "n".into(), runs };
        assert_eq!(note(vec![(0, 2), (7, 2)]).places().unwrap(), [0, 0, 7, 8]);
        let error = note(vec![(0, u32::MAX); 1 << 10]).places().unwrap_err();
        assert!(error.to_string().contains("it needs 35184372080640 bytes of memory"), "{error}");
    }
}
