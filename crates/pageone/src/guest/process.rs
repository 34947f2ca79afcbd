//! A running guest: QEMU started through a launcher, its console read by a thread.
//!
//! Each guest is a process group of its own: Ctrl-C at the terminal reaches us and not the guests,
//! and killing the group ends QEMU also where the launcher did not replace itself by it. Should we
//! be killed outright, the kernel ends the guests (`PR_SET_PDEATHSIG`).
#![allow(unsafe_code)] // Command::pre_exec, to ask for the parent's death signal.

use super::Spec;
use super::console::{self, Line, Round};
use anyhow::{Context, Result};
use rustix::process::{Pid, Signal};
use std::collections::VecDeque;
use std::ffi::OsString;
use std::fmt;
use std::io::{BufRead, BufReader, Read};
use std::os::unix::process::CommandExt;
use std::process::{Child, Command, Stdio};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

/// Console lines kept for an error message.
const TAIL_LINES: usize = 12;
/// A guest is not to be trusted: a longer line is taken in pieces.
const LINE_BYTES: u64 = 4096;
/// A guest that says nothing for this long hangs. A round takes seconds; ten on a crowded machine.
const SILENCE: Duration = Duration::from_secs(180);

/// What is known of a guest.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Verdict {
    /// QEMU has started, nothing was heard yet.
    Starting,
    /// The guest checks its files for the first time.
    Booted,
    /// Every round so far was right.
    Pass {
        /// Number of the last round, from 0.
        round: u64,
    },
    /// A round found a wrong byte. Stays, whatever comes later.
    Corrupt {
        /// The first such round.
        round: u64,
        /// The first file in it.
        file: String,
    },
    /// QEMU has ended, the guest's kernel has panicked, or nothing was heard for too long.
    Dead(String),
}

impl fmt::Display for Verdict {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Verdict::Starting => write!(f, "starting"),
            Verdict::Booted => write!(f, "booted, first round"),
            Verdict::Pass { round } => write!(f, "PASS round {round}"),
            Verdict::Corrupt { round, file } => write!(f, "CORRUPT round {round}: {file}"),
            Verdict::Dead(reason) => write!(f, "DEAD: {reason}"),
        }
    }
}

/// What the console has told.
#[derive(Debug)]
struct Heard {
    booted: bool,
    rounds: u64,
    checks: u64,
    failures: u64,
    last_round: u64,
    corrupt: Option<Round>,
    panic: Option<String>,
    at: Instant,
    tail: VecDeque<String>,
}

impl Heard {
    fn line(&mut self, line: &str) {
        match console::parse(line) {
            None => {}
            Some(Line::Booted) => {
                self.booted = true;
                self.at = Instant::now();
            }
            Some(Line::Panic(text)) => self.panic = Some(text),
            Some(Line::Round(round)) => {
                self.at = Instant::now();
                self.rounds += 1;
                self.checks += round.checks;
                self.failures += round.failures;
                self.last_round = round.number;
                if round.failures > 0 {
                    self.corrupt.get_or_insert(round);
                }
            }
        }
        if self.tail.len() == TAIL_LINES {
            self.tail.pop_front();
        }
        self.tail.push_back(line.trim_end().to_owned());
    }
}

/// A running guest. Dropping it kills it.
#[derive(Debug)]
pub struct Guest {
    child: Child,
    heard: Arc<Mutex<Heard>>,
}

