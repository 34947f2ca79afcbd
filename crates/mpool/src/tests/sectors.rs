//! Sectors and files that are lost: every one in turn. Nothing that was acknowledged is lost with
//! it.

use std::io::IoSlice;
use std::path::Path;

use super::model::content;
use crate::sim::{Sim, Wrong};
use crate::{Access, Allocation, BLOCK, Finding, MediaClass, OpenOptions, Pool, PoolError, ROOT_MDC};

const PATH: &str = "/pool";
const STAGING: &str = "/staging";
const BLOCKS: u64 = 12;
const RECORDS: u64 = 30;

fn open(sim: &Sim, path: &str, options: OpenOptions) -> Result<Pool, PoolError> {
    Pool::open_on(sim.storage(), Path::new(path), options)
}

fn write(pool: &Pool, class: MediaClass, seed: u64) -> u64 {
    let bytes = content(seed, 5000);
    let allocation = Allocation { class, capacity: 8192, ..Allocation::default() };
    let mut writer = pool.mblock_alloc(allocation).unwrap();
    writer.write(&[IoSlice::new(&bytes)]).unwrap();
    writer.commit().unwrap()
}

/// A pool with a few of everything. `closed`: it was closed; else its program just ended.
fn make(closed: bool) -> (Sim, Vec<u64>, u64) {
    let sim = Sim::default();
    let pool = Pool::create_on(sim.storage(), Path::new(PATH), "sectors").unwrap();
    pool.add_class(MediaClass::Staging, Path::new(STAGING)).unwrap();
    let class = |i: u64| if i.is_multiple_of(3) { MediaClass::Staging } else { MediaClass::Capacity };
    let blocks = (0..BLOCKS).map(|i| write(&pool, class(i), i)).collect();
    let log = pool.mlog_create(MediaClass::Capacity, 1 << 20).unwrap();
    let mut mlog = pool.mlog_open(log).unwrap();
    let mut root = pool.mdc_open(ROOT_MDC).unwrap();
    for i in 0..RECORDS {
        mlog.append(&content(i, 700), i.is_multiple_of(4) || i + 1 == RECORDS).unwrap();
        root.append(&[&content(i, 60)], i.is_multiple_of(5) || i + 1 == RECORDS).unwrap();
    }
    if closed {
        drop((mlog, root));
        drop(pool);
        return (sim, blocks, log);
    }
    let copy = sim.copy();
    drop((mlog, root));
    (copy, blocks, log)
}

/// Everything is there.
fn verify(pool: &Pool, blocks: &[u64], log: u64, what: &str) {
    for (&id, seed) in blocks.iter().zip(0..) {
        let mut bytes = vec![0; 5000];
        let read = pool.mblock(id).and_then(|mblock| mblock.read(0, &mut bytes));
        read.unwrap_or_else(|e| panic!("{what}: {e}"));
        assert!(bytes == content(seed, 5000), "{what}: mblock {id}");
    }
    let mut mlog = pool.mlog_open(log).unwrap_or_else(|e| panic!("{what}: {e}"));
    let mut root = pool.mdc_open(ROOT_MDC).unwrap_or_else(|e| panic!("{what}: {e}"));
    for i in 0..RECORDS {
        assert_eq!(mlog.read().unwrap_or_else(|e| panic!("{what}: {e}")), Some(content(i, 700)), "{what}");
        assert_eq!(root.read().unwrap_or_else(|e| panic!("{what}: {e}")), Some(content(i, 60)), "{what}");
    }
    assert_eq!((mlog.read().unwrap(), root.read().unwrap()), (None, None), "{what}");
}

/// Opens the pool after some damage, and looks at everything: now, and when it is opened again.
fn survives(sim: &Sim, blocks: &[u64], log: u64, what: &str) {
    let shared = open(sim, PATH, OpenOptions { access: Access::Shared, ..OpenOptions::default() });
    verify(&shared.unwrap_or_else(|e| panic!("{what}, shared: {e}")), blocks, log, what);
    let pool = open(sim, PATH, OpenOptions::default()).unwrap_or_else(|e| panic!("{what}: {e}"));
    verify(&pool, blocks, log, what);
    drop(pool);
    let pool = open(sim, PATH, OpenOptions::default()).unwrap_or_else(|e| panic!("{what}, again: {e}"));
    let report = pool.check(true).unwrap();
    assert_eq!(report.findings, [], "{what}: it was put right");
    verify(&pool, blocks, log, what);
}

