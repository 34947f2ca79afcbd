//! The daemon's side of the control socket: one thread for each connection.
//!
//! Every user may connect. Root and the daemon's owner see and freeze every client. What another
//! peer sees, freezes and detaches is the handler's to say ([`Handler::access`]). It neither sets
//! marks nor gets change logs: the next checkpoint that root takes would rely on its marks.
//!
//! A user has a few connections at a time ([`users`]). A whole request must arrive in time, and so
//! must a whole answer. Root and the daemon's owner are answered though there is no thread left, by
//! the one that accepts, or no descriptor: one is spare.

mod users;

use std::fs::File;
use std::io::{self, BufRead, BufReader, Read, Write};
use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::{SocketAddr, UnixListener, UnixStream};
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use claims::Timed;
use kmem::peer;
use kmem::pidfd::PidFd;
use rustix::event::{PollFd, PollFlags};

use crate::SOCKET;
use crate::dirty::DirtyStatus;
use crate::protocol::{Answer, ChangeLog, MAX_MARK, MAX_REQUEST, Mark, NOT_A_REQUEST, Request};
use crate::server::users::{Connection, Users};
use crate::sharing::{ClientMap, SharingMatrix};
use crate::status::Status;

/// Time within which a client must send its request and read its answer.
pub(crate) const TIMEOUT: Duration = Duration::from_secs(10);
/// Time within which a client must be detached: unmerging copies every merged page.
pub(crate) const DETACH_TIMEOUT: Duration = Duration::from_secs(120);
/// Pause after a connection could not be accepted.
const RETRY: Duration = Duration::from_millis(50);
/// Time between two looks whether a client is detached: short for a person who waits.
const DETACH_POLL: Duration = Duration::from_millis(20);

/// Why a handler refuses a request. The text names the process and the remedy.
#[derive(Debug)]
pub enum Refusal {
    /// No such client.
    Unknown(String),
    /// Another connection has frozen the client.
    Busy(String),
    /// The request cannot be fulfilled.
    Failed(String),
}

impl From<Refusal> for Answer {
    fn from(refusal: Refusal) -> Self {
        match refusal {
            Refusal::Unknown(why) => Answer::Unknown(why),
            Refusal::Busy(why) => Answer::Busy(why),
            Refusal::Failed(why) => Answer::Failed(why),
        }
    }
}

/// Who asks: the process at the other end of a connection, as it was when it connected.
#[derive(Debug)]
pub struct Peer {
    /// Its effective user.
    pub uid: u32,
    /// Its number; 0: it lies outside of this process's PID namespace.
    pub pid: i32,
    /// The process itself. `None`: it has ended.
    pub process: Option<PidFd>,
}

impl Peer {
    fn of(stream: &UnixStream) -> io::Result<Self> {
        let peer = peer::Peer::of(stream)?;
        Ok(Self { uid: peer.uid, pid: peer.pid, process: peer::pidfd(stream).ok() })
    }
}

/// What the server asks of the engine. Each answer is about what the peer has access to.
pub trait Handler: Send + Sync + 'static {
    /// What a peer may see and do.
    type Access;
    /// A client that is being detached.
    type Detaching: Detaching;
    /// A client that is frozen while this value lives.
    type Freeze: Freeze;

    /// Whether the daemon still has its directory, and no other has taken it.
    fn is_in_place(&self) -> bool;

    /// What this peer may see and do.
    fn access(&self, peer: &Peer) -> Self::Access;

    /// The status of everything.
    fn status(&self, access: &Self::Access) -> Status;

    /// Which pages these processes write; all clients if `pids` is empty.
    ///
    /// # Errors
    ///
    /// [`Refusal::Unknown`] for the first process that is not a client.
    fn dirty(&self, pids: &[i32], access: &Self::Access) -> Result<Vec<DirtyStatus>, Refusal>;

    /// A map of this process's memory.
    ///
    /// # Errors
    ///
    /// [`Refusal::Unknown`] if it is not a client.
    fn map(&self, pid: i32, access: &Self::Access) -> Result<ClientMap, Refusal>;

    /// Who shares with whom.
    fn sharing(&self, access: &Self::Access) -> SharingMatrix;

    /// Tells a client to unmerge its memory. Returns at once; the value says when it is done.
    ///
    /// # Errors
    ///
    /// When the process is not a client, or cannot be told.
    fn detach(&self, pid: i32, access: &Self::Access) -> Result<Self::Detaching, Refusal>;

    /// Unplugs the device in which a client's guest marks its free pages. Returns when that is
    /// done.
    ///
    /// # Errors
    ///
    /// When the process is not a client or has no such device, or its guest does not let go of it.
    fn pause(&self, pid: i32, access: &Self::Access) -> Result<(), Refusal>;

    /// Plugs it in again.
    ///
    /// # Errors
    ///
    /// As [`Handler::pause`].
    fn resume(&self, pid: i32, access: &Self::Access) -> Result<(), Refusal>;

    /// Freezes a client: until the value is dropped, nothing of it is scanned or merged. Returns
    /// when the client's agent has nothing left to do.
    ///
    /// # Errors
    ///
    /// When the process is not a client, is frozen already, or its agent does not answer.
    fn freeze(&self, pid: i32, access: &Self::Access) -> Result<Self::Freeze, Refusal>;
}

