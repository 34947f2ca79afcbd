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

use std::fs::File;
use std::io::{self, Read, Write};
use std::path::{Path, PathBuf};

use checkpoint::{BeginError, Image, ReadError, Store, StoreError, hash};
use mpool::{AlignedBuf, BLOCK};
use serde::{Deserialize, Serialize};
use tar::{Archive, Builder, Entry, Header};
use xxhash_rust::xxh3::Xxh3;

use crate::qcow2;
use crate::record::{Description, Disk, Record};

/// The version of the form above.
const FORMAT: u32 = 1;
/// Pages that are read and stored at once.
const AT_ONCE: usize = 256;
/// Bytes of the description, of the device stream and of the list of pages, at most.
const LONGEST: u64 = 1 << 30;

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
}

/// Why a snapshot cannot be written to an archive, or read from one.
#[derive(Debug, thiserror::Error)]
pub enum ArchiveError {
    /// The memory cannot be read.
    #[error(transparent)]
    Memory(#[from] ReadError),
    /// An image cannot be read, or put into the archive.
    #[error("cannot copy the image {}", image.display())]
    Image {
        /// The image.
        image: PathBuf,
        /// Why.
        source: io::Error,
    },
    /// The stream cannot be written or read.
    #[error("cannot write or read the archive")]
    Stream(#[from] io::Error),
    /// It is something else.
    #[error("this is no archive of `pageone snapshot export` that this version understands: {0}")]
    Foreign(String),
    /// Bytes were lost or changed on the way.
    #[error("the archive is damaged: {0}. Nothing was stored; export it again")]
    Damaged(String),
    /// The snapshot has disks, and there is no place for them.
    #[error("this snapshot has {0} disks: name a directory for their images with --disks DIR")]
    NoPlace(usize),
    /// A checkpoint of this name cannot be begun.
    #[error(transparent)]
    Begin(#[from] BeginError),
    /// The pool is full, or cannot be written.
    #[error(transparent)]
    Store(#[from] StoreError),
}

fn image_error(image: &Path) -> impl FnOnce(io::Error) -> ArchiveError + '_ {
    |source| ArchiveError::Image { image: image.to_owned(), source }
}

/// A checkpoint with its record, to be exported.
pub struct Exported<'a> {
    /// Its name.
    pub name: &'a str,
    /// When it was taken, seconds since 1970.
    pub created: u64,
    /// The process that it was taken of.
    pub source: &'a str,
    /// Address and length in bytes of each region.
    pub regions: &'a [(u64, u64)],
    /// The guest and its devices.
    pub record: &'a Record,
    /// Its memory.
    pub image: &'a Image,
}

/// Writes a snapshot as an archive.
///
/// # Errors
/// If memory or images cannot be read, or the stream cannot be written.
pub fn export(what: &Exported<'_>, out: impl Write) -> Result<(), ArchiveError> {
    let description = &what.record.description;
    let chains: Vec<Vec<PathBuf>> = description.disks.iter().map(chain).collect::<Result<_, ArchiveError>>()?;
    let about = About {
        format: FORMAT,
        name: what.name.into(),
        created: what.created,
        source: what.source.into(),
        regions: what.regions.into(),
        description: description.clone(),
        images: chains.iter().map(Vec::len).collect(),
    };
    let mut out = Out { tar: Builder::new(out), sum: Xxh3::new() };
    let json = serde_json::to_vec_pretty(&about).map_err(io::Error::other)?;
    out.put("snapshot.json", json.len() as u64, &json[..])?;
    out.put("devices", what.record.stream.len() as u64, &what.record.stream[..])?;
    let filled: Vec<u64> = what.image.filled().collect();
    let numbers: Vec<u8> = filled.iter().flat_map(|page| page.to_le_bytes()).collect();
    out.put("pages", numbers.len() as u64, &numbers[..])?;
    let mut pages =
        Pages { image: what.image, left: &filled, bytes: AlignedBuf::zeroed(BLOCK), at: BLOCK, failed: None };
    let put = out.put("ram", (filled.len() * BLOCK) as u64, &mut pages);
    if let Some(error) = pages.failed {
        return Err(error.into());
    }
    put?;
    for (disk, images) in chains.iter().enumerate() {
        for (number, image) in images.iter().enumerate() {
            let file = File::open(image).map_err(image_error(image))?;
            let len = file.metadata().map_err(image_error(image))?.len();
            out.put(&file_name(disk, number), len, file.take(len)).map_err(image_error(image))?;
        }
    }
    let sum = format!("{:032x}", out.sum.digest128());
    out.put("xxh3", sum.len() as u64, sum.as_bytes())?;
    out.tar.into_inner()?.flush()?;
    Ok(())
}

/// A disk's image, the one below it, and so on.
fn chain(disk: &Disk) -> Result<Vec<PathBuf>, ArchiveError> {
    let mut all = vec![disk.image.clone()];
    if disk.raw {
        return Ok(all);
    }
    while let Some(below) =
        all.last().map(|last| qcow2::backing(last).map_err(image_error(last))).transpose()?.flatten()
    {
        if all.contains(&below) {
            return Err(image_error(&below)(io::Error::other("it lies below itself")));
        }
        all.push(below);
    }
    Ok(all)
}

fn file_name(disk: usize, number: usize) -> String {
    format!("disk-{disk}-{number}")
}

struct Out<W: Write> {
    tar: Builder<W>,
    sum: Xxh3,
}

impl<W: Write> Out<W> {
    fn put(&mut self, name: &str, len: u64, content: impl Read) -> io::Result<()> {
        let mut header = Header::new_gnu();
        header.set_size(len);
        header.set_mode(0o600);
        self.tar.append_data(&mut header, name, Summed { from: content, sum: &mut self.sum })
    }
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

/// The pages of an image with these numbers, one behind the other.
struct Pages<'a> {
    image: &'a Image,
    left: &'a [u64],
    bytes: AlignedBuf,
    /// What of `bytes` was given.
    at: usize,
    failed: Option<ReadError>,
}

impl Read for Pages<'_> {
    fn read(&mut self, into: &mut [u8]) -> io::Result<usize> {
        if self.at == BLOCK {
            let Some((&page, left)) = self.left.split_first() else { return Ok(0) };
            if let Err(error) = self.image.read(page, &mut self.bytes) {
                self.failed = Some(error);
                return Err(io::ErrorKind::Other.into());
            }
            (self.left, self.at) = (left, 0);
        }
        let len = into.len().min(BLOCK - self.at);
        into[..len].copy_from_slice(&self.bytes[self.at..self.at + len]);
        self.at += len;
        Ok(len)
    }
}

/// Reads an archive, and stores the snapshot in a pool, as `name` if there is one. The images of
/// its disks are made in `disks`. Gives what it is, with its new name.
///
/// # Errors
/// If the archive is something else or damaged, or something cannot be stored. Then nothing of it
/// is in the pool, and no image is left.
pub fn import(from: impl Read, store: &Store, name: Option<&str>, disks: Option<&Path>) -> Result<About, ArchiveError> {
    let mut made = Made(Vec::new());
    let about = read(from, store, name, disks, &mut made)?;
    made.0.clear();
    Ok(about)
}

/// Files that were made; they are removed if the archive turns out to be damaged.
struct Made(Vec<PathBuf>);

impl Drop for Made {
    fn drop(&mut self) {
        self.0.iter().for_each(|path| drop(std::fs::remove_file(path)));
    }
}

fn read(
    from: impl Read,
    store: &Store,
    name: Option<&str>,
    disks: Option<&Path>,
    made: &mut Made,
) -> Result<About, ArchiveError> {
    let mut archive = Archive::new(from);
    let mut entries = archive.entries()?;
    let mut sum = Xxh3::new();
    let mut next = |name: &str| match entries.next() {
        Some(entry) => named(entry?, name),
        None => Err(ArchiveError::Damaged(format!("it ends before {name}"))),
    };
    let foreign = |why: String| ArchiveError::Foreign(why);
    let json = whole(next("snapshot.json").map_err(|e| foreign(e.to_string()))?, &mut sum)?;
    let mut about: About = serde_json::from_slice(&json).map_err(|e| foreign(e.to_string()))?;
    if about.format != FORMAT {
        return Err(foreign(format!("its format is {}", about.format)));
    }
    let total = about.regions.iter().try_fold(0_u64, |sum, (_, len)| sum.checked_add(*len));
    let total = total.filter(|total| total.is_multiple_of(BLOCK as u64) && *total <= 1 << 44);
    let total = total.ok_or_else(|| foreign("its regions cannot be".into()))? / BLOCK as u64;
    if about.images.len() != about.description.disks.len() || about.images.contains(&0) {
        return Err(foreign("its disks have no images".into()));
    }
    let directory = match disks {
        None if !about.images.is_empty() => return Err(ArchiveError::NoPlace(about.images.len())),
        directory => directory.unwrap_or(Path::new(".")),
    };
    if let Some(name) = name {
        about.name = name.into();
    }
    let mut writer = store.begin(&about.name)?;
    writer.set_pages(total as usize);
    let stream = whole(next("devices")?, &mut sum)?;
    let numbers = whole(next("pages")?, &mut sum)?;
    let numbers: Vec<u64> = numbers.as_chunks().0.iter().map(|bytes| u64::from_le_bytes(*bytes)).collect();
    if !numbers.is_sorted_by(|a, b| a < b) || numbers.last().is_some_and(|last| *last >= total) {
        return Err(ArchiveError::Damaged("it has pages that the guest has not".into()));
    }
    let mut ram = Summed { from: next("ram")?, sum: &mut sum };
    let mut bytes = vec![0; AT_ONCE * BLOCK];
    for some in numbers.chunks(AT_ONCE) {
        let bytes = &mut bytes[..some.len() * BLOCK];
        ram.read_exact(bytes)?;
        let hashes: Vec<Option<u128>> = bytes.chunks(BLOCK).map(|page| hash(page, writer.seed())).collect();
        writer.put(some, bytes, &hashes)?;
        let off = writer.put_off();
        // Pages of this batch, which is sorted.
        let of = |page: u64| some.binary_search(&page).map(|at| &bytes[at * BLOCK..][..BLOCK]).unwrap_or_default();
        let again: Vec<u8> = off.iter().flat_map(|off| of(off.page)).copied().collect();
        writer.put_again(&off, &again)?;
    }
    let safe = crate::file_name(&about.name);
    for (disk, &count) in about.images.iter().enumerate() {
        let path = |number: usize| directory.join(format!("{safe}.{}", file_name(disk, number)));
        for number in 0..count {
            let image = path(number);
            let entry = next(&file_name(disk, number))?;
            let mut file = output::file::create_new(&image).map_err(image_error(&image))?;
            made.0.push(image.clone());
            let copied = io::copy(&mut Summed { from: entry, sum: &mut sum }, &mut file).and_then(|_| file.sync_all());
            copied.map_err(image_error(&image))?;
            if number + 1 < count {
                let below = path(number + 1);
                let below = below.file_name().unwrap_or_default().to_string_lossy().into_owned();
                qcow2::set_backing(&file, &below).map_err(image_error(&image))?;
            }
        }
        about.description.disks[disk].image = std::path::absolute(path(0))?;
    }
    let expected = format!("{:032x}", sum.digest128());
    if whole(next("xxh3")?, &mut Xxh3::new())? != expected.as_bytes() {
        return Err(ArchiveError::Damaged("its bytes are not those that were written".into()));
    }
    writer.keep_beside(Record { description: about.description.clone(), stream }.encode());
    writer.commit(about.source.clone(), about.regions.clone())?;
    Ok(about)
}

/// The entry, if it has this name.
fn named<'a, R: Read>(entry: Entry<'a, R>, name: &str) -> Result<Entry<'a, R>, ArchiveError> {
    if entry.path_bytes() == name.as_bytes() {
        return Ok(entry);
    }
    let is = String::from_utf8_lossy(&entry.path_bytes()).into_owned();
    Err(ArchiveError::Damaged(format!("it has {is} in the place of {name}")))
}

