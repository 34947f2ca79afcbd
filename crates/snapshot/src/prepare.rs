//! A guest that can be stored with its devices: the words and the environment that it is started
//! with.
//!
//! QEMU leaves RAM out of its device stream (capability `x-ignore-shared`) if other processes may
//! map it. Such RAM cannot be merged. So QEMU is told to map a file for its RAM, shared; the file
//! is a memfd that stays empty. The agent, which sees QEMU's mmap(2), maps private anonymous memory
//! in its place. QEMU learns nothing of it. What would map the file in another process or in a
//! device finds zeros there, so a guest with such a thing is not prepared.

use std::os::fd::{AsRawFd, OwnedFd};
use std::path::{Path, PathBuf};

use rustix::fs::MemfdFlags;
use rustix::io::FdFlags;

use wire::recycle::{QEMU_DEVICE, QEMU_GUARD, QEMU_POOL, QEMU_QMP};

use guests::is_qemu;
use guests::words::{self, DEFAULT_MEMORY, options, parse_size, written};

/// QEMU's name for the RAM.
pub(crate) const RAM: &str = "pageone-ram";
/// QEMU's name for the monitor.
pub(crate) const MONITOR: &str = "pageone-snapshot";
/// QEMU's name for the monitor by which a clone is started.
pub(crate) const START: &str = "pageone-clone";
/// QEMU's name for the monitor of a clone whose RAM is the snapshot's.
pub(crate) const CLONE: &str = "pageone-monitor";
/// All of these.
const MONITORS: [&str; 4] = [MONITOR, START, CLONE, QEMU_QMP];
/// Bytes of the longest name of a socket, see unix(7).
const LONGEST: usize = 107;

