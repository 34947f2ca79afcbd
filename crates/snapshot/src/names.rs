//! The names of a disk's files: the one that the guest's definition has is the live one's, always.
//!
//! ```text
//!             live              stored     fresh
//! before      base              -          -
//! made        base              base       the new image, whose header names `stored`
//! covered     base              base       the new image, to which QEMU writes; the guest stands
//! settled     the new image     base       a symbolic link to live
//! ```
//!
//! QEMU opens files again, by the name that it knows, whenever their access mode changes. It knows
//! the new image as `fresh`, and the base as `live`, or as the `fresh` of an earlier snapshot. So
//! names are settled before the guest goes on, and unsettled for a moment where QEMU is to write to
//! the base again.

use std::ffi::OsString;
use std::fs::{self, File, Metadata, Permissions};
use std::io;
use std::os::fd::AsRawFd;
use std::os::unix::fs::{MetadataExt, PermissionsExt, symlink};
use std::path::{Path, PathBuf};

use rustix::fs::{CWD, Mode, OFlags, major, minor};
use serde::{Deserialize, Serialize};

use crate::qcow2;

/// Hidden files of one disk that a save looks at, at most.
const MOST: usize = 1000;
/// Bits of a mode: who may write.
pub(crate) const WRITE: u32 = 0o222;

/// The names of the files of one disk, all in one directory.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct Names {
    /// The one that the guest's definition has.
    pub(crate) live: PathBuf,
    /// The one that the snapshot has.
    pub(crate) stored: PathBuf,
    /// The one by which QEMU opens the new image.
    pub(crate) fresh: PathBuf,
    /// The base: its mode, and its place, by which it is known whatever has its name.
    mode: u32,
    base: Option<(u64, u64)>,
}

/// Whose file a name is, links not followed.
pub(crate) fn file(name: &Path) -> Option<(u64, u64)> {
    fs::symlink_metadata(name).ok().map(|meta| (meta.dev(), meta.ino()))
}

fn is_link(name: &Path) -> bool {
    fs::symlink_metadata(name).is_ok_and(|meta| meta.is_symlink())
}

/// Beginning of the names by which QEMU opens new images in place of this one.
fn prefix(live: &Path) -> OsString {
    let mut name = OsString::from(".");
    name.push(live.file_name().unwrap_or_default());
    name.push(".pageone-");
    name
}

fn unless<T>(kind: io::ErrorKind, done: io::Result<T>) -> io::Result<()> {
    done.map(drop).or_else(|error| if error.kind() == kind { Ok(()) } else { Err(error) })
}

impl Names {
    /// `number`: one that no other has.
    pub(crate) fn new(live: &Path, stored: PathBuf, number: &str) -> Self {
        let mut fresh = prefix(live);
        fresh.push(number);
        let mode = fs::metadata(live).map_or(0o600, |meta| meta.mode() & 0o777);
        Self { live: live.to_owned(), stored, fresh: live.with_file_name(fresh), mode, base: file(live) }
    }

    fn beside(&self, end: &str) -> PathBuf {
        let mut name = self.fresh.clone().into_os_string();
        name.push(end);
        name.into()
    }

    /// What becomes `fresh` when names are settled: in the pause nothing is made.
    fn link(&self) -> PathBuf {
        self.beside(".link")
    }

    /// Gives the base its second name.
    pub(crate) fn make(&self) -> io::Result<()> {
        fs::hard_link(&self.live, &self.stored)?;
        self.make_link()
    }

    fn make_link(&self) -> io::Result<()> {
        unless(io::ErrorKind::AlreadyExists, symlink(self.live.file_name().unwrap_or_default(), self.link()))
    }

    /// Gives the new image the definition's name. May be called at any time after QEMU has opened
    /// it, and again.
    pub(crate) fn settle(&self) -> io::Result<()> {
        if self.is_settled() {
            return Ok(());
        }
        // Nothing happens where both are the new image already.
        unless(io::ErrorKind::NotFound, fs::rename(&self.fresh, &self.live))?;
        fs::rename(self.link(), &self.fresh)
    }

    /// Whether the definition's name is the new image's.
    pub(crate) fn is_settled(&self) -> bool {
        is_link(&self.fresh)
    }

    /// Has each name that QEMU knows be the file that QEMU has opened by it: it may do it again.
    pub(crate) fn unsettle(&self) -> io::Result<()> {
        let spare = self.beside(".spare");
        unless(io::ErrorKind::NotFound, fs::remove_file(&spare))?;
        self.make_link()?;
        if self.is_settled() {
            fs::hard_link(&self.live, &spare)?;
            fs::rename(&spare, &self.fresh)?;
        }
        if file(&self.live) == file(&self.fresh) {
            fs::hard_link(&self.stored, &spare)?;
            fs::rename(&spare, &self.live)?;
        }
        Ok(())
    }

    /// Takes all names away but the definition's, when QEMU does not have the new image open: that
    /// one's first, which is none without the base's second one. The names are durable then: what
    /// the guest writes next is the base's.
    pub(crate) fn remove(&self) {
        for name in [self.fresh.clone(), self.link(), self.beside(".spare")] {
            let _ = fs::remove_file(name);
        }
        if file(&self.stored) == file(&self.live) {
            let _ = fs::remove_file(&self.stored);
        }
        let _ = sync_names(&self.live);
    }

    /// QEMU has ended: the definition's name is the new image's if that has anything, whether or
    /// not the base has it by now, and else the base's.
    pub(crate) fn end(&self) -> io::Result<()> {
        if self.is_settled() || self.written().is_some() {
            return self.settle();
        }
        unless(io::ErrorKind::NotFound, self.let_write())?;
        self.remove();
        Ok(())
    }

