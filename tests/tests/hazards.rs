//! The hazards of merging, each with a client that would notice: a real daemon, a real agent, real
//! memory.
//!
//! These tests need no guest; `make test-kernels` runs the same binary inside guests of other
//! kernels. That each fails without its guard is shown by `sabotage.rs`.
#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::process::{Command, Stdio};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed};
use std::time::{Duration, Instant};

use e2e::{Client, Daemon, eventually, program, signal_process, skipped};

#[test]
fn two_threads_write_while_their_pages_merge() {
    let daemon = Daemon::start();
    // On a slow machine 15 s are but a few merge periods, and pages are written to only after they
    // merged.
    let seconds = 15 * (1 + e2e::patience() / 4);
    let mut client = daemon.scenario(&["writers", "65536", &seconds.to_string()]);
    client.expect("ready");
    client.tell("go");
    let longest = client.hear();
    client.expect("ok");
    let merged = daemon.client(client.pid()).unwrap();
    println!("{longest} µs; {merged}");
    assert!(merged["pages_merged"].as_u64() > Some(1000), "the test proves nothing if nothing merged: {merged}");
    assert!(merged["pages_copied_total"].as_u64() > Some(1000), "merged pages were written to: {merged}");
}

#[test]
fn two_clients_share_frames_and_leave_no_trace() {
    let daemon = Daemon::start();
    let mut one = daemon.scenario(&["hold", "8192", "1", "5"]);
    let mut two = daemon.scenario(&["hold", "8192", "1", "5"]);
    one.expect("ready");
    two.expect("ready");
    daemon.wait_merged(one.pid(), 8192);
    daemon.wait_merged(two.pid(), 8192);
    let status = daemon.status();
    assert_eq!(
        (status["pages_shared"].as_u64(), status["pages_sharing"].as_u64()),
        (Some(8192), Some(8192)),
        "{status}"
    );
    assert!(status["general_profit"].as_i64() > Some(8192 * 4096 / 2), "{status}");
    one.go();
    two.go();
    two.kill();
    one.go();
    assert_eq!(one.finish(), Some(0));
    eventually("frames and segments go with the last client", Duration::from_secs(10), || {
        let status = daemon.status();
        let empty = |domain: &serde_json::Value| domain["segments"] == 0 && domain["known_contents"] == 0;
        status["domains"].as_array()?.iter().all(empty).then_some(())
    });
}

#[test]
fn pages_that_were_guessed_wrong_keep_their_bytes_and_the_others_merge() {
    let daemon = Daemon::start();
    let mut alike: Vec<Client> = (0..2).map(|_| daemon.scenario(&["hold", "8192", "1", "5"])).collect();
    alike.iter_mut().for_each(|client| client.expect("ready"));
    alike.iter().for_each(|client| daemon.wait_merged(client.pid(), 8192));
    // Row after row of matches, each followed by a page that does not match.
    let mut other = daemon.scenario(&["hold", "8192", "1", "5", "100"]);
    other.expect("ready");
    daemon.wait_merged(other.pid(), 8192 - 81);
    // The pages that did not match are read when their turn comes.
    let status = eventually("all is looked at", Duration::from_secs(20), || {
        daemon.client(other.pid()).filter(|status| status["pages_unshared"].as_u64() >= Some(81))
    });
    assert_eq!((&status["pages_merged"], &status["pages_unshared"]), (&(8192 - 81).into(), &81.into()), "{status}");
    other.go();
    alike.iter_mut().for_each(Client::go);
}

