//! Against a `BTreeSet`, at every size where a level begins or ends.

use std::collections::BTreeSet;
use std::ops::Range;

use proptest::prelude::*;

use crate::{Bitmap, DirtyList, DirtySet, DirtyTree, MAX_FRAMES, NewError};

/// Sizes around the powers of 64, and sizes whose last word is not whole.
fn sizes() -> Vec<u64> {
    let mut all = vec![1, 2, 63];
    for power in [64u64, 64 * 64, 64 * 64 * 64, 64 * 64 * 64 * 64] {
        all.extend([power - 1, power, power + 1, 2 * power - 1, power + 63, power + 64, power + 65]);
    }
    all
}

#[derive(Clone, Debug)]
enum Step {
    Insert(u64),
    InsertRange(u64, u64),
    Remove(u64, u64),
    Merge(u64, Vec<u64>),
    Harvest(Range<u64>, usize),
    HarvestRanges(Range<u64>, usize),
    Take(Range<u64>, usize),
    TakeRanges(Range<u64>, usize),
    Drain(Range<u64>, usize),
    Clear,
    Resize(u64),
}

/// Frames are numbers in thousandths of a thousandth of the size, pulled towards its end and its
/// word boundaries.
fn frame(frames: u64) -> impl Strategy<Value = u64> {
    prop_oneof![
        4 => 0..frames + frames / 8 + 3,
        2 => (0..frames.div_ceil(64) + 1).prop_map(|word| word * 64),
        1 => frames.saturating_sub(70)..frames + 2,
        1 => 0..frames.min(200),
    ]
}

fn range(frames: u64) -> impl Strategy<Value = Range<u64>> {
    prop_oneof![
        1 => Just(0..frames),
        1 => Just(0..u64::MAX),
        4 => (frame(frames), frame(frames)).prop_map(|(a, b)| a.min(b)..a.max(b)),
    ]
}

fn room() -> impl Strategy<Value = usize> {
    prop_oneof![0usize..4, 0usize..200, Just(1000)]
}

fn step(frames: u64) -> impl Strategy<Value = Step> {
    prop_oneof![
        6 => frame(frames).prop_map(Step::Insert),
        3 => (frame(frames), prop_oneof![0u64..200, 0u64..10_000]).prop_map(|(first, n)| Step::InsertRange(first, n)),
        2 => (frame(frames), 0u64..5000).prop_map(|(first, n)| Step::Remove(first, n)),
        2 => (frame(frames), prop::collection::vec(prop_oneof![Just(0), Just(u64::MAX), any::<u64>()], 0..6))
            .prop_map(|(first, words)| Step::Merge(first, words)),
        1 => (range(frames), room()).prop_map(|(r, n)| Step::Harvest(r, n)),
        1 => (range(frames), room()).prop_map(|(r, n)| Step::HarvestRanges(r, n)),
        2 => (range(frames), room()).prop_map(|(r, n)| Step::Take(r, n)),
        2 => (range(frames), room()).prop_map(|(r, n)| Step::TakeRanges(r, n)),
        2 => (range(frames), room()).prop_map(|(r, n)| Step::Drain(r, n)),
        1 => Just(Step::Clear),
        1 => prop_oneof![0..frames, Just(frames), frames..frames * 2 + 70].prop_map(Step::Resize),
    ]
}

fn case() -> impl Strategy<Value = (u64, Vec<Step>)> {
    prop::sample::select(sizes()).prop_flat_map(|frames| (Just(frames), prop::collection::vec(step(frames), 0..30)))
}

/// The model's frames in a range.
fn inside(model: &BTreeSet<u64>, within: &Range<u64>) -> Vec<u64> {
    if within.start >= within.end { Vec::new() } else { model.range(within.clone()).copied().collect() }
}

fn frames_of(ranges: &[Range<u64>]) -> Vec<u64> {
    ranges.iter().cloned().flatten().collect()
}

/// One harvest with little room: the first frames in the range, and the right place to go on from.
fn check_part(found: &[u64], all: &[u64], before: &Range<u64>, after: &Range<u64>) -> Result<(), TestCaseError> {
    prop_assert_eq!(found, &all[..found.len().min(all.len())]);
    prop_assert_eq!(after.end, before.end);
    if found.len() == all.len() {
        prop_assert!(after.is_empty(), "{after:?}");
    } else {
        prop_assert_eq!(after.start, all[found.len()]);
    }
    Ok(())
}

