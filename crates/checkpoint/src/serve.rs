//! Reading checkpoints while a program stores one.
//!
//! A pool has one writer, and no reader beside it. So the writer reads for the others
//! ([`Readers`]): it listens on a socket whose name comes from the pool's directory, and sends the
//! memory of committed checkpoints ([`restore`]). It serves its own user, and root.
//!
//! A reader asks its own user's programs, root's, and those of the directory's owner, who can write
//! whatever the pool says. What they say is checked as what the pool says is, and none of them gets
//! a descriptor.
//!
//! ```text
//! reader   Request ──▶ writer
//!        ◀── Answer
//!        ◀── after Answer::Memory, runs of pages that are not zeros: offset, length, bytes;
//!            length 0 ends them; and another Answer
//! ```
//!
//! Requests and answers are lines of JSON; numbers have 8 bytes, the least first.

use std::fs::File;
use std::io::{self, BufReader, Read, Write};
use std::os::linux::net::SocketAddrExt;
use std::os::unix::fs::MetadataExt;
use std::os::unix::net::{SocketAddr, UnixListener, UnixStream};
use std::path::Path;
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::Duration;

use claims::{ClaimError, Timed};
use kmem::peer::{Peer, connect_within, is_trusted};
use mpool::{Mcache, Settings};
use output::text::printable;
use parking_lot::RwLock;
use rustix::net::{Shutdown, shutdown};
use serde::{Deserialize, Serialize};

use crate::catalog::{Checkpoint, View, memory};
use crate::chain;
use crate::restore::ImageFile;

/// Bytes of the longest request.
const LONGEST: u64 = 4096;
/// Bytes of the longest answer: 100,000 checkpoints.
const LONGEST_ANSWER: u64 = 64 << 20;
/// Bytes of the longest run of pages.
const LONGEST_RUN: u64 = 16 << 20;
/// How long a request may take to arrive.
const PATIENCE: Duration = Duration::from_secs(5);
/// How long an answer, or a part of it, may take. The writer may be serving others before.
const SILENCE: Duration = Duration::from_secs(if cfg!(test) { 1 } else { 60 });
/// Requests that are served at once; others wait.
const AT_ONCE: usize = 4;

#[derive(Debug, Serialize, Deserialize)]
enum Request {
    /// The memory of the checkpoint of this name is to be sent.
    Read(String),
    /// All checkpoints are to be listed.
    List,
}

#[derive(Debug, Serialize, Deserialize)]
enum Answer {
    /// The memory follows: address and length in bytes of each region.
    Memory(Vec<(u64, u64)>),
    /// That was all of it.
    Done,
    /// The checkpoints, the oldest first.
    All(Vec<Checkpoint>),
    Failed(String),
}

/// Why the program that has the pool did not do what it was asked.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs, reason = "each sentence says what it is")]
pub enum ServeError {
    #[error("{0}")]
    Failed(String),
    #[error("the program that stores a checkpoint in this pool has ended meanwhile: try again")]
    Broken,
    #[error(
        "process {pid} of user {uid} has the pool open, who is neither root, you nor the pool's owner: nothing that it \
         says is believed; wait until it ends"
    )]
    Foreign { pid: i32, uid: u32 },
    #[error(
        "process {pid} of user {uid}, which has the pool open, has not answered for {} s: let it go on (`kill -CONT`), \
         or end it", SILENCE.as_secs()
    )]
    Silent { pid: i32, uid: u32 },
    #[error(
        "process {pid} of user {uid}, which has the pool open, says of checkpoints what cannot be: end it, and read the \
         pool itself"
    )]
    Unsound { pid: i32, uid: u32 },
    #[error(transparent)]
    Write(io::Error),
}

/// The name of the socket for a pool, by the directory of its capacity class.
fn address(pool: &Path) -> io::Result<SocketAddr> {
    let directory = std::fs::metadata(pool)?;
    SocketAddr::from_abstract_name(format!("pageone-pool-{:x}-{:x}", directory.dev(), directory.ino()))
}

/// Serves restores for other programs, until it is dropped.
pub struct Readers {
    view: Arc<RwLock<View>>,
    listener: Arc<UnixListener>,
    thread: Option<JoinHandle<()>>,
}

