//! Notes of what stands, for the case that a command and its guard are both killed: the next
//! command puts it back.
//!
//! A note is a file in a directory of the user's own, which is gone after a boot, as are all
//! processes. It has a line for each call of [`watch`](crate::Guard::watch), the numbers of guard
//! and command in its name, and is locked for as long as command or guard live. Whoever puts
//! everything back removes it.

use std::fs::{DirBuilder, File};
use std::io::{self, Read, Write};
use std::os::fd::OwnedFd;
use std::os::unix::fs::{DirBuilderExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

use kmem::pidfd::PidFd;
use kmem::procfs::{Stat, start_time};
use rustix::fs::FlockOperation;
use serde::{Deserialize, Serialize};
use serde_json::Value;

use crate::Stopped;
use crate::serve::rank;

/// More bytes than a note has.
const MAX_NOTE: u64 = 16 << 20;

/// A locked note.
pub(crate) struct Mark {
    pub(crate) file: File,
    pub(crate) path: PathBuf,
}

/// Something that is watched, and when its process started.
#[derive(Serialize, Deserialize)]
struct Line {
    pid: i32,
    started: u64,
    stopped: Stopped,
}

/// What was left by a command that was killed with its guard.
pub(crate) struct Left {
    pub(crate) mark: Mark,
    pub(crate) watched: Vec<(i32, PidFd, Stopped)>,
}

impl Mark {
    /// Makes a note for a guard and its command.
    pub(crate) fn make(directory: &Path, [guard, command]: [i32; 2]) -> io::Result<Self> {
        DirBuilder::new().recursive(true).mode(0o700).create(directory)?;
        // No other process has a number and a start of these.
        let name = format!("{guard}-{}-{command}-{}", start_time(guard)?, start_time(command)?);
        let (path, unlocked) = (directory.join(&name), directory.join(format!(".{name}")));
        let file = File::options().create_new(true).append(true).mode(0o600).open(&unlocked)?;
        rustix::fs::flock(&file, FlockOperation::NonBlockingLockExclusive)?;
        std::fs::rename(unlocked, &path)?;
        Ok(Self { file, path })
    }

    /// Notes what is watched from now on.
    pub(crate) fn add(&self, pid: i32, stopped: &Stopped) -> io::Result<()> {
        let line = Line { pid, started: start_time(pid)?, stopped: stopped.clone() };
        let mut line = serde_json::to_vec(&line)?;
        line.push(b'\n');
        (&self.file).write_all(&line)
    }

    /// All is put back.
    pub(crate) fn remove(&self) {
        let _ = std::fs::remove_file(&self.path);
    }
}

/// What was left, by the notes in a directory. Guards that are stopped while their commands are, or
/// are gone, are continued. So is a stopped command whose guard is gone: it puts back by itself.
/// What QEMU's monitor cannot put back any more, since its process has ended, is given to `end`.
pub(crate) fn left(directory: &Path, end: End<'_>) -> Vec<Left> {
    let all = std::fs::read_dir(directory).into_iter().flatten().flatten();
    let is_made = |entry: &std::fs::DirEntry| !entry.file_name().as_encoded_bytes().starts_with(b".");
    all.filter(is_made).filter_map(|entry| look(entry.path(), end)).collect()
}

fn look(path: PathBuf, end: End<'_>) -> Option<Left> {
    use rustix::fs::{Mode, OFlags};
    let flags = OFlags::RDWR | OFlags::NOFOLLOW | OFlags::NONBLOCK | OFlags::CLOEXEC;
    read(File::from(rustix::fs::open(&path, flags, Mode::empty()).ok()?), path, end)
}

fn read(file: File, path: PathBuf, end: End<'_>) -> Option<Left> {
    let meta = file.metadata().ok()?;
    if !meta.is_file() || meta.uid() != rustix::process::geteuid().as_raw() {
        return None;
    }
    if rustix::fs::flock(&file, FlockOperation::NonBlockingLockExclusive).is_err() {
        go_on(&path);
        return None;
    }
    // Whoever had the lock may have put all back, and removed it.
    if file.metadata().ok()?.nlink() == 0 {
        return None;
    }
    let mark = Mark { file, path };
    let mut text = String::new();
    (&mark.file).take(MAX_NOTE).read_to_string(&mut text).ok()?;
    // As a guard: of each kind the last.
    let mut lines: Vec<Line> = Vec::new();
    for line in text.lines().filter_map(|line| serde_json::from_str::<Line>(line).ok()) {
        lines.retain(|one| rank(&one.stopped) != rank(&line.stopped));
        lines.push(line);
    }
    let lives = |Line { pid, started, stopped }| match (PidFd::open(pid), stopped) {
        (Ok(process), stopped) if start_time(pid).is_ok_and(|now| now == started) => Some((pid, process, stopped)),
        (Err(error), _) if error.raw_os_error() != Some(libc::ESRCH) => None,
        (_, Stopped::Qmp(task)) => {
            end(&task);
            None
        }
        _ => None,
    };
    let watched: Vec<_> = lines.into_iter().filter_map(lives).collect();
    if watched.is_empty() {
        mark.remove();
    }
    (!watched.is_empty()).then_some(Left { mark, watched })
}

/// Continues the guard of a note, if it was stopped; if it is gone, its command.
fn go_on(path: &Path) {
    let name = path.file_name().unwrap_or_default().to_string_lossy();
    let numbers: Vec<u64> = name.split('-').map_while(|number| number.parse().ok()).collect();
    for of in numbers.chunks_exact(2) {
        let pid = of[0] as i32;
        let Ok(process) = PidFd::open(pid) else { continue };
        let state = Stat::of(Some(pid)).ok().filter(|stat| stat.field(22).is_ok_and(|start| start == of[1]));
        match state.and_then(|stat| stat.state()) {
            // A guard that was killed stays in the table while its command is stopped.
            None | Some('Z' | 'X') => {}
            Some('T') => return drop(process.send_signal(libc::SIGCONT)),
            Some(_) => return,
        }
    }
}

/// Ends what a task has begun, when its process has ended.
pub type End<'a> = &'a dyn Fn(&Value);

/// Descriptors that a task needs beside its process.
pub type Hold<'a> = &'a dyn Fn(&Value) -> io::Result<Vec<OwnedFd>>;

#[cfg(test)]
mod tests;
