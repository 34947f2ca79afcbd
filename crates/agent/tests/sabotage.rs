//! With a guard switched off the program must come to harm; otherwise the other tests prove
//! nothing. Run with `--features sabotage`.
#![cfg(feature = "sabotage")]
#![allow(clippy::unwrap_used)] // In tests.

mod support;

use std::os::unix::fs::FileExt;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::time::{Duration, Instant};

use support::client;
use support::daemon::{Daemon, MOVES, Program, Store, kernel_can};
use wire::{MergeRun, Outcome, PageNo, Run, Target, ToAgent, ToDaemon};

/// Not a test: what the client runs.
#[test]
fn client() {
    client::run_if_asked();
}

fn start(pages: usize, sabotage: &str) -> (Daemon, Program, Store) {
    let (daemon, program, store, _) = start_at(pages, sabotage);
    (daemon, program, store)
}

/// The same, and where the program's pages are.
fn start_at(pages: usize, sabotage: &str) -> (Daemon, Program, Store, Pages) {
    let mut daemon = Daemon::new();
    let mut program = Program::start(&daemon.socket, Some(sabotage));
    let start: u64 = program.ask(&format!("map {pages}")).parse().unwrap();
    assert_eq!(program.ask("mark"), "0");
    let store = daemon.adopt(start, pages);
    let pages = Pages { pid: program.pid(), start: start as usize };
    (daemon, program, store, pages)
}

/// The pages of a program.
#[derive(Clone, Copy)]
struct Pages {
    pid: i32,
    start: usize,
}

/// What a page is at the moment.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Now {
    /// The program's own memory.
    Own,
    /// Taken away, or not given back yet.
    Gone,
    /// A frame of the store.
    Frame,
}

impl Pages {
    fn now(self, page: usize) -> Now {
        let address = self.start + page * support::PAGE;
        let mut is_frame = false;
        let maps = kmem::procfs::for_each_map(Some(self.pid), |line| {
            is_frame |= line.path.contains("memfd:") && line.range.contains(&kmem::Range::new(address, 1));
        });
        maps.unwrap();
        let mut entry = [0; 8];
        let pagemap = std::fs::File::open(format!("/proc/{}/pagemap", self.pid)).unwrap();
        pagemap.read_exact_at(&mut entry, (address / support::PAGE * 8) as u64).unwrap();
        // Present, or swapped out (Documentation/admin-guide/mm/pagemap.rst).
        let is_there = u64::from_ne_bytes(entry) >> 62 != 0;
        if is_frame {
            Now::Frame
        } else if is_there {
            Now::Own
        } else {
            Now::Gone
        }
    }
}

/// Does it until it comes out so. What is to happen within a second may come too late where this
/// thread, or the agent, gets no CPU for as long.
fn sometimes(what: &str, comes_out: impl Fn() -> bool) {
    assert!((0..10).any(|_| comes_out()), "never: {what}");
}

/// Waits until something holds.
fn until(what: &str, holds: impl Fn() -> bool) {
    let begin = Instant::now();
    while !holds() {
        assert!(begin.elapsed() < Duration::from_secs(60), "not within a minute: {what}");
        std::thread::sleep(Duration::from_millis(1));
    }
}

#[test]
fn without_protection_writes_are_lost() {
    let pages = 16_384;
    let (mut daemon, mut program, store) = start(pages, "no-protect");
    program.ask("start-writers");
    for _ in 0..200 {
        // A writer that missed its write has panicked, and the program with it: perhaps before it
        // has reported.
        if catch_unwind(AssertUnwindSafe(|| daemon.merge(1, &store.runs(0..pages)))).is_err() {
            until("the program has died", || has_died(&program));
        }
        if has_died(&program) {
            return;
        }
    }
    program.tell("stop-writers");
    if program.answer().is_some() {
        assert_ne!(program.ask(&format!("check 0 {pages}")), "0", "nothing was lost");
    }
}

fn has_died(program: &Program) -> bool {
    !std::path::Path::new(&format!("/proc/{}/fd/0", program.pid())).exists()
}

#[test]
fn without_its_guard_discarding_brings_frames_back() {
    let (mut daemon, mut program, store) = start(1024, "no-dontneed-guard");
    daemon.merge(1, &store.runs(0..1024));
    assert_eq!(program.ask(&format!("advise 100 100 {}", libc::MADV_DONTNEED)), "0");
    assert_ne!(program.ask("zeros 100 100"), "0");
}

