//! Every interleaving of insertions with harvests, on both sides of a level. How to run it:
//! `docs/design/dirty.md`.

use std::ops::Range;
use std::sync::Arc;

use loom::sync::atomic::{AtomicU64, Ordering::Relaxed};
use loom::thread;

use crate::{Bitmap, DirtyList, DirtySet, DirtyTree, barrier};

/// A leaf and the root.
const TWO_LEVELS: u64 = 128;
/// A leaf, a node and the root.
const THREE_LEVELS: u64 = 64 * 64 + 64;

/// Runs a model with both ways of inserting.
fn both_ways(model: impl Fn() + Sync + Send + Clone + 'static) {
    for asymmetric in [false, true] {
        let model = model.clone();
        loom::model(move || {
            barrier::choose(asymmetric);
            model();
        });
    }
}

fn take(set: &dyn DirtySet, mut within: Range<u64>, room: usize) -> Vec<u64> {
    let mut out = vec![0; room];
    let n = set.take_frames(&mut within, &mut out);
    out.truncate(n);
    out
}

/// The reported frames are the inserted ones, once for each insertion at most.
fn check(set: &dyn DirtySet, mut reported: Vec<u64>, inserted: &[u64]) {
    reported.extend(take(set, 0..set.frames(), 8));
    for &frame in inserted {
        let times = inserted.iter().filter(|f| **f == frame).count();
        let reports = reported.iter().filter(|f| **f == frame).count();
        assert!((1..=times).contains(&reports), "{frame}: {reports} reports of {times} insertions");
    }
    assert!(reported.iter().all(|f| inserted.contains(f)), "{reported:?}");
    assert!(take(set, 0..set.frames(), 8).is_empty());
}

fn spawn_insert(set: &Arc<impl DirtySet + 'static>, frame: u64) -> thread::JoinHandle<()> {
    let set = set.clone();
    thread::spawn(move || assert!(set.insert(frame)))
}

/// One thread inserts, one takes everything.
fn insert_against_take(frames: u64, frame: u64) {
    both_ways(move || {
        let tree = Arc::new(DirtyTree::new(frames).unwrap());
        let inserter = spawn_insert(&tree, frame);
        let reported = take(&*tree, 0..frames, 8);
        inserter.join().unwrap();
        check(&*tree, reported, &[frame]);
    });
}

#[test]
fn an_insertion_races_a_harvest_over_two_levels() {
    insert_against_take(TWO_LEVELS, 70);
}

#[test]
fn an_insertion_races_a_harvest_over_three_levels() {
    insert_against_take(THREE_LEVELS, 4100);
}

/// The frame is in the set already: the harvest takes the bit that the insertion looks at.
fn insert_again_against_take(frames: u64) {
    both_ways(move || {
        let tree = Arc::new(DirtyTree::new(frames).unwrap());
        tree.insert(70);
        let inserter = spawn_insert(&tree, 70);
        let reported = take(&*tree, 0..frames, 8);
        inserter.join().unwrap();
        check(&*tree, reported, &[70, 70]);
    });
}

#[test]
fn a_frame_is_inserted_again_while_it_is_taken_over_two_levels() {
    insert_again_against_take(TWO_LEVELS);
}

#[test]
fn a_frame_is_inserted_again_while_it_is_taken_over_three_levels() {
    insert_again_against_take(THREE_LEVELS);
}

/// Two threads insert, into one leaf, into neighbours, or below different nodes.
fn two_insert_against_take(frames: u64, a: u64, b: u64) {
    both_ways(move || {
        let tree = Arc::new(DirtyTree::new(frames).unwrap());
        let inserters = [spawn_insert(&tree, a), spawn_insert(&tree, b)];
        let reported = take(&*tree, 0..frames, 8);
        inserters.into_iter().for_each(|i| i.join().unwrap());
        check(&*tree, reported, &[a, b]);
    });
}

#[test]
fn two_insert_the_same_frame_while_it_is_taken() {
    two_insert_against_take(TWO_LEVELS, 70, 70);
}

#[test]
fn two_insert_into_one_leaf_while_it_is_taken() {
    two_insert_against_take(TWO_LEVELS, 70, 71);
}

#[test]
fn two_insert_into_neighbours_while_they_are_taken() {
    two_insert_against_take(TWO_LEVELS, 3, 71);
}

#[test]
fn two_insert_below_different_nodes_while_they_are_taken() {
    two_insert_against_take(THREE_LEVELS, 3, 4100);
}

/// When an insertion has returned, a harvest that begins then finds the frame, also while another
/// thread inserts it.
fn found_at_once(frames: u64) {
    both_ways(move || {
        let tree = Arc::new(DirtyTree::new(frames).unwrap());
        let other = spawn_insert(&tree, 70);
        tree.insert(70);
        let reported = take(&*tree, 0..frames, 8);
        assert_eq!(reported, [70]);
        other.join().unwrap();
        check(&*tree, reported, &[70, 70]);
    });
}

