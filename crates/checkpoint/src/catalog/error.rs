//! Why an operation on a catalogue failed, one enum for each operation.

use std::fmt;
use std::io;

use mpool::{MapError, ObjectError};

use super::{COMPRESSED, FORMAT};
use crate::chain;

/// Why a pool's catalogue cannot be opened.
#[derive(Debug, thiserror::Error)]
pub enum OpenError {
    /// The list of checkpoints cannot be read.
    #[error("cannot read the pool's list of checkpoints")]
    Read(#[source] ObjectError),
    /// The list has a record of another kind.
    #[error("the pool's root MDC holds something else than checkpoints; give them a pool of their own")]
    Foreign,
    /// The list is of another format, or the pool holds other objects.
    #[error(
        "this pool is not one of checkpoints of format {FORMAT} or {COMPRESSED}; make one with `pageone pool \
             create`, or use the version that stored into it"
    )]
    Format,
    /// The list cannot be opened or repaired.
    #[error(transparent)]
    Store(#[from] StoreError),
}

/// Why something cannot be stored in the pool.
#[derive(Debug, thiserror::Error)]
pub enum StoreError {
    /// The pool has no space, or cannot be written or read.
    #[error(transparent)]
    Object(#[from] ObjectError),
    /// A record cannot be encoded.
    #[error("cannot encode a record")]
    Encode(#[from] postcard::Error),
    /// A part of the map cannot be read on which the new one builds.
    #[error("cannot read the map of the checkpoint before; with --full the next one does not need it")]
    Earlier(#[source] Flaw),
    /// Pages that it shares with another checkpoint were not stored.
    #[error("pages that another checkpoint has too could not be stored: take the checkpoint again")]
    Lost,
}

impl StoreError {
    /// Whether it may be stored when no other checkpoint is: the pool is full, or another
    /// checkpoint could not store what both have.
    pub fn is_of_others(&self) -> bool {
        self.is_full() || matches!(self, Self::Lost)
    }

    /// Whether the pool is full.
    pub fn is_full(&self) -> bool {
        matches!(self, Self::Object(ObjectError::Full { .. }))
    }

    /// Whether the checkpoint can be stored if all of the memory is read.
    pub fn is_earlier(&self) -> bool {
        matches!(self, Self::Earlier(_))
    }
}

/// The list of checkpoints is damaged: some may be missing from it, and nothing may be changed.
#[derive(Clone, Debug, thiserror::Error)]
#[error(
    "the list of checkpoints in pool {pool} is damaged ({damage}): some may be missing from it. Those that `pageone pool ls` \
     shows can be restored; do so, and go on with a new pool"
)]
pub struct CatalogDamage {
    /// The pool's name.
    pub(super) pool: String,
    /// The first damage.
    pub(super) damage: String,
}

/// Why a checkpoint was not begun.
#[derive(Debug, thiserror::Error)]
pub enum BeginError {
    /// The name is taken.
    #[error(
        "there is a checkpoint called {0:?} already; give another name with --name, or remove that one with \
             `pageone pool rm`"
    )]
    Exists(String),
    /// The name is empty or too long.
    #[error("a checkpoint's name has 1 to 127 bytes; give such a name with --name, or leave --name out")]
    Name,
    /// The list of checkpoints is damaged.
    #[error(transparent)]
    Damaged(#[from] CatalogDamage),
    /// The pool cannot be tidied up.
    #[error(transparent)]
    Store(#[from] StoreError),
}

/// Why there is no checkpoint of a name.
#[derive(Debug, thiserror::Error)]
pub enum FindError {
    /// The list does not have it.
    #[error("no checkpoint is called {0:?}; `pageone pool ls` shows those there are")]
    Missing(String),
    /// The list does not have it, and is damaged.
    #[error("no checkpoint is called {name:?}, and {damage}")]
    MissingFromDamaged {
        /// The name.
        name: String,
        /// The damage.
        damage: CatalogDamage,
    },
}

/// Why a checkpoint cannot be read.
#[derive(Debug, thiserror::Error)]
pub enum ReadError {
    /// The pool does not hold what was stored.
    #[error(
        "checkpoint {name} in pool {pool} is damaged: `pageone pool check {pool}` lists all damage, \
         `pageone pool rm {pool} {name}` removes this checkpoint, and the others remain"
    )]
    Damaged {
        /// The checkpoint.
        name: String,
        /// The pool's name.
        pool: String,
        /// What does not fit.
        source: Flaw,
    },
    /// There is not the memory that it takes.
    #[error("checkpoint {name} in pool {pool} cannot be read here")]
    Claim {
        /// The checkpoint.
        name: String,
        /// The pool's name.
        pool: String,
        /// What it claims.
        source: claims::ClaimError,
    },
    /// The pool cannot be read ahead.
    #[error(transparent)]
    Map(#[from] MapError),
    /// The caller failed to write what was read.
    #[error(transparent)]
    Write(#[from] io::Error),
}

/// How the records of a checkpoint and the pool's mblocks disagree.
#[derive(Debug, thiserror::Error)]
pub enum Flaw {
    /// The regions are not whole pages, or larger than an address space.
    #[error("its regions have {0} bytes, which cannot be")]
    Regions(u64),
    /// The mblock is not the root of a map.
    #[error("mblock {0:#x} is not the root of a map")]
    Root(u64),
    /// The map is one of a larger or a smaller memory.
    #[error("its map has {is} pages, and its memory {expected}")]
    Pages {
        /// Pages of the map.
        is: u64,
        /// Pages of the regions.
        expected: u64,
    },
    /// A leaf has other places than the root says.
    #[error("leaf {slot} in mblock {mblock:#x} is not the one that its map names")]
    Leaf {
        /// Position of the leaf in the mblock.
        slot: u32,
        /// The mblock.
        mblock: u64,
    },
    /// The map names a page that no data mblock has.
    #[error("page {page} of data mblock {mblock:#x} is not there")]
    NoPage {
        /// Number of the page in the mblock.
        page: u64,
        /// The mblock.
        mblock: u64,
    },
    /// What is kept beside it is not whole.
    #[error("what is kept beside it has {is} bytes, and {expected} were stored")]
    Beside {
        /// Bytes that are there.
        is: u64,
        /// Bytes that were stored.
        expected: u64,
    },
    /// It takes more memory than there is.
    #[error(transparent)]
    Claim(#[from] claims::ClaimError),
    /// An mblock cannot be read.
    #[error(transparent)]
    Object(#[from] ObjectError),
    /// A page of a data mblock cannot be read.
    #[error(transparent)]
    Page(PageFlaw),
    /// A page cannot be read through a map.
    #[error(transparent)]
    Map(#[from] MapError),
}

impl From<PageFlaw> for Flaw {
    fn from(flaw: PageFlaw) -> Self {
        match flaw {
            PageFlaw::Object(error) => Self::Object(error),
            flaw => Self::Page(flaw),
        }
    }
}

/// Why a checkpoint was not removed.
#[derive(Debug, thiserror::Error)]
pub enum RemoveError {
    /// The list of checkpoints is damaged.
    #[error(transparent)]
    Damaged(#[from] CatalogDamage),
    /// There is no such checkpoint.
    #[error(transparent)]
    Find(#[from] FindError),
    /// The data that another checkpoint needs are unknown.
    #[error(transparent)]
    Read(#[from] ReadError),
    /// The record or the mblocks cannot be removed.
    #[error(transparent)]
    Store(#[from] StoreError),
}

/// Why a pool was not repacked, or not as a whole.
#[derive(Debug, thiserror::Error)]
pub enum RepackError {
    /// The list of checkpoints is damaged.
    #[error(transparent)]
    Damaged(#[from] CatalogDamage),
    /// A map cannot be read again.
    #[error(transparent)]
    Read(#[from] ReadError),
    /// The pool has no space, or cannot be written or read.
    #[error(transparent)]
    Store(#[from] StoreError),
}

impl From<ObjectError> for RepackError {
    fn from(error: ObjectError) -> Self {
        Self::Store(error.into())
    }
}

/// What [`Catalog::check`](super::Catalog::check) found.
#[derive(Debug, thiserror::Error)]
pub enum Finding {
    /// The map of a checkpoint cannot be read.
    #[error("{}", chain(.0))]
    Unreadable(ReadError),
    /// A checkpoint's record does not name the data mblocks that its map names.
    #[error(
        "the record of checkpoint {name} names other data mblocks than its map{}",
        if *.repaired { ": written anew" } else { "; `pageone pool check` without --read-only writes it anew" }
    )]
    Needs {
        /// The checkpoint.
        name: String,
        /// Whether the record was written anew.
        repaired: bool,
    },
    /// A compressed data mblock cannot be decoded.
    #[error("{}", chain(.0))]
    Compressed(PageFlaw),
}

/// Why pages of a data mblock cannot be compared with others.
#[derive(Debug, thiserror::Error)]
pub enum PageFlaw {
    /// The mblock cannot be read.
    #[error(transparent)]
    Object(#[from] ObjectError),
    /// The mblock has not the length of its pages and their hashes.
    #[error("data mblock {mblock:#x} has {is} bytes, and {expected} for {pages} pages")]
    Length {
        /// The mblock.
        mblock: u64,
        /// Its length in bytes.
        is: u64,
        /// The length in bytes for its pages.
        expected: u64,
        /// Number of its pages.
        pages: u32,
    },
    /// The table of a compressed data mblock is not that of its pages.
    #[error("the table of compressed data mblock {mblock:#x} is not one of {pages} pages")]
    Table {
        /// The mblock.
        mblock: u64,
        /// Number of its pages.
        pages: u32,
    },
    /// A chunk of a compressed data mblock is not what was stored.
    #[error("chunk {chunk} of compressed data mblock {mblock:#x} does not decode to its pages")]
    Chunk {
        /// The mblock.
        mblock: u64,
        /// Number of the chunk.
        chunk: usize,
    },
    /// A part of the index has not the length of its entries.
    #[error(
        "mblock {mblock:#x} of the index has {is} bytes, and {expected} for its entries; nothing is lost, \
             and the next checkpoint makes the index anew"
    )]
    Index {
        /// The mblock.
        mblock: u64,
        /// Its length in bytes.
        is: u64,
        /// The length in bytes for its entries.
        expected: u64,
    },
}

/// What the user should know of a checkpoint that is stored nevertheless.
#[derive(Debug)]
pub enum Warning {
    /// Pages of the pool cannot be read. They are stored again.
    Damaged {
        /// The pool's name.
        pool: String,
        /// Names of the checkpoints that have such pages.
        checkpoints: Vec<String>,
        /// Why they cannot be read.
        why: PageFlaw,
    },
    /// A part of the index cannot be read. It is made anew.
    Index {
        /// The pool's name.
        pool: String,
        /// Why it cannot be read.
        why: String,
    },
    /// The last checkpoint cannot be read. All of the memory is read.
    Earlier(ReadError),
}

impl fmt::Display for Warning {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Damaged { pool, checkpoints, why } => write!(
                f,
                "{}: what it holds is stored again. Checkpoints that may not be restored: {}; `pageone pool check {pool}` \
                 lists all damage",
                chain(why),
                checkpoints.join(", ")
            ),
            Self::Index { pool, why } => write!(
                f,
                "{why}: pages that only this part of the index of pool {pool} knows are stored again, and the next checkpoint \
                 makes the index anew; no checkpoint needs it"
            ),
            Self::Earlier(error) => write!(f, "{}; all of the memory is read", chain(error)),
        }
    }
}
