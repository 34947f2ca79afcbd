//! Power loss at every operation, and every operation failing, tearing or finding the medium full.

use super::model::Driver;
use crate::sim::{Fault, Random, Sim};

/// Runs a workload with a fault; then what a crash leaves, and what closing leaves, must both be whole, and usable.
fn run(seed: u64, steps: u64, fault: Option<(u64, Fault)>) -> u64 {
    let sim = Sim::default();
    if let Some((at, fault)) = fault {
        sim.plan(at, fault);
    }
    let mut random = Random::new(seed);
    let mut driver = Driver::new(sim.clone());
    let _ = driver.create();
    for _ in 0..steps {
        driver.step(&mut random);
    }
    let operations = sim.operations();
    let what = format!("seed {seed}, {fault:?}");

    let mut crashed = Driver::new(sim.crash(&mut random));
    crashed.model = driver.model.clone();
    crashed.reopen(&format!("{what}, crash"));
    for _ in 0..8 {
        crashed.step(&mut random);
    }
    crashed.close();
    crashed.reopen(&format!("{what}, after the crash"));

    if !matches!(fault, Some((_, Fault::PowerLoss))) {
        sim.heal();
        driver.close();
        driver.reopen(&format!("{what}, closed"));
        // And again, with a crash that comes at once.
        let mut again = Driver::new(sim.crash(&mut random));
        again.model = driver.model.clone();
        again.reopen(&format!("{what}, closed and crashed"));
    }
    operations
}

#[test]
fn every_operation_goes_wrong_in_turn() {
    for seed in 1..4 {
        let operations = run(seed, 40, None);
        assert!(operations > 100);
        for at in 0..operations {
            for fault in [Fault::Error, Fault::Torn, Fault::Full, Fault::PowerLoss] {
                run(seed, 40, Some((at, fault)));
            }
        }
    }
}

#[test]
fn many_random_crashes() {
    let rounds = std::env::var("MPOOL_CRASHES").ok().and_then(|n| n.parse().ok()).unwrap_or(400);
    for seed in 100..100 + rounds {
        let mut random = Random::new(seed);
        let at = random.below(900);
        let fault = [Fault::Error, Fault::Torn, Fault::Full, Fault::PowerLoss][random.below(4) as usize];
        run(seed, 20 + random.below(120), Some((at, fault)));
    }
}
