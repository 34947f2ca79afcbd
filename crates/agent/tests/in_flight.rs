//! Direct input on its way into memory: the device writes to the physical page, whatever is mapped
//! by then. A page with such a pin must not be merged, or the program would never see what was
//! read.
//!
//! The slow device is a FUSE file of our own ([`support::slow_file`]).

#![allow(clippy::unwrap_used)] // In tests.

mod support;

use std::time::Duration;

use support::client;
use support::daemon::{Daemon, Program, Store};
use support::slow_file::SlowFile;
use wire::{Outcome, ToDaemon};

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

/// The same. With `arrives`, the input arrives so long after the merge began, and not after its
/// end.
fn merge_while_reading(sabotage: &str, arrives: Option<Duration>) -> Option<Vec<(Outcome, bool)>> {
    let file = match SlowFile::mount() {
        Ok(file) => file,
        Err(why) => {
            println!("SKIPPED: a FUSE file system cannot be mounted: {why}");
            return None;
        }
    };
    let features = kmem::uffd::Features::WP_ASYNC | kmem::uffd::Features::MOVE;
    if let Err(why) = kmem::uffd::Uffd::new(features) {
        println!("SKIPPED: {why}");
        return None;
    }
    let mut daemon = Daemon::new();
    let path = file.path.to_str().unwrap();
    let mut program =
        Program::start_with(&daemon.socket, [("PAGEONE_TEST_FILE", path), ("PAGEONE_SABOTAGE", sabotage)]);
    program.ask("map 512");
    assert_eq!(program.ask("mark"), "0");
    daemon.seen = daemon.accept();
    daemon.wait_for(|message| matches!(message, ToDaemon::RegionAdded { .. }));
    daemon.welcome();
    let store = Store::new();
    daemon.give(&store);
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
        (fates[0].1, program.ask(&format!("bytes {page}")) == "7777777777777777")
    });
    Some(fared.to_vec())
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
    if let Some(fared) = merge_while_reading("slow-take", Some(Duration::from_millis(400))) {
        assert_eq!(fared, [(Outcome::Differs, true), (Outcome::Differs, true)]);
    }
}

#[cfg(feature = "sabotage")]
#[test]
fn without_the_check_input_is_lost() {
    if let Some(fared) = merge_in_flight("no-pin-check") {
        assert_eq!(fared, [(Outcome::Merged, false), (Outcome::Merged, false)]);
    }
}
