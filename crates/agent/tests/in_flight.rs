//! Direct input on its way into memory: the device writes to the physical page, whatever is mapped
//! by then. A page with such a pin must not be merged, or the program would never see what was
//! read.
//!
//! The slow device is a FUSE file of our own ([`support::slow_file`]).

#![allow(clippy::print_stdout, clippy::print_stderr, reason = "prints for who runs it")]
#![allow(clippy::unwrap_used)] // In tests.

mod support;

use std::time::Duration;

use kmem::pagemap::{Categories, Pagemap, Query};
use kmem::range::Range;
use support::client;
use support::daemon::{Daemon, MOVES, Program, Store, kernel_can};
use support::slow_file::SlowFile;
use wire::Outcome;

/// Not a test: what the client runs.
#[test]
fn client() {
    client::run_if_asked();
}

/// Merges page 20 with its pattern and page 0 with zeros while input for each is on its way; how
/// they fared, and whether the program got what was read.
fn merge_in_flight(sabotage: &str) -> Option<Vec<(Outcome, bool)>> {
    merge_while_reading(sabotage, None)
}

/// A client of 512 pages, a file that it may read, and a store.
fn start(sabotage: &str) -> Option<(SlowFile, Daemon, Program, Store)> {
    let file = match SlowFile::mount() {
        Ok(file) => file,
        Err(why) => {
            println!("SKIPPED: a FUSE file system cannot be mounted: {why}");
            return None;
        }
    };
    if !kernel_can(MOVES) {
        return None;
    }
    let mut daemon = Daemon::new();
    let path = file.path.to_str().unwrap();
    let mut program =
        Program::start_with(&daemon.socket, [("PAGEONE_TEST_FILE", path), ("PAGEONE_SABOTAGE", sabotage)]);
    let store = daemon.manage(&mut program, 512);
    Some((file, daemon, program, store))
}

/// The same. With `arrives`, the input arrives so long after the merge began, and not after its
/// end.
fn merge_while_reading(sabotage: &str, arrives: Option<Duration>) -> Option<Vec<(Outcome, bool)>> {
    let (file, mut daemon, mut program, store) = start(sabotage)?;
    assert_eq!(support::pattern_of(0), 0);
    let fared = [20, 0].map(|page| {
        program.ask(&format!("read {page}"));
        let request = file.serve_until_read();
        let fates = std::thread::scope(|scope| {
            if let Some(pause) = arrives {
                let file = &file;
                scope.spawn(move || {
                    std::thread::sleep(pause);
                    file.answer(request, 0, &[0x77; 4096]);
                });
            }
            daemon.merge(1, &store.runs(page..page + 1))
        });
        if arrives.is_none() {
            file.answer(request, 0, &[0x77; 4096]);
        }
        assert_eq!(program.ask("read-done"), "4096");
        if arrives.is_some() {
            assert!(is_noted_as_written(&mut program, page), "page {page} was written");
        }
        (fates[0].1, program.ask(&format!("bytes {page}")) == "7777777777777777")
    });
    Some(fared.to_vec())
}

/// Whether the next scan reports the page.
fn is_noted_as_written(program: &mut Program, page: usize) -> bool {
    let start = program.ask("start").parse::<usize>().unwrap() + page * support::PAGE;
    let query = Query { required: Categories::WRITTEN, ..Query::default() };
    let mut found = false;
    let pagemap = Pagemap::open(program.pid()).unwrap();
    pagemap.scan(Range::new(start, support::PAGE), &query, &mut |_| found = true).unwrap();
    found
}

/// While page 20 is away from its place the program does something past the C library. With `input`
/// the page equalled its target, and changed just before it was taken. Returns the page's outcome,
/// what the program's call returned, and the program. It is tried until the outcome fits: a thread
/// that gets no CPU for a second comes too late.
#[cfg(feature = "sabotage")]
fn meanwhile(command: &str, input: bool, fits: Outcome) -> Option<(Outcome, String, Program)> {
    let mut tries = (0..10).map(|_| try_meanwhile(command, input));
    tries.find(|tried| tried.as_ref().is_none_or(|(outcome, ..)| *outcome == fits)).expect("some try comes in time")
}

