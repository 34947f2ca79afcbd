//! The target is held.

use std::time::Duration;

use proptest::prelude::*;

use super::plant::{Plant, governor};
use crate::{Cause, Mode, Settings};

fn settings(target: f64) -> Settings {
    Settings {
        target: Duration::from_secs_f64(target),
        max_cpu: 100.0,
        min_pages: 100,
        max_pages: 1_000_000,
        ..Settings::default()
    }
}

fn errors(times: &[f64], target: f64) -> Vec<f64> {
    times.iter().map(|time| time / target - 1.0).collect()
}

proptest! {
    /// Constant work, any cost that can be met, any sleep that is short compared with the target.
    #[test]
    fn it_settles_after_two_scans(
        target in 2.0..100.0f64, load in 0.001..0.6f64, cost in 1e-7..1e-5f64, batches in 150.0..2000.0f64, start in 50u32..5000,
    ) {
        let work = (load * target / cost) as u64;
        let sleep = target * (1.0 - load) / batches;
        prop_assume!((100.0..20_000.0).contains(&(work as f64 / batches)));
        let mut plant = Plant::new(vec![(work, cost)], sleep, start);
        let mut governor = governor(settings(target), sleep);
        plant.govern(&mut governor, target * 30.0);
        let times = plant.scan_times(0.0);
        // The first scans are left out: the one under way, the one that the model learned from, and
        // one that found unknown pages. All others count.
        let late = errors(&times[3..], target);
        prop_assert!(times.len() > 10 && late.iter().all(|e| e.abs() < 0.02), "{late:?}");
    }

    /// Another program takes part of the CPU, so that the time between batches grows with the
    /// batches. The scan time approaches the target from one side.
    #[test]
    fn it_does_not_oscillate_when_the_cpu_is_shared(
        target in 5.0..60.0f64, load in 0.01..0.3f64, contention in 1.0..2.5f64, start in 100u32..3000,
    ) {
        let (cost, sleep) = (1e-6, target / 400.0);
        let work = (load * target / cost) as u64;
        let mut plant = Plant::new(vec![(work, cost)], sleep, start);
        plant.contention = contention;
        let mut governor = governor(settings(target), sleep);
        plant.govern(&mut governor, target * 60.0);
        let late = errors(&plant.scan_times(0.0)[1..], target);
        // Each error is smaller than the last one, to within one sleep, or is negligible.
        for pair in late.windows(2) {
            prop_assert!(pair[1].abs() <= (pair[0].abs() + 1.0 / 400.0 + 1e-6).max(0.015), "{late:?}");
        }
        // The error shrinks to 0.3 + 0.7·a of itself, where a is at most 0.64 here.
        prop_assert!(late[8..].iter().all(|e| e.abs() < 0.03), "{late:?}");
        prop_assert!(late.last().unwrap().abs() < 0.015, "{late:?}");
    }

    /// Noise is not amplified: sleeps up to a tenth longer, at random.
    #[test]
    fn noise_stays_noise(target in 2.0..20.0f64, work in 50_000u64..1_000_000, jitter in 0.0..0.1f64) {
        let sleep = 0.02;
        prop_assume!(work as f64 * sleep / target > 110.0);
        let mut plant = Plant::new(vec![(work, 3e-7)], sleep, 500);
        plant.jitter = jitter;
        let mut governor = governor(settings(target), sleep);
        plant.govern(&mut governor, target * 30.0);
        let late = errors(&plant.scan_times(0.0)[2..], target);
        // One sleep more or less, and one page more or less.
        let grain = sleep / target + target / sleep / work as f64;
        prop_assert!(late.iter().all(|e| e.abs() < 0.02 + grain), "{late:?}");
    }

    /// Smart scan: a part of the pages is scanned in every second, third or ninth scan only. The
    /// work jumps, that of all programs at once or of one after the other.
    #[test]
    fn work_that_jumps_is_seen_within_the_scan(
        target in 4.0..60.0f64, load in 0.01..0.2f64, part in 0.1..0.8f64, every in 2u64..9, staggered: bool,
    ) {
        let (cost, sleep) = (1e-6, target / 400.0);
        let work = (load * target / cost / 4.0) as u64;
        prop_assume!(4.0 * work as f64 * (1.0 - part) > 110.0 * 400.0);
        let mut plant = Plant::new(vec![(work, cost); 4], sleep, 1000);
        (plant.seldom, plant.staggered) = ((part, every), staggered);
        let mut governor = governor(settings(target), sleep);
        plant.govern(&mut governor, target * 40.0);
        let late = errors(&plant.scan_times(0.0)[3..], target);
        let mean = late.iter().map(|e| e.abs()).sum::<f64>() / late.len() as f64;
        prop_assert!(mean < 0.02 && late.iter().all(|e| e.abs() < 0.03), "{late:?}");
    }

    /// The work triples at any moment of a scan. That scan and the next may be late, but not the
    /// one after.
    #[test]
    fn it_recovers_from_a_tripling_within_two_scans(
        target in 2.0..60.0f64, load in 0.01..0.2f64, when in 0.0..1.0f64, factor in 1.2..3.0f64,
    ) {
        let (cost, sleep) = (2e-6, target / 500.0);
        let work = (load * target / cost) as u64;
        prop_assume!(work > 110 * 500);
        let mut plant = Plant::new(vec![(work, cost)], sleep, 1000);
        let mut governor = governor(settings(target), sleep);
        plant.govern(&mut governor, target * (10.0 + when));
        let grown = *plant.ends.last().unwrap();
        plant.content = vec![((work as f64 * factor) as u64, cost)];
        plant.govern(&mut governor, target * 25.0);
        let late = errors(&plant.scan_times(grown - 1e-9), target);
        prop_assert!(late[2..].iter().all(|e| e.abs() < 0.03), "{late:?}");
        prop_assert!(late[0] < 0.8, "the first is not waited for: {late:?}");
    }
}

