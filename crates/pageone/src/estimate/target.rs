//! Targets: what the words of the command line mean.

use std::collections::HashSet;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use super::files::{self, Identity, OpenFile};
use super::process;

/// Something to look at.
pub(super) struct Target {
    /// As the report names it.
    pub(super) name: String,
    pub(super) what: What,
}

/// What it is. Opened only when its turn comes, except for a file.
pub(super) enum What {
    /// A process; `guest`: only its guest RAM.
    Process {
        pid: i32,
        guest: bool,
    },
    File(OpenFile),
    Directory(PathBuf),
}

impl What {
    /// The word for it in the report.
    pub(super) fn kind(&self) -> &'static str {
        match self {
            What::Process { guest: true, .. } => "guest",
            What::Process { .. } => "process",
            What::File(_) => "file",
            What::Directory(_) => "directory",
        }
    }
}

/// Something that was not looked at, or not wholly, and why.
#[derive(Clone, Debug, serde::Serialize)]
pub(super) struct LeftOut {
    pub(super) target: String,
    pub(super) reason: String,
}

/// Targets in the order in which they were named, each once.
#[derive(Default)]
pub(super) struct Targets {
    pub(super) targets: Vec<Target>,
    pub(super) left_out: Vec<LeftOut>,
    /// What a person should know and what is no failure.
    pub(super) notes: Vec<String>,
    /// Files and directories that are targets.
    pub(super) own: HashSet<Identity>,
    pids: HashSet<i32>,
}

impl Targets {
    /// Understands the words of the command line.
    pub(super) fn resolve(words: &[String], qemu: bool) -> Self {
        let mut all = Targets::default();
        for word in words {
            match word.parse::<i32>() {
                Ok(pid) if pid > 0 => all.add_process(word, pid, false),
                _ => all.add_path(word),
            }
        }
        if qemu {
            match process::guests() {
                Ok(pids) if pids.is_empty() => {
                    all.leave_out("--qemu", "no process named qemu-system-* runs here".into())
                }
                Ok(pids) => pids.into_iter().for_each(|pid| all.add_process(&pid.to_string(), pid, true)),
                Err(error) => all.leave_out("--qemu", format!("cannot list processes: {error}")),
            }
        }
        all
    }

    fn add_process(&mut self, name: &str, pid: i32, guest: bool) {
        if !self.pids.insert(pid) {
            return self.note_twice(name);
        }
        self.targets.push(Target { name: name.into(), what: What::Process { pid, guest } });
    }

    fn add_path(&mut self, word: &str) {
        let path = Path::new(word);
        let directory = path.metadata().ok().filter(|meta| meta.is_dir());
        let (identity, what) = match directory {
            Some(meta) => ((meta.dev(), meta.ino()), What::Directory(path.to_owned())),
            None => match files::open(path, true) {
                Ok(file) => (file.identity, What::File(file)),
                Err(reason) => return self.leave_out(word, reason),
            },
        };
        if !self.own.insert(identity) {
            return self.note_twice(word);
        }
        self.targets.push(Target { name: word.into(), what });
    }

    fn note_twice(&mut self, name: &str) {
        self.notes.push(format!("{name} was named twice; it is counted once"));
    }

    pub(super) fn leave_out(&mut self, target: &str, reason: String) {
        self.left_out.push(LeftOut { target: target.into(), reason });
    }
}
