//! Sizes, counts and lengths that a file, a peer or a guest merely says.
//!
//! Whoever writes a header can write any number into it, and whoever owns a directory can put any
//! kind of file there. So nothing is done because of what is said, only because of what is there:
//!
//! | what is said | what is done |
//! |---|---|
//! | "this is a file" | its kind is looked at before it is opened: [`open`], [`open_at`] |
//! | "this is a short file" | it is read up to a bound: [`read`], [`text`] |
//! | "`n` bytes follow" | memory is taken as they arrive, and `n` has a bound: [`exactly`] |
//! | "the line ends somewhere" | it is read up to a bound: [`line()`] |
//! | "more comes soon" | it is waited for until a deadline: [`Timed`] |
//! | "this describes `n` pages" | memory for it is held against the host's: [`memory`], [`zeroed`] |
//! | "I am yet another user" | it counts for the one who has the uid: [`Owner`] |
//! | "this belongs in the log" | a minute has so many lines: [`Lines`] |
//!
//! An error says what was claimed, what is allowed and what to do. It does not know of whom: the
//! caller names the file or the peer.

mod lines;
mod owner;

use std::fs::File;
use std::io::{self, BufRead, Read, Write};
use std::os::fd::AsFd;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::{Duration, Instant};

use rustix::fs::{AtFlags, CWD, FileType, Mode, OFlags, fcntl_getfl, fcntl_setfl, fstat, openat, statat};

pub use lines::Lines;
pub use owner::Owner;

/// Bytes that are allocated without a look at the host's memory.
const SMALL: u64 = 16 << 20;

/// Why a claim is not believed.
#[derive(Debug, thiserror::Error)]
pub enum ClaimError {
    /// It is another kind of file.
    #[error("it is {0}, and a regular file is needed; put one in its place, or name another")]
    Kind(&'static str),
    /// It is longer than such a thing can be.
    #[error("it has {claimed} bytes, and at most {most} are read; name the right one, or restore it")]
    Long {
        /// Bytes that it says it has, or more.
        claimed: u64,
        /// Bytes that it may have.
        most: u64,
    },
    /// Its end is missing.
    #[error("it ends too early: {claimed} bytes are announced, and {is} are there; copy it again from its source")]
    Short {
        /// Bytes that it says it has.
        claimed: u64,
        /// Bytes that came.
        is: u64,
    },
    /// The host does not have the memory.
    #[error(
        "it says that it needs {claimed} bytes of memory, and this host has {most} left. Free some, use a larger host, or \
         take it for damaged"
    )]
    Memory {
        /// Bytes that it would take.
        claimed: u64,
        /// Bytes that are available.
        most: u64,
    },
    /// It should be text.
    #[error("it is no text (UTF-8); name the right one, or restore it")]
    Text,
    /// It cannot be read.
    #[error(transparent)]
    Io(#[from] io::Error),
}

impl From<rustix::io::Errno> for ClaimError {
    fn from(errno: rustix::io::Errno) -> Self {
        Self::Io(errno.into())
    }
}

impl From<ClaimError> for io::Error {
    fn from(error: ClaimError) -> Self {
        match error {
            ClaimError::Io(error) => error,
            ClaimError::Memory { .. } => Self::new(io::ErrorKind::OutOfMemory, error),
            ClaimError::Short { .. } => Self::new(io::ErrorKind::UnexpectedEof, error),
            error => Self::new(io::ErrorKind::InvalidData, error),
        }
    }
}

/// Refuses all but regular files.
fn require_regular(mode: u32) -> Result<(), ClaimError> {
    Err(ClaimError::Kind(match FileType::from_raw_mode(mode) {
        FileType::RegularFile => return Ok(()),
        FileType::Directory => "a directory",
        FileType::Fifo => "a FIFO",
        FileType::Socket => "a socket",
        FileType::CharacterDevice => "a character device",
        FileType::BlockDevice => "a block device",
        FileType::Symlink => "a symbolic link",
        _ => "a special file",
    }))
}

/// Opens a regular file for reading. Links are followed; nothing else is waited for or opened:
/// opening a FIFO would wait for a writer, and opening a device may do something.
///
/// # Errors
/// [`ClaimError::Kind`]; those of `open(2)`.
pub fn open(path: &Path) -> Result<File, ClaimError> {
    open_at(CWD, path, OFlags::RDONLY, Mode::empty())
}

/// Opens a regular file of a directory, as `openat(2)` does with these flags.
///
/// # Errors
/// As [`open`].
pub fn open_at(directory: impl AsFd, name: &Path, flags: OFlags, mode: Mode) -> Result<File, ClaimError> {
    let links = if flags.contains(OFlags::NOFOLLOW) { AtFlags::SYMLINK_NOFOLLOW } else { AtFlags::empty() };
    match statat(&directory, name, links) {
        Err(rustix::io::Errno::NOENT) if flags.contains(OFlags::CREATE) => {}
        found => require_regular(found?.st_mode)?,
    }
    let waits = flags | OFlags::CLOEXEC | OFlags::NOCTTY;
    let file = openat(&directory, name, waits | OFlags::NONBLOCK, mode)?;
    // It may have been replaced since.
    require_regular(fstat(&file)?.st_mode)?;
    fcntl_setfl(&file, fcntl_getfl(&file)? - OFlags::NONBLOCK)?;
    Ok(file.into())
}

