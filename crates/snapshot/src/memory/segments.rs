//! A snapshot's RAM for clones that are merged: memfds that nobody can change any more.
//!
//! Each is as long as a segment of the store, and has that part of the RAM in the order of its
//! pages; pages of zeros are holes. The agent in each clone maps them
//! (`agent/intercept/snapshot.rs`), and the daemon takes them into its store. So all clones of a
//! snapshot are merged from the beginning, and later equal pages are merged with the same frames.
//!
//! All that is not zeros is read from the pool once, before the first clone starts. Programs that
//! start clones of the same snapshot for the same user and domain later get the segments from one
//! that has them, through a socket without a file, whose name says all three.

use std::io::{self, IoSlice, IoSliceMut, Read, Write};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, OwnedFd};
use std::os::linux::net::SocketAddrExt;
use std::os::unix::net::{SocketAddr, UnixListener, UnixStream};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};
use std::thread::JoinHandle;
use std::time::Duration;

use checkpoint::{Image, ReadError};
use kmem::PAGE_SIZE;
use kmem::memfd::{self, MemfdError};
use mpool::AlignedBuf;
use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer, SendAncillaryMessage, SendFlags,
    recvmsg, sendmsg, sockopt,
};
use rustix::process::{Resource, Rlimit, geteuid, getrlimit, setrlimit};
use wire::SEGMENT_PAGES;

/// Their name, as `/proc/PID/maps` shows it.
const NAME: &str = "pageone:snapshot";
/// Bytes of each.
const LEN: usize = SEGMENT_PAGES as usize * PAGE_SIZE;
/// Pages that are read at once.
const AT_ONCE: u64 = 256;
/// How long another program may take to read the snapshot.
const PATIENCE: Duration = Duration::from_secs(60);
/// How long a program that asks may take to read the answer.
const ANSWER: Duration = Duration::from_secs(5);

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
        let count = image.pages().div_ceil(SEGMENT_PAGES.into()) as usize;
        allow_files(count as u64);
        let address = address(name).map_err(SegmentsError::Memory)?;
        if let Ok(all) = ask(&address, count) {
            return Ok(Self { all: Arc::new(all), address, door: None });
        }
        // First of all: programs that start at the same time wait for this one.
        let known = Arc::new(OnceLock::new());
        let door = Door::open(&address, &known);
        let all = Arc::new(read(image, count)?);
        let _ = known.set(all.clone());
        Ok(Self { all, address, door })
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

/// Reads them from the pool, with all processors.
fn read(image: &Image, count: usize) -> Result<Vec<OwnedFd>, SegmentsError> {
    let next = AtomicU64::new(0);
    let work = || -> Result<Vec<(u64, OwnedFd)>, SegmentsError> {
        let (mut done, mut bytes) = (Vec::new(), AlignedBuf::zeroed(AT_ONCE as usize * PAGE_SIZE));
        loop {
            let at = next.fetch_add(1, Ordering::Relaxed);
            if at >= count as u64 {
                return Ok(done);
            }
            done.push((at, memfd::create_written(NAME, LEN, |fd| fill(fd, image, at, &mut bytes))?));
        }
    };
    let threads = std::thread::available_parallelism().map_or(1, usize::from).min(count);
    let parts: Vec<_> = std::thread::scope(|scope| {
        let all: Vec<_> = (0..threads).map(|_| scope.spawn(work)).collect();
        let panicked = || Err(SegmentsError::Memory(io::Error::other("a thread panicked")));
        all.into_iter().map(|thread| thread.join().unwrap_or_else(|_| panicked())).collect()
    });
    let mut all = Vec::with_capacity(count);
    for part in parts {
        all.extend(part?);
    }
    all.sort_by_key(|(at, _)| *at);
    Ok(all.into_iter().map(|(_, fd)| fd).collect())
}

