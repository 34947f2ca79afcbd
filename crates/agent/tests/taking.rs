//! Pages that a device may be writing to are never taken away, whatever the reason: a detach, a
//! protection, a move. And whatever a page is, reading it harms nobody.

#![allow(clippy::print_stdout, clippy::print_stderr, reason = "prints for who runs it")]
#![allow(clippy::unwrap_used)] // In tests.

mod support;

use support::client;
use support::daemon::{Daemon, MOVES, Program, Store, kernel_can};
use support::slow_file::SlowFile;
use wire::{Outcome, PageNo, RegionId, Run, ToAgent, ToDaemon};

/// Not a test: what the client runs.
#[test]
fn client() {
    client::run_if_asked();
}

/// A client of 512 pages whose requests take up to `direct_io_ms`.
fn start(direct_io_ms: u32, variables: &[(&str, &str)]) -> Option<(Daemon, Program, Store)> {
    if !kernel_can(MOVES) {
        return None;
    }
    let mut daemon = Daemon::new();
    daemon.direct_io_ms = direct_io_ms;
    let mut program = Program::start_with(&daemon.socket, variables.iter().copied());
    let store = daemon.manage(&mut program, 512);
    Some((daemon, program, store))
}

fn slow_file() -> Option<SlowFile> {
    SlowFile::mount().inspect_err(|why| println!("SKIPPED: a FUSE file system cannot be mounted: {why}")).ok()
}

fn merge(daemon: &mut Daemon, store: &Store, pages: std::ops::Range<usize>) {
    assert!(daemon.merge(1, &store.runs(pages)).iter().all(|&(_, outcome)| outcome == Outcome::Merged));
}

/// What the agent said: pages that it retained, and pages that it gave up.
fn left(daemon: &Daemon) -> (Vec<Run>, Vec<Run>) {
    let retained = |message: &ToDaemon| match message {
        ToDaemon::Retained { run, .. } => Some(*run),
        _ => None,
    };
    let shrunk = |message: &ToDaemon| match message {
        ToDaemon::RegionShrunk { run, .. } => Some(*run),
        _ => None,
    };
    (daemon.seen.iter().filter_map(retained).collect(), daemon.seen.iter().filter_map(shrunk).collect())
}

fn run(page: u32, len: u32) -> Run {
    Run::new(PageNo(page), len)
}

/// Detaches while input for a copy (page 20) and for a page that was never merged (page 400) is on
/// its way, which arrives within the time that requests may take. Whether the program got each.
fn detach_in_flight(sabotage: &str) -> Option<[bool; 2]> {
    let file = slow_file()?;
    let path = file.path.to_str().unwrap();
    let (mut daemon, mut program, store) = start(6000, &[("PAGEONE_TEST_FILE", path), ("PAGEONE_SABOTAGE", sabotage)])?;
    merge(&mut daemon, &store, 0..256);
    let mut requests = Vec::new();
    for page in [20, 400] {
        program.ask(&format!("read {page}"));
        requests.push(file.serve_until_read());
    }
    daemon.send(&ToAgent::Detach, &[]);
    std::thread::sleep(std::time::Duration::from_millis(1000));
    requests.into_iter().for_each(|request| file.answer(request, 0, &[0x77; 4096]));
    assert_eq!((program.ask("read-done"), program.ask("read-done")), ("4096".into(), "4096".into()));
    daemon.wait_for(|message| *message == ToDaemon::Detached);
    let got = [20, 400].map(|page| program.ask(&format!("bytes {page}")) == "7777777777777777");
    if sabotage.is_empty() {
        assert!(daemon.seen.iter().any(|message| matches!(message, ToDaemon::Detaching(wait) if wait.cooling >= 1)));
        assert_eq!(left(&daemon).0, [], "it cooled down");
        assert_eq!(program.ask("files"), "0");
        assert_eq!((program.ask("check 0 20"), program.ask("check 21 379")), ("0".into(), "0".into()));
    }
    Some(got)
}

#[test]
fn a_detach_takes_nothing_from_a_device() {
    if let Some(got) = detach_in_flight("") {
        assert_eq!(got, [true, true]);
    }
}

#[cfg(feature = "sabotage")]
#[test]
fn without_the_gate_a_detach_loses_input() {
    if let Some(got) = detach_in_flight("no-pin-check") {
        assert_eq!(got, [false, true], "what was never merged is not touched at all");
    }
}

