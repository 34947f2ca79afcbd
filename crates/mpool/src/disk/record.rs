//! The records of the pool's own metadata, in an MDC, each written twice.
//!
//! `postcard` encodes them; a variant's number and its fields are the format. Add new variants at
//! the end only, and raise [`crate::FORMAT_VERSION`] when an old program could not do without them.

use std::path::PathBuf;

use serde::{Deserialize, Serialize};

use crate::disk::checksum;
use crate::disk::space;
use crate::{BLOCK, MediaClass};

/// The highest identity: the next ones can be counted for ever.
const MAX_ID: u64 = u64::MAX / 2;

/// One change of the pool.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) enum Record {
    /// The pool's name.
    Name(String),
    /// A class was added.
    Class { class: MediaClass, path: PathBuf },
    /// No object with this number or a higher one was ever made.
    NextId(u64),
    /// An mblock was committed.
    Mblock(MblockRecord),
    /// An mblock was deleted.
    MblockGone(u64),
    /// An mlog was made.
    Mlog(LogRecord),
    /// An mlog was deleted.
    MlogGone(u64),
    /// An MDC was made.
    Mdc(LogRecord),
    /// An MDC was deleted.
    MdcGone(u64),
    /// A part of a data file may belong to an mblock whose record is lost.
    Kept { class: MediaClass, offset: u64, len: u64 },
}

/// A committed mblock. In the data file at `offset`: the data, zeros up to a whole block, then the
/// checksums: for each block 4 bytes, little-endian, zeros up to a whole block.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct MblockRecord {
    pub(crate) id: u64,
    pub(crate) class: MediaClass,
    /// In the class's data file.
    pub(crate) offset: u64,
    /// Bytes of data.
    pub(crate) len: u64,
    /// crc32c of all the checksums.
    pub(crate) table_crc: u32,
}

/// An mlog or an MDC.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct LogRecord {
    pub(crate) id: u64,
    pub(crate) class: MediaClass,
    /// Bytes of frames that it may hold; for an MDC, each of its logs.
    pub(crate) capacity: u64,
}

impl Record {
    pub(crate) fn encode(&self) -> Vec<u8> {
        // Writing into a vector cannot fail, and there is nothing here that cannot be encoded.
        postcard::to_allocvec(self).unwrap_or_default()
    }

    /// `None`: this is no record, or its fields contradict each other, so no program of this format
    /// wrote it.
    pub(crate) fn decode(bytes: &[u8]) -> Option<Self> {
        postcard::from_bytes(bytes).ok().filter(Self::is_possible)
    }

    pub(crate) fn is_possible(&self) -> bool {
        match self {
            Self::Name(_) | Self::Class { .. } => true,
            Self::NextId(id) | Self::MblockGone(id) | Self::MlogGone(id) | Self::MdcGone(id) => *id <= MAX_ID,
            Self::Mlog(log) | Self::Mdc(log) => log.id <= MAX_ID,
            Self::Kept { offset, len, .. } => {
                let whole = offset.is_multiple_of(BLOCK as u64) && len.is_multiple_of(BLOCK as u64);
                whole && offset.checked_add(*len).is_some_and(|end| end <= space::MAX_LEN)
            }
            Self::Mblock(m) => {
                let end = m.offset.checked_add(checksum::stored_len(m.len));
                m.id <= MAX_ID && m.offset.is_multiple_of(BLOCK as u64) && end.is_some_and(|end| end <= space::MAX_LEN)
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_encoding_is_fixed() {
        let mblock = MblockRecord { id: 300, class: MediaClass::Staging, offset: 4096, len: 5, table_crc: 0x0102_0304 };
        let log = LogRecord { id: 2, class: MediaClass::Capacity, capacity: 1 };
        let samples: [(Record, &[u8]); 10] = [
            (Record::Name("ab".into()), b"\0\x02ab"),
            (Record::Class { class: MediaClass::Memory, path: "/m".into() }, b"\x01\x02\x02/m"),
            (Record::NextId(7), b"\x02\x07"),
            (Record::Mblock(mblock), b"\x03\xac\x02\x01\x80\x20\x05\x84\x86\x88\x08"),
            (Record::MblockGone(1), b"\x04\x01"),
            (Record::Mlog(log), b"\x05\x02\0\x01"),
            (Record::MlogGone(2), b"\x06\x02"),
            (Record::Mdc(log), b"\x07\x02\0\x01"),
            (Record::MdcGone(2), b"\x08\x02"),
            (Record::Kept { class: MediaClass::Staging, offset: 4096, len: 8192 }, b"\x09\x01\x80\x20\x80\x40"),
        ];
        for (record, bytes) in samples {
            assert_eq!(record.encode(), bytes, "{record:?}");
            assert_eq!(Record::decode(bytes), Some(record));
        }
        assert_eq!(Record::decode(b"\x0a"), None);
    }

    #[test]
    fn what_cannot_be_is_no_record() {
        let whole = MblockRecord { id: 3, class: MediaClass::Capacity, offset: 4096, len: 5, table_crc: 0 };
        let bad = [
            Record::Mblock(MblockRecord { offset: 1, ..whole }),
            Record::Mblock(MblockRecord { offset: u64::MAX - 4095, ..whole }),
            Record::Mblock(MblockRecord { len: u64::MAX, ..whole }),
            Record::Mblock(MblockRecord { id: u64::MAX, ..whole }),
            Record::NextId(u64::MAX),
            Record::MdcGone(u64::MAX),
        ];
        assert!(Record::decode(&Record::Mblock(whole).encode()).is_some());
        bad.iter().for_each(|record| assert_eq!(Record::decode(&record.encode()), None, "{record:?}"));
    }
}