/// Every word that is not 0 has its bit set above it.
fn check_whole(tree: &DirtyTree, model: &BTreeSet<u64>) -> Result<(), TestCaseError> {
    prop_assert!(tree.iter().eq(model.iter().copied()));
    prop_assert_eq!(tree.count(), model.len() as u64);
    prop_assert_eq!(tree.is_empty(), model.is_empty());
    let mut bitmap = vec![u64::MAX; tree.frames().div_ceil(64) as usize + 1];
    tree.export(&mut bitmap);
    let mut expected = vec![0; bitmap.len()];
    model.iter().for_each(|&f| expected[f as usize / 64] |= 1 << (f % 64));
    prop_assert_eq!(bitmap, expected);
    Ok(())
}

/// Takes a step on the tree and on the model, and compares the results.
fn apply(tree: &mut DirtyTree, model: &mut BTreeSet<u64>, frames: &mut u64, step: Step) -> Result<(), TestCaseError> {
    match step {
        Step::Insert(frame) => {
            prop_assert_eq!(tree.insert(frame), frame < *frames);
            model.extend((frame < *frames).then_some(frame));
            prop_assert_eq!(tree.contains(frame), frame < *frames);
        }
        Step::InsertRange(first, n) => {
            tree.insert_range(first, n);
            model.extend(first..(first + n).min(*frames));
        }
        Step::Remove(first, n) => {
            tree.remove_range(first, n);
            model.retain(|f| !(first..first + n).contains(f));
        }
        Step::Merge(first, words) => {
            tree.merge(first, &words);
            let bits = (0..words.len() as u64 * 64).filter(|&i| words[i as usize / 64] >> (i % 64) & 1 == 1);
            model.extend(bits.map(|i| first + i).filter(|&f| f < *frames));
        }
        Step::Clear => {
            tree.clear();
            model.clear();
        }
        Step::Resize(to) => {
            tree.resize(to).unwrap();
            *frames = to;
            model.retain(|&f| f < to);
            prop_assert_eq!(tree.frames(), to);
        }
        harvest => apply_harvest(tree, model, harvest)?,
    }
    Ok(())
}

/// Takes a step that harvests, with or without clearing.
fn apply_harvest(tree: &mut DirtyTree, model: &mut BTreeSet<u64>, step: Step) -> Result<(), TestCaseError> {
    match step {
        Step::Harvest(within, room) => {
            let (mut out, mut left) = (vec![u64::MAX; room], within.clone());
            let n = tree.harvest_frames(&mut left, &mut out);
            check_part(&out[..n], &inside(model, &within), &within, &left)?;
            prop_assert!(left.is_empty() || n == room);
        }
        Step::HarvestRanges(within, room) => {
            let (mut out, mut left) = (vec![0..0; room], within.clone());
            let n = tree.harvest_ranges(&mut left, &mut out);
            check_part(&frames_of(&out[..n]), &inside(model, &within), &within, &left)?;
            prop_assert!(left.is_empty() || n == room);
            prop_assert!(out[..n].windows(2).all(|w| w[0].end < w[1].start), "{out:?}");
        }
        Step::Take(within, room) => {
            let (mut out, mut left) = (vec![u64::MAX; room], within.clone());
            let n = tree.take_frames(&mut left, &mut out);
            check_part(&out[..n], &inside(model, &within), &within, &left)?;
            prop_assert!(left.is_empty() || n == room);
            model.retain(|f| !out[..n].contains(f));
        }
        Step::Drain(within, room) => {
            let (mut out, mut left) = (vec![u64::MAX; room], within.clone());
            let n = tree.drain_frames(&mut left, &mut out);
            check_part(&out[..n], &inside(model, &within), &within, &left)?;
            prop_assert!(left.is_empty() || n == room);
            model.retain(|f| !out[..n].contains(f));
        }
        Step::TakeRanges(within, room) => {
            let (mut out, mut left) = (vec![0..0; room], within.clone());
            let n = tree.take_ranges(&mut left, &mut out);
            let found = frames_of(&out[..n]);
            check_part(&found, &inside(model, &within), &within, &left)?;
            prop_assert!(left.is_empty() || n == room);
            model.retain(|f| !found.contains(f));
        }
        other => unreachable!("{other:?} harvests nothing"),
    }
    Ok(())
}

