//! Names that files and directories have until they are whole. Errors, SIGINT, SIGTERM and SIGHUP
//! remove them.
//!
//! ```text
//! SIGINT ─▶ handler ─pipe─▶ thread: removes all names, restores the usual action, sends it again
//! ```
//!
//! All files of the process have one guard: the first that ended the process would leave the
//! others' names. A signal that the program ignores or handles itself is left to it. When the last
//! name is gone, signals do what they did before.

#![allow(unsafe_code)] // Handlers of signals.

use std::ffi::{OsStr, OsString, c_int};
use std::io::{self, PipeWriter, Read};
use std::os::fd::{AsRawFd, OwnedFd, RawFd};
use std::path::Path;
use std::sync::{Mutex, MutexGuard, OnceLock, PoisonError};

use rustix::fs::{AtFlags, Mode, RenameFlags};
use rustix::io::Errno;

use super::{Existing, FileError, in_place, io_error};

const SIGNALS: [c_int; 3] = [libc::SIGINT, libc::SIGTERM, libc::SIGHUP];
/// Names, the directories that they are in, and whether they are directories.
static NAMES: Mutex<Vec<(OwnedFd, OsString, AtFlags)>> = Mutex::new(Vec::new());
/// Takes the number of a signal. It is there once the thread is.
static WAKE: OnceLock<PipeWriter> = OnceLock::new();

/// A name that is gone with this.
#[derive(Debug)]
pub(super) struct Temporary {
    pub(super) directory: OwnedFd,
    pub(super) name: OsString,
    /// How it is removed. `None`: it stays.
    how: Option<AtFlags>,
    /// The descriptor by which its guard knows it.
    key: RawFd,
}

impl Temporary {
    /// Chooses one that nobody guesses. The file is made after this: there is no moment at which a
    /// signal leaves it.
    pub(super) fn new(directory: OwnedFd) -> io::Result<Self> {
        let mut random = [0; 16];
        // Without randomness the name is one that may be there already, which is an error.
        let _ = rustix::rand::getrandom(&mut random, rustix::rand::GetRandomFlags::empty());
        let name: OsString = format!(".pageone-{:032x}", u128::from_ne_bytes(random)).into();
        Self::of(directory, name, AtFlags::empty(), || Ok(()))
    }

    /// A directory, which is made.
    pub(super) fn directory(above: OwnedFd, name: &OsStr) -> io::Result<Self> {
        let other = above.try_clone()?;
        let make = || Ok(rustix::fs::mkdirat(other, name, Mode::RWXU)?);
        Self::of(above, name.to_owned(), AtFlags::REMOVEDIR, make)
    }

    /// What `make` makes of the name is removed, too: no signal ends the process meanwhile.
    fn of(directory: OwnedFd, name: OsString, how: AtFlags, make: impl FnOnce() -> io::Result<()>) -> io::Result<Self> {
        let mut names = names();
        start()?;
        let own = directory.try_clone()?;
        let key = own.as_raw_fd();
        names.push((own, name.clone(), how));
        exchange(libc::SIG_DFL, handler());
        if let Err(error) = make() {
            // Before a signal could remove what is another's.
            forget(&mut names, key);
            return Err(error);
        }
        Ok(Self { directory, name, how: Some(how), key })
    }

    /// Its name stays.
    pub(super) fn stay(mut self) {
        forget(&mut names(), self.key);
        self.how = None;
    }

    /// Gives the file a name that nothing has.
    pub(super) fn link(&self, name: &OsStr) -> Result<(), Errno> {
        match rustix::fs::linkat(&self.directory, &self.name, &self.directory, name, AtFlags::empty()) {
            // The file system has one name for each file.
            Err(Errno::PERM | Errno::OPNOTSUPP) => self.rename(name),
            linked => linked,
        }
    }

    pub(super) fn rename(&self, name: &OsStr) -> Result<(), Errno> {
        rustix::fs::renameat_with(&self.directory, &self.name, &self.directory, name, RenameFlags::NOREPLACE)
    }

    /// Renames it over a regular file, or over nothing.
    pub(super) fn replace(&self, name: &OsStr, path: &Path) -> Result<(), FileError> {
        in_place(&self.directory, name, path, Existing::Replaced)?
            .map_or(Ok(()), |_| Err(FileError::Other { path: path.to_owned(), what: "a device or a pipe by now" }))?;
        rustix::fs::renameat(&self.directory, &self.name, &self.directory, name).map_err(|e| io_error(path)(e.into()))
    }
}

impl Drop for Temporary {
    fn drop(&mut self) {
        if let Some(how) = self.how {
            let _ = rustix::fs::unlinkat(&self.directory, &self.name, how);
            forget(&mut names(), self.key);
        }
    }
}

fn forget(names: &mut Vec<(OwnedFd, OsString, AtFlags)>, key: RawFd) {
    names.retain(|(own, _, _)| own.as_raw_fd() != key);
    if names.is_empty() {
        exchange(handler(), libc::SIG_DFL);
    }
}

fn names() -> MutexGuard<'static, Vec<(OwnedFd, OsString, AtFlags)>> {
    NAMES.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Starts the thread, under the lock.
fn start() -> io::Result<()> {
    if WAKE.get().is_some() {
        return Ok(());
    }
    let (mut asked, wake) = io::pipe()?;
    std::thread::Builder::new().name("output".into()).spawn(move || {
        let mut signal = [0];
        while asked.read_exact(&mut signal).is_ok() {
            end_by(signal[0].into());
        }
    })?;
    let _ = WAKE.set(wake);
    Ok(())
}

extern "C" fn wake(signal: c_int) {
    // Without libc, so errno is what the interrupted code knows.
    let _ = WAKE.get().map(|wake| rustix::io::write(wake, &[signal as u8]));
}

fn handler() -> libc::sighandler_t {
    wake as extern "C" fn(c_int) as libc::sighandler_t
}

fn end_by(signal: c_int) {
    // No file gets a name any more.
    let names = names();
    // A handler that was set over this one has the signal. Or the last file was just closed.
    if ![handler(), libc::SIG_DFL].contains(&action(signal)) {
        return;
    }
    // What is in a directory comes after it.
    for (directory, name, how) in names.iter().rev() {
        let _ = rustix::fs::unlinkat(directory, name, *how);
    }
    set(signal, libc::SIG_DFL);
    // SAFETY: the usual action is to end this process, as was asked for.
    unsafe { libc::kill(libc::getpid(), signal) };
}

/// Sets an action of the signals that have this one.
fn exchange(from: libc::sighandler_t, to: libc::sighandler_t) {
    SIGNALS.into_iter().filter(|&signal| action(signal) == from).for_each(|signal| set(signal, to));
}

fn action(signal: c_int) -> libc::sighandler_t {
    // SAFETY: all fields are numbers, for which zero is a value.
    let mut now: libc::sigaction = unsafe { std::mem::zeroed() };
    // SAFETY: the kernel writes the action to a local variable.
    unsafe { libc::sigaction(signal, std::ptr::null(), &mut now) };
    now.sa_sigaction
}

pub(super) fn set(signal: c_int, action: libc::sighandler_t) {
    // SAFETY: all fields are numbers, for which zero is a value: no mask.
    let mut new: libc::sigaction = unsafe { std::mem::zeroed() };
    (new.sa_sigaction, new.sa_flags) = (action, libc::SA_RESTART);
    // SAFETY: the action is SIG_DFL, or a function that loads an atomic and writes to a pipe, which
    // a handler may do at any moment.
    unsafe { libc::sigaction(signal, &new, std::ptr::null_mut()) };
}
