//! Checkpoints in a pool: pages stored once, and for each checkpoint a map of pages.
//!
//! A *data* mblock holds up to 8192 pages, followed by their hashes. The *map* of a checkpoint says
//! where each page is; checkpoints share the parts of their maps that are equal (`map`). The pool's
//! root MDC lists data mblocks and checkpoints (`list`). The record of a checkpoint names the
//! mblocks that its map needs, so the records say how many checkpoints need each of them. A data
//! mblock that no checkpoint needs, and an mblock without a record, are left over from an
//! interruption; they are removed when the next checkpoint begins.
//!
//! A page is looked up by its hash (128 bits of XXH3, seeded with the pool's identity) in the
//! [`index`], and then compared with the pool's page byte by byte (`pages`); only this comparison
//! decides.
//!
//! Beside a checkpoint lie bytes of its owner's, if it has any: a guest's devices, for example
//! (`attached`).
//!
//! Pages that none of the newest checkpoints has may be compressed ([`compressed`]).
//!
//! *Damage.* mpool detects bytes that differ from what was written. The catalogue checks its
//! records against the mblocks before it uses them. A damaged checkpoint is an error that says so;
//! the others remain readable. A catalogue that has lost records is never changed, because an
//! mblock without a record may be needed. A page of the pool that cannot be read is stored again.

mod attached;
mod check;
mod classes;
mod compressed;
mod error;
mod here;
mod image;
pub mod index;
mod list;
mod map;
mod pages;
mod remove;
mod repack;
mod simulated;
mod store;
#[cfg(test)]
mod tests;
mod turns;
mod usage;
mod view;
mod writer;

use std::ops::Deref;

use mpool::{Access, BLOCK, Mdc, ObjectError, Pool, ROOT_MDC};
use serde::{Deserialize, Serialize};

pub use check::Wrong;
pub use error::{
    BeginError, CatalogDamage, FindError, Finding, Flaw, OpenError, PageFlaw, ReadError, RemoveError, RepackError,
    StoreError, Unrepaired, Warning,
};
pub use here::Others;
pub use image::{Image, LeaseError};
use index::{Index, Limits, Run};
use list::{Entry, List, Needs, encode};
pub use repack::{Repacked, Repacking};
pub use store::{Store, ensure_name};
pub use usage::{Held, Usage};
pub use view::View;
pub use writer::{PutOff, Writer, hash};

/// Version of the format, in the root MDC's first record.
const FORMAT: u32 = 3;
/// Version of a pool with compressed data mblocks. A program that does not know them refuses it.
const COMPRESSED: u32 = 4;

/// Whether this program knows a version.
fn is_known(format: u32) -> bool {
    matches!(format, FORMAT | COMPRESSED)
}

/// Pages of a data mblock.
const PAGES: usize = 8192;
/// Pages of a leaf of a map.
const LEAF: usize = BLOCK / 8;
/// Bytes of a hash on the medium.
const HASH: usize = 16;
/// Bytes of the root MDC from which it is compacted when a checkpoint begins, if it has twice the
/// bytes that it then will.
const COMPACT_FROM: u64 = 1 << 20;
/// Bytes of the root MDC below which it has no records.
const EMPTY_BELOW: u64 = 128;
/// Data mblocks in a record, at most.
const IN_RECORD: usize = 1 << 16;
/// Bound on the bytes of a checkpoint's regions: an address space with 5-level page tables.
const MOST_BYTES: u64 = 1 << 57;

/// A stored checkpoint.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Checkpoint {
    /// Its name.
    pub name: String,
    /// When it was taken, seconds since 1970.
    pub created: u64,
    /// The process: its program's name and its number.
    pub source: String,
    /// Address and length in bytes of each region.
    pub regions: Vec<(u64, u64)>,
    /// Number of pages that the pool did not have.
    pub new_pages: u64,
    /// Blocks ([`mpool::BLOCK`]) of its map that no other checkpoint had.
    pub map_pages: u64,
    /// The mblock with the root of its map.
    root: u64,
    /// The root that it had first. No other checkpoint of the pool has this number.
    number: u64,
    /// The other mblocks that it needs.
    #[serde(skip)]
    needs: Needs,
}

