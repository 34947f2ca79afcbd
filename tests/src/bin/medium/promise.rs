//! What a pool has acknowledged, and whether it is there.

use std::collections::BTreeMap;
use std::fmt::Debug;
use std::io::IoSlice;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail, ensure};
use mpool::{Allocation, Damage, Finding, MblockWriter, MediaClass, Object, OpenOptions, Pool, PoolError, ROOT_MDC};

/// The bytes of an mblock or a record: its number says them.
pub(crate) fn content(number: u64, len: usize) -> Vec<u8> {
    (0..len as u64).map(|i| (number.wrapping_mul(0x9e37_79b9) ^ i.wrapping_mul(number | 1) >> 7) as u8).collect()
}

/// The bytes that an mblock has.
pub(crate) fn length(id: u64) -> usize {
    (id.wrapping_mul(7919) % 50_000) as usize
}

/// A record of a log: its number, and bytes that follow from it.
pub(crate) fn record(number: u64) -> Vec<u8> {
    let len = (number.wrapping_mul(31) % 900) as usize;
    number.to_le_bytes().into_iter().chain(content(number, len)).collect()
}

/// Where a pool's classes are.
pub(crate) fn places(root: &Path) -> (PathBuf, PathBuf) {
    (root.join("pool"), root.join("staging"))
}

/// An operation of the workload.
#[derive(Clone, Debug)]
pub(crate) enum Operation {
    Make,
    AddClass,
    Commit(Vec<u64>),
    Delete(Vec<u64>),
    /// A record of the log, synced or not.
    Log(u64, bool),
    EraseLog,
    /// A record of the root MDC, synced.
    Mdc(u64),
    /// The root MDC becomes this record.
    CompactMdc(u64),
    /// Makes an mlog. Its number, once that is known.
    MakeLog(Option<u64>),
    DeleteLog(u64),
}

/// An operation begins or was acknowledged.
#[derive(Clone, Debug)]
pub(crate) struct Event {
    pub(crate) operation: Operation,
    pub(crate) done: bool,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
enum There {
    Yes,
    Maybe,
    #[default]
    No,
}

/// Records of a log or an MDC, in order.
#[derive(Clone, Debug, Default)]
struct Records {
    all: Vec<u64>,
    /// How many of them must be there.
    sure: usize,
    /// Or these are instead: it is being erased or compacted.
    or: Option<Vec<u64>>,
}

impl Records {
    fn check(&mut self, what: &str, found: Vec<u64>) -> Result<()> {
        let whole = found.len() >= self.sure && self.all.get(..found.len()) == Some(&found[..]);
        ensure!(whole || self.or.as_ref() == Some(&found), "LOSS: of {what} are there {found:?}, of {self:?}");
        *self = Self { sure: found.len(), all: found, or: None };
        Ok(())
    }
}

/// What a pool has acknowledged.
#[derive(Clone, Debug, Default)]
pub(crate) struct Promise {
    pool: There,
    staging: There,
    mblocks: BTreeMap<u64, There>,
    logs: BTreeMap<u64, There>,
    /// One more log may be there.
    making_log: bool,
    log: Records,
    mdc: Records,
}

impl Promise {
    pub(crate) fn after(&self, events: &[Event]) -> Self {
        let mut promise = self.clone();
        events.iter().for_each(|event| promise.apply(event));
        promise
    }

    fn apply(&mut self, Event { operation, done }: &Event) {
        let (here, gone) = if *done { (There::Yes, There::No) } else { (There::Maybe, There::Maybe) };
        match operation {
            Operation::Make => self.pool = here,
            Operation::AddClass => self.staging = here,
            Operation::Commit(ids) => self.mblocks.extend(ids.iter().map(|id| (*id, here))),
            Operation::Delete(ids) => self.mblocks.extend(ids.iter().map(|id| (*id, gone))),
            Operation::Log(number, _) if !done => self.log.all.push(*number),
            Operation::Log(_, synced) => self.log.sure = if *synced { self.log.all.len() } else { self.log.sure },
            Operation::EraseLog if !done => self.log.or = Some(Vec::new()),
            Operation::EraseLog => self.log = Records::default(),
            Operation::Mdc(number) if !done => self.mdc.all.push(*number),
            Operation::Mdc(_) => self.mdc.sure = self.mdc.all.len(),
            Operation::CompactMdc(number) if !done => self.mdc.or = Some(vec![*number]),
            Operation::CompactMdc(number) => self.mdc = Records { all: vec![*number], sure: 1, or: None },
            Operation::MakeLog(id) => {
                self.making_log = !done;
                self.logs.extend(id.iter().map(|id| (*id, here)));
            }
            Operation::DeleteLog(id) => drop(self.logs.insert(*id, gone)),
        }
    }

    /// The mblocks that are there.
    pub(crate) fn mblocks(&self) -> Vec<u64> {
        self.mblocks.iter().filter(|(_, there)| **there == There::Yes).map(|(id, _)| *id).collect()
    }

    /// The log of the workload: the first one.
    pub(crate) fn log(&self) -> Option<u64> {
        self.logs.iter().find(|(_, there)| **there == There::Yes).map(|(id, _)| *id)
    }

    /// Whether there is a pool with all that the workload needs.
    pub(crate) fn is_made(&self) -> bool {
        self.pool == There::Yes && self.staging == There::Yes && self.log().is_some()
    }

