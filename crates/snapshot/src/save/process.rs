//! What a guest's process tells of itself.

use std::fs::DirEntry;
use std::io::ErrorKind;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use kmem::peer::is_trusted;

use super::SaveError;
use crate::clone::thread_run_time;
use crate::monitor::{ANSWER, Monitor};
use crate::prepare;
use crate::record::Source;
use crate::undo::{Lock, PATIENCE, UndoError};

/// Time between two looks whether a guest's memory is there.
const LOADING: Duration = Duration::from_millis(20);
/// The name of that thread, which the agent gives it.
const LOADER: &str = "pageone-loader";

/// What a guest's process tells of itself, one after another: all is of one program, a QEMU that
/// runs as one account. A setuid program, for example, has its owner's account, and the words of
/// whoever started it.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Seen {
    pub(super) pid: i32,
    pub(super) source: Source,
    pub(super) program: PathBuf,
    pub(super) directory: PathBuf,
    /// The words of its command line, without its program.
    pub(super) words: Vec<String>,
}

impl Seen {
    /// Reads it.
    pub(crate) fn of(pid: i32) -> Result<Self, SaveError> {
        let cannot = |source| SaveError::NoProcess { pid, source };
        let source = Source::of(pid as u32).map_err(|source| match source.kind() {
            ErrorKind::Other => SaveError::Accounts { pid, source },
            _ => cannot(source),
        })?;
        let link = |name| std::fs::read_link(format!("/proc/{pid}/{name}")).map_err(cannot);
        let program = link("exe")?;
        // Clones run what is there now: that it is another one is found when they are compared.
        let program =
            program.to_str().and_then(|name| name.strip_suffix(" (deleted)")).map_or(program.clone(), Into::into);
        if guests::Kind::of(&program.to_string_lossy()) != guests::Kind::Qemu {
            return Err(SaveError::NotQemu { pid, program });
        }
        Ok(Self { pid, source, program, directory: link("cwd")?, words: words_of(pid)? })
    }

    /// The socket of its QMP monitor.
    pub(crate) fn socket(&self) -> Option<PathBuf> {
        prepare::socket(&self.words).or_else(|| prepare::own_monitor(&self.words, &self.directory))
    }

    /// Its lock, and a session with its monitor. Nothing is made where its words say before it is
    /// known that it listens there, and is still what it was.
    pub(crate) fn connect(&self, socket: &Path) -> Result<(Lock, Monitor), SaveError> {
        let (lock, reached) = self.lock(socket)?;
        let qmp = Monitor::connect_by(reached, socket, self.pid)?;
        self.look_again()?;
        Ok((lock, qmp))
    }

    /// Its lock, and a connection to its monitor, unless that had to be waited for.
    fn lock(&self, socket: &Path) -> Result<(Lock, Option<UnixStream>), SaveError> {
        let account = self.source.account();
        let (reached, uid) = Monitor::reach(socket, self.pid, ANSWER)?;
        // One that has another user by now was another program, or was root (QEMU's -runas).
        if uid != account.uid && !is_trusted(uid) {
            return Err(SaveError::Another(self.pid));
        }
        self.look_again()?;
        match Lock::take(socket, self.pid, &account, Duration::ZERO) {
            // Whoever has it is not to wait for this connection's end.
            Err(UndoError::Busy(_)) => drop(reached),
            taken => return Ok((taken?, Some(reached))),
        }
        Ok((Lock::take(socket, self.pid, &account, PATIENCE)?, None))
    }

    pub(super) fn look_again(&self) -> Result<(), SaveError> {
        if Self::of(self.pid)? == *self { Ok(()) } else { Err(SaveError::Another(self.pid)) }
    }
}

fn words_of(pid: i32) -> Result<Vec<String>, SaveError> {
    let words = guests::all_words(Path::new("/"), pid).map_err(|source| SaveError::NoProcess { pid, source })?;
    Ok(words.into_iter().skip(1).collect())
}

/// Whether the guest's free pages are taken back by an agent: then it has a device that QEMU cannot
/// store, unless that is unplugged.
///
/// # Errors
/// [`SaveError::NoProcess`].
pub fn is_recycled(pid: i32) -> Result<bool, SaveError> {
    words_of(pid).map(|words| prepare::is_recycled(&words))
}

/// Waits until a clone's memory is there, if it is being loaded (`snapshot run --merge`).
///
/// # Errors
/// [`SaveError::Loading`], if the thread that loads it does nothing for this time.
pub fn wait_until_loaded(pid: i32, stuck: Duration) -> Result<(), SaveError> {
    let is_loader =
        |entry: &DirEntry| std::fs::read_to_string(entry.path().join("comm")).is_ok_and(|name| name.trim() == LOADER);
    let loader = || {
        let all = std::fs::read_dir(format!("/proc/{pid}/task")).ok()?;
        all.flatten().find(is_loader)?.file_name().to_str()?.parse().ok()
    };
    let (mut worked, mut since) = (None, Instant::now());
    while let Some(tid) = loader() {
        let now = thread_run_time(pid, tid).ok();
        if now != worked {
            (worked, since) = (now, Instant::now());
        } else if since.elapsed() > stuck {
            return Err(SaveError::Loading { pid, seconds: stuck.as_secs() });
        }
        std::thread::sleep(LOADING);
    }
    Ok(())
}

/// Waits until a snapshot of the guest that was broken off is put back.
///
/// # Errors
/// If that takes too long, or is not known.
pub fn wait_until_put_back(pid: i32) -> Result<(), SaveError> {
    let seen = Seen::of(pid)?;
    seen.socket().map_or(Ok(()), |socket| seen.lock(&socket).map(drop))
}

#[cfg(test)]
mod tests;
