//! Why an operation on a catalogue failed, one enum for each operation.

use std::fmt;
use std::io;

use mpool::{MapError, ObjectError};

use super::{COMPRESSED, FORMAT};
use crate::chain;

/// Why a pool's catalogue cannot be opened.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs, reason = "each sentence says what it is")]
pub enum OpenError {
    #[error("cannot read the pool's list of checkpoints")]
    Read(#[source] ObjectError),
    #[error("the pool's root MDC holds something else than checkpoints; give them a pool of their own")]
    Foreign,
    #[error(
        "this pool is not one of checkpoints of format {FORMAT} or {COMPRESSED}; make one with `pageone pool \
             create`, or use the version that stored into it"
    )]
    Format,
    #[error(transparent)]
    Store(#[from] StoreError),
}

/// Why something cannot be stored in the pool.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs, reason = "each sentence says what it is")]
pub enum StoreError {
    #[error(transparent)]
    Object(#[from] ObjectError),
    #[error("cannot encode a record")]
    Encode(#[from] postcard::Error),
    #[error("cannot read the map of the checkpoint before; with --full the next one does not need it")]
    Earlier(#[source] Flaw),
    #[error(
        "whether it is done is not known: the pool's list of checkpoints could not be written, nor read again; once the \
             storage answers, `pageone pool ls` or `snapshot ls` says"
    )]
    Unknown(#[source] ObjectError),
    #[error(
        "an earlier write to the pool's list of checkpoints failed, and it could not be read again; open the pool again"
    )]
    Unread,
    #[error("pages that another checkpoint has too could not be stored: take the checkpoint again")]
    Lost,
    #[error("cannot open the pool again, which others had meanwhile")]
    Again(#[source] Box<dyn std::error::Error + Send + Sync>),
    #[error(transparent)]
    Damaged(#[from] CatalogDamage),
    #[error("others have stored a {0:?} meanwhile; give another name with --name")]
    Taken(String),
    #[error("mblocks of the pool that are needed were removed meanwhile, perhaps by another version: try again")]
    Removed,
}

impl StoreError {
    /// Whether it may be stored when no other checkpoint is: the pool is full, or another
    /// checkpoint could not store what both have.
    pub fn is_of_others(&self) -> bool {
        self.is_full() || matches!(self, Self::Lost)
    }

    /// Whether it may be done, or not: nothing may be undone then.
    pub fn is_unknown(&self) -> bool {
        matches!(self, Self::Unknown(_))
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
    "the list of checkpoints in pool {pool} is damaged ({damage}): `pageone pool check {pool}` repairs what it can. If it \
     cannot, restore those that `pageone pool ls` shows, and go on with a new pool: some may be missing"
)]
pub struct CatalogDamage {
    /// The pool's name.
    pub(super) pool: String,
    /// The first damage.
    pub(super) damage: String,
}

/// Why a checkpoint was not begun.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs, reason = "each sentence says what it is")]
pub enum BeginError {
    #[error(
        "there is a {0:?} in the pool already; give another name with --name, or remove that one with \
             `pageone pool rm`, a snapshot with `pageone snapshot rm`"
    )]
    Exists(String),
    #[error("a name has 1 to 127 bytes, and no control characters; give such a name with --name, or leave --name out")]
    Name,
    #[error(transparent)]
    Damaged(#[from] CatalogDamage),
    #[error(transparent)]
    Store(#[from] StoreError),
}

/// Why there is no checkpoint of a name.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs, reason = "each sentence says what it is")]
pub enum FindError {
    #[error("nothing in the pool is called {0:?}; `pageone pool ls` or `snapshot ls` shows those there are")]
    Missing(String),
    #[error("nothing in the pool is called {name:?}, and {damage}")]
    MissingFromDamaged { name: String, damage: CatalogDamage },
}

/// Why a checkpoint cannot be read.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs, reason = "each sentence says what it is")]
pub enum ReadError {
    #[error(
        "checkpoint {name} in pool {pool} is damaged: `pageone pool check {pool}` lists all damage, \
         `pageone pool rm {pool} {name}` removes this checkpoint (`snapshot rm` a snapshot), and the others remain"
    )]
    Damaged { name: String, pool: String, source: Flaw },
    #[error("checkpoint {name} in pool {pool} cannot be read here")]
    Claim { name: String, pool: String, source: claims::ClaimError },
    #[error(transparent)]
    Map(#[from] MapError),
    #[error(transparent)]
    Write(#[from] io::Error),
}

/// How the records of a checkpoint and the pool's mblocks disagree.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs, reason = "each sentence says what it is")]
pub enum Flaw {
    #[error("its regions have {0} bytes, which cannot be")]
    Regions(u64),
    #[error("mblock {0:#x} is not the root of a map")]
    Root(u64),
    #[error("its map has {is} pages, and its memory {expected}")]
    Pages { is: u64, expected: u64 },
    #[error("leaf {slot} in mblock {mblock:#x} is not the one that its map names")]
    Leaf { slot: u32, mblock: u64 },
    #[error("page {page} of data mblock {mblock:#x} is not there")]
    NoPage { page: u64, mblock: u64 },
    #[error("what is kept beside it has {is} bytes, and {expected} were stored")]
    Beside { is: u64, expected: u64 },
    #[error(transparent)]
    Claim(#[from] claims::ClaimError),
    #[error(transparent)]
    Object(#[from] ObjectError),
    #[error(transparent)]
    Page(PageFlaw),
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
#[allow(missing_docs, reason = "each sentence says what it is")]
pub enum RemoveError {
    #[error(transparent)]
    Damaged(#[from] CatalogDamage),
    #[error(transparent)]
    Find(#[from] FindError),
    #[error(transparent)]
    Read(#[from] ReadError),
    #[error(transparent)]
    Store(#[from] StoreError),
}

/// Why a pool was not repacked, or not as a whole.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs, reason = "each sentence says what it is")]
pub enum RepackError {
    #[error(transparent)]
    Damaged(#[from] CatalogDamage),
    #[error(transparent)]
    Read(#[from] ReadError),
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
#[allow(missing_docs, reason = "each sentence says what it is")]
pub enum Finding {
    #[error("{}", chain(.0))]
    Unreadable(ReadError),
    #[error(
        "the record of checkpoint {name} names other data mblocks than its map{}",
        if *.repaired { ": written anew" } else { "; `pageone pool check` without --read-only writes it anew" }
    )]
    Needs { name: String, repaired: bool },
    #[error("{}", chain(.0))]
    Compressed(PageFlaw),
}

/// A record that is wrong could not be written anew.
#[derive(Debug, thiserror::Error)]
#[error("a record that is wrong cannot be written anew")]
pub struct Unrepaired {
    /// What was found.
    pub findings: Vec<Finding>,
    /// Why.
    pub source: StoreError,
}

/// Why pages of a data mblock cannot be compared with others.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs, reason = "each sentence says what it is")]
pub enum PageFlaw {
    #[error(transparent)]
    Object(#[from] ObjectError),
    #[error("data mblock {mblock:#x} has {is} bytes, and {expected} for {pages} pages")]
    Length { mblock: u64, is: u64, expected: u64, pages: u32 },
    #[error("the table of compressed data mblock {mblock:#x} is not one of {pages} pages")]
    Table { mblock: u64, pages: u32 },
    #[error("chunk {chunk} of compressed data mblock {mblock:#x} does not decode to its pages")]
    Chunk { mblock: u64, chunk: usize },
    #[error(
        "mblock {mblock:#x} of the index has {is} bytes, and {expected} for its entries; nothing is lost, \
             and the next checkpoint makes the index anew"
    )]
    Index { mblock: u64, is: u64, expected: u64 },
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
