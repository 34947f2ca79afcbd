//! A running guest: QEMU, started directly or through a launcher, and a thread that reads its
//! console.
//!
//! Each guest is a process group of its own. Ctrl-C at the terminal reaches the caller but not the
//! guests, and killing the group ends QEMU even if the launcher did not replace itself by it. If
//! the caller is killed, the kernel kills the guests (`PR_SET_PDEATHSIG`).
#![allow(unsafe_code, reason = "Command::pre_exec, to ask for the parent's death signal")]

use std::fmt;
use std::io::{self, BufRead, BufReader, PipeReader, PipeWriter, Read};
use std::ops::Range;
use std::os::unix::process::CommandExt;
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::Arc;
use std::time::{Duration, Instant};

use parking_lot::Mutex;
use rustix::process::{Pid, Signal};

use crate::heard::Heard;

/// Console lines in an error message.
const TAIL_LINES: usize = 12;
/// Length at which a console line is cut, bytes: a guest is not trusted.
const LINE_BYTES: u64 = 4096;
/// A guest that is silent for this long hangs, or is slow. A round takes seconds, tens of seconds
/// on a busy machine.
const SILENCE: Duration = Duration::from_secs(180);
/// A silent guest that has taken more than one part in this number of a processor meanwhile is
/// slow, and does not hang: an idle one takes less.
const AT_WORK: u32 = 50;
/// How long to wait for the end of a killed guest.
const KILL_LIMIT: Duration = Duration::from_secs(10);

/// The state of a guest.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Verdict {
    /// QEMU has started; init has not.
    Starting,
    /// The guest checks its files for the first time.
    Booted,
    /// Every round so far was right.
    Pass {
        /// Number of the last round, from 0.
        round: u64,
    },
    /// A round found a wrong byte. This verdict is final.
    Corrupt {
        /// The first such round.
        round: u64,
        /// The first file in it.
        file: String,
    },
    /// The console has been silent for long, but the guest works.
    Slow {
        /// Seconds since its last line.
        silent: u64,
    },
    /// QEMU has ended, the guest's kernel has panicked, or the console was silent for too long
    /// while the guest did nothing.
    Dead(String),
}

impl fmt::Display for Verdict {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Starting => write!(f, "starting"),
            Self::Booted => write!(f, "booted, first round"),
            Self::Pass { round } => write!(f, "PASS round {round}"),
            Self::Corrupt { round, file } => write!(f, "CORRUPT round {round}: {file}"),
            Self::Slow { silent } => write!(f, "slow: silent for {silent} s, but at work"),
            Self::Dead(reason) => write!(f, "DEAD: {reason}"),
        }
    }
}

