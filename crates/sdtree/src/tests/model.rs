//! The tree against a `BTreeMap`, one thread, adversarial keys.

use std::collections::{BTreeMap, BTreeSet};
use std::ops::Bound;

use proptest::prelude::*;

use super::Table;
use crate::{Handle, Insert, MAX_KEY_LEN, OrderedTree, SdTree};

#[derive(Clone, Debug)]
enum Op {
    Insert(usize),
    Remove(usize),
    RemoveOther(usize),
    RemoveKey(usize),
    Upsert(usize),
    OrInsert(usize),
    /// Keeps the handles with this remainder.
    Retain(u64),
    Clear,
    Query(usize),
    /// Begins to grow or to shrink, whatever the number of keys; later changes go on with it.
    Resize(u32),
    Finish,
}

/// All zeros, prefixes of each other, one bit apart, different in the last byte, empty, the
/// longest, and anything.
fn key() -> impl Strategy<Value = Vec<u8>> {
    let zeros = (0..40usize).prop_map(|len| vec![0; len]);
    let one_bit = (0..32usize, 1..40usize).prop_map(|(bit, len)| {
        let mut key = vec![0; len];
        key[bit / 8 % len] |= 1 << (bit % 8);
        key
    });
    let last_byte = (1..6usize, any::<u8>()).prop_map(|(len, byte)| {
        let mut key = vec![0xff; len * 8];
        key[len * 8 - 1] = byte;
        key
    });
    let page = (0..4usize, any::<u8>()).prop_map(|(cut, byte)| {
        let mut key = vec![7; MAX_KEY_LEN - cut];
        key[MAX_KEY_LEN - 4] = byte;
        key
    });
    let dense = proptest::collection::vec(0..2u8, 0..7);
    prop_oneof![zeros, one_bit, last_byte, page, dense, proptest::collection::vec(any::<u8>(), 0..20)]
}

fn op() -> impl Strategy<Value = Op> {
    let any = 0..64usize;
    let often = prop_oneof![
        4 => any.clone().prop_map(Op::Insert),
        3 => any.clone().prop_map(Op::Remove),
        1 => any.clone().prop_map(Op::RemoveOther),
        1 => any.clone().prop_map(Op::RemoveKey),
        1 => any.clone().prop_map(Op::Upsert),
        1 => any.clone().prop_map(Op::OrInsert),
        2 => any.prop_map(Op::Query),
        1 => (0..4u32).prop_map(Op::Resize),
        1 => Just(Op::Finish),
    ];
    // Seldom, so that there is something to remove.
    prop_oneof![40 => often, 2 => (0..3u64).prop_map(Op::Retain), 1 => Just(Op::Clear)]
}

/// Compares all of the tree with the map, and inserts every key.
fn compare<'k>(
    tree: &SdTree<Table>,
    keys: &'k [Vec<u8>],
    map: &mut BTreeMap<&'k [u8], Handle>,
) -> Result<(), TestCaseError> {
    let mut seen = Vec::new();
    tree.for_each(|handle| seen.push(handle)); // perhaps in the middle of a resize
    prop_assert_eq!(seen.len(), map.len());
    prop_assert_eq!(seen.into_iter().collect::<BTreeSet<_>>(), map.values().copied().collect());
    for key in keys {
        prop_assert_eq!(tree.query(key), map.get(key.as_slice()).copied());
    }
    let asked: Vec<&[u8]> = keys.iter().map(Vec::as_slice).collect();
    let mut answers = vec![Some(Handle(1000)); keys.len()];
    tree.query_many(&asked, &mut answers);
    prop_assert_eq!(answers, asked.iter().map(|&key| map.get(key).copied()).collect::<Vec<_>>());
    prop_assert_eq!(tree.check(), map.len() as u64);

    let items: Vec<(&[u8], Handle)> = asked.iter().enumerate().map(|(i, &key)| (key, Handle(i as u64))).collect();
    let mut done = vec![Insert::Inserted; items.len()];
    tree.insert_many(&items, &mut done);
    for ((key, handle), done) in items.into_iter().zip(done) {
        let expected = map.get(key).map_or(Insert::Inserted, |&there| Insert::Exists(there));
        prop_assert_eq!(done, expected);
        map.entry(key).or_insert(handle);
    }
    prop_assert_eq!(tree.check(), map.len() as u64);
    Ok(())
}

