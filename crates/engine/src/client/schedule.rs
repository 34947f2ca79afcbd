//! When a client is scanned, how many pages it writes a second, and whether a device may write to
//! its memory unseen by `UFFDIO_MOVE`.
//!
//! Each merge period looks for direct I/O, before its scan: a request through a file that is opened
//! later writes to pages that this scan or the next finds written, and the look of the next period
//! comes before they are candidates. Once found, it holds for two cooldown periods without another
//! look: a request may outlive the descriptor that it came through.
//!
//! A client whose scans find nothing for long is looked at in every second period only.

use std::time::{Duration, Instant};

use super::scanning::UnderScan;

/// The weight of the last period; the periods before have the rest.
const LAST: f64 = 0.5;

/// Less is nothing: a mean that fades never becomes 0.
const LEAST: f64 = 0.0003;

/// Scans in a row that find nothing, after which a client counts as calm.
const CALM: u32 = 3;

/// When a client is scanned, and when copies end their cooldown.
pub(crate) struct Schedule {
    /// A scan before this time would take too great a part of the time.
    pub(crate) next_scan: Instant,
    /// When its pages are looked through again for frames that are evacuated.
    pub(crate) next_walk: Instant,
    /// Which periods are left out.
    pub(crate) calm: Calm,
    /// What its scans find written.
    pub(crate) dirty: DirtyRate,
    /// When the cooldown period of copies began; see [`crate::core::ledger`].
    pub(crate) cooldown_began: Instant,
    /// Whether all its pages cool down.
    pub(crate) direct_io: DirectIo,
    /// A scan that is under way, without the lock.
    pub(super) scanning: Option<UnderScan>,
}

impl Schedule {
    pub(super) fn new(now: Instant) -> Self {
        Self {
            next_scan: now,
            next_walk: now,
            calm: Calm::default(),
            dirty: DirtyRate::default(),
            cooldown_began: now,
            direct_io: DirectIo::default(),
            scanning: None,
        }
    }
}

/// Leaves out every second period of a client that writes nothing: a look at it costs as much as
/// one at a client that does.
#[derive(Debug, Default)]
pub(crate) struct Calm {
    /// Scans that found nothing since one that did.
    scans: u32,
    rested: bool,
}

impl Calm {
    /// A period begins. Returns whether it is left out.
    pub(crate) fn rests(&mut self) -> bool {
        self.rested = self.scans >= CALM && !self.rested;
        self.rested
    }

    /// A period's scan is over. `is_active`: pages were written, or wait for something.
    pub(crate) fn scanned(&mut self, is_active: bool) {
        self.scans = if is_active { 0 } else { self.scans.saturating_add(1) };
    }
}

/// What the last look for direct I/O found.
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

/// The rate, smoothed over the last periods.
#[derive(Debug, Default)]
pub(crate) struct DirtyRate {
    /// Pages that scans found written since the last merge period's scan.
    found: u64,
    last: Option<Instant>,
    per_second: Option<f64>,
}

impl DirtyRate {
    /// A scan found this number of pages written.
    pub(crate) fn found(&mut self, pages: u64) {
        self.found += pages;
    }

    /// A merge period's scan is over.
    pub(crate) fn end_period(&mut self, now: Instant) {
        let found = std::mem::take(&mut self.found);
        if let Some(last) = self.last.replace(now) {
            let rate = found as f64 / now.duration_since(last).as_secs_f64().max(0.001);
            self.per_second = Some(self.per_second.map_or(rate, |before| before + (rate - before) * LAST));
        }
    }

    /// Pages written a second; 0 before the second scan, and for less than one an hour.
    pub(crate) fn per_second(&self) -> f64 {
        self.per_second.filter(|&rate| rate > LEAST).unwrap_or_default()
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

    #[test]
    fn every_second_period_of_a_calm_client_is_left_out_until_it_writes() {
        let mut calm = Calm::default();
        for _ in 0..CALM {
            assert!(!calm.rests());
            calm.scanned(false);
        }
        assert!(calm.rests() && !calm.rests());
        calm.scanned(false);
        assert!(calm.rests() && !calm.rests());
        calm.scanned(true);
        assert!(!calm.rests() && !calm.rests());
    }

    #[test]
    fn the_rate_follows_what_scans_find() {
        let (mut rate, now) = (DirtyRate::default(), Instant::now());
        let at = |seconds| now + Duration::from_secs(seconds);
        rate.found(7);
        rate.end_period(at(0));
        assert_eq!(rate.per_second(), 0.0, "nobody knows since when those were written");
        rate.found(60);
        rate.found(40);
        rate.end_period(at(10));
        assert_eq!(rate.per_second(), 10.0);
        rate.end_period(at(20));
        assert_eq!(rate.per_second(), 5.0);
    }
}
