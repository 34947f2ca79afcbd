//! Which processes are guests, and how they are called. Every list of guests comes from here.
//!
//! ```text
//!   /proc/PID/exe ──▶ kind by the program's name ──┐
//!   /proc/PID/fd  ──▶ a virtual machine of KVM ────┼─▶ Guest ──▶ find: the process that is meant
//!   /proc/PID/cmdline ──▶ name and UUID ───────────┘             by PID, name or UUID
//! ```
//!
//! Where the executable cannot be read, the first word of the command line stands for it. A process
//! may call itself anything, and two may have one name. So names are for people: to show a guest,
//! and to choose one. No right depends on them.

mod find;
pub mod words;

use std::borrow::Cow;
use std::ffi::OsStr;
use std::fs::File;
use std::io::{self, ErrorKind, Read};
use std::path::Path;

pub use find::{FindError, Found, find};

/// Most bytes of a command line that are read.
const MOST: u64 = 1 << 20;
/// Most characters of a name that somebody keeps.
const MOST_OF_NAME: usize = 128;
/// Bytes that no path has, see limits.h(0p).
const MOST_OF_PATH: usize = 4096;
/// Programs that run guests, besides QEMU.
const MONITORS: [&str; 3] = ["cloud-hypervisor", "firecracker", "crosvm"];

/// What runs a guest.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// QEMU.
    Qemu,
    /// Another virtual machine monitor.
    Monitor,
    /// Another program.
    Program,
}

impl Kind {
    /// What a program is, by its name or path.
    pub fn of(program: &str) -> Self {
        match name(program) {
            "kvm" => Self::Qemu,
            name if name.starts_with("qemu-system-") || name.starts_with("qemu-kvm") => Self::Qemu,
            name if MONITORS.contains(&name) => Self::Monitor,
            _ => Self::Program,
        }
    }
}

/// Whether a program is a QEMU for x86-64 guests, by its name or path.
pub fn is_qemu(program: &OsStr) -> bool {
    let program = program.to_string_lossy();
    let (name, is_system) = (name(&program), name(&program).starts_with("qemu-system-"));
    Kind::of(name) == Kind::Qemu && (!is_system || name.starts_with("qemu-system-x86_64"))
}

/// A program's name: the last part of its path. Nix calls a wrapped one `.NAME-wrapped`.
fn name(program: &str) -> &str {
    let path = program.strip_suffix(" (deleted)").unwrap_or(program);
    let name = path.rsplit('/').next().unwrap_or_default();
    let wrapped = name.strip_prefix('.').and_then(|name| name.trim_end_matches('_').strip_suffix("-wrapped"));
    wrapped.unwrap_or(name)
}

/// A guest.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Guest {
    /// Its process.
    pub pid: i32,
    /// What runs it.
    pub kind: Kind,
    /// The path of its program, or the first word of its command line.
    pub program: String,
    /// What it calls itself, by its command line.
    pub name: Option<String>,
    /// The UUID on its command line.
    pub uuid: Option<String>,
    /// By what it was recognised, in words. Empty: by nothing, so it is no guest.
    pub by: Vec<String>,
}

impl Guest {
    /// What a process is by its program, guest or not. `root` is the directory of the host's files.
    /// `None`: a QEMU that runs no guest, since it is only asked what it can do; or a wrapper that
    /// starts one.
    ///
    /// # Errors
    ///
    /// `NotFound`: the process has ended, or is the kernel's. `PermissionDenied`: nothing of it can
    /// be read.
    pub fn of(root: &Path, pid: i32) -> io::Result<Option<Self>> {
        let words = words(root, pid)?;
        let program = match std::fs::read_link(root.join(format!("proc/{pid}/exe"))) {
            Ok(path) => path.to_string_lossy().into_owned(),
            Err(e) if e.kind() == ErrorKind::PermissionDenied => {
                words.first().filter(|word| word.len() < MOST_OF_PATH).cloned().ok_or(e)?
            }
            Err(e) => return Err(e),
        };
        Ok(Self::by_program(pid, program, &words))
    }

