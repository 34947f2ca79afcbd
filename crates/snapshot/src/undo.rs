//! A guest is put back into the state that it had before a snapshot: by the command itself, or by
//! its guard (crate `guard`) when the command has ended, was stopped, or hangs.

use std::fs::File;
use std::io::{self, PipeReader};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use guard::{Guard, GuardError, Stopped};
use kmem::account::Account;
use kmem::pidfd::PidFd;
use rustix::fs::{CWD, FlockOperation, Mode, OFlags};
use rustix::io::Errno;
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};

use crate::disks::Overlay;
use crate::monitor::{Capability, IGNORE_SHARED, Monitor, MonitorError, PAUSES_FIRST, PIPE};
use crate::ours::make_beside;

/// How long QEMU may take to notice that its last client is gone.
pub(crate) const PATIENCE: Duration = Duration::from_secs(60);
const PAUSE: Duration = Duration::from_millis(50);
/// The longest pause between two tries to put a guest back.
const LONGEST_PAUSE: Duration = Duration::from_millis(200);
/// States from which `cont` leads nowhere: the guest has ended, or must be reset.
pub(crate) const FINAL: [&str; 4] = ["shutdown", "guest-panicked", "internal-error", "watchdog"];

/// Why a guest cannot be put under a guard's care.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs, reason = "each sentence says what it is")]
pub enum UndoError {
    #[error("process {pid} cannot be watched; it may have ended")]
    Gone { pid: i32, source: io::Error },
    #[error("another snapshot of process {0} is being taken, or put back after a failure; wait for its end")]
    Busy(i32),
    #[error("cannot lock the guest's monitor")]
    Lock(#[source] io::Error),
    #[error(transparent)]
    Guard(#[from] GuardError),
}

/// How a guest is put back into the state that it had.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct Task {
    pub(crate) socket: PathBuf,
    pub(crate) pid: i32,
    /// Whether it ran.
    pub(crate) ran: bool,
    /// QEMU's limit on the bytes a second of a migration.
    pub(crate) bandwidth: u64,
    /// The images that were put over its disks, the first one first.
    pub(crate) overlays: Vec<Overlay>,
    /// For a guest that is stored by a live migration: QEMU's limit on its pause, ms.
    #[serde(default)]
    pub(crate) downtime: Option<u64>,
}

impl Task {
    /// Has the guard put the guest back. It shuts the monitor's connection down for that, reads
    /// QEMU's `stream` to its end, and holds the lock until then. From now on the guest may be
    /// stopped.
    pub(crate) fn watch(
        &self,
        guard: &Guard,
        qmp: &Monitor,
        lock: &Lock,
        stream: Option<&PipeReader>,
    ) -> Result<(), UndoError> {
        let pid = self.pid;
        let process = PidFd::open(pid).map_err(|source| UndoError::Gone { pid, source })?;
        let task = serde_json::to_value(self).map_err(|e| GuardError::NotReady(e.into()))?;
        let held: Vec<_> = [qmp.as_fd(), lock.0.as_fd()].into_iter().chain(stream.map(AsFd::as_fd)).collect();
        Ok(guard.watch(Stopped::Qmp(task), pid, &process, &held)?)
    }

    /// From now on the guard sees to nothing but that the guest runs: once a record is written, the
    /// images that it names must not be changed any more.
    pub(crate) fn leave_images(&self, guard: &Guard, qmp: &Monitor, lock: &Lock) -> Result<(), UndoError> {
        match (Self { overlays: Vec::new(), ..self.clone() }).watch(guard, qmp, lock, None) {
            // It has ended meanwhile, and changes nothing any more. The note must not, either.
            Err(UndoError::Gone { source, .. }) if source.raw_os_error() == Some(libc::ESRCH) => {
                guard.done();
                Ok(())
            }
            told => told,
        }
    }

    /// Lets the guest go on, if it ran. Its disks have their names first.
    pub(crate) fn go_on(&self, qmp: &mut Monitor) -> Result<(), MonitorError> {
        self.overlays.iter().try_for_each(|overlay| overlay.settle(qmp))?;
        if !self.ran {
            return Ok(());
        }
        let (start, mut has_run) = (Instant::now(), false);
        loop {
            let state = qmp.state()?;
            // One that sleeps wakes by itself. What is put back may make room on a full disk.
            let stands_again = (has_run && state == "io-error") || state == "suspended";
            if state == "running" || stands_again || FINAL.contains(&state.as_str()) {
                return Ok(());
            }
            let answer = qmp.execute("cont", json!({}));
            has_run |= answer.is_ok();
            if start.elapsed() > PATIENCE {
                return answer.and(Err(MonitorError::Endless("the pause")));
            }
            if answer.is_err() {
                // The stream to a program that is gone has not failed yet.
                let _ = qmp.execute("migrate_cancel", json!({}));
            }
            std::thread::sleep(PAUSE);
        }
    }

    /// Puts back QEMU's settings of migrations.
    pub(crate) fn reset(&self, qmp: &mut Monitor) -> Result<(), MonitorError> {
        qmp.set_capability(IGNORE_SHARED, Capability::Off)?;
        let mut parameters = json!({ "max-bandwidth": self.bandwidth });
        if let Some(downtime) = self.downtime {
            qmp.set_capability(PAUSES_FIRST, Capability::Off)?;
            parameters["downtime-limit"] = downtime.into();
        }
        qmp.execute("migrate-set-parameters", parameters).map(drop)
    }

    /// Lets the guest go on as if there had been no snapshot. The guard knows of it.
    pub(crate) fn undo(&self, qmp: &mut Monitor, guard: &Guard) -> Result<(), MonitorError> {
        self.cancel(qmp)?;
        // If there is no guard any more, it has put back the guest, which is tried once more here.
        self.undo_settings(qmp, &|stands| drop(if stands { guard.stands(guard::PROMISE) } else { guard.runs() }))
    }

