//! The tree against a `BTreeMap`, one thread, adversarial keys.

use std::collections::{BTreeMap, BTreeSet};

use proptest::prelude::*;

use super::Table;
use crate::{Handle, Insert, MAX_KEY_LEN, SdTree};

#[derive(Clone, Debug)]
enum Op {
    Insert(usize),
    Remove(usize),
    RemoveOther(usize),
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
    prop_oneof![
        4 => any.clone().prop_map(Op::Insert),
        3 => any.clone().prop_map(Op::Remove),
        1 => any.clone().prop_map(Op::RemoveOther),
        2 => any.prop_map(Op::Query),
        1 => (0..4u32).prop_map(Op::Resize),
        1 => Just(Op::Finish),
    ]
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
        let tree = SdTree::with_heads(Table(keys.clone()), mask);
        let mut map: BTreeMap<&[u8], Handle> = BTreeMap::new();
        for op in ops {
            match op {
                Op::Insert(i) | Op::Remove(i) | Op::RemoveOther(i) | Op::Query(i) => {
                    let i = i % keys.len();
                    let (key, handle) = (keys[i].as_slice(), Handle(i as u64));
                    match op {
                        Op::Insert(_) => {
                            let expected = map.get(key).map_or(Insert::Inserted, |&there| Insert::Exists(there));
                            prop_assert_eq!(tree.insert(key, handle), expected);
                            map.entry(key).or_insert(handle);
                        }
                        Op::Remove(_) => {
                            let there = map.get(key) == Some(&handle);
                            prop_assert_eq!(tree.remove(key, handle), there);
                            if there {
                                map.remove(key);
                            }
                        }
                        // A handle that is not the one stored, or not stored under this key.
                        Op::RemoveOther(_) => prop_assert!(!tree.remove(key, Handle(1000))),
                        _ => prop_assert_eq!(tree.query(key), map.get(key).copied()),
                    }
                }
                Op::Resize(more) => {
                    let pin = tree.epoch.pin();
                    let dir = tree.current(&pin);
                    let bits = dir.bits;
                    // One more, or any number less.
                    tree.resize(dir, if more == 0 { 8 } else { (bits + more - 2).clamp(8, bits + 1) });
                }
                Op::Finish => tree.finish(),
            }
            prop_assert_eq!(tree.len(), map.len() as u64);
            prop_assert_eq!(tree.is_empty(), map.is_empty());
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

#[test]
fn is_send_and_sync() {
    fn check<T: Send + Sync>() {}
    check::<SdTree<Table>>();
}
