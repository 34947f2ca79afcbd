//! A range of addresses.

use crate::PAGE_SIZE;

/// `len` bytes from `start`. Where a range is passed to the kernel, both are multiples of the page
/// size.
#[derive(Copy, Clone, PartialEq, Eq, Debug, Hash)]
pub struct Range {
    /// The first byte's address.
    pub start: usize,
    /// Length in bytes.
    pub len: usize,
}

impl Range {
    /// The range of `len` bytes from `start`.
    pub const fn new(start: usize, len: usize) -> Self {
        Self { start, len }
    }

    /// The first address behind the range; saturates at the end of the address space.
    pub const fn end(&self) -> usize {
        self.start.saturating_add(self.len)
    }

    /// How many whole pages of [`PAGE_SIZE`] the length holds.
    pub const fn pages(&self) -> usize {
        self.len / PAGE_SIZE
    }

    /// Whether every byte of `other` lies in this range.
    pub const fn contains(&self, other: &Self) -> bool {
        other.start >= self.start && other.end() <= self.end()
    }

    /// The bytes that both ranges have; `None` when there are none.
    pub fn intersect(&self, other: &Self) -> Option<Self> {
        let start = self.start.max(other.start);
        let end = self.end().min(other.end());
        (start < end).then(|| Self::new(start, end - start))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ends_and_pages() {
        let range = Range::new(0x1000, 0x3000);
        assert_eq!((range.end(), range.pages()), (0x4000, 3));
        assert_eq!(Range::new(usize::MAX - 1, 16).end(), usize::MAX);
    }

    #[test]
    fn contains_and_intersects() {
        let range = Range::new(0x1000, 0x3000);
        assert!(range.contains(&range));
        assert!(range.contains(&Range::new(0x3000, 0x1000)));
        assert!(!range.contains(&Range::new(0x3000, 0x2000)));
        assert!(!range.contains(&Range::new(0, 0x2000)));
        assert_eq!(range.intersect(&Range::new(0, 0x2000)), Some(Range::new(0x1000, 0x1000)));
        assert_eq!(range.intersect(&Range::new(0x3000, 0x9000)), Some(Range::new(0x3000, 0x1000)));
        assert_eq!(range.intersect(&Range::new(0x2000, 0x1000)), Some(Range::new(0x2000, 0x1000)));
        assert_eq!(range.intersect(&Range::new(0x4000, 0x1000)), None);
        assert_eq!(range.intersect(&Range::new(0, 0x1000)), None);
    }
}
