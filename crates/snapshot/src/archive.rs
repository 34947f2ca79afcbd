//! A snapshot as one stream, which another host can read: a tar archive, in this order,
//!
//! ```text
//! snapshot.json   what it is: name, guest, regions, images
//! devices         QEMU's device stream
//! pages           the numbers of the pages that are not zeros, ascending, 8 bytes each,
//!                 little-endian
//! ram             these pages
//! disk-D-I        the images of disk D: the snapshot's is 0, the one below it 1, and so on
//! xxh3            the XXH3 hash, 128 bits as 32 digits, of all contents before
//! ```
//!
//! Nothing is stored before all of it was read and has the right hash. Images are copied as they
//! are; only the name of the one below is set anew. Compress the stream on its way: `| zstd`.
//!
//! An archive may come from anybody. Its entries are plain files with these names: one that says
//! something about another one (a long name, attributes, holes) is refused unread. What its headers
//! say of lengths and of memory is held against bounds, against what comes, and against the host.

mod export;
mod import;

use std::io::{self, Read};
use std::path::{Path, PathBuf};

use checkpoint::{BeginError, ReadError, StoreError};
use output::FileError;
use serde::{Deserialize, Serialize};
use xxhash_rust::xxh3::Xxh3;

use crate::clone::CloneError;
use crate::record::Description;

pub use export::{Exported, export};
pub use import::{Place, Received, receive};

/// The version of the form above.
const FORMAT: u32 = 1;

/// What a snapshot in an archive is.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct About {
    format: u32,
    /// Its name.
    pub name: String,
    /// When it was taken, seconds since 1970.
    pub created: u64,
    /// The process that it was taken of.
    pub source: String,
    /// Address and length in bytes of each region.
    pub regions: Vec<(u64, u64)>,
    /// The guest.
    pub description: Description,
    /// Number of images of each disk.
    images: Vec<usize>,
    /// Bytes that they take on a file system; an earlier version does not say it.
    #[serde(default)]
    allocated: u64,
}

impl About {
    /// Bytes of the guest's memory.
    pub fn bytes(&self) -> u64 {
        self.regions.iter().fold(0, |sum, (_, len)| sum.saturating_add(*len))
    }
}

/// Why a snapshot cannot be written to an archive, or read from one.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs, reason = "each sentence says what it is")]
pub enum ArchiveError {
    #[error(transparent)]
    Memory(#[from] ReadError),
    #[error("cannot copy the image {}", image.display())]
    Image { image: PathBuf, source: io::Error },
    /// What was copied may be something else.
    #[error(transparent)]
    Changed(#[from] CloneError),
    #[error("cannot write or read the archive")]
    Stream(#[from] io::Error),
    #[error("cannot put the archive aside in the pool's directory: its file system needs room for the guest's memory")]
    Aside(#[source] io::Error),
    #[error("this is no archive of `pageone snapshot export` that this version understands: {0}")]
    Foreign(String),
    #[error("the archive is damaged: {0}. Nothing was stored; export it again")]
    Damaged(String),
    #[error("the snapshot cannot be stored here")]
    Claim(#[from] claims::ClaimError),
    #[error("this snapshot has {0} disks: name a directory for their images with --disks DIR")]
    NoPlace(usize),
    #[error(
        "the guest has {gib} GiB of RAM, more than {times} times what this host has left: use a larger host, or take the \
             archive for damaged"
    )]
    Ram { gib: u64, times: u64 },
    #[error("{needed} MiB are needed in {}, and {free} MiB are free: free some, or name another place", directory.display())]
    Room { directory: PathBuf, needed: u64, free: u64 },
    #[error("{} is there already, and stays: give another name with --name, or another directory with --disks", .0.display())]
    There(PathBuf),
    #[error(transparent)]
    File(FileError),
    #[error(transparent)]
    Begin(#[from] BeginError),
    #[error(transparent)]
    Store(#[from] StoreError),
}

impl From<FileError> for ArchiveError {
    fn from(error: FileError) -> Self {
        match error {
            FileError::Exists(path) => Self::There(path),
            error => Self::File(error),
        }
    }
}

fn image_error(image: &Path) -> impl FnOnce(io::Error) -> ArchiveError + '_ {
    |source| ArchiveError::Image { image: image.to_owned(), source }
}

/// The name of an image.
fn file_name(disk: usize, number: usize) -> String {
    format!("disk-{disk}-{number}")
}

/// What is read counts in the sum.
struct Summed<'a, R> {
    from: R,
    sum: &'a mut Xxh3,
}

impl<R: Read> Read for Summed<'_, R> {
    fn read(&mut self, into: &mut [u8]) -> io::Result<usize> {
        let len = self.from.read(into)?;
        self.sum.update(&into[..len]);
        Ok(len)
    }
}

#[cfg(test)]
mod tests;
