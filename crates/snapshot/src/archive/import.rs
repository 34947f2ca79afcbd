//! Reading an archive.

use std::io::{self, Read};
use std::path::{Path, PathBuf};

use checkpoint::{Store, StoreError, Writer, hash};
use mpool::BLOCK;
use tar::{Archive, Entries, Entry};
use xxhash_rust::xxh3::Xxh3;

use super::export::chain;
use super::{About, ArchiveError, FORMAT, Summed, file_name, image_error};
use crate::names::make_read_only;
use crate::qcow2;
use crate::record::Record;

/// Pages that are read and stored at once.
const AT_ONCE: usize = 256;
/// Bytes of the description, at most: its longest part is a command line.
const ABOUT: u64 = 16 << 20;
/// Bytes of the device stream, at most.
const STREAM: u64 = 1 << 30;
/// Bound on the bytes of a guest's memory: its pages are counted by 32 bits.
const MEMORY: u64 = 1 << 44;
/// Pages for which storing a checkpoint takes a byte of memory, whatever is in them.
const PAGES_A_BYTE: u64 = 4;

/// Reads an archive, and stores the snapshot in a pool, as `name` if there is one. The images of
/// its disks are made in `disks`. Gives what it is, with its new name.
///
/// # Errors
/// If the archive is something else or damaged, or something cannot be stored. Then nothing of it
/// is in the pool, and no image is left, unless that is not known ([`StoreError::Unknown`]).
pub fn import(from: impl Read, store: &Store, name: Option<&str>, disks: Option<&Path>) -> Result<About, ArchiveError> {
    let mut archive = Archive::new(from);
    let mut parts = Parts { entries: archive.entries()?.raw(true), sum: Xxh3::new() };
    let (mut about, pages) = parts.about()?;
    let directory = match disks {
        None if !about.images.is_empty() => return Err(ArchiveError::NoPlace(about.images.len())),
        directory => directory.unwrap_or(Path::new(".")),
    };
    if let Some(name) = name {
        about.name = name.into();
    }
    output::directory::make(directory, 0o700).map_err(image_error(directory))?;
    claims::memory(pages / PAGES_A_BYTE)?;
    let mut writer = store.begin(&about.name)?;
    writer.set_pages(pages as usize);
    let stream = parts.whole("devices", STREAM)?;
    parts.ram(pages, &mut writer)?;
    let mut made = Made(Vec::new());
    parts.images(&mut about, directory, &mut made)?;
    parts.check_sum()?;
    writer.keep_beside(Record { description: about.description.clone(), stream }.encode());
    let stored = writer.commit(about.source.clone(), about.regions.clone());
    if stored.as_ref().err().is_none_or(StoreError::is_unknown) {
        made.0.clear();
    }
    stored?;
    Ok(about)
}

/// Files that were made; they are removed if the archive turns out to be damaged.
struct Made(Vec<PathBuf>);

impl Drop for Made {
    fn drop(&mut self) {
        self.0.iter().for_each(|path| drop(std::fs::remove_file(path)));
    }
}

/// The parts of an archive, one after the other.
struct Parts<'a, R: Read> {
    entries: Entries<'a, R>,
    /// Of what was read.
    sum: Xxh3,
}

/// A part that is being read, and the bytes that its header announces.
struct Part<'a, 'b, R: Read> {
    bytes: Summed<'a, Entry<'b, R>>,
    len: u64,
}

/// The error of an archive whose part `name` cannot be read.
fn broken(name: &str, error: io::Error) -> ArchiveError {
    match error.kind() {
        _ if error.raw_os_error().is_some() => ArchiveError::Stream(error),
        io::ErrorKind::UnexpectedEof => ends_in(name),
        _ => ArchiveError::Damaged(format!("it breaks off at {name}: {error}")),
    }
}

fn ends_in(name: &str) -> ArchiveError {
    ArchiveError::Damaged(format!("it ends too early, in {name}"))
}

impl<'b, R: Read> Parts<'b, R> {
    /// The next part, which must have this name and be a plain file.
    fn next(&mut self, name: &str) -> Result<Part<'_, 'b, R>, ArchiveError> {
        let Some(entry) = self.entries.next() else {
            return Err(ArchiveError::Damaged(format!("it ends before {name}")));
        };
        let entry = entry.map_err(|e| broken(name, e))?;
        let (is, kind) = (entry.path_bytes(), entry.header().entry_type());
        if *is != *name.as_bytes() || !kind.is_file() {
            let (is, kind) = (String::from_utf8_lossy(&is), char::from(kind.as_byte()));
            let why = format!("it has {is:?} of kind {kind:?} in the place of the plain file {name}");
            return Err(ArchiveError::Damaged(why));
        }
        drop(is);
        let len = entry.size();
        Ok(Part { bytes: Summed { from: entry, sum: &mut self.sum }, len })
    }

    /// All of the next part, which has at most `most` bytes.
    fn whole(&mut self, name: &str, most: u64) -> Result<Vec<u8>, ArchiveError> {
        let Part { bytes, len } = self.next(name)?;
        claims::exactly(bytes, len, most).map_err(|e| ArchiveError::Damaged(format!("its part {name}: {e}")))
    }