#[test]
fn pinned_copies_stay_where_they_are_and_discarding_them_gives_zeros() {
    let Some((mut daemon, mut program, store)) = start(200, &[]) else { return };
    merge(&mut daemon, &store, 0..512);
    match program.ask("pin 8 16").as_str() {
        "0" => {}
        errno => return println!("SKIPPED: io_uring answers {errno}"),
    }
    daemon.send(&ToAgent::Detach, &[]);
    daemon.wait_for(|message| *message == ToDaemon::Detached);
    let (retained, _) = left(&daemon);
    assert_eq!(retained.iter().map(|run| run.len).sum::<u32>(), 16, "{retained:?}");
    assert_eq!((program.ask("files"), program.ask("check 0 512")), ("16".into(), "0".into()));
    assert_eq!(program.ask(&format!("advise 8 16 {}", libc::MADV_REMOVE)), libc::EINVAL.to_string());
    assert_eq!(program.ask(&format!("advise 8 4 {}", libc::MADV_DONTNEED)), "0");
    assert_eq!((program.ask("zeros 8 4"), program.ask("files")), ("0".into(), "12".into()));
    assert_eq!(program.ask("unmap 12 4"), "0");
    assert_eq!(program.ask("check 16 496"), "0");
}

#[test]
fn copies_that_are_written_all_the_time_stay_and_a_detach_ends() {
    // Long enough for the writers of a busy machine.
    let Some((mut daemon, mut program, store)) = start(3000, &[]) else { return };
    merge(&mut daemon, &store, 0..512);
    program.ask("start-writers");
    std::thread::sleep(std::time::Duration::from_millis(100));
    daemon.send(&ToAgent::Detach, &[]);
    daemon.wait_for(|message| *message == ToDaemon::Detached);
    let (retained, _) = left(&daemon);
    let pages: u32 = retained.iter().map(|run| run.len).sum();
    assert!(pages > 256, "{pages} of 512 pages that are all being written");
    program.ask("stop-writers");
    assert_eq!((program.ask("files"), program.ask("check 0 512")), (pages.to_string(), "0".into()));
}

#[test]
fn what_is_protected_keeps_its_copies_in_place() {
    let Some((mut daemon, mut program, store)) = start(60_000, &[]) else { return };
    merge(&mut daemon, &store, 0..512);
    program.ask("write 100 0");
    assert_eq!(program.ask("protect 96 16 1"), "0");
    daemon.wait_for(|message| matches!(message, ToDaemon::RegionShrunk { run, .. } if run.page == PageNo(101)));
    assert_eq!(left(&daemon), (vec![run(100, 1)], vec![run(96, 4)]));
    assert_eq!((program.ask("check 0 512"), program.ask("raw-protect 96 16 3")), ("0".into(), "0".into()));
    assert_eq!(program.ask(&format!("advise 96 16 {}", libc::MADV_DONTNEED)), "0");
    assert_eq!(program.ask("zeros 96 16"), "0");
    // A copy can be neither grown nor moved; what is clean can.
    program.ask("write 200 0");
    let may_move = libc::MREMAP_MAYMOVE;
    assert_eq!(program.ask(&format!("move 192 16 32 {may_move}")), libc::ENOMEM.to_string());
    assert_eq!(program.ask("check 112 400"), "0");
    assert_ne!(program.ask(&format!("move 208 16 32 {may_move}")), libc::ENOMEM.to_string());
    assert_eq!(program.ask("check 224 288"), "0");
}

/// Flags of the mapping that a page lies in (proc_pid_smaps(5)).
fn flags(program: &mut Program, page: usize) -> String {
    let address = program.ask("start").parse::<usize>().unwrap() + page * support::PAGE;
    let smaps = std::fs::read_to_string(format!("/proc/{}/smaps", program.pid())).unwrap();
    let mut is_inside = false;
    for line in smaps.lines() {
        let bounds = line.split(' ').next().and_then(|bounds| bounds.split_once('-'));
        if let Some((Ok(start), Ok(end))) =
            bounds.map(|(a, b)| (usize::from_str_radix(a, 16), usize::from_str_radix(b, 16)))
        {
            is_inside = start <= address && address < end;
        } else if is_inside && let Some(flags) = line.strip_prefix("VmFlags:") {
            return format!("{flags} ");
        }
    }
    panic!("page {page} is not mapped");
}

