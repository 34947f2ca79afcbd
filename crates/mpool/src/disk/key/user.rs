//! The user's key: from a file, or from the kernel's keyrings.

use std::io::{self, Read};
use std::os::unix::fs::MetadataExt;
use std::path::Path;

use claims::ClaimError;
use zeroize::Zeroizing;

use super::{KEY, Secret};
use crate::KeyPlace;
use crate::error::{During, PoolError};

/// A user's key, and where it was.
pub(crate) struct UserKey {
    pub(super) key: Secret,
    pub(super) place: KeyPlace,
}

impl UserKey {
    /// Reads it.
    pub(crate) fn read(place: &KeyPlace) -> Result<Self, PoolError> {
        // One more, so that a longer one is seen.
        let mut bytes = Zeroizing::new([0; KEY + 1]);
        let (place, len) = match place {
            KeyPlace::File(path) => read_file(path, &mut bytes)?,
            KeyPlace::Kernel(name) => {
                let read = kmem::keyring::read_user_key(name, &mut bytes[..]);
                let len = read.map_err(|cause| PoolError::KernelKey { key: place.clone(), cause })?;
                (place.clone(), len)
            }
        };
        if len != KEY {
            let why = match place {
                KeyPlace::File(_) => {
                    "a key is a file of 32 random bytes; `(umask 77; head -c 32 /dev/urandom > FILE)` makes one"
                }
                KeyPlace::Kernel(_) => {
                    "a key is 32 random bytes; `head -c 32 /dev/urandom | keyctl padd user NAME @u` makes one"
                }
            };
            return Err(PoolError::UnfitKey { key: place, why });
        }
        let mut key = Secret::default();
        key.copy_from_slice(&bytes[..KEY]);
        Ok(Self { key, place })
    }
}

/// Reads a regular file as far as there is room; gives its whole path.
fn read_file(path: &Path, bytes: &mut [u8; KEY + 1]) -> Result<(KeyPlace, usize), PoolError> {
    let open = || {
        let path = path.canonicalize()?;
        // A device is not opened, a pipe not waited for: the pool's own files may name them.
        let file = match claims::open(&path) {
            Err(ClaimError::Kind(_)) => None,
            file => Some(file?),
        };
        io::Result::Ok((path, file))
    };
    let (path, file) = open().during("opening the key", path.display())?;
    let Some(file) = file else { return Ok((path.into(), 0)) };
    let mode = file.metadata().during("reading the key", path.display())?.mode();
    let mut len = 0;
    while let Some(into) = bytes.get_mut(len..).filter(|into| !into.is_empty()) {
        match (&file).read(into).during("reading the key", path.display())? {
            0 => break,
            more => len += more,
        }
    }
    if len == KEY && mode & 0o007 != 0 {
        let why = "every user of this host may use it; `chmod 600` ends that";
        return Err(PoolError::UnfitKey { key: path.into(), why });
    }
    Ok((path.into(), len))
}