/// Writes one of them.
fn fill(fd: &OwnedFd, image: &Image, at: u64, bytes: &mut AlignedBuf) -> Result<(), SegmentsError> {
    let first = at * u64::from(SEGMENT_PAGES);
    let end = (first + u64::from(SEGMENT_PAGES)).min(image.pages());
    for page in (first..end).step_by(AT_ONCE as usize) {
        let bytes = &mut bytes[..(end - page).min(AT_ONCE) as usize * PAGE_SIZE];
        image.read(page, bytes)?;
        let pages: Vec<&[u8]> = bytes.chunks_exact(PAGE_SIZE).collect();
        let mut offset = (page - first) * PAGE_SIZE as u64;
        for run in pages.chunk_by(|a, b| is_zero(a) == is_zero(b)) {
            let len = run.len() * PAGE_SIZE;
            if !is_zero(run[0]) {
                write(fd, &bytes[(offset - (page - first) * PAGE_SIZE as u64) as usize..][..len], offset)?;
            }
            offset += len as u64;
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

/// Where they are given to others.
struct Door {
    address: SocketAddr,
    ends: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
}

fn address(name: &str) -> io::Result<SocketAddr> {
    let name = xxhash_rust::xxh3::xxh3_128(name.as_bytes());
    SocketAddr::from_abstract_name(format!("pageone-segments-{}-{name:032x}", geteuid().as_raw()))
}

impl Door {
    /// Opens it, unless somebody else has. Who comes before `segments` are known waits.
    fn open(address: &SocketAddr, segments: &Arc<OnceLock<Arc<Vec<OwnedFd>>>>) -> Option<Self> {
        let listener = UnixListener::bind_addr(address).ok()?;
        let (ends, segments) = (Arc::new(AtomicBool::new(false)), segments.clone());
        let ending = ends.clone();
        let thread = std::thread::spawn(move || {
            for stream in listener.incoming().flatten() {
                while segments.get().is_none() && !ending.load(Ordering::Acquire) {
                    std::thread::sleep(Duration::from_millis(1));
                }
                if ending.load(Ordering::Acquire) {
                    return;
                }
                if is_trusted(&stream)
                    && let Some(all) = segments.get()
                {
                    // One that is gone needs no answer.
                    let _ = stream.set_write_timeout(Some(ANSWER)).and_then(|()| give(&stream, all));
                }
            }
        });
        Some(Self { address: address.clone(), ends, thread: Some(thread) })
    }
}

impl Drop for Door {
    fn drop(&mut self) {
        self.ends.store(true, Ordering::Release);
        // Wakes the thread.
        let woken = UnixStream::connect_addr(&self.address);
        if let Some(thread) = self.thread.take().filter(|_| woken.is_ok()) {
            let _ = thread.join();
        }
    }
}

/// Whether the other side is of this user.
fn is_trusted(stream: &UnixStream) -> bool {
    sockopt::socket_peercred(stream).is_ok_and(|peer| peer.uid == geteuid())
}

/// Gives their number, and a byte with each.
fn give(mut stream: &UnixStream, all: &[OwnedFd]) -> io::Result<()> {
    stream.write_all(&(all.len() as u32).to_le_bytes())?;
    for fd in all {
        let fds = [fd.as_fd()];
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
        let mut control = SendAncillaryBuffer::new(&mut space);
        control.push(SendAncillaryMessage::ScmRights(&fds));
        sendmsg(stream, &[IoSlice::new(&[0])], &mut control, SendFlags::NOSIGNAL)?;
    }
    Ok(())
}

/// Asks for them.
fn ask(address: &SocketAddr, count: usize) -> io::Result<Vec<OwnedFd>> {
    let mut stream = UnixStream::connect_addr(address)?;
    if !is_trusted(&stream) {
        return Err(io::ErrorKind::PermissionDenied.into());
    }
    stream.set_read_timeout(Some(PATIENCE))?;
    let mut number = [0; 4];
    stream.read_exact(&mut number)?;
    if u32::from_le_bytes(number) as usize != count {
        return Err(io::ErrorKind::InvalidData.into());
    }
    let all: Vec<OwnedFd> = (0..count).map(|_| receive(&stream)).collect::<io::Result<_>>()?;
    let is_whole = |fd: &OwnedFd| {
        memfd::require_written(fd).is_ok() && rustix::fs::fstat(fd).is_ok_and(|stat| stat.st_size as usize == LEN)
    };
    if all.iter().all(is_whole) { Ok(all) } else { Err(io::ErrorKind::InvalidData.into()) }
}

fn receive(stream: &UnixStream) -> io::Result<OwnedFd> {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut control = RecvAncillaryBuffer::new(&mut space);
    let mut byte = [0];
    recvmsg(stream, &mut [IoSliceMut::new(&mut byte)], &mut control, RecvFlags::CMSG_CLOEXEC)?;
    let fds = control.drain().filter_map(|message| match message {
        RecvAncillaryMessage::ScmRights(fds) => fds.last(),
        _ => None,
    });
    fds.last().ok_or_else(|| io::ErrorKind::UnexpectedEof.into())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn segment(len: usize) -> OwnedFd {
        memfd::create_written(NAME, len, |fd| write(fd, &[7; PAGE_SIZE], 0)).unwrap()
    }

    #[test]
    fn memory_that_cannot_be_had_is_said() {
        let make = || memfd::create_written(NAME, LEN, |fd| write(fd, &[7; PAGE_SIZE], 0));
        for call in [libc::SYS_memfd_create, libc::SYS_pwrite64] {
            let error: SegmentsError = kmem::testing::refusing(call, None, libc::ENOMEM, make).unwrap_err();
            let text = error.to_string();
            assert!(text.starts_with("the memory that the guests are to have in common cannot be had: "), "{text}");
        }
    }

    #[test]
    fn another_program_gets_them_when_they_are_there_and_only_what_nobody_can_change() {
        let address = address(&format!("test {}", std::process::id())).unwrap();
        assert!(ask(&address, 2).is_err(), "nobody is there");
        let later = Arc::new(OnceLock::new());
        let door = Door::open(&address, &later).unwrap();
        assert!(Door::open(&address, &later).is_none(), "one program at a time");
        let all = Arc::new(vec![segment(LEN), segment(LEN)]);
        let got = std::thread::scope(|scope| {
            let asks = scope.spawn(|| ask(&address, 2));
            std::thread::sleep(Duration::from_millis(50));
            assert!(!asks.is_finished(), "it waits until they are read");
            later.set(all.clone()).unwrap();
            asks.join().unwrap().unwrap()
        });
        let ids = |all: &[OwnedFd]| all.iter().map(|fd| memfd::identity(fd).unwrap()).collect::<Vec<_>>();
        assert_eq!(ids(&got), ids(&all));
        assert!(ask(&address, 3).is_err(), "another number");
        drop(door);
        for wrong in [segment(LEN / 2), memfd::create_sealed(NAME, LEN).unwrap().0] {
            let door = Door::open(&address, &Arc::new(OnceLock::from(Arc::new(vec![wrong])))).unwrap();
            assert!(ask(&address, 1).is_err());
            drop(door);
        }
    }
}