#[test]
fn without_its_guard_unmapped_memory_is_merged() {
    let (mut daemon, mut program, _store) = start(1024, "no-unmap-guard");
    assert_eq!(program.ask("unmap 100 100"), "0");
    assert_eq!(program.ask("fresh 100 100"), "0");
    assert_eq!(program.ask("zeros 100 100"), "0");
    // The program never marked what is there now.
    let fates = daemon.merge(1, &[MergeRun { run: Run::new(PageNo(100), 100), target: Target::Zero }]);
    assert!(fates.iter().any(|&(_, fate)| fate == Outcome::Merged), "the agent did not believe in the memory");
}

#[test]
fn without_unmerging_growing_fails() {
    let (mut daemon, mut program, store) = start(1024, "no-mremap-unmerge");
    daemon.merge(1, &store.runs(0..1024));
    assert_eq!(program.ask(&format!("move 100 64 128 {}", libc::MREMAP_MAYMOVE)), libc::EFAULT.to_string());
}

#[test]
fn without_the_check_locked_memory_is_merged() {
    let (mut daemon, mut program, store) = start(1024, "no-pin-check");
    assert_eq!(program.ask("lock 0 1"), "0");
    assert!(daemon.merge(1, &store.runs(100..200)).iter().all(|&(_, fate)| fate == Outcome::Merged));
}

#[test]
fn without_a_budget_mappings_run_out() {
    let (mut daemon, mut program, store) = start(512, "no-budget");
    let most = kmem::procfs::max_map_count().unwrap();
    assert_eq!(program.ask(&format!("mappings {}", most - most / 3)), "0");
    assert!(daemon.merge(1, &store.runs(0..100)).iter().all(|&(_, fate)| fate == Outcome::Merged));
}

#[test]
fn without_counting_forks_go_unseen() {
    let (daemon, mut program, _store) = start(512, "no-fork-count");
    assert_eq!(program.ask("fork"), "0");
    assert_eq!(daemon.control.as_ref().unwrap().load_u64(wire::control::FORKS), 0);
}

#[test]
fn without_its_repetition_advice_is_lost() {
    let (mut daemon, mut program, store) = start(1024, "no-sticky-advice");
    assert_eq!(program.ask(&format!("advise 0 1024 {}", libc::MADV_DONTFORK)), "0");
    daemon.merge(1, &store.runs(0..1024));
    // The child faults on pages that it has not; a page that it has, it has only by a leak.
    assert_ne!(leaked_mappings(&program), 0);
}

/// Mappings of the store in the program that a fork would copy.
fn leaked_mappings(program: &Program) -> usize {
    let smaps = std::fs::read_to_string(format!("/proc/{}/smaps", program.pid())).unwrap();
    let (mut leaked, mut is_frame) = (0, false);
    for line in smaps.lines() {
        if line.contains(" rw-p ") {
            is_frame = line.contains("memfd:");
        } else if let Some(flags) = line.strip_prefix("VmFlags:") {
            leaked += usize::from(is_frame && !flags.contains(" dc"));
            is_frame = false;
        }
    }
    leaked
}

#[test]
fn signals_reach_threads_that_do_not_block_them() {
    let (_daemon, program, _store) = start(512, "signals-unblocked");
    let is_open = |task: &std::fs::DirEntry| {
        let status = std::fs::read_to_string(task.path().join("status")).unwrap_or_default();
        status.contains("Name:\tpageone-") && !status.contains("SigBlk:\tfffffffe7ffbfeff")
    };
    let open = || std::fs::read_dir(format!("/proc/{}/task", program.pid())).unwrap().flatten().filter(is_open).count();
    // On a busy machine a thread may have no name yet.
    until("two threads take signals", || open() == 2);
}

#[test]
fn a_child_copied_in_the_middle_of_a_window_has_its_memory() {
    // Not a guard that is missing: windows take so long that a raw clone finds the lock held.
    let (mut daemon, mut program, store) = start(512, "slow-window");
    let mut runs = store.runs(0..512);
    daemon.merge(1, &runs);
    runs.truncate(8);
    let merging = std::thread::spawn(move || {
        for _ in 0..40 {
            daemon.merge(1, &runs);
        }
        daemon
    });
    for _ in 0..10 {
        assert_eq!(program.ask("fork-raw"), "0");
    }
    merging.join().unwrap();
}

