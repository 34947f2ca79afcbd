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
mod tests {
    use super::*;
    use std::fs;

    #[test]
    fn the_tightest_ancestor_counts() {
        let top = tempfile::tempdir().unwrap();
        let top = top.path();
        let group = top.join("a/b");
        fs::create_dir_all(&group).unwrap();
        assert_eq!(headroom(&V2, top, &group), None, "nothing there");

        fs::write(group.join("memory.max"), "max\n").unwrap();
        fs::write(group.join("memory.current"), "4096\n").unwrap();
        assert_eq!(headroom(&V2, top, &group), None, "no limit");

        fs::write(top.join("a/memory.max"), "1000000\n").unwrap();
        fs::write(top.join("a/memory.current"), "700000\n").unwrap();
        assert_eq!(headroom(&V2, top, &group), Some(300_000));

        fs::write(top.join("a/memory.stat"), "anon 1\ninactive_file_x 9\ninactive_file 200000\n").unwrap();
        assert_eq!(headroom(&V2, top, &group), Some(500_000), "idle page cache can go");

        fs::write(group.join("memory.max"), "5000\n").unwrap();
        assert_eq!(headroom(&V2, top, &group), Some(904));
        fs::write(group.join("memory.current"), "9000\n").unwrap();
        assert_eq!(headroom(&V2, top, &group), Some(0), "beyond the limit");
    }

    #[test]
    fn version_one() {
        let top = tempfile::tempdir().unwrap();
        let top = top.path();
        fs::write(top.join("memory.limit_in_bytes"), "9223372036854771712\n").unwrap();
        fs::write(top.join("memory.usage_in_bytes"), "5\n").unwrap();
        assert_eq!(headroom(&V1, top, top), None);
        fs::write(top.join("memory.limit_in_bytes"), "100\n").unwrap();
        assert_eq!(headroom(&V1, top, top), Some(95));
    }

    const MOUNTS: &str = "\
30 25 0:26 / /sys/fs/cgroup rw,nosuid - tmpfs tmpfs rw
31 30 0:27 / /sys/fs/cgroup/cpu rw shared:9 - cgroup cgroup rw,cpu
32 30 0:28 /box /sys/fs/cgroup/memory rw shared:10 master:1 - cgroup cgroup rw,memory
33 30 0:29 / /sys/fs/cgroup/unified rw - cgroup2 cgroup2 rw,nsdelegate
";

    #[test]
    fn finds_both_versions() {
        let groups = "4:memory:/box/inner\n1:cpu:/\n0::/user.slice\n";
        let at = |top: &str, group: &str| Some((PathBuf::from(top), PathBuf::from(group)));
        assert_eq!(find(groups, MOUNTS, Version::One), at("/sys/fs/cgroup/memory", "/sys/fs/cgroup/memory/inner"));
        assert_eq!(
            find(groups, MOUNTS, Version::Two),
            at("/sys/fs/cgroup/unified", "/sys/fs/cgroup/unified/user.slice")
        );
        assert_eq!(
            find("4:memory:/elsewhere\n", MOUNTS, Version::One).unwrap().1,
            Path::new("/sys/fs/cgroup/memory/"),
            "a path from outside of the container"
        );
        assert_eq!(find("1:cpu:/\n", MOUNTS, Version::One), None);
        assert_eq!(find("", "", Version::Two), None);
    }

    #[test]
    fn this_process() {
        // Whatever the limit here, it is a number of bytes that this test's own memory fits into.
        assert!(memory_headroom().unwrap().is_none_or(|bytes| bytes > 1 << 20));
        let own = MemoryGroups::of(std::process::id() as i32).unwrap();
        assert_eq!((own.v1, own.v2), MemoryGroups::find().map(|groups| (groups.v1, groups.v2)).unwrap());
    }
}
