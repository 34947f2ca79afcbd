use super::*;

const SEVEN: Owner = Owner::numbered(7);
const EIGHT: Owner = Owner::numbered(8);
const NINE: Owner = Owner::numbered(9);

const LIMITS: Limits = Limits { mode: Mode::None, target: 1.0, usual: 0.1, short: 0.0, pressure: 10.0 };

fn thread_cpu() -> u64 {
    kmem::cpu::thread_time().as_nanos() as u64
}

fn burn(time: Duration) {
    let end = thread_cpu() + time.as_nanos() as u64;
    while thread_cpu() < end {
        std::hint::black_box(0);
    }
}

/// Charges this thread only: other tests run in this process.
fn pacer(limits: Limits) -> Pacer {
    let pacer = Pacer::with_clock(limits, thread_cpu);
    pacer.with(|state, _| state.own = thread_cpu());
    pacer
}

#[test]
fn a_worker_uses_no_more_than_its_share() {
    // A burst of 50 ms, then 9 % of the time. On a busy machine even that takes long.
    let (pacer, begin, start) = (pacer(LIMITS), Instant::now(), thread_cpu());
    let is_over = || begin.elapsed() > Duration::from_secs(if thread_cpu() - start > 60_000_000 { 2 } else { 60 });
    while !is_over() {
        burn(Duration::from_millis(2));
        pacer.pause(SEVEN, || false);
    }
    let used = (thread_cpu() - start) as f64 / 1e9;
    let most = 0.05 + 0.09 * begin.elapsed().as_secs_f64() + 0.03;
    assert!(used <= most, "{used} s of {most} s");
    assert!(used > 0.05, "{used} s");
}

#[test]
fn what_is_not_merging_is_not_charged() {
    let pacer = pacer(LIMITS);
    let charged = || {
        pacer.settle(0, Duration::ZERO);
        Duration::from_nanos(pacer.with(|state, _| state.own))
    };
    let (before, time) = (charged(), Duration::from_millis(200));
    pacer.apart(|| burn(time));
    assert!(charged() - before < time);
    burn(time);
    assert!(charged() - before >= time, "what it does itself is");
}

#[test]
fn agents_count_once_and_a_worker_that_is_to_end_does_not_wait() {
    let (begin, pacer) = (Instant::now(), pacer(LIMITS));
    pacer.charge_agents(1_000_000_000, 0);
    pacer.charge_agents(1_000_000_000, 0);
    let wait = pacer.settle(0, Duration::ZERO).1.as_secs_f64();
    // 1 s less the burst of 50 ms, at 9 %, less what this thread itself was kept waiting.
    let late = begin.elapsed().as_secs_f64();
    assert!((10.0 - late..0.96 / 0.09).contains(&wait), "{wait} s, {late} s late");
    // A wait would be of hours.
    pacer.charge_agents(1_000_000_000_000, 0);
    let begin = Instant::now();
    pacer.pause(SEVEN, || true);
    assert!(begin.elapsed() < Duration::from_secs(60));
}

#[test]
fn work_that_goes_first_gets_its_share_until_too_much_is_owed() {
    let limited = pacer(LIMITS);
    let period = Duration::from_secs(1);
    assert_eq!(limited.allowance(period), Some(Duration::from_millis(100)));
    limited.charge_agents(100_000_000, 0);
    assert!(limited.allowance(period).is_some(), "a little more than allowed: merging waits");
    limited.charge_agents(1_000_000_000, 0);
    assert_eq!(limited.allowance(period), None, "it waits too");
    assert_eq!(pacer(Limits { usual: 0.0, ..LIMITS }).allowance(period), Some(period));
}

