//! The invariants of a tree at rest, checked one by one: for tests and for the fuzzer.

use std::collections::BTreeSet;
use std::sync::atomic::Ordering::Acquire;

use crate::epoch::Pin;
use crate::key::first_difference;
use crate::tree::SdTree;
use crate::word::{self, FLAG, RECORD, TAG, VACANT, handle, is_inner, position};
use crate::{Handle, KeySource};

impl<K: KeySource> SdTree<K> {
    /// A tree in which only the bits of `mask` count in heads and far heads. With few bits, keys
    /// branch at their own bits.
    pub fn with_heads(keys: K, mask: u64) -> Self {
        let mut tree = Self::new(keys);
        tree.mixer.mask = mask;
        tree
    }

    /// Finishes a resize that is under way, and checks every invariant of a tree at rest whose keys
    /// are all as they were inserted. Returns the number of keys.
    ///
    /// # Panics
    /// If an invariant does not hold.
    pub fn check(&self) -> u64 {
        self.finish();
        let pin = self.epoch.pin();
        let (mut nodes, mut keys) = (BTreeSet::new(), 0);
        let dir = self.current(&pin);
        for (number, slot) in dir.slots.iter().enumerate() {
            let link = slot.load(Acquire);
            assert_eq!(link & TAG, 0, "a mark is left");
            if link == VACANT || link & FLAG != 0 {
                continue;
            }
            let mut path: Vec<(u16, usize)> = Vec::new();
            let bit = |at: u32| (number >> (dir.bits - 1 - at)) & 1;
            path.extend((0..dir.bits).map(|at| (at as u16, bit(at))));
            self.check_below(&pin, link, &mut path, &mut nodes, &mut keys);
        }
        assert_eq!(keys, self.len());
        dir.pool.check(&mut nodes, &pin);
        self.far.check(&mut nodes, &pin);
        assert!(nodes.is_empty(), "nodes of no pool");
        keys
    }

    /// Checks what is below `link`, to which the positions and sides in `path` lead. Returns a key
    /// from there.
    fn check_below(
        &self,
        pin: &Pin<'_>,
        link: u64,
        path: &mut Vec<(u16, usize)>,
        nodes: &mut BTreeSet<u64>,
        keys: &mut u64,
    ) -> Vec<u8> {
        assert_eq!(link & TAG, 0, "a mark is left");
        if !is_inner(link) {
            let bytes =
                self.keys().with_key(Handle(handle(link)), |key| key.map(<[u8]>::to_vec)).expect("its key is there");
            let key = self.mixer.key(&bytes);
            assert_eq!(link, word::leaf(handle(link), key.head), "a mark is left, or another key");
            assert!(path.iter().all(|&(at, side)| key.bit(at) == side), "in the wrong place");
            *keys += 1;
            return bytes;
        }
        assert!(nodes.insert(word::address(link)), "linked twice");
        let at = position(link);
        assert!(path.last().is_none_or(|&(above, _)| above < at), "positions grow");
        if at == RECORD {
            let [leaf, record] = [0, 1].map(|side| self.node(link, pin).load(side));
            let bytes = self.check_below(pin, leaf, path, nodes, keys);
            let key = self.mixer.key(&bytes);
            assert_eq!(record, word::leaf(key.recorded(), key.head) | FLAG, "another key's record");
            return bytes;
        }
        let [left, right] = [0, 1].map(|side| {
            path.push((at, side));
            let key = self.check_below(pin, self.node(link, pin).load(side), path, nodes, keys);
            path.pop();
            key
        });
        assert_eq!(first_difference(&self.mixer.key(&left), &self.mixer.key(&right)), Some(at));
        left
    }
}