proptest! {
    #[test]
    fn behaves_as_a_set((frames, steps) in case()) {
        let mut tree = DirtyTree::new(frames).unwrap();
        let mut model = BTreeSet::new();
        let mut frames = frames;
        for step in steps {
            apply(&mut tree, &mut model, &mut frames, step)?;
            check_whole(&tree, &model)?;
        }
        for from in [0, 1, 63, 64, frames / 2, frames.saturating_sub(1), frames, frames + 1, u64::MAX] {
            prop_assert_eq!(tree.next(from), model.range(from..).next().copied());
        }
    }

    #[test]
    fn unites_and_subtracts(
        sizes in (prop::sample::select(sizes()), prop::sample::select(sizes())),
        a in prop::collection::btree_set(0u64..20_000, 0..60),
        b in prop::collection::btree_set(0u64..20_000, 0..60),
        both in prop::collection::btree_set(0u64..20_000, 0..60),
    ) {
        let set = |frames: u64, own: &BTreeSet<u64>| {
            let tree = DirtyTree::new(frames).unwrap();
            let model: BTreeSet<u64> = own.union(&both).copied().filter(|&f| f < frames).collect();
            model.iter().for_each(|&f| assert!(tree.insert(f)));
            (tree, model)
        };
        let ((mut one, model), (other, its_model)) = (set(sizes.0, &a), set(sizes.1, &b));
        one.unite(&other);
        let united = model.union(&its_model).copied().filter(|&f| f < sizes.0).collect();
        check_whole(&one, &united)?;
        one.subtract(&other);
        check_whole(&one, &united.difference(&its_model).copied().collect())?;
    }

    /// The contract of the trait holds for all three sets.
    #[test]
    fn all_three_take_the_same(
        frames in prop::sample::select(sizes()),
        picks in prop::collection::vec(any::<u64>(), 0..150),
        cut in (any::<u64>(), any::<u64>()),
        room in 1usize..100,
        as_ranges in any::<bool>(),
    ) {
        let model: BTreeSet<u64> = picks.iter().map(|p| p % frames).collect();
        let (a, b) = (cut.0 % (frames + 1), cut.1 % (frames + 1));
        let within = a.min(b)..a.max(b);
        let tree = DirtyTree::new(frames).unwrap();
        let bitmap = Bitmap::new(frames).unwrap();
        let list = DirtyList::new(frames, 150).unwrap();
        let sets: [&dyn DirtySet; 3] = [&tree, &bitmap, &list];
        for set in sets {
            prop_assert_eq!(set.frames(), frames);
            prop_assert!(!set.insert(frames));
            for &frame in &model {
                prop_assert!(set.insert(frame));
            }
            let whole = 0..frames;
            for mut part in [within.clone(), whole] {
                let expected: BTreeSet<u64> =
                    model.iter().copied().filter(|f| part.contains(f) && (part == within || !within.contains(f))).collect();
                let mut found = Vec::new();
                while !part.is_empty() {
                    if as_ranges {
                        let mut out = vec![0..0; room];
                        let n = set.take_ranges(&mut part, &mut out);
                        found.extend(frames_of(&out[..n]));
                    } else {
                        let mut out = vec![0; room];
                        let n = set.take_frames(&mut part, &mut out);
                        found.extend(&out[..n]);
                    }
                }
                prop_assert_eq!(found.len(), expected.len(), "twice, or too few");
                prop_assert_eq!(found.into_iter().collect::<BTreeSet<_>>(), expected);
                if within == (0..frames) {
                    break;
                }
            }
            prop_assert!((0..frames.min(100)).all(|f| !set.contains(f)));
        }
    }

    #[test]
    fn a_bitmap_harvests_what_it_holds(
        frames in prop::sample::select(sizes()),
        picks in prop::collection::vec(any::<u64>(), 0..150),
        cut in (any::<u64>(), any::<u64>()),
        room in 0usize..200,
    ) {
        let model: BTreeSet<u64> = picks.iter().map(|p| p % frames).collect();
        let bitmap = Bitmap::new(frames).unwrap();
        model.iter().for_each(|&f| assert!(bitmap.insert(f) && bitmap.contains(f)));
        let (a, b) = (cut.0 % (frames + 1), cut.1 % (frames + 1));
        let within = a.min(b)..a.max(b);
        let (mut out, mut left) = (vec![0; room], within.clone());
        let n = bitmap.harvest_frames(&mut left, &mut out);
        check_part(&out[..n], &inside(&model, &within), &within, &left)?;
        let (mut out, mut left) = (vec![0..0; room], within.clone());
        let n = bitmap.harvest_ranges(&mut left, &mut out);
        check_part(&frames_of(&out[..n]), &inside(&model, &within), &within, &left)?;
    }
}

#[test]
fn every_single_frame_of_every_size_is_found() {
    for frames in sizes().into_iter().filter(|&n| n <= 64 * 64 + 65) {
        let tree = DirtyTree::new(frames).unwrap();
        for frame in 0..frames {
            assert!(tree.insert(frame));
            let (mut out, mut all) = ([0; 2], 0..frames);
            assert_eq!((tree.take_frames(&mut all, &mut out), out[0]), (1, frame), "of {frames}");
            assert!(tree.is_empty() && all.is_empty());
        }
    }
}

