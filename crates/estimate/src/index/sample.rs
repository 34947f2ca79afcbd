//! Raising the level of an index when memory is short.

use std::sync::Arc;
use std::sync::atomic::AtomicU32;
use std::sync::atomic::Ordering::{Acquire, Relaxed};

use sdtree::{Handle, SdTree};

use super::contents::{CHUNK, CONTENT_BYTES, Contents, Keys};
use super::{KEPT_BYTES, State};

impl State {
    /// Raises the level by one. Workers drop what they have reserved when they notice.
    pub(super) fn raise(&mut self, limit: u64) {
        let often = self.often(limit);
        self.level += 1;
        // The tree goes first, so that its memory can be used for the new one.
        let empty = Arc::new(Contents::new(0));
        self.tree = SdTree::new(Keys(empty.clone()));
        let Ok(mut contents) = Arc::try_unwrap(std::mem::replace(&mut self.contents, empty)) else {
            unreachable!("the tree had the only other reference, and is dropped");
        };
        let mut fresh = Contents::new(limit);
        let len = self.compact(&mut contents, &fresh, often);
        std::mem::swap(&mut contents.slots, &mut fresh.slots);
        fresh.next_slot = AtomicU32::new(len);
        drop(contents);
        self.contents = Arc::new(fresh);
        self.tree = SdTree::new(Keys(self.contents.clone()));
        for handle in 0..len {
            let digest = self.contents.slots.get(handle).digest.load(Relaxed);
            self.tree.insert(&digest.to_be_bytes(), Handle(u64::from(handle)));
        }
    }

    /// Moves the slots that stay to the front and copies their records to `fresh`; returns their
    /// number. Contents with `often` sightings or more keep their weight.
    fn compact(&mut self, contents: &mut Contents, fresh: &Contents, often: u64) -> u32 {
        let mut len = 0;
        for handle in 0..contents.next_slot.load(Relaxed) {
            let slot = contents.slots.get(handle);
            let (digest, word) = (slot.digest.load(Relaxed), slot.word.load(Relaxed));
            if word == 0 {
                continue;
            }
            if !self.kept.contains_key(&digest) {
                if contents.total(word) >= often {
                    self.kept.insert(digest, self.level - 1);
                } else if digest.trailing_zeros() < self.level {
                    continue;
                }
            }
            let to = contents.slots.get(len);
            to.digest.store(digest, Relaxed);
            to.word.store(contents.copy(word, fresh), Relaxed);
            len += 1;
        }
        for handle in len..(len as usize).next_multiple_of(CHUNK) as u32 {
            contents.slots.get(handle).word.store(0, Relaxed);
        }
        contents.slots.truncate(len);
        len
    }

    /// The number of sightings from which a content keeps its weight, so that the kept contents
    /// take half of the memory left for them.
    fn often(&self, limit: u64) -> u64 {
        let mut counts = [0u64; 64];
        for handle in 0..self.contents.next_slot.load(Relaxed) {
            let slot = self.contents.slots.get(handle);
            let word = slot.word.load(Acquire);
            if word != 0 && !self.kept.contains_key(&slot.digest.load(Relaxed)) {
                counts[self.contents.total(word).ilog2() as usize] += 1;
            }
        }
        let room = (limit / 4 / (CONTENT_BYTES + KEPT_BYTES)).saturating_sub(self.kept.len() as u64) / 2;
        let mut often = 63;
        let mut sum = 0;
        while often > 0 && sum + counts[often] <= room {
            sum += counts[often];
            often -= 1;
        }
        // A content seen once is never kept.
        1 << (often + 1).min(63)
    }
}
