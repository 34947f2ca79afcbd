//! Sequential prediction: planning pages whose contents are not known yet.
//!
//! Two copies of the same memory lie side by side: where page after page held content after
//! content, the next page will most likely hold the next content. Such pages are planned unread,
//! since every page is compared before it is merged. A sequence that goes on is predicted twice as
//! far each time. A page that was predicted wrong is a candidate again, and is read next. Pages of
//! one content, as zeros, are a sequence too.

use wire::PageNo;

/// Pages predicted at a time, first and most.
const PAGES: std::ops::RangeInclusive<u32> = 64..=512;
/// Consecutive pages in sequence that must have been read before the next ones are predicted.
const PROVEN: u32 = 8;

pub(crate) trait Follows: Copy {
    /// Before any page is read.
    const NONE: Self;

    /// From this to what the next page has: 0, the same; 1, the next one. `None`: no sequence.
    fn step_to(self, next: Self) -> Option<u32>;

    /// What the next page has, a step further.
    fn stepped(self, step: u32) -> Self;
}

/// Handles of an index: contents that were sighted one after the other follow each other.
impl Follows for u32 {
    const NONE: Self = 0;

    fn step_to(self, next: Self) -> Option<u32> {
        Some(next.wrapping_sub(self)).filter(|&step| step <= 1)
    }

    fn stepped(self, step: u32) -> Self {
        self + step
    }
}

/// Consecutive pages with contents in sequence, up to the page looked at last.
pub(crate) struct Prediction<T> {
    page: PageNo,
    target: T,
    step: u32,
    /// Pages of the sequence that were read.
    len: u32,
    /// How many pages to predict next.
    ahead: u32,
}

impl<T: Follows> Default for Prediction<T> {
    fn default() -> Self {
        Self { page: PageNo(0), target: T::NONE, step: 1, len: 0, ahead: *PAGES.start() }
    }
}

impl<T: Follows> Prediction<T> {
    /// A page was read. `None`: it has nothing that was known before.
    pub(crate) fn add(&mut self, page: PageNo, target: Option<T>) {
        let step = target.and_then(|target| self.target.step_to(target));
        match (target, step) {
            (Some(_), Some(step)) if self.len > 0 && page == self.page + 1 && (step == self.step || self.len == 1) => {
                (self.len, self.step) = (self.len + 1, step);
            }
            (Some(_), _) => *self = Self { len: 1, ..Self::default() },
            (None, _) => *self = Self::default(),
        }
        (self.page, self.target) = (page, target.unwrap_or(self.target));
    }

    /// How many pages are predicted from `from` on, at most; 0 where nothing is.
    pub(crate) fn reach(&self, from: PageNo) -> u32 {
        if self.len >= PROVEN && from == self.page + 1 { self.ahead } else { 0 }
    }

    /// Offers predicted pages from `from` on, and what each has, to `take`, until it does not take
    /// one. Returns how many it took.
    pub(crate) fn each(&mut self, from: PageNo, mut take: impl FnMut(PageNo, T) -> bool) -> u32 {
        let reach = self.reach(from);
        for taken in 0..reach {
            let (page, target) = (self.page + 1, self.target.stepped(self.step));
            if !take(page, target) {
                return taken;
            }
            (self.page, self.target) = (page, target);
        }
        reach
    }

    /// The sequence goes on: the next prediction is twice as long.
    pub(crate) fn goes_on(&mut self) {
        self.ahead = (self.ahead * 2).min(*PAGES.end());
    }
}

#[cfg(test)]
mod tests;
