//! mlogs and MDCs as a program uses them.

use std::sync::Arc;

use crate::MediaClass;
use crate::ROOT_MDC;
use crate::class::Class;
use crate::error::{Damage, During, Object, ObjectError, PoolError};
use crate::log::{Log, Place};
use crate::mdc::{Pair, PairPlace};
use crate::medium::Medium;
use crate::meta::Meta;
use crate::pool::{Access, Inner, Pool};
use crate::record::{LogRecord, Record};

/// What is known of an mlog or an MDC.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LogProps {
    /// Its identity.
    pub id: u64,
    /// Its class.
    pub class: MediaClass,
    /// Bytes of records, with 16 to 23 more for each, that it may hold; of an MDC, each of its two
    /// logs.
    pub capacity: u64,
}

impl From<LogRecord> for LogProps {
    fn from(LogRecord { id, class, capacity }: LogRecord) -> Self {
        Self { id, class, capacity }
    }
}

fn mlog_name(id: u64) -> String {
    format!("mlog-{id:016x}")
}

fn mlog_place<'a>(medium: &'a dyn Medium, record: LogRecord, name: &'a str) -> Place<'a> {
    let LogRecord { id, class, .. } = record;
    Place { medium, name, object: Object::Mlog(id), class, id, copies: 1 }
}

fn mdc_place(medium: &dyn Medium, record: LogRecord) -> PairPlace<'_> {
    let LogRecord { id, class, .. } = record;
    let names = [0, 1].map(|i| format!("mdc-{id:016x}-{i}"));
    PairPlace { medium, names, objects: [Object::Mdc(id, 0), Object::Mdc(id, 1)], class, id, copies: 1 }
}

/// Makes the root MDC of a new pool.
pub(crate) fn create_root(medium: &dyn Medium, meta: &mut Meta) -> Result<(), ObjectError> {
    let record = LogRecord { id: ROOT_MDC, class: MediaClass::Capacity, capacity: 1 << 30 };
    Pair::create(&mdc_place(medium, record))?;
    medium.sync_names().during("syncing", medium.path().display())?;
    meta.commit(&[Record::Mdc(record)], false)
}

/// Removes the files of logs that the metadata do not know: left by a crash between making or
/// deleting and recording.
pub(crate) fn remove_leftovers(inner: &Inner) -> Result<(), PoolError> {
    let (mlogs, mdcs) = {
        let meta = inner.meta();
        (meta.tables.mlogs.clone(), meta.tables.mdcs.clone())
    };
    for class in MediaClass::ALL {
        let Ok(open) = inner.class(class) else { continue };
        let medium = &*open.medium;
        let known = |name: &String| {
            mlogs.values().any(|l| l.class == class && mlog_name(l.id) == *name)
                || mdcs.values().any(|l| l.class == class && mdc_place(medium, *l).names.contains(name))
        };
        let at = || medium.path().display();
        let names = medium.list().during("listing", at())?;
        let ours = |name: &&String| name.starts_with("mlog-") || name.starts_with("mdc-");
        for name in names.iter().filter(ours).filter(|name| !known(name)) {
            medium.remove(name).during("removing a leftover in", at())?;
        }
    }
    Ok(())
}

impl Pool {
    /// Makes an mlog; it is there when this returns. `capacity`: bytes of records, with 16 to 23
    /// more for each.
    ///
    /// # Errors
    ///
    /// `Full`, `NoClass`, `ReadOnly`, `Failed`, `Io`.
    pub fn mlog_create(&self, class: MediaClass, capacity: u64) -> Result<u64, ObjectError> {
        self.create_log(class, capacity, Record::Mlog, |medium, record| {
            Log::create(&mlog_place(medium, record, &mlog_name(record.id)), 1).map(drop)
        })
    }

    /// Makes an MDC; it is there when this returns. `capacity` is each of its two logs'.
    ///
    /// # Errors
    ///
    /// As [`Pool::mlog_create`].
    pub fn mdc_create(&self, class: MediaClass, capacity: u64) -> Result<u64, ObjectError> {
        self.create_log(class, capacity, Record::Mdc, |medium, record| {
            Pair::create(&mdc_place(medium, record)).map(drop)
        })
    }

