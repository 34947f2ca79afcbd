//! The layout's arithmetic, and both sides in one thread against plain sets.

use std::collections::BTreeSet;
use std::ops::Range;
use std::ptr::NonNull;
use std::sync::atomic::Ordering::SeqCst;

use proptest::prelude::*;

use crate::layout::UNIT;
use crate::{Field, Guest, Host, Layout, LayoutError, MAX_FRAMES, Pool, PoolError, Ram, Stuck, guest_frames};

#[test]
fn layouts_fit_their_pools_and_use_them() {
    for shift in 14..33 {
        let len = 1usize << shift;
        let layout = Layout::of_pool(len).unwrap();
        assert!(layout.bytes <= len);
        assert!(layout.free == UNIT && layout.claims == layout.free + layout.frames as usize / 8);
        assert!(layout.summary == layout.claims + layout.frames as usize / 8);
        assert!(layout.bytes - layout.summary >= layout.frames as usize / 64 / 8);
        // One page of F more would not fit.
        let more = layout.frames as usize / 32_768 + 1;
        assert!(UNIT * (1 + 2 * more + more.div_ceil(64)) > len, "{len}");
        assert_eq!(Layout::for_frames(layout.frames).unwrap(), layout);
        assert_eq!(layout.pool_bytes(), len);
    }
    assert_eq!(Layout::of_pool(8192), Err(LayoutError::Bytes(8192)));
    // A guest of 8 GiB.
    let layout = Layout::for_frames(guest_frames(8 << 30)).unwrap();
    assert_eq!(layout.pool_bytes(), 1 << 20);
}

#[test]
fn headers_are_checked() {
    let pool = Pool::private(1000).unwrap();
    assert_eq!(pool.validate(), Ok(()));
    pool.words_for_tests()[1].store(2, SeqCst);
    assert_eq!(pool.validate(), Err(PoolError::Version(2)));
}

#[test]
#[allow(unsafe_code, reason = "a pool is made of a raw mapping")]
fn memory_that_is_no_pool_is_refused_with_a_sentence() {
    let many = MAX_FRAMES + 1;
    let error = Layout::for_frames(many).unwrap_err();
    assert_eq!(error, LayoutError::Frames(many));
    assert!(error.to_string().starts_with(&format!("{many} frames are more than a pool can have")), "{error}");
    let mut words = vec![0_u64; 4 * UNIT / 8 + 1];
    let start = NonNull::new(words.as_mut_ptr().cast::<u8>()).unwrap();
    // SAFETY: as long as the pool lives this many bytes of the vector are used by it alone.
    let mapped = |at: NonNull<u8>| unsafe { Pool::from_mapping(at, 4 * UNIT) };
    // SAFETY: one byte further is in the vector still.
    let error = mapped(unsafe { start.add(1) }).map(drop).unwrap_err();
    assert_eq!(error, PoolError::Unaligned(start.as_ptr() as usize + 1));
    assert!(error.to_string().contains("has to start at a page"), "{error}");
    let pool = mapped(start).unwrap();
    let error = pool.validate().unwrap_err();
    assert_eq!(error, PoolError::Magic(0));
    assert!(error.to_string().contains("the pool is not initialised"), "{error}");
    pool.initialise();
    let (field, expected) = (Field::Frames, pool.frames());
    for (wrong, value, want) in
        [(Field::Features, 4, PoolError::Features(4)), (field, 7, PoolError::Header { field, found: 7, expected })]
    {
        let word = &pool.words_for_tests()[wrong as usize];
        let before = word.swap(value, SeqCst);
        assert_eq!(pool.validate(), Err(want));
        word.store(before, SeqCst);
    }
    assert_eq!(pool.validate(), Ok(()));
}

#[test]
fn a_host_that_does_not_let_go_is_not_waited_for() {
    let pool = Pool::private(64).unwrap();
    let (guest, host) = (Guest::new(&pool), Host::new(&pool, Ram::new(std::iter::once(0..64))));
    guest.mark(3..5);
    let claim = host.claim(0, u64::MAX).unwrap();
    let error = guest.cancel(4..5, || false).unwrap_err();
    assert_eq!(error, Stuck { word: 0 });
    assert!(error.to_string().contains("keep the pages unused"), "{error}");
    drop(claim);
    assert!(!guest.claimed(4..5) && guest.cancel(4..5, || false).is_ok());
}

