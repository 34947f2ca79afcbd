//! Files that a person names as output.
//!
//! ```text
//! directory ──▶ openat, a part at a time; links only of root's or one's own
//!     │
//!     ▼ fstatat(NAME)
//! nothing, or a regular file ──▶ O_TMPFILE ──▶ written, synced ──▶ linkat NAME
//!                                     (--force: linkat RANDOM, renameat NAME)
//! device, pipe, /dev/stdout ───▶ opened, written in place
//! anything else ───────────────▶ refused
//! ```
//!
//! A file has mode 0600 and no name until it is whole, so an interruption leaves nothing. Where
//! the file system has no `O_TMPFILE`, it has a random name meanwhile, which errors, SIGINT and
//! SIGTERM remove. Where it has no second names either (vfat), that one is renamed. Nothing is
//! opened twice by its name.
//!
//! Sources: open(2) on `O_TMPFILE`; linkat(2); rename(2) on `RENAME_NOREPLACE`; path_resolution(7).

mod temporary;
#[cfg(test)]
mod tests;

use std::ffi::OsStr;
use std::fs::File;
use std::io::{self, Write};
use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};

use rustix::fs::{AtFlags, CWD, FileType, Mode, OFlags};
use rustix::io::Errno;

use self::temporary::Temporary;
use crate::directory;

/// What becomes of a regular file that has the name already. Nothing else is ever replaced.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Existing {
    /// It stays, and the output is refused.
    Kept,
    /// The new one takes its name when that is whole.
    Replaced,
}

/// Why a file cannot be written.
#[derive(Debug, thiserror::Error)]
pub enum FileError {
    /// There is a regular file.
    #[error("{} is there already, and stays: --force replaces it", .0.display())]
    Exists(PathBuf),
    /// There is something that is never replaced.
    #[error("{} is {what}, which nothing replaces: name another file", path.display())]
    Other {
        /// Its path.
        path: PathBuf,
        /// What it is.
        what: &'static str,
    },
    /// The system's refusal.
    #[error("cannot write {}", path.display())]
    Io {
        /// Its path.
        path: PathBuf,
        /// Why.
        source: io::Error,
    },
}

/// A file that is being written. Dropping it leaves nothing, unless it was [kept](Self::keep).
#[derive(Debug)]
pub struct OutputFile {
    file: File,
    path: PathBuf,
    existing: Existing,
    way: Way,
}

/// How what is written comes to its name.
#[derive(Debug)]
enum Way {
    /// It is a device or a pipe.
    InPlace,
    /// The file has no name yet.
    Nameless(OwnedFd),
    /// It has another one.
    Temporary(Temporary),
}

impl OutputFile {
    /// Begins a file. What a person may not write, or what is not to be replaced, is refused here.
    ///
    /// # Errors
    ///
    /// [`FileError`].
    pub fn create(path: &Path, existing: Existing) -> Result<Self, FileError> {
        let (directory, name) = place(path).map_err(io_error(path))?;
        let (file, way) = match in_place(&directory, name, path, existing)? {
            Some(file) => (file, Way::InPlace),
            None => nameless(directory).map_err(io_error(path))?,
        };
        Ok(Self { file, path: path.to_owned(), existing, way })
    }

    /// Begins a file where nothing has its name.
    ///
    /// # Errors
    ///
    /// [`FileError`].
    pub fn create_new(path: &Path) -> Result<Self, FileError> {
        let (directory, name) = place(path).map_err(io_error(path))?;
        if rustix::fs::statat(&directory, name, AtFlags::SYMLINK_NOFOLLOW).is_ok() {
            return Err(FileError::Exists(path.to_owned()));
        }
        let (file, way) = nameless(directory).map_err(io_error(path))?;
        Ok(Self { file, path: path.to_owned(), existing: Existing::Kept, way })
    }

    /// Where to write. A device or a pipe takes bytes in their order only.
    pub fn file(&self) -> &File {
        &self.file
    }

    /// The name that it gets.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Whether it is what the program's standard output is, too: nothing else belongs there then.
    pub fn is_stdout(&self) -> bool {
        rustix::fs::fstat(&self.file).is_ok_and(|stat| is_stdout(&stat))
    }