    fn create_log(
        &self,
        class: MediaClass,
        capacity: u64,
        to_record: impl FnOnce(LogRecord) -> Record,
        make: impl FnOnce(&dyn Medium, LogRecord) -> Result<(), ObjectError>,
    ) -> Result<u64, ObjectError> {
        self.inner.check_writable()?;
        let open = self.inner.class(class)?;
        let id = self.inner.meta().new_id();
        let record = LogRecord { id, class, capacity };
        let made = make(&*open.medium, record)
            .and_then(|()| Ok(open.medium.sync_names().during("syncing", open.medium.path().display())?));
        let made = made.and_then(|()| self.inner.meta().commit(&[to_record(record)], false));
        if made.is_err() && !self.inner.meta().is_failed() {
            let names = mdc_place(&*open.medium, record).names;
            for name in names.iter().chain([&mlog_name(id)]) {
                // What stays is removed when the pool is opened again.
                let _ = open.medium.remove(name);
            }
        }
        made.map(|()| id)
    }

    /// All mlogs, by identity.
    pub fn mlogs(&self) -> Vec<LogProps> {
        self.inner.meta().tables.mlogs.values().map(|&l| l.into()).collect()
    }

    /// All MDCs, the root MDC too, by identity.
    pub fn mdcs(&self) -> Vec<LogProps> {
        self.inner.meta().tables.mdcs.values().map(|&l| l.into()).collect()
    }

    /// Opens an mlog; one handle at a time.
    ///
    /// # Errors
    ///
    /// `NotFound`, `Open`, `NoClass`, `Io`; `Damaged`: not even its header can be read.
    pub fn mlog_open(&self, id: u64) -> Result<Mlog, ObjectError> {
        let object = Object::Mlog(id);
        let (held, class) = Held::open(&self.inner, id, object, |meta| meta.tables.mlogs.get(&id).copied())?;
        let writable = self.inner.check_writable().is_ok();
        let name = mlog_name(id);
        let (log, opened) = Log::open(&mlog_place(&*class.medium, held.record, &name), writable, &mut |_| {})?;
        let torn = opened.torn.map(|at| (object, at));
        Ok(Mlog { log, held, damage: opened.damage, torn, cursor: 0 })
    }

    /// Opens an MDC; one handle at a time.
    ///
    /// # Errors
    ///
    /// As [`Pool::mlog_open`].
    pub fn mdc_open(&self, id: u64) -> Result<Mdc, ObjectError> {
        let object = Object::Mdc(id, 0);
        let (held, class) = Held::open(&self.inner, id, object, |meta| meta.tables.mdcs.get(&id).copied())?;
        let writable = self.inner.check_writable().is_ok();
        let (pair, found) = Pair::open(&mdc_place(&*class.medium, held.record), writable, &mut |_| {})?;
        Ok(Mdc { pair, held, damage: found.damage, torn: found.torn.first().copied(), cursor: 0 })
    }

    /// Deletes an mlog.
    ///
    /// # Errors
    ///
    /// `NotFound`, `Open`, `ReadOnly`, `Failed`, `Io`.
    pub fn mlog_delete(&self, id: u64) -> Result<(), ObjectError> {
        let record =
            self.delete_log(id, Object::Mlog(id), Record::MlogGone(id), |meta| meta.tables.mlogs.get(&id).copied())?;
        if let Ok(class) = self.inner.class(record.class) {
            let _ = class.medium.remove(&mlog_name(id));
        }
        Ok(())
    }

    /// Deletes an MDC. The root MDC cannot be deleted.
    ///
    /// # Errors
    ///
    /// As [`Pool::mlog_delete`].
    pub fn mdc_delete(&self, id: u64) -> Result<(), ObjectError> {
        if id == ROOT_MDC {
            return Err(ObjectError::Open(Object::Mdc(id, 0)));
        }
        let record =
            self.delete_log(id, Object::Mdc(id, 0), Record::MdcGone(id), |meta| meta.tables.mdcs.get(&id).copied())?;
        if let Ok(class) = self.inner.class(record.class) {
            for name in mdc_place(&*class.medium, record).names {
                let _ = class.medium.remove(&name);
            }
        }
        Ok(())
    }

