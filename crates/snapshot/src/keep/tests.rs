use super::*;

fn seconds(texts: &[&str]) -> Vec<u64> {
    texts.iter().map(|text| text.parse::<Timestamp>().unwrap().as_second() as u64).collect()
}

#[test]
fn the_newest_of_each_period_stays() {
    let all = seconds(&[
        "2026-01-31T23:50:00Z",
        "2026-02-01T00:10:00Z", // Sunday, the same week as the one before and after
        "2026-02-01T00:20:00Z",
        "2026-02-02T08:00:00Z",
        "2026-02-04T09:00:00Z",
        "2026-02-04T09:30:00Z",
    ]);
    let none = Rule::default();
    for (rule, want) in [
        (none, &[][..]),
        (Rule { last: 2, ..none }, &[4, 5]),
        (Rule { last: 9, ..none }, &[0, 1, 2, 3, 4, 5]),
        (Rule { hourly: 2, ..none }, &[3, 5]),
        (Rule { daily: 3, ..none }, &[2, 3, 5]),
        (Rule { weekly: 2, ..none }, &[2, 5]),
        (Rule { monthly: 5, ..none }, &[0, 5]),
        (Rule { last: 1, monthly: 2, ..none }, &[0, 5]),
    ] {
        let kept: Vec<usize> = rule.keeps_in(&all, &TimeZone::UTC).into_iter().collect();
        assert_eq!(kept, want, "{rule:?}");
    }
    assert!(Rule { last: 3, ..none }.keeps(&[]).is_empty());
}

#[test]
fn days_begin_by_the_hosts_clock() {
    let all = seconds(&["2026-01-31T23:50:00Z", "2026-02-01T00:10:00Z"]);
    let rule = Rule { daily: 5, ..Rule::default() };
    assert_eq!(rule.keeps_in(&all, &TimeZone::UTC).len(), 2);
    let east = TimeZone::fixed(jiff::tz::offset(1));
    assert_eq!(rule.keeps_in(&all, &east).into_iter().collect::<Vec<_>>(), [1]);
}
