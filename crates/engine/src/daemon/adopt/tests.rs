#![allow(unsafe_code)] // Maps frames as an agent does.

use std::os::fd::AsFd;
use std::time::{Duration, Instant};

use kmem::memfd::{self, MemfdError};
use kmem::mm;
use wire::SEGMENT_PAGES;

use super::*;
use crate::client::scanning::tests::client;
use crate::store::Cursor;
use crate::world::shared::tests::shared;

#[test]
fn frames_that_a_client_maps_outside_of_its_regions_are_kept_when_it_comes_back() {
    let (client, _agent) = client();
    let store = &client.domain.store;
    let mut cursor = Cursor::new(store, None);
    let frames: Vec<_> = (1..=6).map(|byte| cursor.put(&[byte; PAGE_SIZE], 1).unwrap()).collect();
    assert!(frames.is_sorted_by_key(|frame| frame.0) && frames[5].0 - frames[0].0 == 5, "one run");
    let place = mm::map_anonymous(6 * PAGE_SIZE).unwrap();
    let all = Range::new(place, 6 * PAGE_SIZE);
    let offset = (frames[0].slot().index() * PAGE_SIZE) as u64;
    let segment = store.segment(frames[0]).unwrap();
    // SAFETY: only this test knows the memory, and nothing refers to it.
    unsafe { mm::map_fixed_private(segment.fd(), all, offset) }.unwrap();
    // Two pages are a region: the message that the others left in place is lost.
    client
        .state()
        .regions
        .insert(RegionId(1), crate::core::ledger::Region::new((place + 2 * PAGE_SIZE) as u64, 2).unwrap());
    let mut mapped = Mapped::new(&client);
    of_segments(Maps::open(None).unwrap()).unwrap().iter().for_each(|line| mapped.add(line));
    assert_eq!(
        mapped.parts.iter().map(|part| (part.range.start, part.first)).collect::<Vec<_>>(),
        [(place + 2 * PAGE_SIZE, frames[2])]
    );
    let of = |frame: Frame| (frame.0, frame.0 + 2);
    assert_eq!(mapped.outside.0.into_iter().collect::<Vec<_>>(), [of(frames[0]), of(frames[4])]);
    assert_eq!(store.usage().pinned, 0);
    rebuild(&shared(), &client, Maps::open(None).unwrap()).unwrap();
    assert_eq!(store.usage().pinned, 4);
    // SAFETY: the memory is this test's alone, and nothing refers to it.
    unsafe { mm::unmap(all) }.unwrap();
}

#[test]
fn frames_of_a_snapshot_are_merged_with_as_long_as_a_page_maps_one() {
    let shared = shared();
    let (client, _agent) = client();
    let (domain, len) = (&client.domain, SEGMENT_PAGES as usize * PAGE_SIZE);
    let fd = memfd::create_written("pageone:snapshot", len, |fd| {
        for page in [4, 5] {
            let written = rustix::io::pwrite(fd, &[page as u8; PAGE_SIZE], page * PAGE_SIZE as u64);
            written.map_err(MemfdError::Seal)?;
        }
        Ok::<(), MemfdError>(())
    })
    .unwrap();
    let held = domain.store.adopt_snapshot(memfd::identity(&fd).unwrap().ino, fd.try_clone().unwrap()).unwrap();
    let (first, _) = domain.store.hold(held.id).unwrap();
    let range = Range::new(mm::map_anonymous(3 * PAGE_SIZE).unwrap(), 3 * PAGE_SIZE);
    // SAFETY: only this test knows the memory, and nothing refers to it.
    unsafe { mm::map_fixed_private(fd.as_fd(), range, 4 * PAGE_SIZE as u64) }.unwrap();
    client.state().regions.insert(RegionId(1), crate::core::ledger::Region::new(range.start as u64, 3).unwrap());
    rebuild(&shared, &client, Maps::open(None).unwrap()).unwrap();
    let frames = [4, 5, 6].map(|slot| Frame(first.0 + slot));
    let entry = |page| client.state().regions[&RegionId(1)].entry(PageNo(page));
    assert_eq!([0, 1, 2].map(entry), frames.map(Entry::Merged));
    let known = |byte: u8| {
        let digest = domain.digest(&[byte; PAGE_SIZE]);
        domain.index.see(digest, Place::Below(1))
    };
    // The client writes to the first page. A page with its content finds the frame again.
    domain.release(frames[0]);
    let Some(Seen::Known(handle)) = known(4) else { panic!("it was forgotten") };
    let digest = domain.digest(&[4; PAGE_SIZE]);
    assert_eq!(domain.index.place(handle, digest), Some(Place::Frame(frames[0])));
    assert!(domain.store.try_ref(frames[0]));
    assert_eq!(known(0), Some(Seen::First(2)), "no frame is zeros");
    // Nobody maps a frame any more: the segment goes, and nothing names its frames.
    drop(held);
    let tidy = || domain.tidy(Instant::now(), Duration::from_secs(1));
    frames.into_iter().for_each(|frame| domain.release(frame));
    assert_eq!(tidy().len(), 1);
    assert!(matches!(known(4), Some(Seen::First(_))) && domain.store.segment_ids().is_empty());
    // SAFETY: the memory is this test's alone, and nothing refers to it.
    unsafe { mm::unmap(range) }.unwrap();
}

