//! `/proc/PID/stat`: state, times and places of a process or thread (proc_pid_stat(5)).

use std::io;

use super::{invalid, path, read_to_string};

/// What it says of a process or thread.
#[derive(Debug)]
pub struct Stat(String);

impl Stat {
    /// Reads that of a process.
    pub fn of(pid: Option<i32>) -> io::Result<Self> {
        Ok(Self(read_to_string(path(pid, "stat"))?))
    }

    /// Reads that of one of its threads.
    pub fn of_thread(pid: Option<i32>, tid: i32) -> io::Result<Self> {
        Ok(Self(read_to_string(path(pid, &format!("task/{tid}/stat")))?))
    }

    /// Takes what was read elsewhere.
    pub fn from_text(text: String) -> Self {
        Self(text)
    }

    /// The fields from the third on. The second, the name, may hold any characters, and parentheses
    /// stand around it.
    fn fields(&self) -> impl Iterator<Item = &str> {
        self.0.rsplit_once(')').map_or("", |(_, rest)| rest).split_ascii_whitespace()
    }

    /// The letter of its state.
    pub fn state(&self) -> Option<char> {
        self.fields().next()?.chars().next()
    }

    /// A number, by the manual page's number of its field.
    ///
    /// # Errors
    ///
    /// `InvalidData`: there is none.
    pub fn field(&self, number: usize) -> io::Result<u64> {
        let field = number.checked_sub(3).and_then(|at| self.fields().nth(at)?.parse().ok());
        field.ok_or_else(|| invalid(format_args!("field {number} of a process's stat")))
    }
}
