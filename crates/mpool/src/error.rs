//! Errors: one enum for each group of operations.

use std::fmt;
use std::io;
use std::path::PathBuf;

use crate::{KeyPlace, MediaClass};

/// The object of an error or a finding.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Object {
    /// The superblock of a class.
    Superblock(MediaClass),
    /// The wrapped key of an encrypted pool.
    Key,
    /// One of the two logs of the pool's own metadata: 0 or 1.
    Metadata(u8),
    /// An mblock.
    Mblock(u64),
    /// An mlog.
    Mlog(u64),
    /// One of the two logs, 0 or 1, of an MDC.
    Mdc(u64, u8),
}

impl fmt::Display for Object {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Superblock(class) => write!(f, "the superblock of class {class}"),
            Self::Key => write!(f, "the wrapped key"),
            Self::Metadata(log) => write!(f, "metadata log {log}"),
            Self::Mblock(id) => write!(f, "mblock {id:#x}"),
            Self::Mlog(id) => write!(f, "mlog {id:#x}"),
            Self::Mdc(id, log) => write!(f, "log {log} of MDC {id:#x}"),
        }
    }
}

/// Bytes that differ from what was written.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{object} is damaged at byte {offset}: {what}")]
pub struct Damage {
    /// The damaged object.
    pub object: Object,
    /// The first of them, counted from the start of the object.
    pub offset: u64,
    /// What was found.
    pub what: &'static str,
}

/// A failed operation on a file or directory.
#[derive(Debug, thiserror::Error)]
#[error("{operation} {name}: {cause}")]
pub struct IoError {
    operation: &'static str,
    name: String,
    /// Not a `source`: printing the chain would print it twice.
    cause: io::Error,
}

impl IoError {
    pub(crate) fn new(operation: &'static str, name: impl fmt::Display, source: io::Error) -> Self {
        Self { operation, name: name.to_string(), cause: source }
    }

    /// Whether there was no space left, no quota, or no file can be so long.
    pub fn is_full(&self) -> bool {
        matches!(
            self.cause.kind(),
            io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded | io::ErrorKind::FileTooLarge
        )
    }

    /// The system's reason.
    pub fn os(&self) -> &io::Error {
        &self.cause
    }
}