fn every_sector(closed: bool) {
    let (sim, blocks, log) = make(closed);
    for directory in [PATH, STAGING].map(Path::new) {
        for (name, end) in sim.contents(directory).into_iter().filter(|(name, _)| name != "data") {
            for len in [512, BLOCK] {
                for at in (0..end).step_by(len) {
                    for wrong in [Wrong::Zero, Wrong::Flipped, Wrong::Unreadable] {
                        let bad = sim.copy();
                        if bad.damage(directory, &name, at, len, wrong) {
                            survives(&bad, &blocks, log, &format!("{len} bytes at {at} of {name}, {wrong:?}"));
                        }
                    }
                }
            }
            let bad = sim.copy();
            bad.lose(directory, &name);
            survives(&bad, &blocks, log, &format!("without {name}"));
        }
    }
}

#[test]
fn no_lost_sector_or_file_of_a_closed_pool_costs_anything() {
    every_sector(true);
}

#[test]
fn no_lost_sector_or_file_of_a_pool_whose_program_ended_costs_anything() {
    every_sector(false);
}

#[test]
fn an_end_of_the_metadata_that_both_files_lack_is_named() {
    let (sim, ..) = make(true);
    let end = sim.contents(Path::new(PATH)).into_iter().find(|(name, _)| name == "meta-0").unwrap().1;
    // The last two blocks: the last commit, and the note that the pool was closed.
    let at = (end - 1) / BLOCK * BLOCK - BLOCK;
    for name in ["meta-0", "meta-0.copy"] {
        assert!(sim.damage(Path::new(PATH), name, at, 2 * BLOCK, Wrong::Zero));
    }
    let refused = open(&sim, PATH, OpenOptions::default());
    assert!(matches!(refused, Err(PoolError::Damaged(_))), "{refused:?}");
    let pool = open(&sim, PATH, OpenOptions { salvage: true, ..OpenOptions::default() }).unwrap();
    assert!(pool.findings().iter().any(|finding| matches!(finding, Finding::RecordsLost(_))), "{:?}", pool.findings());
}

#[test]
fn a_copy_of_a_pool_does_not_touch_what_it_shares_with_the_original() {
    let (sim, blocks, log) = make(true);
    sim.copy_directory(Path::new(PATH), Path::new("/copy"));
    // Neither while the original is open, nor before it was opened, nor afterwards.
    let refused = open(&sim, "/copy", OpenOptions::default());
    assert!(matches!(refused, Err(PoolError::Apart { class: MediaClass::Staging, .. })), "{refused:?}");
    let original = open(&sim, PATH, OpenOptions::default()).unwrap();
    let refused = open(&sim, "/copy", OpenOptions::default());
    assert!(matches!(refused, Err(PoolError::Busy(_))), "{refused:?}");
    write(&original, MediaClass::Staging, 99);
    drop(original);
    let refused = open(&sim, "/copy", OpenOptions::default());
    assert!(matches!(refused, Err(PoolError::Apart { .. })), "{refused:?}");
    // What the copy knows of can be read.
    let salvage = OpenOptions { salvage: true, ..OpenOptions::default() };
    verify(&open(&sim, "/copy", salvage).unwrap(), &blocks, log, "copy");
    verify(&open(&sim, PATH, OpenOptions::default()).unwrap(), &blocks, log, "original");
    // Whoever means it, says so; then the original does not open any more.
    let adopt = OpenOptions { adopt: true, ..OpenOptions::default() };
    verify(&open(&sim, "/copy", adopt).unwrap(), &blocks, log, "adopted");
    assert!(open(&sim, "/copy", OpenOptions::default()).is_ok());
    assert!(matches!(open(&sim, PATH, OpenOptions::default()), Err(PoolError::Apart { .. })));
}

#[test]
fn handles_hold_the_pool() {
    let (sim, blocks, _) = make(true);
    let pool = open(&sim, PATH, OpenOptions::default()).unwrap();
    let mblock = pool.mblock(blocks[0]).unwrap();
    drop(pool);
    let refused = open(&sim, PATH, OpenOptions::default());
    assert!(matches!(refused, Err(PoolError::Busy(_))), "{refused:?}");
    drop(mblock);
    assert!(open(&sim, PATH, OpenOptions::default()).is_ok());
}
