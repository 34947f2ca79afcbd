//! The frames of RAM that the host manages.

use std::ops::Range;

/// The frames that may be recycled, which the host learns from QMP for example: ascending ranges
/// that do not touch.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Ram {
    ranges: Vec<Range<u64>>,
}

impl Ram {
    /// The union of ranges in any order; empty ones are left out.
    pub fn new(ranges: impl IntoIterator<Item = Range<u64>>) -> Self {
        let mut sorted: Vec<_> = ranges.into_iter().filter(|range| range.start < range.end).collect();
        sorted.sort_by_key(|range| range.start);
        let mut ranges: Vec<Range<u64>> = Vec::with_capacity(sorted.len());
        for range in sorted {
            match ranges.last_mut() {
                Some(last) if range.start <= last.end => last.end = last.end.max(range.end),
                _ => ranges.push(range),
            }
        }
        Self { ranges }
    }

    /// The ranges.
    pub fn ranges(&self) -> &[Range<u64>] {
        &self.ranges
    }

    /// The managed frames of a word: bit `i` stands for frame `64 * word + i`.
    pub fn mask(&self, word: usize) -> u64 {
        let first = word as u64 * 64;
        let end = first + 64;
        let mut mask = 0;
        let at = self.ranges.partition_point(|range| range.end <= first);
        for range in self.ranges[at..].iter().take_while(|range| range.start < end) {
            let (low, high) = (range.start.max(first) - first, range.end.min(end) - first);
            mask |= (u64::MAX >> (64 - (high - low))) << low;
        }
        mask
    }
}
