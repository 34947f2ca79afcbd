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
        let meta = file.metadata()?;
        let appends = rustix::fs::fcntl_getfl(file).map_err(io::Error::from)?.contains(OFlags::APPEND);
        if !meta.is_file() || meta.len() > 0 || appends {
            let mut written = 0;
            self.each_run(&cache, checkpoint, |offset, bytes| {
                zeros(file, offset - written)?;
                written = offset + bytes.len() as u64;
                (&*file).write_all(bytes)
            })?;
            return Ok(zeros(file, checkpoint.bytes() - written)?);
        }
        file.set_len(checkpoint.bytes())?;
        self.each_run(&cache, checkpoint, |offset, bytes| file.write_all_at(bytes, offset))?;
        (&*file).seek(SeekFrom::End(0))?;
        Ok(file.sync_data()?)
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
