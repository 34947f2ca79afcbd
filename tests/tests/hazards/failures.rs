//! Daemons and clients that die or stop, and limits that bind.

use std::collections::BTreeSet;
use std::os::unix::fs::MetadataExt;
use std::time::Duration;

use e2e::{Daemon, eventually, signal_process, skipped};

/// How long a daemon is away.
fn away() -> Duration {
    Duration::from_secs(4) * e2e::patience()
}

/// Below the time that a daemon is away, far above a window: on a busy machine threads wait for a
/// CPU, some seconds now and then.
fn limit_micros() -> u64 {
    3_000_000 * u64::from(e2e::patience())
}

#[test]
fn a_killed_daemon_stalls_nobody_and_its_successor_takes_over() {
    let mut daemon = Daemon::start();
    let mut client = daemon.scenario(&["writers", "32768", &(20 * e2e::patience()).to_string()]);
    let mut still = daemon.scenario(&["hold", "8192", "2", "4"]);
    client.expect("ready");
    still.expect("ready");
    daemon.wait_merged(still.pid(), 8192);
    client.tell("go");
    for _ in 0..4 {
        std::thread::sleep(Duration::from_millis(700));
        daemon.kill();
        still.go();
        std::thread::sleep(away());
        daemon.restart();
    }
    let longest = client.hear();
    client.expect("ok");
    let micros: u64 = longest.trim_start_matches("longest ").parse().unwrap();
    println!("a write took at most {micros} µs");
    assert!(micros < limit_micros(), "a write waited {micros} µs");
    still.go();
    // The successor knows what its predecessors merged: nothing new was made for these pages.
    daemon.wait_merged(still.pid(), 8192);
}

#[test]
fn restarts_in_quick_succession_leave_all_pages_in_management() {
    let mut daemon = Daemon::start();
    let mut clients = [(); 3].map(|()| daemon.scenario(&["hold", "16384", "2", "4"]));
    clients.iter_mut().for_each(|client| client.expect("ready"));
    clients.iter().for_each(|client| daemon.wait_merged(client.pid(), 16384));
    // The second daemon ends before any client has come back, while they come back, and while they
    // are looked at.
    for milliseconds in [0, 30, 100, 200, 300, 500] {
        daemon.kill();
        daemon.restart();
        std::thread::sleep(Duration::from_millis(milliseconds));
        daemon.kill();
        daemon.restart();
        clients.iter().for_each(|client| daemon.wait_merged(client.pid(), 16384));
        clients.iter_mut().for_each(e2e::Client::go);
    }
}

#[test]
fn a_stopped_daemon_stalls_nobody() {
    let daemon = Daemon::start();
    let mut client = daemon.scenario(&["writers", "32768", &(15 * e2e::patience()).to_string()]);
    client.expect("ready");
    client.tell("go");
    for _ in 0..3 {
        std::thread::sleep(Duration::from_millis(600));
        daemon.signal(libc::SIGSTOP);
        std::thread::sleep(away());
        daemon.signal(libc::SIGCONT);
    }
    let longest = client.hear();
    client.expect("ok");
    let micros: u64 = longest.trim_start_matches("longest ").parse().unwrap();
    println!("a write took at most {micros} µs");
    assert!(micros < limit_micros(), "a write waited {micros} µs while the daemon was stopped");
}

#[test]
fn a_client_killed_in_the_middle_of_a_batch_takes_nothing_with_it() {
    let daemon = Daemon::start();
    let mut still = daemon.scenario(&["hold", "8192", "2", "4"]);
    still.expect("ready");
    for round in 0..5u64 {
        let mut client = daemon.scenario(&["hold", "32768", "2", &(10 + round).to_string()]);
        client.expect("ready");
        daemon.wait_merged(client.pid(), 100);
        client.kill();
    }
    daemon.wait_merged(still.pid(), 8192);
    still.go();
    eventually("the dead clients' frames are given back", Duration::from_secs(60), || {
        (daemon.status()["pages_shared"] == 4096).then_some(())
    });
}

