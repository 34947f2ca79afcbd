//! Copies of raw images that share the original's blocks until one of the two is written (reflinks,
//! ioctl_ficlone(2)): btrfs, XFS and others make them in milliseconds, whatever the size.

use std::fs::File;
use std::io;
use std::os::unix::fs::{MetadataExt, OpenOptionsExt, fchown};
use std::path::Path;

use rustix::fs::{Mode, OFlags};

/// Whether the file system of an image can make such copies of it: tries it, and leaves nothing.
///
/// # Errors
/// If it cannot.
pub(crate) fn try_it(image: &Path) -> io::Result<()> {
    let directory = image.parent().unwrap_or(Path::new("."));
    let (flags, mode) = (OFlags::TMPFILE | OFlags::RDWR | OFlags::CLOEXEC, Mode::RUSR | Mode::WUSR);
    let nameless = rustix::fs::open(directory, flags, mode)?;
    Ok(rustix::fs::ioctl_ficlone(nameless, File::open(image)?)?)
}

/// Makes the file of a copy, empty, with the image's owner and permissions.
///
/// # Errors
/// If it is there already, or cannot be made.
pub(crate) fn create(copy: &Path, image: &Path) -> io::Result<()> {
    let meta = std::fs::metadata(image)?;
    let file = File::options().write(true).create_new(true).mode(meta.mode() & 0o777).open(copy)?;
    if meta.uid() != rustix::process::geteuid().as_raw() {
        fchown(&file, Some(meta.uid()), Some(meta.gid())).inspect_err(|_| drop(std::fs::remove_file(copy)))?;
    }
    Ok(())
}

/// Gives the file that [`create`] made the bytes that the image has now. Another program may have
/// opened it since, so it is opened by its name: whoever may write to the directory could have put
/// another file there, which is not touched.
///
/// # Errors
/// If the file system cannot, or one of the two is another file by now.
pub(crate) fn copy(copy: &Path, image: &Path) -> io::Result<()> {
    let made = rustix::fs::open(copy, OFlags::WRONLY | OFlags::NOFOLLOW | OFlags::CLOEXEC, Mode::empty())?;
    let (made, image) = (File::from(made), File::open(image)?);
    let (of, from) = (made.metadata()?, image.metadata()?);
    if !of.is_file() || of.nlink() != 1 || of.len() != 0 || of.uid() != from.uid() {
        return Err(io::Error::other("another file has its name by now"));
    }
    Ok(rustix::fs::ioctl_ficlone(made, image)?)
}

/// Makes a copy survive a crash of the host.
///
/// # Errors
/// If that fails.
pub(crate) fn sync(copy: &Path) -> io::Result<()> {
    File::open(copy)?.sync_all()?;
    File::open(copy.parent().unwrap_or(Path::new(".")))?.sync_all()
}
