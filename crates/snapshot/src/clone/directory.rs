//! A clone's directory, which belongs to the account that it runs as.

use std::fs::File;
use std::io::{self, Read, Seek, SeekFrom};
use std::os::unix::fs::{DirBuilderExt, fchown};
use std::path::Path;

use rustix::fs::{CWD, Mode, OFlags};

use super::{CloneError, make};
use crate::rights::Account;

/// Bytes of the end of a clone's output that an error shows.
const TAIL: u64 = 600;

/// Makes it.
pub(super) fn new_directory(directory: &Path) -> Result<(), CloneError> {
    std::fs::DirBuilder::new().mode(0o700).create(directory).map_err(make(directory))
}

/// Gives a directory that was just made to the account that the clone runs as.
pub(super) fn hand_over(directory: &Path, account: &Account) -> Result<(), CloneError> {
    let flags = OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    let open = || -> io::Result<File> { Ok(rustix::fs::open(directory, flags, Mode::empty())?.into()) };
    let own = rustix::process::geteuid();
    if own.is_root() && account.uid != own.as_raw() {
        let given = open().and_then(|made| fchown(&made, Some(account.uid), Some(account.gid)));
        given.map_err(make(directory))?;
    }
    let enter = |source| CloneError::Enter { directory: directory.into(), uid: account.uid, source };
    account.with_files(open).map(drop).map_err(enter)
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
