//! Reading checkpoints while a program stores one.
//!
//! A pool has one writer, and no reader beside it. So the writer reads for the others
//! ([`Readers`]): it listens on a socket whose name comes from the pool's directory, and restores
//! the checkpoints that are committed into files that the others open and send ([`restore`]). The
//! writer serves its own user, and root. A reader accepts these, and the directory's owner.
//!
//! A request is a line of JSON, with the file's descriptor; the answer is one too.

use std::fs::File;
use std::io::{self, BufRead, BufReader, IoSlice, IoSliceMut, Read, Write};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::linux::net::SocketAddrExt;
use std::os::unix::fs::MetadataExt;
use std::os::unix::net::{SocketAddr, UnixListener, UnixStream};
use std::path::Path;
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::Duration;

use parking_lot::RwLock;
use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer, SendAncillaryMessage, SendFlags,
    Shutdown, recvmsg, sendmsg, shutdown, sockopt,
};
use rustix::process::Uid;
use serde::{Deserialize, Serialize};

use crate::catalog::{Checkpoint, View};
use crate::chain;

/// Bytes of the longest request.
const LONGEST: usize = 4096;
/// Bytes of the longest answer: 100,000 checkpoints.
const LONGEST_ANSWER: u64 = 64 << 20;
/// How long a request may take to arrive.
const PATIENCE: Duration = Duration::from_secs(5);
/// Requests that are served at once; others wait.
const AT_ONCE: usize = 4;

#[derive(Debug, Serialize, Deserialize)]
enum Request {
    /// The checkpoint of this name is to be written to the file that comes along.
    Restore(String),
    /// All checkpoints are to be listed.
    List,
}

#[derive(Debug, Serialize, Deserialize)]
enum Answer {
    /// The file is complete: address and length in bytes of each region.
    Restored(Vec<(u64, u64)>),
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
}

/// The name of the socket for a pool, by the directory of its capacity class.
fn address(pool: &Path) -> io::Result<SocketAddr> {
    let directory = std::fs::metadata(pool)?;
    SocketAddr::from_abstract_name(format!("pageone-pool-{:x}-{:x}", directory.dev(), directory.ino()))
}

