//! Clones whose RAM is their own, under PageONE's agent. They are merged, their free pages can be
//! taken back, and they can be stored again: what a guest under `pageone run --snapshots` is.
//!
//! QEMU is started as such a guest is ([`crate::prepare`]): its RAM is private, anonymous memory in
//! place of an empty file. The agent in it gets the snapshot's RAM in segments, and maps them there
//! (`agent/intercept/snapshot.rs`).

use std::any::Any;
use std::ffi::OsString;
use std::io::{self, PipeReader, Read};
use std::os::fd::{AsRawFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::process::Command;

use crate::memory::segments::Segments;
use crate::prepare::{MONITOR, Ram, is_socket_name, monitor_words, ram_words};

/// Adds to the command that starts QEMU with these words. What it gives is dropped when QEMU has
/// started.
pub type Add<'a> = dyn Fn(&mut Command, &[String]) -> io::Result<Box<dyn Any>> + Sync + 'a;

/// How clones with RAM of their own are started.
pub struct Own<'a> {
    /// The environment that puts the agent into QEMU. Without a value a variable is removed.
    pub environment: &'a [(OsString, Option<OsString>)],
    /// What else QEMU gets.
    pub add: Option<&'a Add<'a>>,
    /// The snapshot's RAM.
    pub segments: &'a Segments,
}

/// The socket of a clone's monitor, by which it can be stored, or stopped.
pub(super) fn socket(directory: &Path) -> PathBuf {
    directory.join("monitor.qmp")
}

/// What a QEMU gets whose agent maps its RAM.
pub(super) struct Prepared {
    /// Words for RAM and monitor.
    pub(super) words: Vec<String>,
    /// Descriptors that are to be inherited.
    pub(super) inherited: Vec<OwnedFd>,
    /// Says whether the agent does it.
    pub(super) maps: Maps,
}

/// A pipe in which there is a byte when the agent has mapped the RAM.
pub(super) struct Maps(PipeReader);

impl Maps {
    /// Whether it has. Asked once QEMU has mapped its RAM.
    pub(super) fn ask(mut self) -> bool {
        let set = rustix::io::ioctl_fionbio(&self.0, true);
        set.is_ok() && self.0.read(&mut [0]).is_ok_and(|read| read == 1)
    }
}

impl Own<'_> {
    /// Prepares `command`, which starts a QEMU with this RAM.
    pub(super) fn prepare(&self, command: &mut Command, bytes: u64, directory: &Path) -> io::Result<Prepared> {
        let Ram { fd, identity } = Ram::empty(bytes)?;
        let (maps, tell) = io::pipe()?;
        let mut load: Vec<OwnedFd> = vec![tell.into(), self.segments.plan().try_clone()?];
        for segment in self.segments.all() {
            load.push(segment.try_clone()?);
        }
        let mut words = ram_words(bytes, fd.as_raw_fd(), "on");
        words.extend(monitor_words(MONITOR, &socket(directory)));
        for (name, value) in self.environment {
            match value {
                Some(value) => command.env(name, value),
                None => command.env_remove(name),
            };
        }
        command.env(wire::ENV_SNAPSHOT_RAM, identity);
        let numbers: Vec<String> = load.iter().map(|fd| fd.as_raw_fd().to_string()).collect();
        command.env(wire::ENV_SNAPSHOT_LOAD, numbers.join(","));
        load.push(fd);
        Ok(Prepared { words, inherited: load, maps: Maps(maps) })
    }
}

/// Whether a clone in this directory can have a monitor.
pub(super) fn fits(directory: &Path) -> bool {
    is_socket_name(&socket(directory))
}