#[test]
fn a_child_copied_while_pages_are_taken_away_or_given_back_has_its_memory() {
    // Not a guard that is missing: after each of its pauses of a second a window maps one of the
    // pages that it has taken away.
    let (mut daemon, mut program, store, pages) = start_at(512, "slow-take");
    let runs = store.runs(20..23);
    let merging = std::thread::spawn(move || {
        let outcomes = daemon.merge(1, &runs);
        (daemon, outcomes)
    });
    for page in 20..22 {
        until("a page is taken", || pages.now(page) != Now::Own);
        assert_eq!(program.ask("fork-raw"), "0");
        until("a page is mapped", || pages.now(page) == Now::Frame);
    }
    let (mut daemon, outcomes) = merging.join().unwrap();
    assert_eq!(outcomes, [20, 21, 22].map(|page| (page, Outcome::Merged)), "though forks came between");
    assert_eq!(program.ask("check 0 512"), "0");
    // They are filled a second after untouched memory took their place.
    daemon.send(&ToAgent::Detach, &[]);
    for page in 20..23 {
        until("a page is given back", || pages.now(page) != Now::Frame);
        assert_eq!(program.ask("fork-raw"), "0", "while memory is given back");
    }
    daemon.wait_for(|message| *message == ToDaemon::Detached);
    assert_eq!(program.ask("check 0 512"), "0");
}

#[test]
fn only_those_wait_who_touch_a_page_that_was_taken() {
    if kernel_can(MOVES) {
        sometimes("only those wait who touch it", only_who_touches_a_taken_page_waits);
    }
}

/// Not a guard that is missing: a window pauses for a second before it takes pages, and for another
/// before it maps them.
fn only_who_touches_a_taken_page_waits() -> bool {
    let (mut daemon, mut program, store, pages) = start_at(512, "slow-take");
    let runs = [store.runs(20..21), store.runs(22..23)].concat();
    let merging = std::thread::spawn(move || daemon.merge(1, &runs));
    let mut write = |page: usize| {
        let begin = Instant::now();
        program.ask(&format!("write {page} 7"));
        begin.elapsed()
    };
    let mut between = Duration::ZERO;
    while pages.now(20) == Now::Own {
        between = between.max(write(21));
    }
    let taken = write(20);
    println!("between {between:?}, taken {taken:?}");
    assert_eq!(merging.join().unwrap().len(), 2);
    assert_eq!((program.ask("word 20"), program.ask("word 21")), ("7".into(), "7".into()));
    assert_eq!((program.ask("check 0 20"), program.ask("check 22 490")), ("0".into(), "0".into()));
    between < Duration::from_millis(300) && taken > Duration::from_millis(300)
}

/// A process that shares the program's memory is left alone in the middle of a window; gives what
/// it says then: how many pages are wrong.
fn left_alone(sabotage: &str) -> Option<String> {
    let (mut daemon, mut program, store, pages) = start_at(512, sabotage);
    assert_eq!(program.ask("leave-process 0 512"), "0");
    let runs = store.runs(20..23);
    // It waits in vain for the outcome.
    let merging = std::thread::spawn(move || daemon.merge(1, &runs));
    until("a page is taken, or none will be", || pages.now(20) != Now::Own || merging.is_finished());
    let killed = std::process::Command::new("kill").args(["-9", &program.pid().to_string()]).status();
    assert!(killed.unwrap().success());
    program.answer()
}

#[test]
fn without_the_check_a_process_that_shares_the_memory_waits_for_ever() {
    if kernel_can(MOVES) {
        // Its alarm ends it.
        sometimes("it waits for ever", || left_alone("no-sharer-check").is_none());
        assert_eq!(left_alone("slow-take").as_deref(), Some("0"));
    }
}

/// A child is made while memory is given back, and then another one, which inherits the first one's
/// userfaultfd.
fn two_children(sabotage: &str) -> String {
    let (mut daemon, mut program, store, pages) = start_at(512, sabotage);
    daemon.merge(1, &store.runs(20..21));
    daemon.send(&ToAgent::Detach, &[]);
    until("the page is given back", || pages.now(20) != Now::Frame);
    let answer = program.ask("fork-raw-twice");
    daemon.wait_for(|message| *message == ToDaemon::Detached);
    assert_eq!(program.ask("check 0 512"), "0");
    answer
}

#[test]
fn a_child_goes_on_though_another_one_has_its_descriptor() {
    assert_eq!(two_children("slow-take"), "0 before");
    sometimes("it waits as long as the other one lives", || two_children("no-unregister") == "0 after");
}