#[test]
fn what_is_marked_is_recycled_by_runs_and_once() {
    let pool = Pool::private(100_000).unwrap();
    let (guest, mut host) = (Guest::new(&pool), Host::new(&pool, Ram::new(std::iter::once(0..90_000))));
    guest.mark(5..700);
    guest.mark(89_990..90_010);
    assert_eq!(guest.cancel(100..101, || false).unwrap().won, 1);
    let mut seen = Vec::new();
    let mut within = 0..pool.frames();
    let done = host.recycle(&mut within, u64::MAX, |runs| {
        seen.extend_from_slice(runs);
        Ok::<_, ()>(())
    });
    assert_eq!(seen, [5..100, 101..700, 89_990..90_000]);
    assert_eq!(done.unwrap().pages, 95 + 599 + 10);
    assert!(within.is_empty());
    assert_eq!((host.marked(), host.pending(u64::MAX)), (0, 0));
    assert_eq!(guest.cancel(5..700, || false).unwrap().won, 0);
}

#[test]
fn work_is_looked_for_below_a_limit_only() {
    let pool = Pool::private(100_000).unwrap();
    let (guest, host) = (Guest::new(&pool), Host::new(&pool, Ram::default()));
    guest.mark(5..6);
    guest.mark(90_000..90_001);
    assert_eq!([0, 1, 4096, 90_001, u64::MAX].map(|end| host.pending(end)), [0, 1, 1, 2, 2]);
}

/// Frames of the model: more than one word of S stands for.
const FRAMES: u64 = 9000;

#[derive(Clone, Debug)]
enum Step {
    Mark(Range<u64>),
    Cancel(Range<u64>),
    Recycle { within: Range<u64>, most: u64, fails: bool },
    Forget,
}

fn range() -> impl Strategy<Value = Range<u64>> {
    (0..FRAMES, prop_oneof![1..4u64, 50..200u64, 1..FRAMES]).prop_map(|(start, len)| start..start + len)
}

fn step() -> impl Strategy<Value = Step> {
    prop_oneof![
        6 => range().prop_map(Step::Mark),
        4 => range().prop_map(Step::Cancel),
        4 => (range(), prop_oneof![1..100u64, Just(u64::MAX)], prop::bool::weighted(0.1))
            .prop_map(|(within, most, fails)| Step::Recycle { within, most, fails }),
        1 => Just(Step::Forget),
    ]
}

proptest! {
    #[test]
    fn both_sides_do_what_sets_do(steps in prop::collection::vec(step(), 1..60), hole in range()) {
        let pool = Pool::private(FRAMES).unwrap();
        let ram = Ram::new([0..hole.start, hole.end..FRAMES]);
        let is_ram = |frame: &u64| *frame < FRAMES && !hole.contains(frame);
        let (guest, mut host) = (Guest::new(&pool), Host::new(&pool, ram));
        let mut marked = BTreeSet::new();
        for step in steps {
            match step {
                Step::Mark(frames) => {
                    guest.mark(frames.clone());
                    marked.extend(frames.filter(is_ram));
                }
                Step::Cancel(frames) => {
                    guest.cancel(frames.clone(), || false).unwrap();
                    marked.retain(|frame| !frames.contains(frame));
                }
                Step::Recycle { within, most, fails } => {
                    let whole = within.start / 64 * 64..within.end.div_ceil(64) * 64;
                    let expected: Vec<u64> = marked.iter().copied().filter(|frame| whole.contains(frame)).collect();
                    let (mut rest, mut seen) = (within.clone(), Vec::new());
                    let done = host.recycle(&mut rest, most, |runs| {
                        seen.extend(runs.iter().flat_map(Clone::clone));
                        if fails { Err(()) } else { Ok(()) }
                    });
                    // Ascending from the start, without gaps.
                    prop_assert_eq!(&seen[..], &expected[..seen.len()]);
                    if !fails {
                        let done = done.unwrap();
                        prop_assert_eq!(done.pages, seen.len() as u64);
                        prop_assert!(rest.is_empty() && seen.len() == expected.len() || done.pages >= most);
                        prop_assert!(done.pages < most.saturating_add(64));
                    }
                    seen.iter().for_each(|frame| assert!(marked.remove(frame), "{frame} twice"));
                }
                Step::Forget => {
                    host.forget();
                    marked.clear();
                }
            }
            prop_assert_eq!(host.marked(), marked.len() as u64);
            prop_assert!(!guest.claimed(0..FRAMES));
        }
        // S leads to all that is left.
        let mut left = Vec::new();
        let sweep = host.recycle(&mut (0..pool.frames()), u64::MAX, |runs| {
            left.extend(runs.iter().flat_map(Clone::clone));
            Ok::<_, ()>(())
        });
        prop_assert_eq!(sweep.unwrap().pages, left.len() as u64);
        prop_assert_eq!(left, marked.into_iter().collect::<Vec<_>>());
        prop_assert_eq!(host.pending(u64::MAX), 0);
    }
}
