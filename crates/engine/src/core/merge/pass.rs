//! A pass: takes a back end's candidates through its steps, at the governor's pace.
//!
//! ```text
//!   next ──▶ merge     predicted pages, or candidates, from a page on;
//!     ▲        │       read or digested, looked up, planned, merged
//!     └────────┘
//! ```

use std::sync::atomic::{AtomicBool, Ordering::Relaxed};

use wire::PageNo;

use crate::pace::Pacer;

/// What a back end does in a pass. Each call is about many pages.
pub(crate) trait Steps {
    type Next;
    type Stop;

    /// What comes next, from a page on, and how many pages that is. `None`: nothing.
    fn next(&mut self, from: PageNo) -> Result<Option<(Self::Next, u64)>, Self::Stop>;

    /// Takes these pages through all steps. Returns where to go on; `None`: the pass is over.
    fn merge(&mut self, next: Self::Next) -> Result<Option<PageNo>, Self::Stop>;
}

pub(crate) struct Pace<'a> {
    pub(crate) pacer: &'a Pacer,
    pub(crate) user: claims::Owner,
    pub(crate) stop: &'a AtomicBool,
}

impl Pace<'_> {
    /// Waits for its turn. `false`: the engine ends.
    pub(crate) fn wait(&self) -> bool {
        let stops = || self.stop.load(Relaxed);
        if !stops() {
            self.pacer.pause(self.user, stops);
        }
        !stops()
    }

    pub(crate) fn took(&self, pages: u64) {
        self.pacer.took(self.user, pages);
    }
}

/// Runs a pass from a page on.
pub(crate) fn run<S: Steps>(steps: &mut S, pace: &Pace<'_>, from: PageNo) -> Result<(), S::Stop> {
    turn(steps, pace, from, usize::MAX).map(drop)
}

/// The same for at most so many steps. Returns where to go on; `None`: the pass is over.
pub(crate) fn turn<S: Steps>(
    steps: &mut S,
    pace: &Pace<'_>,
    from: PageNo,
    most: usize,
) -> Result<Option<PageNo>, S::Stop> {
    let mut next = Some(from);
    for _ in 0..most {
        let Some(from) = next.filter(|_| pace.wait()) else { return Ok(None) };
        let Some((pages, count)) = steps.next(from)? else { return Ok(None) };
        pace.took(count);
        next = steps.merge(pages)?;
    }
    Ok(next)
}
