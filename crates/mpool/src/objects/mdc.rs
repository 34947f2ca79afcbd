//! MDCs, metadata containers, as a program uses them.

use crate::disk::log::Reserve;
use crate::disk::medium::Access;
use crate::disk::pair::Pair;
use crate::error::{Damage, Object, ObjectError};
use crate::objects::handle::Handle;
use crate::objects::log_files::LogProps;

/// An open MDC.
///
/// ```
/// # let dir = tempfile::tempdir()?;
/// let pool = mpool::Pool::create(dir.path(), "example")?;
/// let mut catalogue = pool.mdc_open(mpool::ROOT_MDC)?;
/// catalogue.append(&[b"a = 1", b"a = 2"], true)?;
/// catalogue.start_compaction()?;
/// catalogue.append(&[b"a = 2"], false)?; // what is still true
/// catalogue.end_compaction()?; // a crash leaves the old records or the new ones
/// catalogue.rewind();
/// assert_eq!(catalogue.read()?.as_deref(), Some(&b"a = 2"[..]));
/// assert_eq!(catalogue.read()?, None);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
pub struct Mdc(pub(crate) Handle<Pair>);

impl std::fmt::Debug for Mdc {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_tuple("Mdc").field(&self.0.claim.record).finish()
    }
}

impl Mdc {
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

    /// Appends records. With `sync` they, and all before them, are durable when this returns;
    /// during a compaction, when it ends.
    ///
    /// # Errors
    /// Those of [`crate::Mlog::append`]; `Capacity`: compact it.
    pub fn append(&mut self, records: &[&[u8]], sync: bool) -> Result<(), ObjectError> {
        self.append_to(records, sync, Reserve::Keep)
    }

    /// Appends records because of which space will be free: on a full medium some 20 KiB of these
    /// find room.
    ///
    /// # Errors
    /// Those of [`Mdc::append`].
    pub fn append_freeing(&mut self, records: &[&[u8]], sync: bool) -> Result<(), ObjectError> {
        self.append_to(records, sync, Reserve::Use)
    }

    fn append_to(&mut self, records: &[&[u8]], sync: bool, reserve: Reserve) -> Result<(), ObjectError> {
        self.0.claim.check_room(self.0.log.appended(), records)?;
        self.0.log.append(records, reserve)?;
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

    /// The record at the cursor, which moves behind it. `None` at the end. During a compaction
    /// these are the old records.
    ///
    /// # Errors
    /// `Damaged`: the cursor stays; [`Mdc::skip_damaged`] moves it on.
    pub fn read(&mut self) -> Result<Option<Vec<u8>>, ObjectError> {
        self.0.read()
    }

    /// Moves the cursor to the first whole record behind the damage where it is.
    ///
    /// # Errors
    /// `Io`.
    pub fn skip_damaged(&mut self) -> Result<(), ObjectError> {
        self.0.skip_damaged()
    }

    /// Puts the cursor back to the start.
    pub fn rewind(&mut self) {
        self.0.cursor = 0;
    }

    /// From here on appended records are those of the compacted MDC.
    ///
    /// # Errors
    /// `Compaction`: one is under way; `ReadOnly`, `Failed`, `Io`.
    pub fn start_compaction(&mut self) -> Result<(), ObjectError> {
        self.0.claim.inner.check_writable()?;
        self.0.log.start_compaction()
    }

    /// Makes the new records the MDC's, durably. After a crash before this the old ones are.
    ///
    /// # Errors
    /// `Compaction`: none is under way; `Failed`, `Io`.
    pub fn end_compaction(&mut self) -> Result<(), ObjectError> {
        self.0.cursor = 0;
        self.0.log.end_compaction()
    }

    /// Bytes of records, and of the frames around them, in the active log.
    pub fn usage(&self) -> u64 {
        self.0.log.content()
    }
}

impl Drop for Mdc {
    fn drop(&mut self) {
        if self.0.claim.inner.access == Access::Exclusive {
            let _ = self.0.log.close();
        }
    }
}
