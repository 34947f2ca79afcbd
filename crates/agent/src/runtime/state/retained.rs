//! Memory that left management and may still map frames.
//!
//! The daemon keeps the frames' bytes. The guards go on knowing the memory: what the program
//! discards there must read as zeros, and not as the frame.

use kmem::range::Range;

use crate::runtime::state::region::Sticky;

/// The list: disjoint, in no order.
pub(crate) struct Retained(Vec<(Range, Sticky)>);

impl Retained {
    pub(super) const fn new() -> Self {
        Self(Vec::new())
    }

    pub(super) fn add(&mut self, range: Range, sticky: Sticky) {
        self.0.push((range, sticky));
    }

    pub(super) fn cut(&mut self, range: Range) {
        let mut left = Vec::with_capacity(self.0.len() + 1);
        for &(part, sticky) in &self.0 {
            let before = Range::new(part.start, range.start.clamp(part.start, part.end()) - part.start);
            let behind = range.end().clamp(part.start, part.end());
            let behind = Range::new(behind, part.end() - behind);
            match part.intersect(&range) {
                None => left.push((part, sticky)),
                Some(_) => {
                    left.extend([before, behind].into_iter().filter(|rest| rest.len > 0).map(|rest| (rest, sticky)))
                }
            }
        }
        self.0 = left;
    }

    /// Notes advice of the program on a range.
    pub(super) fn advise(&mut self, range: Range, change: impl Fn(&mut Sticky)) {
        let mut parts = self.within(range);
        self.cut(range);
        parts.iter_mut().for_each(|(_, sticky)| change(sticky));
        self.0.extend(parts);
    }

    /// The parts of a range.
    pub(crate) fn within(&self, range: Range) -> Vec<(Range, Sticky)> {
        self.0.iter().filter_map(|(part, sticky)| Some((part.intersect(&range)?, *sticky))).collect()
    }

    pub(super) fn ranges(&self) -> impl Iterator<Item = Range> {
        self.0.iter().map(|(range, _)| *range)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranges_are_cut() {
        let mut retained = Retained::new();
        retained.add(Range::new(0x1000, 0x8000), Sticky::default());
        retained.add(Range::new(0x20000, 0x1000), Sticky::default());
        retained.cut(Range::new(0x3000, 0x2000));
        retained.cut(Range::new(0x8000, 0x18fff));
        let ranges: Vec<Range> = retained.ranges().collect();
        assert_eq!(ranges[..2], [Range::new(0x1000, 0x2000), Range::new(0x5000, 0x3000)]);
        retained.cut(Range::new(0, usize::MAX));
        assert_eq!(retained.ranges().count(), 0);
    }
}
