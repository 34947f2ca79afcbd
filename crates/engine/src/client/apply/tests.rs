use std::time::{Duration, Instant};

use rustix::fs::SealFlags;
use wire::recycle::{Extent, Pool, Sweep};
use wire::{Outcome, Report, RunOutcome};

use super::*;
use crate::client::scanning::tests::client;
use crate::core::ledger::free_pages::tests::pool;
use crate::store::Cursor;

const ID: RegionId = RegionId(1);

fn announce(client: &Client, pages: u64) -> Result<Next, ProtocolError> {
    client.apply(ToDaemon::RegionAdded { region: ID, start: 1 << 30, len: pages * PAGE_SIZE as u64 }, &mut Vec::new())
}

/// Applies a message to its end. Returns the slices, and the time that the longest took.
fn apply(client: &Client, message: ToDaemon) -> (u32, Duration) {
    let (mut slices, mut longest) = (1, Duration::ZERO);
    let mut begin = Instant::now();
    let mut next = client.apply(message, &mut Vec::new());
    loop {
        longest = longest.max(begin.elapsed());
        match next {
            Ok(Next::Rest) => slices += 1,
            Ok(_) => return (slices, longest),
            Err(why) => panic!("{why}"),
        }
        begin = Instant::now();
        next = client.go_on();
    }
}

#[test]
fn a_message_about_many_pages_is_applied_in_slices() {
    let (client, _agent) = client();
    assert!(announce(&client, 1 << 22).is_ok());
    for page in 0..5000 {
        client.state().regions.get_mut(&ID).unwrap().set(PageNo(page), Entry::Zero);
    }
    let all = Run::new(PageNo(0), 1 << 22);
    let (slices, longest) = apply(&client, ToDaemon::Discarded { region: ID, run: all });
    assert_eq!(slices, (1 << 22) / SLICE);
    assert_eq!(client.state().totals.discarded, 1 << 22);
    assert!(longest < Duration::from_millis(100), "{longest:?} for one slice");
    assert_eq!(client.state().regions[&ID].counts().zero, 0);
    let runs = vec![all; 3];
    let bytes = client.state().regions[&ID].bytes();
    let (slices, _) = apply(&client, ToDaemon::Recycled(Recycled { region: ID, runs }));
    assert_eq!(slices, 3 * (1 << 22) / SLICE);
    let of = |region: &Region| (region.counts().recycled, region.bytes());
    assert_eq!(of(&client.state().regions[&ID]), (0, bytes), "no scan has found memory there");
    apply(&client, ToDaemon::RegionShrunk { region: ID, run: all });
    assert!(client.state().regions.is_empty(), "nothing of it is managed");
}

#[test]
fn pages_that_no_scan_has_found_count_up_to_what_the_process_has_ever_had() {
    let (client, _agent) = client();
    assert!(announce(&client, 1000).is_ok());
    let recycle = |page, len| {
        let runs = vec![Run::new(PageNo(page), len)];
        apply(&client, ToDaemon::Recycled(Recycled { region: ID, runs }));
        client.state().regions[&ID].counts().recycled
    };
    assert_eq!(recycle(0, 1000), 0, "nothing is known of its process");
    let (fd, map) = pool(SealFlags::SHRINK | SealFlags::GROW);
    crate::core::ledger::free_pages::tests::guest_side(&map).initialise();
    let extent = Extent { frame: 0, region: ID, run: Run::new(PageNo(0), 1000) };
    let message = ToDaemon::Pool(Pool { extents: vec![extent], period_ms: 0 });
    assert!(client.apply(message, &mut vec![fd]).is_ok());
    assert_eq!(recycle(0, 1000), 0, "nothing is known of its process");
    client.state().totals.peak = 100;
    assert_eq!(recycle(0, 60), 60);
    assert_eq!(recycle(0, 60), 60, "the same again");
    assert_eq!(recycle(500, 500), 100);
    client.state().totals.peak = 101;
    assert_eq!(recycle(0, 1000), 101);
}

#[test]
fn what_was_given_back_as_zeros_before_counts_where_nothing_is_known_up_to_the_same_bound() {
    let (client, _agent) = client();
    assert!(announce(&client, 1000).is_ok());
    client.state().totals.peak = 100;
    client.state().regions.get_mut(&ID).unwrap().set(PageNo(3), Entry::Unshared(7));
    let zeros = |page, len| {
        apply(&client, ToDaemon::Zeros(Recycled { region: ID, runs: vec![Run::new(PageNo(page), len)] }));
        client.state().regions[&ID].counts()
    };
    assert_eq!((zeros(0, 51).zero, zeros(0, 51).unshared), (50, 1), "the page that was read stays");
    assert_eq!(zeros(500, 500).zero, 100);
    apply(&client, ToDaemon::Recycled(Recycled { region: ID, runs: vec![Run::new(PageNo(200), 9)] }));
    assert_eq!(client.state().regions[&ID].counts().recycled, 0, "both have one bound");
    assert_eq!(client.state().regions.get_mut(&ID).unwrap().emptied.take().len(), 3, "the next scan looks there");
}

