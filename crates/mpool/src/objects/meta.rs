//! The pool's own metadata: which objects there are, in memory and in the metadata MDC.

use std::collections::{BTreeMap, BTreeSet, HashMap, HashSet};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use crate::disk::log::Reserve;
use crate::disk::medium::{Access, Medium};
use crate::disk::pair::{Found, Pair, PairPlace};
use crate::disk::record::{LogRecord, Record};
use crate::disk::space::Extent;
use crate::disk::superblock::End;
use crate::error::{Damage, Object, ObjectError};
use crate::objects::info::MblockInfo;
use crate::{MediaClass, ROOT_MDC};

/// Bytes of metadata below which compacting is not worthwhile.
const COMPACT_FROM: u64 = 1 << 20;
/// A record, on average; metadata are compacted when they are eight times as long as that for every
/// object.
const RECORD_BYTES: u64 = 48;

/// Bytes that each log of the root MDC may hold.
pub(crate) const ROOT_CAPACITY: u64 = 1 << 30;

/// The tables that replaying the metadata gives.
#[derive(Debug, Default)]
pub(crate) struct Tables {
    pub(crate) name: String,
    pub(crate) classes: BTreeMap<MediaClass, PathBuf>,
    pub(crate) mblocks: HashMap<u64, Arc<MblockInfo>>,
    pub(crate) mlogs: BTreeMap<u64, LogRecord>,
    pub(crate) mdcs: BTreeMap<u64, LogRecord>,
    /// What may belong to mblocks whose records are lost.
    pub(crate) kept: Vec<(MediaClass, Extent)>,
    pub(crate) next_id: u64,
}

impl Tables {
    /// Those of a pool without records.
    pub(crate) fn new() -> Self {
        Self { next_id: ROOT_MDC + 1, ..Self::default() }
    }

    /// Bytes of each class that may belong to mblocks whose records are lost.
    pub(crate) fn kept_bytes(&self) -> Vec<(MediaClass, u64)> {
        let of = |class| self.kept.iter().filter(|(of, _)| *of == class).map(|(_, extent)| extent.len).sum();
        MediaClass::ALL.map(|class| (class, of(class))).into_iter().filter(|(_, bytes)| *bytes > 0).collect()
    }

    pub(crate) fn apply(&mut self, record: Record) {
        let mut seen = |id: u64| self.next_id = self.next_id.max(id.saturating_add(1));
        match record {
            Record::Name(name) => self.name = name,
            Record::Class { class, path } => {
                self.classes.insert(class, path);
            }
            Record::NextId(id) => self.next_id = self.next_id.max(id),
            Record::Mblock(mblock) => {
                seen(mblock.id);
                self.mblocks.insert(mblock.id, Arc::new(MblockInfo::new(mblock)));
            }
            Record::MblockGone(id) => {
                seen(id);
                self.mblocks.remove(&id);
            }
            Record::Mlog(log) => {
                seen(log.id);
                self.mlogs.insert(log.id, log);
            }
            Record::MlogGone(id) => {
                seen(id);
                self.mlogs.remove(&id);
            }
            Record::Mdc(log) => {
                seen(log.id);
                self.mdcs.insert(log.id, log);
            }
            Record::MdcGone(id) => {
                seen(id);
                self.mdcs.remove(&id);
            }
            Record::Kept { class, offset, len } => self.kept.push((class, Extent { offset, len })),
        }
    }

    /// Adds what every pool has, where its record is lost: the capacity class, and the root MDC.
    pub(crate) fn assume(&mut self, path: &Path) {
        let class = MediaClass::Capacity;
        self.classes.entry(class).or_insert_with(|| path.into());
        self.mdcs.entry(ROOT_MDC).or_insert(LogRecord { id: ROOT_MDC, class, capacity: ROOT_CAPACITY });
    }

    /// The records to write when all objects of a class are lost.
    pub(crate) fn gone_with(&self, class: MediaClass) -> Vec<Record> {
        let of_class = self.mblocks.values().map(|m| m.record).filter(|m| m.class == class);
        // Always in the same order: seeds of the tests replay.
        let mblocks = of_class.map(|m| m.id).collect::<BTreeSet<_>>().into_iter().map(Record::MblockGone);
        let mlogs = self.mlogs.values().filter(|log| log.class == class).map(|log| Record::MlogGone(log.id));
        let mdcs = self.mdcs.values().filter(|log| log.class == class).map(|log| Record::MdcGone(log.id));
        mblocks.chain(mlogs).chain(mdcs).collect()
    }

    /// Everything, as few records.
    pub(crate) fn snapshot(&self) -> Vec<Record> {
        let mut all = vec![Record::Name(self.name.clone()), Record::NextId(self.next_id)];
        all.extend(self.classes.iter().map(|(&class, path)| Record::Class { class, path: path.clone() }));
        let mut mblocks: Vec<_> = self.mblocks.values().map(|m| m.record).collect();
        mblocks.sort_unstable_by_key(|record| record.id);
        all.extend(mblocks.into_iter().map(Record::Mblock));
        all.extend(self.mlogs.values().map(|&log| Record::Mlog(log)));
        all.extend(self.mdcs.values().map(|&log| Record::Mdc(log)));
        let kept = self.kept.iter().map(|&(class, Extent { offset, len })| Record::Kept { class, offset, len });
        all.extend(kept);
        all
    }

