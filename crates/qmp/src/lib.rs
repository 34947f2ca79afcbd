//! A session with QEMU's monitor, by QMP (docs/interop/qmp-spec.rst of QEMU).
//!
//! A command is a line of JSON, and so is its answer. An earlier client may have used the socket:
//! QEMU gives the answer to a client that has ended to the next one. Events come at any time. So
//! every command carries an id, and messages that do not answer it are skipped, as is QEMU's
//! greeting.

use std::io::{self, BufRead, BufReader, IoSlice, Read, Write};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use rustix::net::{RecvFlags, SendAncillaryBuffer, SendAncillaryMessage, SendFlags};
use serde::Deserialize;
use serde_json::{Value, json};

/// The longest answer, in bytes. Of each image of a disk QEMU says some kilobytes.
const MAX_ANSWER: u64 = 64 << 20;
/// How many values an answer may have. Each takes more memory than its text.
const MAX_VALUES: usize = 1 << 20;
/// How deep an answer may be nested. QEMU describes each image within the one above it.
const MAX_DEPTH: usize = 1000;
/// How often a session looks whether it is still wanted.
const STEP: Timespec = Timespec { tv_sec: 0, tv_nsec: 200_000_000 };

/// Why QEMU did not do what it was asked.
#[derive(Debug, thiserror::Error)]
pub enum QmpError {
    /// The socket failed, or QEMU did not answer in time.
    #[error("QEMU's monitor does not answer: {0}. Another program may be using it, or QEMU has ended")]
    Io(#[from] io::Error),
    /// The answer is not what the protocol says.
    #[error("QEMU's monitor: not understood: {0}")]
    Malformed(String),
    /// QEMU refused a command.
    #[error("QEMU refuses {command}: {why}")]
    Refused {
        /// The command.
        command: String,
        /// QEMU's words.
        why: String,
    },
}

/// The socket. The client may hold our end of it, too, and change its settings, so none of them is
/// relied on: no call waits, and the waits between them end.
struct Socket<'a, F> {
    fd: F,
    deadline: Instant,
    goes_on: &'a (dyn Fn() -> bool + Sync),
}

impl<F: AsFd> Socket<'_, F> {
    /// Tries until it is done, however few bytes come at a time, or the time is over.
    fn patiently(&self, flags: PollFlags, mut attempt: impl FnMut() -> Result<usize, Errno>) -> io::Result<usize> {
        loop {
            if Instant::now() >= self.deadline || !(self.goes_on)() {
                return Err(io::ErrorKind::TimedOut.into());
            }
            match attempt() {
                Err(Errno::AGAIN) => drop(poll(&mut [PollFd::new(&self.fd, flags)], Some(&STEP))),
                // `read_line` would begin again at once, without a look at the time.
                Err(Errno::INTR) => {}
                done => return Ok(done?),
            }
        }
    }

    /// Sends bytes, the first ones with a descriptor.
    fn send(&self, bytes: &[u8], fd: Option<BorrowedFd<'_>>) -> io::Result<usize> {
        let fds: Vec<BorrowedFd<'_>> = fd.into_iter().collect();
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
        let mut control = SendAncillaryBuffer::new(&mut space);
        if !fds.is_empty() {
            control.push(SendAncillaryMessage::ScmRights(&fds));
        }
        let flags = SendFlags::DONTWAIT | SendFlags::NOSIGNAL;
        self.patiently(PollFlags::OUT, || rustix::net::sendmsg(&self.fd, &[IoSlice::new(bytes)], &mut control, flags))
    }
}

impl<F: AsFd> Read for Socket<'_, F> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let this = &*self;
        this.patiently(PollFlags::IN, || {
            rustix::net::recv(&this.fd, &mut *buffer, RecvFlags::DONTWAIT).map(|(_, bytes)| bytes)
        })
    }
}

impl<F: AsFd> Write for Socket<'_, F> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.send(bytes, None)
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// A session. There is one at a time on a socket: two would take each other's answers.
pub struct Qmp<'a, F> {
    stream: BufReader<Socket<'a, F>>,
    /// Tells this session's answers from an earlier one's.
    session: u128,
    next: u64,
}

/// Throws away events that nobody waits for: otherwise QEMU would keep them, without end. Not
/// during a session.
pub fn drain(socket: impl AsFd) {
    let mut scrap = [0; 4096];
    // At most what a socket holds; the next time takes the rest.
    for _ in 0..64 {
        match rustix::net::recv(&socket, &mut scrap, RecvFlags::DONTWAIT) {
            Ok((_, 1..)) => {}
            _ => return,
        }
    }
}

impl<F: AsFd> AsFd for Qmp<'_, F> {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.stream.get_ref().fd.as_fd()
    }
}

