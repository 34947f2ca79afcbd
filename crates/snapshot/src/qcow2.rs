//! Empty disk images of QEMU's format qcow2 (docs/interop/qcow2.rst of QEMU), which show another
//! image as long as nothing is written. `qemu-img` makes them too; it is not on every host.
//!
//! ```text
//! cluster 0     header, backing format, name of the backing file
//! cluster 1     refcount table: one entry, cluster 2
//! cluster 2     refcounts: one for each cluster here
//! cluster 3...  L1 table, 8 bytes for 512 MiB, zeros: nothing is allocated
//! ```

use std::ffi::OsStr;
use std::fs::File;
use std::io::{self, Read};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{FileExt, MetadataExt, OpenOptionsExt, fchown};
use std::path::{Path, PathBuf};

use claims::ClaimError;

const MAGIC: &[u8; 4] = b"QFI\xfb";
const CLUSTER_BITS: u32 = 16;
const CLUSTER: u64 = 1 << CLUSTER_BITS;
/// Bytes that an entry of the L1 table stands for.
const L1_ENTRY: u64 = CLUSTER * CLUSTER / 8;
/// The first cluster of the L1 table.
const L1: u64 = 3;
/// Bytes of the header of version 3.
const HEADER: u32 = 104;
/// The header extension that names the backing file's format.
const BACKING_FORMAT: u32 = 0xE279_2ACA;
/// The incompatible feature of an image whose data are in another file.
const DATA_FILE: u64 = 1 << 2;
/// Bytes of the largest disk that an image can be put over: see [`make`].
const LARGEST: u64 = 1 << 56;
/// Bytes of a sector: a disk has whole ones.
pub(crate) const SECTOR: u64 = 512;
/// Bytes of the largest cluster; the header lies in the first one.
const LARGEST_CLUSTER: u64 = 2 << 20;
/// Bytes of an L1 table that is looked at: that of a disk of a pebibyte.
const LONGEST_TABLE: u64 = 16 << 20;
/// Bytes of the name of a backing file, at most.
const LONGEST: u32 = 1023;
/// Images of a disk, at most. QEMU has a descriptor for each, of 1,024 by default, and its answer
/// describes each image inside the description of the one above. A clone's is one more.
pub(crate) const MAX_IMAGES: usize = 500;

/// Opens an image: a regular file, or a disk.
pub(crate) fn open(image: &Path) -> io::Result<File> {
    match claims::open(image) {
        // It may have been replaced since: nothing is waited for.
        Err(ClaimError::Kind("a block device")) => {
            File::options().read(true).custom_flags(libc::O_NONBLOCK).open(image)
        }
        file => Ok(file?),
    }
}

/// The size of the disk in a qcow2 image, in bytes.
///
/// # Errors
/// If the file cannot be read, or is something else.
pub fn disk_size(image: &Path) -> io::Result<u64> {
    let mut header = [0; 32];
    open(image)?.read_exact_at(&mut header, 0)?;
    if header[..4] != *MAGIC {
        return Err(io::Error::new(io::ErrorKind::InvalidData, "not a qcow2 image"));
    }
    Ok(u64::from_be_bytes(header[24..32].try_into().unwrap_or_default()))
}

/// Whether nothing was ever written to a qcow2 image: its L1 table is one of zeros.
pub(crate) fn is_empty(image: &Path) -> io::Result<bool> {
    let (file, mut header) = (open(image)?, [0; 48]);
    file.read_exact_at(&mut header, 0)?;
    let number = |at: usize, len: usize| header[at..at + len].iter().fold(0, |sum, byte| sum << 8 | u64::from(*byte));
    let mut table = vec![0; (number(36, 4) * 8).min(LONGEST_TABLE) as usize];
    file.read_exact_at(&mut table, number(40, 8))?;
    Ok(header[..4] == *MAGIC && number(36, 4) * 8 <= LONGEST_TABLE && table.iter().all(|byte| *byte == 0))
}

/// Makes an image that shows `backing`, a raw or qcow2 image named by an absolute path. It gets the
/// owner and the permissions of that file, as far as this account may give them.
///
/// # Errors
/// If the file is there already, or cannot be made. No file is left then.
pub fn create_over(image: &Path, backing: &Path, raw: bool) -> io::Result<()> {
    let meta = std::fs::metadata(backing)?;
    let size = if raw { meta.len().next_multiple_of(SECTOR) } else { disk_size(backing)? };
    let file = make(image, size, Some((backing, raw)), meta.mode() & 0o777)?;
    if meta.uid() != rustix::process::geteuid().as_raw() {
        match fchown(&file, Some(meta.uid()), Some(meta.gid())) {
            // It belongs to whoever made it.
            Err(error) if error.kind() == io::ErrorKind::PermissionDenied => {}
            done => done.inspect_err(|_| drop(std::fs::remove_file(image)))?,
        }
    }
    Ok(())
}