impl Readers {
    /// Serves the checkpoints of the pool whose capacity class is in this directory.
    ///
    /// # Errors
    /// If the socket cannot be made. Then others have to wait.
    pub fn serve(pool: &Path, view: View) -> io::Result<Self> {
        let listener = Arc::new(UnixListener::bind_addr(&address(pool)?)?);
        let view = Arc::new(RwLock::new(view));
        let (known, listens) = (view.clone(), listener.clone());
        let thread = std::thread::spawn(move || accept(&listens, &known));
        Ok(Self { view, listener, thread: Some(thread) })
    }

    /// From now on these checkpoints are served.
    pub fn publish(&self, view: impl FnOnce() -> View) {
        // Taken under the lock, so that an earlier view does not replace a later one.
        let mut now = self.view.write();
        *now = view();
    }
}

impl Drop for Readers {
    /// Refuses new requests, and waits for those that were made.
    fn drop(&mut self) {
        // Closing it is not enough: a process that is just being started has the descriptor until
        // it runs its own program, and others would connect to a socket that nobody answers.
        let ends = shutdown(&self.listener, Shutdown::Both);
        if let Some(thread) = self.thread.take().filter(|_| ends.is_ok()) {
            let _ = thread.join();
        }
    }
}

fn accept(listener: &UnixListener, view: &RwLock<View>) {
    let served = RwLock::new(0_usize);
    std::thread::scope(|scope| {
        for stream in listener.incoming() {
            let stream = match stream {
                Ok(stream) => stream,
                // It is shut down.
                Err(e) if e.kind() == io::ErrorKind::InvalidInput => break,
                Err(_) => continue,
            };
            if !Peer::of(&stream).is_ok_and(|peer| is_trusted(peer.uid)) {
                continue;
            }
            *served.write() += 1;
            let (view, served) = (view.read().clone(), &served);
            let serve = move || {
                // A client that is gone needs no answer.
                let _ = answer(&stream, &view);
                *served.write() -= 1;
            };
            // One more than there are threads for is served by this one.
            if *served.read() > AT_ONCE { serve() } else { drop(scope.spawn(serve)) }
        }
    });
}

/// Answers a request.
fn answer(stream: &UnixStream, view: &View) -> io::Result<()> {
    let line = claims::line(&mut BufReader::new(Timed::new(stream, PATIENCE)), LONGEST)?;
    let answer = match serde_json::from_slice::<Request>(&line) {
        Ok(Request::Read(name)) => send(stream, &name, view)?,
        Ok(Request::List) => Answer::All(view.checkpoints().to_vec()),
        Err(_) => Answer::Failed("the request is of another version".into()),
    };
    tell(stream, &answer)
}

/// Sends a message. A reader that stands still does not hold up the end for long.
fn tell(stream: &UnixStream, message: &impl Serialize) -> io::Result<()> {
    let mut line = serde_json::to_vec(message)?;
    line.push(b'\n');
    Timed::new(stream, SILENCE).write_all(&line)
}

/// Sends the memory of a checkpoint; gives the answer behind it.
fn send(stream: &UnixStream, name: &str, view: &View) -> io::Result<Answer> {
    let checkpoint = match view.find(name) {
        Ok(checkpoint) => checkpoint,
        Err(e) => return Ok(Answer::Failed(chain(&e))),
    };
    let cache = match Mcache::new(Settings::default()) {
        Ok(cache) => cache,
        Err(e) => return Ok(Answer::Failed(chain(&e))),
    };
    tell(stream, &Answer::Memory(checkpoint.regions.clone()))?;
    let head = |offset: u64, len: u64| [offset.to_le_bytes(), len.to_le_bytes()].concat();
    let read = view.each_run(&cache, checkpoint, |offset, bytes| {
        let mut timed = Timed::new(stream, SILENCE);
        timed.write_all(&head(offset, bytes.len() as u64))?;
        timed.write_all(bytes)
    });
    Timed::new(stream, SILENCE).write_all(&head(0, 0))?;
    Ok(read.map_or_else(|e| Answer::Failed(chain(&e)), |()| Answer::Done))
}

/// Has the program that has a pool open send a checkpoint, and writes it to a file. Gives address
/// and length in bytes of each region; `None`: no such program answers.
///
/// # Errors
/// If the checkpoint cannot be read or the file cannot be written.
pub fn restore(pool: &Path, name: &str, to: &File) -> Result<Option<Vec<(u64, u64)>>, ServeError> {
    let Some((stream, peer)) = connect(pool)? else { return Ok(None) };
    let mut server = Server { from: BufReader::new(Timed::new(&stream, SILENCE)), peer };
    let regions = match server.ask(&stream, &Request::Read(name.into()))? {
        Answer::Memory(regions) => regions,
        other => return Err(server.refusal(other)),
    };
    // A pipe may have got a part: that is not tried again.
    let received = server.receive(&regions, to).map_err(|error| match error {
        ServeError::Broken => ServeError::Failed(error.to_string()),
        error => error,
    });
    received.map(|()| Some(regions))
}