/// Frames come and go as fast as can be, shared between clients; one that is used again too early
/// would show as a wrong byte.
#[test]
fn frames_that_come_and_go_are_never_taken_from_their_users() {
    let seconds: u64 = std::env::var("PAGEONE_CHURN_SECONDS").map_or(10, |s| s.parse().unwrap());
    let mut daemon = Daemon::with(&["--merge-period", "0.05"]);
    let mut clients: Vec<Client> = (0..3).map(|_| daemon.scenario(&["churn", "8192", &seconds.to_string()])).collect();
    for client in &mut clients {
        client.expect("ready");
        client.tell("go");
    }
    for turn in 0..seconds {
        // Pauses leave batches half done and reports unread.
        let stopped = if turn % 2 == 0 { daemon.pid() } else { clients[1].pid() };
        signal_process(stopped, libc::SIGSTOP);
        std::thread::sleep(Duration::from_millis(100));
        signal_process(stopped, libc::SIGCONT);
        std::thread::sleep(Duration::from_millis(900));
    }
    clients.iter_mut().for_each(|client| client.expect("ok"));
    let merged = daemon.status()["pages_merged_total"].as_u64().unwrap();
    println!("{merged} pages were merged in {seconds} s");
    assert!(merged > 1000, "little was merged: {merged} pages");
    drop(clients);
    eventually("the store is empty", Duration::from_secs(30), || {
        daemon.status()["domains"].as_array()?.iter().all(|d| d["segments"] == 0).then_some(())
    });
    assert_eq!(daemon.stop(), Some(0));
}

#[test]
fn zero_pages_become_untouched_memory() {
    let daemon = Daemon::start();
    let mut client = daemon.scenario(&["zeros", "4096"]);
    client.expect("ready");
    let resident = || kmem::procfs::smaps_rollup(Some(client.pid())).unwrap().anonymous;
    let before = resident();
    eventually("all zero pages are given back", Duration::from_secs(20), || {
        (daemon.client(client.pid())?["pages_zero"] == 4096).then_some(())
    });
    let after = resident();
    assert!(after + 15_000 < before, "16 MiB of zeros were {before} KiB and are {after} KiB now");
    client.go();
}

#[test]
fn discarded_memory_reads_as_zeros() {
    let daemon = Daemon::start();
    let mut client = daemon.scenario(&["dontneed"]);
    client.expect("ready");
    daemon.wait_merged(client.pid(), 4096);
    client.go();
    for _ in 0..3 {
        daemon.wait_merged(client.pid(), 3600);
        client.go();
    }
}

/// Fills the rest of the segment that a client's frames are in, so that freed slots are the only
/// ones left.
fn press_on_slots(daemon: &Daemon) -> Client {
    let mut press = daemon.scenario(&["hold", "57344", "2", "9"]);
    press.expect("ready");
    press
}

#[test]
fn a_forked_child_outlives_its_parent_and_keeps_its_memory() {
    let daemon = Daemon::start();
    let mut client = daemon.scenario(&["fork"]);
    client.expect("ready");
    daemon.wait_merged(client.pid(), 4096);
    let mut keeper = daemon.scenario(&["hold", "512", "2", "3"]);
    keeper.expect("ready");
    daemon.wait_merged(keeper.pid(), 512);
    client.tell("go");
    client.expect("child");
    eventually("the parent ends", Duration::from_secs(20), || daemon.client(client.pid()).is_none().then_some(()));
    // Past the quarantine, new content presses for slots.
    std::thread::sleep(Duration::from_millis(500));
    let mut press = press_on_slots(&daemon);
    daemon.wait_merged(press.pid(), 57_344);
    client.go();
    press.go();
    keeper.go();
    let pinned: u64 =
        daemon.status()["domains"].as_array().unwrap().iter().filter_map(|d| d["pages_pinned"].as_u64()).sum();
    assert!(pinned >= 1024, "frames of the child are kept: {pinned}");
}

#[test]
fn parts_of_a_region_are_unmapped_moved_and_protected() {
    let daemon = Daemon::start();
    let mut client = daemon.scenario(&["mappings"]);
    client.expect("ready");
    daemon.wait_merged(client.pid(), 4096);
    client.go();
    for _ in 0..3 {
        std::thread::sleep(Duration::from_millis(500));
        client.go();
    }
    let status = daemon.client(client.pid()).unwrap();
    assert_eq!(status["region_bytes"].as_u64(), Some((4096 - 256 - 300 - 128) * 4096), "{status}");
}

