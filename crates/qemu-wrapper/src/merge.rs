//! Whether this guest can be merged, and what QEMU's environment needs for it.

use std::ffi::{OsStr, OsString};
use std::fs::File;
use std::io;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{FileExt, FileTypeExt, MetadataExt};
use std::path::{Path, PathBuf};

use crate::{arguments, process, variable};

/// Where packages put the agent's library.
const AGENT: &str = "/usr/lib/pageone/libpageone_agent.so";
const ENV_AGENT: &str = "PAGEONE_AGENT";
/// The socket of the system's daemon.
const SOCKET: &str = "/run/pageone/agent.sock";
const ENV_SOCKET: &str = "PAGEONE_SOCKET";
/// What the dynamic linker loads first (ld.so(8)).
const ENV_PRELOAD: &str = "LD_PRELOAD";

/// Why a guest is not merged.
pub(crate) enum Why {
    OptedOut,
    Agent(PathBuf, io::Error),
    /// QEMU cannot load libraries.
    Static(PathBuf),
    Socket(PathBuf, io::Error),
    /// Something else is in the socket's place.
    Stranger(PathBuf),
}

impl std::fmt::Display for Why {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::OptedOut => write!(f, "mem-merge=off is on its command line (<nosharepages/> in libvirt)"),
            Self::Agent(path, error) => write!(
                f,
                "{} cannot be read: {error}; install the package libpageone-agent, or set {ENV_AGENT}",
                path.display()
            ),
            Self::Static(qemu) => {
                write!(f, "{} is linked statically, and no library can be loaded into it", qemu.display())
            }
            Self::Socket(path, error) if error.kind() == io::ErrorKind::PermissionDenied => write!(
                f,
                "the daemon's socket {} is denied by a directory's mode or a security profile; under SELinux the policy \
                 module in /usr/share/pageone/selinux permits it",
                path.display()
            ),
            Self::Socket(path, error) => {
                write!(f, "the daemon's socket {}: {error}; run 'systemctl start pageone'", path.display())
            }
            Self::Stranger(path) => {
                write!(f, "{} is not a socket that root or this user has made", path.display())
            }
        }
    }
}

/// The variables to set. The error is the reason why there are none; `None`: no guest is to run,
/// and nobody need know.
pub(crate) fn environment(qemu: &Path, command: &[&[u8]]) -> Result<[(&'static str, OsString); 2], Option<Why>> {
    if !arguments::runs_guest(command) {
        return Err(None);
    }
    if arguments::opts_out(command) {
        return Err(Some(Why::OptedOut));
    }
    let path = |name, usual: &str| variable(name).map_or_else(|| usual.into(), PathBuf::from);
    let (agent, socket) = (path(ENV_AGENT, AGENT), path(ENV_SOCKET, SOCKET));
    if let Err(error) = File::open(&agent) {
        return Err(Some(Why::Agent(agent, error)));
    }
    if is_static(qemu) {
        return Err(Some(Why::Static(qemu.into())));
    }
    // Nobody connects here. Where no daemon listens now the agent tries again and again.
    match std::fs::metadata(&socket) {
        Err(error) => return Err(Some(Why::Socket(socket, error))),
        Ok(meta) if !meta.file_type().is_socket() || ![0, process::user()].contains(&meta.uid()) => {
            return Err(Some(Why::Stranger(socket)));
        }
        Ok(_) => {}
    }
    Ok([(ENV_PRELOAD, preload(agent.as_os_str())), (ENV_SOCKET, socket.into())])
}

/// The agent before what is loaded already. It is named once.
fn preload(agent: &OsStr) -> OsString {
    let mut list = agent.to_owned();
    if let Some(before) = variable(ENV_PRELOAD) {
        let mut names = before.as_bytes().split(|byte| b": ".contains(byte));
        if names.any(|name| name == agent.as_bytes()) {
            return before;
        }
        list.push(":");
        list.push(before);
    }
    list
}

/// Whether a program is an ELF file that asks for no dynamic linker (elf(5)). What cannot be read,
/// and what is a script, counts as dynamic.
fn is_static(program: &Path) -> bool {
    /// Bytes in the header of a 64-bit file, and in each entry of its program header table.
    const HEADER: usize = 64;
    const ENTRY: usize = 56;
    /// The type of the entry that names the dynamic linker.
    const PT_INTERP: u32 = 3;
    let Ok(file) = File::open(program) else { return false };
    let mut header = [0; HEADER];
    // ELFCLASS64, ELFDATA2LSB.
    if file.read_exact_at(&mut header, 0).is_err() || !header.starts_with(b"\x7fELF\x02\x01") {
        return false;
    }
    let number =
        |from: usize, len| header[from..from + len].iter().rev().fold(0, |sum, &byte| sum << 8 | u64::from(byte));
    let (table, entries) = (number(32, 8), number(56, 2));
    let kind = |entry| -> io::Result<u32> {
        let mut kind = [0; 4];
        file.read_exact_at(&mut kind, table.saturating_add(entry * ENTRY as u64))?;
        Ok(u32::from_le_bytes(kind))
    };
    let kinds: io::Result<Vec<u32>> = (0..entries).map(kind).collect();
    kinds.is_ok_and(|kinds| !kinds.contains(&PT_INTERP))
}
