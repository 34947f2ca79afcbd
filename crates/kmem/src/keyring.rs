//! Keys in the kernel's keyrings (`keyrings(7)`, `keyctl(2)`).

#![allow(unsafe_code)] // System calls.

use std::ffi::{CStr, CString};
use std::io;

use rustix::io::Errno;

use crate::raw::{Answer, syscall};

/// Why a key cannot be read.
#[derive(Debug, thiserror::Error)]
pub enum KeyError {
    /// No keyring that is searched has it.
    #[error(
        "neither the session's keyring nor the user's has a key of type `user` and that name; `keyctl padd user NAME @u < \
         FILE` adds it"
    )]
    Missing,
    /// It is of the type that only the kernel reads.
    #[error("it is of type `logon`, which no program can read; add it with type `user`")]
    Logon,
    /// Its time is over.
    #[error("it has expired; add it again, and `keyctl timeout` sets when it expires next")]
    Expired,
    /// It, or the session's keyring, was revoked.
    #[error("it was revoked, or the session's keyring was; add it again, with `keyctl padd user NAME @u < FILE`")]
    Revoked,
    /// Its permissions keep this process out.
    #[error(
        "its permissions keep this program from finding or reading it; its owner changes them with `keyctl setperm`"
    )]
    Denied,
    /// There are no keyrings for this process.
    #[error("this kernel has no keyrings, or a filter of system calls keeps them away; use a file with the key")]
    NoKeyrings,
    /// The system's reason.
    #[error("{0}")]
    System(io::Error),
}

impl From<Errno> for KeyError {
    fn from(errno: Errno) -> Self {
        match errno {
            Errno::NOKEY => Self::Missing,
            Errno::KEYEXPIRED => Self::Expired,
            Errno::KEYREVOKED => Self::Revoked,
            Errno::ACCESS => Self::Denied,
            Errno::NOSYS | Errno::PERM => Self::NoKeyrings,
            other => Self::System(other.into()),
        }
    }
}

/// Reads the key of type `user` with this name, which `keyctl(1)` calls its description, from the
/// session's keyring, or else the one of the real user (`@u`). Gives its length, which may be more
/// than there is room for.
///
/// A service of systemd has a session of its own, without the user's keyring: what is only found
/// there may not be read. So the key is linked to the thread's keyring meanwhile, which makes this
/// thread its possessor. A key of that name in the thread's keyring is replaced.
pub fn read_user_key(name: &str, into: &mut [u8]) -> Result<usize, KeyError> {
    // No key has a zero in its name.
    let name = CString::new(name).map_err(|_| KeyError::Missing)?;
    match find(c"user", &name) {
        Ok(key) => {
            let read = read(key, into);
            unlink(key);
            Ok(read?)
        }
        Err(KeyError::Missing) => match find(c"logon", &name) {
            Ok(key) => {
                unlink(key);
                Err(KeyError::Logon)
            }
            Err(_) => Err(KeyError::Missing),
        },
        Err(e) => Err(e),
    }
}

/// Finds a key and links it to the thread's keyring.
fn find(kind: &CStr, name: &CStr) -> Result<usize, KeyError> {
    let mut failed = KeyError::Missing;
    for keyring in [libc::KEY_SPEC_SESSION_KEYRING, libc::KEY_SPEC_USER_KEYRING] {
        match search(keyring, kind, name).map_err(KeyError::from) {
            Ok(key) => return Ok(key),
            Err(e) if matches!(failed, KeyError::Missing) => failed = e,
            Err(_) => {}
        }
    }
    Err(failed)
}

fn search(keyring: i32, kind: &CStr, name: &CStr) -> Answer {
    let [kind, name] = [kind, name].map(|text| text.as_ptr().expose_provenance());
    let thread = libc::KEY_SPEC_THREAD_KEYRING as usize;
    // SAFETY: the kernel reads two texts that end with a zero and are borrowed for the call. What
    // changes is which keys this thread possesses: no memory, no descriptor.
    unsafe { syscall(libc::SYS_keyctl, [libc::KEYCTL_SEARCH as usize, keyring as usize, kind, name, thread]) }
}

fn read(key: usize, into: &mut [u8]) -> Answer {
    let start = into.as_mut_ptr().expose_provenance();
    // SAFETY: the kernel writes at most `into.len()` bytes, and `into` is borrowed for the call.
    unsafe { syscall(libc::SYS_keyctl, [libc::KEYCTL_READ as usize, key, start, into.len()]) }
}

/// Takes a key out of the thread's keyring. That it is not there is no failure.
fn unlink(key: usize) {
    let thread = libc::KEY_SPEC_THREAD_KEYRING as usize;
    // SAFETY: no argument is a pointer.
    let _ = unsafe { syscall(libc::SYS_keyctl, [libc::KEYCTL_UNLINK as usize, key, thread]) };
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::KernelKey;

    #[test]
    fn a_key_is_read_from_the_users_keyring_and_what_keeps_it_away_is_told() {
        let Some(key) = KernelKey::new("user", "kmem-read", b"sixteen bytes...") else { return };
        let mut bytes = [0; 20];
        assert_eq!(read_user_key(key.name(), &mut bytes).unwrap(), 16);
        assert_eq!(&bytes[..16], b"sixteen bytes...");
        assert_eq!(read_user_key(key.name(), &mut bytes[..4]).unwrap(), 16, "more than there is room for");
        assert!(matches!(read_user_key("pageone-test:nobody's", &mut bytes), Err(KeyError::Missing)));
        assert!(matches!(read_user_key("a\0b", &mut bytes), Err(KeyError::Missing)));
        key.permit(0);
        assert!(matches!(read_user_key(key.name(), &mut bytes), Err(KeyError::Denied)));
        let Some(key) = KernelKey::new("user", "kmem-revoked", b"x") else { return };
        key.revoke();
        assert!(matches!(read_user_key(key.name(), &mut bytes), Err(KeyError::Revoked)));
        let Some(key) = KernelKey::new("logon", "kmem-logon", b"x") else { return };
        assert!(matches!(read_user_key(key.name(), &mut bytes), Err(KeyError::Logon)));
        let Some(key) = KernelKey::new("user", "kmem-expired", b"x") else { return };
        key.expire();
        assert!(matches!(read_user_key(key.name(), &mut bytes), Err(KeyError::Expired)));
    }

    #[test]
    fn a_key_is_read_in_a_session_of_its_own() {
        let Some(key) = KernelKey::new("user", "kmem-session", b"four") else { return };
        let name = key.name().to_owned();
        // A session is joined by one thread only.
        let read = std::thread::spawn(move || {
            crate::testing::join_session().unwrap();
            read_user_key(&name, &mut [0; 4])
        });
        assert_eq!(read.join().unwrap().unwrap(), 4);
    }

    #[test]
    fn without_keyrings_a_file_is_asked_for() {
        assert!(matches!(KeyError::from(Errno::NOSYS), KeyError::NoKeyrings));
        assert!(matches!(KeyError::from(Errno::PERM), KeyError::NoKeyrings));
        assert!(matches!(KeyError::from(Errno::DQUOT), KeyError::System(_)));
    }
}
