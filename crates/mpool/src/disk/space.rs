//! Which bytes of a class's data file are free.
//!
//! The map is never stored: all space without a committed mblock is free, and the map is rebuilt
//! when a pool is opened. So space cannot be lost. Best fit: the smallest free extent that is long
//! enough, and of equals the first; found, taken and given back in logarithmic time.

use std::collections::{BTreeMap, BTreeSet};

use crate::BLOCK;

/// The longest that a file can be.
pub(crate) const MAX_LEN: u64 = i64::MAX as u64;

/// Whole blocks of a data file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Extent {
    pub(crate) offset: u64,
    pub(crate) len: u64,
}

impl Extent {
    pub(crate) fn end(self) -> u64 {
        self.offset + self.len
    }
}

/// Free extents below `end`; everything from there on is free too.
#[derive(Debug, Default)]
pub(crate) struct Space {
    /// Lengths by offset.
    free: BTreeMap<u64, u64>,
    /// Lengths with offsets.
    by_len: BTreeSet<(u64, u64)>,
    free_bytes: u64,
    end: u64,
}

impl Space {
    fn add(&mut self, offset: u64, len: u64) {
        self.free.insert(offset, len);
        self.by_len.insert((len, offset));
        self.free_bytes += len;
    }

    fn drop(&mut self, offset: u64) -> Option<u64> {
        let len = self.free.remove(&offset)?;
        self.by_len.remove(&(len, offset));
        self.free_bytes -= len;
        Some(len)
    }

    /// The space that `used` does not take. Gives the first extent that overlaps another, or is not
    /// made of blocks.
    pub(crate) fn new(used: &mut [Extent]) -> (Self, Vec<Extent>) {
        used.sort_by_key(|e| e.offset);
        let (mut space, mut bad) = (Self::default(), Vec::new());
        // One without bytes is nowhere: its offset may have been used again.
        for extent in used.iter().filter(|extent| extent.len > 0) {
            let whole = extent.offset.is_multiple_of(BLOCK as u64) && extent.len.is_multiple_of(BLOCK as u64);
            let fits = extent.offset.checked_add(extent.len).is_some_and(|end| end <= MAX_LEN);
            if extent.offset < space.end || !whole || !fits {
                bad.push(*extent);
                continue;
            }
            if extent.offset > space.end {
                space.add(space.end, extent.offset - space.end);
            }
            space.end = extent.end();
        }
        (space, bad)
    }

    /// Takes `len` bytes, a multiple of the block. `None`: no file can be so long.
    pub(crate) fn take(&mut self, len: u64) -> Option<Extent> {
        let Some(&(free, offset)) = self.by_len.range((len, 0)..).next() else {
            let offset = self.end;
            self.end = offset.checked_add(len).filter(|&end| end <= MAX_LEN)?;
            return Some(Extent { offset, len });
        };
        self.drop(offset);
        if free > len {
            self.add(offset + len, free - len);
        }
        Some(Extent { offset, len })
    }

    /// Gives an extent, or a part of one, back.
    pub(crate) fn give(&mut self, extent: Extent) {
        if extent.len == 0 {
            return;
        }
        let (mut offset, mut end) = (extent.offset, extent.end());
        if let Some((&before, &len)) = self.free.range(..offset).next_back()
            && before + len == offset
        {
            self.drop(before);
            offset = before;
        }
        if let Some(len) = self.drop(end) {
            end += len;
        }
        if end == self.end {
            self.end = offset;
        } else {
            self.add(offset, end - offset);
        }
    }

    /// The end of the last extent in use.
    pub(crate) fn end(&self) -> u64 {
        self.end
    }

    /// Bytes in use.
    pub(crate) fn held(&self) -> u64 {
        self.end - self.free_bytes
    }

    /// The free extents below the end.
    pub(crate) fn holes(&self) -> Vec<Extent> {
        self.free.iter().map(|(&offset, &len)| Extent { offset, len }).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const B: u64 = BLOCK as u64;

    proptest! {
        #[test]
        fn nothing_is_given_twice_and_nothing_is_lost(steps in prop::collection::vec((any::<bool>(), 1u64..9, any::<usize>()), 1..80)) {
            let mut space = Space::default();
            let mut used: Vec<Extent> = Vec::new();
            for (take, blocks, pick) in steps {
                if take || used.is_empty() {
                    let new = space.take(blocks * B).unwrap();
                    prop_assert!(used.iter().all(|e| e.end() <= new.offset || new.end() <= e.offset));
                    used.push(new);
                } else {
                    space.give(used.swap_remove(pick % used.len()));
                }
                let held: u64 = used.iter().map(|e| e.len).sum();
                let holes: u64 = space.holes().iter().map(|e| e.len).sum();
                prop_assert_eq!((held + holes, space.held()), (space.end(), held));
            }
            let (again, bad) = Space::new(&mut used.clone());
            prop_assert!(bad.is_empty());
            prop_assert_eq!((again.end(), again.holes()), (space.end(), space.holes()));
        }
    }

    #[test]
    fn what_no_file_can_hold_is_not_taken() {
        let mut space = Space::default();
        let one = space.take(B);
        assert_eq!((space.take(u64::MAX), space.take(MAX_LEN), space.end()), (None, None, B));
        assert_eq!(one, Some(Extent { offset: 0, len: B }));
        let (_, bad) = Space::new(&mut [Extent { offset: u64::MAX / B * B - B, len: B }]);
        assert_eq!(bad.len(), 1);
    }

    #[test]
    fn overlaps_are_found() {
        let extent = |offset, len| Extent { offset: offset * B, len: len * B };
        let (_, bad) = Space::new(&mut [extent(4, 4), extent(0, 5), extent(9, 1)]);
        assert_eq!(bad, [extent(4, 4)]);
    }
}
