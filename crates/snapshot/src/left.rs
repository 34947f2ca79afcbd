//! The images that removed snapshots leave. Which other snapshot of the pool needs one is known. A
//! guest, a clone, or a snapshot of another pool may need it as well: nothing here says that one
//! can be removed.

use std::fs::{Metadata, metadata, symlink_metadata};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use output::text::printable;
use serde::Serialize;

use crate::names::WRITE;
use crate::ours::foreign_pool;
use crate::record::{Description, Disk, Layer};

/// An image that a removed snapshot has left.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Left {
    /// The file.
    pub image: PathBuf,
    /// Bytes that it takes.
    pub bytes: u64,
    /// A snapshot of the pool that needs it, if one does.
    pub needed_by: Option<String>,
}

/// The images of `removed` that are still there, whose pool is in a directory, and `others`, by
/// name, are still in it. `None`: a snapshot that cannot be read. What others can change of a pool
/// names no file.
pub fn left(pool: &Path, removed: &[&Description], others: &[(&str, Option<&Description>)]) -> Vec<Left> {
    if !matches!(foreign_pool(pool), Ok(None)) {
        return Vec::new();
    }
    // In a container the names are others.
    let ours = removed.iter().filter(|one| one.source.as_ref().is_none_or(|source| !source.elsewhere));
    let left = |layer: &Layer| {
        let meta = own(layer)?;
        let needs = |disk: &Disk| disk.layers.is_empty() || disk.layers.iter().any(|layer| is(&layer.image, &meta));
        let needs = |one: &&Description| one.disks.iter().any(needs);
        let by = others.iter().find(|(_, one)| one.as_ref().is_none_or(needs)).map(|(name, _)| (*name).to_owned());
        Some(Left { image: layer.image.clone(), bytes: meta.blocks() * 512, needed_by: by })
    };
    ours.flat_map(|one| &one.disks).flat_map(|disk| disk.layers.iter().take(disk.own.max(1))).filter_map(left).collect()
}

/// Whether a name is this file's, however it is spelled.
fn is(name: &Path, file: &Metadata) -> bool {
    metadata(name).is_ok_and(|meta| (meta.dev(), meta.ino()) == (file.dev(), file.ino()))
}

/// The file of a snapshot's image, if it is the one that was stored: nobody may write to it.
fn own(layer: &Layer) -> Option<Metadata> {
    let (name, meta) = (layer.image.to_str()?, symlink_metadata(&layer.image).ok()?);
    let is_stored = meta.is_file() && meta.mode() & WRITE == 0 && Layer::new(&layer.image, &meta) == *layer;
    (is_stored && printable(name) == name).then_some(meta)
}

#[cfg(test)]
mod tests;
