//! Files and directories: opened, walked, read.
//!
//! A file is read as it is, whatever is in it. Its holes (`SEEK_DATA`, lseek(2)) count as zero and
//! are not read; its last chunk is filled up with zeros, as the page cache does. Directories are
//! walked without following links and without leaving their file system.

use std::collections::HashSet;
use std::fs::{File, OpenOptions, ReadDir};
use std::io;
use std::os::unix::fs::{FileExt, FileTypeExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::atomic::AtomicBool;
use std::sync::atomic::Ordering::Relaxed;

use rustix::fs::{SeekFrom, seek};

use super::counter::Counter;

/// Bytes that are read at a time: they fit the processor's second cache.
pub(super) const BLOCK: usize = 256 << 10;

/// Device and inode: the same file under whatever name.
pub(super) type Identity = (u64, u64);

/// A regular file.
#[derive(Debug)]
pub(super) struct OpenFile {
    file: File,
    path: PathBuf,
    pub(super) size: u64,
    pub(super) identity: Identity,
    pub(super) links: u64,
    /// Somebody has said already what is wrong with it.
    failed: AtomicBool,
}

/// Opens a regular file; an error names the reason alone. `follow`: a symbolic link, too.
pub(super) fn open(path: &Path, follow: bool) -> Result<OpenFile, String> {
    // O_NONBLOCK: a FIFO without a writer would make us wait for one.
    let flags = libc::O_NONBLOCK | libc::O_NOCTTY | if follow { 0 } else { libc::O_NOFOLLOW };
    let kind = if follow { path.metadata() } else { path.symlink_metadata() };
    special(kind.map_err(|error| reason(&error))?.file_type())?;
    let file = OpenOptions::new().read(true).custom_flags(flags).open(path).map_err(|error| reason(&error))?;
    let meta = file.metadata().map_err(|error| reason(&error))?;
    special(meta.file_type())?;
    Ok(OpenFile {
        file,
        path: path.to_owned(),
        size: meta.len(),
        identity: (meta.dev(), meta.ino()),
        links: meta.nlink(),
        failed: AtomicBool::new(false),
    })
}

fn reason(error: &io::Error) -> String {
    match error.kind() {
        io::ErrorKind::NotFound => "no such file or process".into(),
        io::ErrorKind::PermissionDenied => "no permission to read it; run as root or as its owner".into(),
        _ => error.to_string(),
    }
}

/// An error for what is not a regular file.
fn special(kind: std::fs::FileType) -> Result<(), String> {
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
    Err(format!("it is {what}; only regular files and directories are read"))
}

impl OpenFile {
    /// The next bytes in `range` that are not a hole, widened to whole chunks; empty and at the end
    /// if there are none.
    ///
    /// Looks at everything up to the next hole, so it is not to be asked for one extent more than
    /// once.
    pub(super) fn next_data(&self, range: std::ops::Range<u64>, chunk: usize) -> std::ops::Range<u64> {
        let chunk = chunk as u64;
        let data = match seek(&self.file, SeekFrom::Data(range.start)) {
            Ok(start) if start < range.end => match seek(&self.file, SeekFrom::Hole(start)) {
                Ok(hole) => start..hole,
                Err(_) => start..range.end,
            },
            Ok(_) => return range.end..range.end,
            // Behind the last data; or the file became shorter, which reading will show.
            Err(rustix::io::Errno::NXIO) if self.file.metadata().is_ok_and(|meta| meta.len() >= range.end) => {
                return range.end..range.end;
            }
            // A file system without holes.
            Err(_) => return range,
        };
        (data.start / chunk * chunk).max(range.start)..data.end.next_multiple_of(chunk).min(range.end)
    }

    /// Gives the chunks in `range`, which starts at a chunk's start, to `counter`.
    ///
    /// # Errors
    ///
    /// Why the file could not be read to its end; the first time that this happens to the file.
    pub(super) fn read(
        &self,
        range: std::ops::Range<u64>,
        chunk: usize,
        buffer: &mut Vec<u8>,
        counter: &mut Counter<'_>,
        mut progress: impl FnMut(u64),
    ) -> Result<(), String> {
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

    /// Fills the buffer; gives how far, and why not to its end.
    fn read_block(&self, at: u64, buffer: &mut [u8]) -> (usize, Option<String>) {
        let mut done = 0;
        while done < buffer.len() {
            match self.file.read_at(&mut buffer[done..], at + done as u64) {
                Ok(0) => {
                    let there = at + done as u64;
                    return (done, Some(format!("it became shorter: {there} of {} bytes were there", self.size)));
                }
                Ok(read) => done += read,
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return (done, Some(reason(&error))),
            }
        }
        (done, None)
    }

    pub(super) fn path(&self) -> &Path {
        &self.path
    }
}

/// The files below a directory.
pub(super) struct Walk {
    device: u64,
    stack: Vec<(PathBuf, ReadDir)>,
    /// Files and directories that are targets by themselves, and files with several names that were
    /// met.
    skip: HashSet<Identity>,
}

/// What a walk comes across.
pub(super) enum Step {
    /// A file, or something that was one when the directory was read.
    File(PathBuf),
    /// Something that cannot be walked, and why.
    LeftOut(PathBuf, String),
}

impl Walk {
    /// `own`: targets by themselves, which are not to be counted here.
    pub(super) fn new(dir: &Path, own: &HashSet<Identity>) -> Result<Self, String> {
        let meta = dir.metadata().map_err(|error| reason(&error))?;
        let top = std::fs::read_dir(dir).map_err(|error| reason(&error))?;
        Ok(Walk { device: meta.dev(), stack: vec![(dir.to_owned(), top)], skip: own.clone() })
    }

    /// Whether this file is to be counted here: not one that is a target by itself, nor one met
    /// under another name.
    pub(super) fn admits(&mut self, file: &OpenFile) -> bool {
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
                    return Some(Step::LeftOut(dir, reason(&error)));
                }
            };
            let path = entry.path();
            match entry.file_type() {
                Ok(kind) if kind.is_symlink() => {}
                Ok(kind) if kind.is_dir() => match path.symlink_metadata() {
                    Ok(meta) if meta.dev() != self.device || self.skip.contains(&(meta.dev(), meta.ino())) => {}
                    Ok(_) => match std::fs::read_dir(&path) {
                        Ok(dir) => self.stack.push((path, dir)),
                        Err(error) => return Some(Step::LeftOut(path, reason(&error))),
                    },
                    Err(error) => return Some(Step::LeftOut(path, reason(&error))),
                },
                Ok(_) => return Some(Step::File(path)),
                Err(error) => return Some(Step::LeftOut(path, reason(&error))),
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::estimate::counter::Tally;
    use crate::estimate::index::Index;

    fn read(file: &OpenFile) -> (Result<(), String>, Tally) {
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
        let file = open(&path, true).unwrap();
        OpenOptions::new().write(true).open(&path).unwrap().set_len(3 * 4096 + 1).unwrap();
        let (result, tally) = read(&file);
        let error = result.unwrap_err();
        assert!(error.contains("12289 of 40960 bytes"), "{error}");
        assert_eq!(tally.chunks, 4);
        assert_eq!(read(&file).0, Ok(()), "said once");
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
        let file = open(&path, true).unwrap();
        assert_eq!(file.next_data(0..file.size, 16 << 10), 1 << 20..(1 << 20) + (16 << 10));
        assert_eq!(file.next_data(2 << 20..file.size, 4096), file.size..file.size);
    }

    #[test]
    fn special_files_are_refused_by_name() {
        let dir = tempfile::tempdir().unwrap();
        let socket = dir.path().join("socket");
        let _listener = std::os::unix::net::UnixListener::bind(&socket).unwrap();
        assert!(open(&socket, true).unwrap_err().contains("a socket"));
        assert!(open(Path::new("/dev/null"), true).unwrap_err().contains("a character device"));
        assert!(open(&dir.path().join("none"), true).unwrap_err().contains("no such file"));
        let link = dir.path().join("link");
        std::os::unix::fs::symlink("/etc/passwd", &link).unwrap();
        assert!(open(&link, true).is_ok());
        assert!(open(&link, false).unwrap_err().contains("a symbolic link"));
    }
}