/// Makes an image of a disk of `size` bytes, with zeros or with what `backing` shows: its name, and
/// whether it is raw.
///
/// # Errors
/// If the file is there already, or cannot be made. No file is left then.
pub fn create(image: &Path, size: u64, backing: Option<(&Path, bool)>, mode: u32) -> io::Result<()> {
    make(image, size, backing, mode).map(drop)
}

/// The same; gives the file.
fn make(image: &Path, size: u64, backing: Option<(&Path, bool)>, mode: u32) -> io::Result<File> {
    let name = backing.map_or(&[][..], |(path, _)| path.as_os_str().as_bytes());
    let entries = size.div_ceil(L1_ENTRY).max(1);
    let clusters = L1 + (entries * 8).div_ceil(CLUSTER);
    let mut header = Vec::new();
    header.extend(MAGIC);
    header.extend(3_u32.to_be_bytes());
    let extension = 24;
    let name_at = if backing.is_some() { u64::from(HEADER) + extension } else { 0 };
    header.extend(name_at.to_be_bytes());
    header.extend((name.len() as u32).to_be_bytes());
    header.extend(CLUSTER_BITS.to_be_bytes());
    header.extend(size.to_be_bytes());
    header.extend(0_u32.to_be_bytes()); // no encryption
    header.extend((entries as u32).to_be_bytes());
    header.extend((L1 * CLUSTER).to_be_bytes());
    header.extend(CLUSTER.to_be_bytes()); // the refcount table
    header.extend(1_u32.to_be_bytes()); // its clusters
    header.extend([0; 4 + 8]); // no snapshots in the image
    header.extend([0; 24]); // no features
    header.extend(4_u32.to_be_bytes()); // refcounts of 2⁴ bits
    header.extend(HEADER.to_be_bytes());
    if let Some((_, raw)) = backing {
        let format: &[u8] = if raw { b"raw" } else { b"qcow2" };
        header.extend(BACKING_FORMAT.to_be_bytes());
        header.extend((format.len() as u32).to_be_bytes());
        header.extend(format);
        header.extend(&[0; 8][format.len()..]);
        header.extend([0; 8]); // the end of the extensions
        header.extend(name);
    }
    if clusters > CLUSTER / 2 || header.len() as u64 > CLUSTER || name.len() > LONGEST as usize {
        return Err(io::Error::new(io::ErrorKind::InvalidInput, "the disk is too large, or its name too long"));
    }
    let write = |file: &File| -> io::Result<()> {
        file.set_len(clusters * CLUSTER)?;
        file.write_all_at(&header, 0)?;
        file.write_all_at(&(2 * CLUSTER).to_be_bytes(), CLUSTER)?;
        let counts: Vec<u8> = (0..clusters).flat_map(|_| 1_u16.to_be_bytes()).collect();
        file.write_all_at(&counts, 2 * CLUSTER)?;
        file.sync_all()
    };
    let file = File::options().write(true).create_new(true).mode(mode).open(image)?;
    write(&file).inspect_err(|_| drop(std::fs::remove_file(image)))?;
    Ok(file)
}

/// What an image shows where nothing was written.
#[derive(Debug, PartialEq, Eq)]
pub struct Backing {
    /// The file.
    pub image: PathBuf,
    /// It is raw: what it begins with is the guest's, and no header.
    pub raw: bool,
}

/// The backing file of a qcow2 image. `None`: it has none.
///
/// # Errors
/// If the file cannot be read, is not qcow2, keeps its data in yet another file, or does not say
/// which format its backing file has. Without that the file's first bytes would tell, and if it is
/// raw, a guest has written these.
pub fn backing(image: &Path) -> io::Result<Option<Backing>> {
    let below = backing_of(open(image)?)?;
    // A name that is not absolute is beside the image.
    let directory = image.parent().unwrap_or(Path::new("."));
    Ok(below.map(|below| Backing { image: directory.join(below.image), ..below }))
}

/// The same of what begins here; a name that is not absolute stays as it is.
///
/// # Errors
/// As [`backing`].
pub fn backing_of(from: impl Read) -> io::Result<Option<Backing>> {
    let wrong = |why| io::Error::new(io::ErrorKind::InvalidData, why);
    let mut bytes = Vec::new();
    let mut from = from.take(HEADER.into());
    from.read_to_end(&mut bytes)?;
    // The header and all behind it lie in the first cluster.
    let cluster = 1_u64.checked_shl(bytes.get(23).copied().unwrap_or(0).into()).unwrap_or(0);
    from.set_limit(cluster.min(LARGEST_CLUSTER).saturating_sub(HEADER.into()));
    from.read_to_end(&mut bytes)?;
    let word = |at: usize| bytes.get(at..at + 4)?.try_into().ok().map(u32::from_be_bytes);
    let long = |at: usize| Some(u64::from(word(at)?) << 32 | u64::from(word(at + 4)?));
    if !bytes.starts_with(MAGIC) {
        return Err(wrong("not a qcow2 image"));
    }
    let version = word(4).ok_or_else(|| wrong("its header is cut off"))?;
    if version >= 3 && long(72).is_some_and(|features| features & DATA_FILE != 0) {
        return Err(io::Error::new(io::ErrorKind::Unsupported, "its data are in a file of their own"));
    }
    let (at, len) = (long(8).unwrap_or(0) as usize, word(16).unwrap_or(0));
    if at == 0 {
        return Ok(None);
    }
    let name = bytes.get(at..).and_then(|rest| rest.get(..len as usize)).filter(|_| len <= LONGEST);
    let name = name.ok_or_else(|| wrong("the name of its backing file is cut off"))?;
    // Extensions of the header: kind, length, and bytes up to the next multiple of 8.
    let mut extension = if version >= 3 { word(100).unwrap_or(0) as usize } else { 72 };
    let raw = loop {
        match (word(extension), word(extension + 4)) {
            (Some(BACKING_FORMAT), Some(len)) => match bytes.get(extension + 8..).and_then(|b| b.get(..len as usize)) {
                Some(b"raw") => break true,
                Some(b"qcow2") => break false,
                _ => return Err(wrong("its backing file is neither raw nor qcow2")),
            },
            (Some(kind), Some(len)) if kind != 0 => extension += 8 + (len as usize).next_multiple_of(8),
            _ => {
                return Err(wrong(
                    "it does not say which format its backing file has: `qemu-img rebase -u -F FORMAT` does",
                ));
            }
        }
    };
    Ok(Some(Backing { image: OsStr::from_bytes(name).into(), raw }))
}