#[cfg(feature = "sabotage")]
fn try_meanwhile(command: &str, input: bool) -> Option<(Outcome, String, Program)> {
    let (file, mut daemon, mut program, store) = start("slow-take")?;
    let request = input.then(|| {
        program.ask("read 20");
        file.serve_until_read()
    });
    let outcomes = std::thread::scope(|scope| {
        scope.spawn(|| {
            std::thread::sleep(Duration::from_millis(400));
            request.into_iter().for_each(|request| file.answer(request, 0, &[0x77; 4096]));
            std::thread::sleep(Duration::from_millis(1100));
            program.tell(command);
        });
        daemon.merge(1, &store.runs(20..21))
    });
    let answer = program.answer().expect("the program goes on");
    if input {
        assert_eq!(program.ask("read-done"), "4096");
    }
    assert_eq!((program.ask("check 0 20"), program.ask("check 21 491")), ("0".into(), "0".into()));
    Some((outcomes[0].1, answer, program))
}

#[cfg(feature = "sabotage")]
#[test]
fn a_page_whose_place_is_unmapped_before_it_can_be_put_back_is_gone() {
    let Some((outcome, unmapped, mut program)) = meanwhile("raw-unmap 20 1", true, Outcome::Gone) else { return };
    assert_eq!((outcome, unmapped.as_str()), (Outcome::Gone, "0"));
    assert_eq!((program.ask("fresh 20 1"), program.ask("zeros 20 1")), ("0".into(), "0".into()));
}

#[cfg(feature = "sabotage")]
#[test]
fn a_page_whose_place_is_locked_or_protected_before_it_can_be_put_back_keeps_its_bytes() {
    for command in ["raw-lock 20 1", "raw-protect 20 1 1", "raw-protect 20 1 0"] {
        let Some((outcome, done, mut program)) = meanwhile(command, true, Outcome::Differs) else { return };
        assert_eq!((outcome, done.as_str()), (Outcome::Differs, "0"), "{command}");
        assert_eq!(program.ask("raw-protect 20 1 3"), "0");
        assert_eq!(program.ask("bytes 20"), "7777777777777777", "{command}");
    }
}

#[cfg(feature = "sabotage")]
#[test]
fn a_page_whose_frame_cannot_be_read_any_more_when_it_was_taken_is_put_back() {
    // The mapping of the frames that the agent reads. A frame whose memory failed ends it likewise.
    let Some((outcome, hidden, mut program)) = meanwhile("hide-frames", false, Outcome::Unreadable) else { return };
    assert_eq!((outcome, hidden.as_str()), (Outcome::Unreadable, "0"));
    assert_eq!(program.ask("check 20 1"), "0");
}

#[test]
fn pages_with_direct_input_on_its_way_are_not_merged() {
    if let Some(fared) = merge_in_flight("") {
        assert_eq!(fared, [(Outcome::Failed, true), (Outcome::Failed, true)]);
    }
}

/// The pages equal their targets when they are compared, and are not pinned any more when they are
/// taken: in between the input arrives.
#[cfg(feature = "sabotage")]
#[test]
fn input_that_arrives_between_the_comparison_and_the_taking_of_its_page_is_kept() {
    // What comes too late, where this thread gets no CPU for so long, finds its page pinned.
    let arrives = (0..10).any(|_| {
        let Some(fared) = merge_while_reading("slow-take", Some(Duration::from_millis(400))) else { return true };
        assert!(fared.iter().all(|(_, is_kept)| *is_kept), "{fared:?}");
        fared.iter().all(|(outcome, _)| *outcome == Outcome::Differs)
    });
    assert!(arrives, "no input came in between");
}

#[cfg(feature = "sabotage")]
#[test]
fn without_the_check_input_is_lost() {
    if let Some(fared) = merge_in_flight("no-pin-check") {
        assert_eq!(fared, [(Outcome::Merged, false), (Outcome::Merged, false)]);
    }
}
