//! The mlogs and MDCs of a pool: make, list, open, delete.

use std::collections::HashSet;

use crate::disk::log::{Log, MISSING, NO_HEADER, Reserve};
use crate::disk::medium::{Access, Medium};
use crate::disk::pair::{Found, Pair};
use crate::disk::record::{LogRecord, Record};
use crate::error::{Damage, During, Object, ObjectError, PoolError};
use crate::objects::class::Class;
use crate::objects::handle::{Claim, Handle};
use crate::objects::inner::Inner;
use crate::objects::log_files::{LogProps, mdc_files, mdc_place, mlog_files, mlog_name, mlog_place};
use crate::objects::mdc::Mdc;
use crate::objects::meta::Meta;
use crate::objects::mlog::Mlog;
use crate::pool::Pool;
use crate::{MediaClass, ROOT_MDC};

/// Removes the files of logs that the metadata do not know: left by a crash between making or
/// deleting and recording.
pub(super) fn remove_leftovers(inner: &Inner) -> Result<(), PoolError> {
    let (mlogs, mdcs) = {
        let meta = inner.meta();
        (meta.tables.mlogs.clone(), meta.tables.mdcs.clone())
    };
    for class in MediaClass::ALL {
        let Ok(open) = inner.class(class) else { continue };
        let medium = &*open.medium;
        let mlogs = mlogs.values().filter(|log| log.class == class).flat_map(|log| mlog_files(log.id));
        let mdcs = mdcs.values().filter(|log| log.class == class).flat_map(|log| mdc_files(log.id));
        let known: HashSet<String> = mlogs.chain(mdcs).collect();
        let at = || medium.path().display();
        let names = medium.list().during("listing", at())?;
        let ours = |name: &&String| name.starts_with("mlog-") || name.starts_with("mdc-");
        for name in names.iter().filter(ours).filter(|name| !known.contains(*name)) {
            medium.remove(name).during("removing a leftover in", at())?;
        }
    }
    Ok(())
}

/// Reads an MDC; what is found is durable then, if it may be written.
fn open_mdc(class: &Class, claim: &Claim) -> Result<(Pair, Found), ObjectError> {
    let (access, place) = (claim.inner.access, mdc_place(&*class.medium, claim.record));
    let (mut pair, found) = Pair::open(&place, access, &mut |_| {})?;
    if access == Access::Exclusive {
        pair.mend(&place)?;
    }
    Ok((pair, found))
}

impl Mdc {
    /// After a failed write or sync, or in a compaction, reads it from its medium again: what is
    /// there then is durable, the cursor is at the start, and the compaction is given up. Gives
    /// whether that was needed.
    ///
    /// # Errors
    /// `Io`, `NoClass`, `Damaged`: nothing is changed.
    pub fn open_again(&mut self) -> Result<bool, ObjectError> {
        let Handle { claim, log, .. } = &self.0;
        if !log.is_failed() && !log.compacting {
            return Ok(false);
        }
        let class = claim.inner.class(claim.record.class)?;
        let (pair, found) = open_mdc(&class, claim)?;
        // What cannot be read now may be there all the same.
        if let Some(damage) = found.damage.last().filter(|_| found.lost > 0) {
            return Err(damage.clone().into());
        }
        (self.0.log, self.0.damage, self.0.cursor) = (pair, found.damage, 0);
        Ok(true)
    }
}

impl Pool {
    /// Makes an mlog; it is there when this returns. `capacity`: bytes of records, with 24 to 31
    /// more for each.
    ///
    /// # Errors
    /// `Full`, `NoClass`, `ReadOnly`, `Failed`, `Io`.
    pub fn mlog_create(&self, class: MediaClass, capacity: u64) -> Result<u64, ObjectError> {
        self.create_log(class, capacity, Record::Mlog, |medium, record| {
            Log::create(&mlog_place(medium, record, &mlog_name(record.id)), 1).map(drop)
        })
    }

    /// Makes an MDC; it is there when this returns. `capacity` is each of its two logs'.
    ///
    /// # Errors
    /// Those of [`Pool::mlog_create`].
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
        let made = made.and_then(|()| self.inner.commit(vec![to_record(record)], Reserve::Keep));
        if made.is_err() && !self.inner.journal().pair.is_failed() {
            for name in mdc_files(id).chain(mlog_files(id)) {
                // Files that stay are removed when the pool is opened again.
                let _ = open.medium.remove(&name);
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
    /// `NotFound`, `Open`, `NoClass`, `Io`; `Damaged`: not even its header can be read.
    pub fn mlog_open(&self, id: u64) -> Result<Mlog, ObjectError> {
        let object = Object::Mlog(id);
        let (claim, class) = Claim::open(&self.inner, id, object, |meta| meta.tables.mlogs.get(&id).copied())?;
        let access = self.inner.access;
        let name = mlog_name(id);
        let place = mlog_place(&*class.medium, claim.record, &name);
        let damaged = |what| Damage { object, offset: 0, what };
        let (mut log, mut opened) = Log::open(&place, access, &mut |_| {})?.ok_or(damaged(MISSING))?;
        if opened.no_header {
            return Err(damaged(NO_HEADER).into());
        }
        if let (Access::Exclusive, Some(mending)) = (access, opened.mending.take()) {
            log.mend(&place, &mending)?;
        }
        opened.damage.append(&mut opened.file_damage);
        let torn = opened.torn.map(|at| (object, at));
        Ok(Mlog(Handle::new(log, claim, opened.damage, opened.lost, torn)))
    }

    /// Opens an MDC; one handle at a time.
    ///
    /// # Errors
    /// Those of [`Pool::mlog_open`].
    pub fn mdc_open(&self, id: u64) -> Result<Mdc, ObjectError> {
        let object = Object::Mdc(id, 0);
        let (claim, class) = Claim::open(&self.inner, id, object, |meta| meta.tables.mdcs.get(&id).copied())?;
        let (pair, found) = open_mdc(&class, &claim)?;
        Ok(Mdc(Handle::new(pair, claim, found.damage, found.lost, found.torn.first().copied())))
    }

    /// Deletes an mlog.
    ///
    /// # Errors
    /// `NotFound`, `Open`, `ReadOnly`, `Failed`, `Io`.
    pub fn mlog_delete(&self, id: u64) -> Result<(), ObjectError> {
        let record =
            self.delete_log(id, Object::Mlog(id), Record::MlogGone(id), |meta| meta.tables.mlogs.get(&id).copied())?;
        if let Ok(class) = self.inner.class(record.class) {
            mlog_files(id).for_each(|name| drop(class.medium.remove(&name)));
        }
        Ok(())
    }

    /// Deletes an MDC. The root MDC cannot be deleted.
    ///
    /// # Errors
    /// Those of [`Pool::mlog_delete`].
    pub fn mdc_delete(&self, id: u64) -> Result<(), ObjectError> {
        if id == ROOT_MDC {
            return Err(ObjectError::Open(Object::Mdc(id, 0)));
        }
        let record =
            self.delete_log(id, Object::Mdc(id, 0), Record::MdcGone(id), |meta| meta.tables.mdcs.get(&id).copied())?;
        if let Ok(class) = self.inner.class(record.class) {
            mdc_files(id).for_each(|name| drop(class.medium.remove(&name)));
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
        // Claimed, so that nobody opens or deletes it meanwhile.
        let claim = Claim::take(&self.inner, id, object, find)?;
        self.inner.commit(vec![gone], Reserve::Use)?;
        let record = claim.record;
        Ok(record)
    }
}
