//! The SD tree against a map: any order of calls, any keys, keys that change or vanish behind the
//! tree's back.
#![no_main]

use std::cell::RefCell;
use std::collections::{BTreeMap, BTreeSet};

use arbitrary::Arbitrary;
use libfuzzer_sys::fuzz_target;
use sdtree::{Handle, Insert, KeySource, MAX_KEY_LEN, SdTree};

#[derive(Arbitrary, Clone, Debug)]
enum Key {
    Bytes(Vec<u8>),
    Zeros(u16),
    OneBit { len: u8, bit: u16 },
    Page { at: u16, byte: u8, cut: u8 },
    Number(u16),
}

impl Key {
    fn bytes(&self) -> Vec<u8> {
        match *self {
            Key::Bytes(ref bytes) => bytes[..bytes.len().min(MAX_KEY_LEN)].to_vec(),
            Key::Zeros(len) => vec![0; usize::from(len) % (MAX_KEY_LEN + 1)],
            Key::OneBit { len, bit } => {
                let mut key = vec![0; usize::from(len) + 1];
                let at = usize::from(bit) / 8 % key.len();
                key[at] |= 1 << (bit % 8);
                key
            }
            Key::Page { at, byte, cut } => {
                let mut key = vec![7; MAX_KEY_LEN - usize::from(cut)];
                let at = usize::from(at) % key.len();
                key[at] = byte;
                key
            }
            Key::Number(n) => u64::from(n).to_be_bytes().to_vec(),
        }
    }
}

#[derive(Arbitrary, Clone, Debug)]
enum Op {
    Insert(Key),
    /// The stored key of this number, of its own handle or of another.
    Remove(u16, bool),
    /// A key, whether it is there or not.
    RemoveKey(Key, u16),
    Query(Key),
    QueryMany(Vec<Key>),
    InsertMany(Vec<Key>),
    /// Numbers in a row come, or go: so that the tree grows and shrinks.
    Fill(u16, u16),
    Drain(u16, u16),
    /// The bytes behind a stored key change, or vanish.
    Change(u16, Option<Key>),
    Walk,
}

#[derive(Arbitrary, Debug)]
struct Input {
    /// Which bits of heads count.
    heads: u8,
    ops: Vec<Op>,
}

#[derive(Default)]
struct Keys(RefCell<Vec<Option<Vec<u8>>>>);

impl KeySource for Keys {
    fn with_key<R>(&self, handle: Handle, f: impl FnOnce(Option<&[u8]>) -> R) -> R {
        f(self.0.borrow()[handle.0 as usize].as_deref())
    }
}

struct Model {
    tree: SdTree<Keys>,
    /// Keys that must be found.
    there: BTreeMap<Vec<u8>, Handle>,
    /// Keys whose bytes have changed since: they may be there or not.
    lost: BTreeMap<Vec<u8>, Handle>,
}

impl Model {
    fn new_handle(&self, key: &[u8]) -> Handle {
        let mut keys = self.tree.keys().0.borrow_mut();
        keys.push(Some(key.to_vec()));
        Handle(keys.len() as u64 - 1)
    }

    fn inserted(&mut self, key: Vec<u8>, handle: Handle, result: Insert) {
        match (result, self.there.get(&key)) {
            (Insert::Exists(found), Some(&known)) => assert_eq!(found, known),
            (Insert::Inserted, None) => {
                self.lost.remove(&key); // it had to give way
                self.there.insert(key, handle);
            }
            other => panic!("{other:?}"),
        }
    }

    fn insert(&mut self, key: Vec<u8>) {
        let handle = self.new_handle(&key);
        let result = self.tree.insert(&key, handle);
        self.inserted(key, handle, result);
    }

    fn stored(&self, number: u16) -> Option<(Vec<u8>, Handle)> {
        let number = usize::from(number) % self.there.len().max(1);
        self.there.iter().nth(number).map(|(key, &handle)| (key.clone(), handle))
    }

