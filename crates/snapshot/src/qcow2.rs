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
use std::io;
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
/// Bytes of a sector: a disk has whole ones.
const SECTOR: u64 = 512;
/// Bytes of the name of a backing file, at most.
const LONGEST: u32 = 1023;

/// Opens an image: a regular file, or a disk.
fn open(image: &Path) -> io::Result<File> {
    match claims::open(image) {
        Err(ClaimError::Kind("a block device")) => File::open(image),
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
        fchown(&file, Some(meta.uid()), Some(meta.gid())).inspect_err(|_| drop(std::fs::remove_file(image)))?;
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

/// The backing file of an image, which it shows where nothing was written. `None`: it has none, or
/// is not qcow2.
///
/// # Errors
/// If the file cannot be read, or keeps its data in yet another file.
pub fn backing(image: &Path) -> io::Result<Option<PathBuf>> {
    let file = open(image)?;
    let mut header = [0; 80];
    match file.read_exact_at(&mut header, 0) {
        Err(e) if e.kind() == io::ErrorKind::UnexpectedEof => return Ok(None),
        read => read?,
    }
    if header[..4] != *MAGIC {
        return Ok(None);
    }
    let version = u32::from_be_bytes(header[4..8].try_into().unwrap_or_default());
    let features = u64::from_be_bytes(header[72..80].try_into().unwrap_or_default());
    if version >= 3 && features & DATA_FILE != 0 {
        return Err(io::Error::new(io::ErrorKind::Unsupported, "its data are in a file of their own"));
    }
    let at = u64::from_be_bytes(header[8..16].try_into().unwrap_or_default());
    let len = u32::from_be_bytes(header[16..20].try_into().unwrap_or_default());
    if at == 0 || len > LONGEST {
        return Ok(None);
    }
    let mut name = vec![0; len as usize];
    file.read_exact_at(&mut name, at)?;
    // A name that is not absolute is beside the image.
    let directory = image.parent().unwrap_or(Path::new("."));
    Ok(Some(directory.join(OsStr::from_bytes(&name))))
}

/// Names another backing file for an image that has one, and that nobody else uses. The name is put
/// at the end of the first cluster, which no other part of the header may reach.
///
/// # Errors
/// If the image has no room there, or cannot be written.
pub fn set_backing(file: &File, name: &str) -> io::Result<()> {
    let mut bits = [0; 4];
    file.read_exact_at(&mut bits, 20)?;
    let cluster = 1_u64.checked_shl(u32::from_be_bytes(bits)).filter(|&cluster| cluster >= 4096);
    let at = cluster.map_or(0, |cluster| cluster - u64::from(LONGEST) - 1);
    let mut room = vec![0; LONGEST as usize];
    file.read_exact_at(&mut room, at)?;
    if at == 0 || room.iter().any(|&byte| byte != 0) || name.len() > LONGEST as usize {
        return Err(io::Error::new(io::ErrorKind::Unsupported, "no room for the name of another file below it"));
    }
    file.write_all_at(name.as_bytes(), at)?;
    file.write_all_at(&at.to_be_bytes(), 8)?;
    file.write_all_at(&(name.len() as u32).to_be_bytes(), 16)?;
    file.sync_all()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_image_is_put_over_another_file() {
        let dir = tempfile::tempdir().unwrap();
        let path = |name: &str| dir.path().join(name);
        let (base, over) = (path("base"), path("over"));
        create(&base, 3 << 20, None, 0o640).unwrap();
        create_over(&over, &base, false).unwrap();
        assert_eq!(backing(&over).unwrap(), Some(base.clone()));
        assert_eq!(backing(&base).unwrap(), None);
        let file = File::options().read(true).write(true).open(&over).unwrap();
        set_backing(&file, "other").unwrap();
        assert_eq!(backing(&over).unwrap(), Some(path("other")));
        assert_eq!(disk_size(&over).unwrap(), 3 << 20);
        // A second name would need the same room.
        assert!(set_backing(&file, "third").is_err());
        std::fs::write(path("raw"), b"raw").unwrap();
        assert_eq!(backing(&path("raw")).unwrap(), None);
    }

    #[test]
    fn an_image_over_another_has_its_size_and_nothing_is_replaced() {
        let dir = tempfile::tempdir().unwrap();
        let (base, over) = (dir.path().join("base"), dir.path().join("over"));
        create(&base, 3 << 30, None, 0o640).unwrap();
        create_over(&over, &base, false).unwrap();
        assert_eq!(disk_size(&over).unwrap(), 3 << 30);
        assert_eq!(std::fs::metadata(&over).unwrap().mode() & 0o777, 0o640);
        let bytes = std::fs::read(&over).unwrap();
        let name = base.as_os_str().as_bytes();
        assert_eq!(&bytes[128..128 + name.len()], name);
        assert!(create_over(&over, &base, false).is_err());
        assert!(disk_size(Path::new("/proc/version")).is_err());
    }
}