/// Turns a failed system call into an [`IoError`] that names the operation and the file.
pub(crate) trait During<T> {
    fn during(self, operation: &'static str, name: impl fmt::Display) -> Result<T, IoError>;
}

impl<T> During<T> for io::Result<T> {
    fn during(self, operation: &'static str, name: impl fmt::Display) -> Result<T, IoError> {
        self.map_err(|source| IoError::new(operation, name, source))
    }
}

impl<T> During<T> for Result<T, claims::ClaimError> {
    fn during(self, operation: &'static str, name: impl fmt::Display) -> Result<T, IoError> {
        self.map_err(io::Error::from).during(operation, name)
    }
}

/// Why a pool cannot be created, opened, changed or destroyed.
#[derive(Debug, thiserror::Error)]
pub enum PoolError {
    /// The system refused.
    #[error(transparent)]
    Io(#[from] IoError),
    /// No pool there.
    #[error(
        "{} holds no pool; `pageone pool create` makes one, and `pageone pool rebuild` one that has lost its superblock",
        .0.display()
    )]
    NotAPool(PathBuf),
    /// A pool, or part of one, is there already.
    #[error(
        "{} holds a pool, or a class of one, already: use it, or choose another name or directory. If its pool does not \
         know or misses that class, `pageone pool rebuild` finds what is in it",
        .0.display()
    )]
    Exists(PathBuf),
    /// A file `data` with contents is there, but no superblock.
    #[error(
        "{} has no superblock, but a file `data` that is not empty: a damaged pool, or somebody else's; move it away first",
        .0.display()
    )]
    Occupied(PathBuf),
    /// Opened elsewhere in a way that excludes this.
    #[error("{} is in use: an exclusive opening excludes every other", .0.display())]
    Busy(PathBuf),
    /// Mblocks of it are leased.
    #[error(
        "mblocks of {} are being read, by guests of a `pageone snapshot run`, or kept for a snapshot being stored; end these \
         guests first, or wait. Another version may have them, too",
        .0.display()
    )]
    Leased(PathBuf),
    /// What cannot be a user's key.
    #[error("{key} cannot be a pool's key: {why}")]
    UnfitKey {
        /// Where it is.
        key: KeyPlace,
        /// Why, and what makes it one.
        why: &'static str,
    },
    /// The kernel does not give a key.
    #[error("the key {key} cannot be read: {cause}")]
    KernelKey {
        /// Where it should be.
        key: KeyPlace,
        /// Not a `source`: printing the chain would print it twice.
        cause: kmem::keyring::KeyError,
    },
    /// The user's key is not where it was.
    #[error(
        "{} is encrypted, and its key {key} cannot be read: {why}; put it back, or say where it is with \
         `pageone pool key POOL --key-file FILE` or `--kernel-key NAME`",
        .path.display()
    )]
    NoKey {
        /// The directory.
        path: PathBuf,
        /// Where the user's key should be.
        key: KeyPlace,
        /// The system's reason.
        why: String,
    },
    /// Another key than the user's.
    #[error(
        "{key} is not the key of {}: nothing was read or written; put the right one there, or say where it is with \
         `pageone pool key POOL --key-file FILE` or `--kernel-key NAME`",
        .path.display()
    )]
    WrongKey {
        /// The directory.
        path: PathBuf,
        /// Where the wrong key is.
        key: KeyPlace,
    },
    /// Neither file with the wrapped key is what was written.
    #[error(
        "{} is encrypted, and neither of its files `wrapped-key` and `wrapped-key.copy` is what was written: put one of \
         them back from a backup; without them nobody can read the pool",
        .0.display()
    )]
    KeyLost(PathBuf),
    /// A key was given for a pool that has none.
    #[error(
        "{} is not encrypted: a pool gets its key from `pageone pool create`, with `--key-file FILE` or `--kernel-key NAME`",
        .0.display()
    )]
    NotEncrypted(PathBuf),
    /// Made by a version that this one does not know.
    #[error(
        "{} has format version {found}, and this program knows versions {} and {}: use the program that made it",
        .path.display(), .known[0], .known[1]
    )]
    Version {
        /// The directory, or the file with the wrapped key.
        path: PathBuf,
        /// Its version.
        found: u32,
        /// Ours.
        known: [u32; 2],
    },
    /// Metadata were lost. The salvage option opens the rest for reading.
    #[error(
        "{0}; open it with the salvage option to read what is left; `pageone pool rebuild` makes the metadata anew from it"
    )]
    Damaged(#[from] Damage),
    /// Its files cannot be opened for writing.
    #[error("{} cannot be opened for writing: {cause}; with shared access (`pool check --read-only`) it can be read", .path.display())]
    NotWritable {
        /// The directory.
        path: PathBuf,
        /// The system's reason.
        cause: IoError,
    },
    /// The metadata name objects of a class, and have lost where it lies.
    #[error("where class {0} lies is lost: name its directory, with `pageone pool rebuild --{0} DIR`")]
    NoDirectory(MediaClass),
    /// The data file of a class is not there.
    #[error(
        "{} has no file `data`, which holds all mblocks of its class: put it back, or restore the whole pool from a backup",
        .0.display()
    )]
    NoData(PathBuf),
    /// The class is not where the metadata say.
    #[error(
        "class {class} is missing: {} holds no class of this pool; mount it there, or, if only its superblock is lost, \
         `pageone pool rebuild`",
        .path.display()
    )]
    ClassMissing {
        /// The class.
        class: MediaClass,
        /// Where it should be.
        path: PathBuf,
    },
    /// The directories of the pool do not belong together.
    #[error(
        "{} and its class {class} in {} are not of the same time or place: one of them is a copy, was moved, or was \
         restored from a backup. Nothing is written. `--salvage` reads what is there; if these are the directories to go \
         on with, `pageone pool adopt` makes them one pool again",
        .path.display(), .class_path.display()
    )]
    Apart {
        /// The directory of the capacity class.
        path: PathBuf,
        /// The other class.
        class: MediaClass,
        /// Its directory.
        class_path: PathBuf,
    },
    /// The class is there already.
    #[error("the pool has a class {0} already")]
    ClassExists(MediaClass),
    /// The pool was opened for reading.
    #[error("the pool was opened for reading only; leave --read-only and --salvage out to change it")]
    ReadOnly,
    /// A sync failed earlier: the media's contents are unknown.
    #[error("an earlier write to the metadata failed, so their state is unknown; close the pool and open it again")]
    Failed,
    /// A name that cannot be.
    #[error("{0:?} is no name for a pool: 1 to 63 letters, digits, '-', '_' and '.', the first no '.'")]
    Name(String),
    /// No pool of that name.
    #[error("no pool is called {0:?}; `pageone pool list` shows those there are")]
    NoSuchPool(String),
}