#[test]
fn a_stopped_client_does_not_keep_others_waiting() {
    let daemon = Daemon::with(&["--merge-period", "0.1", "--threads", "1"]);
    let mut stopped = daemon.scenario(&["hold", "32768", "2", "1"]);
    stopped.expect("ready");
    daemon.wait_merged(stopped.pid(), 10);
    signal_process(stopped.pid(), libc::SIGSTOP);
    let mut other = daemon.scenario(&["hold", "8192", "2", "2"]);
    other.expect("ready");
    daemon.wait_merged(other.pid(), 8192);
    other.go();
    signal_process(stopped.pid(), libc::SIGCONT);
    daemon.wait_merged(stopped.pid(), 32_768);
    stopped.go();
}

/// `vm.max_map_count`, which is the whole host's: lowering it can harm any program that runs there,
/// so tests do that only where they are told that they may (`PAGEONE_TEST_SYSCTL=1`; `make
/// test-kernels` does, in its guests).
struct MapLimit(String);

const MAP_LIMIT: &str = "/proc/sys/vm/max_map_count";

impl MapLimit {
    fn may_set() -> Option<Self> {
        let allowed = std::env::var("PAGEONE_TEST_SYSCTL").is_ok_and(|v| v == "1");
        allowed.then(|| Self(std::fs::read_to_string(MAP_LIMIT).unwrap()))
    }

    fn set(&self, limit: &str) {
        std::fs::write(MAP_LIMIT, limit).unwrap();
    }
}

impl Drop for MapLimit {
    fn drop(&mut self) {
        let _ = std::fs::write(MAP_LIMIT, &self.0);
    }
}

#[test]
fn mappings_stay_within_the_limit_and_status_says_that_it_binds() {
    let own = MapLimit::may_set();
    if let Some(limit) = &own {
        limit.set("3000");
    }
    let limit = kmem::procfs::max_map_count().unwrap();
    if limit > 70_000 {
        return skipped("vm.max_map_count is so high that it would take gigabytes to come near it");
    }
    let daemon = Daemon::start();
    // No two neighbours have neighbouring frames: a mapping for each page.
    let mut client = daemon.scenario(&["shuffled", &(limit * 2).to_string()]);
    client.expect("ready");
    eventually("the limit binds", Duration::from_secs(120), || {
        (daemon.client(client.pid())?["max_map_count_binds"] == true).then_some(())
    });
    for _ in 0..20 {
        std::thread::sleep(Duration::from_millis(200));
        let maps = kmem::procfs::count_maps(Some(client.pid())).unwrap();
        assert!(maps <= limit * 3 / 4, "{maps} mappings under a limit of {limit}: about a third must stay free");
        assert!(maps > limit / 3, "the budget is used: {maps} of {limit}");
        let status = daemon.client(client.pid()).unwrap();
        assert_eq!(status["max_map_count_binds"], true, "it goes on binding: {status}");
    }
    client.go();
    let text = daemon.pageone(&["status"]).output().unwrap();
    assert!(String::from_utf8_lossy(&text.stdout).contains("vm.max_map_count binds"));
}

#[test]
fn a_limit_that_is_lowered_under_a_merged_program_harms_nothing() {
    let Some(limit) = MapLimit::may_set() else {
        return skipped(
            "lowering vm.max_map_count could harm other programs here; `make test-kernels` does it in a guest",
        );
    };
    let daemon = Daemon::start();
    let mut client = daemon.scenario(&["writers", "32768", &(10 * e2e::patience()).to_string()]);
    client.expect("ready");
    client.tell("go");
    eventually("it has many mappings", Duration::from_secs(20), || {
        (kmem::procfs::count_maps(Some(client.pid())).ok()? > 500).then_some(())
    });
    // Below what it has: from now on the kernel refuses every new mapping.
    for lowered in ["400", "65530", "100", "65530", "400"] {
        limit.set(lowered);
        std::thread::sleep(Duration::from_millis(1000));
    }
    client.hear();
    client.expect("ok");
}