/// All of a short entry.
fn whole<R: Read>(entry: Entry<'_, R>, sum: &mut Xxh3) -> Result<Vec<u8>, ArchiveError> {
    let len = entry.size();
    if len > LONGEST {
        return Err(ArchiveError::Damaged("a part of it is longer than any can be".into()));
    }
    let mut bytes = Vec::new();
    Summed { from: entry, sum }.read_to_end(&mut bytes)?;
    if bytes.len() as u64 == len { Ok(bytes) } else { Err(ArchiveError::Damaged("it ends too early".into())) }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A guest can write anything into a raw disk, also the header of an image above a file of the
    /// host's.
    #[test]
    fn the_bytes_of_a_raw_image_are_never_taken_for_a_header() {
        let dir = tempfile::tempdir().unwrap();
        let (secret, raw) = (dir.path().join("secret"), dir.path().join("disk.raw"));
        qcow2::create(&secret, 1 << 20, None, 0o600).unwrap();
        qcow2::create_over(&raw, &secret, false).unwrap();
        let disk = |raw_image: bool| Disk { word: "disk".into(), image: raw.clone(), raw: raw_image };
        assert_eq!(chain(&disk(false)).unwrap(), [raw.clone(), secret.clone()]);
        assert_eq!(chain(&disk(true)).unwrap(), std::slice::from_ref(&raw));
        let over = dir.path().join("over.qcow2");
        qcow2::create_over(&over, &raw, true).unwrap();
        let len = std::fs::metadata(&raw).unwrap().len();
        assert_eq!(qcow2::disk_size(&over).unwrap(), len, "it shows the file, not what its header says");
        let header = std::fs::read(&over).unwrap();
        assert!(header[..200].windows(8).any(|bytes| bytes == b"\0\0\0\x03raw\0"), "QEMU is told so");
    }
}