#[test]
fn what_is_retained_is_to_the_program_as_other_memory_is() {
    let Some((mut daemon, mut program, store)) = start(60_000, &[]) else { return };
    merge(&mut daemon, &store, 0..512);
    assert_eq!(program.ask(&format!("advise 0 512 {}", libc::MADV_DONTFORK)), "0");
    let merged = program.ask("files");
    for page in [100, 120, 140, 160] {
        program.ask(&format!("write {page} 0"));
        assert_eq!(
            (program.ask(&format!("protect {page} 1 1")), program.ask(&format!("protect {page} 1 3"))),
            ("0".into(), "0".into())
        );
    }
    assert_eq!(program.ask("files"), merged, "they are retained");
    // Advice that came later is not forgotten with the mapping.
    assert!(flags(&mut program, 100).contains(" dc "));
    assert_eq!(program.ask(&format!("advise 100 1 {}", libc::MADV_DOFORK)), "0");
    assert_eq!(program.ask(&format!("advise 100 1 {}", libc::MADV_DONTNEED)), "0");
    assert!(!flags(&mut program, 100).contains(" dc "), "children get it");
    // It does not grow by other frames.
    assert_eq!(program.ask(&format!("move 120 1 2 {}", libc::MREMAP_MAYMOVE)), libc::ENOMEM.to_string());
    // What is left behind is empty.
    assert_eq!((program.ask("leave 140"), program.ask("zeros 140 1")), ("0".into(), "0".into()));
    // So is what had guards, on kernels that know them. On others it keeps its bytes.
    let before = program.ask("check 160 1");
    match program.ask("advise 160 1 102").as_str() {
        "0" => assert_eq!((program.ask("advise 160 1 103"), program.ask("zeros 160 1")), ("0".into(), "0".into())),
        _ => assert_eq!(program.ask("check 160 1"), before),
    }
    assert_eq!((program.ask("check 101 39"), program.ask("check 161 351")), ("0".into(), "0".into()));
}

#[test]
fn locked_memory_that_cannot_be_discarded_keeps_its_bytes() {
    const GUARD_INSTALL: i32 = 102;
    let Some((mut daemon, mut program, store)) = start(60_000, &[]) else { return };
    merge(&mut daemon, &store, 0..512);
    // Page 100 is retained, the others are managed.
    program.ask("write 100 0");
    assert_eq!((program.ask("protect 100 1 1"), program.ask("protect 100 1 3")), ("0".into(), "0".into()));
    assert_eq!(program.ask("lock 96 8"), "0");
    for advice in [libc::MADV_DONTNEED, libc::MADV_FREE, GUARD_INSTALL] {
        for range in ["96 1", "100 1", "90 14"] {
            assert_eq!(program.ask(&format!("advise {range} {advice}")), libc::EINVAL.to_string(), "{range}: {advice}");
            assert_eq!(program.ask("check 0 512"), "0", "{range}: {advice}");
        }
    }
    assert_eq!(program.ask(&format!("advise 96 2 {}", libc::MADV_DONTNEED_LOCKED)), "0");
    assert_eq!((program.ask("zeros 96 2"), program.ask("unlock 96 8")), ("0".into(), "0".into()));
    assert_eq!(program.ask(&format!("advise 98 6 {}", libc::MADV_DONTNEED)), "0");
    assert_eq!((program.ask("zeros 96 8"), program.ask("check 104 408")), ("0".into(), "0".into()));
}

#[test]
fn what_is_moved_past_the_library_is_retained() {
    let Some((mut daemon, mut program, store)) = start(0, &[]) else { return };
    // One run of one pattern after the other is one mapping.
    merge(&mut daemon, &store, 8..16);
    let place: usize = match program.ask("raw-move 8 8").parse::<isize>().unwrap() {
        place if place as i32 == libc::EFAULT => return println!("SKIPPED: it is not one mapping"),
        place => place as usize,
    };
    daemon.wait_for(|message| *message == ToDaemon::Retained { region: RegionId(1), run: run(8, 8) });
    assert_eq!(program.ask(&format!("advise {} 8 {}", place as isize, libc::MADV_DONTNEED)), "0");
    assert_eq!(program.ask(&format!("zeros {} 8", place as isize)), "0");
}

#[test]
fn what_cannot_be_read_is_left_alone() {
    let Some((mut daemon, mut program, store)) = start(0, &[]) else { return };
    // Past the C library, as `free` unmaps: no guard sees it.
    assert_eq!(program.ask("raw-protect 100 3 0"), "0");
    let outcomes = daemon.merge(1, &store.runs(0..512));
    let unreadable = outcomes.iter().filter(|(_, outcome)| *outcome == Outcome::Unreadable);
    assert!(unreadable.map(|(page, _)| *page).eq([100, 101, 102]));
    assert_eq!(outcomes.iter().filter(|(_, outcome)| *outcome == Outcome::Merged).count(), 509);
    let digest = wire::Digest { request: 1, region: RegionId(1), seed: 7, runs: vec![run(90, 20)] };
    daemon.send(&ToAgent::Digest(digest), &[]);
    daemon.wait_for(|message| matches!(message, ToDaemon::Digests(answer) if answer.digests.len() == 10));
    assert_eq!(program.ask("raw-protect 100 3 3"), "0");
    // A frame whose memory has failed. The daemon has not said that there is none.
    assert_eq!(program.ask("hide-frames"), "0");
    let outcomes = daemon.merge(1, &store.runs(100..103));
    assert!(outcomes.iter().all(|(_, outcome)| *outcome == Outcome::Unreadable), "{outcomes:?}");
    assert_eq!(program.ask("check 0 512"), "0");
}

