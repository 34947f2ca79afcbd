//! The template: QEMU, loaded once, and copied for each clone that shares its snapshot. The library
//! in it (`crates/template`) says how.

use std::ffi::OsString;
use std::fs::File;
use std::io::{self, Write};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::path::Path;
use std::process::{Child, Stdio};
use std::time::Duration;

use kmem::memfd;
use kmem::pidfd::PidFd;
use kmem::seqpacket::Conn;
use rustix::io::FdFlags;
use wire::template::{COPY, ENV_TEMPLATE, LOADED, MAX_ANSWER, RUNS, Start};

use super::directory::begin_in;
use super::process::{Process, readable, spawn_without_huge_pages};
use crate::rights::Rights;

/// How long the program may take to be loaded, and to copy itself.
const PATIENCE: Duration = Duration::from_secs(10);

/// A program that is loaded and has not begun. It ends when this is dropped; its copies do not.
pub struct Template {
    socket: Conn,
    child: Child,
    /// What copies inherit.
    environment: Vec<(OsString, OsString)>,
}

impl Template {
    /// Starts the program, in this directory and with these rights. It is loaded while
    /// [`Template::wait`] has not been called.
    ///
    /// # Errors
    /// If it cannot be started, or its copies may not all be in one directory.
    pub fn start(library: &Path, program: &Path, directory: &Path, rights: &Rights) -> io::Result<Self> {
        if rights.is_confined {
            return Err(io::Error::other("what others may have written runs in a directory of its own"));
        }
        let (socket, theirs) = Conn::pair()?;
        let mut preload = library.as_os_str().to_owned();
        if let Some(before) = std::env::var_os("LD_PRELOAD").filter(|value| !value.is_empty()) {
            preload.push(":");
            preload.push(before);
        }
        let mut command = rights.command(program);
        // A program without the library ends at once.
        let _place = begin_in(command.arg("--version"), &rights.account, &[directory])?;
        command.env("LD_PRELOAD", preload).env("LD_BIND_NOW", "1");
        command.env(ENV_TEMPLATE, theirs.as_fd().as_raw_fd().to_string());
        command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
        rustix::io::fcntl_setfd(&theirs, FdFlags::empty())?;
        let child = spawn_without_huge_pages(&mut command)?;
        Ok(Self { socket, child, environment: rights.environment().collect() })
    }

    /// Waits until it is loaded.
    ///
    /// # Errors
    /// If it cannot be copied: it has not got the library, or more than one thread.
    pub fn wait(&self) -> io::Result<()> {
        let mut byte = [0];
        let is_loaded = readable(&self.socket, PATIENCE)
            && matches!(self.socket.recv(&mut byte, &mut Vec::new()), Ok(Some(1)) if byte == [LOADED]);
        if is_loaded { Ok(()) } else { Err(io::Error::other("it begins without waiting, or has several threads")) }
    }

    /// A copy with these words, and descriptors with the numbers beside them.
    ///
    /// # Errors
    /// If there is no copy.
    pub fn copy(&self, words: &[OsString], fds: &[(BorrowedFd<'_>, i32)]) -> io::Result<Process> {
        let variable = |(name, value): &(OsString, OsString)| [name.as_bytes(), b"=", value.as_bytes()].concat();
        let start = Start {
            words: words.iter().map(|word| word.clone().into_vec()).collect(),
            environment: self.environment.iter().map(variable).collect(),
            numbers: fds.iter().map(|&(_, number)| number as u32).collect(),
        };
        let bytes = wire::encode(&start);
        let fill = |file: &OwnedFd| File::from(file.try_clone()?).write_all(&bytes);
        let file = memfd::create_written("pageone-start", bytes.len(), fill)?;
        let (ours, theirs) = Conn::pair()?;
        let mut all = vec![file.as_fd(), theirs.as_fd()];
        all.extend(fds.iter().map(|&(fd, _)| fd));
        self.socket.send(&[COPY], &all)?;
        drop(theirs);
        let (mut answer, mut process) = ([0; MAX_ANSWER], Vec::new());
        let len = if readable(&ours, PATIENCE) { ours.recv(&mut answer, &mut process)?.unwrap_or(0) } else { 0 };
        match (answer[..len].split_first(), process.pop()) {
            (Some((&RUNS, _)), Some(fd)) => Process::of_parent(self.child.id(), PidFd::from_fd(fd)),
            (Some((_, why)), _) => Err(io::Error::other(String::from_utf8_lossy(why).into_owned())),
            _ => Err(io::ErrorKind::UnexpectedEof.into()),
        }
    }
}

impl Drop for Template {
    fn drop(&mut self) {
        // It has begun nothing. Its copies are others.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}
