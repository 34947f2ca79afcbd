//! A sweep over a guest's RAM, batch by batch: what a host does in each period.

use std::ops::{ControlFlow, Range};

use crate::host::Recycled;

/// Pages that a sweep claims at a time (and up to a word more): some 0.2 ms of work, for which the
/// guest may wait.
pub const SWEEP_PAGES: u64 = 1024;

/// How a sweep ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Ended<W> {
    /// Everything was looked at.
    Done,
    /// Its time was over before.
    Over,
    /// A batch has ended it, for this reason.
    Stopped(W),
}

/// Sweeps the frames of these ranges. Returns the sum of the batches, and how it ended.
///
/// `is_over` is asked before each batch. `batch` recycles [`SWEEP_PAGES`] within the frames that
/// are left ([`Host::recycle`](crate::Host::recycle)), or ends the sweep.
pub fn sweep<W>(
    ranges: impl IntoIterator<Item = Range<u64>>,
    is_over: impl Fn() -> bool,
    mut batch: impl FnMut(&mut Range<u64>) -> ControlFlow<W, Recycled>,
) -> (Recycled, Ended<W>) {
    let mut sum = Recycled::default();
    for mut left in ranges {
        while !left.is_empty() {
            if is_over() {
                return (sum, Ended::Over);
            }
            match batch(&mut left) {
                ControlFlow::Continue(done) => sum.add(done),
                ControlFlow::Break(why) => return (sum, Ended::Stopped(why)),
            }
        }
    }
    (sum, Ended::Done)
}

#[cfg(all(test, not(loom)))]
mod tests {
    use std::cell::Cell;

    use super::*;

    #[test]
    fn a_sweep_adds_its_batches_until_all_is_seen_or_something_ends_it() {
        let (time, seen) = (Cell::new(0), Cell::new(0));
        let run = |most: u64, stop: u64| {
            time.set(0);
            seen.set(0);
            sweep(
                [0..3, 5..5, 10..14],
                || time.get() == most,
                |left| {
                    if left.start == stop {
                        return ControlFlow::Break(stop);
                    }
                    let end = left.end.min(left.start + 2);
                    let pages = end - left.start;
                    left.start = end;
                    time.set(time.get() + 1);
                    seen.set(seen.get() + pages);
                    ControlFlow::Continue(Recycled { pages, runs: 1, ..Recycled::default() })
                },
            )
        };
        for (most, stop, pages, ended) in [
            (99, 99, 7, Ended::Done),
            (3, 99, 5, Ended::Over),
            (99, 12, 5, Ended::Stopped(12)),
            (0, 99, 0, Ended::Over),
        ] {
            let (sum, how) = run(most, stop);
            assert_eq!((sum.pages, sum.runs, seen.get(), how), (pages, time.get(), pages, ended));
        }
    }
}
