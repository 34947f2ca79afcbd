//! mblocks: written once, by appending, then committed and immutable.

use std::io::IoSlice;

use std::sync::Arc;
use std::sync::atomic::Ordering;

use crate::disk::buffer::{AlignedBuf, is_aligned};
use crate::disk::checksum;
use crate::disk::log::Reserve;
use crate::disk::medium::ReadPiece;
use crate::disk::record::{MblockRecord, Record};
use crate::disk::space::Extent;
use crate::disk::uring::REQUEST;
use crate::error::{Damage, During, Object, ObjectError};
use crate::objects::class::Class;
use crate::objects::info::{MblockInfo, MblockProps};
use crate::objects::inner::Inner;
use crate::{BLOCK, MediaClass};

/// Bytes collected before they are written, when the caller's memory is not aligned.
const STAGING: usize = 1 << 20;

/// Where to go when a class is full or missing.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Fallback {
    /// Nowhere: it is an error.
    #[default]
    None,
    /// To the capacity class.
    Capacity,
    /// To any class, capacity first.
    Any,
}

/// What to allocate.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Allocation {
    /// The class wanted.
    pub class: MediaClass,
    /// The most bytes that will be written. The space is allocated at once; the commit frees the
    /// unused part.
    pub capacity: u64,
    /// What to do when there is no space in the class.
    pub fallback: Fallback,
}

impl Default for Allocation {
    /// 32 MiB of the capacity class.
    fn default() -> Self {
        Self { class: MediaClass::Capacity, capacity: 32 << 20, fallback: Fallback::None }
    }
}

impl Allocation {
    /// Classes to try, in order.
    pub(crate) fn classes(&self) -> impl Iterator<Item = MediaClass> {
        let more: &[MediaClass] = match self.fallback {
            Fallback::None => &[],
            Fallback::Capacity => &[MediaClass::Capacity],
            Fallback::Any => &MediaClass::ALL,
        };
        let first = self.class;
        std::iter::once(first).chain(more.iter().copied().filter(move |&class| class != first))
    }
}

/// An mblock that is being written. Dropping it aborts it.
pub struct MblockWriter {
    inner: Arc<Inner>,
    class: Arc<Class>,
    id: u64,
    capacity: u64,
    extent: Extent,
    /// Bytes on the medium, whole blocks.
    written: u64,
    table: Vec<u32>,
    staging: AlignedBuf,
    staged: usize,
    /// A write failed: only aborting is left.
    failed: bool,
    /// The space was handed over to the committed mblock, or freed.
    settled: bool,
}

impl std::fmt::Debug for MblockWriter {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("MblockWriter").field("id", &self.id).field("len", &self.len()).finish_non_exhaustive()
    }
}

impl MblockWriter {
    pub(crate) fn new(inner: Arc<Inner>, class: Arc<Class>, id: u64, capacity: u64, extent: Extent) -> Self {
        let (table, staging) = (Vec::new(), AlignedBuf::zeroed(0));
        Self {
            inner,
            class,
            id,
            capacity,
            extent,
            written: 0,
            table,
            staging,
            staged: 0,
            failed: false,
            settled: false,
        }
    }

    /// The identity that it will have.
    pub fn id(&self) -> u64 {
        self.id
    }

    /// The class that it got.
    pub fn class(&self) -> MediaClass {
        self.class.class
    }

    /// Bytes written so far.
    #[allow(clippy::len_without_is_empty)] // Nobody asks.
    pub fn len(&self) -> u64 {
        self.written + self.staged as u64
    }