impl Checkpoint {
    /// Bytes of memory in all regions.
    pub fn bytes(&self) -> u64 {
        self.regions.iter().fold(0, |sum, (_, len)| sum.saturating_add(*len))
    }

    /// Bytes that storing it took in the pool.
    pub fn stored_bytes(&self) -> u64 {
        self.new_pages.saturating_add(self.map_pages).saturating_mul(mpool::BLOCK as u64)
    }

    /// Whether it can have its name and its counts: who owns a pool, or serves one, says them.
    pub(crate) fn is_sound(&self) -> bool {
        ensure_name(&self.name).is_ok() && self.new_pages.max(self.map_pages) <= MOST_BYTES / mpool::BLOCK as u64
    }
}

/// The bytes of regions. `None`: they are not whole blocks, or more than there can be.
pub(crate) fn memory(regions: &[(u64, u64)]) -> Option<u64> {
    let is_whole = |len: u64| len.is_multiple_of(mpool::BLOCK as u64);
    let add = |sum: u64, &(_, len): &(u64, u64)| sum.checked_add(len).filter(|sum| is_whole(len) && *sum < MOST_BYTES);
    regions.iter().try_fold(0, add)
}

/// The checkpoints of a pool, to be read and changed.
pub struct Catalog {
    mdc: Mdc,
    view: View,
    /// The runs of the index, as recorded.
    runs: Vec<Run>,
    /// Data mblocks with a lower identity are in the index.
    covered: u64,
    /// The index, if a checkpoint was stored since the catalogue was opened.
    index: Option<Index>,
    limits: Limits,
    /// Version of the format that is recorded.
    format: u32,
    /// Whether the list has the last record is not known.
    unknown: bool,
}

impl Deref for Catalog {
    type Target = View;

    fn deref(&self) -> &View {
        &self.view
    }
}

impl Catalog {
    /// Reads the catalogue of a pool. An empty pool that is open exclusively becomes one of
    /// checkpoints.
    ///
    /// # Errors
    /// If the list of checkpoints cannot be read, or the pool holds something else.
    pub fn open(pool: &Pool) -> Result<Self, OpenError> {
        Self::open_with(pool, Limits::default())
    }

    /// Opens a catalogue, as [`Catalog::open`] does, with other limits of the index.
    ///
    /// # Errors
    /// Those of [`Catalog::open`].
    pub fn open_with(pool: &Pool, limits: Limits) -> Result<Self, OpenError> {
        let mut mdc = pool.mdc_open(ROOT_MDC).map_err(StoreError::from)?;
        let List { data, checkpoints, attached, runs, covered, format, damage } = List::read(&mut mdc)?;
        let empty = mdc.usage() < EMPTY_BELOW && pool.mblocks().is_empty();
        if !format.is_some_and(is_known) && (format.is_some() || !(empty || damage.is_some())) {
            return Err(OpenError::Format);
        }
        if format.is_none() && damage.is_none() && pool.props().access == Access::Exclusive {
            let first = encode(&[Entry::Format(FORMAT)])?;
            mdc.append(&[&first[0]], true).map_err(StoreError::from)?;
        }
        let view = View { pool: pool.clone(), data, checkpoints, attached, damage };
        Ok(Self { mdc, view, runs, covered, index: None, limits, format: format.unwrap_or(FORMAT), unknown: false })
    }

    /// The checkpoints as they are now, for other threads. Those that are removed later cannot be
    /// read then.
    pub fn view(&self) -> View {
        self.view.clone()
    }

    fn ensure_whole(&self) -> Result<(), CatalogDamage> {
        self.damage().map_or(Ok(()), Err)
    }

    fn append(&mut self, entries: &[Entry]) -> Result<(), StoreError> {
        self.append_by(entries, |mdc, records| mdc.append(records, true))?;
        entries.iter().for_each(|entry| {
            if let Entry::Format(format) = entry {
                self.format = *format;
            }
        });
        Ok(())
    }

