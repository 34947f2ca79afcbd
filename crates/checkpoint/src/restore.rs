//! Writing a checkpoint's memory to a file.

use std::fs::File;
use std::io;
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

use mpool::{MapError, Mcache, Settings};

use crate::catalog::{Checkpoint, ReadError, View};

/// Why [`View::restore`] failed.
#[derive(Debug, thiserror::Error)]
pub enum RestoreError {
    /// The file cannot be created.
    #[error("cannot make {}", path.display())]
    Create {
        /// The file.
        path: PathBuf,
        /// Why.
        source: io::Error,
    },
    /// The file cannot be written.
    #[error(transparent)]
    Write(#[from] io::Error),
    /// There is no mcache to read the pool through.
    #[error(transparent)]
    Cache(#[from] MapError),
    /// The checkpoint cannot be read.
    #[error(transparent)]
    Read(#[from] ReadError),
}

impl View {
    /// Writes a checkpoint's memory to a file: all regions, one after the other. Pages of zeros
    /// become holes. The file gets its name when it is complete: part of a memory is no memory.
    ///
    /// # Errors
    /// If the checkpoint cannot be read or the file cannot be written. Then there is no file.
    pub fn restore(&self, checkpoint: &Checkpoint, to: &Path) -> Result<(), RestoreError> {
        whole_file(to, |file| self.write_image(checkpoint, file))
    }

    /// Writes a checkpoint's memory to an empty file, durably.
    ///
    /// # Errors
    /// If the checkpoint cannot be read or the file cannot be written.
    pub fn write_image(&self, checkpoint: &Checkpoint, file: &File) -> Result<(), RestoreError> {
        file.set_len(checkpoint.bytes())?;
        let cache = Mcache::new(Settings::default())?;
        self.each_run(&cache, checkpoint, |offset, bytes| file.write_all_at(bytes, offset))?;
        Ok(file.sync_data()?)
    }
}

/// Makes a file by `write`. It gets its name, durably, when that has succeeded. Otherwise there is
/// no file.
pub(crate) fn whole_file<T, E: From<RestoreError>>(
    to: &Path,
    write: impl FnOnce(&File) -> Result<T, E>,
) -> Result<T, E> {
    let mut part = to.to_owned().into_os_string();
    part.push(".part");
    let part = PathBuf::from(part);
    let written = create(&part).map_err(E::from).and_then(|file| {
        let written = write(&file)?;
        name(&part, to).map_err(RestoreError::from)?;
        Ok(written)
    });
    if written.is_err() {
        let _ = std::fs::remove_file(&part);
    }
    written
}

fn create(to: &Path) -> Result<File, RestoreError> {
    // It holds a guest's memory, which is its owner's alone. A file of an earlier try goes, and
    // nothing that another user has put there is followed.
    let _ = std::fs::remove_file(to);
    let created = File::options().write(true).create_new(true).mode(0o600).open(to);
    created.map_err(|source| RestoreError::Create { path: to.to_owned(), source })
}

fn name(part: &Path, to: &Path) -> io::Result<()> {
    std::fs::rename(part, to)?;
    // The name is to survive a crash too.
    let directory = to.parent().filter(|parent| !parent.as_os_str().is_empty()).unwrap_or(Path::new("."));
    File::open(directory)?.sync_all()
}