/// Nodes with all, all but one, or half of their leaves, in all orders: the ways through them
/// differ.
#[test]
fn nodes_of_every_fullness_follow_each_other() {
    let kinds: [u64; 5] = [u64::MAX, u64::MAX << 1, u64::MAX >> 1, 0x5555_5555_5555_5555, 0];
    let nodes: Vec<u64> = (0..125).flat_map(|n| [kinds[n % 5], kinds[n / 5 % 5], kinds[n / 25]]).collect();
    let tree = DirtyTree::new(nodes.len() as u64 * 4096).unwrap();
    let leaves = (0..nodes.len() as u64 * 64).filter(|leaf| nodes[*leaf as usize / 64] >> (leaf % 64) & 1 == 1);
    let model: BTreeSet<u64> = leaves.flat_map(|leaf| [leaf * 64 + leaf % 63, leaf * 64 + 63]).collect();
    for room in [1, 63, 64, 65, 127, 1000, model.len(), model.len() + 64] {
        model.iter().for_each(|&frame| assert!(tree.insert(frame)));
        for take in [false, true] {
            let (mut all, mut found, mut out) = (0..u64::MAX, Vec::<u64>::new(), vec![0; room]);
            while !all.is_empty() {
                let n =
                    if take { tree.take_frames(&mut all, &mut out) } else { tree.harvest_frames(&mut all, &mut out) };
                found.extend(&out[..n]);
                if room == 1 && found.len() > 300 {
                    // One by one takes long, so the rest is one range.
                    out = vec![0; model.len()];
                }
            }
            assert!(found.iter().eq(&model), "room {room}, take {take}");
        }
        assert!(tree.is_empty());
    }
}

#[test]
fn the_largest_set_takes_addresses_and_no_memory() {
    let tree = match DirtyTree::new(MAX_FRAMES) {
        Ok(tree) => tree,
        Err(e @ NewError::Memory { .. }) => return println!("SKIPPED: {e}"),
        Err(e) => panic!("{e}"),
    };
    let frames = [0, 1, 64, (1 << 36) - 1, 1 << 36, MAX_FRAMES - 64, MAX_FRAMES - 1];
    frames.iter().for_each(|&f| assert!(tree.insert(f)));
    assert!(!tree.insert(MAX_FRAMES));
    let (mut out, mut all) = ([0; 100], 0..MAX_FRAMES);
    let n = tree.take_frames(&mut all, &mut out);
    assert_eq!(out[..n], frames);
    assert!(tree.is_empty());
    assert_eq!(DirtyTree::new(MAX_FRAMES + 1).err(), Some(NewError::TooLarge(MAX_FRAMES + 1)));
}

#[test]
fn costs_two_percent_more_than_the_bitmap_at_most() {
    let frames = 10_000_000;
    let (tree, bitmap) = (DirtyTree::new(frames).unwrap(), Bitmap::new(frames).unwrap());
    assert_eq!(bitmap.bytes() - size_of::<Bitmap>(), 1_250_000);
    assert!(tree.bytes() * 100 <= bitmap.bytes() * 102, "{} and {}", tree.bytes(), bitmap.bytes());
}

#[test]
fn nothing_is_a_set_too() {
    let mut tree = DirtyTree::new(0).unwrap();
    assert!(!tree.insert(0) && !tree.contains(0) && tree.is_empty());
    tree.insert_range(0, 10);
    tree.remove(0);
    tree.clear();
    let mut all = 0..u64::MAX;
    assert_eq!((tree.take_frames(&mut all, &mut [0; 4]), tree.next(0), all.is_empty()), (0, None, true));
    tree.resize(65).unwrap();
    assert!(tree.insert(64));
}

#[test]
fn a_full_list_says_so() {
    let list = DirtyList::new(100, 4).unwrap();
    assert!([1, 1, 2, 3].into_iter().all(|f| list.insert(f)));
    assert!(!list.insert(5));
    let mut out = [0; 8];
    assert_eq!((list.harvest_frames(&mut out), out), (4, [1, 1, 2, 3, 0, 0, 0, 0]));
    let mut some = 2..3;
    assert_eq!((list.take_frames(&mut some, &mut out), out[0]), (1, 2));
    // Its place is behind others that are still there.
    assert!(!list.insert(5) && list.contains(3) && !list.contains(2));
    let mut all = 0..100;
    assert_eq!((list.take_frames(&mut all, &mut out), &out[..3]), (3, &[1, 1, 3][..]));
    assert!([5, 6, 7, 8].into_iter().all(|f| list.insert(f)) && !list.insert(9));
}
