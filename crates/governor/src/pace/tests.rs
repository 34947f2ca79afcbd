use super::*;

const CHUNK: u64 = 128;

fn seconds(s: f64) -> Duration {
    Duration::from_secs_f64(s)
}

/// An engine with one worker, which scans every `target` seconds, or when the last scan is
/// over. Returns the scans' times.
fn engine(settings: PaceSettings, work: impl Fn(usize) -> u64, cost: f64, scans: usize) -> (Pace, Vec<f64>) {
    let mut pace = Pace::new(settings);
    let (mut now, mut next) = (0.0f64, 0.0f64);
    let mut times = Vec::new();
    for scan in 0..scans {
        now = now.max(next);
        next = now + settings.target;
        let began = now;
        pace.begin(seconds(now));
        pace.found(seconds(now), work(scan));
        let (mut left, mut took) = (work(scan), 0.0);
        while left > 0 {
            let pages = left.min(CHUNK);
            let (until, _) = pace.took(seconds(now), pages);
            took = now.max(until.as_secs_f64()) - began;
            left -= pages;
            let cpu = cost * pages as f64;
            now += cpu;
            let wait = pace.charge(seconds(now), seconds(cpu), Duration::ZERO);
            now = (now + wait.as_secs_f64()).max(until.as_secs_f64());
        }
        times.push(took);
    }
    (pace, times)
}

#[test]
fn a_scan_takes_the_target_from_the_first_on_and_whatever_comes() {
    let settings = PaceSettings { mode: Mode::Target, target: 5.0, max_cpu: 0.5 };
    // The work triples from one scan to the next, and falls to a third again.
    let work = |scan: usize| if scan % 4 < 2 { 50_000 } else { 150_000 };
    let (_, times) = engine(settings, work, 2e-6, 12);
    assert!(times.iter().all(|time| (0.97..=1.0).contains(&(time / 5.0))), "{times:?}");
}

#[test]
fn the_limit_makes_scans_longer_and_is_named() {
    let settings = PaceSettings { mode: Mode::Target, target: 5.0, max_cpu: 0.1 };
    let (mut pace, times) = engine(settings, |_| 500_000, 2e-6, 4);
    // A second of CPU time at a tenth of a CPU, with a reserve.
    assert!(times[1..].iter().all(|time| (9.5..12.0).contains(time)), "{times:?}");
    let now = seconds(60.0);
    pace.begin(now);
    pace.found(now, 500_000);
    let decision = pace.took(now, 1).1.unwrap();
    assert!(decision.limited, "{decision:?}");
    assert!(decision.to_string().ends_with("of 10 %: the CPU limit binds"), "{decision}");
    assert_eq!(pace.took(now, 1).1, None, "one decision a scan");
}

#[test]
fn the_limit_is_named_while_it_delays_the_first_scan() {
    let mut pace = Pace::new(PaceSettings { mode: Mode::Target, target: 5.0, max_cpu: 0.1 });
    pace.begin(seconds(0.0));
    pace.found(seconds(0.0), 500_000);
    let mut scan_for = |second: u32| {
        pace.took(seconds(second.into()), 1000);
        pace.charge(seconds(second.into()), Duration::from_millis(100), Duration::ZERO);
        pace.decision(seconds(second.into())).limited
    };
    assert!((1..=5).all(|second| !scan_for(second)), "its time is not over");
    assert!((6..=20).all(scan_for));
    // Nothing is left of what was found, and its workers still wait for CPU time.
    pace.took(seconds(20.0), pace.left());
    assert!(pace.decision(seconds(20.0)).limited);
    assert!(!pace.decision(seconds(40.0)).limited, "they wait no longer");
}

#[test]
fn no_pace_waits_for_cpu_time_alone() {
    let settings = PaceSettings { mode: Mode::None, target: 5.0, max_cpu: 0.0 };
    let (_, times) = engine(settings, |_| 500_000, 2e-6, 3);
    assert!(times.iter().all(|time| (0.9..1.01).contains(time)), "{times:?}");
}

#[test]
fn the_kernels_arithmetic_settles_above_the_target() {
    let settings = PaceSettings { mode: Mode::ScanTime, target: 100.0, max_cpu: 0.5 };
    let (_, times) = engine(settings, |_| 2_000_000, 1e-5, 60);
    let last = times.last().unwrap();
    assert!((101.0..106.0).contains(last), "{times:?}");
    // It never uses less than a tenth of a CPU.
    let (_, times) = engine(settings, |_| 2_000_000, 2e-6, 60);
    assert!(times.last().is_some_and(|time| (38.0..41.0).contains(time)), "{times:?}");
    // With whole seconds and a small target it misses the target as the kernel's does.
    let (_, times) = engine(PaceSettings { target: 2.0, ..settings }, |_| 40_000, 1e-5, 60);
    assert!(times.iter().skip(20).any(|time| (time / 2.0 - 1.0).abs() > 0.1), "{times:?}");
}

#[test]
fn reasons_have_words_and_figures() {
    let decision = PaceDecision {
        mode: Mode::Target,
        last: Some(PacedScan { pages: 12_000, took: 41.0, cpu: 2.0 }),
        target: 30.0,
        due: 15_000,
        rate: [404.0, 505.05],
        cpu_percent: [12.04, 20.0],
        limited: false,
    };
    assert_eq!(
        decision.to_string(),
        "scan of 12000 pages took 41.00 s for a target of 30 s; 15000 pages due; raised 404 → 505 pages a second; \
             CPU 12.0 % of 20 %"
    );
    let fast =
        PaceDecision { mode: Mode::None, last: None, rate: [0.0, f64::INFINITY], cpu_percent: [3.0, 0.0], ..decision };
    assert_eq!(fast.to_string(), "15000 pages due; as fast as possible; CPU 3.0 %");
}
