//! Whether a pre-copy migration would converge.
//!
//! Pre-copy sends all of a guest's memory while the guest runs, then the pages written meanwhile,
//! and so on. When the pages left can be sent within the longest downtime, the guest is stopped and
//! they are sent. The daemon measures the number of distinct pages written within several times.
//! This module interpolates linearly between them, and between zero and the first. The true curve
//! is concave, so short rounds look slightly better here than they are. After the last measured
//! time the curve continues with its last slope.

use control::DirtyStatus;
use kmem::PAGE_SIZE;
use serde::Serialize;

/// Rounds after which a migration counts as one that does not converge.
const ROUNDS: u32 = 100;
/// A round that leaves more than this share of its pages makes no progress.
const PROGRESS: f64 = 0.98;

/// The link that memory is sent over.
pub(crate) struct Link {
    pages_per_second: f64,
    /// The longest downtime, seconds.
    downtime: f64,
}

impl Link {
    /// A link of this many MiB per second, and the longest downtime in milliseconds.
    pub(crate) fn new(mib_per_second: f64, downtime_ms: f64) -> Self {
        Self {
            pages_per_second: mib_per_second * f64::from(1 << 20) / PAGE_SIZE as f64,
            downtime: downtime_ms / 1000.0,
        }
    }
}

/// How a migration would go.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub(crate) struct Migration {
    /// Whether the downtime would become short enough.
    pub(crate) converges: bool,
    /// Time until the guest runs on the other side, or until its migration is found not to
    /// converge.
    pub(crate) seconds: f64,
    /// Rounds before the downtime.
    pub(crate) rounds: u32,
    /// Pages sent, those of the downtime included.
    pub(crate) pages_sent: f64,
    /// Downtime for the pages left.
    pub(crate) downtime_seconds: f64,
}

/// How a migration of this client would go; `None` if it has not been watched for long enough.
pub(crate) fn predict(status: &DirtyStatus, link: &Link) -> Option<Migration> {
    let points: Vec<(f64, f64)> =
        status.windows.iter().filter(|w| w.complete).map(|w| (w.seconds, w.pages as f64)).collect();
    if points.is_empty() || status.pages == 0 {
        return None;
    }
    let all = status.pages as f64;
    let mut out = Migration { converges: false, seconds: 0.0, rounds: 0, pages_sent: 0.0, downtime_seconds: 0.0 };
    let mut left = all;
    while out.rounds < ROUNDS {
        let seconds = left / link.pages_per_second;
        out.rounds += 1;
        out.seconds += seconds;
        out.pages_sent += left;
        let dirty = written_within(&points, seconds).min(all);
        out.downtime_seconds = dirty / link.pages_per_second;
        if out.downtime_seconds <= link.downtime {
            out.converges = true;
            out.seconds += out.downtime_seconds;
            out.pages_sent += dirty;
            break;
        }
        if dirty > left * PROGRESS {
            break;
        }
        left = dirty;
    }
    Some(out)
}

/// Distinct pages written within a time. `points`: measured seconds and pages, ascending.
fn written_within(points: &[(f64, f64)], seconds: f64) -> f64 {
    let after = points.partition_point(|point| point.0 < seconds).min(points.len() - 1);
    let to = points[after];
    let from = if after == 0 { (0.0, 0.0) } else { points[after - 1] };
    let slope = (to.1 - from.1).max(0.0) / (to.0 - from.0);
    from.1 + slope * (seconds - from.0)
}

#[cfg(test)]
mod tests {
    use super::*;
    use control::Window;

    /// 1 GiB, and the curve of what it writes.
    fn client(curve: &[(f64, u64)]) -> DirtyStatus {
        let windows = curve.iter().map(|&(seconds, pages)| Window { seconds, pages, complete: true }).collect();
        DirtyStatus { pages: 1 << 18, windows, ..DirtyStatus::default() }
    }

    #[test]
    fn curves_are_straight_between_points() {
        let points = [(1.0, 100.0), (10.0, 190.0)];
        let cases = [(0.5, 50.0), (1.0, 100.0), (2.0, 110.0), (10.0, 190.0), (20.0, 290.0)];
        cases.into_iter().for_each(|(t, pages)| assert_eq!(written_within(&points, t), pages));
    }

    #[test]
    fn an_idle_guest_takes_one_round() {
        let out = predict(&client(&[(1.0, 0), (10.0, 0)]), &Link::new(1024.0, 300.0)).unwrap();
        assert_eq!(
            out,
            Migration { converges: true, seconds: 1.0, rounds: 1, pages_sent: 262_144.0, downtime_seconds: 0.0 }
        );
    }

    #[test]
    fn rounds_shrink_with_the_working_set() {
        // 256 MiB a second, of 1 GiB a second: rounds of 1, 0.25 and 0.0625 s.
        let out = predict(&client(&[(1.0, 1 << 16), (10.0, 10 << 16)]), &Link::new(1024.0, 20.0)).unwrap();
        assert!(out.converges && out.rounds == 3, "{out:?}");
        assert_eq!(out.downtime_seconds, 0.25 * 0.25 * 0.25);
    }

    #[test]
    fn a_client_that_writes_faster_than_the_link_never_converges() {
        let fast = client(&[(1.0, 1 << 17), (10.0, 1 << 18)]);
        let out = predict(&fast, &Link::new(100.0, 300.0)).unwrap();
        assert!(!out.converges && out.downtime_seconds > 5.0, "{out:?}");
        // A small hot set that is written all the time can still be sent in one go.
        let hot = client(&[(1.0, 1000), (10.0, 1000)]);
        assert!(predict(&hot, &Link::new(100.0, 300.0)).unwrap().converges);
    }

    #[test]
    fn a_client_that_was_not_watched_has_no_prediction() {
        let mut status = client(&[(1.0, 5)]);
        status.windows[0].complete = false;
        assert_eq!(predict(&status, &Link::new(100.0, 300.0)), None);
    }
}
