//! Lines in a log that others cause: so many a minute, and how many more there were.

use std::time::{Duration, Instant};

const MINUTE: Duration = Duration::from_secs(60);

/// Room for lines in the present minute.
#[derive(Debug)]
pub struct Lines {
    most: u32,
    since: Instant,
    written: u32,
    left_out: u64,
}

impl Lines {
    /// `most`: lines a minute.
    pub fn new(most: u32) -> Self {
        Self { most, since: Instant::now(), written: 0, left_out: 0 }
    }

    /// Room for one line. `None`: there is none, and it counts as left out. Else how many were left
    /// out in the minute before, for the first line of a minute to say.
    pub fn take(&mut self) -> Option<u64> {
        let mut before = 0;
        if self.since.elapsed() >= MINUTE {
            (self.since, self.written) = (Instant::now(), 0);
            before = std::mem::take(&mut self.left_out);
        }
        let may = self.written < self.most;
        self.written += u32::from(may);
        self.left_out += u64::from(!may);
        may.then_some(before)
    }

    /// Whether the minute is over.
    pub fn are_old(&self) -> bool {
        self.since.elapsed() >= MINUTE
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_a_minute_has_no_room_for_is_counted_and_said_in_the_next() {
        let mut lines = Lines::new(2);
        assert_eq!([lines.take(), lines.take(), lines.take(), lines.take()], [Some(0), Some(0), None, None]);
        assert!(!lines.are_old());
        lines.since = Instant::now().checked_sub(MINUTE).unwrap();
        assert!(lines.are_old());
        assert_eq!([lines.take(), lines.take(), lines.take()], [Some(2), Some(0), None]);
    }
}
