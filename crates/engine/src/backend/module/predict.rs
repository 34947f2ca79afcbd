//! Sequential prediction: merging pages without digesting them.
//!
//! Two guests of one image hold the same memory in the same order. Contents that were sighted one
//! after the other have consecutive handles. So where page after page had handle after handle, the
//! next pages are merged with the contents of the next handles. The kernel says which of them
//! differed; these are digested, and the prediction begins anew. Pages of one content, as zeros,
//! are a sequence too: its handle stays.

use wire::PageNo;

use super::file::File;
use super::merge::{CHUNK, Wanted};
use crate::core::content::index::Place;

/// Pages predicted at a time, first and most.
const PAGES: std::ops::RangeInclusive<u32> = 64..=CHUNK as u32;
/// Pages in sequence that must have been digested before the next ones are predicted.
const PROVEN: u32 = 8;

/// Consecutive pages with contents in sequence, up to the page looked at last.
pub(super) struct Prediction {
    page: PageNo,
    handle: u32,
    /// By how much the handle grows from page to page: 0 or 1.
    step: u32,
    len: u32,
    /// How many pages to predict next.
    ahead: u32,
}

impl Default for Prediction {
    fn default() -> Self {
        Self { page: PageNo(0), handle: 0, step: 1, len: 0, ahead: *PAGES.start() }
    }
}

impl Prediction {
    /// A page was digested, and its content was known.
    pub(super) fn add(&mut self, page: PageNo, handle: u32) {
        let step = handle.wrapping_sub(self.handle);
        if self.len > 0 && page == self.page + 1 && step <= 1 && (step == self.step || self.len == 1) {
            (self.len, self.step) = (self.len + 1, step);
        } else {
            *self = Self { len: 1, ..Self::default() };
        }
        (self.page, self.handle) = (page, handle);
    }

    /// A page was digested, and its content was new.
    pub(super) fn ends(&mut self) {
        self.len = 0;
    }

    /// Whether all that was predicted was right.
    pub(super) fn was(&mut self, right: bool) {
        if right {
            self.ahead = (self.ahead * 2).min(*PAGES.end());
        } else {
            *self = Self::default();
        }
    }

    /// The pages from `from` on that are predicted, and with which contents.
    pub(super) fn next(&mut self, file: &File, from: PageNo) -> Vec<Wanted> {
        let mut wanted = Vec::new();
        if self.len < PROVEN || from != self.page + 1 {
            return wanted;
        }
        let mut state = file.state();
        while (wanted.len() as u32) < self.ahead {
            let (page, handle) = (self.page + 1, self.handle + self.step);
            let place = file.contents.index.get(handle).map(|(_, place)| place);
            let Some(place) = place.filter(|&place| place != Place::Sighted(file.sighting(page))) else { break };
            if page >= PageNo(state.region.pages) || !state.region.predict(page) {
                break;
            }
            wanted.push(Wanted { page, handle, place });
            (self.page, self.handle) = (page, handle);
        }
        wanted
    }
}
