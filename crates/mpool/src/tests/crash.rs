//! Power loss at every operation, and every operation failing, tearing or finding the medium full.

use std::io::IoSlice;
use std::path::Path;

use super::model::Driver;
use crate::sim::{Fault, Random, Sim};
use crate::{Allocation, MediaClass, Pool, PoolError};

/// Runs a workload with a fault. The pool must be whole and usable both after a crash and after
/// closing it.
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

/// Making a pool, adding a class and removing both, cut short anywhere, can be done again, and
/// leaves nothing.
#[test]
fn making_and_removing_is_cut_short() {
    let (path, staging) = (Path::new("/pool"), Path::new("/staging"));
    let make = |sim: &Sim| Pool::create_on(sim.storage(), path, "short");
    let fill = |pool: Pool| {
        pool.add_class(MediaClass::Staging, staging)?;
        let mut writer = pool.mblock_alloc(Allocation { capacity: 9, ..Allocation::default() })?;
        writer.write(&[IoSlice::new(b"something")])?;
        writer.commit().map_err(PoolError::from)
    };
    let remove = |sim: &Sim| Pool::destroy_on(sim.storage(), path);
    let whole = Sim::default();
    let pool = make(&whole).unwrap();
    fill(pool).unwrap();
    remove(&whole).unwrap();
    for at in 0..whole.operations() {
        for fault in [Fault::Error, Fault::Torn, Fault::PowerLoss] {
            let (sim, what) = (Sim::default(), format!("{fault:?} at {at}"));
            sim.plan(at, fault);
            let _ = make(&sim).and_then(fill).and_then(|_| remove(&sim));
            let crashed = sim.crash(&mut Random::new(at));
            match remove(&crashed) {
                Ok(()) | Err(PoolError::NotAPool(_)) => {}
                // The directory is gone.
                Err(PoolError::Io(e)) if e.os().kind() == std::io::ErrorKind::NotFound => {}
                Err(e) => panic!("{what}: {e}"),
            }
            let left = crashed.storage().directory(staging, false).and_then(|other| other.list()).unwrap_or_default();
            assert!(left.is_empty(), "{what}: of the other class is left {left:?}");
            // No leftover is in the way.
            make(&crashed).and_then(fill).unwrap_or_else(|e| panic!("{what}, again: {e}"));
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