    /// The new image without the definition's name, if it has anything.
    fn written(&self) -> Option<Metadata> {
        let is_empty = || qcow2::is_empty(&self.fresh).unwrap_or(false);
        fs::symlink_metadata(&self.fresh).ok().filter(|meta| meta.is_file() && !is_empty())
    }

    /// Whether the definition's name is that of a base that somebody uses, or has written to since
    /// something was written to the new image: a guest was started again.
    pub(crate) fn is_base_used(&self) -> bool {
        let (Some(new), Ok(live)) = (self.written(), fs::metadata(&self.live)) else { return false };
        let written = |meta: &Metadata| (meta.mtime(), meta.mtime_nsec());
        let name = format!("{:02x}:{:02x}:{}", major(live.dev()), minor(live.dev()), live.ino());
        // QEMU locks what it has open.
        let locks = fs::read_to_string("/proc/locks").unwrap_or_default();
        written(&live) > written(&new) || locks.lines().any(|line| line.split_whitespace().nth(5) == Some(&name))
    }

    /// Takes away the links by which QEMU, process `pid`, knew earlier images: it opens these no
    /// more. And images that it never opened, or wrote nothing to, when the host's power failed.
    pub(crate) fn sweep(&self, pid: i32) {
        // Whoever has the directory may put another in its place: its names are looked at and
        // removed in the one that is open.
        let flags = OFlags::DIRECTORY | OFlags::PATH | OFlags::CLOEXEC;
        let parent = self.live.parent().unwrap_or(Path::new("."));
        let Ok(open) = rustix::fs::open(parent, flags, Mode::empty()) else { return };
        let directory = PathBuf::from(format!("/proc/self/fd/{}", open.as_raw_fd()));
        let (prefix, fresh) = (prefix(&self.live), self.fresh.file_name());
        let ours = |name: &OsString| {
            name.as_encoded_bytes().starts_with(prefix.as_encoded_bytes()) && Some(name.as_os_str()) != fresh
        };
        let all = fs::read_dir(&directory).into_iter().flatten().flatten().map(|entry| entry.file_name());
        for path in all.filter(ours).take(MOST).map(|name| directory.join(name)) {
            if is_link(&path) {
                let _ = fs::remove_file(path);
            } else if is_left(&path, pid).unwrap_or(false) {
                self.remove_second_name(&path);
                let _ = fs::remove_file(path);
            }
        }
    }

    /// Takes away the name that the base was to have below this image, which is in the directory
    /// that is open.
    fn remove_second_name(&self, image: &Path) {
        if let Ok(Some(below)) = qcow2::backing(image)
            && let Some(name) = below.image.file_name()
            && Some(name) != self.stored.file_name()
            && Some(name) != self.live.file_name()
            && let second = image.with_file_name(name)
            && file(&second) == self.base
        {
            let _ = fs::remove_file(second);
        }
    }

    /// Lets QEMU write to the base again.
    pub(crate) fn let_write(&self) -> io::Result<()> {
        let base = open(&self.stored)?;
        let meta = base.metadata()?;
        if Some((meta.dev(), meta.ino())) != self.base {
            return Err(io::Error::other(format!("{} is another file by now", self.stored.display())));
        }
        base.set_permissions(Permissions::from_mode(self.mode))
    }
}

/// Whether a hidden file has nothing that is nowhere else.
fn is_left(path: &Path, pid: i32) -> io::Result<bool> {
    let meta = fs::symlink_metadata(path)?;
    Ok(meta.is_file() && (meta.nlink() > 1 || !is_written_by(pid, &meta)? && qcow2::is_empty(path)?))
}

/// Opens a file, and no other to which somebody's link leads.
pub(crate) fn open(image: &Path) -> io::Result<File> {
    Ok(claims::open_at(CWD, image, OFlags::RDONLY | OFlags::NOFOLLOW, Mode::empty())?)
}

/// Makes the names in a file's directory durable.
pub(crate) fn sync_names(file: &Path) -> io::Result<()> {
    let (flags, directory) = (OFlags::DIRECTORY | OFlags::CLOEXEC, file.parent().unwrap_or(Path::new(".")));
    Ok(rustix::fs::fsync(rustix::fs::open(directory, flags, Mode::empty())?)?)
}

/// Nobody is to write to a stored image.
pub(crate) fn make_read_only(image: &Path) -> io::Result<()> {
    let file = open(image)?;
    let mode = file.metadata()?.mode() & 0o777;
    file.set_permissions(Permissions::from_mode(mode & !WRITE))
}

/// The numbers by which a process has this file open.
pub(crate) fn opened_by(pid: i32, image: &Metadata) -> io::Result<impl Iterator<Item = String>> {
    let place = (image.dev(), image.ino());
    let is = move |entry: &fs::DirEntry| fs::metadata(entry.path()).is_ok_and(|at| (at.dev(), at.ino()) == place);
    let all = fs::read_dir(format!("/proc/{pid}/fd"))?.flatten().filter(is);
    Ok(all.map(|entry| entry.file_name().to_string_lossy().into_owned()))
}

/// Whether a process has this file open to write to it.
pub(crate) fn is_written_by(pid: i32, image: &Metadata) -> io::Result<bool> {
    let writes = |number| {
        fs::read_to_string(format!("/proc/{pid}/fdinfo/{number}")).is_ok_and(|info| {
            let flags = info.lines().find_map(|line| line.strip_prefix("flags:")).unwrap_or_default().trim();
            u32::from_str_radix(flags, 8).is_ok_and(|flags| flags & 0o3 != 0)
        })
    };
    Ok(opened_by(pid, image)?.any(writes))
}

#[cfg(test)]
mod tests;
