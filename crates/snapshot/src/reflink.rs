//! Copies of raw images that share the original's blocks until one of the two is written (reflinks,
//! ioctl_ficlone(2)): btrfs, XFS and others make them in milliseconds, whatever the size.

#![allow(unsafe_code)] // Two ioctls.

use std::fs::File;
use std::io;
use std::os::fd::AsRawFd;
use std::os::unix::fs::{MetadataExt, OpenOptionsExt, fchown};
use std::path::Path;
use std::time::{Duration, Instant};

use rustix::fs::{CWD, Mode, OFlags};
use rustix::ioctl::{self, Opcode, Setter, Updater, opcode};

use crate::names;

/// Pieces of a file that are copied for a measurement.
const SOME: usize = 500;
/// Measurements: the shortest counts, since others use the host too.
const TRIES: usize = 3;
/// The ioctls, by linux/fiemap.h and linux/fs.h.
const FIEMAP: Opcode = opcode::read_write::<[u64; 4]>(b'f', 11);
const CLONE_RANGE: Opcode = opcode::write::<[u64; 4]>(0x94, 13);
/// What is not written yet has no place.
const SYNC: u32 = 1;

#[repr(C)]
#[derive(Clone, Copy)]
struct Extent {
    start: u64,
    place: u64,
    len: u64,
    rest: [u64; 4],
}

#[repr(C)]
struct Extents {
    start: u64,
    len: u64,
    flags: u32,
    mapped: u32,
    room: u32,
    reserved: u32,
    all: [Extent; SOME],
}

/// The number of a file's pieces, and where the first ones of them end.
fn extents(file: &File) -> io::Result<(usize, u64)> {
    let ask = |room: usize| -> io::Result<Extents> {
        let all = [Extent { start: 0, place: 0, len: 0, rest: [0; 4] }; SOME];
        let (room, len) = (room as u32, u64::MAX);
        let mut extents = Extents { start: 0, len, flags: SYNC, mapped: 0, room, reserved: 0, all };
        // SAFETY: the kernel reads the head, and writes it and at most `room` extents behind it.
        unsafe { ioctl::ioctl(file, Updater::<FIEMAP, _>::new(&mut extents)) }?;
        Ok(extents)
    };
    let (number, first) = (ask(0)?.mapped, ask(SOME)?);
    let last = first.all[..SOME.min(first.mapped as usize)].last();
    Ok((number as usize, last.map_or(0, |last| last.start + last.len)))
}

/// Measures how long a copy of an image takes, about, on some of its pieces: gives the time, and
/// the number of its pieces, with which it grows. Whoever writes to the image waits for a copy.
///
/// # Errors
/// If the file system cannot copy it so.
pub(crate) fn measure(image: &Path) -> io::Result<(Duration, usize)> {
    let directory = image.parent().unwrap_or(Path::new("."));
    let (flags, mode) = (OFlags::TMPFILE | OFlags::RDWR | OFlags::CLOEXEC, Mode::RUSR | Mode::WUSR);
    let nameless = || rustix::fs::open(directory, flags, mode);
    nameless()?;
    let file = claims::open(image)?;
    // A file system that does not tell: all of it is copied.
    let (number, end) = extents(&file).unwrap_or((0, 0));
    let len = if number > SOME { end } else { 0 };
    let mut best = Duration::MAX;
    for _ in 0..TRIES {
        let (copy, start) = (nameless()?, Instant::now());
        let range = [file.as_raw_fd() as u64, 0, len, 0];
        // SAFETY: the kernel reads the four numbers.
        unsafe { ioctl::ioctl(&copy, Setter::<CLONE_RANGE, _>::new(range)) }?;
        best = best.min(start.elapsed());
    }
    Ok((best.mul_f64((number as f64 / SOME as f64).max(1.0)), number))
}

/// Makes the file of a copy, empty, with the image's owner and permissions; gives its place.
///
/// # Errors
/// If it is there already, or cannot be made.
pub(crate) fn create(copy: &Path, image: &Path) -> io::Result<(u64, u64)> {
    let meta = std::fs::metadata(image)?;
    let file = File::options().write(true).create_new(true).mode(meta.mode() & 0o777).open(copy)?;
    if meta.uid() != rustix::process::geteuid().as_raw() {
        match fchown(&file, Some(meta.uid()), Some(meta.gid())) {
            // It belongs to whoever made it.
            Err(error) if error.kind() == io::ErrorKind::PermissionDenied => {}
            done => done.inspect_err(|_| drop(std::fs::remove_file(copy)))?,
        }
    }
    let made = file.metadata()?;
    Ok((made.dev(), made.ino()))
}

/// Gives the file that [`create`] made the bytes that the image has now. Another program may have
/// opened it since, so it is opened by its name: whoever may write to the directory could have put
/// another file there, which is not touched.
///
/// # Errors
/// If the file system cannot, or one of the two is another file by now.
pub(crate) fn copy(copy: &Path, image: &Path) -> io::Result<()> {
    let made = claims::open_at(CWD, copy, OFlags::WRONLY | OFlags::NOFOLLOW, Mode::empty())?;
    let image = claims::open(image)?;
    let (of, from) = (made.metadata()?, image.metadata()?);
    if of.nlink() != 1 || (of.len() != 0 && of.len() != from.len()) || of.uid() != from.uid() {
        return Err(io::Error::other("another file has its name by now"));
    }
    Ok(rustix::fs::ioctl_ficlone(made, image)?)
}

/// Makes a copy survive a crash of the host.
///
/// # Errors
/// If that fails.
pub(crate) fn sync(copy: &Path) -> io::Result<()> {
    names::open(copy)?.sync_all()?;
    names::sync_names(copy)
}

#[cfg(test)]
mod tests;
