//! Memory control groups: how much memory a process may still allocate.
//!
//! A group's limit applies to all groups below it. The headroom is therefore the least over the
//! process's group and all of its ancestors. A group's headroom is its limit less its usage.
//! Inactive page cache does not count as used, since the kernel drops it first.
//!
//! Groups are looked up in `/proc/PID/cgroup` and `/proc/self/mountinfo`; reading these may fail.
//!
//! Sources: Documentation/admin-guide/cgroup-v2.rst and cgroup-v1/memory.rst, `cgroups(7)`,
//! `proc_pid_mountinfo(5)`.

use std::fs::read_to_string;
use std::io;
use std::path::{Path, PathBuf};

/// The file names of one version of the interface.
struct Files {
    limit: &'static str,
    usage: &'static str,
    /// The name of the line in `memory.stat`.
    inactive_cache: &'static str,
}

const V1: Files =
    Files { limit: "memory.limit_in_bytes", usage: "memory.usage_in_bytes", inactive_cache: "total_inactive_file" };
const V2: Files = Files { limit: "memory.max", usage: "memory.current", inactive_cache: "inactive_file" };

/// Bytes. Version 1 writes "no limit" as the largest number of whole pages below 2⁶³; a limit from
/// here on means that there is none.
const UNLIMITED: u64 = 1 << 62;

/// The mount point of a hierarchy, and this process's directory in it.
type GroupPath = (PathBuf, PathBuf);

/// Of the interface.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Version {
    One,
    Two,
}

/// The memory control groups (version 1 or 2) that a process was in when they were looked up.
#[derive(Clone, Debug, Default)]
pub struct MemoryGroups {
    v1: Option<GroupPath>,
    v2: Option<GroupPath>,
}

impl MemoryGroups {
    /// Looks up the groups of this process. This takes longer than [`MemoryGroups::headroom`].
    pub fn find() -> io::Result<Self> {
        Self::at("/proc/self/cgroup")
    }

    /// Looks up the groups of another process, in the hierarchies that this process sees.
    pub fn of(pid: i32) -> io::Result<Self> {
        Self::at(&format!("/proc/{pid}/cgroup"))
    }

    fn at(file: &str) -> io::Result<Self> {
        let groups = read_to_string(file)?;
        let mounts = read_to_string("/proc/self/mountinfo")?;
        Ok(Self { v1: find(&groups, &mounts, Version::One), v2: find(&groups, &mounts, Version::Two) })
    }

    /// Their directories.
    pub fn directories(&self) -> impl Iterator<Item = &Path> {
        [&self.v1, &self.v2].into_iter().flatten().map(|(_, group)| &**group)
    }

    /// Bytes that may still be allocated before a limit is reached: of one of the groups, or of a
    /// group above them. `None`: there is no limit.
    pub fn headroom(&self) -> Option<u64> {
        let both = [(&V1, &self.v1), (&V2, &self.v2)];
        both.into_iter()
            .filter_map(|(files, place)| place.as_ref().and_then(|(top, group)| headroom(files, top, group)))
            .min()
    }
}

/// [`MemoryGroups::headroom`] of the groups that this process is in now. The memory of the whole
/// system may be less.
pub fn memory_headroom() -> io::Result<Option<u64>> {
    Ok(MemoryGroups::find()?.headroom())
}

/// The place of a process in the memory hierarchy of that version, if there is one.
fn find(groups: &str, mounts: &str, version: Version) -> Option<GroupPath> {
    let v1 = version == Version::One;
    // `number:controllers:path`; version 2 has no controllers.
    let path = groups.lines().find_map(|line| {
        let (_, rest) = line.split_once(':')?;
        let (controllers, path) = rest.split_once(':')?;
        let ours = if v1 { controllers.split(',').any(|name| name == "memory") } else { line.starts_with("0::") };
        ours.then_some(path)
    })?;
    // `id parent major:minor root mountpoint options [optional...] - type source superoptions`
    mounts.lines().find_map(|line| {
        let (mount, file_system) = line.split_once(" - ")?;
        let mut file_system = file_system.split(' ');
        let ours = match file_system.next()? {
            "cgroup" => v1 && file_system.nth(1)?.split(',').any(|option| option == "memory"),
            "cgroup2" => !v1,
            _ => false,
        };
        if !ours {
            return None;
        }
        let mut mount = mount.split(' ').skip(3);
        let root = mount.next()?;
        let top = PathBuf::from(mount.next()?);
        // In a container the mount may show only a part of the hierarchy, while the path starts at
        // the whole hierarchy's root.
        let below = Path::new(path).strip_prefix(root).unwrap_or(Path::new(""));
        let group = top.join(below);
        Some((top, group))
    })
}

/// The least headroom of `group` and its ancestors, up to `top`.
fn headroom(files: &Files, top: &Path, group: &Path) -> Option<u64> {
    group
        .ancestors()
        .take_while(|directory| directory.starts_with(top))
        .filter_map(|directory| {
            // The root of version 2 has no limit file, and "max" is no number: neither is a limit.
            let limit = number(&directory.join(files.limit)).filter(|&limit| limit < UNLIMITED)?;
            let usage = number(&directory.join(files.usage))?;
            let cache = inactive_cache(files, directory).unwrap_or(0);
            Some(limit.saturating_sub(usage.saturating_sub(cache)))
        })
        .min()
}

fn number(file: &Path) -> Option<u64> {
    read_to_string(file).ok()?.trim().parse().ok()
}

fn inactive_cache(files: &Files, directory: &Path) -> Option<u64> {
    let stat = read_to_string(directory.join("memory.stat")).ok()?;
    stat.lines().find_map(|line| line.strip_prefix(files.inactive_cache)?.strip_prefix(' ')?.trim().parse().ok())
}

#[cfg(test)]
mod tests;
