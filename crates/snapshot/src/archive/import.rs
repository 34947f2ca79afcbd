//! Reading an archive.
//!
//! ```text
//! receive   the archive is read to its end: pages and devices into a scratch file beside the
//!           pool's, images into files that have no name yet; the sum is checked
//! store     the pool is open: pages are stored, images named, the checkpoint is recorded
//! ```
//!
//! Until `store` an interruption leaves nothing, and the pool is free for others.

use std::fs::File;
use std::io::{self, ErrorKind, Read, Seek, SeekFrom, Write};
use std::path::{Path, PathBuf};

use checkpoint::{BeginError, Others, Store, StoreError, Writer, ensure_name, hash};
use mpool::{BLOCK, Scratch};
use output::file::Directory;
use output::{OutputFile, Progress};
use tar::{Archive, Entries, Entry};
use xxhash_rust::xxh3::Xxh3;

use super::{About, ArchiveError, FORMAT, Summed, file_name, image_error};
use crate::names::make_read_only;
use crate::qcow2::{self, MAX_IMAGES};
use crate::record::{DESCRIPTION, Layer, Record};
use crate::stream::LONGEST;

/// Bytes that are read at once: 256 pages.
const AT_ONCE: usize = 256 * BLOCK;
/// Bound on the bytes of a guest's memory: its pages are counted by 32 bits.
const MEMORY: u64 = 1 << 44;
/// How many times the memory that this host has left a guest may have. Storing a checkpoint takes
/// memory for its pages, whatever is in them: a byte for each 16 KiB.
const OVERCOMMIT: u64 = 32;
/// Bytes of an image that are a hole where they are zeros.
const HOLE: usize = 64 << 10;

/// Where an archive is received.
pub struct Place<'a> {
    /// Directory of the pool's capacity class.
    pub pool: &'a Path,
    /// Directory for the images, made if need be.
    pub disks: Option<&'a Path>,
    /// The snapshot's name, if it gets another one.
    pub name: Option<&'a str>,
    /// Whether the pool has one of this name.
    pub is_taken: &'a dyn Fn(&str) -> bool,
}

/// An archive that was read, and has the right sum. Dropping it leaves nothing.
pub struct Received {
    about: About,
    scratch: Scratch,
    stream: Kept,
    numbers: Kept,
    ram: Kept,
    images: Vec<OutputFile>,
    // After the images, which lie in it.
    directory: Option<Directory>,
    _scratch: OutputFile,
}

/// A part of an archive in the scratch file.
#[derive(Clone, Copy)]
struct Kept {
    at: u64,
    len: u64,
}

/// Reads an archive. Nothing of it is in the pool then, and no file has a name.
///
/// # Errors
/// If the archive is something else or damaged, or there is no room for it.
pub fn receive(from: impl Read, place: &Place<'_>) -> Result<Received, ArchiveError> {
    let mut archive = Archive::new(from);
    let mut parts = Parts { entries: archive.entries()?.raw(true), sum: Xxh3::new() };
    let (mut about, pages) = parts.about()?;
    if let Some(name) = place.name {
        about.name = name.into();
    }
    ensure_name(&about.name)?;
    if (place.is_taken)(&about.name) {
        return Err(BeginError::Exists(about.name).into());
    }
    let disks = match place.disks {
        None if !about.images.is_empty() => return Err(ArchiveError::NoPlace(about.images.len())),
        disks => disks.unwrap_or(Path::new(".")),
    };
    let out = OutputFile::create_new(&place.pool.join(format!(".import-{}", std::process::id())))?;
    let mut scratch = out.file().try_clone().and_then(Scratch::new)?;
    let stream = parts.put_aside("devices", LONGEST, &mut scratch, |_| true)?;
    let (mut last, mut count) = (None, 0);
    let numbers = parts.put_aside("pages", pages * size_of::<u64>() as u64, &mut scratch, |bytes| {
        numbers(bytes).all(|page| {
            count += 1;
            last.replace(page).is_none_or(|last| last < page) && page < pages
        })
    })?;
    room(place.pool, count * BLOCK as u64)?;
    let ram = parts.put_aside("ram", count * BLOCK as u64, &mut scratch, |_| true)?;
    if numbers.len % size_of::<u64>() as u64 != 0 || ram.len != count * BLOCK as u64 {
        let why = format!("it lists {count} pages, and {} bytes of them", ram.len);
        return Err(ArchiveError::Damaged(why));
    }
    let directory = if about.images.is_empty() { None } else { Some(Directory::make(disks)?) };
    room(disks, about.allocated)?;
    let images = parts.images(&mut about, disks)?;
    parts.check_sum()?;
    Ok(Received { about, scratch, stream, numbers, ram, images, directory, _scratch: out })
}

