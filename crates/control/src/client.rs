//! Asks a daemon over its control socket. Each function takes the directories in which a daemon may
//! have its socket, the best first, and asks the first daemon that accepts a connection.
//!
//! Anybody can make a directory under `/tmp`: a daemon of another user is asked nothing, but by
//! root, which has named its directory then. Root shows what that says, and stores nothing by it.

use std::io::{self, BufRead, BufReader, Write};
use std::os::unix::net::{SocketAddr, UnixStream};
use std::path::PathBuf;
use std::time::{Duration, Instant};

use kmem::peer::{Peer, connect_within, is_trusted, may_be_asked};
use output::text::printable;
use serde::Serialize;
use serde_json::error::Category;

use crate::SOCKET;
use crate::dirty::DirtyStatus;
use crate::protocol::{Answer, ChangeLog, MAX_MARK, Mark, NOT_A_REQUEST, Request};
use crate::server::{DETACH_TIMEOUT, TIMEOUT};
use crate::sharing::{ClientMap, SharingMatrix};
use crate::status::Status;

/// How long to wait for another checkpoint's freeze to end: a checkpoint that was killed keeps the
/// client frozen for a moment.
const FROZEN_PATIENCE: Duration = Duration::from_secs(1);
/// Bytes of the longest answer: the status of 20,000 clients.
const LONGEST: u64 = 64 << 20;
/// Time between two attempts to freeze a client.
const RETRY: Duration = Duration::from_millis(20);

/// Why a daemon did not do what it was asked.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// No daemon accepts a connection.
    #[error("no daemon answers in {}; start one with `pageone daemon`", list(.0))]
    NoDaemon(Vec<PathBuf>),
    /// Somebody else's program accepts connections.
    #[error(
        "user {uid} has the daemon in {}, and only root's or your own is believed here: run the command as that user, \
         or name another directory with --dir", directory.display()
    )]
    Foreign {
        /// Its directory.
        directory: PathBuf,
        /// Its user.
        uid: u32,
    },
    /// The process is not a client of the daemon.
    #[error("{0}")]
    NoClient(String),
    /// The daemon says why it cannot.
    #[error("{0}")]
    Failed(String),
    /// The connection broke.
    #[error(
        "the connection to the daemon broke; see in the daemon's log (`journalctl -u pageone`) whether it \
             has ended, and run the command again"
    )]
    Broken(#[source] io::Error),
    /// It accepts connections, and says nothing.
    #[error(
        "the daemon does not answer in time: it is stopped, or its host is overloaded; see `systemctl status pageone` \
             (SIGCONT lets a stopped process go on), and run the command again"
    )]
    Silent,
    /// The daemon does not know the request, or its answer is not known here.
    #[error(
        "the daemon and this command are of different builds: restart the daemon (`systemctl restart pageone`; guests \
         stay merged), or use the daemon's own `pageone`"
    )]
    OtherBuild(#[source] Option<serde_json::Error>),
    /// The answer belongs to another request.
    #[error(
        "the daemon gave the answer to another request: {0}; restart the daemon (guests stay merged), so \
             that it and the command are of one build"
    )]
    Unexpected(String),
}

fn list(directories: &[PathBuf]) -> String {
    directories.iter().map(|dir| dir.display().to_string()).collect::<Vec<_>>().join(" or ")
}

impl From<io::Error> for Error {
    fn from(error: io::Error) -> Self {
        match error.kind() {
            io::ErrorKind::WouldBlock | io::ErrorKind::TimedOut => Self::Silent,
            _ => Self::Broken(error),
        }
    }
}

impl From<Answer> for Error {
    fn from(answer: Answer) -> Self {
        match answer {
            Answer::Unknown(why) => Error::NoClient(printable(&why)),
            Answer::Failed(why) if why.starts_with(NOT_A_REQUEST) => Error::OtherBuild(None),
            Answer::Busy(why) | Answer::Failed(why) => Error::Failed(printable(&why)),
            other => Error::Unexpected(format!("{other:?}")),
        }
    }
}

