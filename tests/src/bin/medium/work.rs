//! The workload: all operations of a pool, in an order that a seed repeats. What begins and what is
//! acknowledged goes into a journal.

use std::path::Path;
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};

use anyhow::{Context, Result, anyhow, ensure};
use mpool::{Mblock, MblockWriter, Mdc, MediaClass, Mlog, OpenOptions, Pool, ROOT_MDC};

use crate::Random;
use crate::block::Messages;
use crate::promise::{Event, Operation, Promise, content, length, places, record, write};

/// mblocks that may live at a time: checks read all of them.
const LIVE: usize = 16;
/// Bytes of the log's records from which on it is erased.
const LOG_BYTES: u64 = 12 << 10;

/// What was begun and acknowledged, in order; noted in the device's log too, if it has one.
#[derive(Default)]
pub(crate) struct Journal {
    events: Mutex<Vec<Event>>,
    marks: Option<Messages>,
}

impl Journal {
    pub(crate) fn with_marks(marks: Messages) -> Self {
        Self { events: Mutex::default(), marks: Some(marks) }
    }

    fn note(&self, operation: Operation, done: bool) -> Result<()> {
        // Marks are in the order of the events.
        let mut events = self.events.lock().map_err(|_| anyhow!("another thread panicked"))?;
        events.push(Event { operation, done });
        match &self.marks {
            Some(marks) => marks.send(&format!("mark {}", events.len())),
            None => Ok(()),
        }
    }

    fn begin(&self, operation: Operation) -> Result<()> {
        self.note(operation, false)
    }

    fn done(&self, operation: Operation) -> Result<()> {
        self.note(operation, true)
    }

    pub(crate) fn events(&self) -> Vec<Event> {
        self.events.lock().map(|events| events.clone()).unwrap_or_default()
    }
}

/// How many operations were acknowledged.
pub(crate) fn acknowledged(events: &[Event]) -> u64 {
    events.iter().filter(|event| event.done).count() as u64
}

/// Makes the pool, with two classes and a log.
pub(crate) fn make(root: &Path, journal: &Journal) -> Result<()> {
    let (path, staging) = places(root);
    journal.begin(Operation::Make)?;
    let pool = Pool::create(&path, "medium")?;
    journal.done(Operation::Make)?;
    journal.begin(Operation::AddClass)?;
    pool.add_class(MediaClass::Staging, &staging)?;
    journal.done(Operation::AddClass)?;
    journal.begin(Operation::MakeLog(None))?;
    let id = pool.mlog_create(MediaClass::Capacity, 1 << 20)?;
    journal.done(Operation::MakeLog(Some(id)))
}

/// A program that works on a pool.
pub(crate) struct Worker<'a> {
    root: &'a Path,
    journal: &'a Journal,
    random: Random,
    /// mblocks that are there.
    live: Vec<u64>,
    log: u64,
    /// The last record's number.
    number: u64,
    open: Option<(Pool, Mlog, Mdc)>,
}

impl<'a> Worker<'a> {
    /// Works on the pool that is as `promise` says.
    pub(crate) fn new(root: &'a Path, journal: &'a Journal, promise: &Promise, seed: u64) -> Result<Self> {
        let log = promise.log().context("there is no log")?;
        let mut worker = Self {
            root,
            journal,
            random: Random::new(seed),
            live: promise.mblocks(),
            log,
            number: seed << 24,
            open: None,
        };
        worker.reopen()?;
        Ok(worker)
    }

    fn reopen(&mut self) -> Result<()> {
        self.open = None;
        let pool = Pool::open(&places(self.root).0, OpenOptions::default()).context("opening the pool")?;
        ensure!(pool.findings().is_empty(), "opening a pool that was closed found {:?}", pool.findings());
        let (log, mdc) = (pool.mlog_open(self.log)?, pool.mdc_open(ROOT_MDC)?);
        self.open = Some((pool, log, mdc));
        Ok(())
    }

    /// Does `steps`, or fewer when `stop` says so. An error is of the last operation that was
    /// begun.
    pub(crate) fn work(&mut self, steps: u64, stop: &AtomicBool) -> Result<()> {
        for _ in 0..steps {
            if stop.load(Relaxed) {
                break;
            }
            self.step()?;
        }
        self.open = None;
        Ok(())
    }

    fn step(&mut self) -> Result<()> {
        self.number += 1;
        if self.live.len() > LIVE {
            return self.delete(LIVE / 2);
        }
        let kind = self.random.below(16);
        match kind {
            0..4 => self.commit(),
            4..6 => self.together(),
            6 if !self.live.is_empty() => self.delete(1),
            6..11 => self.append(kind.is_multiple_of(2)),
            11 => self.append_mdc(),
            12 => self.compact_mdc(),
            13 => self.log_that_goes(),
            14 => self.reopen(),
            _ => self.read(),
        }
    }