/// All of a regular file of at most `most` bytes.
///
/// # Errors
/// [`ClaimError::Long`]; those of [`open`].
pub fn read(path: &Path, most: u64) -> Result<Vec<u8>, ClaimError> {
    up_to(open(path)?, most)
}

/// All of a regular file of text, of at most `most` bytes.
///
/// # Errors
/// [`ClaimError::Text`]; those of [`read`].
pub fn text(path: &Path, most: u64) -> Result<String, ClaimError> {
    String::from_utf8(read(path, most)?).map_err(|_| ClaimError::Text)
}

/// All that comes, which is to be at most `most` bytes.
///
/// # Errors
/// [`ClaimError::Long`]; those of reading.
pub fn up_to(from: impl Read, most: u64) -> Result<Vec<u8>, ClaimError> {
    let mut bytes = Vec::new();
    from.take(most.saturating_add(1)).read_to_end(&mut bytes)?;
    let claimed = bytes.len() as u64;
    if claimed > most { Err(ClaimError::Long { claimed, most }) } else { Ok(bytes) }
}

/// The next line, with its end, of at most `most` bytes. Empty: nothing more comes.
///
/// # Errors
/// [`ClaimError::Long`]; those of reading.
pub fn line(from: &mut impl BufRead, most: u64) -> Result<Vec<u8>, ClaimError> {
    let mut line = Vec::new();
    from.take(most.saturating_add(1)).read_until(b'\n', &mut line)?;
    let claimed = line.len() as u64;
    if claimed > most { Err(ClaimError::Long { claimed, most }) } else { Ok(line) }
}

/// As many bytes as were announced. Memory is taken as they arrive.
///
/// # Errors
/// [`ClaimError::Long`]: more than `most` were announced; [`ClaimError::Short`]: fewer came; those
/// of reading.
pub fn exactly(from: impl Read, claimed: u64, most: u64) -> Result<Vec<u8>, ClaimError> {
    if claimed > most {
        return Err(ClaimError::Long { claimed, most });
    }
    let mut bytes = Vec::new();
    from.take(claimed).read_to_end(&mut bytes)?;
    let is = bytes.len() as u64;
    if is < claimed { Err(ClaimError::Short { claimed, is }) } else { Ok(bytes) }
}

/// A stream whose bytes must all arrive before a deadline, however few come at a time.
#[derive(Debug)]
pub struct Timed<'a> {
    stream: &'a UnixStream,
    deadline: Instant,
}

impl<'a> Timed<'a> {
    /// The deadline is so far from now.
    pub fn new(stream: &'a UnixStream, limit: Duration) -> Self {
        Self { stream, deadline: Instant::now() + limit }
    }

    /// Begins anew, with another deadline.
    pub fn again(&mut self, limit: Duration) {
        self.deadline = Instant::now() + limit;
    }

    fn left(&self) -> io::Result<Option<Duration>> {
        match self.deadline.checked_duration_since(Instant::now()) {
            Some(left) if !left.is_zero() => Ok(Some(left)),
            _ => Err(io::ErrorKind::TimedOut.into()),
        }
    }
}

impl Read for Timed<'_> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        self.stream.set_read_timeout(self.left()?)?;
        self.stream.read(buffer)
    }
}

impl Write for Timed<'_> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.stream.set_write_timeout(self.left()?)?;
        self.stream.write(bytes)
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// Holds a claim of memory against what the host has left.
///
/// # Errors
/// [`ClaimError::Memory`].
pub fn memory(claimed: u64) -> Result<(), ClaimError> {
    if claimed <= SMALL {
        return Ok(());
    }
    let most = kmem::procfs::meminfo()?.available_kib << 10;
    if claimed > most { Err(ClaimError::Memory { claimed, most }) } else { Ok(()) }
}

/// `count` zeros, if the host has the memory for them.
///
/// # Errors
/// [`ClaimError::Memory`].
pub fn zeroed<T: Clone + Default>(count: u64) -> Result<Vec<T>, ClaimError> {
    let claimed = count.saturating_mul(size_of::<T>() as u64);
    memory(claimed)?;
    let too_many = || ClaimError::Memory { claimed, most: usize::MAX as u64 };
    let count = usize::try_from(count).map_err(|_| too_many())?;
    // Only a try: the allocation below takes no page before it is written.
    Vec::<T>::new().try_reserve_exact(count).map_err(|_| too_many())?;
    Ok(vec![T::default(); count])
}

#[cfg(test)]
mod tests;
