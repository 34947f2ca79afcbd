//! A process by itself: the container that it runs in, and its identity over its life.

use std::fs::metadata;
use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::time::{Duration, SystemTime};

use super::file::read_kernel;
use super::{Guest, Tenant};
use crate::config::ManagedBy;

/// The container of a process: it has a PID namespace, a user namespace or a root directory other
/// than the daemon's, so its root is not the host's. `None`: it has none of these.
pub(super) fn contained(root: &Path, pid: i32) -> Option<Guest> {
    for (file, kind) in [("ns/pid", "pid"), ("ns/user", "user"), ("root", "root")] {
        let of = |process: &str| metadata(root.join("proc").join(process).join(file));
        let (own, theirs) = match (of("self"), of(&pid.to_string())) {
            (Ok(own), Ok(theirs)) => ((own.dev(), own.ino()), (theirs.dev(), theirs.ino())),
            (Err(e), _) | (_, Err(e)) => {
                return Some(unknown(
                    root,
                    pid,
                    &format!("/proc/{pid}/{file} can't be read: {e}; run the daemon as root"),
                ));
            }
        };
        if own != theirs {
            let value = format!("{kind}-{}-{}", theirs.0, theirs.1);
            return Some(Guest::new(ManagedBy::Container, Tenant::new("container", value)));
        }
    }
    None
}

/// The process itself as a tenant: its number and when it started, which no other process has.
pub(super) fn own(root: &Path, pid: i32) -> Tenant {
    Tenant::new("process", format!("{pid}-{}", start(root, pid).unwrap_or(0)))
}

/// A process of which not even the manager is known: why, and the remedy.
pub(super) fn unknown(root: &Path, pid: i32, why: &str) -> Guest {
    let mut guest = Guest::new(ManagedBy::Unknown, own(root, pid));
    guest.unknown = Some(why.into());
    guest
}

/// When a process started, up to a second early: the boot is told in seconds.
pub(super) fn started(root: &Path, pid: i32) -> Option<SystemTime> {
    let boot = read_kernel(&root.join("proc/stat")).ok()?;
    let boot = boot.lines().find_map(|line| line.strip_prefix("btime ")?.trim().parse().ok())?;
    let ticks = start(root, pid)?;
    let after = Duration::from_secs_f64(ticks as f64 / rustix::param::clock_ticks_per_second() as f64);
    SystemTime::UNIX_EPOCH.checked_add(Duration::from_secs(boot))?.checked_add(after)
}

/// When a process started, in clock ticks after boot.
fn start(root: &Path, pid: i32) -> Option<u64> {
    let stat = read_kernel(&root.join(format!("proc/{pid}/stat"))).ok()?;
    kmem::procfs::Stat::from_text(stat).field(22).ok()
}