/// Why [`Guest::start`] failed.
#[derive(Debug, thiserror::Error)]
pub enum StartError {
    /// No pipe for the console.
    #[error("cannot make a guest's console pipe")]
    Pipe(#[source] io::Error),
    /// The program cannot be run.
    #[error("cannot run {program}")]
    Run {
        /// The command's program: the launcher, if there is one.
        program: String,
        /// Why.
        source: io::Error,
    },
    /// No thread to read the console.
    #[error("cannot start a guest's console thread")]
    Thread(#[source] io::Error),
}

/// What [`Guest::check`] found.
#[derive(Debug, thiserror::Error)]
pub enum Broken {
    /// A round found a wrong byte.
    #[error("guest {pid} found wrong bytes in round {round}: {file}")]
    Corrupt {
        /// The guest's process.
        pid: i32,
        /// The first such round.
        round: u64,
        /// The first file in it.
        file: String,
    },
    /// The guest's kernel has panicked.
    #[error("guest {pid} panicked: {text}")]
    Panicked {
        /// The guest's process.
        pid: i32,
        /// The kernel's message.
        text: String,
    },
    /// QEMU has ended.
    #[error("guest {pid} ended, {status}; its last lines:\n{tail}")]
    Ended {
        /// The guest's process.
        pid: i32,
        /// How QEMU ended.
        status: ExitStatus,
        /// The last lines of its console.
        tail: String,
    },
    /// The state of QEMU's process is unknown.
    #[error("cannot wait for guest {pid}")]
    Wait {
        /// The guest's process.
        pid: i32,
        /// Why.
        source: io::Error,
    },
}

/// A running guest. Dropping it kills it.
#[derive(Debug)]
pub struct Guest {
    child: Child,
    heard: Arc<Mutex<Heard>>,
    /// When the console last had a new line, as far as was looked, and QEMU's CPU time then.
    spoke: (Instant, Duration),
    /// Reads the console.
    listener: Option<std::thread::JoinHandle<()>>,
}

impl Guest {
    /// Starts a command, such as [`Spec::command`](crate::Spec::command), with the console on
    /// standard output. The command must become QEMU or run for as long as QEMU: its end counts as
    /// QEMU's. The calling thread must outlive the guest, because the kernel takes the thread's end
    /// for the parent's death (PR_SET_PDEATHSIG(2const)).
    ///
    /// # Errors
    /// If the command's program cannot be run.
    pub fn start(command: Command) -> Result<Self, StartError> {
        Self::run(command, io::pipe().map_err(StartError::Pipe)?)
    }

    /// Like [`Guest::start`]; standard error counts as console too, so that the launcher's messages
    /// appear in [`Guest::console_tail`].
    ///
    /// # Errors
    /// If the command's program cannot be run.
    pub fn start_with_stderr(mut command: Command) -> Result<Self, StartError> {
        let pipe = io::pipe().map_err(StartError::Pipe)?;
        command.stderr(pipe.1.try_clone().map_err(StartError::Pipe)?);
        Self::run(command, pipe)
    }

    fn run(mut command: Command, (console, output): (PipeReader, PipeWriter)) -> Result<Self, StartError> {
        command.stdin(Stdio::null()).stdout(output).process_group(0);
        // SAFETY: the closure runs in the child between fork and exec, where only async-signal-safe
        // calls are allowed. It makes one system call, prctl(2): it takes no lock and allocates
        // nothing.
        unsafe {
            command.pre_exec(|| Ok(rustix::process::set_parent_process_death_signal(Some(Signal::KILL))?));
        }
        let child = command
            .spawn()
            .map_err(|source| StartError::Run { program: command.get_program().display().to_string(), source })?;
        let heard = Arc::new(Mutex::new(Heard::new()));
        let listener = Arc::clone(&heard);
        let mut guest = Self { child, heard, spoke: (Instant::now(), Duration::ZERO), listener: None };
        // The thread ends when every process that holds the pipe's other end has ended.
        let thread = std::thread::Builder::new().name("console".into());
        let started = thread.spawn(move || listen(BufReader::new(console), &listener));
        guest.listener = Some(started.map_err(StartError::Thread)?);
        Ok(guest)
    }

    /// The command's process: QEMU, if the launcher replaces itself by it.
    pub fn pid(&self) -> i32 {
        self.child.id() as i32
    }

    /// Number of rounds that have ended, right or wrong.
    pub fn rounds(&self) -> u64 {
        self.heard.lock().rounds.len() as u64
    }

    /// Rounds per second, between the first and the last round that ended within `time`.
    pub fn rounds_a_second(&self, time: Range<Instant>) -> f64 {
        let rounds: Vec<Instant> = self.heard.lock().rounds.iter().copied().filter(|at| time.contains(at)).collect();
        match rounds[..] {
            [first, .., last] => (rounds.len() - 1) as f64 / (last - first).as_secs_f64(),
            // Too few for an interval between two of them.
            _ => rounds.len() as f64 / (time.end - time.start).as_secs_f64(),
        }
    }

    /// Whether the guest has ended its work and does nothing (`PAGEONE_WORK` in `guest/demo/init`).
    pub fn rests(&self) -> bool {
        self.heard.lock().rests
    }

    /// Number of files checked in all rounds, and of those that were wrong.
    pub fn checks(&self) -> (u64, u64) {
        let heard = self.heard.lock();
        (heard.checks, heard.failures)
    }

    /// The state of the guest. A wrong byte outweighs everything later.
    pub fn verdict(&mut self) -> Verdict {
        let ended = self.child.try_wait();
        let cpu = kmem::procfs::cpu_time(self.pid()).unwrap_or_default();
        let heard = self.heard.lock();
        if heard.at > self.spoke.0 {
            self.spoke = (heard.at, cpu);
        }
        if let Some((round, file)) = heard.corrupt() {
            return Verdict::Corrupt { round, file };
        }
        if let Some(text) = &heard.panic {
            return Verdict::Dead(text.clone());
        }
        match ended {
            Ok(None) if heard.at.elapsed() > SILENCE && !heard.rests => {
                silent(heard.at.elapsed(), cpu.saturating_sub(self.spoke.1))
            }
            Ok(None) if !heard.rounds.is_empty() => Verdict::Pass { round: heard.last_round },
            Ok(None) if heard.booted => Verdict::Booted,
            Ok(None) => Verdict::Starting,
            Ok(Some(status)) => Verdict::Dead(format!("QEMU ended ({status})")),
            Err(error) => Verdict::Dead(format!("cannot wait for QEMU: {error}")),
        }
    }

    /// Whether QEMU has ended.
    pub(crate) fn has_ended(&mut self) -> bool {
        !matches!(self.child.try_wait(), Ok(None))
    }

    /// Checks that the guest runs and that every file was right so far. Unlike
    /// [`Guest::verdict`], silence is not an error.
    ///
    /// # Errors
    /// If a round found a wrong byte, the guest's kernel has panicked, or QEMU has ended.
    pub fn check(&mut self) -> Result<(), Broken> {
        let pid = self.pid();
        let heard = self.heard.lock();
        if let Some((round, file)) = heard.corrupt() {
            return Err(Broken::Corrupt { pid, round, file });
        }
        if let Some(text) = &heard.panic {
            return Err(Broken::Panicked { pid, text: text.clone() });
        }
        drop(heard);
        match self.child.try_wait() {
            Ok(None) => Ok(()),
            Ok(Some(status)) => Err(Broken::Ended { pid, status, tail: self.console_tail() }),
            Err(source) => Err(Broken::Wait { pid, source }),
        }
    }

    /// The console's lines, the last few thousand of them.
    pub fn console(&self) -> Vec<String> {
        self.heard.lock().lines.iter().cloned().collect()
    }

    /// The first line of the console for which `is_it` holds, of those that it still has.
    pub fn said(&self, is_it: impl Fn(&str) -> bool) -> Option<String> {
        self.heard.lock().lines.iter().find(|line| is_it(line)).cloned()
    }

    /// Waits until all is read that the console has said, at most for this time. That ends only
    /// after QEMU has ended.
    pub fn hear_out(&self, limit: Duration) {
        let until = Instant::now() + limit;
        while self.listener.as_ref().is_some_and(|thread| !thread.is_finished()) && Instant::now() < until {
            std::thread::sleep(Duration::from_millis(5));
        }
    }

    /// The last lines of the console, for an error message.
    pub fn console_tail(&self) -> String {
        let heard = self.heard.lock();
        let skipped = heard.lines.len().saturating_sub(TAIL_LINES);
        heard.lines.iter().skip(skipped).map(|line| format!("    | {line}\n")).collect()
    }

    /// Kills the guest and waits until it has ended. Does nothing the second time.
    pub fn kill(&mut self) {
        let Some(group) = Pid::from_raw(self.pid()) else {
            return;
        };
        if !matches!(self.child.try_wait(), Ok(None)) {
            return; // Reaped: the number may belong to another process by now.
        }
        let _ = rustix::process::kill_process_group(group, Signal::KILL);
        let _ = self.child.wait();
        // A launcher that did not replace itself by QEMU may end before QEMU, which has memory to
        // free.
        let until = Instant::now() + KILL_LIMIT;
        while rustix::process::test_kill_process_group(group).is_ok() && Instant::now() < until {
            std::thread::sleep(Duration::from_millis(10));
        }
    }
}

impl Drop for Guest {
    fn drop(&mut self) {
        self.kill();
    }
}

/// The verdict on a guest that has been silent for this time, and has taken this much CPU time.
fn silent(time: Duration, cpu: Duration) -> Verdict {
    let silent = time.as_secs();
    if cpu * AT_WORK > time {
        Verdict::Slow { silent }
    } else {
        Verdict::Dead(format!("silent for {silent} s, and QEMU did nothing meanwhile"))
    }
}

/// Reads the console until its end.
fn listen(mut console: impl BufRead, heard: &Mutex<Heard>) {
    let mut line = Vec::new();
    loop {
        line.clear();
        match console.by_ref().take(LINE_BYTES).read_until(b'\n', &mut line) {
            Ok(0) => return,
            Ok(_) => heard.lock().line(&String::from_utf8_lossy(&line)),
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(_) => return,
        }
    }
}

#[cfg(test)]
mod tests;
