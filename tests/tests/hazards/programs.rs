//! What programs do with their memory, with signals and with other programs.

use std::process::Stdio;
use std::time::{Duration, Instant};

use e2e::{Client, Daemon, eventually, program, skipped};

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
    // Its agent tells of that in its own time.
    eventually("the daemon knows what is left", Duration::from_secs(60), || {
        (daemon.client(client.pid())?["region_bytes"] == (4096 - 256 - 300 - 128) * 4096).then_some(())
    });
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
    // The page that it shared with the daemon goes when the connection has ended.
    eventually("nothing of the daemon's is mapped", Duration::from_secs(5), || {
        (!maps(client.pid()).contains("memfd:pageone:")).then_some(())
    });
    let plain_maps = maps(client.pid()).lines().count();
    assert!(plain_maps < 60, "{plain_maps} mappings are left: {}", maps(client.pid()));
    client.go();
    eventually("it is no client", Duration::from_secs(60), || daemon.client(client.pid()).is_none().then_some(()));
    let out = daemon.pageone(&["detach", &client.pid().to_string()]).output().unwrap();
    assert_eq!(out.status.code(), Some(4), "a second time it is no client");
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
    // timeout(1) ends its child by an alarm and says so by its exit code; sh starts the client as
    // its child.
    let mut command = daemon.run(&[]);
    let client = program("pageone-test-client");
    command.args(["timeout", "2", "sh", "-c"]).arg(format!("{} hold 4096 2; exit 7", client.display()));
    let start = Instant::now();
    let mut wrapped = command.stdin(Stdio::piped()).stdout(Stdio::null()).spawn().unwrap();
    // Held open, or the client would end by itself.
    let _input = wrapped.stdin.take();
    assert_eq!(wrapped.wait().unwrap().code(), Some(124));
    assert!(start.elapsed() < Duration::from_secs(60));
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

#[test]
fn guard_pages_read_as_zeros_or_where_the_kernel_has_none_change_nothing() {
    // Copies that are as young as this are left in place when their protection changes.
    let daemon = Daemon::with_settings(&["--merge-period", "0.1"], "direct_io_seconds = 300\n");
    let mut client = daemon.scenario(&["guards"]);
    client.expect("ready");
    daemon.wait_merged(client.pid(), 1024);
    client.go();
    eventually("what was retained is told", Duration::from_secs(60), || {
        (daemon.client(client.pid())?["pages_retained_total"].as_u64()? > 0).then_some(())
    });
}
