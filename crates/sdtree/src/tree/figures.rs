//! Counting: figures of a tree, and the cost of a look-up.

use std::ptr;

use super::SdTree;
use crate::pool::Node;
use crate::primitive::Ordering;
use crate::word::{self, FLAG, LEAF, handle, is_inner, position};
use crate::{Examined, Handle, KeySource, Stats};
use Ordering::Relaxed;

impl<K: KeySource> SdTree<K> {
    /// The number of keys. Exact while no other thread changes the tree.
    pub fn len(&self) -> u64 {
        self.epoch.keys()
    }

    /// Whether there is no key. Exact while no other thread changes the tree.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Figures of the tree: keys, nodes, memory, resizes.
    pub fn stats(&self) -> Stats {
        let pin = self.epoch.pin();
        let dir = self.current(&pin);
        let mut stats = Stats {
            keys: self.len(),
            nodes: self.far.touched(),
            directory_bits: dir.bits,
            bytes: size_of::<Self>() as u64 + self.epoch.bytes() + self.far.bytes(),
            bytes_reserved: self.far.bytes_reserved(),
            stale_dropped: self.epoch.stale_dropped(),
            ticks: self.epoch.ticks(),
            resizes: self.resizes.load(Relaxed),
        };
        let mut pool = ptr::null();
        // The list of doomed directories belongs to the thread that takes it, and is not counted.
        let all = [self.directory(&self.left, &pin), Some(dir), self.directory(&dir.next, &pin)];
        for dir in all.into_iter().flatten() {
            stats.bytes += dir.bytes();
            if !ptr::eq(pool, &*dir.pool) {
                pool = &*dir.pool;
                stats.nodes += dir.pool.touched();
                stats.bytes += dir.pool.bytes();
                stats.bytes_reserved += dir.pool.bytes_reserved();
            }
        }
        stats.bytes_reserved += stats.bytes - stats.nodes * size_of::<Node>() as u64;
        stats
    }

    /// The cost of a look-up of `key`, for statistics. This is a second, slower query.
    pub fn examine(&self, key: &[u8]) -> Examined {
        let pin = self.epoch.pin();
        let key = self.mixer.key(key);
        let mut examined = Examined { nodes: 0, key_bits: self.mixer.examined(key.bytes) };
        let mut link = self.enter(&pin, key.head);
        while is_inner(link) {
            link = self.node(link, &pin).load(key.bit(position(link)));
            examined.nodes += 1;
            examined.key_bits += 1;
        }
        if key.is_far() {
            examined.key_bits += key.bytes.len() as u64 * 8;
        }
        if link & (FLAG | LEAF) == LEAF && word::same_fingerprint(link, word::leaf(0, key.head)) {
            examined.key_bits += self.source.with_key(Handle(handle(link)), |stored| match stored {
                Some(stored) if stored.len() == key.bytes.len() => {
                    let same = key.bytes.iter().zip(stored).take_while(|(a, b)| a == b).count();
                    ((same + 1).min(stored.len()) * 8) as u64
                }
                _ => 0,
            });
        }
        examined
    }
}
