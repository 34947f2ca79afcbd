//! Daemons that are mad, slow or gone: the agent leaves them and comes back with a full account;
//! the program never notices.

#![allow(clippy::print_stdout, clippy::print_stderr, reason = "prints for who runs it")]
#![allow(clippy::unwrap_used)] // In tests.

mod support;

use rustix::fs::{MemfdFlags, SealFlags};
use std::os::fd::OwnedFd;
use std::time::{Duration, Instant};
use support::daemon::{Daemon, MERGES, Program, Store, control_page, kernel_can};
use support::{client, pattern_of};
use wire::{Digest, Merge, Outcome, PageNo, Run, ToAgent, ToDaemon};

const PAGES: usize = 4096;

/// Not a test: what the client runs.
#[test]
fn client() {
    client::run_if_asked();
}

fn start() -> Option<(Daemon, Program)> {
    if !kernel_can(MERGES) {
        return None;
    }
    let daemon = Daemon::new();
    let mut program = Program::start(&daemon.socket, None);
    program.ask(&format!("map {PAGES}"));
    assert_eq!(program.ask("mark"), "0");
    Some((daemon, program))
}

fn memfd(len: usize, seals: SealFlags) -> (OwnedFd, u64) {
    let fd = rustix::fs::memfd_create("test", MemfdFlags::ALLOW_SEALING).unwrap();
    rustix::fs::ftruncate(&fd, len as u64).unwrap();
    rustix::fs::fcntl_add_seals(&fd, seals).unwrap();
    let ino = kmem::memfd::identity(&fd).unwrap().ino;
    (fd, ino)
}

#[test]
fn a_pool_that_is_shared_during_the_handshake_is_announced_after_it() {
    let Some((mut daemon, mut program)) = start() else { return };
    daemon.accept();
    assert_eq!(program.ask("share"), "0");
    std::thread::sleep(Duration::from_millis(50));
    // What comes before that the daemon would refuse.
    daemon.welcome();
    let is_pool = |message: &ToDaemon| matches!(message, ToDaemon::Pool(_));
    assert!(!daemon.seen.iter().any(is_pool), "{:?}", daemon.seen);
    daemon.wait_for(is_pool);
}

/// What a daemon of an earlier version does: it reads nothing more, and hangs up.
fn refuse(daemon: &mut Daemon) {
    std::thread::sleep(Duration::from_millis(50));
    daemon.send(&ToAgent::Refused { reason: "another protocol".into() }, &[]);
    daemon.close();
}

#[test]
fn a_daemon_of_the_version_before_is_spoken_to_in_its_version() {
    let Some((mut daemon, mut program)) = start() else { return };
    daemon.accept();
    daemon.version = wire::OLDEST;
    daemon.welcome();
    let store = Store::new();
    daemon.give(&store);
    // A message that this version does not have would end the test.
    let outcomes = daemon.merge(1, &store.runs(0..PAGES));
    assert!(outcomes.iter().all(|(_, outcome)| *outcome == Outcome::Merged), "{outcomes:?}");
    assert_eq!(program.ask(&format!("check 0 {PAGES}")), "0");
    daemon.close();
    daemon.version = wire::VERSION;
    daemon.accept();
    daemon.welcome();
    daemon.wait_for(|message| matches!(message, ToDaemon::Library { .. }));
    assert_eq!(program.ask(&format!("check 0 {PAGES}")), "0");
}

#[test]
fn the_next_daemon_hears_which_pages_were_given_back_and_hold_nothing_since() {
    let Some((mut daemon, mut program)) = start() else { return };
    daemon.accept();
    daemon.welcome();
    let store = Store::new();
    daemon.give(&store);
    daemon.merge(1, &store.runs(0..PAGES));
    let zeros: Vec<usize> = (0..PAGES).filter(|&page| pattern_of(page) == 0).collect();
    let [read, written, discarded, ..] = zeros[..] else { panic!("{zeros:?}") };
    assert_eq!(program.ask(&format!("check {read} 1")), "0");
    assert_eq!(program.ask(&format!("write {written} 7")), "0");
    assert_eq!(program.ask(&format!("advise {discarded} 1 {}", libc::MADV_DONTNEED)), "0");
    daemon.close();
    daemon.accept();
    daemon.welcome();
    let told = std::cell::RefCell::new(Vec::new());
    daemon.wait_for(|message| match message {
        ToDaemon::Zeros(said) => {
            told.borrow_mut().extend(said.runs.iter().flat_map(|run| run.pages()).map(PageNo::index));
            true
        }
        _ => false,
    });
    let left: Vec<usize> = zeros.into_iter().filter(|&page| page != written && page != discarded).collect();
    assert_eq!(told.into_inner(), left);
}

