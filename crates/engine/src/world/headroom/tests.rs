use super::*;

const MIB: u64 = 1 << 20;

fn demand(mib: u64, unmerged_mib: u64) -> Demand {
    of_users(&[(7, mib, unmerged_mib)])
}

/// UID, MiB that are merged, MiB that were unmerged.
fn of_users(users: &[(u32, u64, u64)]) -> Demand {
    let mut demand = Demand::default();
    for &(uid, mib, unmerged) in users {
        let part = Part { unmerge_bytes: mib * MIB, unmerged_pages: unmerged * MIB / PAGE_SIZE as u64 };
        demand.unmerge_bytes += part.unmerge_bytes;
        demand.unmerged_pages += part.unmerged_pages;
        demand.parts.insert(Some(Owner::numbered(uid)), part);
    }
    demand
}

fn waiting(view: &View) -> Vec<u32> {
    (0..10).filter(|&uid| view.pauses(Some(Owner::numbered(uid))).is_some()).collect()
}

#[test]
fn who_needs_no_more_than_an_equal_share_does_not_wait_for_others() {
    let config = Config { headroom_percent: 100.0, headroom_seconds: 10.0, ..Config::default() };
    let now = Instant::now();
    let share = |available: u64, users: &[_]| {
        let view = Headroom::default().look_anew(now, &config, of_users(users), Some(available * MIB));
        (view.short.is_some(), waiting(&view))
    };
    assert_eq!(share(1000, &[(1, 400, 0), (2, 600, 0)]), (false, vec![]));
    assert_eq!(share(1000, &[(1, 400, 0), (2, 1_000_000, 0)]), (true, vec![2]), "whatever one claims");
    assert_eq!(share(1000, &[(1, 100, 0), (2, 500, 0), (3, 440, 0)]), (true, vec![2]), "1 leaves 900 for both");
    assert_eq!(share(1000, &[(1, 501, 0), (2, 501, 0)]), (true, vec![1, 2]));
    assert_eq!(share(1000, &[(1, 1001, 0)]), (true, vec![1]), "one alone waits as before");

    let headroom = Headroom::default();
    let look = |second, users: &[_]| {
        headroom.look(now + Duration::from_secs(second), &config, || (of_users(users), Some(1000 * MIB)))
    };
    look(0, &[(1, 1, 100), (2, 1, 0)]);
    let view = look(60, &[(1, 1, 400), (2, 1, 600_000), (3, 1, 60)]);
    assert!(view.pauses(Some(Owner::numbered(2))).unwrap().contains("headroom_seconds"), "{view:?}");
    assert_eq!(waiting(&view), [2], "1 and 3 write 5 and 1 MiB a second");
}

#[test]
fn merging_pauses_below_the_share_and_goes_on_above_a_quarter_more() {
    let config = Config { headroom_percent: 50.0, ..Config::default() };
    let headroom = Headroom::default();
    let now = Instant::now();
    let short = |available: u64| headroom.look_anew(now, &config, demand(1000, 0), Some(available * MIB)).short.clone();
    assert_eq!(short(500), None);
    let why = short(499).unwrap();
    assert!(why.contains("499 MiB") && why.contains("1000 MiB") && why.contains("625 MiB"), "{why}");
    assert!(short(624).is_some(), "it was short");
    assert_eq!((short(625), short(501)), (None, None));
}

#[test]
fn merging_pauses_when_the_memory_would_not_last() {
    let config = Config { headroom_percent: 0.0, headroom_seconds: 10.0, ..Config::default() };
    let headroom = Headroom::default();
    let now = Instant::now();
    let look = |second, unmerged| {
        let at = now + Duration::from_secs(second);
        headroom.look(at, &config, || (demand(9000, unmerged), Some(1000 * MIB)))
    };
    assert_eq!(look(0, 0).seconds(1000 * MIB), None);
    let view = look(10, 600);
    assert_eq!((view.bytes_per_second, view.seconds(1000 * MIB)), (10.0 * MIB as f64, Some(100.0)), "over a minute");
    assert_eq!(look(10, 9000), view, "once a second");
    let mut samples = VecDeque::new();
    for i in 0..100 {
        Needs::new(&mut samples, now + Duration::from_millis(100 * i), demand(1, i));
    }
    assert_eq!(samples.len(), 10);
    let why = look(30, 6060).short.clone().unwrap();
    assert!(why.contains("101 MiB a second") && why.contains("headroom_seconds = 10"), "{why}");
    assert!(look(71, 6060).short.is_some(), "the minute holds these writes");
    let view = look(200, 6060);
    assert_eq!((view.short.as_ref(), view.bytes_per_second), (None, 0.0));
}

#[test]
fn nothing_is_short_where_the_operator_or_the_kernel_says_nothing() {
    let headroom = Headroom::default();
    let off = Config { headroom_percent: 0.0, headroom_seconds: 0.0, ..Config::default() };
    let none = headroom.look_anew(Instant::now(), &off, demand(1 << 20, 1 << 20), Some(0));
    assert_eq!(none.short, None);
    let unknown = headroom.look_anew(Instant::now(), &Config::default(), demand(1 << 20, 0), None);
    assert_eq!(unknown.short, None);
}