impl Guest {
    /// Starts QEMU as `launcher... qemu...`. The launcher has to replace itself by QEMU or to stay
    /// for as long as it: its end is taken for QEMU's. The thread that calls has to outlive the
    /// guest: the kernel takes its end for the parent's death (PR_SET_PDEATHSIG(2const)).
    ///
    /// # Errors
    /// If the program (the launcher's, if there is one) cannot be run.
    pub fn start(launcher: &[OsString], spec: &Spec) -> Result<Guest> {
        let words = [launcher, &spec.command_line()].concat();
        let (console, output) = std::io::pipe().context("cannot make a guest's console pipe")?;
        let mut command = Command::new(&words[0]);
        command.args(&words[1..]).stdin(Stdio::null()).stdout(output.try_clone()?).stderr(output).process_group(0);
        // SAFETY: between fork and exec the closure makes one system call, prctl(2), and touches no memory
        // that another thread may have left locked.
        unsafe {
            command.pre_exec(|| Ok(rustix::process::set_parent_process_death_signal(Some(Signal::KILL))?));
        }
        let child = command.spawn().with_context(|| format!("cannot run {}", words[0].display()))?;
        let heard = Arc::new(Mutex::new(Heard {
            booted: false,
            rounds: 0,
            checks: 0,
            failures: 0,
            last_round: 0,
            corrupt: None,
            panic: None,
            at: Instant::now(),
            tail: VecDeque::new(),
        }));
        let listener = Arc::clone(&heard);
        let guest = Guest { child, heard };
        // Ends by itself when the last holder of the pipe's other end has gone.
        std::thread::Builder::new()
            .name("console".into())
            .spawn(move || listen(BufReader::new(console), &listener))
            .context("cannot start a guest's console thread")?;
        Ok(guest)
    }

    /// The process id of what was started: QEMU's, if the launcher replaces itself by it.
    pub fn pid(&self) -> u32 {
        self.child.id()
    }

    /// Rounds that have ended, right or wrong.
    pub fn rounds(&self) -> u64 {
        lock(&self.heard).rounds
    }

    /// Files verified, and those of them that were wrong, in all rounds.
    pub fn checks(&self) -> (u64, u64) {
        let heard = lock(&self.heard);
        (heard.checks, heard.failures)
    }

    /// What is known of the guest now. A wrong byte outweighs everything later.
    pub fn verdict(&mut self) -> Verdict {
        let ended = self.child.try_wait();
        let heard = lock(&self.heard);
        if let Some(Round { number, first_failure, .. }) = &heard.corrupt {
            let file = first_failure.clone().unwrap_or_else(|| "(file not named)".into());
            return Verdict::Corrupt { round: *number, file };
        }
        if let Some(text) = &heard.panic {
            return Verdict::Dead(text.clone());
        }
        match ended {
            Ok(None) if heard.at.elapsed() > SILENCE => {
                Verdict::Dead(format!("silent for {} s", heard.at.elapsed().as_secs()))
            }
            Ok(None) if heard.rounds > 0 => Verdict::Pass { round: heard.last_round },
            Ok(None) if heard.booted => Verdict::Booted,
            Ok(None) => Verdict::Starting,
            Ok(Some(status)) => Verdict::Dead(format!("QEMU ended ({status})")),
            Err(error) => Verdict::Dead(format!("cannot wait for QEMU: {error}")),
        }
    }

    /// The last lines of the console, for an error message.
    pub fn console_tail(&self) -> String {
        let heard = lock(&self.heard);
        heard.tail.iter().map(|line| format!("    | {line}\n")).collect()
    }

    /// Ends the guest at once and waits until it is gone. Does nothing the second time.
    pub fn kill(&mut self) {
        let Some(group) = i32::try_from(self.child.id()).ok().and_then(Pid::from_raw) else {
            return;
        };
        if !matches!(self.child.try_wait(), Ok(None)) {
            return; // Ended and reaped: its number may be another's by now.
        }
        let _ = rustix::process::kill_process_group(group, Signal::KILL);
        let _ = self.child.wait();
        // A launcher that did not replace itself by QEMU may be gone before it: QEMU has memory to free.
        let until = Instant::now() + Duration::from_secs(10);
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

fn lock(heard: &Mutex<Heard>) -> MutexGuard<'_, Heard> {
    heard.lock().unwrap_or_else(PoisonError::into_inner)
}

fn listen(mut console: impl BufRead, heard: &Mutex<Heard>) {
    let mut line = Vec::new();
    loop {
        line.clear();
        match console.by_ref().take(LINE_BYTES).read_until(b'\n', &mut line) {
            Ok(0) => return,
            Ok(_) => lock(heard).line(&String::from_utf8_lossy(&line)),
            Err(error) if error.kind() == std::io::ErrorKind::Interrupted => {}
            Err(_) => return,
        }
    }
}
