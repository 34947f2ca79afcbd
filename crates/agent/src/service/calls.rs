//! Calls that threads were about to make when the program's tables were changed (`pageone attach`).
//!
//! A thread reads the C library's address from a table, and enters the kernel some instructions
//! later. If it is preempted in between, its call comes when memory is managed already, and no
//! guard sees it. So nothing is merged before each thread that ran then has been seen
//!
//! ```text
//! asleep in a system call      it is behind those instructions
//! at work again                its time on a CPU has grown, twice: the kernel counts late, and the
//!                              first growth may be older than the change
//! ```
//!
//! A call that is under way has the lock of the address space, which each window takes too.
//!
//! Source: proc(5), `/proc/PID/syscall`; the kernel's Documentation/scheduler/sched-stats.rst.

use std::fs;
use std::io;
use std::thread::sleep;
use std::time::Duration;

use rustix::io::Errno;

use crate::runtime::denied::{self, Need};
use crate::runtime::log;

/// Nanoseconds on a CPU that take a thread past any such call.
const ENOUGH: u64 = 20_000;
/// Pause between two looks.
const PAUSE: Duration = Duration::from_millis(1);
/// Longest pause, for a program whose threads get no CPU.
const LONGEST_PAUSE: Duration = Duration::from_millis(50);

/// A thread that has not been seen elsewhere.
struct Thread {
    id: String,
    /// Its nanoseconds on a CPU at first.
    before: u64,
    /// The same when they had grown.
    grown: Option<u64>,
}

#[derive(Debug, PartialEq, Eq)]
enum Now {
    InCall,
    /// Runs, waits for a CPU, or sleeps in a page fault.
    InProgram,
    Gone,
}

/// Waits until no thread of this process can be about to make a call that it chose before. False:
/// what they do cannot be read, and nothing may be merged. The caller holds no lock of the agent.
pub(super) fn wait() -> bool {
    let result = wait_for_all();
    if let Err(error) = &result {
        denied::tell(Need::Threads, error);
        log::line(format_args!("nothing is merged: the threads of this process cannot be looked at: {error}"));
    }
    result.is_ok()
}

fn wait_for_all() -> io::Result<()> {
    let own = rustix::thread::gettid().as_raw_nonzero().to_string();
    let mut threads = Vec::new();
    for entry in fs::read_dir("/proc/self/task")? {
        let id = entry?.file_name().to_string_lossy().into_owned();
        if id != own
            && let Some(before) = time(&id)?
        {
            threads.push(Thread { id, before, grown: None });
        }
    }
    let mut pause = PAUSE;
    loop {
        let mut failed = None;
        threads.retain_mut(|thread| thread.is_between().unwrap_or_else(|error| failed.replace(error).is_some()));
        match failed {
            Some(error) => return Err(error),
            None if threads.is_empty() => return Ok(()),
            None => sleep(pause),
        }
        pause = (pause * 2).min(LONGEST_PAUSE);
    }
}

impl Thread {
    /// Whether it may still be between its choice and its call.
    fn is_between(&mut self) -> io::Result<bool> {
        if now(&self.id)? != Now::InProgram {
            return Ok(false);
        }
        let Some(time) = time(&self.id)? else { return Ok(false) };
        if self.grown.is_none() && time > self.before {
            self.grown = Some(time);
        }
        Ok(self.grown.is_none_or(|grown| time < grown + ENOUGH))
    }
}

fn now(id: &str) -> io::Result<Now> {
    Ok(read(id, "syscall")?.map_or(Now::Gone, |text| what(&text)))
}

/// What the kernel's words mean: `running`, the number of a system call with its arguments, or -1
/// where the thread sleeps outside of one.
fn what(text: &str) -> Now {
    let number = text.split(' ').next().and_then(|number| number.parse::<i64>().ok());
    if number.is_some_and(|number| number >= 0) { Now::InCall } else { Now::InProgram }
}

/// Nanoseconds that a thread has spent on a CPU. `None`: it has ended.
fn time(id: &str) -> io::Result<Option<u64>> {
    let Some(text) = read(id, "schedstat")? else { return Ok(None) };
    let number = text.split(' ').next().and_then(|number| number.parse().ok());
    number.map(Some).ok_or_else(|| io::ErrorKind::InvalidData.into())
}

/// A file of a thread. `None`: it has ended.
fn read(id: &str, name: &str) -> io::Result<Option<String>> {
    match fs::read_to_string(format!("/proc/self/task/{id}/{name}")) {
        Ok(text) => Ok(Some(text)),
        Err(error) => match Errno::from_io_error(&error) {
            Some(Errno::NOENT | Errno::SRCH) => Ok(None),
            _ => Err(error),
        },
    }
}

#[cfg(test)]
mod tests;
