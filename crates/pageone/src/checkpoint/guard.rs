//! Nobody stays stopped: a child process lets them go on when this one is gone, however it went.

use std::io::Read;
use std::process::{Child, Command, Stdio};

use anyhow::{Context, Result};
use kmem::pidfd::PidFd;

/// Options of the hidden `pageone checkpoint-guard`.
#[derive(clap::Args)]
pub(crate) struct Args {
    /// Processes that may be stopped
    pids: Vec<i32>,
}

/// The guard's life: waits until its standard input is closed, then lets the processes go on.
pub(crate) fn run(args: &Args) -> Result<()> {
    let processes: Vec<PidFd> = args.pids.iter().filter_map(|&pid| PidFd::open(pid).ok()).collect();
    // A signal to the whole foreground group, Ctrl-C, must not end the guard first.
    rustix::process::setsid().ok();
    println!("ready");
    let mut nothing = Vec::new();
    let _ = std::io::stdin().read_to_end(&mut nothing);
    for process in processes {
        let _ = process.send_signal(libc::SIGCONT);
    }
    Ok(())
}

/// A running guard.
pub(super) struct Guard {
    child: Child,
}

impl Guard {
    /// Starts a guard of these processes.
    pub(super) fn start(pids: &[i32]) -> Result<Self> {
        let mut command = Command::new(std::env::current_exe().context("cannot find this program")?);
        command.arg("checkpoint-guard").args(pids.iter().map(i32::to_string));
        let mut child =
            command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().context("cannot start the guard")?;
        // It must know the processes before one of them is stopped.
        let mut ready = [0; 6];
        let out = child.stdout.as_mut().context("the guard has no output")?;
        out.read_exact(&mut ready).context("the guard did not start")?;
        Ok(Self { child })
    }
}

impl Drop for Guard {
    fn drop(&mut self) {
        drop(self.child.stdin.take());
        let _ = self.child.wait();
    }
}
