//! Files and directories: opening, walking, reading.
//!
//! A file is read as raw bytes. Its holes (`SEEK_DATA`, lseek(2)) count as zeros and are not read.
//! Its last chunk is padded with zeros, as in the page cache. Walks do not follow links and do not
//! leave the file system.

use std::collections::HashSet;
use std::fs::{File, OpenOptions, ReadDir};
use std::io;
use std::os::unix::fs::{FileExt, FileTypeExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::atomic::AtomicBool;
use std::sync::atomic::Ordering::Relaxed;

use rustix::fs::{SeekFrom, seek};

use crate::counter::Counter;

/// Bytes read at a time: they fit the CPU's second-level cache.
pub(crate) const BLOCK: usize = 256 << 10;

/// Device and inode, which identify a file under any name.
pub(crate) type Identity = (u64, u64);

/// Why a file or directory cannot be read.
#[derive(Debug, thiserror::Error)]
pub enum FileError {
    /// `ENOENT`.
    #[error("no such file or process")]
    NotFound,
    /// `EACCES` or `EPERM`.
    #[error("no permission to read it; run as root or as its owner")]
    NoPermission,
    /// The file is neither regular nor a directory: what it is.
    #[error("it is {0}; only regular files and directories are read")]
    Special(&'static str),
    /// The file was cut while it was read.
    #[error("it became shorter: {read} of {size} bytes were there")]
    Shorter {
        /// Bytes read.
        read: u64,
        /// Bytes when it was opened.
        size: u64,
    },
    /// Another error.
    #[error(transparent)]
    Io(io::Error),
}

impl From<io::Error> for FileError {
    fn from(error: io::Error) -> Self {
        match error.kind() {
            io::ErrorKind::NotFound => Self::NotFound,
            io::ErrorKind::PermissionDenied => Self::NoPermission,
            _ => Self::Io(error),
        }
    }
}

/// A regular file.
#[derive(Debug)]
pub(crate) struct OpenFile {
    file: File,
    path: PathBuf,
    /// Its size when it was opened, bytes.
    pub(crate) size: u64,
    pub(crate) identity: Identity,
    /// Number of its names.
    pub(crate) links: u64,
    /// An error has been returned for it.
    failed: AtomicBool,
}

/// Whether a symbolic link is followed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Links {
    Follow,
    Refuse,
}

/// Opens a regular file.
pub(crate) fn open(path: &Path, links: Links) -> Result<OpenFile, FileError> {
    // O_NONBLOCK: opening a FIFO would wait for a writer.
    let flags = libc::O_NONBLOCK | libc::O_NOCTTY | if links == Links::Follow { 0 } else { libc::O_NOFOLLOW };
    let kind = if links == Links::Follow { path.metadata() } else { path.symlink_metadata() };
    ensure_regular(kind?.file_type())?;
    let file = OpenOptions::new().read(true).custom_flags(flags).open(path)?;
    let meta = file.metadata()?;
    ensure_regular(meta.file_type())?;
    Ok(OpenFile {
        file,
        path: path.to_owned(),
        size: meta.len(),
        identity: (meta.dev(), meta.ino()),
        links: meta.nlink(),
        failed: AtomicBool::new(false),
    })
}

/// An error unless the file is regular.
fn ensure_regular(kind: std::fs::FileType) -> Result<(), FileError> {
    let what = match kind {
        kind if kind.is_file() => return Ok(()),
        kind if kind.is_dir() => "a directory",
        kind if kind.is_fifo() => "a FIFO",
        kind if kind.is_socket() => "a socket",
        kind if kind.is_char_device() => "a character device",
        kind if kind.is_block_device() => "a block device",
        kind if kind.is_symlink() => "a symbolic link",
        _ => "a special file",
    };
    Err(FileError::Special(what))
}

impl OpenFile {
    /// The next bytes in `range` that are not a hole, widened to whole chunks; empty and at the end
    /// of `range` if there are none. The file system searches up to the next hole, so this should
    /// be called once for each extent.
    pub(crate) fn next_data(&self, range: std::ops::Range<u64>, chunk: usize) -> std::ops::Range<u64> {
        let chunk = chunk as u64;
        let data = match seek(&self.file, SeekFrom::Data(range.start)) {
            Ok(start) if start < range.end => match seek(&self.file, SeekFrom::Hole(start)) {
                Ok(hole) => start..hole,
                Err(_) => start..range.end,
            },
            Ok(_) => return range.end..range.end,
            // After the last data, unless the file became shorter: then reading returns the error.
            Err(rustix::io::Errno::NXIO) if self.file.metadata().is_ok_and(|meta| meta.len() >= range.end) => {
                return range.end..range.end;
            }
            // The file system does not know holes.
            Err(_) => return range,
        };
        (data.start / chunk * chunk).max(range.start)..data.end.next_multiple_of(chunk).min(range.end)
    }

    /// Counts the chunks in `range`, which begins at the start of a chunk.
    ///
    /// # Errors
    ///
    /// If the file cannot be read to the end of `range`; only the first time for each file.
    pub(crate) fn read(
        &self,
        range: std::ops::Range<u64>,
        chunk: usize,
        buffer: &mut Vec<u8>,
        counter: &mut Counter<'_>,
        mut progress: impl FnMut(u64),
    ) -> Result<(), FileError> {
        if self.failed.load(Relaxed) {
            return Ok(());
        }
        buffer.resize(BLOCK.max(chunk), 0);
        counter.start();
        let mut at = range.start;
        while at < range.end {
            let len = (range.end - at).min(buffer.len() as u64) as usize;
            let (read, problem) = self.read_block(at, &mut buffer[..len]);
            let whole = read.next_multiple_of(chunk);
            buffer[read..whole].fill(0);
            let first = at / chunk as u64;
            counter.chunks(first..first + (whole / chunk) as u64, &buffer[..whole]);
            progress(read as u64);
            if let Some(problem) = problem {
                return if self.failed.swap(true, Relaxed) { Ok(()) } else { Err(problem) };
            }
            at += len as u64;
        }
        Ok(())
    }

    /// Fills the buffer; returns how far, and why not to its end.
    fn read_block(&self, at: u64, buffer: &mut [u8]) -> (usize, Option<FileError>) {
        let mut done = 0;
        while done < buffer.len() {
            match self.file.read_at(&mut buffer[done..], at + done as u64) {
                Ok(0) => {
                    return (done, Some(FileError::Shorter { read: at + done as u64, size: self.size }));
                }
                Ok(read) => done += read,
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return (done, Some(error.into())),
            }
        }
        (done, None)
    }

    /// The path by which it was opened.
    pub(crate) fn path(&self) -> &Path {
        &self.path
    }
}

/// The files below a directory.
pub(crate) struct Walk {
    device: u64,
    stack: Vec<(PathBuf, ReadDir)>,
    /// Files and directories that are targets themselves, and visited files with several names.
    skip: HashSet<Identity>,
}

/// One step of a walk.
pub(crate) enum Step {
    /// A path that is not a directory or link.
    File(PathBuf),
    /// A path that cannot be walked, and why.
    LeftOut(PathBuf, FileError),
}

impl Walk {
    /// A walk of `dir` that leaves out the targets `own`, which are counted by themselves.
    pub(crate) fn new(dir: &Path, own: &HashSet<Identity>) -> Result<Self, FileError> {
        let meta = dir.metadata()?;
        let top = std::fs::read_dir(dir)?;
        Ok(Self { device: meta.dev(), stack: vec![(dir.to_owned(), top)], skip: own.clone() })
    }

    /// Whether this file counts: it is not a target itself, nor visited under another name.
    pub(crate) fn admits(&mut self, file: &OpenFile) -> bool {
        if file.links > 1 { self.skip.insert(file.identity) } else { !self.skip.contains(&file.identity) }
    }
}

impl Iterator for Walk {
    type Item = Step;

    fn next(&mut self) -> Option<Step> {
        loop {
            let (dir, entries) = self.stack.last_mut()?;
            let entry = match entries.next() {
                None => {
                    self.stack.pop();
                    continue;
                }
                Some(Ok(entry)) => entry,
                // The rest of this directory is lost.
                Some(Err(error)) => {
                    let dir = std::mem::take(dir);
                    self.stack.pop();
                    return Some(Step::LeftOut(dir, error.into()));
                }
            };
            let path = entry.path();
            match entry.file_type() {
                Ok(kind) if kind.is_symlink() => {}
                Ok(kind) if kind.is_dir() => match path.symlink_metadata() {
                    Ok(meta) if meta.dev() != self.device || self.skip.contains(&(meta.dev(), meta.ino())) => {}
                    Ok(_) => match std::fs::read_dir(&path) {
                        Ok(dir) => self.stack.push((path, dir)),
                        Err(error) => return Some(Step::LeftOut(path, error.into())),
                    },
                    Err(error) => return Some(Step::LeftOut(path, error.into())),
                },
                Ok(_) => return Some(Step::File(path)),
                Err(error) => return Some(Step::LeftOut(path, error.into())),
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::counter::Tally;
    use crate::index::Index;

    fn read(file: &OpenFile) -> (Result<(), FileError>, Tally) {
        let index = Index::new(1 << 24);
        let mut counter = Counter::new(&index, 0, 0, 4096);
        let result = file.read(0..file.size, 4096, &mut Vec::new(), &mut counter, |_| {});
        (result, counter.tally)
    }

    #[test]
    fn a_file_that_becomes_shorter_counts_as_far_as_it_is_there_and_complains_once() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("file");
        std::fs::write(&path, vec![1; 10 * 4096]).unwrap();
        let file = open(&path, Links::Follow).unwrap();
        OpenOptions::new().write(true).open(&path).unwrap().set_len(3 * 4096 + 1).unwrap();
        let (result, tally) = read(&file);
        let error = result.unwrap_err().to_string();
        assert_eq!(error, "it became shorter: 12289 of 40960 bytes were there");
        assert_eq!(tally.chunks, 4);
        assert!(read(&file).0.is_ok(), "said once");
        // Gone wholly: seeking must not take that for a hole.
        OpenOptions::new().write(true).open(&path).unwrap().set_len(0).unwrap();
        assert_eq!(file.next_data(0..file.size, 4096), 0..file.size);
    }

    #[test]
    fn holes_are_found_and_widened_to_chunks() {
        let dir = tempfile::tempdir_in("/dev/shm").or_else(|_| tempfile::tempdir()).unwrap();
        let path = dir.path().join("file");
        let file = std::fs::File::create(&path).unwrap();
        file.set_len(1 << 30).unwrap();
        file.write_all_at(&[1; 4096], 1 << 20).unwrap();
        let file = open(&path, Links::Follow).unwrap();
        assert_eq!(file.next_data(0..file.size, 16 << 10), 1 << 20..(1 << 20) + (16 << 10));
        assert_eq!(file.next_data(2 << 20..file.size, 4096), file.size..file.size);
    }

    #[test]
    fn special_files_are_refused_by_name() {
        let dir = tempfile::tempdir().unwrap();
        let socket = dir.path().join("socket");
        let _listener = std::os::unix::net::UnixListener::bind(&socket).unwrap();
        let error = |path: &Path, links| open(path, links).unwrap_err().to_string();
        assert_eq!(error(&socket, Links::Follow), "it is a socket; only regular files and directories are read");
        assert!(error(Path::new("/dev/null"), Links::Follow).contains("a character device"));
        assert!(error(&dir.path().join("none"), Links::Follow).contains("no such file"));
        let link = dir.path().join("link");
        std::os::unix::fs::symlink("/etc/passwd", &link).unwrap();
        assert!(open(&link, Links::Follow).is_ok());
        assert!(error(&link, Links::Refuse).contains("a symbolic link"));
    }
}