    pub(crate) fn objects(&self) -> u64 {
        (self.mblocks.len() + self.mlogs.len() + self.mdcs.len() + self.classes.len() + 2) as u64
    }
}

/// What is known of an open pool's objects.
pub(crate) struct Meta {
    pub(crate) tables: Tables,
    /// Logs that are open.
    pub(crate) open_logs: HashSet<u64>,
}

impl Meta {
    pub(crate) fn new(tables: Tables) -> Self {
        Self { tables, open_logs: HashSet::new() }
    }

    /// A number that no object ever had.
    pub(crate) fn new_id(&mut self) -> u64 {
        let id = self.tables.next_id;
        self.tables.next_id += 1;
        id
    }
}

/// The metadata on the medium.
pub(crate) struct Journal {
    pub(crate) pair: Pair,
}

fn place(medium: &dyn Medium) -> PairPlace<'_> {
    PairPlace {
        medium,
        names: ["meta-0".into(), "meta-1".into()],
        objects: [Object::Metadata(0), Object::Metadata(1)],
        class: MediaClass::Capacity,
        id: 0,
    }
}

impl Journal {
    /// Makes the metadata of a new pool.
    pub(crate) fn create(medium: &dyn Medium, name: &str, path: PathBuf) -> Result<Self, ObjectError> {
        let mut journal = Self { pair: Pair::create(&place(medium))? };
        let class = MediaClass::Capacity;
        journal.write(&[Record::Name(name.into()), Record::Class { class, path }], Reserve::Keep)?;
        Ok(journal)
    }

    /// Metadata without a record, which are no pool's before [`Journal::write_anew`].
    pub(crate) fn create_empty(medium: &dyn Medium) -> Result<Self, ObjectError> {
        Ok(Self { pair: Pair::create_empty(&place(medium))? })
    }

    /// Writes the metadata of which a part is lost anew; until that is done they are what they
    /// were.
    pub(crate) fn write_anew(&mut self, medium: &dyn Medium, records: &[Record]) -> Result<(), ObjectError> {
        let records: Vec<Vec<u8>> = records.iter().map(Record::encode).collect();
        let records: Vec<&[u8]> = records.iter().map(Vec::as_slice).collect();
        self.pair.write_anew(&place(medium), &records)
    }

    /// Reads the metadata of a pool. Nothing is written before [`Journal::mend`].
    pub(crate) fn open(medium: &dyn Medium, access: Access) -> Result<(Self, Tables, Found), ObjectError> {
        let (mut tables, mut unknown) = (Tables::new(), 0);
        let (pair, mut found) = Pair::open(&place(medium), access, &mut |bytes| match Record::decode(bytes) {
            Some(record) => tables.apply(record),
            None => unknown += 1,
        })?;
        if unknown > 0 {
            let what = "a whole record that this version does not understand";
            found.damage.push(Damage { object: Object::Metadata(0), offset: 0, what });
            found.lost += unknown;
        }
        Ok((Self { pair }, tables, found))
    }

    /// Makes all their files what they should be.
    pub(crate) fn mend(&mut self, medium: &dyn Medium) -> Result<(), ObjectError> {
        self.pair.mend(&place(medium))
    }

    /// Makes records durable. After an error none of them is there; after a failed write the
    /// metadata can no longer be changed.
    pub(crate) fn write(&mut self, records: &[Record], reserve: Reserve) -> Result<(), ObjectError> {
        let bytes: Vec<Vec<u8>> = records.iter().map(Record::encode).collect();
        let bytes: Vec<&[u8]> = bytes.iter().map(Vec::as_slice).collect();
        self.pair.append(&bytes, reserve)?;
        self.pair.sync()
    }

    /// Whether they are to be written anew, for this many objects.
    pub(crate) fn is_long(&self, objects: u64) -> bool {
        self.pair.len() > COMPACT_FROM && self.pair.len() > 8 * RECORD_BYTES * objects
    }

    /// Writes the metadata anew, as few records.
    pub(crate) fn compact(&mut self, records: &[Record]) -> Result<(), ObjectError> {
        let records: Vec<Vec<u8>> = records.iter().map(Record::encode).collect();
        self.pair.start_compaction()?;
        let records: Vec<&[u8]> = records.iter().map(Vec::as_slice).collect();
        let written = records.chunks(4096).try_for_each(|some| self.pair.append(some, Reserve::Keep));
        if let Err(e) = written {
            self.pair.abandon_compaction();
            return Err(e);
        }
        self.pair.end_compaction()
    }

    /// Makes the end of the records known to the log. `None`: that failed, or something before.
    pub(crate) fn close(&mut self) -> Option<End> {
        self.pair.close().ok().map(|()| self.pair.end())
    }
}