/// The checkpoints of a pool, the oldest first, as the program says that has the pool open. `None`:
/// no such program answers.
///
/// # Errors
/// If the program ends meanwhile, does not answer, or says what cannot be.
pub fn list(pool: &Path) -> Result<Option<Vec<Checkpoint>>, ServeError> {
    let Some((stream, peer)) = connect(pool)? else { return Ok(None) };
    let mut server = Server { from: BufReader::new(Timed::new(&stream, SILENCE)), peer };
    match server.ask(&stream, &Request::List)? {
        Answer::All(all) if all.iter().all(|c| c.is_sound() && memory(&c.regions).is_some()) => Ok(Some(all)),
        other => Err(server.refusal(other)),
    }
}

/// A connection to the program that has the pool.
fn connect(pool: &Path) -> Result<Option<(UnixStream, Peer)>, ServeError> {
    let stream = address(pool).and_then(|address| connect_within(&address, PATIENCE));
    let Ok(stream) = stream else { return Ok(None) };
    let (Ok(peer), Ok(directory)) = (Peer::of(&stream), std::fs::metadata(pool)) else { return Ok(None) };
    // The directory's owner can write whatever the pool says.
    match is_trusted(peer.uid) || peer.uid == directory.uid() {
        true => Ok(Some((stream, peer))),
        false => Err(ServeError::Foreign { pid: peer.pid, uid: peer.uid }),
    }
}

/// The program that has the pool.
struct Server<'a> {
    from: BufReader<Timed<'a>>,
    peer: Peer,
}

impl Server<'_> {
    fn ask(&mut self, stream: &UnixStream, request: &Request) -> Result<Answer, ServeError> {
        tell(stream, request).map_err(|error| self.error(error.into()))?;
        self.hear()
    }

    fn hear(&mut self) -> Result<Answer, ServeError> {
        self.from.get_mut().again(SILENCE);
        let line = claims::line(&mut self.from, LONGEST_ANSWER).map_err(|error| self.error(error))?;
        match line.last() {
            Some(b'\n') => serde_json::from_slice(&line).map_err(|_| self.unsound()),
            _ => Err(ServeError::Broken),
        }
    }

    /// Writes the memory of these regions, which follows, to a file.
    fn receive(&mut self, regions: &[(u64, u64)], to: &File) -> Result<(), ServeError> {
        let bytes = memory(regions).ok_or_else(|| self.unsound())?;
        let mut image = ImageFile::begin(to, bytes).map_err(ServeError::Write)?;
        let mut behind = 0;
        loop {
            self.from.get_mut().again(SILENCE);
            let mut numbers = [[0; 8]; 2];
            self.from.read_exact(numbers.as_flattened_mut()).map_err(|error| self.error(error.into()))?;
            let [offset, len] = numbers.map(u64::from_le_bytes);
            if len == 0 {
                break;
            }
            if offset < behind || offset.checked_add(len).is_none_or(|end| end > bytes) {
                return Err(self.unsound());
            }
            let run = claims::exactly(&mut self.from, len, LONGEST_RUN).map_err(|error| self.error(error))?;
            image.put(offset, &run).map_err(ServeError::Write)?;
            behind = offset + len;
        }
        match self.hear()? {
            Answer::Done => image.end().map_err(ServeError::Write),
            other => Err(self.refusal(other)),
        }
    }

    /// The error of another answer than the wanted one.
    fn refusal(&self, answer: Answer) -> ServeError {
        match answer {
            Answer::Failed(why) => ServeError::Failed(printable(&why)),
            _ => self.unsound(),
        }
    }

    fn error(&self, error: ClaimError) -> ServeError {
        let Peer { pid, uid, .. } = self.peer;
        match error {
            ClaimError::Io(error) if matches!(error.kind(), io::ErrorKind::WouldBlock | io::ErrorKind::TimedOut) => {
                ServeError::Silent { pid, uid }
            }
            ClaimError::Io(_) | ClaimError::Short { .. } => ServeError::Broken,
            _ => self.unsound(),
        }
    }

    fn unsound(&self) -> ServeError {
        ServeError::Unsound { pid: self.peer.pid, uid: self.peer.uid }
    }
}

#[cfg(test)]
mod tests;