    /// Gives the file its name, durably.
    ///
    /// # Errors
    ///
    /// If it cannot be synced or named, or if something has the name by now. Then nothing is left.
    pub fn keep(mut self) -> Result<(), FileError> {
        let name = self.path.file_name().unwrap_or_default();
        let directory = match &self.way {
            Way::InPlace => match self.file.sync_all() {
                // Pipes and most devices cannot be synced.
                Err(e) if e.raw_os_error() != Some(Errno::INVAL.raw_os_error()) => return Err(io_error(&self.path)(e)),
                _ => return Ok(()),
            },
            Way::Nameless(directory) => directory,
            Way::Temporary(temporary) => &temporary.directory,
        };
        let failed = io_error(&self.path);
        self.file.sync_all().map_err(&failed)?;
        let linked = match &self.way {
            Way::Temporary(own) if self.existing == Existing::Kept => own.link(name),
            Way::Nameless(_) if self.existing == Existing::Kept => link(&self.file, directory, name),
            _ => Ok(()),
        };
        match linked {
            Err(Errno::EXIST) => return Err(FileError::Exists(self.path)),
            linked => linked.map_err(|e| failed(e.into()))?,
        }
        if self.existing == Existing::Replaced {
            if let Way::Nameless(directory) = &self.way {
                let own = directory.try_clone().and_then(Temporary::new).map_err(&failed)?;
                link(&self.file, directory, &own.name).map_err(|e| failed(e.into()))?;
                self.way = Way::Temporary(own);
            }
            if let Way::Temporary(own) = &self.way {
                own.replace(name, &self.path)?;
            }
        }
        let (Way::Nameless(directory) | Way::Temporary(Temporary { directory, .. })) = &self.way else { return Ok(()) };
        directory::sync(directory).map_err(&failed)
    }
}

impl Write for OutputFile {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.file.write(bytes)
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// Writes a whole file.
///
/// # Errors
///
/// As [`OutputFile::create`] and [`OutputFile::keep`].
pub fn write(path: &Path, existing: Existing, bytes: &[u8]) -> Result<(), FileError> {
    let mut out = OutputFile::create(path, existing)?;
    out.write_all(bytes).map_err(io_error(path))?;
    out.keep()
}

/// Begins a file that has its name at once, because also a part of it is of use.
///
/// # Errors
///
/// As [`OutputFile::create`].
pub fn begin(path: &Path, existing: Existing) -> Result<File, FileError> {
    let (directory, name) = place(path).map_err(io_error(path))?;
    if let Some(file) = in_place(&directory, name, path, existing)? {
        return Ok(file);
    }
    if existing == Existing::Replaced {
        // What it is was just looked at. The directory's owner may replace it; nothing is followed.
        match rustix::fs::unlinkat(&directory, name, AtFlags::empty()) {
            Err(Errno::NOENT) => {}
            removed => removed.map_err(|e| io_error(path)(e.into()))?,
        }
    }
    match create_at(&directory, name) {
        Err(Errno::EXIST) => Err(FileError::Exists(path.to_owned())),
        file => file.map_err(|e| io_error(path)(e.into())),
    }
}

/// A directory for files that are being written, for its owner alone. Where it was not there it is
/// made, with those above it, and is gone with this, unless it [stays](Self::stay).
#[derive(Debug)]
pub struct Directory(Vec<Temporary>);

impl Directory {
    /// Makes it, if need be.
    ///
    /// # Errors
    ///
    /// The system's.
    pub fn make(path: &Path) -> Result<Self, FileError> {
        let missing: Vec<&Path> =
            path.ancestors().take_while(|path| !path.as_os_str().is_empty() && !path.exists()).collect();
        let make = |path: &&Path| {
            let (above, name) = place(path)?;
            Temporary::directory(above, name)
        };
        Ok(Self(missing.iter().rev().map(make).collect::<io::Result<_>>().map_err(io_error(path))?))
    }

