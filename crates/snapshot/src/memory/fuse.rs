//! The kernel's FUSE protocol, as far as a file system of one file needs it that is only read.
//!
//! A request is read from the device, an answer written to it, each by one call. Numbers are in the
//! machine's order. Source: the kernel's include/uapi/linux/fuse.h, protocol 7.31.

use std::io::{self, IoSlice};
use std::os::fd::AsFd;

use mpool::BLOCK;

/// Numbers of requests.
pub(super) const LOOKUP: u32 = 1;
pub(super) const FORGET: u32 = 2;
pub(super) const GETATTR: u32 = 3;
pub(super) const OPEN: u32 = 14;
pub(super) const READ: u32 = 15;
pub(super) const RELEASE: u32 = 18;
pub(super) const FLUSH: u32 = 25;
pub(super) const INIT: u32 = 26;
pub(super) const INTERRUPT: u32 = 36;
pub(super) const BATCH_FORGET: u32 = 42;

/// The version that is spoken. Kernels speak older ones than their own.
const MAJOR: u32 = 7;
const MINOR: u32 = 31;
/// Flags of INIT: reads may be under way at the same time; a read may have many pages.
const ASYNC_READ: u32 = 1 << 0;
const MAX_PAGES: u32 = 1 << 22;
/// Pages of a read, at most.
const PAGES: u16 = 256;
/// The kernel keeps what it has read when the file is opened anew; and a closing of the file asks
/// nothing: nobody waits for an answer when the process that would give it is killed.
const KEEP_CACHE: u32 = 1 << 1;
const NO_FLUSH: u32 = 1 << 5;
/// Seconds for which the kernel may keep what it was told of the file: for ever.
const FOR_EVER: u64 = 1 << 30;

/// Bytes that a buffer for requests must have (`FUSE_MIN_READ_BUFFER`).
pub(super) const BUFFER: usize = 8192;
/// Bytes of the header of a request.
const IN_HEADER: usize = 40;
const OUT_HEADER: usize = 16;

/// Numbers of the root directory and of the file.
pub(super) const ROOT: u64 = 1;
pub(super) const FILE: u64 = 2;

/// A request of the kernel's.
#[derive(Clone, Copy)]
pub(super) struct Request<'a> {
    pub(super) kind: u32,
    /// By which the kernel finds it again.
    pub(super) unique: u64,
    /// What it is about.
    pub(super) node: u64,
    pub(super) body: &'a [u8],
}

impl<'a> Request<'a> {
    /// The request in a buffer. `None`: there is no whole one.
    pub(super) fn parse(bytes: &'a [u8]) -> Option<Self> {
        let len = u32_at(bytes, 0)? as usize;
        let body = bytes.get(IN_HEADER..len)?;
        Some(Self { kind: u32_at(bytes, 4)?, unique: u64_at(bytes, 8)?, node: u64_at(bytes, 16)?, body })
    }

    /// Offset and number of bytes that a `READ` asks for.
    pub(super) fn range(&self) -> Option<(u64, u32)> {
        Some((u64_at(self.body, 8)?, u32_at(self.body, 16)?))
    }

    /// Whether the kernel waits for an answer.
    pub(super) fn is_answered(&self) -> bool {
        !matches!(self.kind, FORGET | BATCH_FORGET | INTERRUPT)
    }
}

fn u32_at(bytes: &[u8], at: usize) -> Option<u32> {
    Some(u32::from_ne_bytes(*bytes.get(at..)?.first_chunk()?))
}

fn u64_at(bytes: &[u8], at: usize) -> Option<u64> {
    Some(u64::from_ne_bytes(*bytes.get(at..)?.first_chunk()?))
}

/// Answers a request.
///
/// # Errors
/// `ENOENT`: it was answered already, or whoever asked is gone. `ENODEV`: the file system has
/// ended.
pub(super) fn answer(device: impl AsFd, unique: u64, body: Result<&[u8], i32>) -> io::Result<()> {
    let bytes = body.unwrap_or_default();
    let mut header = Fields::default();
    header.u32((OUT_HEADER + bytes.len()) as u32).u32(body.err().map_or(0, |errno| -errno) as u32).u64(unique);
    rustix::io::writev(device, &[IoSlice::new(&header.0), IoSlice::new(bytes)])?;
    Ok(())
}

