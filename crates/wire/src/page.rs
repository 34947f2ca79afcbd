//! Numbers of pages, slots and regions, each a type of its own, and runs of pages.

use std::fmt;
use std::ops::{Add, AddAssign, Sub};

use serde::{Deserialize, Serialize};

/// Number of a page within its region; the region's first page is 0.
#[repr(transparent)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(transparent)]
pub struct PageNo(pub u32);

/// Number of a frame's slot within its segment, below [`crate::SEGMENT_PAGES`].
#[repr(transparent)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(transparent)]
pub struct Slot(pub u32);

/// Names a region within its client; never used again for another region of the same process.
#[repr(transparent)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(transparent)]
pub struct RegionId(pub u32);

/// What numbers of pages and of slots can do.
macro_rules! counts {
    ($($number:ident)*) => {$(
        impl $number {
            /// The number as an index.
            #[inline]
            pub const fn index(self) -> usize {
                self.0 as usize
            }
        }

        impl From<$number> for u64 {
            #[inline]
            fn from(number: $number) -> Self {
                number.0.into()
            }
        }

        impl Add<u32> for $number {
            type Output = Self;
            #[inline]
            fn add(self, more: u32) -> Self {
                Self(self.0 + more)
            }
        }
    )*};
}
counts!(PageNo Slot);

impl fmt::Display for PageNo {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

impl fmt::Display for RegionId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

impl AddAssign<u32> for PageNo {
    #[inline]
    fn add_assign(&mut self, pages: u32) {
        self.0 += pages;
    }
}

/// The distance in pages.
impl Sub for PageNo {
    type Output = u32;
    #[inline]
    fn sub(self, earlier: Self) -> u32 {
        self.0 - earlier.0
    }
}

/// Consecutive pages of a region.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct Run {
    /// The first page.
    pub page: PageNo,
    /// Pages.
    pub len: u32,
}

impl Run {
    /// `len` pages from `page` on.
    #[inline]
    pub const fn new(page: PageNo, len: u32) -> Self {
        Self { page, len }
    }

    /// One page.
    #[inline]
    pub const fn one(page: PageNo) -> Self {
        Self { page, len: 1 }
    }

    /// The pages from `start` up to `end`, without `end`. Empty if `end` is not above `start`.
    #[inline]
    pub const fn between(start: PageNo, end: PageNo) -> Self {
        Self { page: start, len: end.0.saturating_sub(start.0) }
    }

    /// The page behind the last. Only of a run that [is bounded](Run::is_bounded), as all decoded
    /// ones are.
    #[inline]
    pub fn end(self) -> PageNo {
        self.page + self.len
    }

    /// The pages, ascending.
    #[inline]
    pub fn pages(self) -> impl DoubleEndedIterator<Item = PageNo> + ExactSizeIterator {
        (self.page.0..self.page.0 + self.len).map(PageNo)
    }

    /// Whether the page is one of these.
    #[inline]
    pub fn contains(self, page: PageNo) -> bool {
        page >= self.page && page.0 - self.page.0 < self.len
    }

    /// The pages in both runs; `None` if there are none.
    #[inline]
    pub fn intersect(self, other: Self) -> Option<Self> {
        let both = Self::between(self.page.max(other.page), self.end().min(other.end()));
        (both.len > 0).then_some(both)
    }

    /// Whether all of `other` is in this run.
    #[inline]
    pub fn covers(self, other: Self) -> bool {
        self.page <= other.page && other.end() <= self.end()
    }

    /// Whether the number of the page behind the last can be represented.
    #[inline]
    pub const fn is_bounded(&self) -> bool {
        self.page.0.checked_add(self.len).is_some()
    }
}

impl fmt::Display for Run {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}+{}", self.page, self.len)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn runs_meet_and_cover_each_other() {
        let run = |start, end| Run::between(PageNo(start), PageNo(end));
        assert_eq!(run(0, 10).intersect(run(5, 20)), Some(run(5, 10)));
        assert_eq!(run(5, 20).intersect(run(0, 10)), Some(run(5, 10)));
        assert_eq!(run(0, 5).intersect(run(5, 10)), None);
        assert_eq!(run(0, 5).intersect(run(7, 10)), None);
        assert!(run(0, 10).covers(run(0, 10)) && run(0, 10).covers(run(3, 4)));
        assert!(!run(3, 4).covers(run(3, 5)) && !run(3, 4).covers(run(2, 4)));
    }
}
