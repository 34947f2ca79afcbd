//! ONE against maps, in random sequences of operations.

use std::collections::{BTreeMap, HashMap};

use proptest::prelude::*;
use sdtree::MAX_KEY_LEN;

use super::{bytes, objects};
use crate::{MemoryStore, ObjectId, ObjectStore, One, Put, UnknownObject};

#[derive(Clone, Debug)]
enum Op {
    Put(usize),
    Retain(usize),
    Release(usize),
}

fn op() -> impl Strategy<Value = Op> {
    let any = 0..64usize;
    prop_oneof![
        3 => any.clone().prop_map(Op::Put),
        1 => any.clone().prop_map(Op::Retain),
        3 => any.prop_map(Op::Release),
    ]
}

/// The objects in a store: their contents' numbers, and how many references there are.
type Model = HashMap<ObjectId, (usize, u64)>;

/// Does `op` on the engine and on the model, and compares the results.
fn apply(one: &One<MemoryStore>, objects: &[Vec<u8>], model: &mut Model, op: Op) -> Result<(), TestCaseError> {
    match op {
        Op::Put(i) => {
            let i = i % objects.len();
            let put = one.put(&objects[i]).unwrap();
            let known = model.get_mut(&put.id);
            prop_assert_eq!(put.new, known.is_none());
            match known {
                Some((there, count)) => {
                    prop_assert_eq!(*there, i, "another object's identity");
                    *count += 1;
                }
                None => {
                    // Only those that share their key with another object may be kept
                    // twice.
                    let twice = model.values().any(|&(there, _)| there == i);
                    prop_assert!(!twice || i == 5 || i >= 7, "object {} is there already", i);
                    model.insert(put.id, (i, 1));
                }
            }
        }
        Op::Retain(i) | Op::Release(i) if model.is_empty() => {
            prop_assert!(one.retain(ObjectId(i as u64)).is_err() && one.release(ObjectId(i as u64)).is_err());
        }
        Op::Retain(i) => {
            let mut ids: Vec<_> = model.keys().copied().collect();
            ids.sort();
            let id = ids[i % ids.len()];
            let count = &mut model.get_mut(&id).unwrap().1;
            *count += 1;
            prop_assert_eq!(one.retain(id), Ok(*count));
        }
        Op::Release(i) => {
            let mut ids: Vec<_> = model.keys().copied().collect();
            ids.sort();
            let id = ids[i % ids.len()];
            let count = &mut model.get_mut(&id).unwrap().1;
            *count -= 1;
            prop_assert_eq!(one.release(id), Ok(*count));
            if *count == 0 {
                model.remove(&id);
                prop_assert_eq!(one.references(id), 0);
                prop_assert_eq!(one.release(id), Err(UnknownObject { id }));
                prop_assert_eq!(bytes(one, id), None);
            }
        }
    }
    Ok(())
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::default() })]
    #[test]
    fn as_a_map(ops in proptest::collection::vec(op(), 0..200)) {
        let one = One::new(MemoryStore::new());
        let objects = objects(&one);
        let mut model = Model::new();
        for op in ops {
            apply(&one, &objects, &mut model, op)?;
            for (&id, &(object, count)) in &model {
                prop_assert_eq!(one.references(id), count);
                prop_assert_eq!(bytes(&one, id), Some(objects[object].clone()));
            }
            for (i, object) in objects.iter().enumerate() {
                match one.query(object) {
                    Some(id) => prop_assert_eq!(model.get(&id).map(|m| m.0), Some(i)),
                    None => prop_assert!(i == 5 || i >= 7 || model.values().all(|&(there, _)| there != i)),
                }
            }
        }
        one.tree.check();
    }
}

#[derive(Clone, Debug)]
enum ByDigest {
    Put(u128, u8),
    Claim(usize, u8),
    Release(usize),
    Lose(usize),
}

fn by_digest() -> impl Strategy<Value = ByDigest> {
    let (digest, content, any) = (0..6u128, 0..4u8, 0..64usize);
    prop_oneof![
        3 => (digest, content.clone()).prop_map(|(digest, content)| ByDigest::Put(digest, content)),
        2 => (any.clone(), content).prop_map(|(i, content)| ByDigest::Claim(i, content)),
        3 => any.clone().prop_map(ByDigest::Release),
        1 => any.prop_map(ByDigest::Lose),
    ]
}