#[test]
fn it_starts_right_when_candidates_are_known() {
    let (work, cost, sleep, target) = (400_000, 4e-7, 0.02, 10.0);
    let mut plant = Plant::new(vec![(work, cost)], sleep, 100);
    let mut governor = governor(settings(target), sleep);
    let decision = governor.observe(&crate::Reading { candidates: work, ..plant.reading() });
    assert_eq!(decision.cause, Cause::Began { candidates: work });
    plant.pages_to_scan = decision.pages;
    plant.govern(&mut governor, 60.0);
    let late = errors(&plant.scan_times(0.0), target);
    assert!(late[0].abs() < 0.1 && plant.ends[0] < 1.1 * target, "{late:?}");
}

#[test]
fn it_gets_up_from_nothing() {
    // Nothing is known, and with the minimum a scan would take 100 times the target.
    let (work, cost, sleep, target) = (2_000_000, 4e-7, 0.02, 4.0);
    let mut plant = Plant::new(vec![(work, cost)], sleep, 100);
    let mut governor = governor(Settings { min_pages: 100, ..settings(target) }, sleep);
    let decisions = plant.govern(&mut governor, 100.0);
    // Until the end of a scan was seen only the CPU limit applies. The next scan is the one to
    // learn from.
    assert!(plant.ends[0] < 0.5 * target, "{:?}", plant.ends);
    assert!(decisions[0].pages > 100_000, "as fast as the CPU limit allows");
    let late = errors(&plant.scan_times(plant.ends[0]), target);
    assert!(late.iter().all(|e| e.abs() < 0.02), "{late:?}");
}

#[test]
fn the_kernels_arithmetic_settles_above_the_target_and_ours_on_it() {
    // The kernel's advisor never uses less than a tenth of a CPU, so there must be enough work.
    let run = |mode, target: f64| {
        let mut plant = Plant::new(vec![((target * 250_000.0) as u64, 1e-6)], 0.024, 500);
        let mut governor = governor(Settings { mode, min_pages: 500, ..settings(target) }, 0.024);
        plant.govern(&mut governor, target * 100.0);
        let late = errors(&plant.scan_times(target * 50.0), target);
        late.iter().sum::<f64>() / late.len() as f64
    };
    let (kernels, ours) = (run(Mode::ScanTime, 200.0), run(Mode::Target, 200.0));
    assert!((0.02..0.05).contains(&kernels), "{kernels}");
    assert!(ours.abs() < 0.005, "{ours}");
    assert!(run(Mode::ScanTime, 3.0).abs() > 0.1 && run(Mode::Target, 3.0).abs() < 0.01);
}

#[test]
fn none_changes_nothing() {
    let mut plant = Plant::new(vec![(50_000, 1e-6)], 0.02, 777);
    let mut governor = governor(Settings { mode: Mode::None, ..settings(1.0) }, 0.02);
    let decisions = plant.govern(&mut governor, 60.0);
    assert!(decisions.iter().all(|d| d.pages == 777 && !d.changes()));
    assert!(decisions.iter().any(|d| matches!(d.cause, Cause::ScanEnded { .. })), "it still says what it sees");
}