/// Why a guest is not prepared.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs, reason = "each sentence says what it is")]
pub enum PrepareError {
    #[error(
        "{0} is not QEMU for x86-64 guests (a script that starts QEMU cannot be given arguments); name QEMU \
             itself: `pageone run --snapshots -- qemu-system-x86_64 …`"
    )]
    NotQemu(String),
    #[error("{word}: {why}")]
    Word { word: String, why: &'static str },
    #[error("-m {0} is not understood: say it in MiB, or as 2G")]
    Memory(String),
    #[error("the name of the monitor's socket {} is too long: use a shorter --dir", .0.display())]
    Socket(PathBuf),
    #[error("cannot make what the guest needs")]
    Make(#[from] std::io::Error),
}

/// What a guest is started with. The descriptor must live until the program is started.
#[derive(Debug)]
pub struct Prepared {
    /// Words before the user's own.
    pub words: Vec<String>,
    /// A variable of the environment, and its value.
    pub variable: (&'static str, String),
    _ram: OwnedFd,
}

/// Why a command line cannot be prepared: the word, and the reason.
fn obstacle(all: &[String]) -> Option<(String, &'static str)> {
    const FILE: &str = "another process or a device would map the guest's RAM, and find it empty";
    const OWN: &str = "the guest's RAM must be described by -m alone";
    for option in options(all) {
        let (name, value, first) = (option.name, option.value, &*option.first());
        let why = match name {
            "readconfig" => "options in a file are not seen",
            "mem-path" | "mem-prealloc" => OWN,
            "object" if first.starts_with("memory-backend-") => OWN,
            "machine" | "M" if option.part("memory-backend").is_some() => OWN,
            "machine" | "M" if option.part("mem-merge").as_deref() == Some("off") => {
                "memory that is not merged is not tracked"
            }
            "numa" if option.part("memdev").is_some() => OWN,
            "m" if option.part("maxmem").is_some() => "memory that is plugged in later is not stored",
            "device" if first.starts_with("vhost-user") || first.starts_with("ivshmem") => FILE,
            "device" if first.starts_with("vfio") || first.starts_with("vhost-vdpa") => FILE,
            "netdev" | "net" if first.starts_with("vhost-user") || first.starts_with("vhost-vdpa") => FILE,
            "incoming" => "a guest that migrates here brings the RAM that its source has",
            _ => continue,
        };
        return Some((format!("-{name} {value}"), why));
    }
    None
}

/// Sees that a guest's RAM is described by `-m`, and that nothing but QEMU maps it.
///
/// # Errors
/// [`PrepareError::Word`].
pub(crate) fn look_for_obstacles(all: &[String]) -> Result<(), PrepareError> {
    obstacle(all).map_or(Ok(()), |(word, why)| Err(PrepareError::Word { word, why }))
}

/// Bytes of the guest's RAM, by QEMU's words without its program.
///
/// # Errors
///
/// [`PrepareError::Memory`].
pub fn memory(all: &[String]) -> Result<u64, PrepareError> {
    let Some(last) = options(all).filter(|option| option.name == "m").last() else { return Ok(DEFAULT_MEMORY) };
    let size = last.part("size").or_else(|| Some(last.first()).filter(|first| !first.contains('=')));
    // QEMU rounds up to 8 KiB.
    let bytes =
        size.and_then(|size| parse_size(&size)).filter(|bytes| *bytes > 0).map(|bytes| bytes.next_multiple_of(8192));
    bytes.ok_or_else(|| PrepareError::Memory(last.value.into()))
}

/// Whether this machine can have a device that tells guests that they were cloned (`vmgenid`).
fn takes_vmgenid(all: &[String]) -> bool {
    let machine = options(all).filter(|option| matches!(option.name, "machine" | "M")).last();
    let kind = machine.map(|option| option.part("type").unwrap_or_else(|| option.first()));
    let fits = kind.is_none_or(|kind| kind.contains('=') || kind.starts_with("pc") || kind.starts_with("q35"));
    fits && !options(all).any(|option| option.name == "device" && option.first() == "vmgenid")
}

/// Prepares a guest: `program` with these words. Its monitor is to listen on `socket`.
///
/// # Errors
/// If the guest cannot be prepared; the message says why.
pub fn prepare(program: &Path, all: &[String], socket: &Path) -> Result<Prepared, PrepareError> {
    if !is_qemu(program.as_os_str()) {
        return Err(PrepareError::NotQemu(program.display().to_string()));
    }
    look_for_obstacles(all)?;
    let bytes = memory(all)?;
    if !is_socket_name(socket) {
        return Err(PrepareError::Socket(socket.into()));
    }
    let Ram { fd, identity } = Ram::empty(bytes)?;
    rustix::io::fcntl_setfd(&fd, FdFlags::empty()).map_err(std::io::Error::from)?;
    let mut words = ram_words(bytes, fd.as_raw_fd(), "on");
    words.extend(monitor_words(MONITOR, socket));
    if takes_vmgenid(all) {
        words.extend(["-device".into(), "vmgenid,guid=auto".into()]);
    }
    Ok(Prepared { words, variable: (wire::ENV_SNAPSHOT_RAM, identity), _ram: fd })
}

/// The empty file in whose place the agent maps private memory.
pub(crate) struct Ram {
    /// The file; it is closed on exec.
    pub(crate) fd: OwnedFd,
    /// The value of [`wire::ENV_SNAPSHOT_RAM`].
    pub(crate) identity: String,
}

impl Ram {
    /// Makes it.
    ///
    /// # Errors
    /// Those of memfd_create(2).
    pub(crate) fn empty(bytes: u64) -> std::io::Result<Self> {
        let fd = rustix::fs::memfd_create("pageone-ram", MemfdFlags::CLOEXEC)?;
        rustix::fs::ftruncate(&fd, bytes)?;
        let stat = rustix::fs::fstat(&fd)?;
        Ok(Self { fd, identity: format!("{}:{}", stat.st_dev, stat.st_ino) })
    }
}

/// Whether QEMU's words can name a socket so.
pub(crate) fn is_socket_name(path: &Path) -> bool {
    path.to_string_lossy().len() <= LONGEST
}

/// The words for a monitor of this name that listens on this socket.
pub(crate) fn monitor_words(name: &str, socket: &Path) -> [String; 4] {
    [
        "-chardev".into(),
        format!("socket,id={name},path={},server=on,wait=off", written(&socket.to_string_lossy())),
        "-mon".into(),
        format!("chardev={name},mode=control"),
    ]
}

/// The words for RAM that QEMU maps from this descriptor, aligned for huge pages. `share`: QEMU's
/// word, `on` or `off`.
pub(crate) fn ram_words(bytes: u64, fd: i32, share: &str) -> Vec<String> {
    vec![
        "-object".into(),
        format!("memory-backend-file,id={RAM},size={bytes},mem-path=/proc/self/fd/{fd},share={share},align=2M"),
        "-machine".into(),
        format!("memory-backend={RAM}"),
    ]
}

/// The socket of a prepared guest's monitor, by its command line.
pub(crate) fn socket(all: &[String]) -> Option<PathBuf> {
    let monitor =
        options(all).find(|option| option.name == "chardev" && option.part("id").as_deref() == Some(MONITOR))?;
    Some(monitor.part("path")?.into_owned().into())
}

/// The socket of a QMP monitor that other words name: the user's own, or those of a clone. QEMU
/// runs in `directory`.
pub(crate) fn own_monitor(all: &[String], directory: &Path) -> Option<PathBuf> {
    let socket = |id: &str| {
        let found = options(all).find(|option| option.name == "chardev" && option.part("id").as_deref() == Some(id))?;
        (found.first() == "socket").then(|| Some(found.part("path")?.into_owned()))?
    };
    let path = options(all).find_map(|option| match option.name {
        "qmp" | "qmp-pretty" => Some(option.first().strip_prefix("unix:")?.to_owned()),
        "mon" if option.part("mode").as_deref() == Some("control") => {
            socket(&option.part("chardev").unwrap_or_else(|| option.first()))
        }
        _ => None,
    });
    Some(directory.join(path?))
}

/// Whether its free pages are taken back by an agent (`pageone run --ppr`).
pub(crate) fn is_recycled(all: &[String]) -> bool {
    options(all).any(|option| option.name == "chardev" && option.part("id").as_deref() == Some(QEMU_QMP))
}

/// The user's own words: without those for RAM, monitor and recycling, and without those that made
/// the guest a clone. The port for the device of free pages stays: clones need it.
pub(crate) fn without_ours(all: &[String]) -> Vec<String> {
    let is_clone = options(all).any(|option| option.name == "chardev" && option.part("id").as_deref() == Some(START));
    let is_recycled = is_recycled(all);
    let is_ours = |option: &words::Opt<'_>| match option.name {
        "object" => option.part("id").is_some_and(|id| id == RAM || id.starts_with(QEMU_POOL)),
        "device" => option.part("id").as_deref() == Some(QEMU_DEVICE),
        "blockdev" => option.part("node-name").as_deref() == Some(QEMU_GUARD),
        // `run --ppr` adds it.
        "action" => is_recycled && option.value == "reboot=shutdown",
        "machine" => option.part("memory-backend").as_deref() == Some(RAM),
        "chardev" => option.part("id").is_some_and(|id| MONITORS.contains(&&*id)),
        "mon" => option.part("chardev").is_some_and(|id| MONITORS.contains(&&*id)),
        "incoming" => is_clone && option.value == "defer",
        _ => false,
    };
    let ours: Vec<usize> = options(all).filter(is_ours).flat_map(|option| [option.at, option.at + 1]).collect();
    all.iter().enumerate().filter(|(at, _)| !ours.contains(at)).map(|(_, word)| word.clone()).collect()
}

#[cfg(test)]
mod tests;