    /// Lets the guest go on, whatever is being done with it.
    fn cancel(&self, qmp: &mut Monitor) -> Result<(), MonitorError> {
        // QEMU may have the pipe and no migration that uses it: the pipe's reader would never end.
        let _ = qmp.execute("closefd", json!({ "fdname": PIPE }));
        if self.downtime.is_some() {
            // While the guest is being sent, nothing of it can be set.
            qmp.execute("migrate_cancel", json!({}))?;
            qmp.until(("query-migrate", "the migration"), PATIENCE, Monitor::is_over)?;
        }
        self.go_on(qmp)
    }

    fn undo_settings(&self, qmp: &mut Monitor, stands: &dyn Fn(bool)) -> Result<(), MonitorError> {
        self.reset(qmp)?;
        self.overlays.iter().rev().try_for_each(|overlay| overlay.undo(qmp, stands))?;
        self.go_on(qmp)
    }
}

/// The guard's part: puts a guest back, tries until it goes on or is gone, and says on standard
/// error if that takes long. `task` is a [`Task`]. Gives whether all is put back.
pub fn put_back(task: &Value, is_gone: &dyn Fn() -> bool) -> bool {
    let Ok(task) = Task::deserialize(task) else { return false };
    let (start, mut runs, mut is_said) = (Instant::now(), None, false);
    loop {
        // QEMU serves one client, and hears of its end when it comes to it.
        let undone = Monitor::connect(&task.socket, task.pid).and_then(|mut qmp| {
            task.cancel(&mut qmp)?;
            runs.get_or_insert_with(Instant::now);
            task.undo_settings(&mut qmp, &|_| {})
        });
        let Err(error) = undone else { return true };
        if is_gone() {
            task.overlays.iter().for_each(Overlay::end);
            return true;
        }
        let pid = task.pid;
        match runs {
            Some(since) if since.elapsed() > PATIENCE => {
                output::note!("guest {pid} runs, but is not put back: {error}; the next command tries it again");
                return false;
            }
            None if start.elapsed() > PATIENCE && !is_said => {
                is_said = true;
                output::note!("guest {pid} does not go on yet, which is tried as long as it lives: {error}");
            }
            _ => {}
        }
        std::thread::sleep((start.elapsed() / 8).clamp(PAUSE, LONGEST_PAUSE));
    }
}

/// Ends what a task has begun with a guest that has ended, and whose command and guard were killed.
pub fn end(task: &Value) {
    let overlays = Task::deserialize(task).map(|task| task.overlays).unwrap_or_default();
    overlays.iter().for_each(Overlay::end_late);
}

/// What the guard is to hold while it puts back what a task says.
///
/// # Errors
/// If the guest is being stored, or cannot be locked.
pub fn lock_of(task: &Value) -> io::Result<Vec<OwnedFd>> {
    let task = Task::deserialize(task)?;
    let account = Account::of(task.pid as u32)?;
    let lock = Lock::take(&task.socket, task.pid, &account, Duration::ZERO).map_err(io::Error::other)?;
    Ok(vec![lock.0.into()])
}

/// Held by whoever stores a guest, and by the guard that puts it back: a second snapshot that
/// begins meanwhile would put images over those that the guard is about to remove.
pub(crate) struct Lock(File);

impl Lock {
    /// Waits until nobody else stores this guest, for at most `limit`. Its monitor, `socket`, is
    /// known to be that of process `pid`, which runs as `account`.
    pub(crate) fn take(socket: &Path, pid: i32, account: &Account, limit: Duration) -> Result<Self, UndoError> {
        let mut path = socket.as_os_str().to_owned();
        path.push(".lock");
        // The directory may be another user's: no link in it leads root elsewhere.
        let flags = OFlags::CREATE | OFlags::WRONLY | OFlags::NOFOLLOW;
        let open = || Ok(claims::open_at(CWD, path.as_ref(), flags, Mode::RUSR | Mode::WUSR)?);
        let file = match make_beside(socket, account, open) {
            // One that an earlier version made as root. Nothing is made, read or written here.
            Err(error) if error.kind() == io::ErrorKind::PermissionDenied => {
                roots_own(path.as_ref(), account.uid).ok_or(error)
            }
            made => made,
        };
        let file = file.map_err(UndoError::Lock)?;
        let start = Instant::now();
        loop {
            match rustix::fs::flock(&file, FlockOperation::NonBlockingLockExclusive) {
                Ok(()) => return Ok(Self(file)),
                Err(Errno::WOULDBLOCK) if start.elapsed() > limit => return Err(UndoError::Busy(pid)),
                Err(Errno::WOULDBLOCK | Errno::INTR) => std::thread::sleep(PAUSE),
                Err(error) => return Err(UndoError::Lock(error.into())),
            }
        }
    }
}

/// A regular file of root's that is there, in a directory of this user's: others' locks are not
/// held.
fn roots_own(path: &Path, user: u32) -> Option<File> {
    let open = |directory: BorrowedFd<'_>, path: &Path, flags| -> Option<File> {
        let flags = flags | OFlags::NONBLOCK | OFlags::CLOEXEC;
        Some(rustix::fs::openat(directory, path, flags, Mode::empty()).ok()?.into())
    };
    let directory = open(CWD, path.parent()?, OFlags::DIRECTORY)?;
    let file = open(directory.as_fd(), path.file_name()?.as_ref(), OFlags::NOFOLLOW)?;
    let (above, meta) = (directory.metadata().ok()?, file.metadata().ok()?);
    (above.uid() == user && meta.is_file() && meta.uid() == 0).then_some(file)
}

#[cfg(test)]
mod tests;
