//! The guard: a child process that continues the stopped processes when the checkpoint's process
//! has ended, even if it was killed. It also takes back the real-time priority that threads were
//! given to stop sooner.
//!
//! The guard is the calling program itself, started with the words in
//! [`Options::guard`](crate::Options::guard); with these it must call [`run`].

use std::ffi::OsString;
use std::io::{self, Read};
use std::process::{Child, Command, Stdio};

use kmem::pidfd::PidFd;
use kmem::{procfs, sched};

/// What the guard prints when it knows its processes.
const READY: &str = "ready\n";

/// Why there is no guard.
#[derive(Debug, thiserror::Error)]
pub enum GuardError {
    /// The program cannot be started.
    #[error("cannot start the guard")]
    Start(#[source] io::Error),
    /// The program ended, or is another one.
    #[error("the guard did not start")]
    NotReady(#[source] io::Error),
}

/// The guard's process: waits until its standard input is closed, then continues the processes.
/// These processes may be stopped meanwhile.
pub fn run(pids: &[i32]) {
    let processes: Vec<PidFd> = pids.iter().filter_map(|&pid| PidFd::open(pid).ok()).collect();
    let policies: Vec<(i32, Vec<(i32, i32)>)> = pids.iter().map(|&pid| (pid, usual_policies(pid))).collect();
    // A signal to the foreground process group, such as Ctrl-C, must not end the guard first.
    rustix::process::setsid().ok();
    // A parent that was killed meanwhile does not read it, and has stopped nothing.
    let _ = io::Write::write_all(&mut io::stdout(), READY.as_bytes());
    let _ = io::Write::flush(&mut io::stdout());
    let mut nothing = Vec::new();
    let _ = io::stdin().read_to_end(&mut nothing);
    for (pid, before) in policies {
        for thread in procfs::threads(pid).unwrap_or_default() {
            let known = before.iter().find(|(known, _)| *known == thread);
            if let Some((_, policy)) = known
                && sched::policy(thread) == Ok(libc::SCHED_FIFO)
            {
                let _ = sched::go_back(thread, *policy);
            }
        }
    }
    for process in processes {
        let _ = process.send_signal(libc::SIGCONT);
    }
}

/// Threads that have real-time priority until this is dropped: thread and former policy.
pub(crate) struct First(Vec<(i32, i32)>);

impl First {
    /// Raises the threads of a process, or the calling thread. Without permission nothing changes.
    pub(crate) fn begin(pid: Option<i32>) -> Self {
        let all = pid.map_or_else(|| vec![(0, sched::policy(0).unwrap_or(-1))], usual_policies);
        let usual = |(thread, policy): &(i32, i32)| sched::is_usual(*policy) && sched::go_first(*thread).is_ok();
        Self(all.into_iter().filter(usual).collect())
    }
}

impl Drop for First {
    fn drop(&mut self) {
        for (thread, policy) in self.0.drain(..) {
            let _ = sched::go_back(thread, policy);
        }
    }
}

/// The threads of a process that have usual policies, each with its policy.
fn usual_policies(pid: i32) -> Vec<(i32, i32)> {
    let threads = procfs::threads(pid).unwrap_or_default().into_iter();
    threads
        .filter_map(|thread| Some((thread, sched::policy(thread).ok()?)))
        .filter(|(_, p)| sched::is_usual(*p))
        .collect()
}

/// A running guard. Dropping it lets the guard do its work and end.
pub(crate) struct Guard {
    child: Child,
}

impl Guard {
    /// Starts a guard of these processes. `words` are the program and its first arguments. See
    /// [`Guard::ready`].
    pub(crate) fn start(words: &[OsString], pids: &[i32]) -> Result<Self, GuardError> {
        let (program, arguments) = words.split_first().ok_or(GuardError::Start(io::ErrorKind::InvalidInput.into()))?;
        let mut command = Command::new(program);
        command.args(arguments).args(pids.iter().map(i32::to_string));
        let child = command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().map_err(GuardError::Start)?;
        Ok(Self { child })
    }

    /// Waits until the guard knows its processes. No process may be stopped before.
    pub(crate) fn ready(&mut self) -> Result<(), GuardError> {
        if let Some(mut out) = self.child.stdout.take() {
            out.read_exact(&mut [0; READY.len()]).map_err(GuardError::NotReady)?;
        }
        Ok(())
    }
}

impl Drop for Guard {
    fn drop(&mut self) {
        drop(self.child.stdin.take());
        let _ = self.child.wait();
    }
}
