//! The guard: a child process that lets the guest go on when the program that stores it has ended
//! in the middle, even if it was killed.
//!
//! The guard is the calling program itself, started with the words in
//! [`Options::guard`](crate::save::Options::guard); with these it must call [`run`]. It reads a
//! line with a [`Task`] each time before the guest is stopped, and `done` when there is nothing to
//! put back any more. If the other side ends without it, the guard does the last task.

use std::ffi::OsString;
use std::fs::File;
use std::io::{self, BufRead, BufReader, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};
use std::time::{Duration, Instant};

use rustix::fs::FlockOperation;
use rustix::io::Errno;
use serde::{Deserialize, Serialize};
use serde_json::json;

use crate::disks::Overlay;
use crate::monitor::{IGNORE_SHARED, Monitor, MonitorError, PAUSES_FIRST};
use crate::save::SaveError;

/// How long QEMU may take to notice that its last client is gone.
pub(crate) const PATIENCE: Duration = Duration::from_secs(60);
const PAUSE: Duration = Duration::from_millis(50);
/// What the guard prints when it knows its task.
const READY: &str = "ready\n";

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
    /// Lets the guest go on, if it ran.
    pub(crate) fn go_on(&self, qmp: &mut Monitor) -> Result<(), MonitorError> {
        let start = Instant::now();
        while self.ran && qmp.state()? != "running" {
            let answer = qmp.execute("cont", json!({}));
            if start.elapsed() > PATIENCE {
                return answer.and(Err(MonitorError::Endless("the pause")));
            }
            if answer.is_err() {
                // The stream to a program that is gone has not failed yet.
                let _ = qmp.execute("migrate_cancel", json!({}));
            }
            std::thread::sleep(PAUSE);
        }
        Ok(())
    }

    /// Puts back QEMU's settings of migrations.
    pub(crate) fn reset(&self, qmp: &mut Monitor) -> Result<(), MonitorError> {
        qmp.set_capability(IGNORE_SHARED, false)?;
        let mut parameters = json!({ "max-bandwidth": self.bandwidth });
        if let Some(downtime) = self.downtime {
            qmp.set_capability(PAUSES_FIRST, false)?;
            parameters["downtime-limit"] = downtime.into();
        }
        qmp.execute("migrate-set-parameters", parameters).map(drop)
    }

    /// Lets the guest go on as if there had been no snapshot.
    pub(crate) fn undo(&self, qmp: &mut Monitor) -> Result<(), MonitorError> {
        if self.downtime.is_some() {
            // While the guest is being sent, nothing of it can be set.
            qmp.execute("migrate_cancel", json!({}))?;
            qmp.until(("query-migrate", "the migration"), PATIENCE, Monitor::is_over)?;
        }
        self.go_on(qmp)?;
        self.reset(qmp)?;
        self.overlays.iter().rev().try_for_each(|overlay| overlay.undo(qmp))
    }
}

/// The guard's process.
///
/// # Errors
/// If the guest cannot be let go on.
pub fn run() -> io::Result<()> {
    // A signal to the foreground process group, such as Ctrl-C, must not end the guard first.
    rustix::process::setsid().ok();
    let mut lines = BufReader::new(io::stdin()).lines();
    let mut task = None;
    for line in &mut lines {
        let line = line?;
        if line == "done" {
            return Ok(());
        }
        task = Some(serde_json::from_str::<Task>(&line)?);
        // A parent that was killed meanwhile does not read it, and has stopped nothing.
        let _ = io::stdout().write_all(READY.as_bytes());
        let _ = io::stdout().flush();
    }
    let Some(task) = task else { return Ok(()) };
    let start = Instant::now();
    loop {
        // QEMU serves one client, and hears of its end when it comes to it.
        let undone = Monitor::connect(&task.socket, task.pid).and_then(|mut qmp| task.undo(&mut qmp));
        match undone {
            Err(error) if start.elapsed() > PATIENCE => return Err(io::Error::other(error)),
            Err(_) if kmem::procfs::cpu_time(task.pid).is_ok() => std::thread::sleep(PAUSE),
            _ => return Ok(()),
        }
    }
}

