//! Writing an archive.

use std::fs::File;
use std::io::{self, Read, Write};
use std::os::unix::fs::MetadataExt;

use checkpoint::{Image, ReadError};
use kmem::account::Account;
use mpool::{AlignedBuf, BLOCK};
use output::Progress;
use tar::{Builder, Header};
use xxhash_rust::xxh3::Xxh3;

use super::{About, ArchiveError, FORMAT, Summed, file_name, image_error};
use crate::clone::{CloneError, check_layers};
use crate::record::{Layer, Record};

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
    /// As whom its disks' images are read ([`reader`](crate::rights::reader)).
    pub account: &'a Account,
}

/// Writes a snapshot as an archive.
///
/// # Errors
/// If memory or images cannot be read or are not what was stored, or the stream cannot be written.
/// Then the archive lacks its sum.
pub fn export(what: &Exported<'_>, out: impl Write, progress: &Progress) -> Result<(), ArchiveError> {
    let description = &what.record.description;
    // Before, so that nothing is written in vain.
    let chains = || Ok(description.disks.iter().map(check_layers).collect::<Result<Vec<Vec<Layer>>, CloneError>>());
    let chains = what.account.with_files(chains)??;
    let about = About {
        format: FORMAT,
        name: what.name.into(),
        created: what.created,
        source: what.source.into(),
        regions: what.regions.into(),
        description: description.clone(),
        images: chains.iter().map(Vec::len).collect(),
        allocated: chains.iter().flatten().map(allocated).sum(),
    };
    let len = |image: &Layer| image.len;
    let bytes = (what.image.filled().count() * BLOCK) as u64 + chains.iter().flatten().map(len).sum::<u64>();
    progress.begin("writing the archive", Some(bytes));
    let mut out = Out { tar: Builder::new(progress.wrap_write(out)), sum: Xxh3::new() };
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
            // What is copied is what was stored, whatever has its name by now.
            let open = || Ok(claims::open(&image.image)?);
            let file = what.account.with_files(open).map_err(image_error(&image.image))?;
            ensure_same(&file, image)?;
            let copied = out.put(&file_name(disk, number), image.len, (&file).take(image.len));
            copied.map_err(image_error(&image.image))?;
            ensure_same(&file, image)?;
        }
    }
    let sum = format!("{:032x}", out.sum.digest128());
    out.put("xxh3", sum.len() as u64, sum.as_bytes())?;
    out.tar.into_inner()?.flush()?;
    Ok(())
}

/// Bytes that an image takes on its file system. What cannot be read is said when it is copied.
fn allocated(layer: &Layer) -> u64 {
    std::fs::metadata(&layer.image).map_or(0, |meta| meta.len().min(meta.blocks() * 512))
}

fn ensure_same(file: &File, stored: &Layer) -> Result<(), ArchiveError> {
    let now = Layer::new(&stored.image, &file.metadata().map_err(image_error(&stored.image))?);
    if now == *stored { Ok(()) } else { Err(CloneError::Changed(stored.clone(), now).into()) }
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