/// Does `op` on the tree and on the map, and compares the results.
fn apply<'k>(
    tree: &mut SdTree<Table>,
    keys: &'k [Vec<u8>],
    map: &mut BTreeMap<&'k [u8], Handle>,
    op: Op,
) -> Result<(), TestCaseError> {
    let place = |i: usize| (keys[i % keys.len()].as_slice(), Handle((i % keys.len()) as u64));
    match op {
        Op::Insert(i) => {
            let (key, handle) = place(i);
            let expected = map.get(key).map_or(Insert::Inserted, |&there| Insert::Exists(there));
            prop_assert_eq!(tree.insert(key, handle), expected);
            map.entry(key).or_insert(handle);
        }
        Op::Upsert(i) => {
            let (key, handle) = place(i);
            prop_assert_eq!(tree.upsert(key, handle), map.insert(key, handle));
        }
        Op::OrInsert(i) => {
            let (key, handle) = place(i);
            prop_assert_eq!(tree.entry(key).or_insert_with(|| handle), *map.entry(key).or_insert(handle));
        }
        Op::Remove(i) => {
            let (key, handle) = place(i);
            let there = map.get(key) == Some(&handle);
            prop_assert_eq!(tree.remove(key, handle), there);
            if there {
                map.remove(key);
            }
        }
        // A handle that is not the one stored, or not stored under this key.
        Op::RemoveOther(i) => prop_assert!(!tree.remove(place(i).0, Handle(1000))),
        Op::RemoveKey(i) => prop_assert_eq!(tree.remove_key(place(i).0), map.remove(place(i).0)),
        Op::Retain(rest) => {
            tree.retain(|handle| handle.0 % 3 == rest);
            map.retain(|_, handle| handle.0 % 3 == rest);
        }
        Op::Clear => {
            tree.clear();
            map.clear();
        }
        Op::Query(i) => prop_assert_eq!(tree.query(place(i).0), map.get(place(i).0).copied()),
        Op::Resize(more) => {
            let pin = tree.epoch.pin();
            let dir = tree.current(&pin);
            let bits = dir.bits;
            // One more, or any number less.
            tree.resize(dir, if more == 0 { 8 } else { (bits + more - 2).clamp(8, bits + 1) });
        }
        Op::Finish => tree.finish(),
    }
    Ok(())
}

/// Every function of an ordered tree that needs the order.
fn compare_order(
    tree: &OrderedTree<Table>,
    map: &BTreeMap<&[u8], Handle>,
    [a, b]: [&[u8]; 2],
) -> Result<(), TestCaseError> {
    let all = |handles: &mut dyn Iterator<Item = Handle>| handles.collect::<Vec<_>>();
    prop_assert_eq!(all(&mut tree.iter()), all(&mut map.values().copied()));
    prop_assert_eq!(tree.min(), map.values().next().copied());
    prop_assert_eq!(tree.max(), map.values().next_back().copied());
    let bounds = |key| [Bound::Included(key), Bound::Excluded(key), Bound::Unbounded];
    for (start, end) in bounds(a).into_iter().flat_map(|start| bounds(b).map(|end| (start, end))) {
        let from = |key: &&[u8]| match start {
            Bound::Included(start) => *key >= start,
            Bound::Excluded(start) => *key > start,
            Bound::Unbounded => true,
        };
        let to = |key: &&[u8]| match end {
            Bound::Included(end) => *key <= end,
            Bound::Excluded(end) => *key < end,
            Bound::Unbounded => true,
        };
        let inside = map.iter().filter(|(key, _)| from(key) && to(key)).map(|(_, &handle)| handle);
        prop_assert_eq!(
            all(&mut tree.range::<&[u8]>((start, end))),
            inside.collect::<Vec<_>>(),
            "{:?} {:?}",
            start,
            end
        );
    }
    for prefix in [&a[..a.len() / 2], a, b, &[], &[0xff]] {
        let inside = map.iter().filter(|(key, _)| key.starts_with(prefix)).map(|(_, &handle)| handle);
        prop_assert_eq!(all(&mut tree.prefix(prefix)), inside.collect::<Vec<_>>(), "{:?}", prefix);
    }
    Ok(())
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::default() })]
    #[test]
    fn as_a_map(
        keys in proptest::collection::vec(key(), 1..64),
        ops in proptest::collection::vec(op(), 0..400),
        // All heads alike, heads that differ in the slot, in the fingerprint, after it, and
        // anywhere.
        mask in prop_oneof![Just(0), Just(u64::MAX << 56), Just(0xf << 44), Just(0xff), Just(u64::MAX)],
    ) {
        // Where two handles have equal keys, the tree must keep only the first.
        let mut tree = SdTree::with_heads(Table(keys.clone()), mask);
        let mut map: BTreeMap<&[u8], Handle> = BTreeMap::new();
        for op in ops {
            apply(&mut tree, &keys, &mut map, op)?;
            prop_assert_eq!(tree.len(), map.len() as u64);
            prop_assert_eq!(tree.is_empty(), map.is_empty());
        }
        compare(&tree, &keys, &mut map)?;
    }

    #[test]
    fn in_order(
        keys in proptest::collection::vec(key(), 1..64),
        ops in proptest::collection::vec(op(), 0..200),
        bounds in [key(), key()],
        own in any::<(bool, bool)>(),
    ) {
        let mut tree = OrderedTree::new(Table(keys.clone()));
        let mut map: BTreeMap<&[u8], Handle> = BTreeMap::new();
        // Bounds that are keys of the tree, too.
        let bounds = [if own.0 { &keys[0] } else { &bounds[0] }, if own.1 { &keys[keys.len() / 2] } else { &bounds[1] }];
        for op in ops {
            apply(&mut tree.0, &keys, &mut map, op)?;
            compare_order(&tree, &map, bounds.map(Vec::as_slice))?; // perhaps in the middle of a resize
        }
        compare(&tree, &keys, &mut map)?;
    }
}

