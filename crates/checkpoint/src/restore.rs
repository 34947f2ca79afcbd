//! Writing a checkpoint's memory to a file.

use std::fs::File;
use std::io::{self, Seek, SeekFrom, Write};
use std::os::unix::fs::FileExt;

use mpool::{MapError, Mcache, Settings};
use rustix::fs::OFlags;

use crate::catalog::{Checkpoint, ReadError, View};

/// Zeros that are written at once where a file has no holes.
const ZEROS: usize = 1 << 16;

/// Why [`View::write_image`] failed.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs, reason = "each sentence says what it is")]
pub enum RestoreError {
    #[error(transparent)]
    Write(#[from] io::Error),
    #[error(transparent)]
    Cache(#[from] MapError),
    #[error(transparent)]
    Read(#[from] ReadError),
}

impl View {
    /// Writes a checkpoint's memory to a file, durably: all regions, one after the other. Pages of
    /// zeros become holes in an empty file. A device, a pipe, or a file that has bytes already gets
    /// them all, in their order.
    ///
    /// # Errors
    /// If the checkpoint cannot be read or the file cannot be written.
    pub fn write_image(&self, checkpoint: &Checkpoint, file: &File) -> Result<(), RestoreError> {
        let cache = Mcache::new(Settings::default())?;
        let mut image = ImageFile::begin(file, checkpoint.bytes())?;
        self.each_run(&cache, checkpoint, |offset, bytes| image.put(offset, bytes))?;
        Ok(image.end()?)
    }
}

/// A file that gets the memory of a checkpoint.
pub(crate) struct ImageFile<'a> {
    file: &'a File,
    bytes: u64,
    /// Bytes that it has got, if it gets all of them in their order.
    in_order: Option<u64>,
}

impl<'a> ImageFile<'a> {
    pub(crate) fn begin(file: &'a File, bytes: u64) -> io::Result<Self> {
        let meta = file.metadata()?;
        let has_holes = meta.is_file() && meta.len() == 0 && !rustix::fs::fcntl_getfl(file)?.contains(OFlags::APPEND);
        if has_holes {
            file.set_len(bytes)?;
        }
        Ok(Self { file, bytes, in_order: (!has_holes).then_some(0) })
    }

    /// Puts bytes that are not zeros in their place, which is behind that of those before.
    pub(crate) fn put(&mut self, offset: u64, bytes: &[u8]) -> io::Result<()> {
        let Some(written) = &mut self.in_order else { return self.file.write_all_at(bytes, offset) };
        zeros(self.file, offset - *written)?;
        *written = offset + bytes.len() as u64;
        self.file.write_all(bytes)
    }

    pub(crate) fn end(mut self) -> io::Result<()> {
        if let Some(written) = self.in_order {
            return zeros(self.file, self.bytes - written);
        }
        self.file.seek(SeekFrom::End(0))?;
        self.file.sync_data()
    }
}

/// Writes so many zeros.
fn zeros(mut file: &File, mut count: u64) -> io::Result<()> {
    while count > 0 {
        let some = count.min(ZEROS as u64);
        file.write_all(&[0; ZEROS][..some as usize])?;
        count -= some;
    }
    Ok(())
}