/// Whether the other side is of this user, of root, or of `owner`.
fn is_trusted(stream: &UnixStream, owner: Option<u32>) -> bool {
    let own = rustix::process::geteuid();
    let trusted = |uid: Uid| uid == own || uid.is_root() || Some(uid.as_raw()) == owner;
    sockopt::socket_peercred(stream).is_ok_and(|peer| trusted(peer.uid))
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
            if !is_trusted(&stream, None) {
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
fn answer(mut stream: &UnixStream, view: &View) -> io::Result<()> {
    stream.set_read_timeout(Some(PATIENCE))?;
    let (line, file) = receive(stream)?;
    let answer = match (serde_json::from_slice::<Request>(&line), file) {
        (Ok(Request::Restore(name)), Some(file)) => restored(&name, &File::from(file), view),
        (Ok(Request::List), _) => Answer::All(view.checkpoints().to_vec()),
        _ => Answer::Failed("the request is of another version".into()),
    };
    let mut line = serde_json::to_vec(&answer)?;
    line.push(b'\n');
    stream.write_all(&line)
}

fn restored(name: &str, file: &File, view: &View) -> Answer {
    let checkpoint = match view.find(name) {
        Ok(checkpoint) => checkpoint,
        Err(e) => return Answer::Failed(chain(&e)),
    };
    match view.write_image(checkpoint, file) {
        Ok(()) => Answer::Restored(checkpoint.regions.clone()),
        Err(e) => Answer::Failed(chain(&e)),
    }
}

/// A line, and the descriptor that came with it.
fn receive(stream: &UnixStream) -> io::Result<(Vec<u8>, Option<OwnedFd>)> {
    let (mut line, mut file) = (Vec::new(), None);
    while line.last() != Some(&b'\n') {
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
        let mut control = RecvAncillaryBuffer::new(&mut space);
        let mut bytes = [0; LONGEST];
        let message = recvmsg(stream, &mut [IoSliceMut::new(&mut bytes)], &mut control, RecvFlags::CMSG_CLOEXEC)?;
        for message in control.drain() {
            if let RecvAncillaryMessage::ScmRights(files) = message {
                file = file.or(files.last());
            }
        }
        line.extend(&bytes[..message.bytes]);
        if message.bytes == 0 || line.len() > LONGEST {
            return Err(io::ErrorKind::UnexpectedEof.into());
        }
    }
    Ok((line, file))
}

/// Has a checkpoint of a pool written to an empty file by the program that has the pool open. Gives
/// address and length in bytes of each region; `None`: no such program answers.
///
/// # Errors
/// If the checkpoint cannot be read or the file cannot be written.
pub fn restore(pool: &Path, name: &str, to: &File) -> Result<Option<Vec<(u64, u64)>>, ServeError> {
    let Some(stream) = connect(pool) else { return Ok(None) };
    match ask(&stream, &Request::Restore(name.into()), Some(to)) {
        Ok(Answer::Restored(regions)) => Ok(Some(regions)),
        Ok(Answer::Failed(why)) => Err(ServeError::Failed(why)),
        Ok(Answer::All(_)) | Err(_) => Err(ServeError::Broken),
    }
}

/// The checkpoints of a pool, the oldest first, as the program says that has the pool open. `None`:
/// no such program answers.
///
/// # Errors
/// If the program ends meanwhile.
pub fn list(pool: &Path) -> Result<Option<Vec<Checkpoint>>, ServeError> {
    let Some(stream) = connect(pool) else { return Ok(None) };
    match ask(&stream, &Request::List, None) {
        Ok(Answer::All(checkpoints)) => Ok(Some(checkpoints)),
        Ok(Answer::Failed(why)) => Err(ServeError::Failed(why)),
        Ok(Answer::Restored(_)) | Err(_) => Err(ServeError::Broken),
    }
}

/// A connection to the program that has the pool.
fn connect(pool: &Path) -> Option<UnixStream> {
    let stream = address(pool).and_then(|address| UnixStream::connect_addr(&address)).ok()?;
    // The directory's owner can write whatever the pool says.
    let owner = std::fs::metadata(pool).ok().map(|directory| directory.uid());
    is_trusted(&stream, owner).then_some(stream)
}

fn ask(stream: &UnixStream, request: &Request, file: Option<&File>) -> io::Result<Answer> {
    let mut line = serde_json::to_vec(request)?;
    line.push(b'\n');
    let files: Vec<BorrowedFd<'_>> = file.iter().map(|file| file.as_fd()).collect();
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    if !files.is_empty() {
        control.push(SendAncillaryMessage::ScmRights(&files));
    }
    let sent = sendmsg(stream, &[IoSlice::new(&line)], &mut control, SendFlags::NOSIGNAL)?;
    let mut rest = stream;
    rest.write_all(&line[sent..])?;
    let mut answer = Vec::new();
    BufReader::new(stream.take(LONGEST_ANSWER)).read_until(b'\n', &mut answer)?;
    Ok(serde_json::from_slice(&answer)?)
}

#[cfg(test)]
mod tests {
    use mpool::{BLOCK, Pool};

    use super::*;
    use crate::catalog::{Catalog, Store, hash};

    /// Restores to a file of this name.
    fn restored(pool: &Path, name: &str, to: &Path) -> Result<Option<Vec<(u64, u64)>>, ServeError> {
        restore(pool, name, &File::create(to).unwrap())
    }

    fn store(catalog: Catalog, name: &str, byte: u8) -> Catalog {
        let store = Store::new(catalog);
        let mut writer = store.begin(name).unwrap();
        writer.set_pages(3);
        let page = [byte; BLOCK];
        writer.put(&[1], &page, &[hash(&page, writer.seed())]).unwrap();
        writer.commit("test".into(), vec![(1 << 20, 3 * BLOCK as u64)]).unwrap();
        store.into_catalog()
    }

    #[test]
    fn committed_checkpoints_are_restored_while_the_next_one_is_written() {
        let dir = tempfile::tempdir().unwrap();
        let (path, to) = (dir.path().join("pool"), dir.path().join("to"));
        let pool = Pool::create(&path, "test").unwrap();
        assert!(restored(&path, "one", &to).unwrap().is_none(), "nobody serves");
        let catalog = store(Catalog::open(&pool).unwrap(), "one", 1);
        let readers = Readers::serve(&path, catalog.view()).unwrap();
        let all = Store::new(catalog);
        let mut writer = all.begin("two").unwrap();
        writer.set_pages(1);
        assert_eq!(restored(&path, "one", &to).unwrap(), Some(vec![(1 << 20, 3 * BLOCK as u64)]));
        let want = |byte: u8| [[0; BLOCK], [byte; BLOCK], [0; BLOCK]].concat();
        assert!(std::fs::read(&to).unwrap() == want(1));
        let names = |all: Option<Vec<Checkpoint>>| all.unwrap().iter().map(|c| c.name.clone()).collect::<Vec<_>>();
        assert_eq!(names(list(&path).unwrap()), ["one"]);
        let other = dir.path().join("other");
        let error = restored(&path, "two", &other).unwrap_err().to_string();
        assert!(error.contains("no checkpoint is called \"two\""), "{error}");
        assert_eq!(other.metadata().unwrap().len(), 0, "nothing is written");
        drop(writer);
        let catalog = store(all.into_catalog(), "two", 2);
        readers.publish(|| catalog.view());
        std::thread::scope(|scope| {
            for i in 0..8 {
                let (path, to) = (&path, dir.path().join(format!("to-{i}")));
                scope.spawn(move || {
                    restored(path, "two", &to).unwrap().unwrap();
                    assert!(std::fs::read(&to).unwrap() == want(2));
                });
            }
        });
        // As a process has it that was forked and does not run its own program yet.
        let inherited = readers.listener.try_clone().unwrap();
        drop(readers);
        assert!(connect(&path).is_none(), "nobody would answer");
        assert!(restored(&path, "one", &other).unwrap().is_none() && list(&path).unwrap().is_none(), "nobody serves");
        drop(inherited);
    }

    #[test]
    fn a_program_that_ends_while_it_serves_is_said() {
        let dir = tempfile::tempdir().unwrap();
        let (path, to) = (dir.path().join("pool"), dir.path().join("to"));
        drop(Pool::create(&path, "test").unwrap());
        let listener = UnixListener::bind_addr(&address(&path).unwrap()).unwrap();
        let ends = std::thread::spawn(move || (0..2).for_each(|_| drop(listener.accept().unwrap())));
        for error in [restored(&path, "one", &to).unwrap_err(), list(&path).unwrap_err()] {
            assert!(matches!(error, ServeError::Broken), "{error}");
            assert!(error.to_string().ends_with("has ended meanwhile: try again"), "{error}");
        }
        ends.join().unwrap();
    }

    #[test]
    fn a_request_that_is_none_is_refused_and_a_silent_client_does_not_hold_up_the_end() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("pool");
        let pool = Pool::create(&path, "test").unwrap();
        let readers = Readers::serve(&path, Catalog::open(&pool).unwrap().view()).unwrap();
        let mut stream = UnixStream::connect_addr(&address(&path).unwrap()).unwrap();
        stream.write_all(b"{\"Other\": 1}\n").unwrap();
        let mut answer = String::new();
        BufReader::new(&stream).read_line(&mut answer).unwrap();
        assert!(answer.contains("another version"), "{answer}");
        let silent = UnixStream::connect_addr(&address(&path).unwrap()).unwrap();
        let start = std::time::Instant::now();
        drop(readers);
        assert!(start.elapsed() < PATIENCE * 3);
        drop(silent);
    }
}
