//! Descriptors of a process, and whether a device may write to its memory through references that
//! no pin shows.
//!
//! ```text
//!   /proc/filesystems      none that counts ──▶ no
//!   /proc/PID/fdinfo/N     flags, mnt_id ──┐
//!   /proc/PID/mountinfo    mnt_id ─────────┴──▶ file system type ──▶ counts, or not
//! ```
//!
//! Direct I/O takes references to the pages that it reads into. Most of the kernel *pins* them
//! (`FOLL_PIN`), which `UFFDIO_MOVE` refuses. Some file systems take plain references (`FOLL_GET`),
//! which it does not see. No descriptor is opened or asked for its status: a file whose server is
//! silent would not answer.
//!
//! Sources: `proc_pid_fdinfo(5)`, `proc_pid_mountinfo(5)`,
//! `Documentation/core-api/pin_user_pages.rst`, and uses of `iov_iter_get_pages2()` and
//! `iov_iter_get_pages_alloc2()` in Linux 6.12.

use std::collections::BTreeMap;
use std::io::{self, BufRead};
use std::path::Path;
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use super::{fields, invalid, kernel_release, lines_of, number, read_to_string};

/// As `/proc/PID/fdinfo` shows it.
const O_DIRECT: u32 = libc::O_DIRECT as u32;
/// `O_PATH`: no I/O.
const O_PATH: u32 = libc::O_PATH as u32;
/// `O_ACCMODE` and `O_WRONLY`: a file that is only written to never writes to memory.
const ACCESS: u32 = 0o3;
const WRITE_ONLY: u32 = 0o1;

/// Most descriptors that are looked at: some 5 us each. A process with more counts as doing such
/// I/O.
const MOST_DESCRIPTORS: usize = 4096;

/// File systems whose reads with `O_DIRECT` take plain references. NFS and Ceph do in Linux 6.12.
/// The others are not part of Linux, and count as such. File systems on block devices pin.
const DIRECT: [&str; 7] = ["nfs", "nfs4", "ceph", "lustre", "gpfs", "beegfs", "wekafs"];
/// File systems that may read straight into the program's memory without `O_DIRECT` also, by an
/// option of the mount (`cache=none`): 9p with the virtio transport, CIFS.
const ALWAYS: [&str; 3] = ["9p", "cifs", "smb3"];
/// There while the kernel has vhost-scsi.
const VHOST_SCSI: &str = "/sys/class/misc/vhost-scsi";
/// How long it is not asked again what the kernel has: less than it takes to load a module, mount a
/// file system of it, and read from there.
const SAME: Duration = Duration::from_millis(20);
/// FUSE pins since this version of Linux. Before, it takes plain references, with `O_DIRECT` or
/// where its server says so for a file (`FOPEN_DIRECT_IO`).
const FUSE_PINS: (u32, u32) = (6, 13);

/// An open file of a process, as `/proc/PID/fdinfo` shows it.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Descriptor {
    /// Its number.
    pub number: u32,
    /// Access mode and flags, as `open(2)` has them.
    pub flags: u32,
    /// The mount that the file is on.
    pub mount: u64,
    /// Of an io_uring: files that are registered with it. Their descriptors may be closed.
    pub registered: u64,
}

impl Descriptor {
    /// Whether it was opened with `O_DIRECT`.
    pub fn is_direct(&self) -> bool {
        self.flags & O_DIRECT != 0
    }

    fn how(&self) -> Reads {
        if self.is_direct() { Reads::Direct } else { Reads::Cached }
    }

    /// Whether data may be read from it.
    fn reads(&self) -> bool {
        self.flags & O_PATH == 0 && self.flags & ACCESS != WRITE_ONLY
    }

    /// The file's name, as `/proc/PID/fd` shows it; empty if the descriptor was closed meanwhile.
    pub fn name(&self, pid: i32) -> io::Result<String> {
        match std::fs::read_link(format!("/proc/{pid}/fd/{}", self.number)) {
            Ok(name) => Ok(name.to_string_lossy().into_owned()),
            Err(e) if is_gone(&e) => Ok(String::new()),
            Err(e) => Err(e),
        }
    }
}

fn is_gone(e: &io::Error) -> bool {
    e.kind() == io::ErrorKind::NotFound || e.raw_os_error() == Some(libc::ESRCH)
}

fn parse_descriptor(number_of_it: u32, text: &str) -> Option<Descriptor> {
    let (mut flags, mut mount, mut registered) = (None, None, 0);
    fields(text, |name, value| match name {
        "flags" => flags = flags.or(u32::from_str_radix(value, 8).ok()),
        "mnt_id" => mount = mount.or(value.parse().ok()),
        "UserFiles" => registered = number(value),
        _ => {}
    });
    Some(Descriptor { number: number_of_it, flags: flags?, mount: mount?, registered })
}

/// The descriptors of a process, without those that are closed meanwhile.
pub fn descriptors(pid: i32) -> io::Result<impl Iterator<Item = io::Result<Descriptor>>> {
    let read = move |entry: io::Result<std::fs::DirEntry>| {
        let path = match entry {
            Ok(entry) => entry.path(),
            Err(e) => return Some(Err(e)),
        };
        let number = path.file_name()?.to_str()?.parse().ok()?;
        match read_to_string(&path) {
            Ok(text) => Some(parse_descriptor(number, &text).ok_or_else(|| invalid(path.display()))),
            Err(e) if is_gone(&e) => None,
            Err(e) => Some(Err(e)),
        }
    };
    Ok(std::fs::read_dir(format!("/proc/{pid}/fdinfo"))?.filter_map(read))
}

