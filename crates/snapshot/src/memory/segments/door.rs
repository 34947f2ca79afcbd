//! Segments for other programs of the same user that start clones of the same snapshot: a socket
//! without a file, whose name stands for snapshot and domain.

use std::io::{self, IoSlice, IoSliceMut, Read, Write};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, OwnedFd};
use std::os::linux::net::SocketAddrExt;
use std::os::unix::net::{SocketAddr, UnixListener, UnixStream};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, OnceLock};
use std::thread::JoinHandle;
use std::time::Duration;

use kmem::memfd;
use kmem::peer::connect_within;
use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer, SendAncillaryMessage, SendFlags,
    Shutdown, recvmsg, sendmsg, shutdown, sockopt,
};
use rustix::process::geteuid;

use super::LEN;

/// How long another program may take to read the snapshot.
const PATIENCE: Duration = Duration::from_secs(60);
/// How long a program that asks may take to read the answer.
const ANSWER: Duration = Duration::from_secs(5);

/// Where they are given to others.
pub(super) struct Door {
    listener: Arc<UnixListener>,
    ends: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
}

pub(super) fn address(name: &str) -> io::Result<SocketAddr> {
    let name = xxhash_rust::xxh3::xxh3_128(name.as_bytes());
    SocketAddr::from_abstract_name(format!("pageone-segments-{}-{name:032x}", geteuid().as_raw()))
}

impl Door {
    /// Opens it, unless another program has. One that asks before `segments` are known waits.
    pub(super) fn open(address: &SocketAddr, segments: &Arc<OnceLock<Arc<Vec<OwnedFd>>>>) -> Option<Self> {
        let listener = Arc::new(UnixListener::bind_addr(address).ok()?);
        let (ends, segments) = (Arc::new(AtomicBool::new(false)), segments.clone());
        let (listens, ending) = (listener.clone(), ends.clone());
        let thread = std::thread::spawn(move || {
            for stream in listens.incoming() {
                while segments.get().is_none() && !ending.load(Ordering::Acquire) {
                    std::thread::sleep(Duration::from_millis(1));
                }
                if ending.load(Ordering::Acquire) {
                    return;
                }
                if let Ok(stream) = stream
                    && is_trusted(&stream)
                    && let Some(all) = segments.get()
                {
                    // One that is gone needs no answer.
                    let _ = stream.set_write_timeout(Some(ANSWER)).and_then(|()| give(&stream, all));
                }
            }
        });
        Some(Self { listener, ends, thread: Some(thread) })
    }
}

impl Drop for Door {
    fn drop(&mut self) {
        self.ends.store(true, Ordering::Release);
        // Closing it is not enough: a process that is just being started has the descriptor until
        // it runs its own program, and others would connect to a socket that nobody answers.
        let ends = shutdown(&self.listener, Shutdown::Both);
        if let Some(thread) = self.thread.take().filter(|_| ends.is_ok()) {
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
pub(super) fn ask(address: &SocketAddr, count: usize) -> io::Result<Vec<OwnedFd>> {
    let mut stream = connect_within(address, PATIENCE)?;
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
    use super::super::{NAME, segment};
    use super::*;

    #[test]
    fn another_program_gets_them_when_they_are_there_and_only_what_nobody_can_change() {
        let name = |what: &str| address(&format!("test {} {what}", std::process::id())).unwrap();
        let address = name("whole");
        assert!(ask(&address, 2).is_err(), "nobody is there");
        let later = Arc::new(OnceLock::new());
        let door = Door::open(&address, &later).unwrap();
        assert!(Door::open(&address, &later).is_none(), "one program at a time");
        let all = Arc::new(vec![segment(LEN).unwrap(), segment(LEN).unwrap()]);
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
        // As a process has it that was forked and does not run its own program yet.
        let inherited = door.listener.try_clone().unwrap();
        drop(door);
        assert!(UnixStream::connect_addr(&address).is_err(), "nobody would answer");
        drop(inherited);
        let wrong = [segment(LEN / 2).unwrap(), memfd::create_sealed(NAME, LEN).unwrap().0];
        for (address, wrong) in [name("short"), name("writable")].iter().zip(wrong) {
            let _door = Door::open(address, &Arc::new(OnceLock::from(Arc::new(vec![wrong])))).unwrap();
            assert!(ask(address, 1).is_err());
        }
    }
}