#[test]
fn detached_memory_is_plain_anonymous_memory() {
    let daemon = Daemon::start();
    let mut client = daemon.scenario(&["hold", "8192", "4"]);
    client.expect("ready");
    daemon.wait_merged(client.pid(), 8192);
    let maps = |pid: i32| std::fs::read_to_string(format!("/proc/{pid}/maps")).unwrap();
    assert!(maps(client.pid()).contains("memfd:pageone"));
    let out = daemon.pageone(&["detach", &client.pid().to_string()]).output().unwrap();
    assert!(out.status.success(), "{}", String::from_utf8_lossy(&out.stderr));
    let left: Vec<String> =
        maps(client.pid()).lines().filter(|l| l.contains("memfd:pageone:")).map(str::to_string).collect();
    assert!(left.is_empty(), "{left:?}");
    let plain_maps = maps(client.pid()).lines().count();
    assert!(plain_maps < 60, "{plain_maps} mappings are left");
    client.go();
    let out = daemon.pageone(&["detach", &client.pid().to_string()]).output().unwrap();
    assert_eq!(out.status.code(), Some(4), "a second time it is no client");
}

/// Far below the time that a daemon is away, far above a window.
fn limit_micros() -> u64 {
    400_000 * u64::from(e2e::patience())
}

#[test]
fn a_killed_daemon_stalls_nobody_and_its_successor_takes_over() {
    let mut daemon = Daemon::start();
    let mut client = daemon.scenario(&["writers", "32768", "12"]);
    let mut still = daemon.scenario(&["hold", "8192", "2", "4"]);
    client.expect("ready");
    still.expect("ready");
    daemon.wait_merged(still.pid(), 8192);
    client.tell("go");
    for _ in 0..5 {
        std::thread::sleep(Duration::from_millis(700));
        daemon.kill();
        still.go();
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
fn a_stopped_daemon_stalls_nobody() {
    let daemon = Daemon::start();
    let mut client = daemon.scenario(&["writers", "32768", "8"]);
    client.expect("ready");
    client.tell("go");
    for _ in 0..4 {
        std::thread::sleep(Duration::from_millis(600));
        daemon.signal(libc::SIGSTOP);
        std::thread::sleep(Duration::from_millis(1000));
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
    let mut status = serde_json::Value::Null;
    let deadline = Instant::now() + Duration::from_secs(20);
    while status["pages_shared"] != 4096 {
        assert!(Instant::now() < deadline, "the dead clients' frames are not given back: {status}");
        std::thread::sleep(Duration::from_millis(100));
        status = daemon.status();
    }
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

#[test]
fn signals_reach_the_program() {
    let daemon = Daemon::start();
    let mut client = daemon.scenario(&["signals"]);
    client.expect("ready");
    daemon.wait_merged(client.pid(), 1024);
    client.go();
}

#[test]
fn wrappers_and_shells_work_as_ever() {
    let daemon = Daemon::start();
    // timeout(1) ends its child by an alarm and says so by its exit code; sh starts the client as its
    // child.
    let mut command = daemon.run(&[]);
    let client = program("pageone-test-client");
    command.args(["timeout", "2", "sh", "-c"]).arg(format!("{} hold 4096 2; exit 7", client.display()));
    let start = Instant::now();
    let mut wrapped = command.stdin(Stdio::piped()).stdout(Stdio::null()).spawn().unwrap();
    // Held open, or the client would end by itself.
    let _input = wrapped.stdin.take();
    assert_eq!(wrapped.wait().unwrap().code(), Some(124));
    assert!(start.elapsed() < Duration::from_secs(10));
    let exit = |words: &[&str]| daemon.run(&[]).args(words).stderr(Stdio::null()).status().unwrap().code();
    assert_eq!(exit(&["sh", "-c", "exit 42"]), Some(42));
    assert_eq!(exit(&["/nonexistent/program"]), Some(127));
    // Programs that mark no memory get no thread.
    let out = daemon.run(&[]).args(["sh", "-c", "ls /proc/$$/task | wc -l"]).output().unwrap();
    assert_eq!(String::from_utf8_lossy(&out.stdout).trim(), "1");
}

#[test]
fn locked_memory_is_refused_with_the_reason() {
    let daemon = Daemon::start();
    let mut client = daemon.scenario(&["locked"]);
    client.expect("ready");
    let refused = eventually("a refusal", Duration::from_secs(10), || {
        daemon.client(client.pid())?["refused"].as_str().map(str::to_string)
    });
    assert!(refused.contains("VmLck"), "{refused}");
    client.go();
    assert_eq!(daemon.client(client.pid()).unwrap()["pages_merged"], 0);
}

#[test]
fn pinned_memory_is_refused_with_the_reason() {
    let daemon = Daemon::start();
    let mut client = daemon.scenario(&["pinned"]);
    if client.hear() == "SKIPPED" {
        return skipped("io_uring is not allowed here, and nothing else pins memory for a test");
    }
    let refused = eventually("a refusal", Duration::from_secs(10), || {
        daemon.client(client.pid())?["refused"].as_str().map(str::to_string)
    });
    assert!(refused.contains("VmPin"), "{refused}");
    client.go();
    assert_eq!(daemon.client(client.pid()).unwrap()["pages_merged"], 0);
}

#[test]
fn children_do_not_inherit_what_the_program_kept_from_them() {
    let daemon = Daemon::start();
    let mut client = daemon.scenario(&["advice"]);
    client.expect("ready");
    daemon.wait_merged(client.pid(), 1024);
    client.go();
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
    let mut client = daemon.scenario(&["writers", "32768", "8"]);
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

#[test]
fn a_client_of_one_domain_sees_nothing_of_another() {
    let daemon = Daemon::start();
    let mut one = daemon.scenario_with(&["--domain", "one"], &["hold", "4096", "1", "6"], &[]);
    let mut two = daemon.scenario_with(&["--domain", "two"], &["hold", "4096", "1", "6"], &[]);
    one.expect("ready");
    two.expect("ready");
    eventually("both are looked at", Duration::from_secs(20), || {
        let looked = |pid| Some(daemon.client(pid)?["pages_unshared"] == 4096);
        (looked(one.pid())? && looked(two.pid())?).then_some(())
    });
    assert_eq!(daemon.status()["pages_shared"], 0, "the same content in two domains is not shared");
    one.go();
    two.go();
}

#[test]
fn a_huge_page_is_split_only_when_enough_of_it_merges() {
    let daemon = Daemon::with_config(&["--merge-period", "0.1"], "huge_page_share = 85");
    let mut clients = [(); 2].map(|()| daemon.scenario_with(&["--huge-pages", "keep"], &["huge", "10", "90"], &[]));
    clients.iter_mut().for_each(|client| client.expect("ready"));
    let huge_kib = |client: &Client| kmem::procfs::smaps_rollup(Some(client.pid())).unwrap().anon_huge_pages;
    let before = clients.each_ref().map(huge_kib);
    if before.iter().any(|&kib| kib < 4096) {
        return skipped(
            "the kernel gave no huge pages; it does with `madvise` in /sys/kernel/mm/transparent_hugepage/enabled, where memory is free",
        );
    }
    // Of the second huge page of each 461 pages have their like, of the first 52.
    clients.iter().for_each(|client| daemon.wait_merged(client.pid(), 461));
    eventually("what is left in huge pages is known", Duration::from_secs(20), || {
        let known = clients.iter().all(|client| daemon.client(client.pid()).unwrap()["pages_kept_huge"] == 52);
        known.then_some(())
    });
    std::thread::sleep(Duration::from_secs(1));
    for (client, before) in clients.iter().zip(before) {
        assert_eq!(daemon.client(client.pid()).unwrap()["pages_merged"], 461);
        assert_eq!(huge_kib(client), before - 2048, "the first stays whole");
    }
    // A write takes it apart in any case: then nothing is left to keep.
    clients.iter_mut().for_each(|client| client.tell("write"));
    clients.iter_mut().for_each(|client| client.expect("ok"));
    clients.iter().for_each(|client| daemon.wait_merged(client.pid(), 461 + 52));
    clients.iter_mut().for_each(Client::go);
}

#[test]
fn what_a_newcomer_shows_before_its_holders_come_back_after_a_restart_is_merged_with_theirs() {
    let mut daemon = Daemon::start();
    let mut holders = [(); 2].map(|()| daemon.scenario(&["hold", "4096", "1", "6"]));
    holders.iter_mut().for_each(|client| client.expect("ready"));
    holders.iter().for_each(|client| daemon.wait_merged(client.pid(), 4096));
    let stop = |signal| holders.iter().for_each(|client| signal_process(client.pid(), signal));
    stop(libc::SIGSTOP);
    daemon.kill();
    daemon.restart();
    let mut newcomer = daemon.scenario(&["hold", "4096", "1", "6"]);
    newcomer.expect("ready");
    eventually("the newcomer is looked at", Duration::from_secs(60), || {
        (daemon.client(newcomer.pid())?["pages_unshared"] == 4096).then_some(())
    });
    stop(libc::SIGCONT);
    daemon.wait_merged(newcomer.pid(), 4096);
    assert_eq!(daemon.status()["domains"][0]["pages_shared"], 4096, "in the frames that there were");
    newcomer.go();
    holders.iter_mut().for_each(Client::go);
}

/// `make test-kernels` runs this in guests with two nodes.
#[test]
fn pages_of_two_numa_nodes_share_nothing_if_so_configured() {
    if kmem::numa::nodes() < 2 {
        return skipped("this machine has one NUMA node; `make test-kernels` makes guests with two");
    }
    let mut daemon = Daemon::with_config(&["--merge-period", "0.1"], "merge_across_nodes = false");
    let start = |daemon: &Daemon, node: &str| {
        let mut client = daemon.scenario_with(&[], &["hold", "4096", "1", "6"], &[("PAGEONE_TEST_NODE", node)]);
        client.expect("ready");
        client
    };
    let (mut zero, mut one) = (start(&daemon, "0"), start(&daemon, "1"));
    eventually("both are looked at", Duration::from_secs(60), || {
        let looked = |pid| Some(daemon.client(pid)?["pages_unshared"] == 4096);
        (looked(zero.pid())? && looked(one.pid())?).then_some(())
    });
    assert_eq!(daemon.status()["pages_shared"], 0, "the same content on two nodes is not shared");
    let mut other = start(&daemon, "1");
    daemon.wait_merged(other.pid(), 4096);
    daemon.wait_merged(one.pid(), 4096);
    let maps = std::fs::read_to_string(format!("/proc/{}/numa_maps", daemon.pid())).unwrap();
    let store: Vec<&str> = maps.lines().filter(|line| line.contains("memfd:pageone:uid-")).collect();
    assert!(!store.is_empty() && store.iter().all(|line| line.contains(" N1=") && !line.contains(" N0=")), "{store:?}");
    // The successor knows where its predecessor's frames lie.
    daemon.kill();
    daemon.restart();
    let mut late = start(&daemon, "1");
    daemon.wait_merged(late.pid(), 4096);
    eventually("the other node's pages are looked at again", Duration::from_secs(60), || {
        (daemon.client(zero.pid())?["pages_unshared"] == 4096).then_some(())
    });
    [&mut zero, &mut one, &mut other, &mut late].into_iter().for_each(Client::go);
}

#[test]
fn a_client_cannot_write_its_store() {
    let daemon = Daemon::start();
    let mut client = daemon.scenario(&["hold", "4096", "4", "6"]);
    client.expect("ready");
    daemon.wait_merged(client.pid(), 4096);
    let mut tried = 0;
    for entry in std::fs::read_dir(format!("/proc/{}/fd", client.pid())).unwrap().flatten() {
        let target = std::fs::read_link(entry.path()).unwrap_or_default();
        if !target.to_string_lossy().contains("memfd:pageone:") || target.to_string_lossy().contains("control") {
            continue;
        }
        tried += 1;
        // Reopened for writing, as the client itself could, and as root.
        let file = std::fs::OpenOptions::new().read(true).write(true).open(entry.path()).unwrap();
        use std::os::unix::fs::FileExt;
        assert!(file.write_at(b"evil", 0).is_err(), "written");
        assert!(file.set_len(0).is_err(), "truncated");
        let punch = rustix::fs::FallocateFlags::PUNCH_HOLE | rustix::fs::FallocateFlags::KEEP_SIZE;
        assert!(rustix::fs::fallocate(&file, punch, 0, 4096).is_err(), "punched");
        assert!(kmem::memfd::map_shared(&file, 4096).is_err(), "mapped for writing");
    }
    assert!(tried > 0, "the client holds its store");
    client.go();
}

#[test]
fn a_peer_that_talks_nonsense_or_nobody_at_all_leaves_the_program_alone() {
    let dir = tempfile::tempdir().unwrap();
    let socket = dir.path().join("agent.sock");
    let start = |socket: &std::path::Path| {
        let mut command = Command::new(program("pageone-test-client"));
        command
            .args(["hold", "4096", "2"])
            .env("LD_PRELOAD", program("libpageone_agent.so"))
            .env(wire::ENV_SOCKET, socket);
        let mut client = Client::spawn(command);
        client.expect("ready");
        client
    };
    // Nobody.
    let mut client = start(&socket);
    client.go();
    // A listener whose queue is full and that never accepts.
    let listener = kmem::seqpacket::Listener::bind(&socket, 0o600).unwrap();
    let mut held = Vec::new();
    while let Ok(conn) = kmem::seqpacket::Conn::connect(&socket) {
        held.push(conn);
        if held.len() > 5000 {
            break;
        }
    }
    let mut crowded = start(&socket);
    crowded.go();
    drop(held);
    // A peer that answers nonsense to everything.
    let stop = AtomicBool::new(false);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            let mut answered = 0u32;
            while !stop.load(Relaxed) {
                while let Ok(Some(conn)) = listener.accept() {
                    answered += 1;
                    let nonsense: &[u8] = match answered % 3 {
                        0 => &[0xff; 300],
                        1 => &[],
                        _ => &[4, 1, 1, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff],
                    };
                    let _ = conn.send(nonsense, &[]);
                    std::thread::sleep(Duration::from_millis(10));
                }
                std::thread::sleep(Duration::from_millis(10));
            }
        });
        for _ in 0..10 {
            std::thread::sleep(Duration::from_millis(200));
            client.go();
            crowded.go();
        }
        stop.store(true, Relaxed);
    });
}

/// An agent that says of its pages that they hold what `other`'s hold. It speaks for this process,
/// until `stop`; `told`: lies so far.
fn lie(socket: &std::path::Path, other: i32, told: &AtomicU64, stop: &AtomicBool) {
    use kmem::uffd::{Features, Uffd};
    use wire::{Digests, MergeRun, Outcome, PageNo, RegionId, Report, RunOutcome, ToAgent, ToDaemon};
    const PAGES: usize = 4096;
    const PAGE: usize = kmem::PAGE_SIZE;
    let maps = std::fs::read_to_string(format!("/proc/{other}/maps")).unwrap();
    let mut ranges = maps.lines().filter_map(|line| line.split_once(' ')?.0.split_once('-')).map(|(start, end)| {
        let number = |text| usize::from_str_radix(text, 16).unwrap();
        number(start)..number(end)
    });
    let theirs = ranges.find(|range| range.len() == PAGES * PAGE).unwrap().start;
    let addresses: Vec<usize> = (0..PAGES).map(|page| theirs + page * PAGE).collect();
    let mut content = vec![0; PAGES * PAGE];
    assert_eq!(kmem::procmem::read_pages(other, &addresses, &mut content), Ok(PAGES));

    let mut memory = vec![0u8; (PAGES + 1) * PAGE];
    let start = memory.as_ptr().addr().next_multiple_of(PAGE);
    let skipped = start - memory.as_ptr().addr();
    for (page, number) in memory[skipped..].chunks_exact_mut(PAGE).zip(1u64..) {
        page[..8].copy_from_slice(&number.to_ne_bytes());
    }
    let uffd = Uffd::new(Features::WP | Features::WP_ASYNC | Features::WP_UNPOPULATED).unwrap();
    uffd.register_wp(kmem::range::Range::new(start, PAGES * PAGE)).unwrap();

    let conn = kmem::seqpacket::Conn::connect(socket).unwrap();
    let send = |message: ToDaemon| conn.send(&wire::encode(&message), &[]).unwrap();
    send(ToDaemon::Hello { version: wire::VERSION, domain: None, name: "liar".into(), forks: 0 });
    send(ToDaemon::RegionAdded { region: RegionId(1), start: start as u64, len: (PAGES * PAGE) as u64 });
    send(ToDaemon::Ready);
    let mut packet = vec![0; wire::MAX_MESSAGE];
    while !stop.load(Relaxed) {
        let len = match conn.recv(&mut packet, &mut Vec::new()).unwrap() {
            Some(0) => panic!("the daemon has hung up"),
            Some(len) => len,
            None => {
                std::thread::sleep(Duration::from_micros(100));
                continue;
            }
        };
        match wire::decode_to_agent(&packet[..len]).unwrap() {
            ToAgent::Digest(asked) => {
                let pages = asked.runs.iter().flat_map(|run| run.pages());
                let digest = |page: PageNo| {
                    let bytes = &content[page.index() * PAGE..][..PAGE];
                    xxhash_rust::xxh3::xxh3_64_with_seed(bytes, asked.seed)
                };
                let digests: Vec<u64> = pages.map(digest).collect();
                let count = digests.len() as u64;
                send(ToDaemon::Digests(Digests { request: asked.request, digests, cpu_ns: 0 }));
                told.fetch_add(count, Relaxed);
            }
            ToAgent::Merge(merge) => {
                // So that what it is said to share stays.
                let merged = |merge: &MergeRun| RunOutcome { run: merge.run, outcome: Outcome::Merged };
                let outcomes = merge.runs.iter().map(merged).collect();
                send(ToDaemon::Report(Report { batch: merge.batch, last: true, outcomes, ..Report::default() }));
            }
            _ => {}
        }
    }
}

/// Ends a thread also when the test fails.
struct Stop<'a>(&'a AtomicBool);

