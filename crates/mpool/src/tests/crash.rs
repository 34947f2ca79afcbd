//! Power loss at every operation, and every operation failing, tearing or finding the medium full.

use std::io::IoSlice;
use std::path::Path;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

use parking_lot::Mutex;

use super::model::{Driver, create, key};
use crate::sim::{Fault, Random, Sim};
use crate::{Allocation, MediaClass, Pool, PoolError};

/// Runs a workload with a fault. The pool must be whole and usable both after a crash and after
/// closing it. `key`: it is encrypted.
fn run(seed: u64, steps: u64, fault: Option<(u64, Fault)>, key: Option<&Path>) -> u64 {
    let sim = Sim::default();
    if let Some((at, fault)) = fault {
        sim.plan(at, fault);
    }
    let mut random = Random::new(seed);
    let mut driver = Driver::new(sim.clone());
    driver.key = key.map(Path::to_owned);
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
    let file = key(1);
    for seed in 1..4 {
        let key = (seed == 2).then_some(file.path());
        let operations = run(seed, 40, None, key);
        assert!(operations > 100);
        for at in 0..operations {
            for fault in [Fault::Error, Fault::Torn, Fault::Full, Fault::PowerLoss] {
                run(seed, 40, Some((at, fault)), key);
            }
        }
    }
}

/// Making a pool, adding a class and removing both, cut short anywhere, can be done again, and
/// leaves nothing.
fn making_and_removing(key: Option<&Path>) {
    let (path, staging) = (Path::new("/pool"), Path::new("/staging"));
    let make = |sim: &Sim| create(sim, key, "short");
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
            let left = crashed.storage().directory(staging).and_then(|other| other.list()).unwrap_or_default();
            assert!(left.is_empty(), "{what}: of the other class is left {left:?}");
            // No leftover is in the way.
            make(&crashed).and_then(fill).unwrap_or_else(|e| panic!("{what}, again: {e}"));
        }
    }
}

#[test]
fn making_and_removing_is_cut_short() {
    making_and_removing(None);
    making_and_removing(Some(key(1).path()));
}

/// What goes wrong, up to three times in the next `within` operations, and perhaps in reads.
fn plan(sim: &Sim, within: u64, random: &mut Random) {
    for _ in 0..random.below(4) {
        let fault = [Fault::Error, Fault::Torn, Fault::Full, Fault::PowerLoss][random.below(4) as usize];
        sim.plan(sim.operations() + random.below(within), fault);
    }
    for _ in 0..random.below(4) {
        sim.plan_read(random.below(within / 2), random.below(2) == 0);
    }
}

/// A pool lives through some rounds. In each it is opened, used, and closed or cut off; at any
/// point several things go wrong, also while it is put right. What it was told is durable is there.
/// With an odd seed it is encrypted.
fn live(seed: u64, key: &Path) {
    let mut random = Random::new(seed);
    let sim = Sim::default();
    plan(&sim, 900, &mut random);
    let mut driver = Driver::new(sim);
    driver.key = (seed % 2 == 1).then(|| key.to_owned());
    let _ = driver.create();
    let mut steps = 20 + random.below(80);
    for round in 0..=random.below(3) {
        (0..steps).for_each(|_| driver.step(&mut random));
        let what = format!("seed {seed}, round {round}");
        driver = driver.end(&mut random);
        if random.below(2) == 0 {
            plan(&driver.sim, 60, &mut random);
            driver = driver.open_badly(&what, &mut random);
        }
        driver.sim.heal();
        driver.reopen(&what);
        plan(&driver.sim, 200, &mut random);
        steps = random.below(40);
    }
    driver = driver.end(&mut random);
    driver.sim.heal();
    driver.reopen(&format!("seed {seed}, at the end"));
    driver.close();
    driver.strict = true;
    driver.reopen(&format!("seed {seed}, put right"));
    // And a crash that comes at once.
    let mut again = Driver::new(driver.sim.crash(&mut random));
    again.model = driver.model.clone();
    again.reopen(&format!("seed {seed}, at the end, crashed"));
}

/// Seeds from 100 on; `MPOOL_CRASHES` says how many, `MPOOL_SEED` names a single one.
#[test]
fn many_random_crashes() {
    let number = |name| std::env::var(name).ok().and_then(|n| n.parse::<u64>().ok());
    let key = key(1);
    if let Some(seed) = number("MPOOL_SEED") {
        return live(seed, key.path());
    }
    let end = 100 + number("MPOOL_CRASHES").unwrap_or(2000);
    let (next, bad) = (AtomicU64::new(100), Mutex::new(Vec::new()));
    let some = || {
        while let Some(seed) = Some(next.fetch_add(1, Relaxed)).filter(|&seed| seed < end) {
            if std::panic::catch_unwind(|| live(seed, key.path())).is_err() {
                bad.lock().push(seed);
            }
        }
    };
    let threads = std::thread::available_parallelism().map_or(1, usize::from);
    std::thread::scope(|scope| (0..threads).for_each(|_| drop(scope.spawn(some))));
    assert_eq!(*bad.lock(), [], "MPOOL_SEED repeats one of them");
}