#[test]
fn a_client_that_maps_a_segment_again_and_again_costs_each_frame_once() {
    let (client, _agent) = client();
    let frame = Cursor::new(&client.domain.store, None).put(&[7; PAGE_SIZE], 1).unwrap();
    let (first, segment) = client.domain.store.hold(client.domain.store.segment(frame).unwrap().id).unwrap();
    let len = SEGMENT_PAGES as usize * PAGE_SIZE;
    let mut mapped = Mapped::new(&client);
    let line = |at: usize, len, offset| Line {
        range: Range::new(at, len),
        offset,
        segment: segment.id,
        shared: false,
        snapshot: false,
    };
    for n in 0..30_000 {
        mapped.add(&line(n * len, len, 0));
    }
    let all = |mapped: &Mapped<'_>| mapped.outside.0.clone().into_iter().collect::<Vec<_>>();
    assert_eq!(all(&mapped), [(first.0, first.0 + SEGMENT_PAGES)]);
    // Behind the end of the segment there are no frames, or another segment's.
    let mut mapped = Mapped::new(&client);
    mapped.add(&line(0, 8 * len, len as u64 - PAGE_SIZE as u64));
    [len, usize::MAX & !(PAGE_SIZE - 1)].into_iter().for_each(|offset| mapped.add(&line(1 << 40, len, offset as u64)));
    assert_eq!(all(&mapped), [(first.0 + SEGMENT_PAGES - 1, first.0 + SEGMENT_PAGES)]);
    // Another store's, over the borders of two regions.
    mapped.segments.insert(1, None);
    mapped.regions = vec![(Range::new(4 * len, len), RegionId(3)), (Range::new(5 * len, len), RegionId(2))];
    mapped.add(&Line { segment: 1, ..line(4 * len + PAGE_SIZE, len, 0) });
    let pages = SEGMENT_PAGES;
    let earlier = [(RegionId(2), vec![Run::new(PageNo(0), 1)]), (RegionId(3), vec![Run::new(PageNo(1), pages - 1)])];
    assert_eq!((all(&mapped).len(), mapped.earlier), (1, earlier.into()));
}

#[test]
fn ranges_that_touch_become_one() {
    let mut spans = Spans::default();
    for (first, end) in [(10, 20), (30, 40), (5, 8), (20, 25), (39, 50), (28, 29), (0, 3), (6, 9)] {
        spans.add(first, end);
    }
    let all = |spans: &Spans| spans.0.clone().into_iter().collect::<Vec<_>>();
    assert_eq!(all(&spans), [(0, 3), (5, 9), (10, 25), (28, 29), (30, 50)]);
    spans.add(2, 45);
    assert_eq!(all(&spans), [(0, 50)]);
}