#[test]
fn limits() {
    let tree = SdTree::new(Table(vec![vec![1; MAX_KEY_LEN + 1], vec![1; MAX_KEY_LEN]]));
    assert_eq!(tree.insert(&[1; MAX_KEY_LEN], Handle(1)), Insert::Inserted);
    assert_eq!(tree.query(&[1; MAX_KEY_LEN + 1]), None);
    assert!(!tree.remove(&[1; MAX_KEY_LEN + 1], Handle(1)));
    assert!(!tree.remove(&[1; MAX_KEY_LEN], Handle(Handle::MAX.0 + 1)));
    let too_long = std::panic::catch_unwind(|| tree.insert(&[1; MAX_KEY_LEN + 1], Handle(0)));
    assert!(too_long.is_err());
    let too_great = std::panic::catch_unwind(|| tree.insert(&[1], Handle(Handle::MAX.0 + 1)));
    assert!(too_great.is_err());
    assert_eq!(tree.check(), 1);
}

/// Numbers in order, of which all begin alike, and ones that are spread over all slots: the
/// directory grows for these only.
#[test]
fn numbers_in_order() {
    for (shift, grows) in [(0, false), (48, true)] {
        let numbers: Vec<u64> = (0..40_000).map(|i: u64| ((i * 0x9e37) % 65_536) << shift).collect();
        let tree = OrderedTree::new(Table(numbers.iter().map(|n| n.to_be_bytes().to_vec()).collect()));
        for (i, n) in numbers.iter().enumerate() {
            assert_eq!(tree.insert(&n.to_be_bytes(), Handle(i as u64)), Insert::Inserted);
        }
        assert_eq!(tree.stats().directory_bits > 12, grows, "{:?}", tree.stats());
        let in_order = |handles: &mut dyn Iterator<Item = Handle>| -> Vec<u64> {
            handles.map(|handle| numbers[handle.0 as usize] >> shift).collect()
        };
        let mut sorted = numbers.iter().map(|n| n >> shift).collect::<Vec<_>>();
        sorted.sort_unstable();
        assert_eq!(in_order(&mut tree.iter()), sorted);
        let [a, b] = [20_000, 20_100].map(|n: u64| (n << shift).to_be_bytes());
        let between: Vec<u64> = sorted.iter().copied().filter(|n| (20_000..20_100).contains(n)).collect();
        assert_eq!(in_order(&mut tree.range(a..b)), between);
        tree.retain(|handle| handle.0 % 100 == 0);
        assert_eq!(tree.check(), 400);
    }
}

/// A walk may stop anywhere, and memory is reclaimed then.
#[test]
fn a_walk_stops() {
    let keys: Vec<Vec<u8>> = (0..3000u32).map(|i| i.to_be_bytes().to_vec()).collect();
    let tree = SdTree::new(Table(keys.clone()));
    keys.iter().zip(0..).for_each(|(key, i)| _ = tree.insert(key, Handle(i)));
    assert_eq!((&tree).into_iter().take(10).collect::<BTreeSet<_>>().len(), 10);
    let mut half = tree.iter();
    assert!(half.nth(1500).is_some());
    let ticks = tree.stats().ticks;
    keys[1000..].iter().zip(1000..).for_each(|(key, i)| assert!(tree.remove(key, Handle(i))));
    assert!(tree.stats().ticks <= ticks + 1, "the walk holds the clock");
    drop(half);
    keys[..1000].iter().zip(0..).for_each(|(key, i)| assert!(tree.remove(key, Handle(i))));
    assert!(tree.stats().ticks > ticks + 1, "and gives it back");
    assert_eq!(tree.check(), 0);
}

#[test]
fn is_send_and_sync() {
    fn check<T: Send + Sync>() {}
    check::<SdTree<Table>>();
}
