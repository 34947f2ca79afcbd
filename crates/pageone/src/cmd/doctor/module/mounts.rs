//! The mounts of `pageonefs`: who may use them, what room they have, and whether the daemon that
//! runs can manage them.

use std::io;
use std::os::unix::fs::MetadataExt;
use std::path::Path;

use kmem::pageonefs::{File, Mount, MountInfo, OpenError};

use super::super::process::{CAP_SYS_ADMIN, Identity, Process};
use super::super::report::Check;
use crate::cmd::quoted;
use crate::cmd::run::MOUNT;

const NAME: &str = "module: mount";
/// Bytes that a guest has without `-m`: no guest fits into less.
const LEAST: u64 = 128 << 20;

/// The checks of these mounts, and of the daemon that has this number.
pub(super) fn checks(root: &Path, mounts: &[MountInfo], daemon: Option<i32>) -> Vec<Check> {
    if mounts.is_empty() {
        return vec![Check::note(NAME, "there is none", format!("for `run --backend module`, as root: {MOUNT}"))];
    }
    let check = |mount: &MountInfo| match Facts::of(&mount.path) {
        Ok(facts) => of(mount, &facts),
        Err(e) => Check::note(NAME, format!("{}: {e}", mount.path.display()), "run this as root"),
    };
    let mut checks: Vec<Check> = mounts.iter().map(check).collect();
    let daemon = daemon.map(|pid| {
        let process = Process::new(root, pid);
        (process.identity(), kmem::pageonefs::mounts_in(&process.path("mountinfo")))
    });
    checks.push(managed(mounts, daemon));
    checks
}

/// What the file system says of a mount.
#[derive(Debug)]
pub(super) struct Facts {
    /// Bytes; 0: no limit.
    pub(super) size: u64,
    pub(super) left: u64,
    pub(super) uid: u32,
    pub(super) mode: u32,
    /// If this account may ask.
    pub(super) files: Result<Files, OpenError>,
}

/// The lengths of a mount's files.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Files {
    /// Bytes, of those that can be filled.
    pub(super) sum: u64,
    /// Whose a file is that is longer than the mount.
    pub(super) longer: Option<u32>,
}

impl Files {
    /// `size`: of the mount.
    pub(super) fn of(files: &[File], size: u64) -> Self {
        let fits = |file: &&File| size == 0 || file.size <= size;
        let sum = files.iter().filter(fits).fold(0u64, |sum, file| sum.saturating_add(file.size));
        Self { sum, longer: files.iter().find(|file| !fits(file)).map(|file| file.uid) }
    }
}

impl Facts {
    fn of(path: &Path) -> io::Result<Self> {
        let room = rustix::fs::statvfs(path)?;
        let meta = std::fs::metadata(path)?;
        let size = room.f_blocks * room.f_frsize;
        Ok(Self {
            size,
            left: room.f_bavail * room.f_frsize,
            uid: meta.uid(),
            mode: meta.mode(),
            files: Mount::open(path).map(|mount| Files::of(&mount.files().unwrap_or_default(), size)),
        })
    }
}

/// Whether a mount is as it should be.
pub(super) fn of(mount: &MountInfo, facts: &Facts) -> Check {
    let (path, mib) = (mount.path.display(), |bytes: u64| bytes >> 20);
    let quoted = quoted(&mount.path.display().to_string());
    if let Err(why @ OpenError::Version { .. }) = &facts.files {
        return Check::blocks(
            NAME,
            format!("{path}: {why}"),
            "nothing in it is merged: install pageone and pageone-pageonefs-dkms of one version; a module that is loaded \
             goes when its guests are stopped: umount, rmmod pageonefs, and mount again",
        );
    }
    let domain = if mount.domain.is_empty() { "no domain" } else { &mount.domain };
    let room = match facts.size {
        0 => "no limit".to_owned(),
        size => format!("{} of {} MiB left", mib(facts.left), mib(size)),
    };
    let found = format!("{path}: {domain}, {room}, for uid {}", facts.uid);
    if facts.mode & 0o002 != 0 {
        return Check::note(
            NAME,
            format!("{found} and everybody else"),
            "all who make files in it share with each other: mode=0700 and uid= when it is mounted, or chown and chmod",
        )
        .fix(format!("chmod 700 {quoted}"));
    }
    let files = facts.files.as_ref().copied().unwrap_or_default();
    if facts.size > 0 && files.sum > facts.size {
        return Check::note(
            NAME,
            format!("{found}; its files may come to {} MiB", mib(files.sum)),
            "a guest that touches more than is left is killed: raise size=, against which merged pages count, too",
        )
        .fix(format!("mount -o remount,size={}M {quoted}", files.sum.div_ceil(1 << 20)));
    }
    if let Some(uid) = files.longer {
        return Check::note(
            NAME,
            format!("{found}; a file of uid {uid} is longer than that"),
            "if it is a guest's RAM, `mount -o remount,size=…`: its user is killed where nothing is left; others are merged as ever",
        );
    }
    if facts.size > 0 && facts.left < LEAST {
        let remedy = "no other guest fits: `mount -o remount,size=…`, with the sum of the guests' memory at least";
        return Check::note(NAME, found, remedy);
    }
    Check::ok(NAME, found)
}

/// Whether the daemon, by who it is and which mounts it sees, can manage all of these.
pub(super) fn managed(
    mounts: &[MountInfo],
    daemon: Option<(io::Result<Identity>, io::Result<Vec<MountInfo>>)>,
) -> Check {
    let name = "module: daemon";
    let Some((identity, seen)) = daemon else {
        let remedy = "start root's: `systemctl start pageone`, or `pageone daemon`";
        return Check::note(name, "none answers, so nothing in the mounts is merged", remedy);
    };
    let (identity, seen) = match (identity, seen) {
        (Ok(identity), Ok(seen)) => (identity, seen),
        (Err(e), _) | (_, Err(e)) => return Check::note(name, e, "run this as root"),
    };
    if !identity.has(CAP_SYS_ADMIN) {
        return Check::blocks(
            name,
            format!("it runs as uid {} without CAP_SYS_ADMIN, which mounts take", identity.uid),
            "root's has it; the package pageone-pageonefs-dkms adds it to the unit, and so does \
             CapabilityBoundingSet=CAP_SYS_ADMIN in a file in /etc/systemd/system/pageone.service.d",
        );
    }
    match mounts.iter().find(|mount| seen.iter().all(|other| other.device != mount.device)) {
        None => Check::ok(name, "it manages the mounts"),
        Some(hidden) => Check::blocks(
            name,
            format!("it does not see {}", hidden.path.display()),
            "its unit hides what is mounted below /dev, /home, /root and /tmp: mount it elsewhere",
        ),
    }
}
