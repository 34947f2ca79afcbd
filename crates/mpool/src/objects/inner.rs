//! An open pool, as its objects see it.

use std::path::PathBuf;
use std::sync::Arc;

use parking_lot::{Mutex, MutexGuard, RwLock};

use crate::MediaClass;
use crate::disk::group::Group;
use crate::disk::key::Keys;
use crate::disk::log::Reserve;
use crate::disk::medium::{Access, Storage};
use crate::disk::record::Record;
use crate::disk::superblock::{State, Superblock, write_superblock};
use crate::error::ObjectError;
use crate::finding::Finding;
use crate::objects::class::Class;
use crate::objects::meta::{Journal, Meta, Tables};

/// What the handles of an open pool share: the pool is closed when the last of them is gone.
pub(crate) struct Inner {
    pub(crate) storage: Arc<dyn Storage>,
    /// Of an encrypted pool.
    pub(crate) keys: Option<Arc<Keys>>,
    pub(crate) path: PathBuf,
    pub(crate) superblock: Superblock,
    pub(crate) access: Access,
    pub(crate) classes: RwLock<[Option<Arc<Class>>; 3]>,
    /// Locked for moments only: never across a write or a sync.
    metadata: Mutex<Meta>,
    /// Locked before `metadata`, if both are.
    journal: Mutex<Journal>,
    commits: Group<Commit, Result<(), ObjectError>>,
    /// Findings of opening the pool.
    pub(crate) findings: Vec<Finding>,
}

/// Records that a thread wants to be durable.
struct Commit {
    records: Vec<Record>,
    reserve: Reserve,
}

/// What opening a pool gives.
pub(crate) struct Parts {
    pub(crate) storage: Arc<dyn Storage>,
    pub(crate) keys: Option<Arc<Keys>>,
    pub(crate) path: PathBuf,
    pub(crate) superblock: Superblock,
    pub(crate) access: Access,
    pub(crate) classes: [Option<Arc<Class>>; 3],
    pub(crate) tables: Tables,
    pub(crate) journal: Journal,
    pub(crate) findings: Vec<Finding>,
}

impl Inner {
    pub(crate) fn new(parts: Parts) -> Self {
        let Parts { storage, keys, path, superblock, access, classes, tables, journal, findings } = parts;
        Self {
            storage,
            keys,
            path,
            superblock,
            access,
            classes: RwLock::new(classes),
            metadata: Mutex::new(Meta::new(tables)),
            journal: Mutex::new(journal),
            commits: Group::default(),
            findings,
        }
    }

    /// Makes records durable, with those of other threads, then applies them. After an error none
    /// of them is applied; after a failed write the metadata can no longer be changed.
    pub(crate) fn commit(&self, records: Vec<Record>, reserve: Reserve) -> Result<(), ObjectError> {
        self.commits.run(Commit { records, reserve }, |commits| self.commit_all(commits))
    }

    fn commit_all(&self, commits: Vec<Commit>) -> Vec<Result<(), ObjectError>> {
        let mut journal = self.journal.lock();
        let mut write = |commits: &[Commit]| {
            let records: Vec<Record> = commits.iter().flat_map(|commit| commit.records.iter().cloned()).collect();
            let all_free = commits.iter().all(|commit| commit.reserve == Reserve::Use);
            journal.write(&records, if all_free { Reserve::Use } else { Reserve::Keep })?;
            let mut meta = self.meta();
            records.into_iter().for_each(|record| meta.tables.apply(record));
            Ok(())
        };
        let results = match write(&commits) {
            Ok(()) => commits.iter().map(|_| Ok(())).collect(),
            // Together they may be too much, or need room that only some of them may have.
            Err(_) if commits.len() > 1 => commits.chunks(1).map(&mut write).collect(),
            Err(e) => vec![Err(e)],
        };
        let objects = self.meta().tables.objects();
        if journal.is_long(objects) {
            let records = self.meta().tables.snapshot();
            // When it fails (a full disk), the old log is as good as before.
            let _ = journal.compact(&records);
        }
        results
    }

    /// The metadata on the medium.
    pub(crate) fn journal(&self) -> MutexGuard<'_, Journal> {
        self.journal.lock()
    }

    pub(crate) fn meta(&self) -> MutexGuard<'_, Meta> {
        self.metadata.lock()
    }

    pub(crate) fn class(&self, class: MediaClass) -> Result<Arc<Class>, ObjectError> {
        let classes = self.classes.read();
        classes[class as usize].clone().ok_or(ObjectError::NoClass(class))
    }

    pub(crate) fn check_writable(&self) -> Result<(), ObjectError> {
        if self.access == Access::Shared { Err(ObjectError::ReadOnly) } else { Ok(()) }
    }
}

impl Drop for Inner {
    fn drop(&mut self) {
        if self.access == Access::Shared {
            return;
        }
        let end = self.journal().close();
        if let (Some(end), Ok(class)) = (end, self.class(MediaClass::Capacity)) {
            // Without it, an end that is missing when the pool is opened looks unfinished.
            let _ = write_superblock(&*class.medium, &self.superblock.in_state(State::Closed(end)));
        }
    }
}