#[test]
fn what_agents_have_in_hand_counts_until_they_report_or_fall_silent() {
    let begin = Instant::now();
    let pacer = pacer(LIMITS);
    pacer.charge_agents(0, 20_000);
    // 200 ms less the burst of 50 ms, at 9 %, less what this thread itself was kept waiting.
    let wait = pacer.settle(0, Duration::ZERO).1.as_secs_f64();
    let (most, late) = (0.15 / 0.09 + 0.1, begin.elapsed().as_secs_f64());
    assert!((most - 0.2 - late..most).contains(&wait), "{wait} s, {late} s late");
    pacer.charge_agents(40_000_000, 0);
    assert_eq!(pacer.settle(0, Duration::ZERO).1, Duration::ZERO);
    pacer.with(|state, _| state.in_hand.0 = 20_000);
    pacer.with(|state, _| state.pace.charge(Duration::ZERO, Duration::ZERO, Duration::ZERO));
    std::thread::sleep(IN_HAND);
    assert_eq!(pacer.settle(0, Duration::ZERO).1, Duration::ZERO);
}

#[test]
fn a_scan_takes_its_target() {
    for workers in [1, 3] {
        let pacer = pacer(Limits { mode: Mode::Target, usual: 0.0, ..LIMITS });
        pacer.begin_scan(&BTreeSet::from([SEVEN]), true, |_| false);
        pacer.found(SEVEN, 30_000);
        let begin = Instant::now();
        let worker = || {
            for _ in 0..30_000 / 100 / workers {
                pacer.took(SEVEN, 100);
                pacer.pause(SEVEN, || false);
            }
        };
        std::thread::scope(|scope| (0..workers).for_each(|_| drop(scope.spawn(worker))));
        let took = begin.elapsed().as_secs_f64();
        // On a busy machine it may be late, but not early.
        assert!((0.95..30.0).contains(&took), "{took} s with {workers} workers");
        pacer.begin_scan(&BTreeSet::from([SEVEN]), true, |_| false);
        let status = pacer.status();
        assert_eq!(status.metrics.scan_pages, 30_000);
        assert!(status.metrics.scan_time_seconds.is_some_and(|time| (0.95..30.0).contains(&time)), "{status:?}");
        assert!(status.reason.contains("target of 1 s; 30000 pages due"), "{status:?}");
    }
}

#[test]
fn no_limit_and_no_pace_never_wait() {
    let pacer = pacer(Limits { usual: 0.0, ..LIMITS });
    burn(Duration::from_millis(5));
    let begin = Instant::now();
    pacer.begin_scan(&BTreeSet::from([SEVEN]), true, |_| false);
    pacer.found(SEVEN, 1_000_000);
    pacer.took(SEVEN, 1_000_000);
    pacer.charge_agents(1 << 60, 1 << 20);
    pacer.pause(SEVEN, || false);
    // A wait would be of hours.
    assert!(begin.elapsed() < Duration::from_secs(60));
}

#[test]
fn what_is_left_of_one_user_outlasts_the_scans_of_another() {
    let pacer = pacer(Limits { mode: Mode::Target, usual: 0.0, ..LIMITS });
    let left = || pacer.status().metrics.pages_due;
    pacer.begin_scan(&BTreeSet::from([SEVEN, EIGHT]), true, |_| false);
    pacer.found(SEVEN, 1000);
    pacer.found(EIGHT, 100);
    pacer.took(EIGHT, 100);
    pacer.took(SEVEN, 300);
    assert_eq!(left(), 700);
    pacer.begin_scan(&BTreeSet::from([EIGHT]), false, |user| user == SEVEN);
    pacer.found(EIGHT, 50);
    assert_eq!(left(), 750);
    pacer.begin_scan(&BTreeSet::from([EIGHT]), false, |user| user == SEVEN);
    pacer.found(EIGHT, 50);
    assert_eq!(left(), 750, "what was left is found again");
    pacer.begin_scan(&BTreeSet::from([SEVEN, EIGHT]), true, |_| false);
    pacer.found(SEVEN, 10);
    assert_eq!(left(), 10);
    assert!(pacer.is_busy(SEVEN, Duration::from_secs(60)) && !pacer.is_busy(NINE, Duration::from_secs(60)));
}
