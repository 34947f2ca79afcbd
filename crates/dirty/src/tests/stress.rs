//! Threads insert while another one takes, with an oracle: a page's content is a counter that its
//! writer raises before it inserts, and the harvester reads after it has taken the frame. At the
//! end every counter must have been seen at its last value.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::*};

use crate::{Bitmap, DirtyList, DirtySet, DirtyTree};

/// Rounds of a writer. ThreadSanitizer and debug builds are slow.
const ROUNDS: u64 = if cfg!(debug_assertions) { 20_000 } else { 300_000 };
const WRITERS: u64 = 3;

/// A small generator of numbers, the same in each run.
fn next(state: &mut u64) -> u64 {
    *state ^= *state << 13;
    *state ^= *state >> 7;
    *state ^= *state << 17;
    *state
}

/// Writes to pages and inserts their frames; most of them are `hot` frames.
fn write_and_insert(set: &dyn DirtySet, pages: &[AtomicU64], inserted: &AtomicU64, hot: u64, seed: u64) {
    let frames = set.frames();
    let mut state = seed * 7919 + 1;
    for _ in 0..ROUNDS {
        let number = next(&mut state);
        // Mostly few frames, so that threads meet; now and then any frame.
        let frame = if number & 7 != 0 { (number >> 8) % hot * 61 % frames } else { (number >> 8) % frames };
        pages[frame as usize].fetch_add(1, Relaxed);
        while !set.insert(frame) {
            std::thread::yield_now();
        }
        inserted.fetch_add(1, Relaxed);
    }
}

/// `harvesters` threads take from the set while others write. `room`: frames of a harvester's
/// buffer.
fn stress(set: &dyn DirtySet, harvesters: usize, room: usize, hot: u64) {
    let frames = set.frames();
    let pages: Vec<AtomicU64> = (0..frames).map(|_| AtomicU64::new(0)).collect();
    let seen: Vec<AtomicU64> = (0..frames).map(|_| AtomicU64::new(0)).collect();
    let (inserted, reported) = (AtomicU64::new(0), AtomicU64::new(0));
    let done = AtomicBool::new(false);
    let harvest = |part: std::ops::Range<u64>, as_ranges: bool| {
        let (mut within, mut frames, mut ranges) = (part, vec![0; room], vec![0..0; room]);
        while !within.is_empty() {
            let found: Vec<u64> = if as_ranges {
                let n = set.take_ranges(&mut within, &mut ranges);
                ranges[..n].iter().cloned().flatten().collect()
            } else {
                let n = set.take_frames(&mut within, &mut frames);
                frames[..n].to_vec()
            };
            reported.fetch_add(found.len() as u64, Relaxed);
            for frame in found {
                let value = pages[frame as usize].load(Relaxed);
                seen[frame as usize].fetch_max(value, Relaxed);
            }
        }
    };
    std::thread::scope(|scope| {
        let writers: Vec<_> = (0..WRITERS)
            .map(|seed| {
                let (pages, inserted) = (&pages, &inserted);
                scope.spawn(move || {
                    write_and_insert(set, pages, inserted, hot, seed);
                })
            })
            .collect();
        for number in 0..harvesters as u64 {
            let (done, harvest) = (&done, &harvest);
            scope.spawn(move || {
                let mut state = number + 77;
                while !done.load(Relaxed) {
                    let (a, b) = (next(&mut state) % (frames + 1), next(&mut state) % (frames + 1));
                    harvest(if a % 3 == 0 { a.min(b)..a.max(b) } else { 0..frames }, a % 2 == 0);
                }
            });
        }
        writers.into_iter().for_each(|writer| writer.join().unwrap());
        done.store(true, Relaxed);
    });
    harvest(0..frames, false);
    let lost = (0..frames as usize).filter(|&f| seen[f].load(Relaxed) != pages[f].load(Relaxed)).count();
    assert_eq!(lost, 0, "pages whose last write was not reported");
    let (inserted, reported) = (inserted.into_inner(), reported.into_inner());
    assert!(reported <= inserted, "{reported} reports of {inserted} insertions");
    assert!((0..frames.min(5000)).all(|f| !set.contains(f)), "all frames were taken");
}

#[test]
fn a_tree_loses_nothing() {
    for (frames, hot) in [(40, 40), (64 * 64 * 3 + 17, 100), (64 * 64 * 64 + 65, 5000)] {
        stress(&DirtyTree::new(frames).unwrap(), 1, 1000, hot);
    }
}

#[test]
fn a_tree_loses_nothing_between_two_harvesters_with_little_room() {
    for room in [1, 7, 70] {
        stress(&DirtyTree::new(64 * 64 * 3 + 17).unwrap(), 2, room, 300);
    }
}

#[test]
fn a_bitmap_loses_nothing() {
    stress(&Bitmap::new(64 * 64 + 17).unwrap(), 2, 100, 300);
}

#[test]
fn a_list_loses_nothing() {
    stress(&DirtyList::new(64 * 64 + 17, 64).unwrap(), 2, 10, 300);
}

/// When an insertion has returned and no harvest is under way, the frame is found, also if another
/// thread set the bits above it.
#[test]
fn what_was_inserted_is_found_at_once() {
    let tree = DirtyTree::new(64 * 64 * 2).unwrap();
    let rounds = ROUNDS / 20;
    let barrier = std::sync::Barrier::new(2);
    std::thread::scope(|scope| {
        let mut other = scope.spawn(|| {
            for _ in 0..rounds {
                barrier.wait();
                tree.insert(4097);
                barrier.wait();
            }
        });
        let _ = &mut other;
        for _ in 0..rounds {
            barrier.wait();
            tree.insert(4097);
            // The other one may be between its steps now.
            let (mut out, mut all) = ([0; 4], 0..u64::MAX);
            let first = tree.take_frames(&mut all, &mut out);
            barrier.wait();
            let mut all = 0..u64::MAX;
            let second = tree.take_frames(&mut all, &mut out);
            assert!(first == 1 && second <= 1, "{first} then {second}");
        }
    });
}