    fn apply(&mut self, op: Op, may_change: bool) {
        match op {
            Op::Insert(key) => self.insert(key.bytes()),
            Op::Remove(number, own) => {
                let Some((key, handle)) = self.stored(number) else { return };
                let asked = if own { handle } else { Handle(handle.0 + 1) };
                assert_eq!(self.tree.remove(&key, asked), own);
                if own {
                    self.there.remove(&key);
                }
            }
            Op::RemoveKey(key, handle) => self.remove_key(key.bytes(), Handle(handle.into()), may_change),
            Op::Query(key) => {
                let key = key.bytes();
                assert_eq!(self.tree.query(&key), self.there.get(&key).copied());
                self.tree.examine(&key);
            }
            Op::QueryMany(keys) => self.query_many(&keys),
            Op::InsertMany(keys) => self.insert_many(&keys),
            Op::Fill(first, count) => {
                (0..count % 2048).for_each(|i| self.insert(Key::Number(first.wrapping_add(i)).bytes()));
            }
            Op::Drain(first, count) => {
                for i in 0..count % 4096 {
                    let key = Key::Number(first.wrapping_add(i)).bytes();
                    if let Some(handle) = self.there.remove(&key) {
                        assert!(self.tree.remove(&key, handle));
                    }
                }
            }
            Op::Change(number, to) if may_change => {
                let Some((key, handle)) = self.stored(number) else { return };
                let to = to.map(|key| key.bytes());
                if to.as_ref() != Some(&key) {
                    self.tree.keys().0.borrow_mut()[handle.0 as usize] = to;
                    self.there.remove(&key);
                    self.lost.insert(key, handle);
                }
            }
            Op::Change(..) => {}
            Op::Walk => self.walk(),
        }
    }

    fn remove_key(&mut self, key: Vec<u8>, handle: Handle, may_change: bool) {
        let known = self.there.get(&key) == Some(&handle);
        let lost = self.lost.get(&key) == Some(&handle);
        let removed = self.tree.remove(&key, handle);
        assert!(removed || !known);
        // Where heads differ little, it may have been another key's, as the documents say.
        assert!(!removed || known || lost || !may_change);
        if removed {
            self.there.retain(|_, there| *there != handle);
            self.lost.remove(&key);
        }
    }

    fn query_many(&self, keys: &[Key]) {
        let keys: Vec<Vec<u8>> = keys.iter().map(Key::bytes).collect();
        let asked: Vec<&[u8]> = keys.iter().map(Vec::as_slice).collect();
        let mut out = vec![Some(Handle(0)); keys.len()];
        self.tree.query_many(&asked, &mut out);
        for (key, found) in keys.iter().zip(out) {
            assert_eq!(found, self.there.get(key).copied());
        }
    }

    fn insert_many(&mut self, keys: &[Key]) {
        let keys: Vec<Vec<u8>> = keys.iter().map(Key::bytes).collect();
        let items: Vec<(&[u8], Handle)> = keys.iter().map(|key| (&key[..], self.new_handle(key))).collect();
        let mut out = vec![Insert::Inserted; keys.len()];
        self.tree.insert_many(&items, &mut out);
        let handles: Vec<Handle> = items.iter().map(|item| item.1).collect();
        for ((key, handle), result) in keys.into_iter().zip(handles).zip(out) {
            self.inserted(key, handle, result);
        }
    }

    fn walk(&self) {
        let mut seen = BTreeSet::new();
        self.tree.for_each(|handle| assert!(seen.insert(handle), "twice"));
        assert!(self.there.values().all(|handle| seen.remove(handle)));
        assert!(seen.iter().all(|handle| self.lost.values().any(|lost| lost == handle)));
    }
}

fuzz_target!(|input: Input| {
    // Where heads differ little, keys branch at their own bits; then a changed key may mislead, as
    // the docs say.
    let mask = [u64::MAX, 0, u64::MAX << 56, 0xf << 44, 0xff][usize::from(input.heads) % 5];
    let tree = SdTree::with_heads(Keys::default(), mask);
    let mut model = Model { tree, there: BTreeMap::new(), lost: BTreeMap::new() };
    for op in input.ops {
        model.apply(op, mask == u64::MAX);
    }
    for (key, &handle) in &model.there {
        assert_eq!(model.tree.query(key), Some(handle));
    }
    model.apply(Op::Walk, true);
    for (key, handle) in std::mem::take(&mut model.lost) {
        model.tree.remove(&key, handle);
    }
    assert_eq!(model.tree.check(), model.there.len() as u64);
});