impl<'a, F: AsFd> Qmp<'a, F> {
    /// Begins a session of at most `limit`: a QEMU that has just begun answers late. All calls
    /// block, as long as `goes_on` says so.
    ///
    /// # Errors
    /// The socket fails, the time is over, or an answer cannot be understood.
    pub fn open(fd: F, limit: Duration, goes_on: &'a (dyn Fn() -> bool + Sync)) -> Result<Self, QmpError> {
        let socket = Socket { fd, deadline: Instant::now() + limit, goes_on };
        let session = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |t| t.as_nanos());
        let mut qmp = Qmp { stream: BufReader::new(socket), session, next: 0 };
        match qmp.execute("qmp_capabilities", json!({})) {
            // It refuses a second time: an earlier session has sent it.
            Ok(_) | Err(QmpError::Refused { .. }) => Ok(qmp),
            Err(e) => Err(e),
        }
    }

    /// The session may go on for so long from now.
    pub fn extend(&mut self, limit: Duration) {
        self.stream.get_mut().deadline = Instant::now() + limit;
    }

    /// Sends a command and waits for its answer; gives what it returns.
    ///
    /// # Errors
    /// As [`Qmp::open`]; QEMU refuses the command.
    pub fn execute(&mut self, command: &str, arguments: Value) -> Result<Value, QmpError> {
        self.execute_with(command, arguments, None)
    }

    /// Gives QEMU a descriptor by this name (`getfd`).
    ///
    /// # Errors
    /// As [`Qmp::execute`].
    pub fn give(&mut self, name: &str, fd: impl AsFd) -> Result<(), QmpError> {
        self.execute_with("getfd", json!({ "fdname": name }), Some(fd.as_fd())).map(drop)
    }

    fn execute_with(&mut self, command: &str, arguments: Value, fd: Option<BorrowedFd<'_>>) -> Result<Value, QmpError> {
        self.next += 1;
        let id = format!("pageone-{}-{}", self.session, self.next);
        let mut line = json!({ "execute": command, "arguments": arguments, "id": id }).to_string();
        line.push('\n');
        let sent = self.stream.get_ref().send(line.as_bytes(), fd)?;
        self.stream.get_mut().write_all(&line.as_bytes()[sent..])?;
        loop {
            let mut line = String::new();
            let read = Read::take(&mut self.stream, MAX_ANSWER).read_line(&mut line)?;
            if read == 0 {
                return Err(io::Error::from(io::ErrorKind::UnexpectedEof).into());
            }
            if read as u64 == MAX_ANSWER && !line.ends_with('\n') {
                return Err(QmpError::Malformed(format!("an answer of more than {MAX_ANSWER} bytes")));
            }
            let mut answer = parse(&line)?;
            if answer["id"] != *id {
                continue;
            }
            if let Some(error) = answer.get("error") {
                let why = error["desc"].as_str().unwrap_or("no reason given").to_string();
                return Err(QmpError::Refused { command: command.into(), why });
            }
            return Ok(answer["return"].take());
        }
    }

    /// A command of the human monitor; gives what it prints.
    ///
    /// # Errors
    /// As [`Qmp::execute`].
    pub fn monitor(&mut self, line: &str) -> Result<String, QmpError> {
        let answer = self.execute("human-monitor-command", json!({ "command-line": line }))?;
        answer.as_str().map(str::to_string).ok_or_else(|| QmpError::Malformed(format!("{line}: no text")))
    }

    /// The address in QEMU's memory of a guest-physical address. `None`: no RAM is there.
    ///
    /// # Errors
    /// As [`Qmp::execute`].
    pub fn host_address(&mut self, guest: u64) -> Result<Option<u64>, QmpError> {
        Ok(parse_gpa2hva(&self.monitor(&format!("gpa2hva {guest:#x}"))?))
    }
}

/// A line of JSON, nested no deeper than the stack bears.
///
/// # Errors
/// [`QmpError::Malformed`].
pub fn parse(line: &str) -> Result<Value, QmpError> {
    let (mut depth, mut values, mut in_text, mut escaped) = (0_usize, 0, false, false);
    for byte in line.bytes() {
        match byte {
            _ if escaped => escaped = false,
            b'\\' => escaped = in_text,
            b'"' => in_text = !in_text,
            b',' if !in_text => values += 1,
            b'[' | b'{' if !in_text => depth += 1,
            b']' | b'}' if !in_text => depth = depth.saturating_sub(1),
            _ => {}
        }
        if depth > MAX_DEPTH || values > MAX_VALUES {
            let why = format!("an answer nested more than {MAX_DEPTH} deep, or of more than {MAX_VALUES} values");
            return Err(QmpError::Malformed(why));
        }
    }
    let mut reader = serde_json::Deserializer::from_str(line);
    reader.disable_recursion_limit();
    let value = Value::deserialize(&mut reader).and_then(|value| reader.end().map(|()| value));
    value.map_err(|error| QmpError::Malformed(error.to_string()))
}

/// `Host virtual address for 0x100000 (pc.ram) is 0x7f0bbbf00000`.
fn parse_gpa2hva(text: &str) -> Option<u64> {
    let (_, address) = text.trim().rsplit_once(" is 0x")?;
    u64::from_str_radix(address, 16).ok()
}

#[cfg(test)]
mod tests;
