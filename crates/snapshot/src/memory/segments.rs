//! A snapshot's RAM for clones that are merged: memfds that nobody can change any more.
//!
//! Each is as long as a segment of the store. The agent in each clone maps them
//! (`agent/intercept/snapshot.rs`), and the daemon takes them into its store. So all clones of a
//! snapshot are merged from the beginning, and later equal pages are merged with the same frames.
//!
//! All that is not zeros is read from the pool once, before the first clone starts. Which pages lie
//! where is the [`plan`]'s business, which the agent gets too. Programs that start clones of the
//! same snapshot for the same user and domain later get the segments from one that has them
//! ([`door`]).

mod door;
mod plan;

use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::net::SocketAddr;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, OnceLock};

use checkpoint::{Image, ReadError};
use kmem::PAGE_SIZE;
use kmem::memfd::{self, MemfdError};
use mpool::AlignedBuf;
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use wire::SEGMENT_PAGES;

use door::{Door, address, ask};
use plan::{Fill, Plan};

/// Their name, as `/proc/PID/maps` shows it.
const NAME: &str = "pageone:snapshot";
/// Bytes of each.
const LEN: usize = SEGMENT_PAGES as usize * PAGE_SIZE;
/// Pages that are read at once.
const AT_ONCE: u32 = 256;
/// Segments that are read at once: most of the time is the disk's.
const THREADS: u32 = 8;
/// Why there are none.
#[derive(Debug, thiserror::Error)]
pub enum SegmentsError {
    /// A page cannot be read.
    #[error(transparent)]
    Read(#[from] ReadError),
    /// There is no memory, or there are too many open files.
    #[error("the memory that the guests are to have in common cannot be had: {0}")]
    Memory(#[source] io::Error),
}

impl From<MemfdError> for SegmentsError {
    fn from(error: MemfdError) -> Self {
        Self::Memory(io::Error::other(error))
    }
}

impl From<rustix::io::Errno> for SegmentsError {
    fn from(error: rustix::io::Errno) -> Self {
        Self::Memory(error.into())
    }
}

/// The segments of a snapshot.
pub struct Segments {
    plan: OwnedFd,
    all: Arc<Vec<OwnedFd>>,
    address: SocketAddr,
    door: Option<Door>,
}

impl Segments {
    /// Gets them of another program, or reads them from the pool. `name` stands for snapshot and
    /// domain.
    ///
    /// # Errors
    /// If a page cannot be read, or there is no memory.
    pub fn of(image: &Image, name: &str) -> Result<Self, SegmentsError> {
        let too_many = |_| SegmentsError::Memory(io::ErrorKind::FileTooLarge.into());
        let pages = u32::try_from(image.pages()).map_err(too_many)?;
        let plan = Plan::new(pages, |page| image.place(page.into()).map(Into::into));
        allow_files(plan.segments().into());
        let bytes = wire::encode_parts(plan.parts());
        // One of another version may plan otherwise.
        let name = format!("{name} {:x}", xxhash_rust::xxh3::xxh3_128(&bytes));
        let address = address(&name).map_err(SegmentsError::Memory)?;
        let table = memfd::create_written(NAME, bytes.len(), |fd| write(fd, &bytes, 0))?;
        if let Ok(all) = ask(&address, plan.segments() as usize) {
            return Ok(Self { plan: table, all: Arc::new(all), address, door: None });
        }
        // First of all: programs that start at the same time wait for this one.
        let known = Arc::new(OnceLock::new());
        let door = Door::open(&address, &known);
        let all = Arc::new(read(image, &plan)?);
        let _ = known.set(all.clone());
        Ok(Self { plan: table, all, address, door })
    }

    /// Which pages lie where in them.
    pub fn plan(&self) -> &OwnedFd {
        &self.plan
    }

    /// All of them, in order.
    pub fn all(&self) -> &[OwnedFd] {
        &self.all
    }

    /// Gives them to others if the program that did so has ended. To be called again and again.
    pub fn watch(&mut self) {
        if self.door.is_none() {
            self.door = Door::open(&self.address, &Arc::new(OnceLock::from(self.all.clone())));
        }
    }
}

/// Has this program, and those that it starts, open that many files more, as far as it may.
fn allow_files(count: u64) {
    let limit = getrlimit(Resource::Nofile);
    // The agent takes a quarter of what QEMU may open.
    let wanted = limit.current.map(|now| now.max(8 * count + 1024).min(limit.maximum.unwrap_or(u64::MAX)));
    let _ = setrlimit(Resource::Nofile, Rlimit { current: wanted, maximum: limit.maximum });
}

/// Reads them from the pool.
fn read(image: &Image, plan: &Plan) -> Result<Vec<OwnedFd>, SegmentsError> {
    let (next, count) = (AtomicU32::new(0), plan.segments());
    let work = || -> Result<Vec<(u32, OwnedFd)>, SegmentsError> {
        let (mut done, mut bytes) = (Vec::new(), AlignedBuf::zeroed(AT_ONCE as usize * PAGE_SIZE));
        loop {
            let at = next.fetch_add(1, Ordering::Relaxed);
            if at >= count {
                return Ok(done);
            }
            let fill = |fd: &OwnedFd| plan.of_segment(at).try_for_each(|run| fill(fd, image, run, &mut bytes));
            done.push((at, memfd::create_written(NAME, LEN, fill)?));
        }
    };
    let threads = THREADS.min(count);
    let parts: Vec<_> = std::thread::scope(|scope| {
        let all: Vec<_> = (0..threads).map(|_| scope.spawn(work)).collect();
        let panicked = || Err(SegmentsError::Memory(io::Error::other("a thread panicked")));
        all.into_iter().map(|thread| thread.join().unwrap_or_else(|_| panicked())).collect()
    });
    let mut all = Vec::with_capacity(count as usize);
    for part in parts {
        all.extend(part?);
    }
    all.sort_by_key(|(at, _)| *at);
    Ok(all.into_iter().map(|(_, fd)| fd).collect())
}

/// Writes what lies in some slots of one of them. Zeros stay holes.
fn fill(fd: &OwnedFd, image: &Image, what: Fill, bytes: &mut AlignedBuf) -> Result<(), SegmentsError> {
    for done in (0..what.len).step_by(AT_ONCE as usize) {
        let bytes = &mut bytes[..(what.len - done).min(AT_ONCE) as usize * PAGE_SIZE];
        if what.repeats {
            image.read(what.page.into(), &mut bytes[..PAGE_SIZE])?;
            (1..bytes.len() / PAGE_SIZE).for_each(|page| bytes.copy_within(..PAGE_SIZE, page * PAGE_SIZE));
        } else {
            image.read((what.page + done).into(), bytes)?;
        }
        let (base, mut at) = (u64::from(what.slot % SEGMENT_PAGES + done) * PAGE_SIZE as u64, 0);
        let pages: Vec<&[u8]> = bytes.chunks_exact(PAGE_SIZE).collect();
        for run in pages.chunk_by(|a, b| is_zero(a) == is_zero(b)) {
            let end = at + run.len() * PAGE_SIZE;
            if !is_zero(run[0]) {
                write(fd, &bytes[at..end], base + at as u64)?;
            }
            at = end;
        }
    }
    Ok(())
}

fn is_zero(page: &[u8]) -> bool {
    static ZEROS: [u8; PAGE_SIZE] = [0; PAGE_SIZE];
    page == ZEROS
}

fn write(fd: &OwnedFd, mut bytes: &[u8], mut offset: u64) -> Result<(), SegmentsError> {
    while !bytes.is_empty() {
        let written = rustix::io::retry_on_intr(|| rustix::io::pwrite(fd, bytes, offset))?;
        (bytes, offset) = (&bytes[written..], offset + written as u64);
    }
    Ok(())
}

/// A segment of a test, or something like that.
#[cfg(test)]
fn segment(len: usize) -> Result<OwnedFd, SegmentsError> {
    memfd::create_written(NAME, len, |fd| write(fd, &[7; PAGE_SIZE], 0))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn memory_that_cannot_be_had_is_said() {
        for call in [libc::SYS_memfd_create, libc::SYS_pwrite64] {
            let error: SegmentsError = kmem::testing::refusing(call, None, libc::ENOMEM, || segment(LEN)).unwrap_err();
            let text = error.to_string();
            assert!(text.starts_with("the memory that the guests are to have in common cannot be had: "), "{text}");
        }
    }
}