#[test]
fn a_store_that_cannot_grow_pauses_merging_and_loses_nothing() {
    let Some(group) = Group::new(96 << 20) else {
        return skipped("no memory cgroup can be made here");
    };
    let daemon = Daemon::with(&["--merge-period", "0.1"]);
    group.add(daemon.pid());
    let mut client = daemon.scenario(&["hold", "65536", "2"]);
    client.expect("ready");
    let paused = eventually("merging pauses", Duration::from_secs(60), || {
        let status = daemon.status();
        let domains = status["domains"].as_array()?;
        domains.iter().find_map(|d| d["paused"].as_str().map(str::to_string))
    });
    assert!(paused.contains("cgroup"), "{paused}");
    // Each frame that is there has both of its pages.
    eventually("what needs no new frame is merged", Duration::from_secs(60), || {
        let status = daemon.status();
        println!("{} {}", status["pages_shared"], status["pages_sharing"]);
        let [frames, further] = ["pages_shared", "pages_sharing"].map(|name| status[name].as_u64().unwrap());
        (frames > 1000 && further * 20 >= frames * 19).then_some(())
    });
    client.go();
    group.limit(1 << 30);
    daemon.wait_merged(client.pid(), 65_536);
    client.go();
}

/// A memory cgroup of its own, version 1 or 2.
struct Group {
    path: std::path::PathBuf,
    limit: &'static str,
}

impl Group {
    fn new(bytes: u64) -> Option<Self> {
        for (root, limit) in [("/sys/fs/cgroup/memory", "memory.limit_in_bytes"), ("/sys/fs/cgroup", "memory.max")] {
            let path = std::path::Path::new(root).join(format!("pageone-test-{}", std::process::id()));
            if std::fs::create_dir(&path).is_ok() {
                let group = Self { path, limit };
                if std::fs::write(group.path.join(limit), bytes.to_string()).is_ok() {
                    return Some(group);
                }
            }
        }
        None
    }

    fn limit(&self, bytes: u64) {
        std::fs::write(self.path.join(self.limit), bytes.to_string()).unwrap();
    }

    fn add(&self, pid: i32) {
        std::fs::write(self.path.join("cgroup.procs"), pid.to_string()).unwrap();
    }
}

impl Drop for Group {
    fn drop(&mut self) {
        let parent = self.path.parent().map(|p| p.join("cgroup.procs"));
        for pid in std::fs::read_to_string(self.path.join("cgroup.procs")).unwrap_or_default().lines() {
            if let Some(parent) = &parent {
                let _ = std::fs::write(parent, pid);
            }
        }
        let _ = std::fs::remove_dir(&self.path);
    }
}

/// The segments of a store that a process maps, and those that it has open.
pub(super) fn segments_of(pid: i32) -> [BTreeSet<u64>; 2] {
    let mut mapped = BTreeSet::new();
    let is_segment = |path: &str| path.starts_with("/memfd:pageone:") && !path.contains("control");
    kmem::procfs::for_each_map(Some(pid), |line| {
        mapped.extend(is_segment(&line.path).then_some(line.inode));
    })
    .unwrap();
    let open = std::fs::read_dir(format!("/proc/{pid}/fd")).unwrap().filter_map(|fd| {
        let path = fd.unwrap().path();
        let target = std::fs::read_link(&path).ok()?;
        is_segment(target.to_str()?).then(|| std::fs::metadata(&path).unwrap().ino())
    });
    [mapped, open.collect()]
}

#[test]
fn a_store_that_no_daemon_takes_back_is_closed_and_left_by_its_clients() {
    let mut daemon = Daemon::start();
    // Some contents are merged within each, and some are in both of them.
    let [mut client, mut other] = [["hold", "4096", "1", "1"], ["hold", "8192", "2", "1"]].map(|w| daemon.scenario(&w));
    [&mut client, &mut other].into_iter().for_each(|client| client.expect("ready"));
    daemon.wait_merged(client.pid(), 4096);
    let before = segments_of(client.pid());
    assert!(!before[0].is_empty() && before[0] == before[1], "{before:?}");
    // From now on no other page has any of its contents.
    other.kill();
    daemon.stop();
    std::fs::remove_file(daemon.dir.path().join("segments")).unwrap();
    daemon.restart();
    eventually("the segments of the earlier daemon are gone", Duration::from_secs(60), || {
        let now = segments_of(client.pid());
        now.iter().zip(&before).all(|(now, before)| now.is_disjoint(before)).then_some(())
    });
    client.go();
}
