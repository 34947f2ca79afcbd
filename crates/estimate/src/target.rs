//! Targets: what the words of the command line mean.

use std::collections::HashSet;
use std::fmt;
use std::io;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use guests::{FindError, Found, Guest};
use serde::{Serialize, Serializer};

use crate::Options;
use crate::files::{self, FileError, Identity, Links, OpenFile};
use crate::process::{Part, ProcessError};

/// Something to scan.
pub(crate) struct Target {
    /// Its name in the report.
    pub(crate) name: String,
    pub(crate) kind: Kind,
}

/// The kind of a target. Only files are opened before their scan.
pub(crate) enum Kind {
    Process {
        pid: i32,
        part: Part,
        /// What the guest in it calls itself.
        guest: Option<String>,
        /// The process that had this name.
        found: Option<Found>,
    },
    File(OpenFile),
    Directory(PathBuf),
}

impl Kind {
    /// The word for it in the report.
    pub(crate) fn word(&self) -> &'static str {
        match self {
            Self::Process { part: Part::Guest, .. } => "guest",
            Self::Process { .. } => "process",
            Self::File(_) => "file",
            Self::Directory(_) => "directory",
        }
    }
}

/// Something that was not scanned, or not completely.
#[derive(Debug, Serialize)]
pub struct LeftOut {
    /// The target, or a file of it.
    pub target: String,
    /// Why it was left out.
    #[serde(serialize_with = "as_text")]
    pub reason: Reason,
}

/// Why something was left out.
#[derive(Debug, thiserror::Error)]
pub enum Reason {
    /// A file or directory cannot be read.
    #[error(transparent)]
    File(#[from] FileError),
    /// Its name is not that of one process.
    #[error(transparent)]
    Name(#[from] FindError),
    /// A process cannot be read.
    #[error(transparent)]
    Process(#[from] ProcessError),
    /// No guest runs.
    #[error("no guest of QEMU runs here; start one first, or name processes by their numbers")]
    NoGuest,
    /// The guests are unknown.
    #[error("cannot list processes: {0}")]
    Guests(io::Error),
    /// Further files of the target cannot be read.
    #[error("{0} more could not be read")]
    More(u64),
}

/// What the user should know of a complete report.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Note {
    /// The target was named twice.
    NamedTwice(String),
    /// KSM has merged pages of a process.
    MergedByKsm {
        /// The process.
        pid: i32,
        /// Number of its merged pages.
        pages: u64,
    },
    /// PageONE could not map everything that is shared.
    Mappings {
        /// Number of targets.
        targets: usize,
    },
}

impl fmt::Display for Note {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::NamedTwice(name) => write!(f, "{name} was named twice; it is counted once"),
            Self::MergedByKsm { pid, pages } => {
                write!(f, "KSM has merged {pages} pages of process {pid} already; they count as shared")
            }
            Self::Mappings { targets } => write!(
                f,
                "{targets} of the targets would need more mappings than vm.max_map_count lets PageONE use; \
                 the longest runs would be merged, or more after `sysctl vm.max_map_count={}`",
                kmem::procfs::ADVISED_MAP_COUNT
            ),
        }
    }
}

impl Serialize for Note {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        as_text(self, serializer)
    }
}

fn as_text<S: Serializer>(value: &impl fmt::Display, serializer: S) -> Result<S::Ok, S::Error> {
    serializer.collect_str(value)
}

/// Targets in the order in which they were named, each once.
#[derive(Default)]
pub(crate) struct Targets {
    pub(crate) targets: Vec<Target>,
    pub(crate) left_out: Vec<LeftOut>,
    pub(crate) notes: Vec<Note>,
    /// Files and directories that are targets.
    pub(crate) own: HashSet<Identity>,
    pids: HashSet<i32>,
}

impl Targets {
    /// Interprets the words of the command line, and finds all guests of QEMU if they are wanted.
    pub(crate) fn resolve(options: &Options) -> Self {
        let mut all = Self::default();
        for word in &options.targets {
            match word.parse::<i32>() {
                Ok(pid) if pid > 0 => {
                    let guest = Guest::of(Path::new("/"), pid).ok().flatten().and_then(|guest| guest.name);
                    all.add_process(word.clone(), Kind::Process { pid, part: Part::All, guest, found: None });
                }
                _ => all.add_word(word),
            }
        }
        if options.qemu {
            match guests::of_qemu() {
                Ok(guests) if guests.is_empty() => all.leave_out("--qemu", Reason::NoGuest),
                Ok(guests) => guests.into_iter().for_each(|Guest { pid, name: guest, .. }| {
                    all.add_process(pid.to_string(), Kind::Process { pid, part: Part::Guest, guest, found: None });
                }),
                Err(error) => all.leave_out("--qemu", Reason::Guests(error)),
            }
        }
        all
    }

    fn add_process(&mut self, name: String, kind: Kind) {
        match kind {
            Kind::Process { pid, .. } if !self.pids.insert(pid) => self.notes.push(Note::NamedTwice(name)),
            _ => self.targets.push(Target { name, kind }),
        }
    }

    /// Adds a file or directory; where there is none, the guest of this name.
    fn add_word(&mut self, word: &str) {
        let path = Path::new(word);
        let directory = path.metadata().ok().filter(|meta| meta.is_dir());
        let (identity, kind) = match directory {
            Some(meta) => ((meta.dev(), meta.ino()), Kind::Directory(path.to_owned())),
            None => match files::open(path, Links::Follow) {
                Ok(file) => (file.identity, Kind::File(file)),
                Err(FileError::NotFound) if !word.contains('/') => return self.add_guest(word),
                Err(error) => return self.leave_out(word, error.into()),
            },
        };
        if !self.own.insert(identity) {
            return self.notes.push(Note::NamedTwice(word.into()));
        }
        self.targets.push(Target { name: word.into(), kind });
    }

    fn add_guest(&mut self, word: &str) {
        let found = guests::find(Path::new("/"), word).and_then(|found| Ok((found.pid()?, found)));
        match found {
            Ok((pid, found)) => {
                let guest =
                    Guest::of(Path::new("/"), pid).ok().flatten().filter(|guest| guest.kind == guests::Kind::Qemu);
                let part = if guest.is_some() { Part::Guest } else { Part::All };
                let guest = guest.and_then(|guest| guest.name);
                self.add_process(word.into(), Kind::Process { pid, part, guest, found: Some(found) });
            }
            Err(FindError::None(_)) => self.leave_out(word, FileError::NotFound.into()),
            Err(error) => self.leave_out(word, error.into()),
        }
    }

    fn leave_out(&mut self, target: &str, reason: Reason) {
        self.left_out.push(LeftOut { target: target.into(), reason });
    }
}
