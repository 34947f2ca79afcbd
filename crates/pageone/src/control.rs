//! The control socket: `status`, `dirty`, `detach` and `checkpoint` ask the daemon.
//!
//! One request a connection, one line of JSON each way. A client is held as long as the connection
//! that asked for it is open; at the end a mark may follow there. Everyone may connect; who is
//! neither root nor the daemon's owner sees, holds and detaches only processes of their
//! own, and neither sets marks nor learns of them: the next checkpoint that root takes would rely
//! on them.

use std::io::{BufRead, BufReader, Read, Write};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use engine::{DirtyStatus, Engine, Since, Status};
use serde::{Deserialize, Serialize};

use crate::{Code, Coded};

const SOCKET: &str = "control.sock";
const TIMEOUT: Duration = Duration::from_secs(10);
/// Unmerging copies every merged page.
const DETACH_TIMEOUT: Duration = Duration::from_secs(120);
const MAX_REQUEST: u64 = 4096;
/// A mark lists parts of memory.
const MAX_MARK: u64 = 16 << 20;
/// How long to wait for another checkpoint's hold: one that was killed has it for a moment still.
const HELD_PATIENCE: Duration = Duration::from_secs(1);

#[derive(Debug, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
enum Request {
    Status,
    Detach(i32),
    Dirty(Vec<i32>),
    Hold(i32),
}

/// What may follow a hold: the memory was stored.
#[derive(Debug, Serialize, Deserialize)]
struct Mark {
    /// What the next hold is told.
    label: String,
    /// See [`engine::Hold::mark`].
    written: Option<Vec<(u64, u64)>>,
}

#[derive(Debug, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
enum Answer {
    Status(Box<Status>),
    Dirty(Vec<DirtyStatus>),
    Done,
    Held(Option<Since>),
    Unknown(String),
    Busy(String),
    Failed(String),
}

/// Serves the control socket until the process ends.
pub(crate) fn serve(engine: Arc<Engine>, directory: &Path) -> Result<()> {
    use std::os::unix::fs::PermissionsExt;
    let path = directory.join(SOCKET);
    let _ = std::fs::remove_file(&path);
    let listener = UnixListener::bind(&path).with_context(|| format!("cannot listen on {}", path.display()))?;
    std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o666))?;
    let accept = move || {
        for stream in listener.incoming().flatten() {
            let engine = engine.clone();
            let answer = move || {
                if let Err(e) = answer(&engine, &stream) {
                    tracing::debug!("a control request failed: {e:#}");
                }
            };
            if let Err(e) = std::thread::Builder::new().name("control".into()).spawn(answer) {
                tracing::warn!("a control request was dropped: {e}");
            }
        }
    };
    std::thread::Builder::new().name("control".into()).spawn(accept)?;
    Ok(())
}

fn answer(engine: &Engine, stream: &UnixStream) -> Result<()> {
    stream.set_read_timeout(Some(TIMEOUT))?;
    stream.set_write_timeout(Some(TIMEOUT))?;
    let peer = rustix::net::sockopt::socket_peercred(stream)?.uid.as_raw();
    let own = rustix::process::geteuid().as_raw();
    let only = (peer != 0 && peer != own).then_some(peer);
    let mut line = String::new();
    BufReader::new(stream.take(MAX_REQUEST)).read_line(&mut line)?;
    let mut hold = None;
    let answer = match serde_json::from_str(&line) {
        Ok(Request::Status) => Answer::Status(Box::new(engine.status(only))),
        Ok(Request::Detach(pid)) => detach(engine, pid, only),
        Ok(Request::Hold(pid)) if only.is_some() && engine.owner(pid) != only => {
            Answer::Unknown(engine::HoldError::NotAClient(pid).to_string())
        }
        Ok(Request::Hold(pid)) => match engine.hold(pid) {
            Ok(mut held) => {
                let since = held.since().filter(|_| only.is_none());
                hold = Some(held);
                Answer::Held(since)
            }
            Err(e @ engine::HoldError::NotAClient(_)) => Answer::Unknown(e.to_string()),
            Err(e @ engine::HoldError::Held(_)) => Answer::Busy(e.to_string()),
            Err(e) => Answer::Failed(e.to_string()),
        },
        Ok(Request::Dirty(pids)) => {
            engine.dirty(&pids, only).map_or_else(|e| Answer::Unknown(e.to_string()), Answer::Dirty)
        }
        Err(e) => Answer::Failed(format!("not a request: {e}")),
    };
    let mut out = serde_json::to_vec(&answer)?;
    out.push(b'\n');
    let mut stream = stream;
    stream.write_all(&out)?;
    if let Some(hold) = hold {
        stream.set_read_timeout(None)?;
        let mut lines = BufReader::new(stream.take(if only.is_none() { MAX_MARK } else { MAX_REQUEST }));
        line.clear();
        if lines.read_line(&mut line)? > 0 {
            let mark: Mark = serde_json::from_str(&line)?;
            if only.is_none() {
                hold.mark(&mark.label, mark.written.as_deref());
            }
            stream.write_all(b"\"done\"\n")?;
            // Until the other end closes, or ends.
            let _ = stream.read(&mut [0]);
        }
    }
    Ok(())
}

