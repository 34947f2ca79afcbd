//! What an open mlog and an open MDC have in common: the log files, a cursor for reading, what
//! opening found, and that nobody else has the object open.

use std::sync::Arc;

use crate::disk::frame::frame_len;
use crate::disk::log::Log;
use crate::disk::record::LogRecord;
use crate::error::{Damage, Object, ObjectError};
use crate::objects::class::Class;
use crate::objects::inner::Inner;
use crate::objects::meta::Meta;

/// An open mlog or MDC.
pub(crate) struct Handle<L> {
    pub(crate) log: L,
    /// Where the next record is read: bytes from the start of the log.
    pub(crate) cursor: u64,
    /// Damage found when it was opened.
    pub(crate) damage: Vec<Damage>,
    /// Whether that was put right: nothing was lost.
    pub(crate) mended: bool,
    /// Where opening it cut an unfinished end off.
    pub(crate) torn: Option<(Object, u64)>,
    pub(crate) claim: Claim,
}

impl<L: AsRef<Log>> Handle<L> {
    pub(crate) fn new(log: L, claim: Claim, damage: Vec<Damage>, lost: u32, torn: Option<(Object, u64)>) -> Self {
        let mended = lost == 0 && claim.inner.check_writable().is_ok();
        Self { log, cursor: 0, damage, mended, torn, claim }
    }

    /// The record at the cursor, which moves behind it. `None` at the end.
    pub(crate) fn read(&mut self) -> Result<Option<Vec<u8>>, ObjectError> {
        let Some((record, next)) = self.log.as_ref().read(self.cursor)? else { return Ok(None) };
        self.cursor = next;
        Ok(Some(record))
    }

    /// Moves the cursor to the first whole record behind the damage where it is.
    pub(crate) fn skip_damaged(&mut self) -> Result<(), ObjectError> {
        self.cursor = self.log.as_ref().skip_damage(self.cursor)?;
        Ok(())
    }
}

/// One handle has the object open. It ends with this value.
pub(crate) struct Claim {
    pub(crate) inner: Arc<Inner>,
    pub(crate) record: LogRecord,
    object: Object,
}

impl Claim {
    /// Claims the object that `find` knows; gives its class too.
    ///
    /// # Errors
    /// `NotFound`; `NoClass`; `Open`: somebody else has it open.
    pub(crate) fn open(
        inner: &Arc<Inner>,
        id: u64,
        object: Object,
        find: impl FnOnce(&Meta) -> Option<LogRecord>,
    ) -> Result<(Self, Arc<Class>), ObjectError> {
        let claim = Self::take(inner, id, object, find)?;
        let class = inner.class(claim.record.class)?;
        Ok((claim, class))
    }

    /// Claims the object, whether or not its class is there.
    ///
    /// # Errors
    /// `NotFound`; `Open`: somebody else has it open.
    pub(crate) fn take(
        inner: &Arc<Inner>,
        id: u64,
        object: Object,
        find: impl FnOnce(&Meta) -> Option<LogRecord>,
    ) -> Result<Self, ObjectError> {
        let mut meta = inner.meta();
        let record = find(&meta).ok_or(ObjectError::NotFound(object))?;
        if !meta.open_logs.insert(id) {
            return Err(ObjectError::Open(object));
        }
        Ok(Self { inner: inner.clone(), record, object })
    }

    /// Checks that `records` fit behind `len` bytes, and that the pool may be written.
    ///
    /// # Errors
    /// `ReadOnly`, `Capacity`.
    pub(crate) fn check_room(&self, len: u64, records: &[&[u8]]) -> Result<(), ObjectError> {
        self.inner.check_writable()?;
        let more: usize = records.iter().map(|r| frame_len(r.len())).sum();
        let (object, capacity, wanted) = (self.object, self.record.capacity, len + more as u64);
        if wanted > capacity { Err(ObjectError::Capacity { object, capacity, wanted }) } else { Ok(()) }
    }
}

impl Drop for Claim {
    fn drop(&mut self) {
        self.inner.meta().open_logs.remove(&self.record.id);
    }
}
