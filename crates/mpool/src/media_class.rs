//! Media classes: the kinds of medium that objects lie on.

use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Serialize};

/// A kind of medium. Each is a directory, usually on a device of its own.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub enum MediaClass {
    /// Large. Every pool has it; it holds the metadata.
    #[default]
    Capacity = 0,
    /// Fast, for young or hot objects.
    Staging = 1,
    /// Persistent memory, or a `tmpfs` for objects that may be lost when the host stops.
    Memory = 2,
}

impl MediaClass {
    /// All of them.
    pub const ALL: [Self; 3] = [Self::Capacity, Self::Staging, Self::Memory];

    pub(crate) fn from_number(number: u32) -> Option<Self> {
        Self::ALL.get(number as usize).copied()
    }
}

impl fmt::Display for MediaClass {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Self::Capacity => "capacity",
            Self::Staging => "staging",
            Self::Memory => "memory",
        })
    }
}

impl FromStr for MediaClass {
    type Err = UnknownClass;

    fn from_str(name: &str) -> Result<Self, UnknownClass> {
        let found = Self::ALL.into_iter().find(|class| class.to_string() == name);
        found.ok_or_else(|| UnknownClass(name.into()))
    }
}

/// A word that names no media class.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{0:?} is no media class: capacity, staging or memory")]
pub struct UnknownClass(pub String);
