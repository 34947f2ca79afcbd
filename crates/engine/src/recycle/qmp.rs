//! Where a QEMU guest's RAM lies in QEMU's memory, by QMP (docs/interop/qmp-spec.rst of QEMU).
//!
//! No single command of QEMU gives the answer:
//!
//! 1. `query-memory-devices` names memory that may be unplugged. It is left out.
//! 2. The monitor's `info mtree -f` lists the ranges of the guest's physical addresses. RAM among
//!    them was there when QEMU started, and stays where it is until QEMU ends.
//! 3. `gpa2hva` gives the host's address of the first and of the last page of each range. Both must
//!    be equally far apart, or the range is not one piece.
//!
//! ```text
//! FlatView #0
//!  AS "memory", root: system
//!   0000000000000000-00000000000bffff (prio 0, ram): pc.ram
//!   00000000000c0000-00000000000dffff (prio 1, rom): pc.rom
//!   0000000000100000-000000007fffffff (prio 0, ram): pc.ram @0000000000100000
//!   0000000100000000-00000001bfffffff (prio 0, ram): pc.ram @0000000080000000
//! ```
//!
//! An earlier daemon may have used the socket, and events come at any time. So every command
//! carries an id, and messages that do not answer it are skipped.

use std::io::{self, BufRead, BufReader, Read, Write};
use std::ops::Range;
use std::os::fd::OwnedFd;
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use rustix::net::{RecvFlags, SendFlags};

use serde_json::{Value, json};

/// The first guest-physical address that is looked at, in bytes. Firmware makes memory below it RAM
/// or ROM while it runs.
const FIRST: u64 = 1 << 20;
const PAGE: u64 = kmem::PAGE_SIZE as u64;
/// The longest answer, in bytes. QEMU's list of memory is some kilobytes.
const MAX_ANSWER: u64 = 1 << 20;

/// Why the guest's RAM could not be found.
#[derive(Debug, thiserror::Error)]
pub(crate) enum QmpError {
    /// The socket failed, or QEMU did not answer in time.
    #[error("QMP: {0}")]
    Io(#[from] io::Error),
    /// The answer is not what the protocol says.
    #[error("QMP: not understood: {0}")]
    Malformed(String),
    /// QEMU refused a command.
    #[error("QMP: {command}: {why}")]
    Refused {
        /// The command.
        command: String,
        /// QEMU's words.
        why: String,
    },
    /// RAM that QEMU lists has no host address, or not one piece.
    #[error("QEMU lists RAM at {0:#x} that is not one piece of its memory")]
    Torn(u64),
}

/// RAM of the guest: guest-physical addresses from `start` to `end`, at address `host` in QEMU's
/// memory. All in bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Ram {
    pub(crate) start: u64,
    pub(crate) end: u64,
    pub(crate) host: u64,
}

/// How often a session looks whether it is still wanted.
const STEP: Timespec = Timespec { tv_sec: 0, tv_nsec: 200_000_000 };

/// The socket. The client may hold our end of it, too, and change its settings, so none of them is
/// relied on: no call waits, and the waits between them end.
struct Socket<'a> {
    fd: OwnedFd,
    deadline: Instant,
    goes_on: &'a dyn Fn() -> bool,
}

impl Socket<'_> {
    /// Tries until it is done, however few bytes come at a time, or the time is over.
    fn patiently(&self, flags: PollFlags, attempt: impl Fn() -> Result<usize, Errno>) -> io::Result<usize> {
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
}

impl Read for Socket<'_> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let fd = &self.fd;
        let buffer = std::cell::RefCell::new(buffer);
        self.patiently(PollFlags::IN, || {
            rustix::net::recv(fd, &mut **buffer.borrow_mut(), RecvFlags::DONTWAIT).map(|(_, bytes)| bytes)
        })
    }
}

impl Write for Socket<'_> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let flags = SendFlags::DONTWAIT | SendFlags::NOSIGNAL;
        self.patiently(PollFlags::OUT, || rustix::net::send(&self.fd, bytes, flags))
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// A QMP session.
struct Qmp<'a> {
    stream: BufReader<Socket<'a>>,
    /// Tells this session's answers from an earlier one's.
    session: u128,
    next: u64,
}

