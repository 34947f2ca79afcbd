use super::*;
use proptest::prelude::*;

#[test]
fn a_fixed_rate_is_kept() {
    let mut schedule = Schedule::at_rate(10.0, 1000.0);
    schedule.found(10.0, 5000);
    assert_eq!(schedule.took(500), 10.5);
    assert_eq!(schedule.took(1500), 12.0);
    assert_eq!((schedule.left(), schedule.rate()), (3000, 1000.0));
    // Pages that were never added do not wait.
    schedule.took(3000);
    assert_eq!(schedule.took(100_000), 15.0);
}

proptest! {
    /// A scanner that can keep up ends at the deadline, less its last chunk, and is never ahead
    /// of an even pace by more than a chunk. This holds whatever chunks cost and whenever more
    /// pages are found.
    #[test]
    fn pages_are_spread_evenly(
        work in 1_000u64..1_000_000,
        more in 0u64..500_000,
        when in 0.0f64..0.7,
        part in 100u64..1000,
        cost in 0.0f64..0.2,
    ) {
        let chunk = work.div_ceil(part);
        let target = 10.0;
        let mut schedule = Schedule::until(0.0, target);
        schedule.found(0.0, work);
        let (mut now, mut done, mut added) = (0.0f64, 0u64, false);
        let mut even = work as f64 / target;
        let mut base = (0.0, 0.0);
        let mut last = 0.0;
        while schedule.left() > 0 {
            if !added && now >= when * target {
                schedule.found(now, more);
                base = (now, done as f64);
                even = schedule.left() as f64 / (target - now);
                added = true;
            }
            let n = chunk.min(schedule.left());
            let most = base.1 + even * (now - base.0) * 1.1 + 2.0 * chunk as f64;
            prop_assert!(done as f64 <= most, "{done} of {most} at {now}");
            last = now;
            let until = schedule.took(n);
            done += n;
            // Reading takes a part of the time that the pace leaves.
            now += cost * n as f64 * target / (work + more) as f64;
            now = now.max(until);
        }
        prop_assert!((now - target).abs() < 1e-6, "{now}");
        prop_assert!(last >= target * (1.0 - 3.0 * chunk as f64 / work as f64) - 1e-6, "{last}");
    }

    /// A scanner that was delayed catches up as fast as it can, and does not wait while it is
    /// late.
    #[test]
    fn being_late_is_made_good(held in 1.0f64..20.0, work in 10_000u64..100_000) {
        let mut schedule = Schedule::until(0.0, 10.0);
        schedule.found(0.0, work);
        let (mut now, mut waited) = (held, 0.0);
        while schedule.left() > 0 {
            let behind = now > schedule.clock() + 10.0 * 100.0 / work as f64;
            let until = schedule.took(100);
            prop_assert!(!behind || until <= now);
            waited += (until - now).max(0.0);
            now = now.max(until);
        }
        prop_assert!((now - held.max(10.0)).abs() < 1e-6, "{now}");
        prop_assert!(held < 10.0 || waited < 1e-9);
    }
}