/// Number and file system type of a mount, of a line of `mountinfo`.
fn parse_mount(line: &str) -> Option<(u64, &str)> {
    let (mount, rest) = line.split_once(' ')?;
    let (_, kind) = rest.split_once(" - ")?;
    Some((mount.parse().ok()?, kind.split(' ').next()?))
}

/// How a file is read.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Reads {
    Direct,
    /// Through the page cache.
    Cached,
}

/// Whether files on any mount may be read directly, past the descriptors: an io_uring has them.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Ring {
    Holds,
    None,
}

/// What the host's kernel has.
#[derive(Clone, Copy)]
struct Host {
    kernel: (u32, u32),
    has_vhost_scsi: bool,
    /// A file system that counts, or may.
    has_any: bool,
}

impl Host {
    /// As it was [`SAME`] ago at most: clients are looked at one after the other, each period.
    fn now() -> Self {
        static LAST: Mutex<Option<(Instant, Host)>> = Mutex::new(None);
        let mut last = LAST.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some((at, host)) = *last
            && at.elapsed() < SAME
        {
            return host;
        }
        let (major, minor, _) = kernel_release();
        let kernel = (major, minor);
        let has_any = read_to_string("/proc/filesystems").map_or(true, |types| has_any(&types, kernel));
        let host = Self { kernel, has_vhost_scsi: Path::new(VHOST_SCSI).exists(), has_any };
        *last = Some((Instant::now(), host));
        host
    }
}

/// Whether reads take plain references on such a file system.
fn takes_references(kind: &str, reads: Reads, kernel: (u32, u32)) -> bool {
    let fuse = kind == "fuse" || kind == "fuseblk" || kind == "virtiofs" || kind.starts_with("fuse.");
    ALWAYS.contains(&kind) || reads == Reads::Direct && DIRECT.contains(&kind) || fuse && kernel < FUSE_PINS
}

/// Why a device may write to the memory of a process through references that `UFFDIO_MOVE` does not
/// see: `nfs4`, for instance. `None`: none does, or the process is gone. What cannot be read counts
/// as such I/O. One look takes some 5 us for each descriptor where the kernel has a file system
/// that counts, and nothing where it has none.
pub fn unpinned_io(pid: i32) -> Option<String> {
    let host = Host::now();
    if !host.has_vhost_scsi && !host.has_any {
        return None;
    }
    match look(pid, &host) {
        Ok(why) => why,
        Err(e) if is_gone(&e) => None,
        Err(e) => Some(format!("files that cannot be told ({e})")),
    }
}

/// Whether `/proc/filesystems` names a type that counts. It names all that the kernel has, with
/// those of its modules; the subtype of a FUSE file system (`fuse.sshfs`) is of the mount only.
fn has_any(types: &str, kernel: (u32, u32)) -> bool {
    types
        .lines()
        .filter_map(|line| line.split_whitespace().last())
        .any(|kind| takes_references(kind, Reads::Direct, kernel))
}

fn look(pid: i32, host: &Host) -> io::Result<Option<String>> {
    // By mount: a descriptor that may read, one with O_DIRECT where there is one.
    let mut mounts: BTreeMap<u64, Descriptor> = BTreeMap::new();
    let mut ring = Ring::None;
    for (count, descriptor) in descriptors(pid)?.enumerate() {
        let descriptor = descriptor?;
        if count >= MOST_DESCRIPTORS {
            return Ok(Some(format!("more than {MOST_DESCRIPTORS} descriptors")));
        }
        if descriptor.registered > 0 {
            ring = Ring::Holds;
        }
        if !descriptor.reads() {
            continue;
        }
        if host.has_vhost_scsi && descriptor.name(pid)? == "/dev/vhost-scsi" {
            return Ok(Some("vhost-scsi".to_owned()));
        }
        // Pipes have an O_DIRECT of their own, and their mount is in no list.
        if descriptor.is_direct() && descriptor.name(pid)?.starts_with("pipe:") {
            continue;
        }
        let kept = mounts.entry(descriptor.mount).or_insert(descriptor);
        if descriptor.is_direct() {
            *kept = descriptor;
        }
    }
    if let Some(why) = among(&format!("/proc/{pid}/mountinfo"), &mut mounts, ring, host.kernel)? {
        return Ok(Some(why));
    }
    // Files that were opened in the host's mount namespace and passed on, or in the daemon's: a
    // service manager may give the daemon one of its own. On a mount that no list names, a
    // descriptor without O_DIRECT is of the kernel's own files: a socket, an eventfd.
    for list in ["/proc/1/mountinfo", "/proc/self/mountinfo"] {
        match among(list, &mut mounts, Ring::None, host.kernel) {
            Ok(None) => {}
            // A user's own daemon may not look, and is in the host's namespace.
            Err(e) if list != "/proc/self/mountinfo" && e.kind() == io::ErrorKind::PermissionDenied => {}
            found => return found,
        }
    }
    Ok(mounts.values().any(Descriptor::is_direct).then(|| "a mount of another namespace".to_owned()))
}

/// Takes the mounts that a list names out of `mounts`, up to one on which reads take plain
/// references, and returns that one's type.
fn among(
    list: &str,
    mounts: &mut BTreeMap<u64, Descriptor>,
    ring: Ring,
    kernel: (u32, u32),
) -> io::Result<Option<String>> {
    for line in lines_of(list)?.split(b'\n') {
        let line = line?;
        let line = String::from_utf8_lossy(&line);
        let Some((mount, kind)) = parse_mount(&line) else { continue };
        let found = mounts.remove(&mount);
        let counts = |reads| takes_references(kind, reads, kernel);
        if found.is_some_and(|descriptor| counts(descriptor.how())) || ring == Ring::Holds && counts(Reads::Direct) {
            return Ok(Some(kind.to_owned()));
        }
    }
    Ok(None)
}

#[cfg(test)]
mod tests;