    /// What is in doubt is known now.
    fn settle(what: &str, known: &mut BTreeMap<u64, There>, found: &[u64], one_more: bool) -> Result<()> {
        for (id, there) in known.iter_mut() {
            let is = found.contains(id);
            ensure!(is || *there != There::Yes, "LOSS: {what} {id} is gone");
            ensure!(!is || *there != There::No, "{what} {id} is back: its deletion was acknowledged");
            *there = if is { There::Yes } else { There::No };
        }
        let new: Vec<u64> = found.iter().filter(|id| !known.contains_key(id)).copied().collect();
        ensure!(new.len() <= usize::from(one_more), "{what}s {new:?} were never made");
        known.extend(new.into_iter().map(|id| (id, There::Yes)));
        known.retain(|_, there| *there == There::Yes);
        Ok(())
    }

    /// Compares an open pool with what it promised. What was in doubt is known afterwards; after an
    /// error it still is.
    fn compare(&mut self, pool: &Pool) -> Result<()> {
        let mut known = self.clone();
        known.compare_all(pool)?;
        *self = known;
        Ok(())
    }

    fn compare_all(&mut self, pool: &Pool) -> Result<()> {
        let report = pool.check(mpool::Depth::Data).context("the check")?;
        let allowed = |finding: &&Finding| match finding {
            Finding::TornTail { .. } => true,
            Finding::ClassMissing { .. } => self.staging == There::Maybe,
            Finding::Damage { damage: Damage { object: Object::Superblock(_), .. }, repaired } => *repaired,
            _ => false,
        };
        if let Some(bad) = report.findings.iter().find(|finding| !allowed(finding)) {
            bail!("the check found: {bad}");
        }
        let there: Vec<u64> = pool.mblocks().iter().map(|mblock| mblock.id).collect();
        Self::settle("mblock", &mut self.mblocks, &there, false)?;
        for id in there {
            let mut bytes = vec![0; length(id)];
            pool.mblock(id)?.read(0, &mut bytes).with_context(|| format!("LOSS: mblock {id}"))?;
            ensure!(bytes == content(id, length(id)), "LOSS: mblock {id} has other bytes");
        }
        let there: Vec<u64> = pool.mlogs().iter().map(|log| log.id).collect();
        let log = self.log();
        Self::settle("mlog", &mut self.logs, &there, self.making_log)?;
        self.making_log = false;
        if let Some(id) = log {
            let mut log = pool.mlog_open(id).with_context(|| format!("LOSS: mlog {id}"))?;
            self.log.check("the log", numbers(|| log.read())?)?;
        }
        let mut mdc = pool.mdc_open(ROOT_MDC).context("LOSS: the root MDC")?;
        self.mdc.check("the MDC", numbers(|| mdc.read())?)
    }

    /// Opens the pool of a file system and compares it; then it must work: one mblock more, and it
    /// is opened again without a finding. What was in doubt is known afterwards.
    pub(crate) fn verify(&mut self, root: &Path) -> Result<()> {
        let (path, staging) = places(root);
        let opened = Pool::open(&path, OpenOptions::default());
        let pool = match opened {
            Ok(pool) => pool,
            Err(e) if self.pool == There::Yes => bail!("LOSS: the pool does not open: {e}"),
            // Making it was cut short: it can be done again.
            Err(_) => {
                match Pool::destroy(&path) {
                    Err(PoolError::Io(e)) if e.os().kind() != std::io::ErrorKind::NotFound => {
                        bail!("what is left of a pool cannot be removed: {e}")
                    }
                    _ => {}
                }
                Pool::create(&path, "medium").context("making the pool again")?
            }
        };
        self.pool = There::Yes;
        self.compare(&pool)?;
        if self.staging == There::Maybe {
            match pool.add_class(MediaClass::Staging, &staging) {
                Ok(()) | Err(PoolError::ClassExists(_)) => {}
                Err(e) => bail!("adding the class again: {e}"),
            }
            self.staging = There::Yes;
        }
        let writer = write(&pool, MediaClass::Capacity)?;
        let id = writer.id();
        self.mblocks.insert(id, There::Maybe);
        writer.commit().context("committing")?;
        self.mblocks.insert(id, There::Yes);
        drop(pool);
        let pool = Pool::open(&path, OpenOptions::default()).context("opening it again")?;
        ensure!(pool.findings().is_empty(), "opening it again found {:?}", pool.findings());
        self.compare(&pool).context("again")
    }
}

/// Writes one mblock.
pub(crate) fn write(pool: &Pool, class: MediaClass) -> Result<MblockWriter> {
    let mut writer = pool.mblock_alloc(Allocation { class, capacity: 64 << 10, ..Allocation::default() })?;
    let bytes = content(writer.id(), length(writer.id()));
    let (one, two) = bytes.split_at(bytes.len() / 3);
    writer.write(&[IoSlice::new(one), IoSlice::new(two)])?;
    Ok(writer)
}

/// The numbers of records, whose other bytes are checked.
fn numbers<E: Debug>(mut read: impl FnMut() -> Result<Option<Vec<u8>>, E>) -> Result<Vec<u64>> {
    let mut found = Vec::new();
    while let Some(bytes) = read().map_err(|e| anyhow::anyhow!("LOSS: {e:?}"))? {
        let number = bytes.first_chunk().map(|number| u64::from_le_bytes(*number)).context("a short record")?;
        ensure!(bytes == record(number), "LOSS: record {number} has other bytes");
        found.push(number);
    }
    Ok(found)
}