    /// Looks at its open files, too: any program may have a virtual machine.
    ///
    /// # Errors
    ///
    /// `PermissionDenied`: it is another user's.
    pub fn look_at_files(&mut self, root: &Path) -> io::Result<()> {
        let files = std::fs::read_dir(root.join(format!("proc/{}/fd", self.pid)))?.flatten();
        let files: Vec<_> = files.filter_map(|file| file.path().read_link().ok()).collect();
        let has = |wanted: &str| files.iter().any(|file| file == Path::new(wanted));
        if has("anon_inode:kvm-vm") {
            self.by.push("it has a virtual machine of KVM".into());
            self.kind = if self.kind == Kind::Program { Kind::Monitor } else { self.kind };
        } else if has("/dev/kvm") {
            self.by.push("it has /dev/kvm open".into());
        }
        Ok(())
    }

    /// What a process is by its program and its words.
    fn by_program(pid: i32, program: String, words: &[String]) -> Option<Self> {
        let program = program.strip_suffix(" (deleted)").unwrap_or(&program).to_owned();
        let kind = Kind::of(&program);
        if kind == Kind::Qemu && (program.ends_with("-pageone") || words::is_probe(words)) {
            return None;
        }
        let by = if kind == Kind::Program { Vec::new() } else { vec![format!("its program is {program}")] };
        let (name, uuid) = match kind {
            Kind::Qemu => (words::name(words), words::uuid(words)),
            // Firecracker's.
            Kind::Monitor => (words::value(words, "id").map(Cow::Borrowed), None),
            Kind::Program => (None, None),
        };
        let (name, uuid) = (name.map(Cow::into_owned), uuid.map(str::to_owned));
        let said = |text: &String| !text.is_empty();
        Some(Self { pid, kind, program, name: name.filter(said), uuid: uuid.filter(said), by })
    }
}

/// How a guest calls itself: in no more characters than may be kept for each of many.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Names {
    /// Its name.
    pub name: Option<String>,
    /// Its UUID.
    pub uuid: Option<String>,
}

impl Names {
    /// Those of a process; none if it is no guest, or cannot be read.
    ///
    /// The process may keep a reader waiting, as with [`words`].
    pub fn of(root: &Path, pid: i32) -> Self {
        let short = |text: String| text.chars().take(MOST_OF_NAME).collect();
        let guest = Guest::of(root, pid).ok().flatten();
        guest.map_or_else(Self::default, |Guest { name, uuid, .. }| Self {
            name: name.map(short),
            uuid: uuid.map(short),
        })
    }
}

/// The words of a process's command line, its program's first, as far as 1 MiB reaches. What is no
/// text is replaced.
///
/// The process may keep a reader waiting: the words lie in its memory, where it says.
///
/// # Errors
///
/// `NotFound`: the process has ended.
pub fn words(root: &Path, pid: i32) -> io::Result<Vec<String>> {
    command_line(root, pid).map(|bytes| split(&bytes[..bytes.len().min(MOST as usize)]))
}

/// All [`words`] of a process's command line.
///
/// # Errors
///
/// `NotFound`: the process has ended. `InvalidData`: they are longer than 1 MiB.
pub fn all_words(root: &Path, pid: i32) -> io::Result<Vec<String>> {
    let bytes = command_line(root, pid)?;
    if bytes.len() as u64 > MOST {
        return Err(io::Error::new(ErrorKind::InvalidData, "its command line is longer than 1 MiB"));
    }
    Ok(split(&bytes))
}

fn command_line(root: &Path, pid: i32) -> io::Result<Vec<u8>> {
    let mut bytes = Vec::new();
    File::open(root.join(format!("proc/{pid}/cmdline")))?.take(MOST + 1).read_to_end(&mut bytes)?;
    Ok(bytes)
}

fn split(bytes: &[u8]) -> Vec<String> {
    String::from_utf8_lossy(bytes).split_terminator('\0').map(str::to_owned).collect()
}

/// The numbers of all processes, ascending.
///
/// # Errors
///
/// Those of reading `/proc`.
pub fn processes(root: &Path) -> io::Result<Vec<i32>> {
    let entries = std::fs::read_dir(root.join("proc"))?.flatten();
    let mut pids: Vec<i32> = entries.filter_map(|entry| entry.file_name().to_str()?.parse().ok()).collect();
    pids.sort_unstable();
    Ok(pids)
}

/// All guests that QEMU runs, ascending; those of other users, too.
///
/// # Errors
///
/// Those of reading `/proc`.
pub fn of_qemu() -> io::Result<Vec<Guest>> {
    let root = Path::new("/");
    let guests = processes(root)?.into_iter().filter_map(|pid| Guest::of(root, pid).ok()?);
    Ok(guests.filter(|guest| guest.kind == Kind::Qemu).collect())
}

#[cfg(test)]
mod tests;