/// A client that is being detached. Dropping the value changes nothing.
pub trait Detaching {
    /// How far it has come.
    fn step(&self) -> DetachStep;
}

/// How far a detach has come.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum DetachStep {
    /// Memory is being given back.
    Works,
    /// Copies in mappings of the store cool down, because a device may be writing to them.
    Waits {
        /// How many.
        pages: u64,
        /// How much longer, at most.
        at_most: Duration,
    },
    /// The client has its memory back.
    Done {
        /// Pages that stay in mappings of the store, because they are pinned or written all the
        /// time.
        pages_retained: u64,
    },
    /// It has failed, for this reason.
    Failed(String),
}

/// A client is frozen while this value lives.
pub trait Freeze {
    /// What the client has changed since the last mark, if that is known. Gives it once.
    fn changes(&mut self) -> Option<ChangeLog>;

    /// Marks this moment: the client's memory was stored as it was when the caller last cleared the
    /// kernel's notes, or later.
    ///
    /// `written`, for a process that may do direct I/O: what the caller found written, address and
    /// length in bytes of each part. It counts as changed at the next freeze.
    fn mark(&self, label: &str, written: Option<&[(u64, u64)]>);
}

/// Serves the control socket in `directory` until the process ends. A socket whose file somebody
/// deletes is made again.
///
/// # Errors
///
/// When the socket cannot be made, or its thread cannot be started.
pub fn serve<H: Handler>(handler: Arc<H>, directory: &Path) -> io::Result<()> {
    let path = directory.join(SOCKET);
    let _ = std::fs::remove_file(&path);
    let mut listener = listen(&path)?;
    let accept = move || {
        let mut users = Users::new();
        let mut spare = None;
        loop {
            spare = spare.or_else(|| File::open("/dev/null").ok());
            let mut accepted = next(&listener);
            if matches!(&accepted, Err(e) if e.kind() == io::ErrorKind::WouldBlock) {
                let is_gone = std::fs::symlink_metadata(&path).is_err_and(|e| e.kind() == io::ErrorKind::NotFound);
                if is_gone && handler.is_in_place() {
                    match listen(&path) {
                        Ok(again) => listener = again,
                        Err(e) => tracing::debug!("{} cannot be made again: {e}", path.display()),
                    }
                }
                continue;
            }
            let is_last = accepted.is_err();
            if is_last {
                spare = None;
                accepted = next(&listener);
            }
            let Ok((stream, _)) = accepted else {
                std::thread::sleep(RETRY);
                continue;
            };
            let Some((connection, peer)) = admit(&mut users, &stream) else { continue };
            let (trusted, handler) = (peer::is_trusted(peer.uid), handler.clone());
            let serve = Arc::new(move || {
                if let Err(e) = serve_one(&*handler, &stream, &connection, &peer) {
                    tracing::debug!("a control request failed: {e}");
                }
            });
            let of_thread = serve.clone();
            let spawn = || std::thread::Builder::new().name("control".into()).spawn(move || of_thread());
            if (is_last || spawn().is_err()) && trusted {
                serve();
            }
        }
    };
    std::thread::Builder::new().name("control".into()).spawn(accept)?;
    Ok(())
}

fn listen(path: &Path) -> io::Result<UnixListener> {
    let listener = UnixListener::bind(path)?;
    let all = std::fs::Permissions::from_mode(0o666);
    let ready = std::fs::set_permissions(path, all).and_then(|()| listener.set_nonblocking(true));
    // Nobody could connect, nor bind it again.
    ready.inspect_err(|_| _ = std::fs::remove_file(path))?;
    Ok(listener)
}

/// The next connection. `WouldBlock`: there is none for a while.
fn next(listener: &UnixListener) -> io::Result<(UnixStream, SocketAddr)> {
    let wait = rustix::event::Timespec { tv_sec: 1, tv_nsec: 0 };
    rustix::event::poll(&mut [PollFd::new(listener, PollFlags::IN)], Some(&wait))?;
    listener.accept()
}

/// Finds out whose connection it is, and whether that user may have one more.
fn admit(users: &mut Users, mut stream: &UnixStream) -> Option<(Connection, Peer)> {
    let peer = Peer::of(stream).ok()?;
    let connection = users.admit(peer.uid);
    if connection.is_none() {
        let why =
            format!("user {} has too many connections to the daemon, or all have; close some and try again", peer.uid);
        let line = serde_json::to_vec(&Answer::Failed(why)).ok()?;
        // The buffer of a new connection has room for it.
        stream.set_nonblocking(true).ok()?;
        let _ = stream.write_all(&line);
    }
    Some((connection?, peer))
}

