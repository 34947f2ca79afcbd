//! The images that a snapshot has, as clones find them.

use super::CloneError;
use crate::qcow2;
use crate::record::{Disk, Layer};

/// Sees that the image of a disk is there; gives the size of that in bytes.
///
/// # Errors
/// If it is not, or is no qcow2.
pub fn check_image(disk: &Disk) -> Result<u64, CloneError> {
    let size = match disk.raw {
        true => std::fs::metadata(&disk.image).map(|meta| meta.len().next_multiple_of(qcow2::SECTOR)),
        false => qcow2::disk_size(&disk.image),
    };
    let size = size.map_err(|source| CloneError::Image { image: disk.image.clone(), source })?;
    if !disk.layers.is_empty() {
        check_layers(disk)?;
    }
    Ok(size)
}

/// Sees that a disk's images are what they were, and that their headers name these and no others.
/// Gives them; those of an earlier version, which has not noted them, are what the headers say. To
/// be done as the account that could write to them.
pub(crate) fn check_layers(disk: &Disk) -> Result<Vec<Layer>, CloneError> {
    disk.layers.iter().try_for_each(check_layer)?;
    let now = disk.layers_by_headers().map_err(|(image, source)| CloneError::Image { image, source })?;
    let names = |layers: &[Layer]| layers.iter().map(|layer| layer.image.clone()).collect::<Vec<_>>();
    if disk.layers.is_empty() || names(&disk.layers) == names(&now) {
        return Ok(now);
    }
    let same = now.iter().zip(&disk.layers).take_while(|(now, stored)| now.image == stored.image);
    let image = same.last().map_or(&disk.image, |(_, stored)| &stored.image).clone();
    Err(CloneError::Shows(image))
}

/// Sees that a stored image is what it was.
pub(crate) fn check_layer(stored: &Layer) -> Result<(), CloneError> {
    let now = Layer::of(&stored.image).map_err(|source| CloneError::Image { image: stored.image.clone(), source })?;
    if now == *stored { Ok(()) } else { Err(CloneError::Changed(stored.clone(), now)) }
}

/// When an image was written to, as touch(1) takes it.
pub(super) fn time(layer: &Layer) -> String {
    format!("{}.{:09}", layer.written.0, layer.written.1)
}