/// The numbers of pages that were read.
fn numbers(bytes: &[u8]) -> impl Iterator<Item = u64> {
    bytes.as_chunks().0.iter().map(|bytes| u64::from_le_bytes(*bytes))
}

/// Sees that a file system has room, where it says how much.
fn room(directory: &Path, bytes: u64) -> Result<(), ArchiveError> {
    let Ok(stat) = rustix::fs::statvfs(directory) else { return Ok(()) };
    let free = stat.f_bavail.saturating_mul(stat.f_frsize);
    let (needed, free) = (bytes.div_ceil(1 << 20), free >> 20);
    let directory = directory.to_owned();
    if needed <= free { Ok(()) } else { Err(ArchiveError::Room { directory, needed, free }) }
}

impl Received {
    /// Stores it in the pool, which others get in between, if any are named. `commits` is called
    /// before anything of it is there to stay. Gives what it is.
    ///
    /// # Errors
    /// If it cannot be stored. Then nothing of it is in the pool, and no image is left, unless that
    /// is not known ([`StoreError::Unknown`]).
    pub fn store(
        self,
        (store, others): (&Store, Option<&dyn Others>),
        progress: &Progress,
        commits: impl FnOnce(),
    ) -> Result<About, ArchiveError> {
        let writer = store.begin(&self.about.name)?;
        let mut writer = match others {
            Some(others) => writer.in_turns(others),
            None => writer,
        };
        writer.set_pages((self.about.bytes() / BLOCK as u64) as usize);
        progress.begin("storing", Some(self.ram.len));
        self.ram(&mut writer, progress)?;
        let Self { mut about, scratch, stream, images, directory, .. } = self;
        about.description.imported = true;
        // It is there twice in the end.
        claims::memory(stream.len * 2)?;
        let mut bytes = vec![0; (stream.len as usize).next_multiple_of(Scratch::SECTOR)];
        scratch.read(stream.at, &mut bytes)?;
        bytes.truncate(stream.len as usize);
        writer.keep_pool();
        commits();
        let (mut named, mut layers) = (Named(Vec::new()), Vec::new());
        for image in images {
            let path = std::path::absolute(image.path())?;
            let file = image.file().try_clone()?;
            image.keep()?;
            named.0.push(path.clone());
            // What was written, whatever has its name by now.
            layers.push(Layer::new(&path, &file.metadata()?));
            make_read_only(&path).map_err(image_error(&path))?;
        }
        let mut layers = layers.into_iter();
        for (disk, count) in about.description.disks.iter_mut().zip(&about.images) {
            (disk.own, disk.layers) = (0, layers.by_ref().take(*count).collect());
        }
        writer.keep_beside(Record { description: about.description.clone(), stream: bytes }.encode());
        let stored = writer.commit(about.source.clone(), about.regions.clone());
        if stored.as_ref().err().is_none_or(StoreError::is_unknown) {
            named.0.clear();
            directory.into_iter().for_each(Directory::stay);
        }
        stored?;
        Ok(about)
    }

    /// Stores the pages that are not zeros.
    fn ram(&self, writer: &mut Writer<'_>, progress: &Progress) -> Result<(), ArchiveError> {
        let (mut some, mut bytes) = (vec![0; AT_ONCE / BLOCK * size_of::<u64>()], vec![0; AT_ONCE]);
        let mut done = 0;
        while done < self.ram.len {
            let len = AT_ONCE.min((self.ram.len - done) as usize);
            let listed = len / BLOCK * size_of::<u64>();
            self.scratch.read(self.numbers.at + done / BLOCK as u64 * size_of::<u64>() as u64, {
                let whole = listed.next_multiple_of(Scratch::SECTOR);
                &mut some[..whole]
            })?;
            let bytes = &mut bytes[..len];
            self.scratch.read(self.ram.at + done, bytes)?;
            let some: Vec<u64> = numbers(&some[..listed]).collect();
            let hashes: Vec<Option<u128>> = bytes.chunks(BLOCK).map(|page| hash(page, writer.seed())).collect();
            writer.put(&some, bytes, &hashes)?;
            let off = writer.put_off();
            // Pages of this batch, which is sorted.
            let of = |page: u64| some.binary_search(&page).map(|at| &bytes[at * BLOCK..][..BLOCK]).unwrap_or_default();
            let again: Vec<u8> = off.iter().flat_map(|off| of(off.page)).copied().collect();
            writer.put_again(&off, &again)?;
            done += len as u64;
            progress.inc(len as u64);
        }
        Ok(())
    }
}

/// Files that have their names; they are removed if the snapshot is not stored.
struct Named(Vec<PathBuf>);

impl Drop for Named {
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

