//! The agent inside a guest (qemu-guest-agent), if the command line gives it a port: it sets the
//! clock of a clone, and says that the guest's programs run.
//!
//! The port is a virtio-serial port by the agent's name, behind a Unix socket of QEMU's. Protocol:
//! lines of JSON; docs/interop/qemu-ga-ref of QEMU.

use std::io::{self, BufRead, BufReader, Write};
use std::os::unix::net::{SocketAddr, UnixStream};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use kmem::peer::{Peer, connect_within};
use serde_json::{Value, json};

use crate::monitor::{Monitor, MonitorError};
use guests::words::{Opt, options, parts};

/// The port's name.
const PORT: &str = "org.qemu.guest_agent.0";
/// How long the agent may take to answer.
const ANSWER: Duration = Duration::from_secs(10);
/// How long QEMU may take to find out that the guest has the port open, and time between questions.
const MOMENT: Duration = Duration::from_secs(1);
const PAUSE: Duration = Duration::from_millis(20);
/// Bytes of the longest answer.
const LONGEST: usize = 1 << 16;
/// With this byte the agent forgets what it has read of a command, and it stands before the answer
/// to `guest-sync-delimited`.
const BEGIN: u8 = 0xff;

/// Why the agent does not do what it is asked.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs, reason = "each sentence says what it is")]
pub enum AgentError {
    #[error("the guest's agent does not answer: {0}")]
    Io(#[from] io::Error),
    #[error("the guest's agent refuses {command}: {why}")]
    Refused { command: &'static str, why: String },
    #[error(transparent)]
    Qmp(#[from] MonitorError),
}

/// Why a guest has no agent.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum NoAgent {
    /// The command line has no port for one.
    Port,
    /// No program in the guest has opened the port.
    Program,
}

/// The port of an agent.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Port {
    /// QEMU's name for the socket.
    label: String,
    pub(crate) socket: PathBuf,
}

impl Port {
    /// The port that a command line gives the agent, if it is behind a Unix socket on which QEMU
    /// listens.
    pub(crate) fn find(words: &[String]) -> Option<Self> {
        let is_it = |option: &Opt<'_>| option.name == "device" && option.part("name").as_deref() == Some(PORT);
        let label = options(words).find(is_it)?.part("chardev")?.into_owned();
        let named =
            options(words).find(|option| option.name == "chardev" && option.part("id").as_deref() == Some(&label));
        let socket = named.filter(|option| option.first() == "socket")?;
        let listens =
            socket.part("server").is_some_and(|on| on == "on") || parts(socket.value).any(|part| part == "server");
        Some(Self { socket: socket.part("path").filter(|_| listens)?.into_owned().into(), label })
    }

    /// Whether a program in the guest has the port open. QEMU finds out a moment after a clone goes
    /// on.
    pub(crate) fn is_open(&self, qmp: &mut Monitor) -> Result<bool, MonitorError> {
        let start = Instant::now();
        let open = |one: &Value| one["label"] == self.label.as_str() && one["frontend-open"] == true;
        loop {
            let all = qmp.execute("query-chardev", json!({}))?;
            let is_open = all.as_array().is_some_and(|all| all.iter().any(open));
            if is_open || start.elapsed() > MOMENT {
                return Ok(is_open);
            }
            std::thread::sleep(PAUSE);
        }
    }
}

/// A session with an agent.
pub(crate) struct Agent {
    from: BufReader<UnixStream>,
    /// Until when it may answer, however little it says at a time.
    end: Instant,
}

impl Agent {
    /// Begins a session: what the agent still has to say to another one is skipped.
    ///
    /// `qemu`: the process that listens there. The socket lies in the clone's directory, and
    /// another account than the caller's may have put another one there.
    pub(crate) fn connect(socket: &Path, qemu: u32) -> Result<Self, AgentError> {
        let stream = connect_within(&SocketAddr::from_pathname(socket)?, MOMENT)?;
        if Peer::of(&stream)?.pid != qemu as i32 {
            return Err(io::Error::other("another process listens in its place").into());
        }
        stream.set_write_timeout(Some(ANSWER))?;
        let mut agent = Self { from: BufReader::new(stream), end: Instant::now() + ANSWER };
        let id = u64::from(std::process::id()) << 20 | u64::from(since_1970().subsec_micros());
        let sync = json!({ "execute": "guest-sync-delimited", "arguments": { "id": id } });
        agent.from.get_mut().write_all(&[&[BEGIN][..], format!("{sync}\n").as_bytes()].concat())?;
        loop {
            agent.skip_until_begin()?;
            if agent.answer()?["return"] == id {
                return Ok(agent);
            }
        }
    }

