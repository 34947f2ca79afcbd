//! What `/proc` says of the process: whether it can be attached, and where its libraries are.

use std::fs::{self, File};
use std::io::{self, Read, Seek, SeekFrom};
use std::path::{Path, PathBuf};

use kmem::Range;
use kmem::procfs;

use crate::{AttachError, Request};

/// How the agent's library is called.
const AGENT: &str = "libpageone_agent.so";
/// Program headers that are looked at.
const MAX_SEGMENTS: u16 = 256;
/// Numbers of elf(5).
const PT_INTERP: u32 = 3;
const THIS_MACHINE: u16 = if cfg!(target_arch = "aarch64") { 183 } else { 62 };

/// A process that can be attached, as far as `/proc` tells.
pub(crate) struct Target {
    /// Where its C library begins.
    pub(crate) libc: u64,
    /// The instructions of its C library.
    pub(crate) text: Range,
    /// The older C libraries have dlopen(3) in a library of its own.
    pub(crate) libdl: Option<u64>,
    /// Where an agent begins that it has already.
    pub(crate) agent: Option<u64>,
}

/// Looks at the process and its program, and refuses what can never be attached.
pub(crate) fn examine(pid: i32) -> Result<(), AttachError> {
    check_status(pid)?;
    check_program(pid)
}

/// Looks at what it has loaded. The loader has to have come to its end.
pub(crate) fn loaded(request: &Request<'_>) -> Result<Target, AttachError> {
    let pid = request.pid;
    let target = libraries(pid)?;
    if target.agent.is_none() {
        check_seen(pid, request.library, "the agent's library")?;
    }
    check_seen(pid, request.socket, "the daemon's socket")?;
    Ok(target)
}

/// An error of the kernel about a file of `/proc/PID`.
pub(crate) fn failed(pid: i32, what: &'static str, error: io::Error) -> AttachError {
    match error.raw_os_error() {
        Some(libc::ENOENT) if !Path::new(&format!("/proc/{pid}")).exists() => AttachError::NoProcess(pid),
        Some(libc::ESRCH) => AttachError::Ended(pid),
        Some(libc::EACCES | libc::EPERM) => AttachError::NoPermission { pid, remedy: remedy(pid) },
        _ => AttachError::Kernel { pid, what, error },
    }
}

/// What permits to trace a process.
fn remedy(pid: i32) -> String {
    let label = fs::read_to_string(format!("/proc/{pid}/attr/current")).unwrap_or_default();
    let label = label.trim_end_matches(['\n', '\0']);
    match procfs::ptrace_scope() {
        Some(3) => "kernel.yama.ptrace_scope is 3, which forbids it to all until the host starts again".into(),
        Some(1 | 2) if !is_root() => {
            "run as root, or with CAP_SYS_PTRACE; kernel.yama.ptrace_scope forbids it to others".into()
        }
        _ if !is_root() => "run as root, or as the process's owner".into(),
        _ if label.ends_with("(enforce)") => {
            format!("the profile {label} must have the rule 'ptrace (read, trace, readby, tracedby),', or this one's")
        }
        _ => "CAP_SYS_PTRACE is missing, or a security module forbids it".into(),
    }
}

fn is_root() -> bool {
    // The owner of the files of a process's own folder is its effective user.
    procfs::status(None).is_ok_and(|status| status.uid == 0)
}

fn check_status(pid: i32) -> Result<(), AttachError> {
    let text = fs::read_to_string(format!("/proc/{pid}/status")).map_err(|e| failed(pid, "its status", e))?;
    let field = |name: &str| text.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(':')).map(str::trim);
    let number = |name| field(name).and_then(|value| value.parse().ok()).unwrap_or(0);
    let (group, tracer) = (number("Tgid"), number("TracerPid"));
    if group != pid {
        return Err(AttachError::Thread { tid: pid, pid: group });
    }
    if tracer != 0 {
        let name = procfs::status(Some(tracer)).map(|status| status.name).unwrap_or_default();
        return Err(AttachError::Traced { pid, tracer, name });
    }
    match field("State").and_then(|state| state.chars().next()) {
        Some('T') => return Err(AttachError::Stopped(pid)),
        Some('Z' | 'X') => return Err(AttachError::NoProgram(pid)),
        _ => {}
    }
    let has_shadow_stack = field("x86_Thread_features").is_some_and(|features| features.contains("shstk"));
    if has_shadow_stack { Err(AttachError::ShadowStack(pid)) } else { Ok(()) }
}

/// Refuses programs that load no libraries, and those of other machines.
fn check_program(pid: i32) -> Result<(), AttachError> {
    let strange = |_| AttachError::Strange { pid, what: "its program is no ELF file" };
    let mut program = File::open(format!("/proc/{pid}/exe")).map_err(|error| match error.raw_os_error() {
        Some(libc::ENOENT | libc::ESRCH) => AttachError::NoProgram(pid),
        _ => failed(pid, "its program", error),
    })?;
    let mut header = [0; 64];
    program.read_exact(&mut header).map_err(strange)?;
    let half = |at: usize| u16::from_le_bytes([header[at], header[at + 1]]);
    if &header[..4] != b"\x7fELF" {
        return Err(AttachError::Strange { pid, what: "its program is no ELF file" });
    }
    if header[4..6] != [2, 1] || half(18) != THIS_MACHINE {
        return Err(AttachError::Architecture(pid));
    }
    let mut at = [0; 8];
    at.copy_from_slice(&header[32..40]);
    program.seek(SeekFrom::Start(u64::from_le_bytes(at))).map_err(strange)?;
    let mut segments = vec![0; usize::from(half(56).min(MAX_SEGMENTS)) * 56];
    program.read_exact(&mut segments).map_err(strange)?;
    let has_loader = segments.chunks_exact(56).any(|segment| segment[..4] == PT_INTERP.to_le_bytes());
    if has_loader { Ok(()) } else { Err(AttachError::Static(pid)) }
}

