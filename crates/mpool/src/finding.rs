//! Findings of opening or checking a pool.

use std::fmt;
use std::path::PathBuf;

use crate::MediaClass;
use crate::error::{Damage, Object};

/// A difference between a pool and what it should be.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Finding {
    /// Bytes that differ from what was written.
    Damage {
        /// Where.
        damage: Damage,
        /// Whether it was put right; nothing was lost then.
        repaired: bool,
    },
    /// A log ended in something unfinished, as after a crash. It was never acknowledged as durable.
    TornTail {
        /// The log.
        object: Object,
        /// Where its last whole record ends.
        offset: u64,
    },
    /// Metadata records that are gone.
    RecordsLost(u32),
    /// The directory of a class is not there, or belongs to another pool.
    ClassMissing {
        /// Which class.
        class: MediaClass,
        /// Where it should be.
        path: PathBuf,
        /// Committed mblocks in it.
        mblocks: u64,
    },
    /// A data file takes more of its medium than its mblocks need.
    SpaceLost {
        /// Which class.
        class: MediaClass,
        /// Bytes too many.
        bytes: u64,
    },
    /// Rebuilding the pool kept what may belong to mblocks whose records are lost.
    SpaceKept {
        /// Which class.
        class: MediaClass,
        /// Bytes.
        bytes: u64,
    },
    /// Something could not be read.
    Unreadable(String),
}

impl fmt::Display for Finding {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Damage { damage, repaired } => write!(f, "{damage}{}", if *repaired { " (repaired)" } else { "" }),
            Self::TornTail { object, offset } => write!(f, "{object} had an unfinished end, from byte {offset} on"),
            Self::RecordsLost(count) => write!(f, "{count} metadata records are gone"),
            Self::ClassMissing { class, path, mblocks } => {
                write!(
                    f,
                    "class {class} is missing: {} holds none of this pool; it had {mblocks} mblocks",
                    path.display()
                )
            }
            Self::SpaceLost { class, bytes } => {
                write!(
                    f,
                    "class {class} takes {bytes} bytes more than its mblocks need; opening it exclusively frees them"
                )
            }
            Self::SpaceKept { class, bytes } => write!(
                f,
                "class {class} keeps {bytes} bytes that may belong to lost mblocks; `pageone pool rebuild --free-lost` \
                 frees them"
            ),
            Self::Unreadable(why) => f.write_str(why),
        }
    }
}