#[test]
fn a_daemon_of_no_version_that_the_agent_speaks_is_left_for_long() {
    if !kernel_can(MERGES) {
        return;
    }
    // One that says so, and one that welcomes in a version that is too new.
    for (refuses, line) in
        [(true, "refused: another protocol"), (false, "the daemon speaks protocol 9, this library 7 and 8")]
    {
        let mut daemon = Daemon::new();
        let mut program = Program::start_with(&daemon.socket, [("PAGEONE_LOG", "1")]);
        program.ask(&format!("map {PAGES}"));
        assert_eq!(program.ask("mark"), "0");
        assert_eq!(daemon.accept_hello().1, wire::VERSION);
        if refuses {
            refuse(&mut daemon);
        } else {
            let (fd, _map) = control_page();
            daemon.send(&ToAgent::Welcome { version: wire::VERSION + 1, direct_io_ms: 0 }, &[&fd]);
            daemon.wait_for_close();
        }
        let end = Instant::now() + Duration::from_secs(60);
        while !program.lines().iter().any(|said| said.contains(line)) {
            assert!(Instant::now() < end, "{line} in {:?}", program.lines());
            std::thread::sleep(Duration::from_millis(10));
        }
        std::thread::sleep(Duration::from_secs(1));
        assert!(!daemon.is_wanted(), "it comes back at once");
    }
}

#[test]
fn nonsense_is_left() {
    let Some((mut daemon, mut program)) = start() else { return };
    let len = wire::SEGMENT_PAGES as usize * support::PAGE;
    let store = Store::new();
    let (unsealed, unsealed_id) = memfd(len, SealFlags::SHRINK);
    let (short, short_id) = memfd(len / 2, kmem::memfd::STORE_SEALS);
    let (shrinkable, _) = memfd(wire::control::LEN, SealFlags::GROW);
    let null = OwnedFd::from(std::fs::File::open("/dev/null").unwrap());
    let (control, _map) = control_page();
    let welcome = ToAgent::Welcome { version: wire::VERSION, direct_io_ms: 0 };
    let early = ToAgent::Merge(Merge { batch: 1, region: wire::RegionId(1), runs: store.runs(0..8), calm: false });
    let descending = ToAgent::Merge(Merge {
        batch: 1,
        region: wire::RegionId(1),
        runs: store.runs(0..40).into_iter().rev().collect(),
        calm: false,
    });

    let runs = vec![Run::new(PageNo(0), wire::MAX_DIGESTS + 1)];
    let too_many = ToAgent::Digest(Digest { request: 1, region: wire::RegionId(1), seed: 0, runs });

    /// Whether a welcome comes first, the packet, its descriptors.
    type Case<'a> = (bool, Vec<u8>, Vec<&'a OwnedFd>);
    let cases: Vec<Case> = vec![
        (false, vec![0xff; 100], vec![]),
        (false, vec![0; wire::MAX_MESSAGE + 1], vec![]),
        (false, wire::encode(&early), vec![]),
        (false, wire::encode(&welcome), vec![]),
        (false, wire::encode(&welcome), vec![&control, &control]),
        (false, wire::encode(&welcome), vec![&null]),
        (false, wire::encode(&welcome), vec![&shrinkable]),
        (true, wire::encode(&welcome), vec![&control]),
        (true, vec![0x7f], vec![]),
        (true, wire::encode(&descending), vec![]),
        (true, wire::encode(&too_many), vec![]),
        (true, wire::encode(&ToAgent::Segment { segment: store.id }), vec![]),
        (true, wire::encode(&ToAgent::Segment { segment: store.id + 1 }), vec![&store.fd]),
        (true, wire::encode(&ToAgent::Segment { segment: unsealed_id }), vec![&unsealed]),
        (true, wire::encode(&ToAgent::Segment { segment: short_id }), vec![&short]),
        (true, wire::encode(&ToAgent::DropSegment { segment: 1 }), vec![&null]),
    ];
    for (i, (welcomed, packet, fds)) in cases.into_iter().enumerate() {
        println!("case {i}");
        daemon.accept();
        if welcomed {
            daemon.welcome();
        }
        daemon.send_bytes(&packet, &fds);
        daemon.wait_for_close();
        // A welcome resets the pause between attempts; else it grows with each.
        if !welcomed {
            daemon.accept();
            daemon.welcome();
            daemon.close();
        }
    }
    still_merges(&mut daemon, &store);
    assert_eq!(program.ask(&format!("check 0 {PAGES}")), "0");
}

