//! Programs that are limited or limit themselves, and memory that must stay the kernel's or the
//! agent's.

#![allow(clippy::print_stdout, clippy::print_stderr, reason = "prints for who runs it")]
#![allow(clippy::unwrap_used)] // In tests.

mod support;

use support::client;
use support::daemon::{Daemon, PAGES, Program, merged};
use wire::{Outcome, ToAgent, ToDaemon};

/// Not a test: what the client runs.
#[test]
fn client() {
    client::run_if_asked();
}

/// Every guarded call; each may fail, and the memory is right.
fn use_memory(program: &mut Program, limit: &str) {
    if program.ask(&format!("advise 96 48 {}", libc::MADV_DONTNEED)) == "0" {
        assert_eq!(program.ask("zeros 96 48"), "0", "{limit}");
    } else {
        assert_eq!(program.ask("check 96 48"), "0", "{limit}");
    }
    program.ask("protect 200 8 1");
    assert_eq!(program.ask("check 200 8"), "0", "{limit}");
    program.ask("fork-raw-here 400 1600");
    assert_eq!(program.ask("raw-unmap 320 8"), "0", "{limit}");
    assert_eq!(program.ask("unmap 300 8"), "0", "{limit}");
    let moved = program.ask("move 1600 64 128 1").parse::<isize>();
    if let Err(_) | Ok(1..) = moved {
        program.ask("check 1664 8");
    }
    assert_eq!(program.ask("check 400 1200"), "0", "{limit}");
    assert_eq!(program.ask("write 500 7"), "0", "{limit}");
    assert_eq!(program.ask("write 500 0"), "0", "{limit}");
}

#[test]
fn limits_and_filters_that_come_later_leave_memory_right() {
    let calls = [
        libc::SYS_ioctl,
        libc::SYS_userfaultfd,
        libc::SYS_mremap,
        libc::SYS_process_vm_readv,
        libc::SYS_openat,
        libc::SYS_prctl,
        libc::SYS_sendmsg,
        libc::SYS_fstat,
    ];
    let mut limits: Vec<String> = calls.iter().map(|call| format!("refuse {call}")).collect();
    limits.push(format!("limit {} 0", libc::RLIMIT_NOFILE));
    limits.push(format!("limit {} {}", libc::RLIMIT_AS, 64 << 20));
    limits.push(format!("limit {} 0", libc::RLIMIT_MEMLOCK));
    limits.push(format!("limit {} 0", libc::RLIMIT_NPROC));
    for limit in limits {
        println!("{limit}");
        let Some((mut daemon, mut program, store)) = merged() else { return };
        assert_eq!(program.ask(&limit), "0");
        let runs = store.runs(1000..1100);
        daemon.try_send(&ToAgent::Merge(wire::Merge { batch: 99, region: wire::RegionId(1), runs, calm: false }));
        use_memory(&mut program, &limit);
        daemon.try_send(&ToAgent::Detach);
        std::thread::sleep(std::time::Duration::from_millis(100));
        assert_eq!(program.ask("check 400 1200"), "0", "{limit}");
    }
}

#[test]
fn managed_memory_never_reaches_the_kernels_ksm() {
    let Some((mut daemon, mut program, store)) = merged() else { return };
    assert_eq!(program.ask("mark 10 20"), "0");
    assert_eq!(program.ask(&format!("mark 0 {PAGES}")), "0");
    assert_eq!(program.ask("ksm-has"), "0");
    assert_eq!(program.ask("ksm-all 0"), "0");
    assert_eq!(program.ask("ksm-has"), "0");
    let merged = daemon.merge(1, &store.runs(0..100));
    assert!(merged.iter().all(|&(_, outcome)| outcome == Outcome::Merged));
    // Past the C library: management ends.
    if program.ask("ksm-all 1") == "0" {
        let runs = store.runs(0..8);
        daemon.try_send(&ToAgent::Merge(wire::Merge { batch: 99, region: wire::RegionId(1), runs, calm: false }));
        daemon.wait_for_close();
    }
    assert_eq!(program.ask(&format!("check 0 {PAGES}")), "0");
}

/// A program that did this before it marked its memory.
fn start_unfit(before: &str) -> (Daemon, Program) {
    let daemon = Daemon::new();
    let mut program = Program::start_with(&daemon.socket, [("PAGEONE_LOG", "1")]);
    program.ask(&format!("map {PAGES}"));
    assert_eq!(program.ask(before), "0", "{before}");
    (daemon, program)
}

#[test]
fn programs_that_cannot_be_clients_are_left_as_they_are() {
    let mut unfit: Vec<String> = vec!["ksm-all 1".into()];
    unfit.push(format!("limit {} {}", libc::RLIMIT_AS, 64 << 20));
    unfit.push(format!("limit {} 3", libc::RLIMIT_NOFILE));
    let calls = [libc::SYS_ioctl, libc::SYS_clone3, libc::SYS_socketpair];
    unfit.extend(calls.iter().map(|call| format!("refuse {call}")));
    for before in unfit {
        println!("{before}");
        let (mut daemon, mut program) = start_unfit(&before);
        let as_it_was = |program: &Program| [program.status("Threads:"), program.descriptors()];
        let was = as_it_was(&program);
        // The kernel's own answer: memory that is not the agent's is left to its KSM.
        program.ask("mark");
        program.ask("mark");
        // A thread that had begun ends in its own time.
        let end = std::time::Instant::now() + std::time::Duration::from_secs(60);
        while as_it_was(&program) != was && std::time::Instant::now() < end {
            std::thread::sleep(std::time::Duration::from_millis(10));
        }
        assert_eq!(as_it_was(&program), was, "{before}");
        assert!(!daemon.is_wanted(), "{before}");
        assert_eq!(program.ask(&format!("check 0 {PAGES}")), "0", "{before}");
        assert_eq!(program.lines().iter().filter(|line| line.contains("left to the kernel: ")).count(), 1, "{before}");
    }
}

#[test]
fn memory_of_malloc_is_not_taken() {
    let Some((mut daemon, mut program, store)) = merged() else { return };
    for _ in 0..20 {
        assert_eq!(program.ask("mark-malloc"), "0");
    }
    daemon.merge(1, &store.runs(0..8));
    let is_added = |message: &ToDaemon| matches!(message, ToDaemon::RegionAdded { region: wire::RegionId(2..), .. });
    assert!(!daemon.seen.iter().any(is_added), "{:?}", daemon.seen);
}
