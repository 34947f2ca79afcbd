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
    assert_eq!(find(groups, MOUNTS, Version::Two), at("/sys/fs/cgroup/unified", "/sys/fs/cgroup/unified/user.slice"));
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