    fn delete_log(
        &self,
        id: u64,
        object: Object,
        gone: Record,
        find: impl FnOnce(&Meta) -> Option<LogRecord>,
    ) -> Result<LogRecord, ObjectError> {
        self.inner.check_writable()?;
        let mut meta = self.inner.meta();
        let record = find(&meta).ok_or(ObjectError::NotFound(object))?;
        if meta.open_logs.contains(&id) {
            return Err(ObjectError::Open(object));
        }
        meta.commit(&[gone], true)?;
        Ok(record)
    }
}

/// That a log is open.
struct Held {
    inner: Arc<Inner>,
    record: LogRecord,
    object: Object,
}

impl Held {
    fn open(
        inner: &Arc<Inner>,
        id: u64,
        object: Object,
        find: impl FnOnce(&Meta) -> Option<LogRecord>,
    ) -> Result<(Self, Arc<Class>), ObjectError> {
        let mut meta = inner.meta();
        let record = find(&meta).ok_or(ObjectError::NotFound(object))?;
        let class = inner.class(record.class)?;
        if !meta.open_logs.insert(id) {
            return Err(ObjectError::Open(object));
        }
        Ok((Self { inner: inner.clone(), record, object }, class))
    }

    /// Whether `records` still fit behind `len` bytes.
    fn check_room(&self, len: u64, records: &[&[u8]]) -> Result<(), ObjectError> {
        self.inner.check_writable()?;
        let more: usize = records.iter().map(|r| crate::frame::frame_len(r.len())).sum();
        let (object, capacity, wanted) = (self.object, self.record.capacity, len + more as u64);
        if wanted > capacity { Err(ObjectError::Capacity { object, capacity, wanted }) } else { Ok(()) }
    }
}

impl Drop for Held {
    fn drop(&mut self) {
        self.inner.meta().open_logs.remove(&self.record.id);
    }
}

/// An open mlog. What was appended and synced survives a crash; what was appended only may.
pub struct Mlog {
    log: Log,
    damage: Vec<Damage>,
    torn: Option<(Object, u64)>,
    cursor: u64,
    held: Held,
}

impl std::fmt::Debug for Mlog {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_tuple("Mlog").field(&self.held.record).finish()
    }
}

impl Mlog {
    /// What is known of it.
    pub fn props(&self) -> LogProps {
        self.held.record.into()
    }

    /// Damage found when it was opened.
    pub fn damage(&self) -> &[Damage] {
        &self.damage
    }

    /// Where opening it cut an unfinished end off.
    pub(crate) fn torn(&self) -> Option<(Object, u64)> {
        self.torn
    }

    /// Appends one record. With `sync` it, and all before it, are durable when this returns.
    ///
    /// # Errors
    ///
    /// `Capacity`, `Full`, `ReadOnly`, `Io`: nothing was appended. `Failed`: a sync failed.
    pub fn append(&mut self, record: &[u8], sync: bool) -> Result<(), ObjectError> {
        self.held.check_room(self.log.end, &[record])?;
        self.log.append(&[record], false)?;
        if sync { self.log.sync() } else { Ok(()) }
    }

    /// Makes all records durable.
    ///
    /// # Errors
    ///
    /// `Io`, `Failed`.
    pub fn sync(&mut self) -> Result<(), ObjectError> {
        self.held.inner.check_writable()?;
        self.log.sync()
    }

    /// The record at the cursor, which moves behind it. `None` at the end.
    ///
    /// # Errors
    ///
    /// `Damaged`: the cursor stays; [`Mlog::skip_damaged`] moves it on.
    pub fn read(&mut self) -> Result<Option<Vec<u8>>, ObjectError> {
        let found = self.log.read(self.cursor)?;
        Ok(found.map(|(record, next)| {
            self.cursor = next;
            record
        }))
    }

    /// Where the cursor is: bytes from the start of the log.
    pub fn position(&self) -> u64 {
        self.cursor
    }

    /// Puts the cursor where [`Mlog::position`] once said it was, or to 0.
    pub fn seek(&mut self, position: u64) {
        self.cursor = position;
    }

    /// Puts the cursor back to the start.
    pub fn rewind(&mut self) {
        self.cursor = 0;
    }

    /// Moves the cursor to the first whole record behind the damage where it is.
    ///
    /// # Errors
    ///
    /// `Io`.
    pub fn skip_damaged(&mut self) -> Result<(), ObjectError> {
        self.cursor = self.log.skip_damage(self.cursor)?;
        Ok(())
    }