/// `may`: whether a user's daemon may answer. `None`: no daemon accepts a connection.
fn connect(directories: &[PathBuf], may: fn(u32) -> bool) -> Result<Option<(UnixStream, Peer)>, Error> {
    let accepts = |dir: &PathBuf| {
        let address = SocketAddr::from_pathname(dir.join(SOCKET)).ok()?;
        Some((dir.clone(), connect_within(&address, TIMEOUT).ok()?))
    };
    let Some((directory, stream)) = directories.iter().find_map(accepts) else { return Ok(None) };
    let peer = Peer::of(&stream)?;
    if may(peer.uid) { Ok(Some((stream, peer))) } else { Err(Error::Foreign { directory, uid: peer.uid }) }
}

fn connect_needed(directories: &[PathBuf]) -> Result<UnixStream, Error> {
    let connected = connect(directories, may_be_asked)?;
    connected.map(|(stream, _)| stream).ok_or_else(|| Error::NoDaemon(directories.to_vec()))
}

fn ask(directories: &[PathBuf], request: &Request) -> Result<Answer, Error> {
    talk(&connect_needed(directories)?, request)
}

fn talk(stream: &UnixStream, request: &Request) -> Result<Answer, Error> {
    hear(&mut begin(stream, request)?)
}

/// Sends a request; its answers are read from what is returned.
fn begin<'a>(mut stream: &'a UnixStream, request: &Request) -> Result<BufReader<&'a UnixStream>, Error> {
    // What a guest has to do, or a scan, may take its time.
    let waits = if matches!(request, Request::Status | Request::Sharing) { TIMEOUT } else { DETACH_TIMEOUT + TIMEOUT };
    stream.set_read_timeout(Some(waits))?;
    stream.write_all(&line(request)?)?;
    Ok(BufReader::new(stream))
}

fn line(message: &impl Serialize) -> Result<Vec<u8>, Error> {
    let mut line = serde_json::to_vec(message).map_err(io::Error::from)?;
    line.push(b'\n');
    Ok(line)
}

/// The answer in the daemon's next line.
fn hear(answers: &mut impl BufRead) -> Result<Answer, Error> {
    let line = claims::line(answers, LONGEST).map_err(io::Error::from)?;
    serde_json::from_slice(&line).map_err(|why| match why.classify() {
        Category::Eof => io::Error::from(io::ErrorKind::UnexpectedEof).into(),
        _ => Error::OtherBuild(Some(why)),
    })
}

/// The daemon's process, as the kernel says. `None`: no daemon answers, or it is in a container.
pub fn process(directories: &[PathBuf]) -> Option<i32> {
    let (_, peer) = connect(directories, may_be_asked).ok()??;
    Some(peer.pid).filter(|&pid| pid != 0)
}

/// The daemon's status.
///
/// # Errors
///
/// When no daemon answers.
pub fn status(directories: &[PathBuf]) -> Result<Status, Error> {
    match ask(directories, &Request::Status)? {
        Answer::Status(status) => Ok(*status),
        other => Err(other.into()),
    }
}

/// Which pages these processes write; all clients if `pids` is empty. The daemon scans them first.
///
/// # Errors
///
/// When no daemon answers, or a process is not its client.
pub fn dirty(directories: &[PathBuf], pids: &[i32]) -> Result<Vec<DirtyStatus>, Error> {
    match ask(directories, &Request::Dirty(pids.to_vec()))? {
        Answer::Dirty(clients) => Ok(clients),
        other => Err(other.into()),
    }
}

/// A map of a client's memory, by the state of its pages.
///
/// # Errors
///
/// When no daemon answers, or the process is not its client.
pub fn map(directories: &[PathBuf], pid: i32) -> Result<ClientMap, Error> {
    match ask(directories, &Request::Map(pid))? {
        Answer::Map(map) => Ok(*map),
        other => Err(other.into()),
    }
}