    /// Appends the buffers, one behind the other. Aligned memory ([`AlignedBuf`]) of whole blocks
    /// is written without being copied first.
    ///
    /// # Errors
    /// `Capacity`: nothing was written. Others: the writer can only be aborted.
    pub fn write(&mut self, buffers: &[IoSlice<'_>]) -> Result<(), ObjectError> {
        let object = Object::Mblock(self.id);
        if self.failed {
            return Err(ObjectError::Failed(object));
        }
        let wanted = buffers.iter().map(|b| b.len() as u64).sum::<u64>() + self.len();
        if wanted > self.capacity {
            return Err(ObjectError::Capacity { object, capacity: self.capacity, wanted });
        }
        self.write_all(buffers).inspect_err(|_| self.failed = true)
    }

    fn write_all(&mut self, buffers: &[IoSlice<'_>]) -> Result<(), ObjectError> {
        // What needs no copy is written together: the medium then always has the next part.
        let mut parts: Vec<&[u8]> = Vec::new();
        for buffer in buffers {
            let mut bytes: &[u8] = buffer;
            while !bytes.is_empty() {
                let whole = bytes.len() / BLOCK * BLOCK;
                if self.staged == 0 && whole > 0 && is_aligned(&bytes[..whole]) {
                    let (now, rest) = bytes.split_at(whole);
                    parts.extend(now.chunks(REQUEST));
                    bytes = rest;
                    continue;
                }
                self.put(&std::mem::take(&mut parts))?;
                bytes = self.stage(bytes)?;
            }
        }
        self.put(&parts)
    }

    /// Copies bytes, and writes what was copied when it is enough; gives those that are left.
    fn stage<'a>(&mut self, bytes: &'a [u8]) -> Result<&'a [u8], ObjectError> {
        if self.staging.is_empty() {
            self.staging = AlignedBuf::zeroed(STAGING);
        }
        let room = &mut self.staging[self.staged..];
        let (now, rest) = bytes.split_at(bytes.len().min(room.len()));
        room[..now.len()].copy_from_slice(now);
        self.staged += now.len();
        if self.staged == self.staging.len() {
            self.flush()?;
        }
        Ok(rest)
    }

    /// Writes the staged bytes; the last block is padded with zeros.
    fn flush(&mut self) -> Result<(), ObjectError> {
        let end = self.staged.next_multiple_of(BLOCK);
        self.staging[self.staged..end].fill(0);
        let staging = std::mem::replace(&mut self.staging, AlignedBuf::zeroed(0));
        self.staged = 0;
        let result = self.put(&[&staging[..end]]);
        self.staging = staging;
        result
    }

    /// Writes whole blocks behind those that are there.
    fn put(&mut self, parts: &[&[u8]]) -> Result<(), ObjectError> {
        if parts.is_empty() {
            return Ok(());
        }
        let bytes: u64 = parts.iter().map(|part| part.len() as u64).sum();
        let (id, table, at) = (self.id, &mut self.table, self.extent.offset + self.written);
        self.class
            .data
            .write_while(parts, at, &mut |part| checksum::extend(table, id, part))
            .during("writing", Object::Mblock(id))
            .map_err(|e| crate::disk::log::full_or(e, self.class.class, bytes))?;
        self.written += bytes;
        Ok(())
    }

    /// Writes everything, without making it durable. Gives the record for the metadata.
    fn finish(&mut self) -> Result<MblockRecord, ObjectError> {
        let object = Object::Mblock(self.id);
        if self.failed {
            return Err(ObjectError::Failed(object));
        }
        let len = self.len();
        self.failed = true;
        if self.staged > 0 {
            self.flush()?;
        }
        let table = checksum::table_bytes(&self.table);
        if !table.is_empty() {
            let at = self.extent.offset + self.written;
            self.class.data.write_at(&table, at).during("writing the checksums of", object)?;
        }
        self.failed = false;
        let (id, class, offset) = (self.id, self.class.class, self.extent.offset);
        Ok(MblockRecord { id, class, offset, len, table_crc: crc32c::crc32c(&table) })
    }

    /// Commits it: when this returns, it survives a crash. Gives its identity.
    ///
    /// # Errors
    /// `Failed`: whether it was committed shows when the pool is opened again. Others: it was not,
    /// and its space is free.
    pub fn commit(self) -> Result<u64, ObjectError> {
        let id = self.id;
        Self::commit_all(vec![self]).map(|_| id)
    }

