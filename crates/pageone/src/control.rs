//! The control socket: `status` and `detach` ask the daemon.
//!
//! One request a connection, one line of JSON each way. Everyone may connect; who is neither root nor the daemon's owner
//! sees and detaches only processes of their own.

use std::io::{BufRead, BufReader, Read, Write};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use engine::{Engine, Status};
use serde::{Deserialize, Serialize};

use crate::{Code, Coded};

const SOCKET: &str = "control.sock";
const TIMEOUT: Duration = Duration::from_secs(10);
/// Unmerging copies every merged page.
const DETACH_TIMEOUT: Duration = Duration::from_secs(120);
const MAX_REQUEST: u64 = 4096;

#[derive(Debug, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
enum Request {
    Status,
    Detach(i32),
}

#[derive(Debug, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
enum Answer {
    Status(Box<Status>),
    Done,
    Unknown(String),
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
    let answer = match serde_json::from_str(&line) {
        Ok(Request::Status) => Answer::Status(Box::new(engine.status(only))),
        Ok(Request::Detach(pid)) => detach(engine, pid, only),
        Err(e) => Answer::Failed(format!("not a request: {e}")),
    };
    let mut out = serde_json::to_vec(&answer)?;
    out.push(b'\n');
    let mut stream = stream;
    stream.write_all(&out)?;
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

fn ask(directories: &[PathBuf], request: &Request) -> Result<Answer> {
    let found = directories.iter().find_map(|dir| UnixStream::connect(dir.join(SOCKET)).ok());
    let Some(mut stream) = found else {
        let list: Vec<_> = directories.iter().map(|d| d.display().to_string()).collect();
        let why = format!("no daemon answers in {}; start one with `pageone daemon`", list.join(" or "));
        return Err(Coded(Code::NoDaemon, why).into());
    };
    stream.set_read_timeout(Some(DETACH_TIMEOUT + TIMEOUT))?;
    let mut line = serde_json::to_vec(request)?;
    line.push(b'\n');
    stream.write_all(&line)?;
    let mut answer = String::new();
    BufReader::new(stream).read_line(&mut answer)?;
    serde_json::from_str(&answer).context("the daemon's answer is cut off; is it of another version?")
}

/// The daemon's status.
pub(crate) fn status(directories: &[PathBuf]) -> Result<Status> {
    match ask(directories, &Request::Status)? {
        Answer::Status(status) => Ok(*status),
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
