//! Standard output and standard error, checked.
//!
//! `print!` panics when nobody reads any more, and loses what does not fit on a full device. Here
//! each text is written through to the end, and a failure is an error of the caller:
//!
//! | what happens | error | how the program ends |
//! |---|---|---|
//! | the reader of a pipe has ended | [`StdoutError::Closed`] | by SIGPIPE, silently, as `cat` does |
//! | the device is full, or fails | [`StdoutError::Failed`] | with a message and exit code 1 |
//!
//! What goes to standard error is a note beside the answer: nothing depends on it, so a failure
//! to write it is ignored.

use std::error::Error;
use std::fmt::Arguments;
use std::io::{self, StdoutLock, Write};

use crate::text::{note, shown};

/// Standard output cannot be written.
#[derive(Debug, thiserror::Error)]
pub enum StdoutError {
    /// The reader has ended: EPIPE.
    #[error("nobody reads standard output any more")]
    Closed,
    /// Any other failure, such as a full device.
    #[error("what was done is done, but its output is cut short: cannot write to standard output")]
    Failed(#[source] io::Error),
}

impl From<io::Error> for StdoutError {
    fn from(error: io::Error) -> Self {
        match error.kind() {
            io::ErrorKind::BrokenPipe => Self::Closed,
            _ => Self::Failed(error),
        }
    }
}

/// Prints a text on standard output. Arguments as of `print!`; evaluates to a `Result`.
#[macro_export]
macro_rules! put {
    ($($arg:tt)*) => { $crate::print(format_args!($($arg)*)) };
}

/// Prints a line on standard output. Arguments as of `println!`; evaluates to a `Result`.
#[macro_export]
macro_rules! line {
    ($($arg:tt)*) => { $crate::print(format_args!("{}\n", format_args!($($arg)*))) };
}

/// Says something on standard error, behind the program's name. Arguments as of `eprintln!`.
#[macro_export]
macro_rules! note {
    ($($arg:tt)*) => { $crate::say(format_args!("pageone: {}", format_args!($($arg)*))) };
}

/// Writes a text to standard output, through to whoever reads it. What a terminal would obey is
/// escaped ([`shown`]).
///
/// # Errors
///
/// The write's.
pub fn print(text: Arguments<'_>) -> Result<(), StdoutError> {
    write(shown(&text.to_string()).as_bytes())
}

/// Writes control sequences of the program's own to a terminal.
///
/// # Errors
///
/// The write's.
pub fn control(sequences: &str) -> Result<(), StdoutError> {
    write(sequences.as_bytes())
}

fn write(bytes: &[u8]) -> Result<(), StdoutError> {
    let mut out = io::stdout().lock();
    Ok(out.write_all(bytes).and_then(|()| out.flush())?)
}

/// The columns of the terminal that standard output is; none: it is another file, or has none.
pub fn width() -> Option<usize> {
    let size = rustix::termios::tcgetwinsize(io::stdout()).ok()?;
    Some(usize::from(size.ws_col)).filter(|&columns| columns > 0)
}

/// Writes a text to standard error, and ends the line; [`note`](crate::note) calls it.
pub fn say(text: Arguments<'_>) {
    // In one piece: other processes write there, too.
    let _ = io::stderr().lock().write_all(format!("{}\n", note(&text.to_string())).as_bytes());
}

/// Standard output as a [`Write`]r, for what is long or no text. Its errors are [`StdoutError`]s
/// inside of [`io::Error`]s.
pub struct Stdout(StdoutLock<'static>);

impl Stdout {
    /// Takes standard output until it is dropped.
    pub fn lock() -> Self {
        Self(io::stdout().lock())
    }
}

fn wrapped(error: io::Error) -> io::Error {
    match error.kind() {
        io::ErrorKind::Interrupted => error,
        kind => io::Error::new(kind, StdoutError::from(error)),
    }
}

impl Write for Stdout {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.0.write(bytes).map_err(wrapped)
    }

    fn flush(&mut self) -> io::Result<()> {
        self.0.flush().map_err(wrapped)
    }
}

/// Whether an error is that nobody reads standard output any more.
pub fn is_closed(error: &(dyn Error + 'static)) -> bool {
    let inner = error.downcast_ref::<io::Error>().and_then(|error| error.get_ref());
    let inner = inner.and_then(|inner| inner.downcast_ref::<StdoutError>());
    matches!(error.downcast_ref::<StdoutError>().or(inner), Some(StdoutError::Closed))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_closed_pipe_is_told_from_a_full_device_and_from_other_pipes() {
        let of = |kind: io::ErrorKind| wrapped(kind.into());
        assert!(is_closed(&of(io::ErrorKind::BrokenPipe)) && is_closed(&StdoutError::Closed));
        assert!(!is_closed(&of(io::ErrorKind::StorageFull)));
        assert!(!is_closed(&io::Error::from(io::ErrorKind::BrokenPipe)), "of a socket");
        assert_eq!(of(io::ErrorKind::Interrupted).kind(), io::ErrorKind::Interrupted);
    }
}
