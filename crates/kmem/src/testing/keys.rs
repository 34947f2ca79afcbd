//! Keys of the kernel's keyrings, for tests.

use std::io;
use std::os::unix::process::CommandExt;
use std::process::Command;

use rustix::io::Errno;

use crate::raw::{Answer, syscall};

/// A key in the user's keyring (`@u`), which is gone with this value.
pub struct KernelKey {
    name: String,
    id: usize,
}

fn keyctl(operation: u32, first: usize, second: usize) -> Answer {
    // SAFETY: the operations below take numbers.
    unsafe { syscall(libc::SYS_keyctl, [operation as usize, first, second]) }
}

const USER: usize = libc::KEY_SPEC_USER_KEYRING as usize;
const THREAD: usize = libc::KEY_SPEC_THREAD_KEYRING as usize;

impl KernelKey {
    /// A key of type `user` or `logon`. `None`, said: there are no keyrings here.
    pub fn new(kind: &str, name: &str, bytes: &[u8]) -> Option<Self> {
        let name = format!("pageone-test:{name}:{}", std::process::id());
        let texts = [kind, &name].map(|text| std::ffi::CString::new(text).unwrap());
        let [of_kind, of_name] = texts.each_ref().map(|text| text.as_ptr().expose_provenance());
        let args = [of_kind, of_name, bytes.as_ptr().expose_provenance(), bytes.len(), USER];
        // SAFETY: the kernel reads two texts that end with a zero, and `bytes.len()` bytes; all are
        // borrowed for the call.
        match unsafe { syscall(libc::SYS_add_key, args) } {
            Ok(id) => Some(Self { name, id }),
            Err(e @ (Errno::NOSYS | Errno::PERM | Errno::ACCESS)) => {
                println!("SKIPPED: no key can be added to the kernel's keyrings here: {e}");
                None
            }
            Err(e) => panic!("adding a key: {e}"),
        }
    }

    /// Its name, which `keyctl(1)` calls its description.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Gives it other bytes.
    pub fn set(&self, bytes: &[u8]) {
        keyctl(libc::KEYCTL_LINK, USER, THREAD).unwrap();
        let args = [libc::KEYCTL_UPDATE as usize, self.id, bytes.as_ptr().expose_provenance(), bytes.len()];
        // SAFETY: the kernel reads `bytes.len()` bytes, which are borrowed for the call.
        let done = unsafe { syscall(libc::SYS_keyctl, args) };
        keyctl(libc::KEYCTL_UNLINK, USER, THREAD).unwrap();
        done.unwrap();
    }

    /// Does something that only the key's possessor may do.
    fn change(&self, operation: u32, value: usize) {
        keyctl(libc::KEYCTL_LINK, USER, THREAD).unwrap();
        let done = keyctl(operation, self.id, value);
        keyctl(libc::KEYCTL_UNLINK, USER, THREAD).unwrap();
        done.unwrap();
    }

    /// Sets its permissions.
    pub fn permit(&self, bits: usize) {
        self.change(libc::KEYCTL_SETPERM, bits);
    }

    /// Takes it out of the keyring.
    pub fn unlink(&self) {
        keyctl(libc::KEYCTL_UNLINK, self.id, USER).unwrap();
    }

    /// Revokes it.
    pub fn revoke(&self) {
        self.change(libc::KEYCTL_REVOKE, 0);
    }

    /// Lets it expire, within seconds.
    pub fn expire(&self) {
        self.change(libc::KEYCTL_SET_TIMEOUT, 1);
        while !matches!(
            crate::keyring::read_user_key(&self.name, &mut []),
            Err(crate::keyring::KeyError::Expired | crate::keyring::KeyError::Missing)
        ) {
            std::thread::sleep(std::time::Duration::from_millis(20));
        }
    }
}

impl Drop for KernelKey {
    fn drop(&mut self) {
        let _ = keyctl(libc::KEYCTL_UNLINK, self.id, USER);
    }
}

/// Gives this thread a session of its own, without the user's keyring, as systemd does for a
/// service.
pub fn join_session() -> io::Result<()> {
    keyctl(libc::KEYCTL_JOIN_SESSION_KEYRING, 0, 0)?;
    Ok(())
}

/// The command gets a session as [`join_session`] makes one.
pub fn in_own_session(command: &mut Command) -> &mut Command {
    // SAFETY: between fork and exec this makes one system call, and allocates nothing.
    unsafe { command.pre_exec(join_session) }
}