/// Refuses an image whose tables do not lie in the file, and a disk that no image can be put over.
///
/// # Errors
/// If it is such an image, is not qcow2, or cannot be read.
pub fn ensure_whole(file: &File) -> io::Result<()> {
    let (mut header, len) = ([0; 60], file.metadata()?.len());
    file.read_exact_at(&mut header, 0)?;
    let word = |at: usize| header[at..at + 4].iter().fold(0, |word, byte| word << 8 | u64::from(*byte));
    let long = |at: usize| word(at) << 32 | word(at + 4);
    let (cluster, size) =
        (1_u64.checked_shl(word(20) as u32).filter(|bytes| (SECTOR..=LARGEST_CLUSTER).contains(bytes)), long(24));
    let tables = cluster.map(|cluster| [(long(40), word(36) * 8), (long(48), word(56).saturating_mul(cluster))]);
    let is_inside = |(at, bytes): &(u64, u64)| at.checked_add(*bytes).is_some_and(|end| end <= len);
    match tables {
        _ if header[..4] != *MAGIC => Err(io::Error::new(io::ErrorKind::InvalidData, "not a qcow2 image")),
        Some(tables) if size <= LARGEST && tables.iter().all(is_inside) => Ok(()),
        _ => Err(io::Error::new(io::ErrorKind::InvalidData, "its header claims more than an image has")),
    }
}

/// An image, the one below it, and so on. Each layer says which format the next one has: a guest
/// may write the header of a qcow2 image onto a raw disk.
///
/// # Errors
/// If one of them cannot be read, or there are too many: it is named.
pub fn chain(first: Backing) -> Result<Vec<PathBuf>, (PathBuf, io::Error)> {
    let Backing { image, mut raw } = first;
    let mut all = vec![image];
    while let Some(last) = all.last().filter(|_| !raw) {
        let Some(below) = backing(last).map_err(|error| (last.clone(), error))? else { break };
        if all.contains(&below.image) {
            return Err((below.image, io::Error::other("it lies below itself")));
        }
        if all.len() > MAX_IMAGES {
            return Err((below.image, io::Error::other(format!("more than {MAX_IMAGES} images lie above it"))));
        }
        raw = below.raw;
        all.push(below.image);
    }
    Ok(all)
}

/// Names another backing file for an image that has one, and that nobody else uses. The name is put
/// at the end of the first cluster, which no other part of the header may reach but such a name.
///
/// # Errors
/// If the image has no room there, or cannot be written.
pub fn set_backing(file: &File, name: &str) -> io::Result<()> {
    let mut header = [0; 24];
    file.read_exact_at(&mut header, 0)?;
    let word = |at: usize| header[at..at + 4].iter().fold(0, |word, byte| word << 8 | u64::from(*byte));
    let cluster = 1_u64.checked_shl(word(20) as u32).filter(|&cluster| cluster >= 4096);
    let at = cluster.map_or(0, |cluster| cluster - u64::from(LONGEST) - 1);
    let mut room = vec![0; LONGEST as usize];
    file.read_exact_at(&mut room, at)?;
    // An image that was imported before has its name there.
    let taken = if word(8) << 32 | word(12) == at { word(16) as usize } else { 0 };
    if at == 0 || room.iter().skip(taken).any(|&byte| byte != 0) || name.len() > LONGEST as usize {
        return Err(io::Error::new(io::ErrorKind::Unsupported, "no room for the name of another file below it"));
    }
    room.fill(0);
    room[..name.len()].copy_from_slice(name.as_bytes());
    file.write_all_at(&room, at)?;
    file.write_all_at(&at.to_be_bytes(), 8)?;
    file.write_all_at(&(name.len() as u32).to_be_bytes(), 16)?;
    file.sync_all()
}

#[cfg(test)]
mod tests;
