//! Operations of a thread that owns the tree alone: taking frames out without reporting them, and
//! another size.

use crate::tree::{DirtyTree, NewError, each_mask, mask};

/// Frames of a range up to which every word is looked at. Longer ranges are searched from above.
const DENSE: u64 = 1024;

impl DirtyTree {
    /// Takes one frame out.
    pub fn remove(&mut self, frame: u64) {
        self.remove_range(frame, 1);
    }

    /// Takes `len` frames from `first` on out of the set. The time depends on the words that hold
    /// some of them, not on `len`.
    pub fn remove_range(&mut self, first: u64, len: u64) {
        if len <= DENSE {
            return each_mask(first, len, self.frames(), |index, mask| self.remove_bits(index, mask));
        }
        let end = first.saturating_add(len).min(self.frames());
        let mut from = (first / 64) as usize;
        loop {
            let next = self.words_at(from).next().map(|(index, _)| index);
            let Some(index) = next.filter(|&index| (index as u64) * 64 < end) else { return };
            let base = index as u64 * 64;
            self.remove_bits(index, mask(end - base) & !mask(first.saturating_sub(base)));
            from = index + 1;
        }
    }

    /// Takes every frame of `other` out of this set.
    pub fn subtract(&mut self, other: &DirtyTree) {
        let leaves = self.leaves();
        for (index, word) in other.words_at(0).take_while(|&(index, _)| index < leaves) {
            self.remove_bits(index, word);
        }
    }

    fn remove_bits(&mut self, mut index: usize, bits: u64) {
        let leaf = self.words[index].get_mut();
        if *leaf & bits == 0 {
            return;
        }
        *leaf &= !bits;
        let mut empty = *leaf == 0;
        for level in 1..self.levels {
            if !empty {
                break;
            }
            let word = self.words[self.starts[level] + index / 64].get_mut();
            *word &= !(1 << (index % 64));
            empty = *word == 0;
            index /= 64;
        }
    }

    /// Gives the set another size, for memory that is plugged in or out. Frames below both sizes
    /// stay as they are, and new ones are clean. Allocates; after an error nothing has changed.
    ///
    /// # Errors
    ///
    /// [`NewError`].
    pub fn resize(&mut self, frames: u64) -> Result<(), NewError> {
        let resized = DirtyTree::new(frames)?;
        resized.unite(self);
        *self = resized;
        Ok(())
    }
}