#[test]
fn a_frame_is_found_when_its_insertion_has_returned_over_two_levels() {
    found_at_once(TWO_LEVELS);
}

#[test]
fn a_frame_is_found_when_its_insertion_has_returned_over_three_levels() {
    found_at_once(THREE_LEVELS);
}

/// A harvest without room puts back the frames that it took, while others insert.
fn put_back(frames: u64, there: [u64; 2], new: u64) {
    both_ways(move || {
        let tree = Arc::new(DirtyTree::new(frames).unwrap());
        assert!(there.iter().all(|&f| tree.insert(f)));
        let inserter = spawn_insert(&tree, new);
        let reported = take(&*tree, 0..frames, 1);
        assert_eq!(reported.len(), 1);
        inserter.join().unwrap();
        let [a, b] = there;
        check(&*tree, reported, &[a, b, new]);
    });
}

#[test]
fn what_found_no_room_is_put_back_in_its_leaf() {
    put_back(TWO_LEVELS, [70, 71], 72);
}

#[test]
fn what_found_no_room_is_put_back_below_its_node() {
    put_back(THREE_LEVELS, [3, 4100], 70);
}

#[test]
fn a_part_is_taken_while_its_neighbourhood_changes() {
    both_ways(|| {
        let tree = Arc::new(DirtyTree::new(THREE_LEVELS).unwrap());
        tree.insert(4097);
        let inserter = spawn_insert(&tree, 4100);
        let reported = take(&*tree, 4000..4099, 8);
        assert_eq!(reported, [4097]);
        inserter.join().unwrap();
        check(&*tree, reported, &[4097, 4100]);
    });
}

#[test]
fn two_harvests_share_what_there_is() {
    both_ways(|| {
        let tree = Arc::new(DirtyTree::new(TWO_LEVELS).unwrap());
        tree.insert(3);
        let other = {
            let tree = tree.clone();
            thread::spawn(move || take(&*tree, 0..TWO_LEVELS, 8))
        };
        tree.insert(70);
        let mut reported = take(&*tree, 0..TWO_LEVELS, 8);
        reported.extend(other.join().unwrap());
        check(&*tree, reported, &[3, 70]);
    });
}

/// Writes before an insertion are visible to the thread that takes the frame; with
/// read-modify-writes, which loom can check.
fn content_is_visible<S: DirtySet + 'static>(make: fn() -> S, there: bool) {
    loom::model(move || {
        barrier::choose(false);
        let (set, page) = (Arc::new(make()), Arc::new(AtomicU64::new(0)));
        if there {
            set.insert(70);
        }
        let inserter = {
            let (set, page) = (set.clone(), page.clone());
            thread::spawn(move || {
                page.store(1, Relaxed);
                set.insert(70);
            })
        };
        let mut seen = 0;
        if !take(&*set, 0..TWO_LEVELS, 8).is_empty() {
            seen = page.load(Relaxed);
        }
        // No join: it would make the write visible by itself.
        if !take(&*set, 0..TWO_LEVELS, 8).is_empty() {
            seen = page.load(Relaxed);
        }
        inserter.join().unwrap();
        if !take(&*set, 0..TWO_LEVELS, 8).is_empty() {
            seen = page.load(Relaxed);
        }
        assert_eq!(seen, 1, "the last write was not reported");
    });
}

#[test]
fn content_is_visible_through_a_tree() {
    content_is_visible(|| DirtyTree::new(TWO_LEVELS).unwrap(), false);
    content_is_visible(|| DirtyTree::new(TWO_LEVELS).unwrap(), true);
}

#[test]
fn content_is_visible_through_a_bitmap() {
    content_is_visible(|| Bitmap::new(TWO_LEVELS).unwrap(), true);
}

#[test]
fn content_is_visible_through_a_list() {
    content_is_visible(|| DirtyList::new(TWO_LEVELS, 4).unwrap(), true);
}

/// The ring goes round while it is emptied.
#[test]
fn a_list_of_two_places_goes_round() {
    loom::model(|| {
        barrier::choose(false);
        let list = Arc::new(DirtyList::new(100, 2).unwrap());
        list.insert(1);
        let inserter = {
            let list = list.clone();
            thread::spawn(move || [2, 3].into_iter().filter(|&f| list.insert(f)).collect::<Vec<_>>())
        };
        let reported = take(&*list, 0..100, 8);
        let mut inserted = inserter.join().unwrap();
        inserted.push(1);
        assert!(inserted.contains(&2), "there was room for two");
        check(&*list, reported, &inserted);
    });
}

/// A place that was drawn and not filled does not hide the places behind it.
#[test]
fn a_list_shows_what_was_inserted_at_once() {
    loom::model(|| {
        let list = Arc::new(DirtyList::new(100, 4).unwrap());
        let other = spawn_insert(&list, 1);
        list.insert(2);
        let reported = take(&*list, 0..100, 8);
        assert!(reported.contains(&2), "{reported:?}");
        other.join().unwrap();
        check(&*list, reported, &[1, 2]);
    });
}
