//! A committed mblock as the pool knows it.

use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};

use crate::MediaClass;
use crate::disk::checksum;
use crate::disk::record::MblockRecord;
use crate::disk::space::Extent;
use crate::error::{Damage, Object};

/// The properties of a committed mblock.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MblockProps {
    /// Its identity, for ever.
    pub id: u64,
    /// Its class.
    pub class: MediaClass,
    /// Bytes of data.
    pub len: u64,
    /// Bytes on the medium, checksums too.
    pub stored: u64,
    /// Maps that show it.
    pub maps: u32,
}

/// A committed mblock as the pool knows it.
#[derive(Debug)]
pub(crate) struct MblockInfo {
    pub(crate) record: MblockRecord,
    pub(crate) maps: AtomicU32,
    /// Its deletion is under way. Changed under the lock of the tables.
    pub(crate) leaving: AtomicBool,
    pub(crate) deleted: AtomicBool,
    /// Its checksums, read when they are first needed.
    pub(crate) table: OnceLock<Vec<u32>>,
}

impl MblockInfo {
    pub(crate) fn new(record: MblockRecord) -> Self {
        let (leaving, deleted) = (AtomicBool::new(false), AtomicBool::new(false));
        Self { record, maps: AtomicU32::new(0), leaving, deleted, table: OnceLock::new() }
    }

    pub(crate) fn extent(&self) -> Extent {
        Extent { offset: self.record.offset, len: checksum::stored_len(self.record.len) }
    }

    /// The damage to report when the data file is shorter.
    pub(crate) fn cut_off(&self) -> Damage {
        Damage { object: Object::Mblock(self.record.id), offset: 0, what: "the data file ends before it does" }
    }

    pub(crate) fn props(&self) -> MblockProps {
        let MblockRecord { id, class, len, .. } = self.record;
        MblockProps { id, class, len, stored: self.extent().len, maps: self.maps.load(Ordering::Relaxed) }
    }
}
