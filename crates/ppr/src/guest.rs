//! The guest's side: mark what is free, cancel before use.
//!
//! - *Mark*: set the page's bit in F. The thread that changes a word of F from 0 sets the word's
//!   bit in S.
//! - *Cancel*: clear the page's bit in F: no host can own the page any more. Then wait until its
//!   bit in C is clear: a host that owned the page has finished. C matters even if the bit in F was
//!   still set, since a page may have been marked again while a host was zeroing it.
//!
//! A page is used only after a successful cancel: the one rule on which the guest's safety depends.

use std::ops::Range;

use thiserror::Error;

use crate::pool::Pool;
use crate::primitive::Ordering::SeqCst;

/// The guest's operations. Any number of threads may call them at once, if each page has one owner
/// at a time.
#[derive(Clone, Copy)]
pub struct Guest<'p> {
    pool: &'p Pool,
}

/// The result of a cancel.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Cancelled {
    /// Pages that were still marked: their content is unchanged.
    pub won: u64,
    /// Words of C that the cancel waited for: a host was zeroing pages of the range.
    pub waits: u64,
}

/// A host holds pages of the range, and the caller's patience ended. The pages must not be used:
/// the host may zero them at any time until [`Guest::claimed`] returns `false`.
#[derive(Clone, Copy, Debug, Error, PartialEq, Eq)]
#[error("a host has claimed pages of word {word} and does not let go: keep the pages unused, and look again later")]
pub struct Stuck {
    /// The first word with such pages: frames from `64 * word` on.
    pub word: usize,
}

impl<'p> Guest<'p> {
    /// The guest of a pool.
    pub fn new(pool: &'p Pool) -> Self {
        Self { pool }
    }

    /// Marks pages that are not needed. From now on they may become zeros at any time. Frames
    /// beyond the pool are left out.
    pub fn mark(&self, frames: Range<u64>) {
        for (word, bits) in words(frames, self.pool.frames()) {
            if self.pool.free()[word].fetch_or(bits, SeqCst) == 0 {
                self.pool.raise(word);
            }
        }
    }

    /// Takes pages back before they are used. Each page is unchanged, or zeros. Waits for a host
    /// that is zeroing them: calls `patience` after each look, and gives up when that returns
    /// `false`.
    ///
    /// # Errors
    /// [`Stuck`]: the pages must not be used. None of them is marked any more, so no host will
    /// claim them again.
    pub fn cancel(&self, frames: Range<u64>, mut patience: impl FnMut() -> bool) -> Result<Cancelled, Stuck> {
        let mut seen = Cancelled::default();
        // All marks are cleared first, so that giving up leaves none behind.
        for (word, bits) in words(frames.clone(), self.pool.frames()) {
            seen.won += u64::from((self.pool.free()[word].fetch_and(!bits, SeqCst) & bits).count_ones());
        }
        for (word, bits) in words(frames, self.pool.frames()) {
            let claims = &self.pool.claims()[word];
            if claims.load(SeqCst) & bits == 0 {
                continue;
            }
            seen.waits += 1;
            while claims.load(SeqCst) & bits != 0 {
                if !patience() {
                    return Err(Stuck { word });
                }
            }
        }
        Ok(seen)
    }

    /// Whether a host holds any of the pages. For pages that are not marked, `false` is final.
    pub fn claimed(&self, frames: Range<u64>) -> bool {
        words(frames, self.pool.frames()).any(|(word, bits)| self.pool.claims()[word].load(SeqCst) & bits != 0)
    }
}

/// The words that a range of frames lies in, and its bits there.
pub(crate) fn words(frames: Range<u64>, limit: u64) -> impl Iterator<Item = (usize, u64)> {
    let (start, end) = (frames.start, frames.end.min(limit));
    let words = if start < end { start / 64..(end - 1) / 64 + 1 } else { 0..0 };
    words.map(move |word| {
        let low = start.saturating_sub(word * 64);
        let high = (end - word * 64).min(64);
        (word as usize, (u64::MAX >> (64 - (high - low))) << low)
    })
}
