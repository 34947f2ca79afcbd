//! mlogs as a program uses them.

use crate::disk::log::{Log, Reserve};
use crate::error::{Damage, Object, ObjectError};
use crate::objects::handle::Handle;
use crate::objects::log_files::LogProps;

/// An open mlog. Synced records survive a crash; records that were only appended may.
///
/// ```
/// # let dir = tempfile::tempdir()?;
/// let pool = mpool::Pool::create(dir.path(), "example")?;
/// let id = pool.mlog_create(mpool::MediaClass::Capacity, 1 << 20)?;
/// let mut log = pool.mlog_open(id)?;
/// log.append(b"first", false)?;
/// log.append(b"second", true)?; // both are synced
/// log.rewind();
/// assert_eq!(log.read()?.as_deref(), Some(&b"first"[..]));
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
pub struct Mlog(pub(crate) Handle<Log>);

impl std::fmt::Debug for Mlog {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_tuple("Mlog").field(&self.0.claim.record).finish()
    }
}

impl Mlog {
    /// Its properties.
    pub fn props(&self) -> LogProps {
        self.0.claim.record.into()
    }

    /// Damage found when it was opened.
    pub fn damage(&self) -> &[Damage] {
        &self.0.damage
    }

    /// Where opening it cut an unfinished end off.
    pub(crate) fn torn(&self) -> Option<(Object, u64)> {
        self.0.torn
    }

    /// Appends one record. With `sync` it, and all before it, are durable when this returns.
    ///
    /// # Errors
    /// `Capacity`, `Full`, `ReadOnly`, `Io`: nothing was appended. `Failed`: a sync failed.
    pub fn append(&mut self, record: &[u8], sync: bool) -> Result<(), ObjectError> {
        self.0.claim.check_room(self.0.log.content, &[record])?;
        self.0.log.append(&[record], Reserve::Keep)?;
        if sync { self.0.log.sync() } else { Ok(()) }
    }

    /// Makes all records durable.
    ///
    /// # Errors
    /// `Io`, `Failed`.
    pub fn sync(&mut self) -> Result<(), ObjectError> {
        self.0.claim.inner.check_writable()?;
        self.0.log.sync()
    }

    /// The record at the cursor, which moves behind it. `None` at the end.
    ///
    /// # Errors
    /// `Damaged`: the cursor stays; [`Mlog::skip_damaged`] moves it on.
    pub fn read(&mut self) -> Result<Option<Vec<u8>>, ObjectError> {
        self.0.read()
    }

    /// Where the cursor is: bytes from the start of the log.
    pub fn position(&self) -> u64 {
        self.0.cursor
    }

    /// Puts the cursor where [`Mlog::position`] once said it was, or to 0.
    pub fn seek(&mut self, position: u64) {
        self.0.cursor = position;
    }

    /// Puts the cursor back to the start.
    pub fn rewind(&mut self) {
        self.0.cursor = 0;
    }

    /// Moves the cursor to the first whole record behind the damage where it is.
    ///
    /// # Errors
    /// `Io`.
    pub fn skip_damaged(&mut self) -> Result<(), ObjectError> {
        self.0.skip_damaged()
    }

    /// Bytes of records and of the frames around them.
    pub fn len(&self) -> u64 {
        self.0.log.content
    }

    /// Whether it holds nothing.
    pub fn is_empty(&self) -> bool {
        self.0.log.content == 0
    }

    /// How often it was erased, or more: see [`Mlog::erase`].
    pub fn generation(&self) -> u64 {
        self.0.log.generation
    }

    /// Empties it; its generation becomes `at_least` or the next one, whichever is higher. Durable
    /// when this returns.
    ///
    /// # Errors
    /// `ReadOnly`, `Failed`, `Io`.
    pub fn erase(&mut self, at_least: u64) -> Result<u64, ObjectError> {
        self.0.claim.inner.check_writable()?;
        self.0.cursor = 0;
        self.0.log.erase(at_least)?;
        Ok(self.0.log.generation)
    }
}

impl Drop for Mlog {
    fn drop(&mut self) {
        if self.0.claim.inner.check_writable().is_ok() {
            let _ = self.0.log.close();
        }
    }
}
