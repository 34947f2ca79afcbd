//! Limits hold whatever the scanner does.

use std::time::Duration;

use proptest::prelude::*;

use super::plant::{Plant, governor};
use crate::{Bucket, Cause, Settings, Window};

/// Pieces of pages that are skipped, scanned, or merged.
fn content() -> impl Strategy<Value = Vec<(u64, f64)>> {
    let cost = prop_oneof![Just(1e-7), Just(3.5e-7), Just(2e-6), Just(1e-5), 1e-7..1e-5f64];
    prop::collection::vec((1u64..400_000, cost), 1..8)
}

proptest! {
    /// The CPU limit over every window of 10 s, while the cost of pages changes every few seconds
    /// by a factor of a hundred.
    #[test]
    fn the_cpu_limit_holds_over_every_window(
        contents in prop::collection::vec(content(), 1..6),
        max_cpu in 1.0..100.0f64,
        target in 0.5..30.0f64,
        sleep in 0.005..0.1f64,
        contention in 1.0..2.0f64,
        start in 1u32..1000,
    ) {
        let settings = Settings { target: Duration::from_secs_f64(target), max_cpu, ..Settings::default() };
        let mut plant = Plant::new(contents[0].clone(), sleep, start);
        plant.contention = contention;
        let mut governor = governor(settings, sleep);
        for (n, content) in contents.iter().enumerate() {
            plant.content = content.clone();
            let decisions = plant.govern(&mut governor, 15.0 * (n + 1) as f64);
            for decision in decisions {
                prop_assert!((1..=settings.max_pages).contains(&decision.pages));
                let kept = decision.pages >= settings.min_pages || decision.bound.is_some_and(|b| b.contains("CPU"));
                prop_assert!(kept, "{decision}");
            }
        }
        let most = plant.most_cpu(Window::LENGTH) / Window::LENGTH * 100.0;
        prop_assert!(most <= max_cpu * 1.0001, "{most} % of {max_cpu} %");
    }

    /// Several workers, each with pieces of work of any size up to 20 ms.
    #[test]
    fn a_bucket_holds_the_limit_over_every_window(
        limit in 0.01..3.0f64, workers in 1usize..6, pieces in prop::collection::vec(0.0001..0.02f64, 20..60),
    ) {
        let mut bucket = Bucket::new(limit);
        let mut ready = vec![0.0f64; workers];
        let mut spent: Vec<(f64, f64)> = Vec::new();
        for piece in pieces.iter().cycle() {
            let next = (0..workers).min_by(|&a, &b| ready[a].total_cmp(&ready[b])).unwrap();
            let end = ready[next] + piece;
            if end > 40.0 {
                break;
            }
            let wait = bucket.spend(Duration::from_secs_f64(end), Duration::from_secs_f64(*piece), Duration::ZERO);
            spent.push((end, *piece));
            ready[next] = end + wait.as_secs_f64();
        }
        spent.sort_by(|a, b| a.0.total_cmp(&b.0));
        let slack = workers as f64 * 0.02;
        let mut sum = 0.0;
        let mut first = 0;
        for &(end, piece) in &spent {
            sum += piece;
            while spent[first].0 < end - Window::LENGTH {
                sum -= spent[first].1;
                first += 1;
            }
            prop_assert!(sum <= limit * Window::LENGTH * 0.95 + slack + 1e-6, "{sum} s of {limit}");
        }
        // The limit is used up: there is always more work.
        let all: f64 = spent.iter().map(|s| s.1).sum();
        prop_assert!(all > (limit * 0.85).min(workers as f64 * 0.9) * 40.0 - slack, "{all}");
    }
}

#[test]
fn a_limit_is_used_when_there_is_work() {
    // Ten times the work that the limit allows.
    let settings = Settings { target: Duration::from_secs(1), max_cpu: 20.0, ..Settings::default() };
    let mut plant = Plant::new(vec![(4_000_000, 5e-7)], 0.02, 500);
    let mut governor = governor(settings, 0.02);
    let decisions = plant.govern(&mut governor, 120.0);
    let used = plant.reading().cpu.as_secs_f64() / 120.0 * 100.0;
    assert!(used > 16.0 && plant.most_cpu(10.0) <= 2.0, "{used} %");
    assert!(decisions.iter().any(|d| d.cause == Cause::CpuLimit));
    assert!(decisions.last().unwrap().to_string().contains("CPU limit"));
}

#[test]
fn the_minimum_is_kept() {
    let settings = Settings { target: Duration::from_secs(100), min_pages: 800, ..Settings::default() };
    let mut plant = Plant::new(vec![(10_000, 5e-7)], 0.02, 100);
    let decisions = plant.govern(&mut governor(settings, 0.02), 300.0);
    let ended = decisions.iter().position(|d| matches!(d.cause, Cause::ScanEnded { .. })).unwrap();
    let after = &decisions[ended..];
    assert!(after.iter().all(|d| d.pages == 800), "a hundred times as fast as the target needs, and no slower");
    assert!(after[0].to_string().contains("the minimum"));
}
