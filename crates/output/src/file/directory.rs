//! The directory of an output file, opened without following a link of another user.

use std::ffi::OsString;
use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::ffi::OsStringExt;
use std::path::{Component, Path, PathBuf};

use rustix::fs::{FileType, Mode, OFlags};
use rustix::io::Errno;

/// Links on one path, at most, as the kernel has it.
const MOST_LINKS: usize = 40;

/// Whether a link of this user's may be followed.
pub(super) fn is_trusted(uid: u32) -> bool {
    uid == 0 || uid == rustix::process::geteuid().as_raw()
}

/// Opens a directory, a part of its path at a time. An empty path is the working directory.
pub(super) fn open(path: &Path) -> io::Result<OwnedFd> {
    let mut left = parts(path);
    let mut at = start(path)?;
    let mut links = 0;
    while let Some(part) = left.pop() {
        let flags = OFlags::PATH | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        let next = rustix::fs::openat(&at, &part, flags, Mode::empty())?;
        let stat = rustix::fs::fstat(&next)?;
        if FileType::from_raw_mode(stat.st_mode) != FileType::Symlink {
            at = next;
            continue;
        }
        links += 1;
        if links > MOST_LINKS {
            return Err(Errno::LOOP.into());
        }
        if !is_trusted(stat.st_uid) {
            let why = format!("{} on its way is a link of another user", part.display());
            return Err(io::Error::new(io::ErrorKind::PermissionDenied, why));
        }
        let target = rustix::fs::readlinkat(&next, "", Vec::new())?;
        let target = PathBuf::from(OsString::from_vec(target.into_bytes()));
        if target.is_absolute() {
            at = start(&target)?;
        }
        left.extend(parts(&target));
    }
    Ok(at)
}

/// Makes a name in it survive a crash of the host.
pub(super) fn sync(directory: &OwnedFd) -> io::Result<()> {
    let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
    // One who may write there may not be allowed to read it.
    match rustix::fs::openat(directory, ".", flags, Mode::empty()) {
        Err(Errno::ACCESS) => Ok(()),
        opened => Ok(rustix::fs::fsync(opened?)?),
    }
}

fn start(path: &Path) -> io::Result<OwnedFd> {
    let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
    Ok(rustix::fs::open(if path.is_absolute() { "/" } else { "." }, flags, Mode::empty())?)
}

/// The parts of a path, the first last.
fn parts(path: &Path) -> Vec<OsString> {
    let named = |part: &Component<'_>| matches!(part, Component::Normal(_) | Component::ParentDir);
    path.components().rev().filter(named).map(|part| part.as_os_str().to_owned()).collect()
}
