use std::os::fd::OwnedFd;

use super::*;
use crate::core::ledger::free_pages::tests::{guest_side, pool};
use rustix::fs::SealFlags;
use wire::{PageNo, RegionId, Run};

fn recycling(fd: &OwnedFd) -> Recycling {
    Recycling::new(Arc::new(Marks::open(fd).unwrap()), Duration::from_secs(1))
}

#[test]
fn a_client_that_lies_about_its_sweeps_overflows_nothing() {
    let (fd, _map) = pool(SealFlags::SHRINK | SealFlags::GROW);
    let mut recycling = recycling(&fd);
    recycling.locate(vec![Extent { frame: 256, region: RegionId(1), run: Run::new(PageNo(0), 50) }]);
    recycling.rate.window.0 = Instant::now() - Duration::from_secs(5);
    let lie = Sweep {
        pages: u64::MAX,
        runs: u64::MAX,
        lost: u64::MAX,
        sweep_ns: u64::MAX,
        longest_ns: u64::MAX,
        ..Sweep::default()
    };
    (0..3).for_each(|_| assert!(recycling.swept(&lie).is_none()));
    assert_eq!(recycling.status().metrics.pages_recycled_total, 150);
    assert_eq!(recycling.totals.lost, 150);
}

#[test]
fn a_guest_that_boots_is_awaited_until_it_marks_or_time_is_up() {
    let (fd, map) = pool(SealFlags::SHRINK | SealFlags::GROW);
    assert!(!recycling(&fd).is_awaited(), "a program, or a second daemon");
    let mut late = recycling(&fd).booting();
    assert!(late.is_awaited());
    late.boots_until = Some(Instant::now());
    assert!(!late.is_awaited(), "time is up");
    let mut refused = recycling(&fd).booting();
    refused.refuse("no RAM".into());
    assert!(!refused.is_awaited(), "it will never mark");
    let mut guest = recycling(&fd).booting();
    assert!(guest.is_awaited());
    guest_side(&map).set_guest_state(ppr::GuestState::Active);
    assert!(!guest.is_awaited(), "its module is there");
}
