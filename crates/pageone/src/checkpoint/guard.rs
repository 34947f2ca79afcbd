//! Nobody stays stopped: a child process lets them go on when this one is gone, however it went.
//! Nor does a thread keep the priority that it was given to stop sooner.

use std::io::Read;
use std::process::{Child, Command, Stdio};

use anyhow::{Context, Result};
use kmem::pidfd::PidFd;
use kmem::{procfs, sched};

/// Options of the hidden `pageone checkpoint-guard`.
#[derive(clap::Args)]
pub(crate) struct Args {
    /// Processes that may be stopped
    pids: Vec<i32>,
}

/// The guard's life: waits until its standard input is closed, then lets the processes go on.
pub(crate) fn run(args: &Args) -> Result<()> {
    let processes: Vec<PidFd> = args.pids.iter().filter_map(|&pid| PidFd::open(pid).ok()).collect();
    let policies: Vec<(i32, Vec<(i32, i32)>)> = args.pids.iter().map(|&pid| (pid, usual_policies(pid))).collect();
    // A signal to the whole foreground group, Ctrl-C, must not end the guard first.
    rustix::process::setsid().ok();
    println!("ready");
    let mut nothing = Vec::new();
    let _ = std::io::stdin().read_to_end(&mut nothing);
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
    Ok(())
}

/// Threads that go first until this is dropped.
pub(super) struct First(Vec<(i32, i32)>);

impl First {
    /// The threads of a process, or the calling one. Without permission nothing changes.
    pub(super) fn begin(pid: Option<i32>) -> Self {
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

/// The threads of a process with usual policies, and these.
fn usual_policies(pid: i32) -> Vec<(i32, i32)> {
    let threads = procfs::threads(pid).unwrap_or_default().into_iter();
    threads
        .filter_map(|thread| Some((thread, sched::policy(thread).ok()?)))
        .filter(|(_, p)| sched::is_usual(*p))
        .collect()
}

/// A running guard.
pub(super) struct Guard {
    child: Child,
}

impl Guard {
    /// Starts a guard of these processes; see [`Guard::ready`].
    pub(super) fn start(pids: &[i32]) -> Result<Self> {
        let mut command = Command::new(std::env::current_exe().context("cannot find this program")?);
        command.arg("checkpoint-guard").args(pids.iter().map(i32::to_string));
        let child = command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().context("cannot start the guard")?;
        Ok(Self { child })
    }

    /// Waits until it knows the processes: before one of them is stopped.
    pub(super) fn ready(&mut self) -> Result<()> {
        if let Some(mut out) = self.child.stdout.take() {
            out.read_exact(&mut [0; 6]).context("the guard did not start")?;
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