/// The answer to `INIT`; `None`: the kernel speaks another protocol.
pub(super) fn hello(request: &Request<'_>) -> Option<Vec<u8>> {
    let (major, read_ahead, flags) = (u32_at(request.body, 0)?, u32_at(request.body, 8)?, u32_at(request.body, 12)?);
    let mut out = Fields::default();
    out.u32(MAJOR).u32(MINOR).u32(read_ahead).u32(flags & (ASYNC_READ | MAX_PAGES));
    // Requests in the background, the number from which the kernel holds back, the longest write,
    // the clock's grain.
    out.u16(16).u16(12).u32(BLOCK as u32).u32(1).u16(PAGES);
    out.0.resize(INIT_OUT, 0);
    Some(out.0).filter(|_| major == MAJOR)
}

/// Bytes of answers: `fuse_init_out`, `fuse_attr`, `fuse_entry_out`, `fuse_attr_out`.
const INIT_OUT: usize = 64;
const ATTR: usize = 88;
const ENTRY_OUT: usize = 40 + ATTR;
const ATTR_OUT: usize = 16 + ATTR;

/// The answer to `LOOKUP` for the file.
pub(super) fn entry(size: u64) -> Vec<u8> {
    let mut out = Fields::default();
    out.u64(FILE).u64(0).u64(FOR_EVER).u64(FOR_EVER).u32(0).u32(0).attributes(FILE, size);
    debug_assert_eq!(out.0.len(), ENTRY_OUT);
    out.0
}

/// The answer to `GETATTR`.
pub(super) fn attributes(node: u64, size: u64) -> Vec<u8> {
    let mut out = Fields::default();
    out.u64(FOR_EVER).u32(0).u32(0).attributes(node, size);
    debug_assert_eq!(out.0.len(), ATTR_OUT);
    out.0
}

/// The answer to `OPEN`.
pub(super) fn opened() -> Vec<u8> {
    let mut out = Fields::default();
    out.u64(0).u32(KEEP_CACHE | NO_FLUSH).u32(0);
    out.0
}

/// Numbers, one behind the other.
#[derive(Default)]
struct Fields(Vec<u8>);

impl Fields {
    fn u16(&mut self, value: u16) -> &mut Self {
        self.0.extend(value.to_ne_bytes());
        self
    }

    fn u32(&mut self, value: u32) -> &mut Self {
        self.0.extend(value.to_ne_bytes());
        self
    }

    fn u64(&mut self, value: u64) -> &mut Self {
        self.0.extend(value.to_ne_bytes());
        self
    }

    /// `struct fuse_attr`.
    fn attributes(&mut self, node: u64, size: u64) -> &mut Self {
        let is_file = node == FILE;
        let size = if is_file { size } else { 0 };
        // QEMU opens the file for writing too, and maps it privately.
        let mode = if is_file { libc::S_IFREG | 0o600 } else { libc::S_IFDIR | 0o500 };
        let (uid, gid) = (rustix::process::geteuid(), rustix::process::getegid());
        self.u64(node).u64(size).u64(size / 512);
        // Times are 1970.
        self.u64(0).u64(0).u64(0).u32(0).u32(0).u32(0);
        self.u32(mode).u32(1).u32(uid.as_raw()).u32(gid.as_raw()).u32(0).u32(BLOCK as u32).u32(0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn request(kind: u32, body: &[u8]) -> Vec<u8> {
        let mut bytes = Fields::default();
        bytes.u32((IN_HEADER + body.len()) as u32).u32(kind).u64(7).u64(FILE).u32(0).u32(0).u32(0).u32(0);
        bytes.0.extend(body);
        bytes.0
    }

    #[test]
    fn a_request_is_understood_only_whole() {
        let mut body = Fields::default();
        body.u64(1).u64(4096).u32(8192).u32(0);
        let bytes = request(READ, &body.0);
        let parsed = Request::parse(&bytes).unwrap();
        assert_eq!((parsed.kind, parsed.unique, parsed.node), (READ, 7, FILE));
        assert_eq!(parsed.range(), Some((4096, 8192)));
        for len in 0..bytes.len() {
            assert!(Request::parse(&bytes[..len]).is_none(), "{len}");
        }
        // An empty slot.
        assert!(Request::parse(&[0; BUFFER]).is_none());
        assert!(Request::parse(&request(READ, &[])).unwrap().range().is_none());
    }

    #[test]
    fn answers_have_the_lengths_of_the_kernels_structures() {
        assert_eq!((entry(4096).len(), attributes(ROOT, 0).len(), opened().len()), (ENTRY_OUT, ATTR_OUT, 16));
        let init = |major: u32| [major, 38, 131_072, u32::MAX].iter().flat_map(|n| n.to_ne_bytes()).collect::<Vec<_>>();
        let answer = |major: u32| hello(&Request::parse(&request(INIT, &init(major))).unwrap());
        assert_eq!(answer(7).unwrap().len(), INIT_OUT);
        assert!(answer(8).is_none());
    }
}
