//! Pools that a normal opening refuses, because both copies have lost the same part, are rebuilt.

use std::path::Path;

use super::model::key;
use super::sectors::{ALL, PATH, STAGING, data, make, make_with, open, served};
use crate::sim::{Fault, Random, Sim, Wrong};
use crate::{BLOCK, Finding, MediaClass, OpenOptions, Pool, PoolError, Rebuild, Rebuilt};

fn rebuild(sim: &Sim, free_lost: bool) -> Result<Rebuilt, PoolError> {
    Pool::rebuild_on(sim.storage(), Path::new(PATH), Rebuild { free_lost, staging: Some(STAGING.into()), memory: None })
}

/// Pools that are refused, each with what was done to it.
fn refused(sim: &Sim) -> Vec<(Sim, String)> {
    let mut all = Vec::new();
    for directory in [PATH, STAGING].map(Path::new) {
        let first = |name: &str| !name.ends_with(".copy") && (name.starts_with("meta") || name == "superblock");
        for (name, end) in sim.contents(directory).into_iter().filter(|(name, _)| first(name)) {
            let both = [name.clone(), format!("{name}.copy")];
            let gone = sim.copy();
            both.iter().for_each(|name| gone.lose(directory, name));
            all.push((gone, format!("without both {name}")));
            for at in (0..end).step_by(BLOCK) {
                for wrong in [Wrong::Zero, Wrong::Flipped, Wrong::Unreadable] {
                    let bad = sim.copy();
                    if both.iter().all(|name| bad.damage(directory, name, at, BLOCK, wrong)) {
                        all.push((bad, format!("block at {at} of both {name} in {}, {wrong:?}", directory.display())));
                    }
                }
            }
        }
    }
    let gone = sim.copy();
    ["meta-0", "meta-0.copy", "meta-1", "meta-1.copy"].iter().for_each(|name| gone.lose(Path::new(PATH), name));
    all.push((gone, "without any metadata".into()));
    all.into_iter().filter(|(sim, _)| open(&sim.copy_with_damage(), PATH, OpenOptions::default()).is_err()).collect()
}

#[test]
fn a_pool_that_lost_the_same_in_both_copies_is_rebuilt_with_all_that_can_be_read() {
    whatever_both_copies_lost(None);
    whatever_both_copies_lost(Some(key(1).path()));
}

fn whatever_both_copies_lost(key: Option<&Path>) {
    let (sim, blocks, log) = make_with(true, key);
    let original = data(&sim);
    let all = refused(&sim);
    assert!(all.len() > 20, "{}", all.len());
    for (bad, what) in all {
        let rebuilt = rebuild(&bad, false).unwrap_or_else(|e| panic!("{what}: {e}"));
        let pool = open(&bad, PATH, OpenOptions::default()).unwrap_or_else(|e| panic!("{what}: {e}"));
        assert!(data(&bad) == original, "{what}: data were given back");
        let found = served(&pool, &blocks, log);
        assert_eq!(found[0], rebuilt.mblocks, "{what}: {rebuilt:?}");
        // Logs are found by their files.
        assert_eq!(found[1..], ALL[1..], "{what}: {rebuilt:?}");
        if what.contains("superblock") {
            assert_eq!((found, rebuilt.superblocks.len()), (ALL, 1), "{what}");
        } else {
            assert!(rebuilt.records_lost > 0, "{what}: {rebuilt:?}");
        }
        let report = pool.check(crate::Depth::Data).unwrap();
        let kept = |finding: &Finding| matches!(finding, Finding::SpaceKept { .. });
        assert!(report.findings.iter().all(kept), "{what}: {report:?}");
        assert!(found == ALL || !report.is_clean(), "{what}: mblocks are lost, and nobody says so");
        drop(pool);
        // Whoever needs the space says so.
        rebuild(&bad, true).unwrap();
        let pool = open(&bad, PATH, OpenOptions::default()).unwrap();
        assert_eq!(pool.check(crate::Depth::Data).unwrap().findings, [], "{what}");
        assert_eq!(served(&pool, &blocks, log), found, "{what}");
    }
}

#[test]
fn rebuilding_is_cut_short_and_done_again() {
    let (sim, blocks, log) = make(true);
    let original = data(&sim);
    let all = refused(&sim);
    for name in ["without any metadata", "without both superblock", "block at 4096 of both meta-0"] {
        let (bad, what) = all.iter().find(|(_, what)| what.starts_with(name)).unwrap();
        let once = bad.copy_with_damage();
        let begin = once.operations();
        let whole = rebuild(&once, false).unwrap();
        for at in begin..once.operations() {
            for fault in [Fault::Error, Fault::Torn, Fault::PowerLoss] {
                let (cut, what) = (bad.copy_with_damage(), format!("{what}, {fault:?} at {at}"));
                cut.plan(at, fault);
                let _ = rebuild(&cut, false);
                let crashed = cut.crash(&mut Random::new(at));
                if let Ok(pool) = open(&crashed, PATH, OpenOptions::default()) {
                    assert_eq!(served(&pool, &blocks, log)[0], whole.mblocks, "{what}: opened between");
                }
                rebuild(&crashed, false).unwrap_or_else(|e| panic!("{what}: {e}"));
                let pool = open(&crashed, PATH, OpenOptions::default()).unwrap_or_else(|e| panic!("{what}: {e}"));
                assert_eq!(served(&pool, &blocks, log)[0], whole.mblocks, "{what}");
                assert!(data(&crashed) == original, "{what}: data were given back");
            }
        }
    }
}

#[test]
fn what_is_no_pool_or_apart_is_not_rebuilt() {
    let (sim, ..) = make(true);
    sim.copy_directory(Path::new(PATH), Path::new("/copy"));
    let copy = Pool::rebuild_on(sim.storage(), Path::new("/copy"), Rebuild::default());
    assert!(matches!(copy, Err(PoolError::Apart { .. })), "{copy:?}");
    let none = Pool::rebuild_on(sim.storage(), Path::new("/nowhere"), Rebuild::default());
    assert!(matches!(none, Err(PoolError::NotAPool(_))), "{none:?}");
    let pool = open(&sim, PATH, OpenOptions::default()).unwrap();
    let busy = rebuild(&sim, false);
    assert!(matches!(busy, Err(PoolError::Busy(_))), "{busy:?}");
    drop(pool);
}

#[test]
fn a_class_that_has_objects_and_no_known_place_is_asked_for() {
    let (sim, blocks, log) = make(true);
    // Without the block that has the record of the class, and with those of its mblocks.
    let lost = refused(&sim).into_iter().find_map(|(bad, what)| {
        let error = Pool::rebuild_on(bad.storage(), Path::new(PATH), Rebuild::default()).err()?;
        matches!(error, PoolError::NoDirectory(MediaClass::Staging)).then_some((bad, what, error))
    });
    let (bad, what, error) = lost.unwrap();
    assert!(error.to_string().starts_with("where class staging lies is lost: name its directory"), "{error}");
    assert!(open(&bad, PATH, OpenOptions::default()).is_err(), "{what}: it is refused as before");
    rebuild(&bad, false).unwrap();
    assert_eq!(served(&open(&bad, PATH, OpenOptions::default()).unwrap(), &blocks, log), ALL, "{what}");
}
