//! Whether a device may write to a client's memory unseen by `UFFDIO_MOVE`.
//!
//! Each merge period looks, before its scan: a request through a file that is opened later writes
//! to pages that this scan or the next finds written, and the look of the next period comes before
//! they are candidates. Once found, it holds for two cooldown periods without another look: a
//! request may outlive the descriptor that it came through.

use std::time::{Duration, Instant};

#[derive(Debug, Default)]
pub(crate) struct DirectIo {
    /// The file or device that was found, and when to look again.
    found: Option<(String, Instant)>,
}

impl DirectIo {
    /// Why all pages of the client cool down, if they do.
    pub(crate) fn why(&self) -> Option<&String> {
        self.found.as_ref().map(|(why, _)| why)
    }

    pub(crate) fn is_due(&self, now: Instant) -> bool {
        self.found.as_ref().is_none_or(|&(_, until)| now >= until)
    }

    /// A look found this. `cooldown`: `direct_io_seconds`. Returns whether that is new.
    pub(crate) fn looked(&mut self, why: Option<String>, cooldown: Duration, now: Instant) -> bool {
        let new = why.is_some() && self.found.is_none();
        self.found = why.map(|why| (why, now + 2 * cooldown));
        new
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_was_found_holds_for_two_cooldown_periods() {
        let (mut direct, now, cooldown) = (DirectIo::default(), Instant::now(), Duration::from_secs(30));
        assert!(direct.is_due(now) && direct.why().is_none());
        assert!(!direct.looked(None, cooldown, now) && direct.is_due(now), "each period looks");
        assert!(direct.looked(Some("nfs4".into()), cooldown, now));
        assert!(!direct.is_due(now + Duration::from_secs(59)));
        let later = now + Duration::from_secs(60);
        assert!(direct.is_due(later) && direct.why().is_some(), "it holds until the look");
        assert!(!direct.looked(Some("nfs4".into()), cooldown, later), "said once");
        assert!(!direct.looked(None, cooldown, later) && direct.why().is_none());
    }
}
