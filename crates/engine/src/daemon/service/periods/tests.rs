//! When scans come.

use super::*;

const PERIOD: Duration = Duration::from_secs(1);

fn scans(users: &[u32], round: bool) -> Option<Scans> {
    Some(Scans { users: users.iter().copied().map(Owner::numbered).collect(), round })
}

#[test]
fn a_user_whose_passes_are_not_over_puts_off_its_own_scans_and_nobody_elses() {
    let start = Instant::now();
    let mut periods = Periods::new(PERIOD, start);
    let all = || BTreeSet::from([1, 2, 3].map(Owner::numbered));
    assert!(!periods.begin(start, all) && periods.scans(|_| false).is_none());
    assert_eq!(periods.wake(start), start + PERIOD);
    assert!(periods.begin(start + PERIOD, all));
    assert_eq!(periods.scans(|_| false), scans(&[1, 2, 3], true));
    assert_eq!(periods.scans(|_| false), None, "once in a period");
    for n in 2..5 {
        assert!(periods.begin(start + n * PERIOD, all));
        assert_eq!(
            periods.scans(|user| user == Owner::numbered(2)),
            scans(&[1, 3], false),
            "the round waits for user 2"
        );
        assert!(periods.wake(start + n * PERIOD) < start + (n + 1) * PERIOD);
    }
    assert_eq!(periods.scans(|_| false), scans(&[2], true), "as soon as its passes are over");
    assert!(periods.begin(start + 5 * PERIOD, all));
    assert_eq!(
        periods.scans(|user| user == Owner::numbered(3)),
        scans(&[1, 2], true),
        "user 3 was not of the last round"
    );
    let now = start + 5 * PERIOD;
    periods.set(PERIOD / 10, now);
    assert!(periods.begin(now + PERIOD / 10, all), "a shorter period begins at once");
    let now = now + PERIOD / 10;
    assert_eq!(periods.wake(now), now + LATER[0], "not 640 times a second");
}