fn serve_one<H: Handler>(handler: &H, stream: &UnixStream, connection: &Connection, peer: &Peer) -> io::Result<()> {
    let mut line = String::new();
    BufReader::new(Timed::new(stream, TIMEOUT).take(MAX_REQUEST)).read_line(&mut line)?;
    // Root and the owner need not wait for each other. To find a tenant costs CPU time, too.
    let access = match peer::is_trusted(peer.uid) {
        true => handler.access(peer),
        false => connection.in_turn(|| handler.access(peer)),
    };
    let in_turn = |answer: &dyn Fn() -> Answer| match peer::is_trusted(peer.uid) {
        true => answer(),
        false => connection.in_turn(answer),
    };
    let answer = match serde_json::from_str(&line) {
        Ok(Request::Status) => in_turn(&|| Answer::Status(Box::new(handler.status(&access)))),
        Ok(Request::Detach(pid)) => detach(handler, pid, &access, stream)?,
        Ok(Request::Pause(pid)) => handler.pause(pid, &access).map_or_else(Answer::from, |()| Answer::Done),
        Ok(Request::Resume(pid)) => handler.resume(pid, &access).map_or_else(Answer::from, |()| Answer::Done),
        Ok(Request::Dirty(pids)) => in_turn(&|| handler.dirty(&pids, &access).map_or_else(Answer::from, Answer::Dirty)),
        Ok(Request::Map(pid)) => {
            in_turn(&|| handler.map(pid, &access).map_or_else(Answer::from, |map| Answer::Map(Box::new(map))))
        }
        Ok(Request::Sharing) => in_turn(&|| Answer::Sharing(Box::new(handler.sharing(&access)))),
        Ok(Request::Freeze(pid)) => match handler.freeze(pid, &access) {
            Ok(freeze) => return serve_freeze(freeze, peer, stream),
            Err(refusal) => refusal.into(),
        },
        Err(e) if e.is_data() => Answer::Failed(format!(
            "{NOT_A_REQUEST} that this daemon knows: it and the command are of different builds; restart the daemon \
             (`systemctl restart pageone`; guests stay merged), or use the daemon's own `pageone`"
        )),
        Err(e) => Answer::Failed(format!("{NOT_A_REQUEST}: {e}")),
    };
    send(stream, &answer)
}

fn send(stream: &UnixStream, answer: &Answer) -> io::Result<()> {
    let mut out = serde_json::to_vec(answer)?;
    out.push(b'\n');
    Timed::new(stream, TIMEOUT).write_all(&out)
}

/// Keeps a client frozen until its connection closes. A trusted peer may set a mark, and gets the
/// change log.
fn serve_freeze(mut freeze: impl Freeze, peer: &Peer, mut stream: &UnixStream) -> io::Result<()> {
    let trusted = peer::is_trusted(peer.uid);
    let changes = freeze.changes().filter(|_| trusted);
    send(stream, &Answer::Frozen(changes))?;
    stream.set_read_timeout(None)?;
    let mut line = String::new();
    let mut lines = BufReader::new(stream.take(if trusted { MAX_MARK } else { MAX_REQUEST }));
    if lines.read_line(&mut line)? > 0 {
        let mark: Mark = serde_json::from_str(&line)?;
        if trusted {
            freeze.mark(&mark.label, mark.written.as_deref());
        }
        send(stream, &Answer::Done)?;
        // Until the other end closes, or ends.
        let _ = stream.read(&mut [0]);
    }
    Ok(())
}

/// Waits for the end of a detach, and says once a second what it waits for.
fn detach<H: Handler>(handler: &H, pid: i32, access: &H::Access, stream: &UnixStream) -> io::Result<Answer> {
    let detaching = match handler.detach(pid, access) {
        Ok(detaching) => detaching,
        Err(refusal) => return Ok(refusal.into()),
    };
    let mut deadline = Instant::now() + DETACH_TIMEOUT;
    let mut told = None;
    while Instant::now() < deadline {
        match detaching.step() {
            DetachStep::Done { pages_retained } => return Ok(Answer::Detached(pages_retained)),
            DetachStep::Failed(why) => return Ok(Answer::Failed(why)),
            DetachStep::Works => {}
            step @ DetachStep::Waits { pages, at_most } => {
                if told.as_ref() != Some(&step) {
                    send(stream, &Answer::Cooling { pages, seconds: at_most.as_secs_f64().ceil() as u64 })?;
                    told = Some(step);
                    deadline = Instant::now() + DETACH_TIMEOUT;
                }
            }
        }
        std::thread::sleep(DETACH_POLL);
    }
    Ok(Answer::Failed(format!(
        "the agent in process {pid} has not answered within {} s; is the process stopped?",
        DETACH_TIMEOUT.as_secs()
    )))
}

#[cfg(test)]
mod tests;