fn still_merges(daemon: &mut Daemon, store: &Store) {
    daemon.accept();
    daemon.welcome();
    daemon.give(store);
    let outcomes = daemon.merge(1, &store.runs(0..100));
    assert!(outcomes.iter().all(|&(_, outcome)| outcome == Outcome::Merged), "the agent still serves");
}

#[test]
fn a_restarted_daemon_takes_everything_back() {
    let Some((mut daemon, mut program)) = start() else { return };
    let store = Store::new();
    daemon.accept();
    daemon.welcome();
    daemon.give(&store);
    daemon.merge(1, &store.runs(0..PAGES));
    daemon.close();
    assert_eq!(program.ask("fork"), "0");
    assert_eq!(program.ask("unmap 100 10"), "0");
    assert_eq!(program.ask(&format!("advise 200 10 {}", libc::MADV_DONTNEED)), "0");
    let account = daemon.accept();
    assert!(matches!(account[0], ToDaemon::Hello { forks: 1.., .. }), "{account:?}");
    assert!(matches!(account[1], ToDaemon::RegionAdded { region: wire::RegionId(1), .. }));
    let rest = [
        ToDaemon::RegionShrunk { region: wire::RegionId(1), run: Run::new(PageNo(100), 10) },
        ToDaemon::SegmentHeld { segment: store.id },
        ToDaemon::Ready,
    ];
    assert_eq!(account[2..], rest);
    daemon.welcome();
    // The segment is still held: nothing needs to be given.
    assert!(daemon.merge(1, &store.runs(1000..2000)).iter().all(|&(_, fate)| fate == Outcome::Merged));
    assert_eq!(program.ask("zeros 200 10"), "0");
    daemon.send(&ToAgent::DropSegment { segment: store.id }, &[]);
    let page = (300..).find(|&page| support::pattern_of(page) != 0).unwrap();
    assert_eq!(daemon.merge(1, &store.runs(page..page + 1)), [(page as u32, Outcome::Failed)]);
    assert_eq!(program.ask("check 210 3000"), "0", "mapped frames outlive the segment's descriptor");
}

#[test]
fn a_daemon_that_does_not_read_stalls_nobody() {
    let Some((mut daemon, mut program)) = start() else { return };
    let store = Store::new();
    daemon.accept();
    daemon.welcome();
    daemon.give(&store);
    daemon.merge(1, &store.runs(0..PAGES));
    let before = Instant::now();
    for _ in 0..8 {
        assert_eq!(program.ask(&format!("discard-each 0 {PAGES}")), "None");
    }
    assert!(before.elapsed() < Duration::from_secs(60));
    daemon.wait_for_close();
    let account = daemon.accept();
    assert!(account.contains(&ToDaemon::SegmentHeld { segment: store.id }), "{account:?}");
    daemon.welcome();
    assert!(daemon.merge(1, &store.runs(1..2)).iter().all(|&(_, fate)| fate == Outcome::Merged));
    assert_eq!(program.ask("zeros 2000 1"), "0");
    assert_eq!(program.ask("check 2001 1"), "0");
}

#[test]
fn programs_that_mark_nothing_get_no_threads() {
    let daemon = Daemon::new();
    let mut program = Program::start(&daemon.socket, None);
    program.ask("map 512");
    assert_eq!(program.ask("threads"), "2", "the one that runs the tests, and the one of the test");
}
