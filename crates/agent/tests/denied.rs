//! What is kept from the agent is named on standard error, once, and the program runs on.

#![allow(clippy::print_stdout, clippy::print_stderr, reason = "prints for who runs it")]
#![allow(clippy::unwrap_used)] // In tests.

mod support;

use std::os::unix::fs::PermissionsExt;
use std::time::{Duration, Instant};
use support::client;
use support::daemon::{Daemon, MERGES, PAGES, Program, kernel_can};
use support::places::{HIDDEN, NO_DEVICES};
use wire::Outcome;

/// Not a test: what the client runs.
#[test]
fn client() {
    client::run_if_asked();
}

fn can_confine() -> bool {
    let root = rustix::process::geteuid().is_root();
    if !root {
        println!("SKIPPED: only root may hide files, and become another user");
    }
    root && kernel_can(MERGES)
}

/// A daemon that other users may reach, and a program from which these files are kept; it writes no
/// log.
fn confined(hidden: usize) -> (Daemon, Program) {
    let daemon = Daemon::new();
    std::fs::set_permissions(daemon.socket.parent().unwrap(), std::fs::Permissions::from_mode(0o755)).unwrap();
    let mut program = Program::start(&daemon.socket, None);
    program.ask(&format!("map {PAGES}"));
    assert_eq!(program.ask(&format!("confine {hidden}")), "0");
    (daemon, program)
}

/// The one line that the agent writes, once it is there.
fn sentence(program: &mut Program) -> String {
    let end = Instant::now() + Duration::from_secs(60);
    let told = |program: &Program| -> Vec<String> {
        program.lines().into_iter().filter(|line| line.starts_with("pageone-agent[")).collect()
    };
    while told(program).is_empty() {
        assert!(Instant::now() < end, "the agent says nothing");
        std::thread::sleep(Duration::from_millis(10));
    }
    let told = told(program);
    assert_eq!(told.len(), 1, "{told:?}");
    told[0].clone()
}

#[test]
fn what_is_denied_is_named_once_with_the_remedy() {
    if !can_confine() {
        return;
    }
    // `vm.unprivileged_userfaultfd` lets everybody have one without the device.
    let by_device = std::fs::read_to_string("/proc/sys/vm/unprivileged_userfaultfd").is_ok_and(|set| set.trim() == "0");
    let mut cases = vec![(1 << 0, HIDDEN[0], "is denied by its mode"), (1 << 1, HIDDEN[1], "is denied by its mode")];
    if by_device {
        cases.extend([(1 << 3, HIDDEN[3], "a udev rule"), (NO_DEVICES, HIDDEN[3], "cgroup_device_acl")]);
    } else {
        println!("SKIPPED: vm.unprivileged_userfaultfd is not 0, so /dev/userfaultfd is not needed");
    }
    for (hidden, file, remedy) in cases {
        println!("{file}");
        let (mut daemon, mut program) = confined(hidden);
        for _ in 0..3 {
            program.ask("mark");
            program.ask("mark 0 1024");
        }
        let told = sentence(&mut program);
        assert!(told.contains(&format!("memory is not merged: {file} ")) && told.contains(remedy), "{told}");
        std::thread::sleep(Duration::from_millis(50));
        sentence(&mut program);
        assert_eq!(program.ask(&format!("check 0 {PAGES}")), "0");
        daemon.close();
    }
}

/// As QEMU's `-sandbox`, or systemd's `SystemCallFilter=`, that leaves out what the agent needs.
#[test]
fn a_filter_of_system_calls_is_named_once() {
    if !can_confine() {
        return;
    }
    for call in [libc::SYS_ioctl, libc::SYS_socketpair, libc::SYS_clone3, libc::SYS_openat] {
        let (mut daemon, mut program) = confined(0);
        assert_eq!(program.ask(&format!("refuse {call}")), "0");
        for _ in 0..3 {
            program.ask("mark");
        }
        let told = sentence(&mut program);
        println!("{told}");
        let is_named = told.contains("memory is not merged: ") && told.contains("sandbox");
        assert!(is_named && told.contains("a filter of system calls"), "{call}: {told}");
        assert_eq!(program.ask(&format!("check 0 {PAGES}")), "0");
        daemon.close();
    }
}

#[test]
fn a_daemon_that_may_not_be_reached_is_named_once() {
    if !can_confine() {
        return;
    }
    let (daemon, mut program) = confined(0);
    std::fs::set_permissions(&daemon.socket, std::fs::Permissions::from_mode(0o600)).unwrap();
    assert_eq!(program.ask("mark"), "0");
    let told = sentence(&mut program);
    assert!(
        told.contains(&format!("{} is denied by its mode; uid 65534 needs access", daemon.socket.display())),
        "{told}"
    );
    // It has tried again by then.
    std::thread::sleep(Duration::from_millis(700));
    sentence(&mut program);
}

#[test]
fn a_limit_of_mappings_that_is_hidden_is_taken_for_the_default() {
    if !can_confine() {
        return;
    }
    let (mut daemon, mut program) = confined(1 << 2);
    let start: u64 = program.ask("start").parse().unwrap();
    assert_eq!(program.ask("mark"), "0");
    let store = daemon.adopt(start, PAGES);
    let merged = daemon.merge(1, &store.runs(0..PAGES));
    assert!(merged.iter().all(|&(_, outcome)| outcome == Outcome::Merged), "{merged:?}");
    let told = sentence(&mut program);
    assert!(told.contains("vm.max_map_count is taken for its default") && told.contains(HIDDEN[2]), "{told}");
}

#[test]
fn a_program_that_may_not_look_at_itself_is_told_apart() {
    if !can_confine() {
        return;
    }
    let daemon = Daemon::new();
    let mut program = Program::start(&daemon.socket, None);
    program.ask(&format!("map {PAGES}"));
    assert_eq!(program.ask("become 65534"), "0");
    program.ask("mark");
    let told = sentence(&mut program);
    assert!(told.contains("PR_SET_DUMPABLE") && told.contains("gives up privileges"), "{told}");
}

#[test]
fn where_nothing_is_denied_nothing_is_said() {
    if !can_confine() {
        return;
    }
    let (mut daemon, mut program) = confined(0);
    let start: u64 = program.ask("start").parse().unwrap();
    assert_eq!(program.ask("mark"), "0");
    let store = daemon.adopt(start, PAGES);
    daemon.merge_all(&store);
    assert_eq!(program.lines(), Vec::<String>::new());
}
