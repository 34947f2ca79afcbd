#![allow(unsafe_code)] // Unmaps a part of a test's own memory.

use std::sync::atomic::Ordering::Relaxed;
use std::time::{Duration, Instant};

use rustix::mm::{MapFlags, ProtFlags};
use wire::ToDaemon;

use kmem::pidfd::PidFd;

use super::*;
use crate::client::scanning::tests::{client, client_of};
use crate::world::stall::{Stalls, TICK};

fn announce(client: &Client, id: u32, start: usize, pages: usize) {
    let message = ToDaemon::RegionAdded { region: RegionId(id), start: start as u64, len: (pages * PAGE_SIZE) as u64 };
    assert!(client.apply(message, &mut Vec::new()).is_ok());
}

#[test]
fn only_mapped_private_memory_is_managed() {
    let (client, _agent) = client();
    let file = rustix::fs::memfd_create("shared", rustix::fs::MemfdFlags::CLOEXEC).unwrap();
    rustix::fs::ftruncate(&file, 8 * PAGE_SIZE as u64).unwrap();
    let shared = kmem::memfd::map_shared(&file, 8 * PAGE_SIZE).unwrap();
    // The kernel chooses no address there: the hole stays one.
    let (start, flags) = (1usize << 39, MapFlags::PRIVATE | MapFlags::FIXED_NOREPLACE);
    // SAFETY: nothing else is mapped there, or the call fails.
    unsafe { rustix::mm::mmap_anonymous(start as *mut _, 24 * PAGE_SIZE, ProtFlags::READ, flags) }.unwrap();
    let hole = (start + 4 * PAGE_SIZE) as *mut _;
    // SAFETY: four pages of the mapping above, which nothing uses.
    unsafe { rustix::mm::munmap(hole, 4 * PAGE_SIZE) }.unwrap();
    announce(&client, 1, start, 24);
    announce(&client, 2, shared.range().start, 8);
    regions(&client, &mut client.settled()).unwrap();
    assert_eq!(client.state().regions[&RegionId(1)].managed, 20, "4 pages are unmapped");
    assert_eq!(client.state().regions[&RegionId(2)].managed, 0, "shared memory");
    // The agent's own message about the unmapped part comes late, and counts once.
    let shrunk = |id, page, len| ToDaemon::RegionShrunk { region: RegionId(id), run: Run::new(PageNo(page), len) };
    assert!(client.apply(shrunk(1, 4, 4), &mut Vec::new()).is_ok());
    assert_eq!(client.state().regions[&RegionId(1)].managed, 20);
    assert!(client.apply(shrunk(2, 0, 8), &mut Vec::new()).is_ok());
    assert!(!client.state().regions.contains_key(&RegionId(2)));
}

#[test]
fn a_scan_that_begins_while_mappings_are_read_is_waited_for() {
    let (client, _agent) = client();
    let start = kmem::mm::map_anonymous(PAGE_SIZE).unwrap();
    let (begun, scans) = std::sync::mpsc::channel();
    let stop = std::sync::atomic::AtomicBool::new(false);
    std::thread::scope(|scope| {
        let (client, stop) = (&client, &stop);
        scope.spawn(move || {
            for pause in (0..200).cycle().take_while(|_| !stop.load(Relaxed)) {
                client.while_scanning(&mut client.settled(), |state| {
                    let _ = begun.send(());
                    MutexGuard::unlocked(state, || std::thread::sleep(Duration::from_millis(1)));
                });
                let end = Instant::now();
                while end.elapsed() < Duration::from_micros(pause) {
                    std::hint::spin_loop();
                }
            }
        });
        scans.recv().unwrap();
        let scanned = (0..400).filter(|&id| {
            announce(client, id, start, 1);
            let mut state = client.settled();
            regions(client, &mut state).unwrap();
            state.is_scanned()
        });
        let scanned = scanned.count();
        stop.store(true, Relaxed);
        assert_eq!(scanned, 0, "the caller may scan now");
    });
}

#[test]
fn a_client_that_announces_what_it_does_not_map_is_refused() {
    let (client, agent) = client();
    (0..=UNMAPPED_REGIONS as u32).for_each(|id| announce(&client, id, (id as usize + 1) << 40, 1 << 20));
    let why = regions(&client, &mut client.settled()).unwrap_err();
    assert!(why.to_string().contains("not among its mappings"), "{why}");
    assert_eq!(client.user.refused().len(), 1);
    assert_eq!(agent.recv(&mut [0; 9], &mut Vec::new()).unwrap(), Some(0), "the connection is closed");
}

#[test]
fn a_client_whose_mappings_cannot_be_read_is_not_scanned() {
    let mut process = std::process::Command::new("sleep").arg("60").spawn().unwrap();
    let pid = process.id() as i32;
    let (client, _agent) = client_of(pid, PidFd::open(pid).unwrap());
    announce(&client, 1, 1 << 30, 1);
    process.kill().unwrap();
    process.wait().unwrap();
    let why = regions(&client, &mut client.settled()).unwrap_err();
    assert!(matches!(why, VerifyError::Maps(_)), "{why}");
}

#[test]
fn a_worker_that_was_replaced_looks_at_no_mappings() {
    let (client, _agent) = client();
    announce(&client, 1, 1 << 30, 1);
    let stalls = Stalls::default();
    let (release, held) = std::sync::mpsc::channel::<()>();
    std::thread::scope(|scope| {
        let (client, stalls) = (&client, &stalls);
        let worker = scope.spawn(move || {
            let slot = stalls.enter();
            assert_eq!(touch(claims::Owner::ROOT, || held.recv().is_ok()), None);
            let why = regions(client, &mut client.settled()).unwrap_err();
            stalls.leave(&slot);
            why
        });
        let mut is_replaced = false;
        while !is_replaced {
            std::thread::sleep(TICK);
            stalls.look(|_, _| is_replaced = true);
        }
        release.send(()).unwrap();
        let why = worker.join().unwrap();
        assert!(matches!(why, VerifyError::HeldUp), "{why}");
    });
}