    /// It stays, also if something fails later.
    pub fn stay(mut self) {
        self.0.drain(..).for_each(Temporary::stay);
    }
}

impl Drop for Directory {
    fn drop(&mut self) {
        // The innermost first: those that are not empty stay.
        while self.0.pop().is_some() {}
    }
}

/// Makes a file of mode 0600 where nothing is, for reading and writing.
///
/// # Errors
///
/// If something has the name, or the file cannot be made.
pub fn create_new(path: &Path) -> io::Result<File> {
    let (directory, name) = place(path)?;
    Ok(create_at(&directory, name)?)
}

fn io_error(path: &Path) -> impl Fn(io::Error) -> FileError + use<> {
    let path = path.to_owned();
    move |source| FileError::Io { path: path.clone(), source }
}

/// The directory of a path, and the last name.
pub(crate) fn place(path: &Path) -> io::Result<(OwnedFd, &OsStr)> {
    // `new/` and `new/.` name a directory.
    let name = path.file_name().filter(|name| path.as_os_str().as_bytes().ends_with(name.as_bytes()));
    let name = name.ok_or(Errno::ISDIR)?;
    Ok((directory::open(path.parent().unwrap_or(Path::new("")))?, name))
}

fn is_stdout(stat: &rustix::fs::Stat) -> bool {
    let own = rustix::fs::fstat(rustix::stdio::stdout());
    own.is_ok_and(|own| (own.st_dev, own.st_ino) == (stat.st_dev, stat.st_ino))
}

/// What has the name, opened, if that is written in place. `None`: nothing has it, or what is
/// replaced.
fn in_place(directory: &OwnedFd, name: &OsStr, path: &Path, existing: Existing) -> Result<Option<File>, FileError> {
    let failed = io_error(path);
    let other = |what| FileError::Other { path: path.to_owned(), what };
    let stat = match rustix::fs::statat(directory, name, AtFlags::SYMLINK_NOFOLLOW) {
        Err(Errno::NOENT) => return Ok(None),
        stat => stat.map_err(|e| failed(e.into()))?,
    };
    let mut flags = OFlags::WRONLY | OFlags::CLOEXEC | OFlags::NOCTTY;
    match FileType::from_raw_mode(stat.st_mode) {
        FileType::RegularFile if existing == Existing::Kept => return Err(FileError::Exists(path.to_owned())),
        FileType::RegularFile => return Ok(None),
        FileType::CharacterDevice | FileType::BlockDevice | FileType::Fifo if !directory::is_trusted(stat.st_uid) => {
            return Err(other("a pipe or device of another user"));
        }
        // What a disk holds is replaced as a file's content is; a mounted one is busy.
        FileType::BlockDevice if existing == Existing::Kept => return Err(FileError::Exists(path.to_owned())),
        FileType::BlockDevice => flags |= OFlags::NOFOLLOW | OFlags::EXCL,
        FileType::CharacterDevice | FileType::Fifo => flags |= OFlags::NOFOLLOW,
        // Such as /dev/stdout, or a logical volume's name.
        FileType::Symlink if directory::is_trusted(stat.st_uid) => {
            let shown = rustix::fs::statat(directory, name, AtFlags::empty());
            if shown.is_ok_and(|shown| FileType::from_raw_mode(shown.st_mode) == FileType::BlockDevice) {
                if existing == Existing::Kept {
                    return Err(FileError::Exists(path.to_owned()));
                }
                flags |= OFlags::EXCL;
            }
        }
        FileType::Symlink => return Err(other("a link of another user")),
        FileType::Directory => return Err(other("a directory")),
        _ => return Err(other("a socket")),
    }
    let opened = match rustix::fs::openat(directory, name, flags, Mode::empty()) {
        Err(Errno::NOENT) => return Err(other("a link to nothing")),
        opened => opened.map_err(|e| failed(e.into()))?,
    };
    let named = FileType::from_raw_mode(stat.st_mode);
    let stat = rustix::fs::fstat(&opened).map_err(|e| failed(e.into()))?;
    match FileType::from_raw_mode(stat.st_mode) {
        // It was exchanged meanwhile.
        kind if named != FileType::Symlink && (kind != named || !directory::is_trusted(stat.st_uid)) => {
            Err(other("another thing than a moment ago"))
        }
        // What is there goes on where it is.
        FileType::RegularFile if is_stdout(&stat) => {
            let own = rustix::stdio::stdout().try_clone_to_owned().map_err(failed)?;
            Ok(Some(own.into()))
        }
        FileType::RegularFile => Err(other("a link to a file")),
        _ => Ok(Some(opened.into())),
    }
}

fn nameless(directory: OwnedFd) -> io::Result<(File, Way)> {
    let flags = OFlags::TMPFILE | OFlags::RDWR | OFlags::CLOEXEC;
    match rustix::fs::openat(&directory, ".", flags, Mode::RUSR | Mode::WUSR) {
        // Its name comes by way of /proc.
        Ok(file) if Path::new("/proc/self/fd").exists() => Ok((file.into(), Way::Nameless(directory))),
        Ok(_) | Err(Errno::OPNOTSUPP | Errno::ISDIR | Errno::INVAL | Errno::NOENT) => {
            let own = Temporary::new(directory)?;
            let file = create_at(&own.directory, &own.name)?;
            Ok((file, Way::Temporary(own)))
        }
        Err(e) => Err(e.into()),
    }
}

fn create_at(directory: &OwnedFd, name: &OsStr) -> Result<File, Errno> {
    let flags = OFlags::CREATE | OFlags::EXCL | OFlags::NOFOLLOW | OFlags::RDWR | OFlags::CLOEXEC;
    Ok(rustix::fs::openat(directory, name, flags, Mode::RUSR | Mode::WUSR)?.into())
}

/// Gives a nameless file a name that nothing has.
fn link(file: &File, directory: &OwnedFd, name: &OsStr) -> Result<(), Errno> {
    let own = format!("/proc/self/fd/{}", file.as_raw_fd());
    rustix::fs::linkat(CWD, own, directory, name, AtFlags::SYMLINK_FOLLOW)
}
