use rustix::fs::MemfdFlags;

use wire::{RegionId, Run};

use super::*;
use crate::core::ledger::Region;

/// A pool in a memfd, and the guest's side of it.
pub(crate) fn pool(seals: SealFlags) -> (OwnedFd, SharedMap) {
    let fd = rustix::fs::memfd_create("pool", MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING).unwrap();
    rustix::fs::ftruncate(&fd, 1 << 20).unwrap();
    rustix::fs::fcntl_add_seals(&fd, seals).unwrap();
    let map = memfd::map_shared(&fd, 1 << 20).unwrap();
    (fd, map)
}

pub(crate) fn guest_side(map: &SharedMap) -> ppr::Pool {
    // SAFETY: mapped until the end of the test.
    unsafe { ppr::Pool::from_mapping(NonNull::new(map.as_ptr()).unwrap(), map.len()) }.unwrap()
}

#[test]
fn pages_that_are_marked_are_no_candidates() {
    let (fd, map) = pool(SealFlags::SHRINK | SealFlags::GROW);
    let pool = guest_side(&map);
    let guest = ppr::Guest::new(&pool);
    let extents = vec![
        Extent { frame: 256, region: RegionId(1), run: Run::new(PageNo(0), 50) },
        Extent { frame: 1000, region: RegionId(1), run: Run::new(PageNo(60), 40) },
    ];
    let mut region = Region::<crate::core::content::frame::Frame>::new(0, 100).unwrap();
    region.free = Some(FreePages::new(Arc::new(Marks::open(&fd).unwrap()), extents));
    region.ages.found_written(Run::new(PageNo(0), 100));
    (0..3).for_each(|_| region.end_scan(crate::core::ledger::Cool::Copies));
    guest.mark(256 + 10..256 + 20);
    guest.mark(1000..1005);
    guest.mark(1050..1100);
    let mut found = Vec::new();
    region.candidates(PageNo(0), 12, &mut found);
    assert_eq!(found, [0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 20, 21].map(PageNo), "as many as were asked for");
    region.candidates(PageNo(0), 100, &mut found);
    let expected: Vec<PageNo> = (0..10).chain(20..60).chain(65..100).map(PageNo).collect();
    assert_eq!(found, expected);
    assert!(region.predict(PageNo(3)), "in use");
    guest.mark(256 + 5..256 + 6);
    assert!(!region.predict(PageNo(5)), "freed since");
    // What was marked, and is used again, comes back when it is written.
    guest.cancel(256 + 10..256 + 20, || true).unwrap();
    region.ages.found_written(Run::new(PageNo(12), 1));
    (0..3).for_each(|_| region.end_scan(crate::core::ledger::Cool::Copies));
    region.candidates(PageNo(8), 4, &mut found);
    assert_eq!(found, [8, 9, 12, 20].map(PageNo));
}

#[test]
fn a_pool_that_can_shrink_is_refused() {
    let (fd, _map) = pool(SealFlags::GROW);
    assert!(matches!(Marks::open(&fd), Err(MarksError::Unsealed)));
    // Nor is what is no pool taken.
    let (pipe, _other_end) = rustix::pipe::pipe().unwrap();
    assert!(matches!(Marks::open(&pipe), Err(MarksError::NoMemfd(_))));
    let empty = rustix::fs::memfd_create("pool", MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING).unwrap();
    rustix::fs::fcntl_add_seals(&empty, SealFlags::SHRINK | SealFlags::GROW).unwrap();
    assert!(matches!(Marks::open(&empty), Err(MarksError::Map(_))), "nothing is there to be mapped");
}
