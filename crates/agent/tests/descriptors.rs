//! Programs that close or replace descriptors that they did not open: nothing is written to their
//! files, and their memory stays right.

#![allow(clippy::print_stdout, clippy::print_stderr, reason = "prints for who runs it")]
#![allow(clippy::unwrap_used)] // In tests.

mod support;

use support::client;
use support::daemon::{Program, Store, merged};
use wire::{Outcome, ToAgent, ToDaemon};

/// Not a test: what the client runs.
#[test]
fn client() {
    client::run_if_asked();
}

/// The program uses its memory in every guarded way.
fn use_memory(program: &mut Program) {
    assert_eq!(program.ask("fork-raw"), "0");
    assert_eq!(program.ask(&format!("advise 100 50 {}", libc::MADV_DONTNEED)), "0");
    assert_eq!(program.ask("zeros 100 50"), "0");
    assert_eq!(program.ask("protect 200 8 1"), "0");
    assert_eq!(program.ask("unmap 300 8"), "0");
    assert_eq!(program.ask("raw-unmap 320 8"), "0");
    assert_eq!(program.ask("check 400 1000"), "0");
    assert_eq!(program.ask("move 1600 64 128 1").parse::<isize>().map(drop), Ok(()));
}

#[test]
fn a_program_that_closes_everything_goes_on_merging() {
    for way in 0..3 {
        let Some((mut daemon, mut program, store)) = merged() else { return };
        assert_ne!(program.ask(&format!("close-all {way}")), "0", "the agent has its descriptors");
        assert_eq!(program.ask("write 500 7"), "0");
        assert_eq!(daemon.merge(1, &store.runs(500..501)), [(500, Outcome::Differs)]);
        assert_eq!(program.ask("write 500 0"), "0");
        assert_eq!(daemon.merge(1, &store.runs(500..501)), [(500, Outcome::Merged)]);
        assert_eq!(program.ask("own-files"), "0");
        assert_eq!(program.ask("check 0 100"), "0");
        assert_eq!(program.ask(&format!("advise 100 50 {}", libc::MADV_DONTNEED)), "0");
        daemon.wait_for(|message| matches!(message, ToDaemon::Discarded { .. }));
    }
}

#[test]
fn a_program_that_takes_the_descriptors_ends_management_and_keeps_its_files_and_memory() {
    let ways = ["close-all 3", "replace 0", "replace 1", "replace 2"];
    for way in ways {
        println!("{way}");
        let Some((mut daemon, mut program, store)) = merged() else { return };
        program.ask(way);
        // Whatever the agent does next, it does not do it to a file of the program.
        let runs = store.runs(500..600);
        daemon.try_send(&ToAgent::Merge(wire::Merge { batch: 99, region: wire::RegionId(1), runs, calm: false }));
        use_memory(&mut program);
        std::thread::sleep(std::time::Duration::from_millis(50));
        assert_eq!(program.ask("own-files"), "0", "{way}");
        daemon.wait_for_close();
    }
}

#[test]
fn the_daemon_is_told_of_a_segment_that_the_limit_of_open_files_leaves_out() {
    use rustix::process::{Pid, Resource, Rlimit, getrlimit, prlimit};
    let Some((mut daemon, mut program, store)) = merged() else { return };
    // A quarter of it is for segments, of which the program has one.
    let few = Rlimit { current: Some(64), ..getrlimit(Resource::Nofile) };
    let before = prlimit(Pid::from_raw(program.pid()), Resource::Nofile, few).unwrap();
    (0..16).for_each(|_| daemon.give(&Store::new()));
    daemon.wait_for(|message| matches!(message, ToDaemon::SegmentLeftOut { most: 16, .. }));
    prlimit(Pid::from_raw(program.pid()), Resource::Nofile, before).unwrap();
    assert_eq!(program.ask("write 500 0"), "0");
    assert_eq!(daemon.merge(1, &store.runs(500..501)), [(500, Outcome::Merged)]);
}
