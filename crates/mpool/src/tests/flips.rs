//! Flipped bits anywhere in the files: found, named, and the rest is still there.

use std::fs;
use std::os::unix::fs::FileExt;
use std::path::Path;

use super::basic::write;
use super::model::content;
use crate::sim::Random;
use crate::{Finding, MediaClass, Object, ObjectError, OpenOptions, Pool, PoolError};

const SIZES: [usize; 4] = [100, 9000, 70_000, 4096];

fn make(path: &Path) -> (Vec<u64>, u64) {
    let pool = Pool::create(path, "flips").unwrap();
    pool.add_class(MediaClass::Staging, &path.join("staging")).unwrap();
    let ids = SIZES.iter().map(|&len| write(&pool, &content(len as u64, len))).collect();
    let log = pool.mlog_create(MediaClass::Capacity, 1 << 20).unwrap();
    let mut mlog = pool.mlog_open(log).unwrap();
    (0..50u8).for_each(|i| mlog.append(&[i; 100], i % 5 == 0).unwrap());
    (ids, log)
}

fn read_all(pool: &Pool, ids: &[u64]) -> Vec<Result<(), ObjectError>> {
    let one = |(&id, &len): (&u64, &usize)| {
        let mut bytes = vec![0; len];
        pool.mblock(id)?.read(0, &mut bytes)?;
        assert!(bytes == content(len as u64, len), "wrong bytes were handed out");
        Ok(())
    };
    ids.iter().zip(&SIZES).map(one).collect()
}

fn flip(file: &Path, bit: u64) {
    let file = fs::OpenOptions::new().read(true).write(true).open(file).unwrap();
    let mut byte = [0];
    file.read_exact_at(&mut byte, bit / 8).unwrap();
    byte[0] ^= 1 << (bit % 8);
    file.write_all_at(&byte, bit / 8).unwrap();
}

/// Where frames end in a log file: behind is nothing but zeros.
fn content_end(file: &Path) -> u64 {
    let bytes = fs::read(file).unwrap();
    bytes.iter().rposition(|&b| b != 0).map_or(0, |at| at as u64 + 1)
}

/// Reads past damage. Returns how many records are whole.
fn whole_records(pool: &Pool, log: u64) -> usize {
    let mut mlog = pool.mlog_open(log).unwrap();
    let mut records = 0;
    loop {
        match mlog.read() {
            Ok(Some(_)) => records += 1,
            Ok(None) => return records,
            Err(ObjectError::Damaged(_)) => mlog.skip_damaged().unwrap(),
            Err(e) => panic!("{e}"),
        }
    }
}

#[test]
fn every_flipped_bit_is_found_and_the_rest_is_served() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("pool");
    let (ids, log) = make(&path);
    let names = fs::read_dir(&path).unwrap().map(|e| e.unwrap().file_name().into_string().unwrap());
    let mut names: Vec<String> = names.filter(|name| name != "staging").collect();
    names.extend(["staging/superblock", "staging/superblock.copy"].map(String::from));
    let mut random = Random::new(5);
    let mut seen = std::collections::HashSet::new();
    for name in &names {
        let file = path.join(name);
        // Beyond the content of a log lie zeros that mean nothing.
        let end = if name == "data" || name.ends_with("superblock") {
            fs::metadata(&file).unwrap().len()
        } else {
            content_end(&file)
        };
        for _ in 0..60.min(end * 8) {
            let bit = random.below(end * 8);
            let before: Vec<Vec<u8>> = names.iter().map(|name| fs::read(path.join(name)).unwrap()).collect();
            flip(&file, bit);
            let what = format!("bit {bit} of {name}");
            let pool = Pool::open(&path, OpenOptions::default()).unwrap_or_else(|e| panic!("{what}: {e}"));
            let report = pool.check(crate::Depth::Data).unwrap();
            let damaged: Vec<Object> = report
                .findings
                .iter()
                .filter_map(|f| match f {
                    Finding::Damage { damage, .. } => Some(damage.object),
                    // The frame that says that the log was closed: nothing hangs on it.
                    Finding::TornTail { object, .. } => Some(*object),
                    _ => None,
                })
                .collect();
            // Zeros that fill up a block of data or of checksums are checked too.
            assert!(!damaged.is_empty(), "{what} was not noticed: {report:?}");
            let bad = read_all(&pool, &ids).into_iter().filter(Result::is_err).count();
            match damaged.first() {
                Some(Object::Mblock(_)) => assert!(bad <= 1, "{what}"),
                Some(Object::Mlog(id)) => {
                    assert_eq!((*id, bad), (log, 0), "{what}");
                    let records = whole_records(&pool, log);
                    assert_eq!(records, 50, "{what}");
                }
                _ => assert_eq!(bad, 0, "{what}"),
            }
            seen.extend(damaged.iter().map(std::mem::discriminant));
            drop(pool);
            names.iter().zip(before).for_each(|(name, bytes)| fs::write(path.join(name), bytes).unwrap());
        }
    }
    assert_eq!(seen.len(), 5, "superblock, metadata, mblock, mlog and MDC were all hit: {seen:?}");
}

#[test]
fn metadata_without_any_copy_left_are_salvaged() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("pool");
    let (ids, _) = make(&path);
    // The record of the first mblock, in both files.
    let mut bytes = fs::read(path.join("meta-0")).unwrap();
    let needle = crate::disk::record::Record::Mblock(crate::disk::record::MblockRecord {
        id: ids[0],
        class: MediaClass::Capacity,
        offset: 0,
        len: SIZES[0] as u64,
        table_crc: 0,
    })
    .encode();
    let start = &needle[..4];
    let hits: Vec<usize> = (0..bytes.len() - 4).filter(|&at| &bytes[at..at + 4] == start).collect();
    assert_eq!(hits.len(), 1, "{hits:?}");
    hits.iter().for_each(|&at| bytes[at + 2] ^= 0x55);
    for name in ["meta-0", "meta-0.copy"] {
        fs::write(path.join(name), &bytes).unwrap();
    }
    let refused = Pool::open(&path, OpenOptions::default());
    assert!(matches!(&refused, Err(PoolError::Damaged(d)) if d.object == Object::Metadata(0)), "{refused:?}");
    let pool = Pool::open(&path, OpenOptions { salvage: true, ..OpenOptions::default() }).unwrap();
    assert!(pool.findings().iter().any(|f| matches!(f, Finding::RecordsLost(n) if *n >= 1)));
    let served = read_all(&pool, &ids).iter().filter(|r| r.is_ok()).count();
    assert_eq!(served, ids.len() - 1);
}