    /// Commits several at the price of one; gives their identities. After a crash some may be there
    /// and some not.
    ///
    /// # Errors
    /// As [`MblockWriter::commit`]; one that fails fails all.
    ///
    /// # Panics
    /// When they are of different pools.
    pub fn commit_all(mut writers: Vec<Self>) -> Result<Vec<u64>, ObjectError> {
        let Some(first) = writers.first() else { return Ok(Vec::new()) };
        let inner = first.inner.clone();
        assert!(writers.iter().all(|w| Arc::ptr_eq(&w.inner, &inner)), "mblocks of different pools");
        let records = writers.iter_mut().map(Self::finish).collect::<Result<Vec<_>, _>>()?;
        for class in MediaClass::ALL {
            if let Some(writer) = writers.iter().find(|w| w.class.class == class) {
                writer.class.sync(Object::Mblock(writer.id))?;
            }
        }
        let records: Vec<Record> = records.into_iter().map(Record::Mblock).collect();
        if let Err(e) = inner.commit(records, Reserve::Keep) {
            // After a failed write the records may be there or not: the space must stay theirs.
            let failed = inner.journal().pair.is_failed();
            writers.iter_mut().for_each(|w| w.settled |= failed);
            return Err(e);
        }
        for writer in &mut writers {
            writer.settled = true;
            let used = checksum::stored_len(writer.written);
            let rest = Extent { offset: writer.extent.offset + used, len: writer.extent.len - used };
            writer.class.give(rest);
        }
        Ok(writers.iter().map(|w| w.id).collect())
    }

    /// Gives it up; its space is free at once.
    pub fn abort(self) {}
}

impl Drop for MblockWriter {
    fn drop(&mut self) {
        if !self.settled {
            self.class.give(self.extent);
        }
    }
}

/// A committed mblock.
#[derive(Clone)]
pub struct Mblock {
    pub(crate) info: Arc<MblockInfo>,
    pub(crate) class: Arc<Class>,
}

impl std::fmt::Debug for Mblock {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_tuple("Mblock").field(&self.info.record).finish()
    }
}

impl Mblock {
    /// Its properties.
    pub fn props(&self) -> MblockProps {
        self.info.props()
    }

    fn object(&self) -> Object {
        Object::Mblock(self.info.record.id)
    }

    /// Reads `into.len()` bytes from byte `offset` on, and checks them. Any offset and length will
    /// do; whole blocks into aligned memory ([`AlignedBuf`]) are read without being copied.
    ///
    /// # Errors
    /// `PastEnd`; `Damaged` names the first bad block; `NotFound` when it was deleted meanwhile.
    /// `into` holds anything then.
    pub fn read(&self, offset: u64, into: &mut [u8]) -> Result<(), ObjectError> {
        let (object, len) = (self.object(), self.info.record.len);
        let end = offset.saturating_add(into.len() as u64);
        if end > len {
            return Err(ObjectError::PastEnd { object, len, end });
        }
        let result = self.read_inside(offset, into);
        // After that its blocks may have become another's.
        if self.info.deleted.load(Ordering::Acquire) { Err(ObjectError::NotFound(object)) } else { result }
    }

    fn read_inside(&self, offset: u64, into: &mut [u8]) -> Result<(), ObjectError> {
        let block = BLOCK as u64;
        let whole = into.len() / BLOCK * BLOCK;
        let direct = if offset.is_multiple_of(block) && is_aligned(&into[..whole]) { whole } else { 0 };
        let (now, rest) = into.split_at_mut(direct);
        if !now.is_empty() {
            self.read_blocks(offset / block, now)?;
        }
        if rest.is_empty() {
            return Ok(());
        }
        let mut offset = offset + direct as u64;
        let mut bounce = AlignedBuf::zeroed((rest.len() + BLOCK).min(STAGING));
        let mut rest = rest;
        while !rest.is_empty() {
            let skip = (offset % block) as usize;
            let take = rest.len().min(bounce.len() - skip);
            let blocks = &mut bounce[..(skip + take).next_multiple_of(BLOCK)];
            self.read_blocks(offset / block, blocks)?;
            let (now, later) = rest.split_at_mut(take);
            now.copy_from_slice(&blocks[skip..skip + take]);
            (rest, offset) = (later, offset + take as u64);
        }
        Ok(())
    }