/// An object as the model knows it.
#[derive(Clone)]
struct Known {
    digest: u128,
    content: Option<u8>,
    count: u64,
}

/// Short and long ones, among them digests.
fn content(number: u8) -> Vec<u8> {
    match number {
        0 => vec![],
        1 => 1u128.to_be_bytes().to_vec(),
        2 => vec![2; MAX_KEY_LEN],
        _ => vec![3; 2 * MAX_KEY_LEN],
    }
}

/// Does `op` on the engine and on the model, and compares the results. `found`: the object that
/// each digest finds.
fn apply_by_digest(
    one: &One<MemoryStore>,
    model: &mut BTreeMap<ObjectId, Known>,
    found: &mut HashMap<u128, ObjectId>,
    op: ByDigest,
) -> Result<(), TestCaseError> {
    let ids: Vec<ObjectId> = model.keys().copied().collect();
    let nth = |i: usize| ids.get(i % ids.len().max(1)).copied().unwrap_or(ObjectId(1000));
    match op {
        ByDigest::Put(digest, number) => {
            let put = one.put_by(digest, &content(number)).unwrap();
            let there = found.get(&digest).map(|id| (*id, model[id].content));
            match there {
                Some((id, Some(same))) if same == number => {
                    prop_assert_eq!(put, Put { id, new: false });
                    model.get_mut(&id).unwrap().count += 1;
                }
                _ => {
                    prop_assert!(put.new && !model.contains_key(&put.id));
                    model.insert(put.id, Known { digest, content: Some(number), count: 1 });
                    // Another object under one digest is kept, not found; a lost one makes
                    // room.
                    if !matches!(there, Some((_, Some(_)))) {
                        found.insert(digest, put.id);
                    }
                }
            }
        }
        ByDigest::Claim(i, number) => {
            let id = nth(i);
            let known = model.get_mut(&id).filter(|known| known.content == Some(number));
            prop_assert_eq!(one.claim(id, &content(number)), known.is_some());
            known.into_iter().for_each(|known| known.count += 1);
        }
        ByDigest::Release(i) => {
            let id = nth(i);
            let Some(known) = model.get_mut(&id) else {
                prop_assert_eq!(one.release(id), Err(UnknownObject { id }));
                return Ok(());
            };
            known.count -= 1;
            prop_assert_eq!(one.release(id), Ok(known.count));
            if known.count == 0 {
                let digest = known.digest;
                model.remove(&id);
                found.retain(|&of, there| of != digest || *there != id);
            }
        }
        ByDigest::Lose(i) => {
            if let Some(known) = model.get_mut(&nth(i)) {
                known.content = None;
            }
            one.store().remove(nth(i));
        }
    }
    Ok(())
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::default() })]
    /// Digests from the caller, which collide; objects from before; a store that loses some.
    #[test]
    fn by_digest_as_a_map(
        before in proptest::collection::vec((0..200u128, 0..4u8), 0..150),
        ops in proptest::collection::vec(by_digest(), 0..200),
    ) {
        let store = MemoryStore::new();
        let mut model: BTreeMap<ObjectId, Known> = Default::default();
        let mut found: HashMap<u128, ObjectId> = HashMap::new();
        for (i, &(digest, number)) in before.iter().enumerate() {
            let id = ObjectId(i as u64);
            store.put(id, &content(number)).unwrap();
            model.insert(id, Known { digest, content: Some(number), count: 1 });
            found.insert(digest, id); // the last one counts
        }
        let one = One::over(store, before.iter().map(|&(digest, _)| digest));
        for op in ops {
            apply_by_digest(&one, &mut model, &mut found, op)?;
            let digests: Vec<u128> = (0..200).collect();
            let all = one.find_many(&digests);
            for digest in digests {
                prop_assert_eq!(one.find(digest), found.get(&digest).copied());
                prop_assert_eq!(all[digest as usize], found.get(&digest).copied());
            }
            for (&id, known) in &model {
                prop_assert_eq!(one.references(id), known.count);
                prop_assert_eq!(bytes(&one, id), known.content.map(content));
            }
            prop_assert_eq!(one.len(), found.len() as u64);
        }
        one.tree.check();
    }
}
