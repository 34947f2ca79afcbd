//! A clone's directory, which belongs to the account that it runs as.

use std::fs::File;
use std::io::{self, Read, Seek, SeekFrom};
use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::fs::{DirBuilderExt, MetadataExt, PermissionsExt, fchown};
use std::path::{Path, PathBuf};
use std::process::Command;

use rustix::fs::{CWD, FlockOperation, Mode, OFlags, flock};

use super::{CloneError, make};
use crate::rights::Account;

/// Bytes of the end of a clone's output that an error shows.
const TAIL: u64 = 600;
/// What the names of directories begin with that are locked while they are used.
const PASSING: &str = "pageone-trial-";

/// Makes it.
pub(super) fn new_directory(directory: &Path) -> Result<(), CloneError> {
    std::fs::DirBuilder::new().mode(0o700).create(directory).map_err(make(directory))
}

/// Gives a directory that was just made to the account that the clone runs as.
pub(super) fn hand_over(directory: &Path, account: &Account) -> Result<(), CloneError> {
    let open = || open(directory);
    let own = rustix::process::geteuid();
    if own.is_root() && account.uid != own.as_raw() {
        let given = open().and_then(|made| fchown(&made, Some(account.uid), Some(account.gid)));
        given.map_err(make(directory))?;
    }
    let enter = |source| CloneError::Enter { directory: directory.into(), uid: account.uid, source };
    account.with_files(open).map(drop).map_err(enter)
}

/// Has a command's program begin in the first of these directories that its account reaches: by
/// their names root could be led elsewhere. What it gives is dropped when the program has started.
pub(super) fn begin_in(command: &mut Command, account: &Account, all: &[&Path]) -> io::Result<OwnedFd> {
    let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
    let open = |path: &&Path| rustix::fs::open(*path, flags, Mode::empty()).ok();
    let place = account.with_files(|| all.iter().find_map(open).ok_or(io::ErrorKind::PermissionDenied.into()))?;
    command.current_dir(format!("/proc/self/fd/{}", place.as_raw_fd()));
    Ok(place)
}

fn open(directory: &Path) -> io::Result<File> {
    let flags = OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    Ok(rustix::fs::open(directory, flags, Mode::empty())?.into())
}

/// A directory that is gone with this, or, if this process is killed, by the next one that is made.
/// It is the caller's, and locked; what others get lies in [`Passing::inner`].
pub struct Passing {
    path: PathBuf,
    _lock: File,
}

impl Passing {
    /// Makes one in this directory, and removes what processes have left there that were killed.
    ///
    /// # Errors
    /// If it cannot be made.
    pub fn new(above: &Path) -> Result<Self, CloneError> {
        sweep(above);
        loop {
            let mut number = [0; 8];
            let _ = rustix::rand::getrandom(&mut number, rustix::rand::GetRandomFlags::empty());
            let path = above.join(format!("{PASSING}{:x}", u64::from_ne_bytes(number)));
            new_directory(&path)?;
            let locked = || -> io::Result<Option<File>> {
                let lock = open(&path)?;
                flock(&lock, FlockOperation::LockExclusive)?;
                // Another account goes through it, and cannot list it.
                lock.set_permissions(PermissionsExt::from_mode(0o711))?;
                Ok((lock.metadata()?.nlink() > 0).then_some(lock))
            };
            match locked() {
                Ok(Some(lock)) => return Ok(Self { path, _lock: lock }),
                // It was swept before it was locked.
                Ok(None) => {}
                Err(error) if error.kind() == io::ErrorKind::NotFound => {}
                Err(error) => return Err(make(&path)(error)),
            }
        }
    }

    /// The directory in it that is handed over.
    pub fn inner(&self, name: &str) -> PathBuf {
        self.path.join(name)
    }

    /// Moves such a directory out, so that it stays.
    pub fn keep(&self, name: &str) {
        let _ = std::fs::rename(self.inner(name), self.path.with_file_name(name));
    }
}

impl Drop for Passing {
    fn drop(&mut self) {
        if let Some(left) = remove(&self.path) {
            output::note!("{left}");
        }
    }
}

/// Removes the directories that belong to the caller and that nobody has locked.
fn sweep(above: &Path) {
    let own = rustix::process::geteuid().as_raw();
    let is_left = |path: &Path| {
        let lock = open(path).ok().filter(|lock| lock.metadata().is_ok_and(|meta| meta.uid() == own));
        lock.filter(|lock| flock(lock, FlockOperation::NonBlockingLockExclusive).is_ok())
    };
    for entry in std::fs::read_dir(above).into_iter().flatten().flatten() {
        if entry.file_name().as_encoded_bytes().starts_with(PASSING.as_bytes())
            && let Some(_lock) = is_left(&entry.path())
        {
            drop(Passing { path: entry.path(), _lock });
        }
    }
}

/// Removes the directory of a trial; else what to say.
fn remove(directory: &Path) -> Option<String> {
    let error = std::fs::remove_dir_all(directory).err().filter(|error| error.kind() != io::ErrorKind::NotFound)?;
    let at = directory.display();
    Some(format!(
        "{at}, of a clone that was tried, cannot be removed ({error}): look what is mounted or locked there, and remove it"
    ))
}

/// The end of what a clone has said.
pub(super) fn tail(log: &Path) -> String {
    let read = || -> io::Result<Vec<u8>> {
        let flags = OFlags::RDONLY | OFlags::NOFOLLOW;
        let (mut file, mut end) = (claims::open_at(CWD, log, flags, Mode::empty())?, Vec::new());
        // The guest decides how much it says.
        file.seek(SeekFrom::Start(file.metadata()?.len().saturating_sub(TAIL)))?;
        file.take(TAIL).read_to_end(&mut end)?;
        Ok(end)
    };
    String::from_utf8_lossy(&read().unwrap_or_default()).trim().to_owned()
}

#[cfg(test)]
mod tests;