#[test]
fn pages_are_taken_unseen_only_where_they_can_be_read_and_come_back_where_they_differ() {
    let Some((mut daemon, mut program, store)) = start(0, &[]) else { return };
    // While no memory has failed, only some pages are looked at before: of these 98 to 100 and 310
    // are none, and 396 is one.
    daemon.control.as_ref().unwrap().atomic_u64(wire::control::SOUND).store(1, std::sync::atomic::Ordering::SeqCst);
    assert_eq!(program.ask("raw-protect 98 3 0"), "0");
    (200..300).chain([310]).for_each(|page| assert_eq!(program.ask(&format!("write {page} 77")), "0"));
    let left = |daemon: &mut Daemon, runs: Vec<_>| {
        let outcomes = daemon.merge(1, &runs);
        outcomes.into_iter().filter(|(_, outcome)| *outcome != Outcome::Merged).collect::<Vec<_>>()
    };
    let first = left(&mut daemon, store.runs(0..300));
    assert!(first.iter().map(|(page, _)| *page).eq((98..101).chain(200..300)), "{first:?}");
    assert!(first[3..].iter().all(|(_, outcome)| *outcome == Outcome::Differs), "{first:?}");
    assert_eq!(program.ask("raw-protect 396 2 0"), "0");
    let second = left(&mut daemon, store.runs(300..512));
    // A window that ran out of time leaves the rest to another one, which looks at other pages:
    // then these cannot be taken, as 98 to 100.
    let either = [[Outcome::Unreadable; 2], [Outcome::Failed; 2]];
    let expected = either.map(|[a, b]| [(310, Outcome::Differs), (396, a), (397, b)]);
    assert!(expected.iter().any(|these| second == these), "{second:?}");
    for (page, len) in [(98, 3), (396, 2)] {
        assert_eq!(program.ask(&format!("raw-protect {page} {len} 3")), "0");
    }
    for (page, len) in [(0, 200), (300, 10), (311, 201)] {
        assert_eq!(program.ask(&format!("check {page} {len}")), "0");
    }
    assert!((200..300).chain([310]).all(|page| program.ask(&format!("word {page}")) == "77"), "their last words");
}

#[test]
fn no_window_opens_while_memory_is_mapped_for_a_device() {
    let Some(file) = slow_file() else { return };
    let path = file.path.to_str().unwrap();
    let Some((mut daemon, mut program, store)) = start(0, &[("PAGEONE_TEST_FILE", path)]) else { return };
    program.ask("map-dma");
    let request = file.serve_until_read();
    let merged = std::sync::Arc::new(std::sync::atomic::AtomicBool::new(false));
    let done = merged.clone();
    let merger = std::thread::spawn(move || {
        merge(&mut daemon, &store, 0..512);
        done.store(true, std::sync::atomic::Ordering::SeqCst);
        (daemon, store)
    });
    std::thread::sleep(std::time::Duration::from_millis(300));
    let has_merged = merged.load(std::sync::atomic::Ordering::SeqCst);
    // Answered in any case, or the program would not end. Result, flags, in_iovs, out_iovs.
    file.answer(request, 0, &[0; 16]);
    assert!(!has_merged, "a window opened during the call");
    assert_eq!(program.ask("read-done"), "0");
    let _open = merger.join().unwrap();
    assert_eq!(program.ask("check 0 512"), "0");
}

#[test]
fn ksm_gets_nothing_of_managed_memory() {
    let Some((_daemon, mut program, _store)) = start(0, &[]) else { return };
    // Less than what is taken as a region.
    assert_eq!(program.ask("mark 8 16"), "0");
    let smaps = std::fs::read_to_string(format!("/proc/{}/smaps", program.pid())).unwrap();
    let marked = smaps.lines().filter(|line| line.starts_with("VmFlags:") && line.contains(" mg")).count();
    assert_eq!(marked, 0);
}
