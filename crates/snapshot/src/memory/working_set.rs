//! The pages that a snapshot's clones need first: recorded when it runs for the first time, and
//! read ahead when it runs again, while QEMU starts.
//!
//! The file has a line for each read of the kernel's, in their order: offset and length in bytes.
//! It is a hint: without it, or with another snapshot's, clones are slower and nothing else.

use std::fs::File;
use std::num::NonZeroU64;
use std::path::{Path, PathBuf};
use std::sync::Mutex;
use std::time::{Duration, Instant};

use output::{Existing, FileError};
use rustix::fs::Advice;

/// What is read in this time after the server's start is recorded.
const TIME: Duration = Duration::from_secs(5);
/// Reads in a file, at most.
const LONGEST: usize = 1 << 14;

/// Bytes of a file, at most: two numbers for each read.
const MOST: u64 = 42 * LONGEST as u64;

/// Reads that are being recorded.
pub(super) struct Recorder {
    path: PathBuf,
    start: Instant,
    /// `None`: it is written.
    reads: Mutex<Option<Vec<(u64, u64)>>>,
}

impl Recorder {
    pub(super) fn new(path: &Path) -> Self {
        Self { path: path.to_owned(), start: Instant::now(), reads: Mutex::new(Some(Vec::new())) }
    }

    /// The kernel reads this. The first read that comes too late to count has the file written.
    pub(super) fn note(&self, offset: u64, len: u64) {
        let mut reads = self.reads.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
        match reads.as_mut() {
            Some(reads) if self.start.elapsed() < TIME && reads.len() < LONGEST => reads.push((offset, len)),
            Some(_) => drop(reads.take().map(|reads| self.write(&reads))),
            None => {}
        }
    }

    fn write(&self, reads: &[(u64, u64)]) -> Result<(), FileError> {
        let text: String = reads.iter().map(|(offset, len)| format!("{offset} {len}\n")).collect();
        output::file::write(&self.path, Existing::Replaced, text.as_bytes())
    }
}

/// Has the kernel read what a file of these lists, from the snapshot's memory.
pub fn prefetch(ram: &File, list: &Path) {
    let text = claims::text(list, MOST).unwrap_or_default();
    for (offset, len) in text.lines().take(LONGEST).filter_map(|line| line.split_once(' ')) {
        if let (Ok(offset), Ok(len)) = (offset.parse(), len.parse::<NonZeroU64>()) {
            // A part that is not there is an error, and nothing else.
            let _ = rustix::fs::fadvise(ram, offset, Some(len), Advice::WillNeed);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_read_in_the_first_seconds_is_listed_and_anything_can_be_in_the_list() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("list");
        let mut recorder = Recorder::new(&path);
        recorder.note(4096, 8192);
        recorder.note(0, 4096);
        assert!(!path.exists());
        recorder.start -= TIME;
        recorder.note(1 << 20, 4096);
        recorder.note(1 << 21, 4096);
        assert_eq!(std::fs::read_to_string(&path).unwrap(), "4096 8192\n0 4096\n");
        let ram = File::open("/proc/self/exe").unwrap();
        prefetch(&ram, &path);
        std::fs::write(&path, "x y\n1\n18446744073709551615 18446744073709551615\n5 0\n\u{e9} 4\n").unwrap();
        prefetch(&ram, &path);
        prefetch(&ram, Path::new("/nonexistent"));
    }
}