    /// What the snapshot is, and the number of its pages.
    fn about(&mut self) -> Result<(About, u64), ArchiveError> {
        let foreign = |why: String| ArchiveError::Foreign(why);
        let json = self.whole("snapshot.json", ABOUT).map_err(|error| match error {
            ArchiveError::Damaged(why) => foreign(why),
            error => error,
        })?;
        let about: About = serde_json::from_slice(&json).map_err(|e| foreign(e.to_string()))?;
        if about.format != FORMAT {
            return Err(foreign(format!("its format is {}", about.format)));
        }
        let bytes = about.regions.iter().try_fold(0_u64, |sum, (_, len)| sum.checked_add(*len));
        let bytes = bytes.filter(|bytes| bytes.is_multiple_of(BLOCK as u64) && *bytes < MEMORY);
        let bytes = bytes.ok_or_else(|| foreign("its regions cannot be".into()))?;
        if about.images.len() != about.description.disks.len() || about.images.contains(&0) {
            return Err(foreign("its disks have no images".into()));
        }
        Ok((about, bytes / BLOCK as u64))
    }

    /// Stores the pages that are not zeros, of `all`.
    fn ram(&mut self, all: u64, writer: &mut Writer<'_>) -> Result<(), ArchiveError> {
        let numbers = self.whole("pages", all * size_of::<u64>() as u64)?;
        let numbers: Vec<u64> = numbers.as_chunks().0.iter().map(|bytes| u64::from_le_bytes(*bytes)).collect();
        if !numbers.is_sorted_by(|a, b| a < b) || numbers.last().is_some_and(|last| *last >= all) {
            return Err(ArchiveError::Damaged("it has pages that the guest has not".into()));
        }
        let Part { bytes: mut ram, len } = self.next("ram")?;
        if len != (numbers.len() * BLOCK) as u64 {
            let why = format!("it lists {} pages, and {len} bytes of them", numbers.len());
            return Err(ArchiveError::Damaged(why));
        }
        let mut bytes = vec![0; AT_ONCE * BLOCK];
        for some in numbers.chunks(AT_ONCE) {
            let bytes = &mut bytes[..some.len() * BLOCK];
            ram.read_exact(bytes).map_err(|e| broken("ram", e))?;
            let hashes: Vec<Option<u128>> = bytes.chunks(BLOCK).map(|page| hash(page, writer.seed())).collect();
            writer.put(some, bytes, &hashes)?;
            let off = writer.put_off();
            // Pages of this batch, which is sorted.
            let of = |page: u64| some.binary_search(&page).map(|at| &bytes[at * BLOCK..][..BLOCK]).unwrap_or_default();
            let again: Vec<u8> = off.iter().flat_map(|off| of(off.page)).copied().collect();
            writer.put_again(&off, &again)?;
        }
        Ok(())
    }

    /// Makes the images of the disks in a directory, and names them in `about`.
    fn images(&mut self, about: &mut About, directory: &Path, made: &mut Made) -> Result<(), ArchiveError> {
        let safe = crate::file_name(&about.name);
        for (disk, &count) in about.images.iter().enumerate() {
            let path = |number: usize| directory.join(format!("{safe}.{}", file_name(disk, number)));
            for number in 0..count {
                let (name, image) = (file_name(disk, number), path(number));
                let Part { mut bytes, len } = self.next(&name)?;
                let mut file = output::file::create_new(&image).map_err(image_error(&image))?;
                made.0.push(image.clone());
                let copied = io::copy(&mut bytes, &mut file).map_err(image_error(&image))?;
                if copied < len {
                    return Err(ends_in(&name));
                }
                file.sync_all().map_err(image_error(&image))?;
                if number + 1 < count {
                    let below = path(number + 1);
                    let below = below.file_name().unwrap_or_default().to_string_lossy().into_owned();
                    qcow2::set_backing(&file, &below).map_err(image_error(&image))?;
                }
            }
            let own = &mut about.description.disks[disk];
            own.image = std::path::absolute(path(0))?;
            // An image shows the files that its header names, and that may be any of this host.
            let shown: Vec<_> = (0..count).map(|number| std::path::absolute(path(number))).collect::<Result<_, _>>()?;
            if chain(own)? != shown {
                let name = file_name(disk, 0);
                return Err(ArchiveError::Damaged(format!("its image {name} shows files that are not in the archive")));
            }
            shown.iter().try_for_each(|image| make_read_only(image).map_err(image_error(image)))?;
            own.note_layers().map_err(|(image, source)| ArchiveError::Image { image, source })?;
        }
        Ok(())
    }

    /// Sees that all that was read is what was written.
    fn check_sum(&mut self) -> Result<(), ArchiveError> {
        let expected = format!("{:032x}", self.sum.digest128());
        if self.whole("xxh3", expected.len() as u64)? != expected.as_bytes() {
            return Err(ArchiveError::Damaged("its bytes are not those that were written".into()));
        }
        Ok(())
    }
}
