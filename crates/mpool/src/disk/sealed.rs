//! A directory whose files are encrypted: a medium over a medium.
//!
//! Superblocks and key files are as they are. All others are encrypted sector by sector, with keys
//! of their own, the number of the sector being the tweak. So everything above, checksums too, is
//! about what was written; and a bit that has changed below becomes sixteen bytes that do not match
//! their checksum. Parts that are punched are whole sectors, and so are lengths.

use std::collections::VecDeque;
use std::io::{self, Read};
use std::os::fd::{BorrowedFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use parking_lot::Mutex;

use super::buffer::AlignedBuf;
use super::key::{self, Keys};
use super::medium::{Access, EachLease, Medium, MediumFile, Open, ReadPiece, Room};
use super::superblock;
use super::xts::{SECTOR, Xts};
use crate::{BLOCK, MediaClass};

/// Parts of [`MediumFile::write_while`] that are encrypted while as many are being written.
const AT_ONCE: usize = 4;
/// Bytes of the longest part whose memory is kept for the next.
const PART: usize = 1 << 20;

/// Methods that what lies below answers.
macro_rules! as_below {
    ($below:ident: $($name:ident($($argument:ident: $kind:ty),*) -> $gives:ty,)+) => {
        $(fn $name(&self $(, $argument: $kind)*) -> $gives {
            self.$below.$name($($argument),*)
        })+
    };
}

/// The directory of a class, encrypted if the pool is.
pub(crate) fn over(medium: Arc<dyn Medium>, keys: Option<&Arc<Keys>>, class: MediaClass) -> Arc<dyn Medium> {
    match keys {
        Some(keys) => Arc::new(Sealed { medium, keys: keys.clone(), class }),
        None => medium,
    }
}

struct Sealed {
    medium: Arc<dyn Medium>,
    keys: Arc<Keys>,
    class: MediaClass,
}

impl Medium for Sealed {
    as_below! { medium:
        path() -> &Path,
        remove(name: &str) -> io::Result<()>,
        list() -> io::Result<Vec<String>>,
        sync_names() -> io::Result<()>,
        lock(access: Access) -> io::Result<bool>,
        identity() -> io::Result<u64>,
        room() -> io::Result<Room>,
    }

    fn open(&self, name: &str, how: Open) -> io::Result<Arc<dyn MediumFile>> {
        let file = self.medium.open(name, how)?;
        if superblock::NAMES.contains(&name) || key::NAMES.contains(&name) {
            return Ok(file);
        }
        Ok(Arc::new(SealedFile { file, xts: self.keys.of_file(self.class, name), spare: Mutex::default() }))
    }

    fn lease(&self, bytes: &[u8]) -> io::Result<OwnedFd> {
        let mut number = [0; 16];
        rustix::rand::getrandom(&mut number, rustix::rand::GetRandomFlags::empty())?;
        self.medium.lease(&SealedLease { path: self.path().into(), number }.encode(bytes, &self.keys))
    }

    fn leases(&self, each: &mut EachLease<'_>) -> io::Result<()> {
        self.medium.leases(&mut |name, len, from| {
            let mut head = Vec::new();
            from.take(HEAD).read_to_end(&mut head)?;
            match SealedLease::decode(&head, len) {
                Some((lease, start, plain)) => {
                    let (xts, from) = (self.keys.of_lease(&lease.number), head[start..].chain(from));
                    each(name, plain, &mut Unsealed { from, xts, next: 0, buffer: VecDeque::new() })
                }
                // One that is not ours stays as it is: it is not understood, and obeyed.
                None => each(name, len, &mut head.chain(from)),
            }
        })
    }
}

const LEASE: &[u8; 8] = b"PGLEASEX";
/// Bytes that have all before the sectors: a path is no longer than `PATH_MAX`.
const HEAD: u64 = 40 + 4096;
/// Bytes of a lease that are decrypted at once.
const UNSEALED: u64 = 64 << 10;

/// A lease of an encrypted pool, which says where the pool is and nothing else: `PGLEASEX`, length
/// of the path of the capacity class (8), length of the lease (8), a random number (16), the path,
/// the lease with zeros up to a whole sector, encrypted.
pub(crate) struct SealedLease {
    pub(crate) path: PathBuf,
    number: [u8; 16],
}

impl SealedLease {
    fn encode(&self, plain: &[u8], keys: &Keys) -> Vec<u8> {
        use std::os::unix::ffi::OsStrExt;
        let path = self.path.as_os_str().as_bytes();
        let mut sectors = plain.to_vec();
        sectors.resize(plain.len().next_multiple_of(SECTOR), 0);
        keys.of_lease(&self.number).encrypt(&mut sectors, 0);
        let lengths = [path.len(), plain.len()].map(|len| (len as u64).to_le_bytes());
        [&LEASE[..], &lengths[0], &lengths[1], &self.number, path, &sectors].concat()
    }

    /// The lease of so many bytes that begins so, where what is encrypted begins, and its length.
    pub(crate) fn decode(head: &[u8], all: u64) -> Option<(Self, usize, u64)> {
        use std::os::unix::ffi::OsStrExt;
        let (path_len, rest) = head.strip_prefix(LEASE)?.split_first_chunk()?;
        let (len, rest) = rest.split_first_chunk()?;
        let (number, rest) = rest.split_first_chunk()?;
        let (path, rest) = rest.split_at_checked(usize::try_from(u64::from_le_bytes(*path_len)).ok()?)?;
        let (start, len) = (head.len() - rest.len(), u64::from_le_bytes(*len));
        let fits = len.checked_next_multiple_of(SECTOR as u64) == all.checked_sub(start as u64);
        let path = std::ffi::OsStr::from_bytes(path).into();
        fits.then_some((Self { path, number: *number }, start, len))
    }

    /// What these sectors hold, of so many bytes.
    pub(crate) fn plain(&self, mut sectors: Vec<u8>, len: u64, keys: &Keys) -> Vec<u8> {
        keys.of_lease(&self.number).decrypt(&mut sectors, 0);
        sectors.truncate(len as usize);
        sectors
    }
}

/// Decrypts what it reads.
struct Unsealed<R> {
    from: R,
    xts: Xts,
    /// The number of the sector behind those in the buffer.
    next: u64,
    buffer: VecDeque<u8>,
}

impl<R: Read> Read for Unsealed<R> {
    fn read(&mut self, into: &mut [u8]) -> io::Result<usize> {
        if self.buffer.is_empty() {
            let mut part = Vec::new();
            self.from.by_ref().take(UNSEALED).read_to_end(&mut part)?;
            part.truncate(part.len() / SECTOR * SECTOR);
            self.xts.decrypt(&mut part, self.next);
            self.next += (part.len() / SECTOR) as u64;
            self.buffer = part.into();
        }
        self.buffer.read(into)
    }
}

struct SealedFile {
    file: Arc<dyn MediumFile>,
    xts: Xts,
    /// Memory for parts that are written.
    spare: Mutex<Vec<AlignedBuf>>,
}

const _: () = assert!(BLOCK.is_multiple_of(SECTOR));

fn is_whole(offset: u64, len: usize) -> bool {
    offset.is_multiple_of(SECTOR as u64) && len.is_multiple_of(SECTOR)
}

impl SealedFile {
    /// Reads and decrypts whole sectors; what is behind the end of the file is zeros.
    fn read_sectors(&self, into: &mut [u8], offset: u64) -> io::Result<()> {
        let there = self.file.len()?.saturating_sub(offset).min(into.len() as u64) as usize;
        let (now, behind) = into.split_at_mut(there);
        if !now.is_empty() {
            self.file.read_at(now, offset)?;
        }
        behind.fill(0);
        self.xts.decrypt(into, offset / SECTOR as u64);
        Ok(())
    }

    /// The bytes, encrypted, in memory that direct I/O accepts.
    fn seal(&self, bytes: &[u8], offset: u64) -> AlignedBuf {
        let fits = |buffer: &AlignedBuf| buffer.len() == bytes.len().next_multiple_of(BLOCK);
        let mut buffer = self.spare.lock().pop().filter(fits).unwrap_or_else(|| AlignedBuf::zeroed(bytes.len()));
        let blocks = (offset / SECTOR as u64..).step_by(BLOCK / SECTOR);
        // Copied block by block, each of which is encrypted while the CPU's cache has it.
        for (first, (into, from)) in blocks.zip(buffer.chunks_mut(BLOCK).zip(bytes.chunks(BLOCK))) {
            let into = &mut into[..from.len()];
            into.copy_from_slice(from);
            self.xts.encrypt(into, first);
        }
        buffer
    }

    fn keep(&self, buffers: Vec<AlignedBuf>) {
        let mut spare = self.spare.lock();
        let room = (2 * AT_ONCE).saturating_sub(spare.len());
        spare.extend(buffers.into_iter().filter(|buffer| buffer.len() == PART).take(room));
    }
}

impl MediumFile for SealedFile {
    as_below! { file:
        len() -> io::Result<u64>,
        used() -> io::Result<u64>,
        is_direct() -> bool,
        punches() -> bool,
        sync() -> io::Result<()>,
        sync_both(other: &dyn MediumFile) -> io::Result<()>,
        descriptor() -> Option<BorrowedFd<'_>>,
        allocate(offset: u64, len: u64) -> io::Result<()>,
        punch(offset: u64, len: u64) -> io::Result<()>,
        clear(offset: u64, len: u64) -> io::Result<()>,
    }

    fn read_at(&self, into: &mut [u8], offset: u64) -> io::Result<()> {
        if is_whole(offset, into.len()) {
            self.file.read_at(into, offset)?;
            self.xts.decrypt(into, offset / SECTOR as u64);
            return Ok(());
        }
        let (sector, end) = (SECTOR as u64, offset + into.len() as u64);
        if end > self.file.len()? {
            return Err(io::ErrorKind::UnexpectedEof.into());
        }
        let start = offset / sector * sector;
        let mut sectors = vec![0; (end.next_multiple_of(sector) - start) as usize];
        self.read_sectors(&mut sectors, start)?;
        into.copy_from_slice(&sectors[(offset - start) as usize..][..into.len()]);
        Ok(())
    }

    /// `from` ends where a sector does. Its first one may hold something before it, which is read,
    /// and written again with it: it is of the same block, so nothing in it is durable yet.
    fn write_at(&self, from: &[u8], offset: u64) -> io::Result<()> {
        let start = offset / SECTOR as u64 * SECTOR as u64;
        let before = (offset - start) as usize;
        if !(before + from.len()).is_multiple_of(SECTOR) {
            return Err(io::Error::new(io::ErrorKind::InvalidInput, "a write that ends inside of a sector"));
        }
        let sealed = if before == 0 {
            self.seal(from, offset)
        } else {
            let mut first = [0; SECTOR];
            self.read_sectors(&mut first, start)?;
            self.seal(&[&first[..before], from].concat(), start)
        };
        let written = self.file.write_at(&sealed[..before + from.len()], start);
        self.keep(vec![sealed]);
        written
    }

    /// Keeps the sector that it cuts, which cannot be read in part: a log that is cut where its
    /// last frame ends has that block written again before anything follows it.
    fn set_len(&self, len: u64) -> io::Result<()> {
        self.file.set_len(len.next_multiple_of(SECTOR as u64))
    }

    fn read_many(&self, pieces: &mut [ReadPiece<'_>]) -> io::Result<()> {
        if !pieces.iter().all(|piece| is_whole(piece.offset, piece.into.len())) {
            return pieces.iter_mut().try_for_each(|piece| self.read_at(piece.into, piece.offset));
        }
        self.file.read_many(pieces)?;
        for piece in pieces {
            self.xts.decrypt(piece.into, piece.offset / SECTOR as u64);
        }
        Ok(())
    }

    fn write_while(&self, parts: &[&[u8]], mut offset: u64, meanwhile: &mut dyn FnMut(&[u8])) -> io::Result<()> {
        if parts.iter().any(|part| !is_whole(offset, part.len())) {
            return parts.iter().try_for_each(|part| {
                meanwhile(part);
                self.write_at(part, offset)?;
                offset += part.len() as u64;
                Ok(())
            });
        }
        let (mut left, mut at) = (parts.iter(), offset);
        let mut seal_next = || {
            let part = left.next()?;
            meanwhile(part);
            at += part.len() as u64;
            Some((self.seal(part, at - part.len() as u64), part.len()))
        };
        // The first are few, so that the medium has something soon.
        let mut now: Vec<_> = seal_next().into_iter().collect();
        while !now.is_empty() {
            let sealed: Vec<&[u8]> = now.iter().map(|(buffer, len)| &buffer[..*len]).collect();
            let (mut next, bytes) = (Vec::new(), sealed.iter().map(|part| part.len() as u64).sum::<u64>());
            // While these are written the next ones are encrypted.
            let (mut share, each) = (AT_ONCE, AT_ONCE.div_ceil(sealed.len()));
            self.file.write_while(&sealed, offset, &mut |_| {
                let some = each.min(share);
                share -= some;
                next.extend((0..some).map_while(|_| seal_next()));
            })?;
            offset += bytes;
            self.keep(now.into_iter().map(|(buffer, _)| buffer).collect());
            now = next;
        }
        Ok(())
    }

    fn read_while(&self, into: &mut [u8], offset: u64, landed: &mut dyn FnMut(usize, &mut [u8])) -> io::Result<()> {
        if !is_whole(offset, into.len()) {
            self.read_at(into, offset)?;
            landed(0, into);
            return Ok(());
        }
        self.file.read_while(into, offset, &mut |at, part| {
            self.xts.decrypt(part, (offset + at as u64) / SECTOR as u64);
            landed(at, part);
        })
    }
}