    fn pool(&self) -> Result<Pool> {
        self.open.as_ref().map(|(pool, ..)| pool.clone()).context("the pool is not open")
    }

    fn class(&mut self) -> MediaClass {
        [MediaClass::Capacity, MediaClass::Staging][self.random.below(2) as usize]
    }

    fn commit(&mut self) -> Result<()> {
        let (pool, class) = (self.pool()?, self.class());
        let count = 1 + self.random.below(3);
        let is_committed = self.random.below(5) > 0;
        if let Some(ids) = commit_some(&pool, self.journal, class, count, is_committed)? {
            self.live.extend(ids);
        }
        Ok(())
    }

    /// Three threads commit at once.
    fn together(&mut self) -> Result<()> {
        let (pool, journal) = (self.pool()?, self.journal);
        let classes = [self.class(), self.class(), self.class()];
        let all: Vec<Result<Option<Vec<u64>>>> = std::thread::scope(|scope| {
            let pool = &pool;
            let threads = classes.map(|class| scope.spawn(move || commit_some(pool, journal, class, 1, true)));
            threads.map(|thread| thread.join().unwrap_or_else(|_| Err(anyhow!("a thread panicked")))).into()
        });
        for ids in all {
            self.live.extend(ids?.into_iter().flatten());
        }
        Ok(())
    }

    fn delete(&mut self, count: usize) -> Result<()> {
        let pool = self.pool()?;
        let at = self.random.below((self.live.len() - count + 1) as u64) as usize;
        let ids: Vec<u64> = self.live.drain(at..at + count).collect();
        self.journal.begin(Operation::Delete(ids.clone()))?;
        pool.mblock_delete(&ids)?;
        self.journal.done(Operation::Delete(ids))
    }

    fn append(&mut self, sync: bool) -> Result<()> {
        let (journal, number) = (self.journal, self.number);
        let (_, log, _) = self.open.as_mut().context("the pool is not open")?;
        if log.len() > LOG_BYTES {
            journal.begin(Operation::EraseLog)?;
            log.erase(0)?;
            journal.done(Operation::EraseLog)?;
        }
        journal.begin(Operation::Log(number, sync))?;
        log.append(&record(number), sync)?;
        journal.done(Operation::Log(number, sync))
    }

    fn append_mdc(&mut self) -> Result<()> {
        let (journal, number) = (self.journal, self.number);
        let (_, _, mdc) = self.open.as_mut().context("the pool is not open")?;
        journal.begin(Operation::Mdc(number))?;
        mdc.append(&[&record(number)], true)?;
        journal.done(Operation::Mdc(number))
    }

    fn compact_mdc(&mut self) -> Result<()> {
        let (journal, number) = (self.journal, self.number);
        let (_, _, mdc) = self.open.as_mut().context("the pool is not open")?;
        journal.begin(Operation::CompactMdc(number))?;
        mdc.start_compaction()?;
        mdc.append(&[&record(number)], false)?;
        mdc.end_compaction()?;
        journal.done(Operation::CompactMdc(number))
    }

    /// An mlog that is made, and deleted again.
    fn log_that_goes(&mut self) -> Result<()> {
        let (pool, class) = (self.pool()?, self.class());
        self.journal.begin(Operation::MakeLog(None))?;
        let id = pool.mlog_create(class, 64 << 10)?;
        self.journal.done(Operation::MakeLog(Some(id)))?;
        self.journal.begin(Operation::DeleteLog(id))?;
        pool.mlog_delete(id)?;
        self.journal.done(Operation::DeleteLog(id))
    }

    fn read(&mut self) -> Result<()> {
        let pool = self.pool()?;
        let id = match self.live.len() {
            0 => return Ok(()),
            len => self.live[self.random.below(len as u64) as usize],
        };
        check_bytes(&pool.mblock(id)?)
    }
}

fn check_bytes(mblock: &Mblock) -> Result<()> {
    let id = mblock.props().id;
    let mut bytes = vec![0; length(id)];
    mblock.read(0, &mut bytes)?;
    ensure!(bytes == content(id, length(id)), "WRONG BYTES of mblock {id} were read");
    Ok(())
}

/// Writes `count` mblocks, and commits them all at once, or none.
fn commit_some(
    pool: &Pool,
    journal: &Journal,
    class: MediaClass,
    count: u64,
    is_committed: bool,
) -> Result<Option<Vec<u64>>> {
    let writers = (0..count).map(|_| write(pool, class)).collect::<Result<Vec<_>>>()?;
    if !is_committed {
        return Ok(None);
    }
    let ids: Vec<u64> = writers.iter().map(MblockWriter::id).collect();
    journal.begin(Operation::Commit(ids.clone()))?;
    MblockWriter::commit_all(writers)?;
    journal.done(Operation::Commit(ids.clone()))?;
    Ok(Some(ids))
}