fn libraries(pid: i32) -> Result<Target, AttachError> {
    let (mut libc, mut text, mut libdl, mut agent, mut is_mapped) = (None, None, None, None, false);
    let maps = procfs::for_each_map(Some(pid), |line| {
        is_mapped = true;
        let path = line.path.strip_suffix(" (deleted)").unwrap_or(&line.path);
        let name = path.rsplit('/').next().unwrap_or_default();
        let start = line.range.start as u64;
        if is_library(name, "libc") {
            if line.offset == 0 {
                libc.get_or_insert(start);
            }
            if line.perms.exec {
                text.get_or_insert(line.range);
            }
        } else if is_library(name, "libdl") && line.offset == 0 {
            libdl.get_or_insert(start);
        } else if name == AGENT && line.offset == 0 {
            agent.get_or_insert(start);
        }
    });
    maps.map_err(|error| failed(pid, "its mappings", error))?;
    match (libc, text) {
        (Some(libc), Some(text)) => Ok(Target { libc, text, libdl, agent }),
        // It is ending.
        _ if !is_mapped => Err(AttachError::NoProgram(pid)),
        _ => Err(AttachError::OtherLibrary(pid)),
    }
}

/// Whether a file is this library of the GNU C library: `libc.so.6`, before 2.34 `libc-2.31.so`.
fn is_library(name: &str, library: &str) -> bool {
    let Some(rest) = name.strip_prefix(library) else { return false };
    matches!(rest, ".so.6" | ".so.2") || (rest.starts_with("-2.") && rest.ends_with(".so"))
}

/// Where the agent begins, once it is loaded.
pub(crate) fn agent(pid: i32) -> Result<Option<u64>, AttachError> {
    libraries(pid).map(|target| target.agent)
}

/// Whether the process sees a file under this name. What cannot be looked at is tried.
fn check_seen(pid: i32, path: &Path, what: &'static str) -> Result<(), AttachError> {
    let mut there = PathBuf::from(format!("/proc/{pid}/root"));
    there.extend(path.components().skip(1));
    match fs::symlink_metadata(&there) {
        Err(error) if matches!(error.kind(), io::ErrorKind::NotFound | io::ErrorKind::NotADirectory) => {
            Err(AttachError::NotSeen { pid, path: path.to_path_buf(), what })
        }
        _ => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn own() -> i32 {
        std::process::id() as i32
    }

    #[test]
    fn the_c_library_is_known_by_its_names() {
        assert!(
            is_library("libc.so.6", "libc") && is_library("libc-2.31.so", "libc") && is_library("libdl.so.2", "libdl")
        );
        for name in ["libcap.so.2", "libc.musl-x86_64.so.1", "libc++.so.1", "libcurl.so.4", "libc.so"] {
            assert!(!is_library(name, "libc"), "{name}");
        }
    }

    #[test]
    fn processes_that_cannot_be_attached_are_refused_with_the_reason() {
        let examine = |pid| {
            let request = Request {
                pid,
                library: Path::new("/no/such/library.so"),
                socket: Path::new("/"),
                timeout: std::time::Duration::ZERO,
                guard: &guard::Guard::thread(),
                stands: false,
            };
            examine(pid).and_then(|()| loaded(&request)).map(drop)
        };
        assert!(matches!(examine(0x3fff_ffff), Err(AttachError::NoProcess(0x3fff_ffff))));
        assert!(matches!(examine(own()), Err(AttachError::NotSeen { what: "the agent's library", .. })));
        let (tell, told) = std::sync::mpsc::channel();
        let (end, ended) = std::sync::mpsc::channel::<()>();
        let thread = std::thread::spawn(move || {
            let _ = tell.send(fs::read_link("/proc/thread-self").unwrap());
            let _ = ended.recv();
        });
        let tid: i32 = told.recv().unwrap().file_name().unwrap().to_str().unwrap().parse().unwrap();
        assert!(matches!(examine(tid), Err(AttachError::Thread { pid, .. }) if pid == own()));
        drop(end);
        thread.join().unwrap();
        let mut child = std::process::Command::new("sleep").arg("60").spawn().unwrap();
        let pid = child.id() as i32;
        // SAFETY: a signal to a child that was not waited for.
        #[allow(unsafe_code)]
        unsafe {
            libc::kill(pid, libc::SIGSTOP)
        };
        while !procfs::is_stopped(pid).unwrap() {
            std::thread::yield_now();
        }
        assert!(matches!(examine(pid), Err(AttachError::Stopped(_))));
        child.kill().unwrap();
        while !fs::read_to_string(format!("/proc/{pid}/stat")).unwrap().contains(") Z") {
            std::thread::yield_now();
        }
        assert!(matches!(examine(pid), Err(AttachError::NoProgram(_))));
        child.wait().unwrap();
    }
}