/// Held by whoever stores a guest, and by the guard that puts it back: a second snapshot that
/// begins meanwhile would put images over those that the guard is about to remove.
pub(crate) struct Lock(File);

impl Lock {
    /// Waits until nobody else stores this guest, whose monitor is `socket`, for at most `limit`.
    pub(crate) fn take(socket: &Path, pid: i32, limit: Duration) -> Result<Self, SaveError> {
        let mut path = socket.as_os_str().to_owned();
        path.push(".lock");
        let file = File::options().create(true).truncate(false).write(true).mode(0o600).open(path);
        let file = file.map_err(SaveError::Guard)?;
        let start = Instant::now();
        loop {
            match rustix::fs::flock(&file, FlockOperation::NonBlockingLockExclusive) {
                Ok(()) => return Ok(Self(file)),
                Err(Errno::WOULDBLOCK) if start.elapsed() > limit => return Err(SaveError::Busy(pid)),
                Err(Errno::WOULDBLOCK | Errno::INTR) => std::thread::sleep(PAUSE),
                Err(error) => return Err(SaveError::Guard(error.into())),
            }
        }
    }
}

/// A running guard. Dropping it without [`Guard::done`] makes it do its work.
pub(crate) struct Guard {
    child: Child,
    input: Option<ChildStdin>,
    output: BufReader<ChildStdout>,
}

impl Guard {
    /// Starts a guard with this task. From then on the guest may be stopped.
    /// It holds the [`Lock`] as long as it works.
    pub(crate) fn start(words: &[OsString], task: &Task, lock: &Lock) -> io::Result<Self> {
        let (program, arguments) = words.split_first().ok_or(io::ErrorKind::InvalidInput)?;
        // A duplicate is inherited, and holds the same lock.
        let inherited = rustix::io::dup(&lock.0)?;
        let mut command = Command::new(program);
        let mut child = command.args(arguments).stdin(Stdio::piped()).stdout(Stdio::piped()).spawn()?;
        drop(inherited);
        let (input, output) = (child.stdin.take(), child.stdout.take());
        let output = BufReader::new(output.ok_or(io::ErrorKind::BrokenPipe)?);
        let mut guard = Self { child, input, output };
        guard.task(task)?;
        Ok(guard)
    }

    /// Gives the guard another task, in place of the one before.
    pub(crate) fn task(&mut self, task: &Task) -> io::Result<()> {
        self.say(&serde_json::to_string(task)?)?;
        let mut answer = String::new();
        self.output.read_line(&mut answer)?;
        if answer == READY { Ok(()) } else { Err(io::Error::other("the guard did not start")) }
    }

    fn say(&mut self, line: &str) -> io::Result<()> {
        self.input.as_mut().map_or(Ok(()), |input| writeln!(input, "{line}"))
    }

    /// There is nothing to put back any more.
    pub(crate) fn done(&mut self) {
        // A guard that was killed has nothing to do either.
        let _ = self.say("done");
    }
}

impl Drop for Guard {
    fn drop(&mut self) {
        drop(self.input.take());
        let _ = self.child.wait();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_guest_that_is_being_put_back_is_not_stored_again() {
        let dir = tempfile::tempdir().unwrap();
        let socket = dir.path().join("1.qmp");
        let lock = Lock::take(&socket, 1, Duration::ZERO).unwrap();
        let task =
            Task { socket: socket.clone(), pid: 1, ran: false, bandwidth: 0, overlays: Vec::new(), downtime: None };
        // It goes on when the program that stores the guest has ended.
        let words = ["sh", "-c", "read line; echo ready; read line"].map(OsString::from);
        let mut guard = Guard::start(&words, &task, &lock).unwrap();
        drop(lock);
        let error = Lock::take(&socket, 1, Duration::from_millis(100)).map(drop).unwrap_err();
        assert!(error.to_string().starts_with("another snapshot of process 1 is being taken"), "{error}");
        guard.done();
        assert!(Lock::take(&socket, 1, PATIENCE).is_ok());
    }
}
