//! Bytes that are kept beside a checkpoint: what its owner needs to make use of it.
//!
//! They lie in mblocks of their own. A record names these by the checkpoint's number, which stays
//! the same when repacking gives the checkpoint another map. It is written together with the
//! checkpoint's record; without that one it means nothing.

use std::collections::HashSet;
use std::io::IoSlice;

use mpool::MblockWriter;

use super::classes::{Holds, allocate};
use super::list::Attached;
use super::{Checkpoint, Flaw, ReadError, StoreError, View};

/// Bytes of an mblock, at most.
const MBLOCK: usize = 32 << 20;

impl View {
    /// The mblocks beside a checkpoint.
    pub(super) fn beside(&self, checkpoint: &Checkpoint) -> impl Iterator<Item = u64> {
        self.attached.get(&checkpoint.number).into_iter().flat_map(|attached| attached.mblocks.iter().copied())
    }

    /// Writes bytes, without committing them.
    pub(super) fn write_attached(&self, bytes: &[u8], writers: &mut Vec<MblockWriter>) -> Result<Attached, StoreError> {
        let mut mblocks = Vec::new();
        for part in bytes.chunks(MBLOCK) {
            let mut writer = allocate(&self.pool, Holds::Soon, part.len() as u64)?;
            writer.write(&[IoSlice::new(part)])?;
            mblocks.push(writer.id());
            writers.push(writer);
        }
        Ok(Attached { mblocks, bytes: bytes.len() as u64 })
    }

    /// Whether bytes are kept beside a checkpoint.
    pub fn has_beside(&self, checkpoint: &Checkpoint) -> bool {
        self.attached.contains_key(&checkpoint.number)
    }

    /// The first 32 MiB of the bytes beside a checkpoint, and how many there are; `None`: none.
    ///
    /// # Errors
    /// If they cannot be read.
    pub fn beginning_beside(&self, checkpoint: &Checkpoint) -> Result<Option<(Vec<u8>, u64)>, ReadError> {
        let Some(attached) = self.attached.get(&checkpoint.number) else { return Ok(None) };
        let first = attached.mblocks.first().map_or_else(|| Ok(Vec::new()), |id| self.whole(*id));
        first.map(|bytes| Some((bytes, attached.bytes))).map_err(|flaw| self.damaged(&checkpoint.name, flaw))
    }

    /// The bytes that [`Writer::keep_beside`](super::Writer::keep_beside) kept; `None`: there are
    /// none.
    ///
    /// # Errors
    /// If they cannot be read, or are not those that were stored.
    pub fn beside_checkpoint(&self, checkpoint: &Checkpoint) -> Result<Option<Vec<u8>>, ReadError> {
        let Some(attached) = self.attached.get(&checkpoint.number) else { return Ok(None) };
        let read = || -> Result<Vec<u8>, Flaw> {
            let once: HashSet<u64> = attached.mblocks.iter().copied().collect();
            let mut all = Vec::new();
            for id in attached.mblocks.iter().filter(|_| once.len() == attached.mblocks.len()) {
                all.append(&mut self.whole(*id)?);
            }
            if all.len() as u64 != attached.bytes {
                return Err(Flaw::Beside { is: all.len() as u64, expected: attached.bytes });
            }
            Ok(all)
        };
        read().map(Some).map_err(|flaw| self.damaged(&checkpoint.name, flaw))
    }
}
