//! Where the user's key of an encrypted pool is.

use std::fmt;
use std::path::{Path, PathBuf};

/// Where the user's key of an encrypted pool is: 32 random bytes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum KeyPlace {
    /// In this file.
    File(PathBuf),
    /// In the kernel's keyrings: the key of type `user` with this name, which `keyctl(1)` calls its
    /// description, in the session's keyring, or else the user's.
    Kernel(String),
}

impl fmt::Display for KeyPlace {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::File(path) => path.display().fmt(f),
            Self::Kernel(name) => write!(f, "{name:?} in the kernel's keyrings"),
        }
    }
}

impl From<PathBuf> for KeyPlace {
    fn from(path: PathBuf) -> Self {
        Self::File(path)
    }
}

impl From<&Path> for KeyPlace {
    fn from(path: &Path) -> Self {
        Self::File(path.into())
    }
}