impl Drop for Stop<'_> {
    fn drop(&mut self) {
        self.0.store(true, Relaxed);
    }
}

#[test]
fn an_agent_that_lies_about_its_pages_keeps_nobody_from_merging() {
    let daemon = Daemon::start();
    let mut first = daemon.scenario(&["hold", "4096", "1", "5"]);
    first.expect("ready");
    eventually("the first client's pages are known", Duration::from_secs(30), || {
        (daemon.client(first.pid())?["pages_unshared"] == 4096).then_some(())
    });
    let (told, stop) = (AtomicU64::new(0), AtomicBool::new(false));
    let socket = daemon.dir.path().join("agent.sock");
    std::thread::scope(|scope| {
        let stop = Stop(&stop);
        let liar = scope.spawn(|| lie(&socket, first.pid(), &told, stop.0));
        eventually("lies are told", Duration::from_secs(30), || (told.load(Relaxed) >= 512).then_some(()));
        std::thread::sleep(Duration::from_secs(1));
        let mut second = daemon.scenario(&["hold", "4096", "1", "5"]);
        second.expect("ready");
        daemon.wait_merged(second.pid(), 4096);
        daemon.wait_merged(first.pid(), 4096);
        second.go();
        drop(stop);
        liar.join().unwrap();
    });
    first.go();
}