    /// Puts the next part aside, which has at most `most` bytes, and of which `is_possible` sees
    /// all.
    fn put_aside(
        &mut self,
        name: &str,
        most: u64,
        scratch: &mut Scratch,
        mut is_possible: impl FnMut(&[u8]) -> bool,
    ) -> Result<Kept, ArchiveError> {
        let Part { mut bytes, len: claimed } = self.next(name)?;
        if claimed > most {
            let why = claims::ClaimError::Long { claimed, most };
            return Err(ArchiveError::Damaged(format!("its part {name}: {why}")));
        }
        let (mut at, mut left, mut some) = (None, claimed, vec![0; AT_ONCE]);
        while left > 0 {
            let len = AT_ONCE.min(left as usize);
            bytes.read_exact(&mut some[..len]).map_err(|e| broken(name, e))?;
            if !is_possible(&some[..len]) {
                return Err(ArchiveError::Damaged(format!("its {name} are none that the guest has")));
            }
            let whole = len.next_multiple_of(Scratch::SECTOR);
            some[len..whole].fill(0);
            let begin = scratch.append(&mut some[..whole]).map_err(ArchiveError::Aside)?;
            at.get_or_insert(begin);
            left -= len as u64;
        }
        Ok(Kept { at: at.unwrap_or(0), len: claimed })
    }

    /// What the snapshot is, and the number of its pages.
    fn about(&mut self) -> Result<(About, u64), ArchiveError> {
        let foreign = |why: String| ArchiveError::Foreign(why);
        let json = self.whole("snapshot.json", DESCRIPTION).map_err(|error| match error {
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
        claims::memory(bytes / OVERCOMMIT).map_err(|_| ArchiveError::Ram { gib: bytes >> 30, times: OVERCOMMIT })?;
        if about.images.len() != about.description.disks.len()
            || about.images.iter().any(|count| !(1..=MAX_IMAGES).contains(count))
        {
            return Err(foreign("its disks have no images, or too many".into()));
        }
        Ok((about, bytes / BLOCK as u64))
    }

    /// Makes the images of the disks in a directory, without their names yet, and names them in
    /// `about`.
    fn images(&mut self, about: &mut About, directory: &Path) -> Result<Vec<OutputFile>, ArchiveError> {
        let (safe, mut all) = (crate::file_name(&about.name), Vec::new());
        let named = |disk: usize, number: usize| format!("{safe}.{}", file_name(disk, number));
        for (disk, &count) in about.images.iter().enumerate() {
            let own = &mut about.description.disks[disk];
            own.image = std::path::absolute(directory.join(named(disk, 0)))?;
            let mut raw = own.raw;
            for number in 0..count {
                let (name, image) = (file_name(disk, number), directory.join(named(disk, number)));
                let Part { bytes, len } = self.next(&name)?;
                let out = OutputFile::create_new(&image)?;
                if copy(bytes, len, out.file()).map_err(image_error(&image))? < len {
                    return Err(ends_in(&name));
                }
                let below = (number + 1 < count).then(|| named(disk, number + 1));
                let shows = if raw {
                    below.map_or(Ok(false), |_| Err(foreign()))
                } else {
                    below_of(out.file(), below.as_deref())
                };
                raw = shows.map_err(|source| match source.kind() {
                    ErrorKind::InvalidData | ErrorKind::UnexpectedEof | ErrorKind::Other => {
                        ArchiveError::Damaged(format!("its image {name}: {source}"))
                    }
                    _ => ArchiveError::Image { image, source },
                })?;
                all.push(out);
            }
        }
        Ok(all)
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

/// Copies an image, in which zeros become holes; gives the number of bytes.
fn copy(from: impl Read, len: u64, mut to: &File) -> io::Result<u64> {
    let (mut from, mut some, mut done) = (from.take(len), Vec::with_capacity(HOLE), 0);
    while (&mut from).take(HOLE as u64).read_to_end(&mut some)? > 0 {
        match some.iter().all(|byte| *byte == 0) {
            true => drop(to.seek(SeekFrom::Current(some.len() as i64))?),
            false => to.write_all(&some)?,
        }
        done += some.len() as u64;
        some.clear();
    }
    to.set_len(done)?;
    Ok(done)
}

/// Sees that a qcow2 image is whole and shows no file but the one below it in the archive, whose
/// new name it gets: what its header names may be any file of this host. Gives whether that one is
/// raw.
fn below_of(mut file: &File, below: Option<&str>) -> io::Result<bool> {
    qcow2::ensure_whole(file)?;
    file.seek(SeekFrom::Start(0))?;
    match (qcow2::backing_of(file)?, below) {
        (None, None) => Ok(false),
        (Some(backing), Some(name)) => {
            qcow2::set_backing(file, name)?;
            Ok(backing.raw)
        }
        _ => Err(foreign()),
    }
}

fn foreign() -> io::Error {
    io::Error::other("it shows files that are not in the archive")
}
