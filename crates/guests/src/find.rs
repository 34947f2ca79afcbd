//! The process that a word of a command line means.

use std::path::Path;

use kmem::pidfd::PidFd;

use crate::{Guest, name, processes};

/// Why a word means no process.
#[derive(Debug, thiserror::Error)]
pub enum FindError {
    /// No process has this name.
    #[error("no process is called {0}")]
    None(String),
    /// Several have it.
    #[error("several processes are called {word}: {}; say which", list(.found))]
    Several {
        /// The name.
        word: String,
        /// Number and program of each.
        found: Vec<(i32, String)>,
    },
    /// It has ended meanwhile.
    #[error("process {pid}, called {word}, has ended")]
    Ended {
        /// The process that it was.
        pid: i32,
        /// The name.
        word: String,
    },
    /// The processes are unknown.
    #[error("cannot list processes")]
    List(#[source] std::io::Error),
}

fn list(found: &[(i32, String)]) -> String {
    found.iter().map(|(pid, program)| format!("{pid} ({program})")).collect::<Vec<_>>().join(", ")
}

/// A process that was found.
#[derive(Debug)]
pub struct Found {
    word: String,
    pid: i32,
    /// `None`: it was named by its number.
    process: Option<PidFd>,
}

impl Found {
    /// Its number, which no other process has had since it was found by its name.
    ///
    /// # Errors
    ///
    /// [`FindError::Ended`].
    pub fn pid(&self) -> Result<i32, FindError> {
        match &self.process {
            Some(process) if process.has_exited() => Err(FindError::Ended { pid: self.pid, word: self.word.clone() }),
            _ => Ok(self.pid),
        }
    }
}

/// The process that a word means: its number; or the name or UUID of a guest, or the name of a
/// program, which no other process has. A number is always a process's, also where a guest has such
/// a name.
///
/// # Errors
///
/// [`FindError`].
pub fn find(root: &Path, word: &str) -> Result<Found, FindError> {
    let word = word.to_owned();
    if let Some(pid) = word.parse().ok().filter(|&pid| pid > 0) {
        return Ok(Found { word, pid, process: None });
    }
    let own = std::process::id() as i32;
    let pids = processes(root).map_err(FindError::List)?.into_iter().filter(|&pid| pid != own);
    let called = |pid| Guest::of(root, pid).ok().flatten().filter(|one| one.is_called(&word));
    let mut found: Vec<Guest> = pids.filter_map(called).collect();
    if found.len() > 1 {
        let found = found.iter().map(|one| (one.pid, name(&one.program).to_owned())).collect();
        return Err(FindError::Several { word, found });
    }
    let Some(Guest { pid, .. }) = found.pop() else { return Err(FindError::None(word)) };
    let ended = || FindError::Ended { pid, word: word.clone() };
    let process = PidFd::open(pid).map_err(|_| ended())?;
    // Another may have got its number before it was held.
    called(pid).ok_or_else(ended)?;
    Ok(Found { word: word.clone(), pid, process: Some(process) })
}

impl Guest {
    fn is_called(&self, word: &str) -> bool {
        let is_uuid = self.uuid.as_ref().is_some_and(|uuid| uuid.eq_ignore_ascii_case(word));
        let program = self.program.rsplit('/').next();
        is_uuid || self.name.as_deref() == Some(word) || program == Some(word) || name(&self.program) == word
    }
}