#[test]
fn a_region_that_is_shrunk_twice_on_one_half_keeps_the_other() {
    let (client, _agent) = client();
    assert!(announce(&client, 8).is_ok());
    client.state().regions.get_mut(&ID).unwrap().set(PageNo(6), Entry::Zero);
    let half = ToDaemon::RegionShrunk { region: ID, run: Run::new(PageNo(0), 4) };
    apply(&client, half.clone());
    apply(&client, half);
    assert_eq!(client.state().regions[&ID].managed, 4);
    assert_eq!(client.state().regions[&ID].counts().zero, 1, "what it holds is still known");
    apply(&client, ToDaemon::RegionShrunk { region: ID, run: Run::new(PageNo(3), 5) });
    assert!(client.state().regions.is_empty());
}

#[test]
fn what_a_client_announces_counts_for_its_user_until_it_is_dropped() {
    let user = Arc::new(User::new(claims::Owner::of(7), 100, 1));
    let mut regions = BTreeMap::new();
    let mut add = |id, pages: u64| add_region(&user, &mut regions, RegionId(id), 4096, pages * PAGE_SIZE as u64);
    assert!(add(1, 60).is_ok());
    let over = add(2, 60).unwrap_err().to_string();
    assert!(over.contains("uid 7") && over.contains("user_memory"), "{over}");
    assert!(add(3, 1 << 32).is_err(), "16 TiB");
    assert!(add(4, 40).is_ok());
    regions.clear();
    assert_eq!(user.taken(Kind::Pages), 0);
}

#[test]
fn frames_of_pages_that_leave_in_place_are_kept_for_good() {
    let (client, _agent) = client();
    let id = RegionId(1);
    let frames: Vec<_> = {
        let mut cursor = Cursor::new(&client.domain.store, None);
        (1..=3).map(|byte| cursor.put(&[byte; PAGE_SIZE], 1).unwrap()).collect()
    };
    let mut region = Region::new(1 << 30, 8).unwrap();
    for (&frame, page) in frames.iter().zip(0..) {
        region.set(PageNo(page), Entry::Merged(frame));
    }
    client.state().regions.insert(id, region);
    apply(&client, ToDaemon::Retained { region: id, run: Run::new(PageNo(0), 2) });
    apply(&client, ToDaemon::RegionShrunk { region: id, run: Run::new(PageNo(2), 1) });
    let usage = client.domain.store.usage();
    assert_eq!((usage.frames, usage.pinned), (0, 2), "the program may read two of them for ever");
    let state = client.state();
    assert_eq!((state.detach.retained, state.regions[&id].managed), (2, 5));
    drop(state);
    assert!(client.apply(ToDaemon::Retained { region: id, run: Run::new(PageNo(7), 2) }, &mut Vec::new()).is_err());
}

#[test]
fn what_the_protocol_does_not_allow_is_named() {
    let (pool, _map) = pool(SealFlags::SHRINK | SealFlags::GROW);
    let hello = ToDaemon::Hello { version: wire::VERSION, domain: None, name: "a".into(), forks: 0 };
    let region =
        |id, pages: u64| ToDaemon::RegionAdded { region: RegionId(id), start: 1 << 30, len: pages * PAGE_SIZE as u64 };
    let discarded = |id, len| ToDaemon::Discarded { region: RegionId(id), run: Run::new(PageNo(0), len) };
    let report = |batch, len| {
        let outcomes = vec![RunOutcome { run: Run::new(PageNo(0), len), outcome: Outcome::Gone }];
        ToDaemon::Report(Report { batch, last: true, outcomes, cpu_ns: 0, window_ns: 0, maps: 0 })
    };
    let announced = |len: Option<u32>| {
        let extent = |len| Extent { frame: 256, region: ID, run: Run::new(PageNo(0), len) };
        ToDaemon::Pool(Pool { extents: len.map(extent).into_iter().collect(), period_ms: 0 })
    };
    // A client with a region of eight pages says this; descriptors come with each message.
    let cases = [
        (vec![hello], 0, "it introduced itself twice"),
        (vec![discarded(2, 1)], 0, "it spoke of region 2, which it never announced"),
        (vec![discarded(1, 9)], 0, "it spoke of pages 0+9 of region 1, which has 8"),
        (vec![region(MAX_REGIONS, 1)], 0, "it announced region 4096; there can be 4096"),
        (vec![region(2, 1 << 32)], 0, "it announced a region of over 16 TiB"),
        (vec![region(1, 1)], 0, "it announced region 1 twice"),
        (vec![report(1, wire::MAX_BATCH_PAGES + 1)], 0, "names more pages than a batch can have"),
        (vec![report(7, 1)], 0, "it reported on batch 7, which is not under way"),
        (vec![announced(Some(8))], 0, "a pool came without its descriptor"),
        (vec![announced(Some(8)), announced(Some(8))], 1, "it announced a pool twice"),
        (vec![announced(None)], 1, "a pool came without extents and without QMP"),
        (vec![announced(Some(9))], 1, "its guest's RAM leaves region 1"),
        (vec![ToDaemon::Swept(Sweep::default())], 0, "it swept without a pool"),
        (vec![ToDaemon::PoolRenewed { descriptor: 3 }], 1, "it renewed a pool without one"),
    ];
    for (messages, descriptors, expected) in cases {
        let (client, _agent) = client();
        assert!(announce(&client, 8).is_ok());
        let mut why = String::new();
        for message in messages {
            assert_eq!(why, "", "{expected}: only the last breaks a rule");
            let mut fds = (0..descriptors).map(|_| pool.try_clone().unwrap()).collect();
            why = client.apply(message, &mut fds).err().map_or_else(String::new, |why| why.to_string());
        }
        assert!(why.contains(expected), "{expected}: {why}");
    }
}
