//! The service manager (systemd): what it is told, and the log that it keeps.
//!
//! Sources: sd_notify(3); systemd.exec(5) on `JOURNAL_STREAM`; sd-daemon(3) on priorities.

use std::io::{self, Write};
use std::os::fd::AsFd;
use std::os::unix::net::UnixDatagram;
use std::path::PathBuf;

use output::text::note;
use tracing::{Level, Metadata};
use tracing_subscriber::fmt::MakeWriter;

/// Tells the service manager, if there is one (`Type=notify`).
pub(crate) fn notify(state: &str) {
    if let Some(socket) = std::env::var_os("NOTIFY_SOCKET")
        && let Ok(datagram) = UnixDatagram::unbound()
    {
        use std::os::linux::net::SocketAddrExt;
        use std::os::unix::ffi::OsStrExt;
        let _ = match socket.as_bytes().strip_prefix(b"@") {
            Some(name) => std::os::unix::net::SocketAddr::from_abstract_name(name)
                .and_then(|address| datagram.send_to_addr(state.as_bytes(), &address)),
            None => datagram.send_to(state.as_bytes(), PathBuf::from(socket)),
        };
    }
}

/// The settings are being read again; `READY=1` must follow.
pub(crate) fn notify_reloading() {
    let now = rustix::time::clock_gettime(rustix::time::ClockId::Monotonic);
    let micros = now.tv_sec as u64 * 1_000_000 + now.tv_nsec as u64 / 1000;
    notify(&format!("RELOADING=1\nMONOTONIC_USEC={micros}"));
}

/// Whether standard error is the journal's: the variable names its device and inode. A program
/// that was started by a service, with other output, inherits the variable only.
pub(crate) fn logs_to_journal() -> bool {
    let stream = std::env::var("JOURNAL_STREAM").unwrap_or_default();
    let Ok(stat) = rustix::fs::fstat(io::stderr().as_fd()) else { return false };
    stream == format!("{}:{}", stat.st_dev, stat.st_ino)
}

/// Writes events to standard error. What a terminal would obey is escaped.
pub(crate) struct Log;

impl<'a> MakeWriter<'a> for Log {
    type Writer = Line;

    fn make_writer(&'a self) -> Line {
        Line(None)
    }
}

/// The same with the priority before each line, as the journal reads it.
pub(crate) struct Journal;

impl<'a> MakeWriter<'a> for Journal {
    type Writer = Line;

    fn make_writer(&'a self) -> Line {
        Line(Some(6))
    }

    fn make_writer_for(&'a self, meta: &Metadata<'_>) -> Line {
        Line(Some(priority(*meta.level())))
    }
}

/// A level as syslog(3) counts.
fn priority(level: Level) -> u8 {
    match level {
        Level::ERROR => 3,
        Level::WARN => 4,
        Level::INFO => 6,
        Level::DEBUG | Level::TRACE => 7,
    }
}

/// Text, with this priority before each of its lines. An event comes in one piece.
pub(crate) struct Line(pub(crate) Option<u8>);

impl Write for Line {
    fn write(&mut self, event: &[u8]) -> io::Result<usize> {
        let text = String::from_utf8_lossy(event);
        let text = note(&text) + "\n";
        match self.0 {
            Some(priority) => io::stderr().write_all(&with_priority(priority, text.as_bytes()))?,
            None => io::stderr().write_all(text.as_bytes())?,
        }
        Ok(event.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// Puts a priority before each line.
fn with_priority(priority: u8, text: &[u8]) -> Vec<u8> {
    let prefix = format!("<{priority}>");
    text.split_inclusive(|&byte| byte == b'\n').flat_map(|line| [prefix.as_bytes(), line]).flatten().copied().collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_line_gets_the_priority_of_its_event() {
        assert_eq!(with_priority(4, b"one\ntwo\n"), b"<4>one\n<4>two\n");
        assert_eq!([Level::ERROR, Level::WARN, Level::INFO, Level::TRACE].map(priority), [3, 4, 6, 7]);
    }
}