    /// Bytes of records, with what is around them.
    pub fn len(&self) -> u64 {
        self.log.end
    }

    /// Whether it holds nothing.
    pub fn is_empty(&self) -> bool {
        self.log.end == 0
    }

    /// How often it was erased, or more: see [`Mlog::erase`].
    pub fn generation(&self) -> u64 {
        self.log.generation
    }

    /// Empties it; its generation becomes `at_least` or the next one, whichever is higher. Durable
    /// when this returns.
    ///
    /// # Errors
    ///
    /// `ReadOnly`, `Failed`, `Io`.
    pub fn erase(&mut self, at_least: u64) -> Result<u64, ObjectError> {
        self.held.inner.check_writable()?;
        self.cursor = 0;
        self.log.erase(at_least)?;
        Ok(self.log.generation)
    }
}

impl Drop for Mlog {
    fn drop(&mut self) {
        if self.held.inner.check_writable().is_ok() {
            let _ = self.log.close();
        }
    }
}

/// An open MDC.
pub struct Mdc {
    pair: Pair,
    damage: Vec<Damage>,
    torn: Option<(Object, u64)>,
    cursor: u64,
    held: Held,
}

impl std::fmt::Debug for Mdc {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_tuple("Mdc").field(&self.held.record).finish()
    }
}

impl Mdc {
    /// What is known of it.
    pub fn props(&self) -> LogProps {
        self.held.record.into()
    }

    /// Damage found when it was opened.
    pub fn damage(&self) -> &[Damage] {
        &self.damage
    }

    /// Where opening it cut an unfinished end off.
    pub(crate) fn torn(&self) -> Option<(Object, u64)> {
        self.torn
    }

    /// Appends records. With `sync` they, and all before them, are durable when this returns;
    /// during a compaction, when it ends.
    ///
    /// # Errors
    ///
    /// As [`Mlog::append`]; `Capacity`: compact it.
    pub fn append(&mut self, records: &[&[u8]], sync: bool) -> Result<(), ObjectError> {
        self.held.check_room(self.pair.appended(), records)?;
        self.pair.append(records, false)?;
        if sync { self.pair.sync() } else { Ok(()) }
    }

    /// Makes all records durable.
    ///
    /// # Errors
    ///
    /// `Io`, `Failed`.
    pub fn sync(&mut self) -> Result<(), ObjectError> {
        self.held.inner.check_writable()?;
        self.pair.sync()
    }

    /// The record at the cursor, which moves behind it. `None` at the end. During a compaction
    /// these are the old records.
    ///
    /// # Errors
    ///
    /// `Damaged`: the cursor stays; [`Mdc::skip_damaged`] moves it on.
    pub fn read(&mut self) -> Result<Option<Vec<u8>>, ObjectError> {
        let found = self.pair.read(self.cursor)?;
        Ok(found.map(|(record, next)| {
            self.cursor = next;
            record
        }))
    }

    /// Moves the cursor to the first whole record behind the damage where it is.
    ///
    /// # Errors
    ///
    /// `Io`.
    pub fn skip_damaged(&mut self) -> Result<(), ObjectError> {
        self.cursor = self.pair.skip_damage(self.cursor)?;
        Ok(())
    }

    /// Puts the cursor back to the start.
    pub fn rewind(&mut self) {
        self.cursor = 0;
    }

    /// From here on appended records are those of the compacted MDC.
    ///
    /// # Errors
    ///
    /// `Compaction`: one is under way; `ReadOnly`, `Failed`, `Io`.
    pub fn start_compaction(&mut self) -> Result<(), ObjectError> {
        self.held.inner.check_writable()?;
        self.pair.start_compaction()
    }

    /// Makes the new records the MDC's, durably. After a crash before this the old ones are.
    ///
    /// # Errors
    ///
    /// `Compaction`: none is under way; `Failed`, `Io`.
    pub fn end_compaction(&mut self) -> Result<(), ObjectError> {
        self.cursor = 0;
        self.pair.end_compaction()
    }

    /// Bytes of records, with what is around them, in the active log.
    pub fn usage(&self) -> u64 {
        self.pair.len()
    }
}

impl Drop for Mdc {
    fn drop(&mut self) {
        if self.held.inner.access() == Access::Exclusive {
            let _ = self.pair.close();
        }
    }
}
