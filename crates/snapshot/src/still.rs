//! A guest that stands still while somebody works on its process, and goes on also if that program
//! is killed: a guard sees to it (crate `guard`).

use guard::{Guard, GuardError};
use serde_json::json;

use crate::monitor::{Monitor, MonitorError};
use crate::save::{SaveError, Seen};
use crate::undo::{Task, UndoError};

/// Why a guest is not stopped.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs, reason = "each sentence says what it is")]
pub enum StillError {
    #[error(
        "its command line names no QMP socket by which QEMU could be stopped: a clone has one if the name of its directory is \
         short enough (`pageone snapshot run --files`); `pageone snapshot run --merge` starts such clones"
    )]
    NoMonitor,
    #[error(
        "the guest is neither running nor paused, but {0}; let it run (`cont` on its monitor) or pause it, \
             and try again"
    )]
    State(String),
    #[error("it is being migrated, or sent to a snapshot; wait for the end of that")]
    Migrates,
    #[error("the guest was stopped, and QEMU does not let it go on")]
    GoOn(#[source] MonitorError),
    #[error(transparent)]
    Qmp(#[from] MonitorError),
    #[error(transparent)]
    Guard(#[from] GuardError),
    #[error(transparent)]
    Save(#[from] SaveError),
    #[error(transparent)]
    Undo(#[from] UndoError),
}

/// A guest whose processors are stopped, and whose disks have nothing to do. Without
/// [`Still::go_on`] its guard lets it go on, if it ran.
pub struct Still<'a> {
    qmp: Monitor,
    guard: &'a Guard,
    task: Task,
}

impl<'a> Still<'a> {
    /// Stops the guest of a process.
    ///
    /// # Errors
    /// If it is not stopped. Then it runs as before.
    pub fn begin(pid: i32, guard: &'a Guard) -> Result<Self, StillError> {
        let seen = Seen::of(pid)?;
        let socket = seen.socket().ok_or(StillError::NoMonitor)?;
        let (lock, mut qmp) = seen.connect(&socket)?;
        if !Monitor::is_over(&qmp.execute("query-migrate", json!({}))?) {
            return Err(StillError::Migrates);
        }
        let settings = qmp.execute("query-migrate-parameters", json!({}))?;
        let bandwidth = settings["max-bandwidth"].as_u64().unwrap_or(128 << 20);
        let state = qmp.state()?;
        if !matches!(state.as_str(), "running" | "paused") {
            return Err(StillError::State(state));
        }
        let ran = state == "running";
        let task = Task { socket, pid, ran, bandwidth, overlays: Vec::new(), downtime: None };
        task.watch(guard, &qmp, &lock, None)?;
        if ran {
            guard.stands(guard::PROMISE)?;
            qmp.execute("stop", json!({}))?;
            guard.is_there()?;
        }
        Ok(Self { qmp, guard, task })
    }

    /// Lets the guest go on, if it ran.
    ///
    /// # Errors
    /// If QEMU does not do it, and the guard has to; or if the guard has done it before.
    pub fn go_on(mut self) -> Result<(), StillError> {
        self.task.go_on(&mut self.qmp).map_err(StillError::GoOn)?;
        if self.task.ran {
            self.guard.runs()?;
        }
        self.guard.done();
        Ok(())
    }
}