/// Asks QEMU at the other end where its guest's RAM lies. Waits for at most `limit`: a QEMU that
/// has just begun answers late. Blocks, as long as `goes_on` says so.
///
/// # Errors
/// The socket fails, the time is over, an answer cannot be understood, or RAM is not in one piece.
pub(crate) fn find_ram(socket: OwnedFd, limit: Duration, goes_on: &dyn Fn() -> bool) -> Result<Vec<Ram>, QmpError> {
    let socket = Socket { fd: socket, deadline: Instant::now() + limit, goes_on };
    let session = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).map_or(0, |t| t.as_nanos());
    let mut qmp = Qmp { stream: BufReader::new(socket), session, next: 0 };
    match qmp.execute("qmp_capabilities", json!({})) {
        // It refuses a second time: an earlier session has sent it.
        Ok(_) | Err(QmpError::Refused { .. }) => {}
        Err(e) => return Err(e),
    }
    let mut found = Vec::new();
    let removable = removable(&qmp.execute("query-memory-devices", json!({}))?);
    let text = qmp.monitor("info mtree -f")?;
    for range in parse_mtree(&text) {
        if removable.iter().any(|device| device.start < range.end && range.start < device.end) {
            continue;
        }
        let host = qmp.host_address(range.start)?;
        let last = qmp.host_address(range.end - PAGE)?;
        if last.checked_sub(host) != Some(range.end - PAGE - range.start) || host % PAGE != 0 {
            return Err(QmpError::Torn(range.start));
        }
        found.push(Ram { start: range.start, end: range.end, host });
    }
    Ok(found)
}

impl Qmp<'_> {
    /// Sends a command and waits for its answer.
    fn execute(&mut self, command: &str, arguments: Value) -> Result<Value, QmpError> {
        self.next += 1;
        let id = format!("pageone-{}-{}", self.session, self.next);
        let mut line = json!({ "execute": command, "arguments": arguments, "id": id }).to_string();
        line.push('\n');
        self.stream.get_mut().write_all(line.as_bytes())?;
        loop {
            let mut line = String::new();
            let read = Read::take(&mut self.stream, MAX_ANSWER).read_line(&mut line)?;
            if read == 0 {
                return Err(io::Error::from(io::ErrorKind::UnexpectedEof).into());
            }
            let answer: Value = serde_json::from_str(&line).map_err(|e| QmpError::Malformed(e.to_string()))?;
            if answer["id"] != *id {
                continue;
            }
            if let Some(error) = answer.get("error") {
                let why = error["desc"].as_str().unwrap_or("no reason given").to_string();
                return Err(QmpError::Refused { command: command.into(), why });
            }
            return Ok(answer["return"].clone());
        }
    }

    /// A command of the human monitor.
    fn monitor(&mut self, line: &str) -> Result<String, QmpError> {
        let answer = self.execute("human-monitor-command", json!({ "command-line": line }))?;
        answer.as_str().map(str::to_string).ok_or_else(|| QmpError::Malformed(format!("{line}: no text")))
    }

    fn host_address(&mut self, guest: u64) -> Result<u64, QmpError> {
        let text = self.monitor(&format!("gpa2hva {guest:#x}"))?;
        parse_gpa2hva(&text).ok_or(QmpError::Torn(guest))
    }
}

/// `Host virtual address for 0x100000 (pc.ram) is 0x7f0bbbf00000`.
fn parse_gpa2hva(text: &str) -> Option<u64> {
    let (_, address) = text.trim().rsplit_once(" is 0x")?;
    u64::from_str_radix(address, 16).ok()
}

/// RAM in the address space that CPUs see, above the firmware's first MiB.
fn parse_mtree(text: &str) -> Vec<Range<u64>> {
    let mut found = Vec::new();
    let mut inside = false;
    for line in text.lines() {
        if line.starts_with("FlatView") {
            inside = false;
        } else if line.trim_start().starts_with("AS \"memory\",") {
            inside = true;
        } else if inside && let Some(range) = parse_ram(line) {
            found.push(range);
        }
    }
    found
}

/// The addresses of a line of the list, in whole pages, if it is RAM.
fn parse_ram(line: &str) -> Option<Range<u64>> {
    let (addresses, rest) = line.trim().split_once(' ')?;
    // Memory of devices, such as a screen's, has another priority.
    if !rest.starts_with("(prio 0, ram)") {
        return None;
    }
    let (start, last) = addresses.split_once('-')?;
    let number = |text| u64::from_str_radix(text, 16).ok();
    let (start, end) = (number(start)?.max(FIRST), number(last)?.checked_add(1)? / PAGE * PAGE);
    let start = start.checked_next_multiple_of(PAGE)?;
    (start < end).then_some(start..end)
}

/// Memory that may be unplugged, by guest-physical address, from the answer of
/// `query-memory-devices`. A device without an address is not mapped.
fn removable(answer: &Value) -> Vec<Range<u64>> {
    let devices = answer.as_array().into_iter().flatten();
    let range = |device: &Value| {
        let data = &device["data"];
        let start = data.get("addr").or_else(|| data.get("memaddr"))?.as_u64()?;
        // The size of a virtio-mem device is what is plugged now; it may grow up to `max-size`.
        let size = data.get("max-size").or_else(|| data.get("size"))?.as_u64()?;
        Some(start..start.saturating_add(size))
    };
    devices.filter_map(range).collect()
}

#[cfg(test)]
mod tests;
