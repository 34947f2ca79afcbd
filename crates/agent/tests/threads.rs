//! Signals, threads that end, and children that share memory, at any moment of a merge: nobody
//! hangs, and every byte is right.

#![allow(clippy::print_stdout, clippy::print_stderr, reason = "prints for who runs it")]
#![allow(clippy::unwrap_used)] // In tests.

mod support;

use support::client;
use support::daemon::{Daemon, PAGES, Program, Store, merged};
use wire::Outcome;

/// Not a test: what the client runs.
#[test]
fn client() {
    client::run_if_asked();
}

/// A client of merged pages that ends when it hangs.
fn start() -> Option<(Daemon, Program, Store)> {
    let (daemon, mut program, store) = merged()?;
    assert_eq!(program.ask("deadline 60"), "0");
    Some((daemon, program, store))
}

/// Merges some pages again and again until the program answers.
fn merge_until_answered(
    daemon: &mut Daemon,
    program: Program,
    store: &Store,
    pages: std::ops::Range<usize>,
) -> (Program, String) {
    let asked = std::thread::spawn(move || {
        let mut program = program;
        let answer = program.answer();
        (program, answer)
    });
    let runs = store.runs(pages);
    while !asked.is_finished() {
        daemon.merge(1, &runs);
        daemon.seen.clear();
    }
    let (program, answer) = asked.join().unwrap();
    (program, answer.expect("the program died"))
}

#[test]
fn children_that_share_memory_until_they_execute_leave_it_to_the_parent() {
    let Some((mut daemon, mut program, store)) = start() else { return };
    for kind in ["vfork 64 64", "spawn", "vfork 64 64"] {
        assert_eq!(program.ask(kind), "0", "{kind}");
        assert_eq!(program.ask("check 128 1900"), "0", "{kind}");
        assert_eq!(program.ask("write 500 7"), "0");
        assert_eq!(daemon.merge(1, &store.runs(500..501)), [(500, Outcome::Differs)], "windows open after {kind}");
        assert_eq!(program.ask("write 500 0"), "0");
        assert_eq!(daemon.merge(1, &store.runs(500..501)), [(500, Outcome::Merged)]);
    }
    assert_eq!(program.ask("zeros 64 64"), "0", "the child discarded them");
}

#[test]
fn fork_handlers_that_fork_do_not_hang() {
    let Some((_daemon, mut program, _store)) = start() else { return };
    assert_eq!(program.ask("forking-handlers"), "0");
    for kind in ["fork", "forks 20", "fork-handlerless"] {
        assert_eq!((program.ask(kind), program.ask("wrong")), ("0".into(), "0".into()), "{kind}");
    }
    assert_eq!(program.ask(&format!("check 0 {PAGES}")), "0");
}

#[test]
fn signal_handlers_fork_discard_and_jump_at_any_moment_of_a_merge() {
    let Some((mut daemon, mut program, store)) = start() else { return };
    program.tell("storm 0 3000");
    let (mut program, answer) = merge_until_answered(&mut daemon, program, &store, 0..512);
    println!("{answer}");
    assert_eq!(program.ask("wrong"), "0", "{answer}");
    assert_eq!(program.ask("check 16 2000"), "0");
}

#[test]
fn threads_that_end_in_a_window_are_joined() {
    let Some((mut daemon, mut program, store)) = start() else { return };
    program.tell("exiting 1024 8 3000");
    let (mut program, answer) = merge_until_answered(&mut daemon, program, &store, 1024..1152);
    println!("{answer}");
    assert_eq!(program.ask("check 0 1024"), "0");
}

#[test]
fn the_stack_of_a_thread_is_not_taken() {
    let daemon = Daemon::new();
    let mut program = Program::start_with(&daemon.socket, [("PAGEONE_LOG", "1")]);
    program.ask(&format!("map {PAGES}"));
    assert_eq!(program.ask("parked 1024"), "0");
    std::thread::sleep(std::time::Duration::from_millis(100));
    program.ask("mark 512 1024");
    assert!(program.lines().iter().any(|line| line.ends_with("not taken: the stack of a thread")));
    assert_eq!(program.ask("mark 0 512"), "0");
    assert!(program.lines().iter().any(|line| line.contains("region 1: 2 MiB")), "{:?}", program.lines());
}