    /// Appends entries because of which space will be free.
    fn append_freeing(&mut self, entries: &[Entry]) -> Result<(), StoreError> {
        self.append_by(entries, |mdc, records| mdc.append_freeing(records, true))
    }

    /// Appends entries: afterwards the last of them is there (`Ok`), or not, or that is not known
    /// ([`StoreError::Unknown`]). After a failed write the list is read again to know it.
    fn append_by(
        &mut self,
        entries: &[Entry],
        append: impl FnOnce(&mut Mdc, &[&[u8]]) -> Result<(), ObjectError>,
    ) -> Result<(), StoreError> {
        self.ensure_known()?;
        let records = encode(entries)?;
        let records: Vec<&[u8]> = records.iter().map(Vec::as_slice).collect();
        let Err(error) = append(&mut self.mdc, &records) else { return Ok(()) };
        match self.last_record() {
            Ok(Some(last)) if Some(&*last) == records.last().copied() => Ok(()),
            Ok(_) => Err(error.into()),
            Err(_) => {
                self.unknown = true;
                Err(StoreError::Unknown(error))
            }
        }
    }

    /// The last record, if it had to be read from the medium again because a write failed.
    fn last_record(&mut self) -> Result<Option<Vec<u8>>, ObjectError> {
        let mut last = None;
        if self.mdc.open_again()? {
            while let Some(record) = self.mdc.read()? {
                last = Some(record);
            }
        }
        Ok(last)
    }

    /// What the list has must be known before more is written, or anything is deleted.
    fn ensure_known(&self) -> Result<(), StoreError> {
        if self.unknown { Err(StoreError::Unread) } else { Ok(()) }
    }

    /// Identifies a checkpoint and its pool, for [`Writer::earlier`].
    pub fn label(pool: &Pool, checkpoint: &Checkpoint) -> String {
        format!("{:032x}/{:x}", u128::from_be_bytes(pool.props().uuid), checkpoint.number)
    }

    /// Rewrites the list, if it has become long.
    fn compact(&mut self) -> Result<(), StoreError> {
        if self.mdc.usage() <= COMPACT_FROM {
            return Ok(());
        }
        let (compressed, data): (Vec<_>, Vec<_>) = self.data.iter().partition(|(_, data)| data.compressed);
        let chunks = |data: Vec<(&u64, &list::Data)>, entry: fn(Vec<(u64, u32)>) -> Entry| {
            let data: Vec<(u64, u32)> = data.iter().map(|(id, data)| (**id, data.pages)).collect();
            data.chunks(IN_RECORD).map(|some| entry(some.to_vec())).collect::<Vec<_>>()
        };
        // Programs that do not know compressed ones can read it again when there are none left.
        let format = if compressed.is_empty() { FORMAT } else { COMPRESSED };
        let mut entries = vec![Entry::Format(format)];
        entries.extend(chunks(data, Entry::Data));
        entries.extend(chunks(compressed, Entry::Compressed));
        let attached = |c: &Checkpoint| Some(Entry::Attached(c.number, self.attached.get(&c.number)?.clone()));
        entries.extend(self.checkpoints.iter().filter_map(attached));
        entries.extend(self.checkpoints.iter().map(|c| Entry::Checkpoint(c.clone(), c.needs.clone())));
        entries.push(Entry::Index(self.runs.clone(), self.covered));
        let records = encode(&entries)?;
        let records: Vec<&[u8]> = records.iter().map(Vec::as_slice).collect();
        if records.iter().map(|record| record.len() as u64 + 32).sum::<u64>() * 2 > self.mdc.usage() {
            return Ok(());
        }
        let compact = |mdc: &mut Mdc| {
            mdc.start_compaction()?;
            mdc.append(&records, false)?;
            mdc.end_compaction()
        };
        // Both lists say the same: whichever there is, is right. The lower format may be there.
        self.format = format;
        compact(&mut self.mdc).map_err(|error| {
            self.unknown = self.mdc.open_again().is_err();
            error.into()
        })
    }
}
