//! Programs that fork in every way: children have the right memory, and nobody hangs.

#![allow(clippy::unwrap_used)] // In tests.

mod support;

use std::time::{Duration, Instant};
use support::client;
use support::daemon::{Daemon, Program, Store};
use wire::{Outcome, ToDaemon};

const PAGES: usize = 2048;

/// Not a test: what the client runs.
#[test]
fn client() {
    client::run_if_asked();
}

/// A client that obeyed these commands, then marked its memory.
fn start(before: &[&str]) -> Option<(Daemon, Program, Store)> {
    if let Err(why) = kmem::uffd::Uffd::new(kmem::uffd::Features::WP | kmem::uffd::Features::WP_ASYNC) {
        println!("SKIPPED: {why}");
        return None;
    }
    let mut daemon = Daemon::new();
    let mut program = Program::start(&daemon.socket, None);
    before.iter().for_each(|command| assert_eq!(program.ask(command), "0", "{command}"));
    program.ask(&format!("map {PAGES}"));
    assert_eq!(program.ask("mark"), "0");
    daemon.seen = daemon.accept();
    daemon.welcome();
    let store = Store::new();
    daemon.give(&store);
    Some((daemon, program, store))
}

/// Merges everything of the region that the client has marked first.
fn merge_all(daemon: &mut Daemon, store: &Store) {
    let outcomes = daemon.merge(1, &store.runs(0..PAGES));
    assert!(outcomes.iter().all(|&(_, outcome)| outcome == Outcome::Merged));
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
    let Some((mut daemon, mut program, store)) = start(&[]) else { return };
    merge_all(&mut daemon, &store);
    let files = program.ask("files");
    for kind in ["fork", "fork-handlerless", "fork-cloned", "fork-raw", "fork"] {
        let before = forks(&daemon);
        assert_eq!(program.ask(kind), "0", "{kind}");
        assert_eq!(program.ask("files"), files, "the parent after {kind}");
        assert_eq!(program.ask(&format!("check 0 {PAGES}")), "0");
        let end = Instant::now() + Duration::from_secs(5);
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
fn an_allocator_that_holds_its_lock_across_a_fork_does_not_hang() {
    let Some((_daemon, mut program, _store)) = start(&["allocator", "deadline 20"]) else { return };
    assert_eq!(program.ask("forks 60"), "0");
}

#[test]
fn without_fork_events_a_client_counts_as_forked_from_the_start() {
    let Some((mut daemon, mut program, store)) = start(&["drop-ptrace"]) else { return };
    let end = Instant::now() + Duration::from_secs(5);
    while forks(&daemon) == 0 {
        assert!(Instant::now() < end, "its children would be unknown");
        std::thread::sleep(Duration::from_millis(1));
    }
    merge_all(&mut daemon, &store);
    assert_eq!(program.ask("fork-raw"), "0");
    assert_eq!(program.ask(&format!("check 0 {PAGES}")), "0");
}
