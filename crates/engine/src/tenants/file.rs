//! Files of the host: the kernel's, and those of managers, which only root can have written.

use std::fs::{File, Metadata};
use std::io::{self, Read};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::time::SystemTime;

use claims::ClaimError;
use rustix::fs::{CWD, Mode, OFlags};

/// Most bytes of a file: the XML of a guest with hundreds of devices is shorter.
const MOST: u64 = 1 << 20;

#[derive(Debug, thiserror::Error)]
pub(super) enum FileError {
    #[error("{path} can't be read: {source}; see that it is there, and run the daemon as root")]
    Io { path: PathBuf, source: io::Error },
    #[error("{path} does not count: others than root can write it; `chown root` and `chmod go-w` it")]
    Writable { path: PathBuf },
    #[error(
        "{path} does not count: others can keep files there, and it is older than its process; if the clock was set since, \
         restart libvirtd, which writes it anew"
    )]
    Old { path: PathBuf },
    #[error("{path} does not count: it has more than 1 MiB, or is no text")]
    NoText { path: PathBuf },
}

impl FileError {
    pub(super) fn io(path: &Path, source: io::Error) -> Self {
        Self::Io { path: path.into(), source }
    }
}

/// Whether only root, or the user of this daemon, can have written it.
pub(super) fn is_trusted(meta: &Metadata) -> bool {
    let own = rustix::process::geteuid().as_raw();
    [0, own].contains(&meta.uid()) && meta.mode() & 0o022 == 0
}

/// A manager's file. Its directory must not be writable by others either.
pub(super) fn read(path: &Path) -> Result<String, FileError> {
    read_since(path, None)
}

/// The same, of a directory that others may write, if the manager has written the file at this time
/// or later: they can keep an old one, and neither change one nor make one.
pub(super) fn read_since(path: &Path, since: Option<SystemTime>) -> Result<String, FileError> {
    let cannot = |source| FileError::io(path, source);
    let file = claims::open_at(CWD, path, OFlags::RDONLY | OFlags::NOFOLLOW, Mode::empty());
    let file = file.map_err(|e| cannot(e.into()))?;
    let meta = file.metadata().map_err(cannot)?;
    let directory = path.parent().map(|directory| directory.metadata()).transpose().map_err(cannot)?;
    let writable = || FileError::Writable { path: path.into() };
    if !is_trusted(&meta) {
        return Err(writable());
    }
    if !directory.is_some_and(|directory| is_trusted(&directory)) {
        let since = since.ok_or_else(writable)?;
        if meta.modified().map_err(cannot)? < since {
            return Err(FileError::Old { path: path.into() });
        }
    }
    let no_text = || FileError::NoText { path: path.into() };
    match claims::up_to(file, MOST) {
        Ok(bytes) if !bytes.contains(&0) => String::from_utf8(bytes).map_err(|_| no_text()),
        Ok(_) | Err(ClaimError::Long { .. }) => Err(no_text()),
        Err(error) => Err(cannot(error.into())),
    }
}

/// A file of `/proc`. What is no text in it is replaced, and matches nothing.
pub(super) fn read_kernel(path: &Path) -> io::Result<String> {
    let mut bytes = Vec::new();
    File::open(path)?.take(MOST).read_to_end(&mut bytes)?;
    Ok(String::from_utf8_lossy(&bytes).into_owned())
}
