//! The files of mlogs and MDCs: names, places, properties.

use crate::disk::log::{self, Place, Reserve};
use crate::disk::medium::Medium;
use crate::disk::pair::{Pair, PairPlace};
use crate::disk::record::{LogRecord, Record};
use crate::error::{During, Object, ObjectError};
use crate::objects::meta::{Journal, ROOT_CAPACITY};
use crate::{MediaClass, ROOT_MDC};

/// The properties of an mlog or an MDC.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LogProps {
    /// Its identity.
    pub id: u64,
    /// Its class.
    pub class: MediaClass,
    /// Bytes that it may hold: its records, and 24 to 31 more for each. For an MDC: each of its two
    /// logs.
    pub capacity: u64,
}

impl From<LogRecord> for LogProps {
    fn from(LogRecord { id, class, capacity }: LogRecord) -> Self {
        Self { id, class, capacity }
    }
}

pub(crate) fn mlog_name(id: u64) -> String {
    format!("mlog-{id:016x}")
}

pub(crate) fn mlog_place<'a>(medium: &'a dyn Medium, record: LogRecord, name: &'a str) -> Place<'a> {
    let LogRecord { id, class, .. } = record;
    Place { medium, name, object: Object::Mlog(id), class, id }
}

pub(crate) fn mdc_place(medium: &dyn Medium, record: LogRecord) -> PairPlace<'_> {
    let LogRecord { id, class, .. } = record;
    PairPlace { medium, names: mdc_names(id), objects: [Object::Mdc(id, 0), Object::Mdc(id, 1)], class, id }
}

/// The names of all files of an mlog with this identity.
pub(crate) fn mlog_files(id: u64) -> impl Iterator<Item = String> {
    log::names(&mlog_name(id)).into_iter()
}

/// The names of all files of an MDC with this identity.
pub(crate) fn mdc_files(id: u64) -> impl Iterator<Item = String> {
    mdc_names(id).into_iter().flat_map(|name| log::names(&name))
}

fn mdc_names(id: u64) -> [String; 2] {
    [0, 1].map(|i| format!("mdc-{id:016x}-{i}"))
}

/// Makes the root MDC of a new pool.
pub(crate) fn create_root(medium: &dyn Medium, journal: &mut Journal) -> Result<(), ObjectError> {
    let record = LogRecord { id: ROOT_MDC, class: MediaClass::Capacity, capacity: ROOT_CAPACITY };
    Pair::create(&mdc_place(medium, record))?;
    medium.sync_names().during("syncing", medium.path().display())?;
    journal.write(&[Record::Mdc(record)], Reserve::Keep)
}
