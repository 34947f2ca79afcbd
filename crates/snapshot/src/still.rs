//! A guest that stands still while somebody works on its process, and goes on also if that program
//! is killed: the [`guard`](crate::guard) sees to it.

use std::ffi::OsString;

use serde_json::json;

use crate::guard::{Guard, Lock, PATIENCE, Task};
use crate::monitor::{Monitor, MonitorError};
use crate::save::{SaveError, monitor_of};

/// Why a guest is not stopped.
#[derive(Debug, thiserror::Error)]
pub enum StillError {
    /// Nobody can ask QEMU.
    #[error(
        "its command line names no QMP socket by which QEMU could be stopped; a clone has one if the name of its directory is \
         short enough (`pageone snapshot run --files`); `pageone snapshot run --merge` starts such clones"
    )]
    NoMonitor,
    /// It neither runs nor was paused: its devices may be at work.
    #[error(
        "the guest is neither running nor paused, but {0}; let it run (`cont` on its monitor) or pause it, \
             and try again"
    )]
    State(String),
    /// Its RAM is being sent.
    #[error("it is being migrated, or sent to a snapshot; wait for the end of that")]
    Migrates,
    /// It stands.
    #[error("the guest was stopped, and QEMU does not let it go on")]
    GoOn(#[source] MonitorError),
    /// QEMU does not do what it is asked.
    #[error(transparent)]
    Qmp(#[from] MonitorError),
    /// A snapshot is being taken, or there is no guard.
    #[error(transparent)]
    Save(#[from] SaveError),
}

/// A guest whose processors are stopped, and whose disks have nothing to do. Dropping it lets the
/// guest go on, if it ran.
pub struct Still {
    /// QEMU serves one client: it is closed before the guard works.
    qmp: Monitor,
    guard: Guard,
    task: Task,
}

impl Still {
    /// Stops the guest of a process. `guard`: see [`Options`](crate::save::Options).
    ///
    /// # Errors
    /// If it is not stopped. Then it runs as before.
    pub fn begin(pid: i32, guard: &[OsString]) -> Result<Self, StillError> {
        let socket = monitor_of(pid)?.ok_or(StillError::NoMonitor)?;
        let lock = Lock::take(&socket, pid, PATIENCE)?;
        let mut qmp = Monitor::connect(&socket, pid)?;
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
        let guard = Guard::start(guard, &task, &lock).map_err(SaveError::Guard)?;
        let mut still = Self { qmp, guard, task };
        if ran {
            still.qmp.execute("stop", json!({}))?;
        }
        Ok(still)
    }

    /// Lets the guest go on, if it ran.
    ///
    /// # Errors
    /// If QEMU does not do it. Then the guard tries.
    pub fn go_on(mut self) -> Result<(), StillError> {
        self.task.go_on(&mut self.qmp).map_err(StillError::GoOn)?;
        self.guard.done();
        Ok(())
    }
}
