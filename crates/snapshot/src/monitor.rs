//! The monitor of a guest's QEMU, and what snapshots ask it more than once.

use std::io;
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::net::{SocketAddr, UnixStream};
use std::path::Path;
use std::time::{Duration, Instant};

use kmem::peer::{Peer, connect_within};
use qmp::{Qmp, QmpError};
use serde_json::{Value, json};

/// Name of the pipe in QEMU.
pub(crate) const PIPE: &str = "pageone-stream";

/// How long QEMU may take to answer a command: stopping a guest waits for its disks.
pub(crate) const ANSWER: Duration = Duration::from_secs(30);
/// How long QEMU may take to answer a connection. Its monitor may be suspended for a client before
/// this one, which was killed; it answers the next connection.
const FIRST_ANSWER: Duration = Duration::from_secs(2);
/// Pause before another connection.
const PAUSE: Duration = Duration::from_millis(10);
/// Time between two questions whether something has ended: an eighth of the time that it has taken
/// so far, within these. Many clones that start at once would keep a busy host busy with answers.
const POLL: Duration = Duration::from_micros(500);
const LONGEST_POLL: Duration = Duration::from_millis(20);
/// The migration capability that leaves shared RAM out of the stream.
pub(crate) const IGNORE_SHARED: &str = "x-ignore-shared";
/// The one that has QEMU wait before it sends the devices, when the guest stands.
pub(crate) const PAUSES_FIRST: &str = "pause-before-switchover";
/// A session goes on until its time is over.
static ALWAYS: fn() -> bool = || true;

/// Why QEMU did not do what it was asked.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs, reason = "each sentence says what it is")]
pub enum MonitorError {
    #[error("cannot connect to QEMU's monitor {socket}")]
    Connect { socket: String, source: io::Error },
    #[error("the monitor {socket} belongs to process {is}, and not to {expected}; start the guest again")]
    Foreign { socket: String, is: i32, expected: i32 },
    #[error(transparent)]
    Qmp(#[from] QmpError),
    #[error("QEMU does not end {0}")]
    Endless(&'static str),
    #[error(
        "QEMU did not put back what was written to disk {0}, whose new image keeps it: see that its file system has room \
         and takes writes"
    )]
    NotPutBack(String),
    #[error("QEMU cannot write or read the device stream: {0}")]
    Stream(String),
}

impl From<io::Error> for MonitorError {
    fn from(error: io::Error) -> Self {
        QmpError::from(error).into()
    }
}

/// Whether a migration capability is on.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Capability {
    On,
    Off,
}

/// A session with it.
pub(crate) struct Monitor(Qmp<'static, UnixStream>);

impl AsFd for Monitor {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

impl Monitor {
    /// Connects to the monitor of a process.
    pub(crate) fn connect(socket: &Path, pid: i32) -> Result<Self, MonitorError> {
        Self::connect_by(None, socket, pid)
    }

    /// The same, on a [`Monitor::reach`]ed connection for the first time.
    pub(crate) fn connect_by(mut reached: Option<UnixStream>, socket: &Path, pid: i32) -> Result<Self, MonitorError> {
        let start = Instant::now();
        loop {
            let reach = || Ok(Self::reach(socket, pid, ANSWER.saturating_sub(start.elapsed()))?.0);
            let stream = reached.take().map_or_else(reach, Ok::<_, MonitorError>)?;
            match Qmp::open(stream, FIRST_ANSWER, &ALWAYS) {
                Err(QmpError::Io(_)) if start.elapsed() < ANSWER => std::thread::sleep(PAUSE),
                opened => return Ok(Self(opened?)),
            }
        }
    }

    /// A connection to a monitor that a process listens on. It has not answered yet. Gives as which
    /// user it began to listen, too.
    pub(crate) fn reach(socket: &Path, pid: i32, limit: Duration) -> Result<(UnixStream, u32), MonitorError> {
        let name = || socket.display().to_string();
        let failed = |source: io::Error| MonitorError::Connect { socket: name(), source };
        let address = SocketAddr::from_pathname(socket).map_err(failed)?;
        let stream = connect_within(&address, limit).map_err(failed)?;
        let Peer { pid: is, uid, .. } = Peer::of(&stream)?;
        if is != pid {
            return Err(MonitorError::Foreign { socket: name(), is, expected: pid });
        }
        Ok((stream, uid))
    }

    /// Begins a session on a connected socket.
    pub(crate) fn begin(stream: UnixStream) -> Result<Self, MonitorError> {
        Ok(Self(Qmp::open(stream, ANSWER, &ALWAYS)?))
    }

    /// Executes a command; gives what it returns.
    pub(crate) fn execute(&mut self, command: &str, arguments: Value) -> Result<Value, MonitorError> {
        self.0.extend(ANSWER);
        Ok(self.0.execute(command, arguments)?)
    }

    /// Gives QEMU a descriptor by this name.
    pub(crate) fn give(&mut self, name: &str, fd: impl AsFd) -> Result<(), MonitorError> {
        self.0.extend(ANSWER);
        Ok(self.0.give(name, fd)?)
    }

    /// Where QEMU has the guest's first page.
    pub(crate) fn first_page(&mut self) -> Result<Option<u64>, MonitorError> {
        self.0.extend(ANSWER);
        Ok(self.0.host_address(0)?)
    }

    /// The guest's state: `running`, `paused`, `postmigrate`, and so on.
    pub(crate) fn state(&mut self) -> Result<String, MonitorError> {
        Ok(self.execute("query-status", json!({}))?["status"].as_str().unwrap_or_default().to_owned())
    }

    /// Sets a migration capability.
    pub(crate) fn set_capability(&mut self, name: &str, to: Capability) -> Result<(), MonitorError> {
        let all = json!({ "capabilities": [{ "capability": name, "state": to == Capability::On }] });
        self.execute("migrate-set-capabilities", all).map(drop)
    }

    /// Whether no migration is on its way, by the answer to `query-migrate`.
    pub(crate) fn is_over(answer: &Value) -> bool {
        matches!(answer["status"].as_str(), None | Some("none" | "completed" | "failed" | "cancelled"))
    }

    /// Asks, for at most `limit`, until the answer to `question` satisfies `ended`; gives it.
    pub(crate) fn until(
        &mut self,
        (question, what): (&str, &'static str),
        limit: Duration,
        ended: impl Fn(&Value) -> bool,
    ) -> Result<Value, MonitorError> {
        let start = Instant::now();
        loop {
            let answer = self.execute(question, json!({}))?;
            if ended(&answer) {
                return Ok(answer);
            }
            if start.elapsed() > limit {
                return Err(MonitorError::Endless(what));
            }
            std::thread::sleep((start.elapsed() / 8).clamp(POLL, LONGEST_POLL));
        }
    }

    /// Waits for the end of a migration, in either direction.
    pub(crate) fn migrated(&mut self, limit: Duration) -> Result<(), MonitorError> {
        let has_ended = |answer: &Value| answer["status"].is_string() && Self::is_over(answer);
        let answer = self.until(("query-migrate", "the device stream"), limit, has_ended)?;
        if answer["status"] == "completed" { Ok(()) } else { Err(Self::why(&answer)) }
    }

    /// Why a migration has failed, by the answer to `query-migrate`.
    pub(crate) fn why(answer: &Value) -> MonitorError {
        let why = answer["error-desc"].as_str().unwrap_or("QEMU does not say why; see its standard error");
        MonitorError::Stream(why.to_owned())
    }
}

#[cfg(test)]
mod tests;