/// Who shares with whom. Takes the daemon up to a second on a large host.
///
/// # Errors
///
/// When no daemon answers.
pub fn sharing(directories: &[PathBuf]) -> Result<SharingMatrix, Error> {
    match ask(directories, &Request::Sharing)? {
        Answer::Sharing(matrix) => Ok(*matrix),
        other => Err(other.into()),
    }
}

/// Detaches a client. Returns when its memory is unmerged, and how many pages stay in mappings of
/// the store because they are pinned or written all the time. `waits` is told how many pages cool
/// down, and for how many seconds at most.
///
/// # Errors
///
/// When no daemon answers, the process is not its client, or the agent in it does not answer.
pub fn detach(directories: &[PathBuf], pid: i32, mut waits: impl FnMut(u64, u64)) -> Result<u64, Error> {
    let stream = connect_needed(directories)?;
    let mut answers = begin(&stream, &Request::Detach(pid))?;
    loop {
        match hear(&mut answers)? {
            Answer::Cooling { pages, seconds } => waits(pages, seconds),
            Answer::Detached(pages_retained) => return Ok(pages_retained),
            other => return Err(other.into()),
        }
    }
}

/// Unplugs the device in which a client's guest marks its free pages. Returns when the guest can be
/// saved and migrated.
///
/// # Errors
///
/// When no daemon answers, the process is not its client or has no such device, or its guest does
/// not let go of it.
pub fn pause(directories: &[PathBuf], pid: i32) -> Result<(), Error> {
    done(ask(directories, &Request::Pause(pid))?)
}

/// Plugs it in again.
///
/// # Errors
///
/// As [`pause`].
pub fn resume(directories: &[PathBuf], pid: i32) -> Result<(), Error> {
    done(ask(directories, &Request::Resume(pid))?)
}

fn done(answer: Answer) -> Result<(), Error> {
    match answer {
        Answer::Done => Ok(()),
        other => Err(other.into()),
    }
}

/// A client that its daemon neither scans nor merges while this value lives.
pub struct Freeze {
    stream: UnixStream,
    /// What the client has changed since the last mark, if the daemon knows.
    pub changes: Option<ChangeLog>,
}

impl Freeze {
    /// Asks the daemon of these directories to freeze a client. `None`: no daemon answers, or the
    /// process does not become its client within `patience`. A client or a daemon that has just
    /// started may not have met the other yet.
    ///
    /// # Errors
    ///
    /// When another checkpoint of the process is taken, or the agent in it does not answer.
    pub fn ask(directories: &[PathBuf], pid: i32, patience: Duration) -> Result<Option<Self>, Error> {
        let start = Instant::now();
        loop {
            // By its word pages are left out of what is stored.
            let Some((stream, _)) = connect(directories, is_trusted)? else { return Ok(None) };
            match talk(&stream, &Request::Freeze(pid))? {
                Answer::Frozen(changes) => return Ok(Some(Self { stream, changes })),
                Answer::Busy(_) if start.elapsed() < FROZEN_PATIENCE => std::thread::sleep(RETRY),
                Answer::Unknown(_) if start.elapsed() < patience => std::thread::sleep(RETRY),
                Answer::Unknown(_) => return Ok(None),
                other => return Err(other.into()),
            }
        }
    }

    /// Marks this moment for the next freeze. A daemon that does not answer keeps no mark, and the
    /// next checkpoint takes longer.
    ///
    /// # Errors
    ///
    /// When the connection breaks.
    pub fn mark(&self, label: String, written: Option<Vec<(u64, u64)>>) -> Result<(), Error> {
        let line = line(&Mark { label, written })?;
        if line.len() as u64 <= MAX_MARK {
            (&self.stream).write_all(&line)?;
            claims::line(&mut BufReader::new(&self.stream), LONGEST).map_err(io::Error::from)?;
        }
        Ok(())
    }

    /// Whether the client has been frozen all the time: a daemon that ends lets it go.
    pub fn lasts(&self) -> bool {
        let nothing = rustix::net::recv(&self.stream, &mut [0u8], rustix::net::RecvFlags::DONTWAIT);
        matches!(nothing, Err(rustix::io::Errno::AGAIN))
    }
}