fn detach(engine: &Engine, pid: i32, only: Option<u32>) -> Answer {
    if only.is_some() && engine.owner(pid) != only {
        // The same answer as for no client at all: who runs what is nobody else's business.
        return Answer::Unknown(engine::DetachError::NotAClient(pid).to_string());
    }
    match engine.detach(pid) {
        Ok(()) => {}
        Err(e @ engine::DetachError::NotAClient(_)) => return Answer::Unknown(e.to_string()),
        Err(e) => return Answer::Failed(e.to_string()),
    }
    let deadline = Instant::now() + DETACH_TIMEOUT;
    while Instant::now() < deadline {
        if !engine.is_client(pid) {
            return Answer::Done;
        }
        std::thread::sleep(Duration::from_millis(20));
    }
    Answer::Failed(format!(
        "the agent in process {pid} has not answered within {} s; is the process stopped?",
        DETACH_TIMEOUT.as_secs()
    ))
}

fn connect(directories: &[PathBuf]) -> Option<UnixStream> {
    directories.iter().find_map(|dir| UnixStream::connect(dir.join(SOCKET)).ok())
}

fn ask(directories: &[PathBuf], request: &Request) -> Result<Answer> {
    let Some(stream) = connect(directories) else {
        let list: Vec<_> = directories.iter().map(|d| d.display().to_string()).collect();
        let why = format!("no daemon answers in {}; start one with `pageone daemon`", list.join(" or "));
        return Err(Coded(Code::NoDaemon, why).into());
    };
    talk(&stream, request)
}

fn talk(mut stream: &UnixStream, request: &Request) -> Result<Answer> {
    stream.set_read_timeout(Some(DETACH_TIMEOUT + TIMEOUT))?;
    let mut line = serde_json::to_vec(request)?;
    line.push(b'\n');
    stream.write_all(&line)?;
    let mut answer = String::new();
    BufReader::new(stream).read_line(&mut answer)?;
    serde_json::from_str(&answer).context("the daemon's answer is cut off; is it of another version?")
}

/// That a daemon neither scans nor merges a client.
pub(crate) struct Hold {
    stream: UnixStream,
    /// What the client has changed since the last mark.
    pub(crate) since: Option<Since>,
}

impl Hold {
    /// Asks the daemon of these directories, if there is one and it knows the process, or learns of
    /// it within `patience`: a client that has just begun, or a daemon that has just been
    /// started, may not have met the other.
    pub(crate) fn ask(directories: &[PathBuf], pid: i32, patience: Duration) -> Result<Option<Self>> {
        let start = Instant::now();
        loop {
            let Some(stream) = connect(directories) else { return Ok(None) };
            match talk(&stream, &Request::Hold(pid))? {
                Answer::Held(since) => return Ok(Some(Self { stream, since })),
                Answer::Busy(_) if start.elapsed() < HELD_PATIENCE => std::thread::sleep(Duration::from_millis(20)),
                Answer::Busy(why) => bail!(why),
                Answer::Unknown(_) if start.elapsed() < patience => std::thread::sleep(Duration::from_millis(20)),
                Answer::Unknown(_) => return Ok(None),
                Answer::Failed(why) => bail!(why),
                other => bail!("the daemon answered {other:?}"),
            }
        }
    }

    /// Marks this moment for the next hold. A daemon that does not answer knows of no mark: that
    /// costs the next checkpoint some time.
    pub(crate) fn mark(&self, label: String, written: Option<Vec<(u64, u64)>>) -> Result<()> {
        let mut line = serde_json::to_vec(&Mark { label, written })?;
        line.push(b'\n');
        if line.len() as u64 <= MAX_MARK {
            (&self.stream).write_all(&line)?;
            let _ = BufReader::new(&self.stream).read_line(&mut String::new())?;
        }
        Ok(())
    }

    /// Whether it has been so all the time: a daemon that ended lets go.
    pub(crate) fn lasts(&self) -> bool {
        let nothing = rustix::net::recv(&self.stream, &mut [0u8], rustix::net::RecvFlags::DONTWAIT);
        matches!(nothing, Err(rustix::io::Errno::AGAIN))
    }
}

/// The daemon's status.
pub(crate) fn status(directories: &[PathBuf]) -> Result<Status> {
    match ask(directories, &Request::Status)? {
        Answer::Status(status) => Ok(*status),
        other => bail!("the daemon answered {other:?}"),
    }
}

/// What clients write: these processes, or all. The daemon scans them first.
pub(crate) fn dirty(directories: &[PathBuf], pids: &[i32]) -> Result<Vec<DirtyStatus>> {
    match ask(directories, &Request::Dirty(pids.to_vec()))? {
        Answer::Dirty(clients) => Ok(clients),
        Answer::Unknown(why) => Err(Coded(Code::NoClient, why).into()),
        other => bail!("the daemon answered {other:?}"),
    }
}

/// Detaches a client; returns when its memory is its own again.
pub(crate) fn request_detach(directories: &[PathBuf], pid: i32) -> Result<()> {
    match ask(directories, &Request::Detach(pid))? {
        Answer::Done => Ok(()),
        Answer::Unknown(why) => Err(Coded(Code::NoClient, why).into()),
        Answer::Failed(why) => bail!(why),
        other => bail!("the daemon answered {other:?}"),
    }
}