/// Why an operation on an object failed.
#[derive(Debug, thiserror::Error)]
pub enum ObjectError {
    /// The system refused.
    #[error(transparent)]
    Io(#[from] IoError),
    /// No space, or no quota, in any class that the caller allowed.
    #[error("no space for {bytes} bytes in class {class}")]
    Full {
        /// The class asked for.
        class: MediaClass,
        /// Bytes wanted.
        bytes: u64,
    },
    /// The bytes on the media differ from what was written.
    #[error(transparent)]
    Damaged(#[from] Damage),
    /// No such object, or not committed, or deleted.
    #[error("{0} does not exist")]
    NotFound(Object),
    /// The pool has no such class.
    #[error("the pool has no class {0}; `pageone pool add` adds one")]
    NoClass(MediaClass),
    /// A map still shows it.
    #[error("{object} is mapped {times} times; unmap it first")]
    Mapped {
        /// The mblock.
        object: Object,
        /// By how many maps.
        times: u32,
    },
    /// Another handle has it open.
    #[error("{0} is open; close it first")]
    Open(Object),
    /// More than it was allocated for.
    #[error("{object} has room for {capacity} bytes, not for {wanted}")]
    Capacity {
        /// The object.
        object: Object,
        /// Its size, in bytes.
        capacity: u64,
        /// What it would have needed.
        wanted: u64,
    },
    /// A read past the end.
    #[error("{object} ends at byte {len}, before {end}")]
    PastEnd {
        /// The object.
        object: Object,
        /// Its length.
        len: u64,
        /// Where the read would have ended.
        end: u64,
    },
    /// The pool was opened for reading.
    #[error("the pool was opened for reading only; leave --read-only and --salvage out to change it")]
    ReadOnly,
    /// A sync failed earlier.
    #[error("an earlier write to {0} failed, so its state is unknown; close the pool and open it again")]
    Failed(Object),
    /// Compaction started twice, or ended without a start.
    #[error("{0}: compaction is {1}")]
    Compaction(Object, &'static str),
}

impl From<ObjectError> for PoolError {
    fn from(error: ObjectError) -> Self {
        match error {
            ObjectError::Io(e) => Self::Io(e),
            ObjectError::Damaged(e) => Self::Damaged(e),
            ObjectError::ReadOnly => Self::ReadOnly,
            ObjectError::Failed(_) => Self::Failed,
            other => Self::Io(IoError::new("writing", "the metadata", io::Error::other(other.to_string()))),
        }
    }
}

/// Why a map cannot be made, or its pages cannot be loaded.
#[derive(Debug, thiserror::Error)]
pub enum MapError {
    /// An mblock of the list, or its data.
    #[error(transparent)]
    Object(#[from] ObjectError),
    /// A map's pages are blocks.
    #[error("an mcache map cannot be made: {0}")]
    PageSize(#[from] kmem::PageSizeError),
    /// There is no userfaultfd.
    #[error("an mcache map needs userfaultfd: {0}")]
    Userfaultfd(#[from] kmem::uffd::CreateError),
    /// No memory, no descriptor, or too many mappings.
    #[error(transparent)]
    Io(#[from] IoError),
    /// Nothing to map.
    #[error("a map needs at least one mblock")]
    Empty,
    /// An index or a range outside of the map.
    #[error("no byte {offset} in mblock number {index} of the map")]
    Outside {
        /// Position in the list of mblocks.
        index: usize,
        /// Byte offset in it.
        offset: u64,
    },
}
