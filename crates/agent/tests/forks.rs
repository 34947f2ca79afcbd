//! Programs that fork in every way: children have the right memory, and nobody hangs.

#![allow(clippy::unwrap_used)] // In tests.

mod support;

use std::time::{Duration, Instant};
use support::client;
use support::daemon::{Daemon, PAGES, managed};
use wire::{Outcome, ToDaemon};

/// Not a test: what the client runs.
#[test]
fn client() {
    client::run_if_asked();
}

/// Forks that were counted before this connection, and since.
fn forks(daemon: &Daemon) -> u64 {
    let before = daemon.seen.iter().find_map(|message| match message {
        ToDaemon::Hello { forks, .. } => Some(*forks),
        _ => None,
    });
    before.unwrap_or(0)
        + daemon.control.as_ref().unwrap().atomic_u64(wire::control::FORKS).load(std::sync::atomic::Ordering::SeqCst)
}

#[test]
fn children_of_every_kind_have_their_memory_and_leave_the_parents_alone() {
    let Some((mut daemon, mut program, store)) = managed(&[]) else { return };
    daemon.merge_all(&store);
    let files = program.ask("files");
    for kind in ["fork", "fork-handlerless", "fork-cloned", "fork-raw", "fork"] {
        let before = forks(&daemon);
        assert_eq!(program.ask(kind), "0", "{kind}");
        assert_eq!(program.ask("files"), files, "the parent after {kind}");
        assert_eq!(program.ask(&format!("check 0 {PAGES}")), "0");
        let end = Instant::now() + Duration::from_secs(60);
        while forks(&daemon) == before {
            assert!(Instant::now() < end, "{kind} is not counted");
            std::thread::sleep(Duration::from_millis(1));
        }
        assert_eq!(program.ask("write 100 7"), "0");
        assert_eq!(daemon.merge(1, &store.runs(100..101)), [(100, Outcome::Differs)], "windows open after {kind}");
        assert_eq!(program.ask("write 100 0"), "0");
        assert_eq!(daemon.merge(1, &store.runs(100..101)), [(100, Outcome::Merged)]);
    }
}

#[test]
fn nothing_merges_while_a_process_that_is_no_thread_shares_the_memory() {
    let Some((mut daemon, mut program, store)) = managed(&[]) else { return };
    daemon.merge_all(&store);
    assert_eq!(program.ask("write 100 0"), "0");
    assert_eq!(program.ask("leave-process 0 1"), "0");
    assert_eq!(daemon.merge(1, &store.runs(100..101)), [(100, Outcome::Failed)]);
    // It ends after some seconds, and nobody waits for it.
    let end = Instant::now() + Duration::from_secs(60);
    while daemon.merge(1, &store.runs(100..101)) == [(100, Outcome::Failed)] {
        assert!(Instant::now() < end, "it is not found to have ended");
        std::thread::sleep(Duration::from_millis(50));
    }
    assert_eq!(daemon.merge(1, &store.runs(100..101)), [(100, Outcome::Merged)]);
    assert_eq!(program.ask(&format!("check 0 {PAGES}")), "0");
}

/// The store's descriptor comes just before the program forks; often the agent has not seen it.
#[test]
fn a_child_does_not_inherit_a_descriptor_that_has_just_come() {
    for _ in 0..30 {
        let Some((_daemon, mut program, _store)) = managed(&[]) else { return };
        assert_eq!(program.ask("fork"), "0");
    }
}

#[test]
fn an_allocator_that_holds_its_lock_across_a_fork_does_not_hang() {
    let Some((_daemon, mut program, _store)) = managed(&["allocator", "deadline 60"]) else { return };
    assert_eq!(program.ask("forks 60"), "0");
}

#[test]
fn without_fork_events_a_client_counts_as_forked_from_the_start() {
    let Some((mut daemon, mut program, store)) = managed(&["drop-ptrace"]) else { return };
    let end = Instant::now() + Duration::from_secs(60);
    while forks(&daemon) == 0 {
        assert!(Instant::now() < end, "its children would be unknown");
        std::thread::sleep(Duration::from_millis(1));
    }
    daemon.merge_all(&store);
    assert_eq!(program.ask("fork-raw"), "0");
    assert_eq!(program.ask(&format!("check 0 {PAGES}")), "0");
}
