//! The directories of what a person names, opened and made behind no link of another user.

use std::ffi::{OsStr, OsString};
use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::ffi::OsStringExt;
use std::path::{Component, Path, PathBuf};

use rustix::fs::{FileType, Mode, OFlags};
use rustix::io::Errno;

/// Links on one path, at most, as the kernel has it.
const MOST_LINKS: usize = 40;

/// Whether a link of this user's may be followed.
pub(crate) fn is_trusted(uid: u32) -> bool {
    uid == 0 || uid == rustix::process::geteuid().as_raw()
}

/// Makes a directory and those above it that are not there, with the permissions of `mode` that the
/// process' mask leaves.
///
/// # Errors
///
/// If something else is there, a link of another user is on the way, or it cannot be made.
pub fn make(path: &Path, mode: u32) -> io::Result<()> {
    let made = |at: &OwnedFd, part: &OsStr| match rustix::fs::mkdirat(at, part, Mode::from_raw_mode(mode)) {
        Err(Errno::EXIST) => Ok(()),
        made => made,
    };
    let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
    rustix::fs::openat(walk(path, made)?, ".", flags, Mode::empty())?;
    Ok(())
}

/// Opens a directory. An empty path is the working directory.
pub(crate) fn open(path: &Path) -> io::Result<OwnedFd> {
    walk(path, |_, _| Err(Errno::NOENT))
}

/// Opens a directory, a part of its path at a time. `missing` may make a part that is not there.
fn walk(path: &Path, missing: impl Fn(&OwnedFd, &OsStr) -> Result<(), Errno>) -> io::Result<OwnedFd> {
    let mut left = parts(path);
    let mut at = start(path)?;
    let mut links = 0;
    while let Some(part) = left.pop() {
        let flags = OFlags::PATH | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        let opened = || rustix::fs::openat(&at, &part, flags, Mode::empty());
        let next = match opened() {
            Err(Errno::NOENT) => missing(&at, &part).and_then(|()| opened())?,
            next => next?,
        };
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
pub(crate) fn sync(directory: &OwnedFd) -> io::Result<()> {
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

#[cfg(test)]
mod tests {
    use std::os::unix::fs::{MetadataExt, symlink};

    use super::*;

    #[test]
    fn directories_are_made_but_behind_no_link_of_another_user() {
        let dir = tempfile::tempdir().unwrap();
        let (own, other) = (dir.path().join("own"), dir.path().join("other"));
        make(&own.join("a/b"), 0o700).unwrap();
        make(&own.join("a/b"), 0o700).unwrap();
        assert_eq!(std::fs::metadata(own.join("a/b")).unwrap().mode() & 0o777, 0o700);
        std::fs::write(own.join("file"), "").unwrap();
        assert!(make(&own.join("file"), 0o700).is_err() && make(&own.join("file/c"), 0o700).is_err());
        symlink(&own, &other).unwrap();
        make(&other.join("c"), 0o700).unwrap();
        // Only root can make a link another user's.
        if std::os::unix::fs::lchown(&other, Some(65534), None).is_ok() {
            assert_eq!(make(&other.join("d"), 0o700).unwrap_err().kind(), io::ErrorKind::PermissionDenied);
        }
        assert!(own.join("c").is_dir() && !own.join("d").exists());
    }
}