    /// What it has said, which is waited for.
    fn said(&mut self) -> io::Result<&[u8]> {
        let left = self.end.saturating_duration_since(Instant::now());
        if left.is_zero() {
            return Err(io::ErrorKind::TimedOut.into());
        }
        self.from.get_ref().set_read_timeout(Some(left))?;
        self.from.fill_buf()
    }

    fn skip_until_begin(&mut self) -> io::Result<()> {
        let mut skipped = 0;
        while skipped < LONGEST {
            let bytes = self.said()?;
            let (used, found) = match bytes.iter().position(|byte| *byte == BEGIN) {
                Some(at) => (at + 1, true),
                None => (bytes.len(), false),
            };
            if used == 0 {
                return Err(io::ErrorKind::UnexpectedEof.into());
            }
            self.from.consume(used);
            if found {
                return Ok(());
            }
            skipped += used;
        }
        Err(io::Error::other("it says something else"))
    }

    /// A line of JSON.
    fn answer(&mut self) -> io::Result<Value> {
        let mut line = Vec::new();
        while !line.ends_with(b"\n") {
            let bytes = self.said()?;
            let used = bytes.iter().position(|byte| *byte == b'\n').map_or(bytes.len(), |at| at + 1);
            if used == 0 {
                return Err(io::ErrorKind::UnexpectedEof.into());
            }
            line.extend(&bytes[..used]);
            self.from.consume(used);
            if line.len() > LONGEST {
                return Err(io::Error::other("its answer is too long"));
            }
        }
        Ok(serde_json::from_slice(&line)?)
    }

    fn execute(&mut self, command: &'static str, arguments: Value) -> Result<Value, AgentError> {
        let line = json!({ "execute": command, "arguments": arguments });
        self.end = Instant::now() + ANSWER;
        writeln!(self.from.get_mut(), "{line}")?;
        let answer = self.answer()?;
        let Some(error) = answer.get("error") else { return Ok(answer["return"].clone()) };
        Err(AgentError::Refused { command, why: error["desc"].as_str().unwrap_or("it does not say why").into() })
    }

    /// Whether the guest's programs run.
    pub(crate) fn ping(&mut self) -> Result<(), AgentError> {
        self.execute("guest-ping", json!({})).map(drop)
    }

    /// Whether the guest's kernel has a driver for `vmgenid`, which tells it that it is a clone.
    pub(crate) fn knows_vmgenid(&mut self) -> Result<bool, AgentError> {
        // By the kernel's version.
        for bus in ["acpi", "platform"] {
            let driver = json!({ "path": format!("/sys/bus/{bus}/drivers/vmgenid"), "mode": "r" });
            match self.execute("guest-file-open", driver) {
                Ok(handle) => return self.execute("guest-file-close", json!({ "handle": handle })).map(|_| true),
                Err(AgentError::Refused { .. }) => {}
                Err(error) => return Err(error),
            }
        }
        Ok(false)
    }

    /// Sets the guest's clocks to this host's.
    pub(crate) fn set_time(&mut self) -> Result<(), AgentError> {
        self.execute("guest-set-time", json!({ "time": since_1970().as_nanos() as u64 })).map(drop)
    }
}

fn since_1970() -> Duration {
    SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default()
}

#[cfg(test)]
mod tests;
