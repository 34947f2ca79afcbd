//! Stopping the process and letting it run again.

use std::time::{Duration, Instant};

use guard::{First, Guard, GuardError, Stopped as How};
use kmem::pidfd::PidFd;
use kmem::procfs;

use super::{Source, SourceError};

/// How long a process may take to stop.
const STOP_LIMIT: Duration = Duration::from_secs(5);
/// Time between two checks whether it has stopped: a small part of the pause.
const POLL: Duration = Duration::from_micros(200);

impl Source {
    /// Whether the process is stopped, by this checkpoint or by others.
    pub(crate) fn is_stopped(&self) -> bool {
        procfs::is_stopped(self.pid).unwrap_or(false)
    }

    /// Has the guard continue the process after the checkpoint, unless it is stopped already. Gives
    /// whether it does.
    pub(crate) fn watch(&self, guard: &Guard) -> Result<bool, GuardError> {
        let runs = !self.is_stopped();
        if runs {
            guard.watch(How::Signal, self.pid, &self.process, &[])?;
        }
        Ok(runs)
    }

    /// Stops the process until the result is dropped. A process that is stopped already stays so.
    pub(crate) fn stop(&self) -> Result<Stopped<'_>, SourceError> {
        self.stop_within(STOP_LIMIT)
    }

    pub(super) fn stop_within(&self, limit: Duration) -> Result<Stopped<'_>, SourceError> {
        let start = Instant::now();
        if self.is_stopped() {
            return Ok(Stopped { process: None });
        }
        self.process.send_signal(libc::SIGSTOP).map_err(SourceError::Stop)?;
        let stopped = Stopped { process: Some(&self.process) };
        // On a busy machine the threads wait for a CPU before they notice the signal. Real-time
        // priority makes them notice it first; they run nothing else in between.
        let _first = First::begin(Some(self.pid));
        while !self.is_stopped() {
            if start.elapsed() >= limit {
                return Err(SourceError::StillRuns(self.pid));
            }
            if self.process.has_exited() {
                return Err(SourceError::Ended(self.pid));
            }
            std::thread::sleep(POLL);
        }
        Ok(stopped)
    }
}

/// A process that is stopped until this is dropped.
pub(crate) struct Stopped<'a> {
    process: Option<&'a PidFd>,
}

impl Drop for Stopped<'_> {
    fn drop(&mut self) {
        if let Some(process) = self.process.take() {
            // The signal fails only if the process has ended.
            let _ = process.send_signal(libc::SIGCONT);
        }
    }
}
