//! Sectors and files that are lost: every one in turn. Nothing that was acknowledged is lost with
//! it.

use std::io::IoSlice;
use std::path::Path;

use super::model::{content, create, key};
use crate::sim::{Sim, Wrong};
use crate::{Access, Allocation, BLOCK, Finding, MediaClass, OpenOptions, Pool, PoolError, ROOT_MDC};

pub(super) const PATH: &str = "/pool";
pub(super) const STAGING: &str = "/staging";
const BLOCKS: u64 = 12;
const RECORDS: u64 = 30;

pub(super) fn open(sim: &Sim, path: &str, options: OpenOptions) -> Result<Pool, PoolError> {
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
pub(super) fn make(closed: bool) -> (Sim, Vec<u64>, u64) {
    make_with(closed, None)
}

/// The same, encrypted if there is a key.
pub(super) fn make_with(closed: bool, key: Option<&Path>) -> (Sim, Vec<u64>, u64) {
    let sim = Sim::default();
    let pool = create(&sim, key, "sectors").unwrap();
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
    let report = pool.check(crate::Depth::Data).unwrap();
    assert_eq!(report.findings, [], "{what}: it was put right");
    verify(&pool, blocks, log, what);
}

fn every_sector(closed: bool, key: Option<&Path>) {
    let (sim, blocks, log) = make_with(closed, key);
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
    every_sector(true, None);
}

#[test]
fn no_lost_sector_or_file_of_a_pool_whose_program_ended_costs_anything() {
    every_sector(false, None);
}

#[test]
fn no_lost_sector_or_file_of_an_encrypted_pool_costs_anything() {
    every_sector(false, Some(key(1).path()));
}

/// All bytes of all files in both directories.
fn everything(sim: &Sim) -> Vec<(String, Vec<u8>)> {
    [PATH, STAGING].iter().flat_map(|path| sim.bytes(Path::new(path))).collect()
}

/// The data files, whose space nobody may give back.
pub(super) fn data(sim: &Sim) -> Vec<(String, Vec<u8>)> {
    everything(sim).into_iter().filter(|(name, _)| name == "data").collect()
}

/// What of the pool is served: mblocks that are whole, records of the mlog, records of the root
/// MDC. None of them is wrong.
pub(super) fn served(pool: &Pool, blocks: &[u64], log: u64) -> [usize; 3] {
    let whole = blocks.iter().zip(0..).filter(|&(&id, seed)| {
        let mut bytes = vec![0; 5000];
        let read = pool.mblock(id).and_then(|mblock| mblock.read(0, &mut bytes)).is_ok();
        assert!(!read || bytes == content(seed, 5000), "wrong bytes were handed out");
        read
    });
    let whole = whole.count();
    let (mut records, mut kept) = (0, 0);
    if let Ok(mut mlog) = pool.mlog_open(log) {
        loop {
            match mlog.read() {
                Ok(Some(_)) => records += 1,
                Ok(None) => break,
                Err(_) => mlog.skip_damaged().unwrap(),
            }
        }
    }
    if let Ok(mut root) = pool.mdc_open(ROOT_MDC) {
        loop {
            match root.read() {
                Ok(Some(_)) => kept += 1,
                Ok(None) => break,
                Err(_) => root.skip_damaged().unwrap(),
            }
        }
    }
    [whole, records, kept]
}

pub(super) const ALL: [usize; 3] = [BLOCKS as usize, RECORDS as usize, RECORDS as usize];

/// Opens a pool of which both copies were hit. What it serves, and whether a loss was named.
fn after_loss(sim: &Sim, blocks: &[u64], log: u64, what: &str) -> ([usize; 3], bool) {
    let before = everything(sim);
    match open(sim, PATH, OpenOptions::default()) {
        Ok(pool) => {
            let named = !pool.check(crate::Depth::Data).unwrap().is_clean();
            (served(&pool, blocks, log), named)
        }
        Err(_) => {
            assert!(everything(sim) == before, "{what}: a pool that is refused was written to");
            let salvage = OpenOptions { salvage: true, ..OpenOptions::default() };
            match open(sim, PATH, salvage) {
                Ok(pool) => {
                    let named = !pool.check(crate::Depth::Data).unwrap().is_clean();
                    (served(&pool, blocks, log), named)
                }
                // Only without any superblock or key.
                Err(e) => {
                    assert!(what.contains("superblock") || what.contains("both wrapped-key"), "{what}: {e}");
                    (ALL, true)
                }
            }
        }
    }
}

#[test]
fn a_loss_in_both_files_is_named_and_the_rest_is_served() {
    losses_in_both_files(None);
    losses_in_both_files(Some(key(1).path()));
}

fn losses_in_both_files(key: Option<&Path>) {
    let (sim, blocks, log) = make_with(true, key);
    let original = data(&sim);
    let mut losses = 0;
    for directory in [PATH, STAGING].map(Path::new) {
        let first = |name: &str| name != "data" && !name.ends_with(".copy");
        for (name, end) in sim.contents(directory).into_iter().filter(|(name, _)| first(name)) {
            for len in [512, BLOCK] {
                for at in (0..end).step_by(len) {
                    for wrong in [Wrong::Zero, Wrong::Flipped, Wrong::Unreadable] {
                        let (bad, what) = (sim.copy(), format!("{len} bytes at {at} of both {name}, {wrong:?}"));
                        let hit = [name.clone(), format!("{name}.copy")];
                        if !hit.iter().all(|name| bad.damage(directory, name, at, len, wrong)) {
                            continue;
                        }
                        let (found, named) = after_loss(&bad, &blocks, log, &what);
                        assert!(named || found == ALL, "{what}: {found:?} served, and nobody says what is missing");
                        assert!(data(&bad) == original, "{what}: data were given back");
                        // A block of records; or the mlog that one of the metadata's names.
                        let [blocks, records, kept] = [0, 1, 2].map(|i| ALL[i] - found[i]);
                        assert!(blocks <= 8 && kept <= 8, "{what}: {found:?}");
                        assert!(records <= 8 || name.starts_with("meta"), "{what}: {found:?}");
                        losses += usize::from(found != ALL);
                    }
                }
            }
        }
    }
    assert!(losses > 50, "{losses}");
}

#[test]
fn an_opening_that_is_refused_writes_nothing() {
    let (sim, ..) = make(false);
    // There is something to mend, and something to put right.
    assert!(sim.damage(Path::new(PATH), "meta-0", BLOCK, 512, Wrong::Zero));
    assert!(sim.damage(Path::new(PATH), "superblock", 0, 512, Wrong::Zero));
    sim.lose(Path::new(PATH), "meta-1.copy");
    sim.copy_directory(Path::new(PATH), Path::new("/copy"));
    let before = (everything(&sim), sim.bytes(Path::new("/copy")));
    let refused = open(&sim, "/copy", OpenOptions::default());
    assert!(matches!(refused, Err(PoolError::Apart { .. })), "{refused:?}");
    assert!((everything(&sim), sim.bytes(Path::new("/copy"))) == before, "files of a refused pool were written");
    assert!(open(&sim, PATH, OpenOptions::default()).is_ok());
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