    /// Reads whole blocks from number `first` on. While some are read those that have come are
    /// checked.
    pub(crate) fn read_blocks(&self, first: u64, into: &mut [u8]) -> Result<(), ObjectError> {
        let table = self.table()?;
        let MblockRecord { id, offset, .. } = self.info.record;
        let mut bad = None;
        let mut check = |at: usize, part: &mut [u8]| {
            let found = checksum::first_bad(table, id, first + (at / BLOCK) as u64, part);
            bad = bad.into_iter().chain(found).min();
        };
        self.class.data.read_while(into, offset + first * BLOCK as u64, &mut check).during("reading", self.object())?;
        bad.map_or(Ok(()), |block| Err(self.damage(block).into()))
    }

    /// Reads single blocks, one behind the other into `into`, several at a time.
    pub(crate) fn read_scattered(&self, blocks: &[u64], into: &mut [u8]) -> Result<(), ObjectError> {
        let table = self.table()?;
        let (id, start) = (self.info.record.id, self.info.record.offset);
        let mut pieces: Vec<ReadPiece<'_>> = blocks
            .iter()
            .zip(into.chunks_exact_mut(BLOCK))
            .map(|(&block, into)| ReadPiece { offset: start + block * BLOCK as u64, into })
            .collect();
        self.class.data.read_many(&mut pieces).during("reading", self.object())?;
        let mut checked = blocks.iter().zip(&pieces);
        let bad = checked.find(|(block, piece)| checksum::first_bad(table, id, **block, piece.into).is_some());
        bad.map_or(Ok(()), |(&block, _)| Err(self.damage(block).into()))
    }

    pub(crate) fn damage(&self, block: u64) -> Damage {
        let what = "a block of data does not match its checksum";
        Damage { object: self.object(), offset: block * BLOCK as u64, what }
    }

    /// The checksums, read when they are first needed.
    pub(crate) fn table(&self) -> Result<&[u32], ObjectError> {
        if let Some(table) = self.info.table.get() {
            return Ok(table);
        }
        let (table, _) = self.read_table()?;
        Ok(self.info.table.get_or_init(|| table))
    }

    /// Reads the checksums, and whether they are whole. Damaged ones are still useful: blocks whose
    /// checksum is whole pass, the others are reported.
    pub(crate) fn read_table(&self) -> Result<(Vec<u32>, Option<Damage>), ObjectError> {
        let object = self.object();
        let blocks = checksum::blocks(self.info.record.len);
        // One without data may lie anywhere, also where the file was cut off since.
        if blocks > 0
            && self.info.extent().end() > self.class.data.len().during("looking at the data file of", object)?
        {
            return Err(self.info.cut_off().into());
        }
        claims::memory(blocks * 4).during("reading the checksums of", object)?;
        let mut bytes = AlignedBuf::zeroed(blocks as usize * 4);
        let at = self.info.record.offset + blocks * BLOCK as u64;
        if !bytes.is_empty() {
            self.class.data.read_at(&mut bytes, at).during("reading the checksums of", object)?;
        }
        let what = "its checksums are not what was written";
        let damage = (crc32c::crc32c(&bytes) != self.info.record.table_crc).then_some(Damage {
            object,
            offset: blocks * BLOCK as u64,
            what,
        });
        let table = bytes.chunks_exact(4).take(blocks as usize);
        Ok((table.map(|b| u32::from_le_bytes([b[0], b[1], b[2], b[3]])).collect(), damage))
    }
}
