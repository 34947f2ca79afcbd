//! The interface, on real files.

use std::io::IoSlice;
use std::path::Path;

use super::model::content;
use crate::sim::{Fault, Sim};
use crate::{
    Access, AlignedBuf, Allocation, BLOCK, Fallback, MediaClass, Object, ObjectError, OpenOptions, Pool, PoolError,
    ROOT_MDC,
};

fn pool(dir: &Path) -> Pool {
    Pool::create(&dir.join("pool"), "test").unwrap()
}

pub(super) fn write(pool: &Pool, bytes: &[u8]) -> u64 {
    let mut writer = pool.mblock_alloc(Allocation { capacity: bytes.len() as u64, ..Allocation::default() }).unwrap();
    writer.write(&[IoSlice::new(bytes)]).unwrap();
    writer.commit().unwrap()
}

#[test]
fn mblocks_are_written_read_and_deleted() {
    let dir = tempfile::tempdir().unwrap();
    let pool = pool(dir.path());
    // Odd sizes, unaligned memory, parts; then aligned memory of several megabytes.
    for len in [0, 1, 4095, 4096, 4097, 100_000, (1 << 20) + 5, 3 << 20] {
        let bytes = content(len as u64, len);
        let mut writer = pool.mblock_alloc(Allocation::default()).unwrap();
        for part in bytes.chunks(70_001) {
            writer.write(&[IoSlice::new(&part[..part.len() / 3]), IoSlice::new(&part[part.len() / 3..])]).unwrap();
        }
        assert!(matches!(pool.mblock(writer.id()), Err(ObjectError::NotFound(_))), "not before the commit");
        let mblock = pool.mblock(writer.commit().unwrap()).unwrap();
        assert_eq!(mblock.props().len, len as u64);
        let mut read = vec![0; len];
        mblock.read(0, &mut read).unwrap();
        assert!(read == bytes, "{len}");
        for (start, end) in [(0, len / 2), (len / 3, len), (len, len), (len.min(1), len)] {
            let mut read = vec![0; end.max(start) - start];
            mblock.read(start as u64, &mut read).unwrap();
            assert!(read == bytes[start..end.max(start)], "{len}: {start}..{end}");
        }
        assert!(matches!(mblock.read(len as u64, &mut [0]), Err(ObjectError::PastEnd { .. })));
    }
    let mut aligned = AlignedBuf::zeroed(5 << 20);
    aligned.copy_from_slice(&content(9, 5 << 20));
    let id = write(&pool, &aligned);
    let mut read = AlignedBuf::zeroed(3 << 20);
    pool.mblock(id).unwrap().read(1 << 20, &mut read).unwrap();
    assert!(read[..] == aligned[1 << 20..4 << 20]);
    let held = pool.mblock(id).unwrap();
    pool.mblock_delete(&[id]).unwrap();
    assert!(matches!(held.read(0, &mut [0]), Err(ObjectError::NotFound(Object::Mblock(_)))));
    assert!(matches!(pool.mblock_delete(&[id]), Err(ObjectError::NotFound(_))));
    let all: Vec<u64> = pool.mblocks().iter().map(|m| m.id).collect();
    pool.mblock_delete(&all).unwrap();
    let usage = pool.usage().unwrap();
    assert_eq!((usage.classes[0].mblocks, usage.classes[0].data_bytes), (0, 0));
    assert!(usage.classes[0].used_bytes < 64 << 10, "{usage:?}");
    assert!(pool.check(crate::Depth::Data).unwrap().is_clean());
}

#[test]
fn an_empty_one_behind_the_end_of_the_data_is_whole() {
    let dir = tempfile::tempdir().unwrap();
    let pool = pool(dir.path());
    let large = write(&pool, &content(1, 100_000));
    let empty = write(&pool, &[]);
    pool.mblock_delete(&[large]).unwrap();
    drop(pool);
    // The data file is cut where the last data end.
    for _ in 0..2 {
        let pool = Pool::open(&dir.path().join("pool"), OpenOptions::default()).unwrap();
        let report = pool.check(crate::Depth::Data).unwrap();
        assert!(report.is_clean(), "{:?}", report.findings);
        pool.mblock(empty).unwrap().read(0, &mut []).unwrap();
    }
}

#[test]
fn one_that_is_deleted_twice_at_once_gives_its_space_back_once() {
    let dir = tempfile::tempdir().unwrap();
    let pool = pool(dir.path());
    // Each takes three blocks.
    let ids: Vec<u64> = (0..4).map(|seed| write(&pool, &content(seed, 5000))).collect();
    pool.mblock_delete(&[ids[1], ids[0], ids[1]]).unwrap();
    // The first one takes six, all that is free.
    let sizes = [(10, 20_000), (11, 5000), (12, 5000)];
    let new = sizes.map(|(seed, len)| (write(&pool, &content(seed, len)), seed, len));
    for (id, seed, len) in new.into_iter().chain([(ids[2], 2, 5000), (ids[3], 3, 5000)]) {
        let mut bytes = vec![0; len];
        let read = pool.mblock(id).unwrap().read(0, &mut bytes);
        assert!(read.is_ok() && bytes == content(seed, len), "mblock {id} lies where another one does: {read:?}");
    }
    assert!(pool.check(crate::Depth::Data).unwrap().is_clean());
}

#[test]
fn what_no_medium_can_hold_is_refused_and_costs_nothing() {
    let dir = tempfile::tempdir().unwrap();
    let pool = pool(dir.path());
    // The last but one would come out as next to nothing if it were counted modulo 2^64.
    for capacity in [1 << 50, 1 << 60, u64::MAX / 1025 * 1024 + 4096, u64::MAX] {
        let refused = pool.mblock_alloc(Allocation { capacity, ..Allocation::default() });
        assert!(matches!(refused, Err(ObjectError::Full { .. })), "{capacity}: {refused:?}");
    }
    write(&pool, b"fits");
    let data = std::fs::metadata(dir.path().join("pool").join("data")).unwrap();
    assert!(data.len() <= 2 * BLOCK as u64, "its place is at the start: {}", data.len());
}

#[test]
fn what_somebody_else_has_written_is_not_emptied() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("pool");
    std::fs::create_dir(&path).unwrap();
    std::fs::write(path.join("data"), b"mine").unwrap();
    assert!(matches!(Pool::create(&path, "test"), Err(PoolError::Occupied(_))));
    assert!(!path.join("superblock").exists());
    let other = Pool::create(&dir.path().join("other"), "test").unwrap();
    assert!(matches!(other.add_class(MediaClass::Staging, &path), Err(PoolError::Occupied(_))));
    assert_eq!(std::fs::read(path.join("data")).unwrap(), b"mine");
    // A pool that has lost both copies of its superblock is no empty directory either.
    write(&other, b"precious");
    drop(other);
    let path = dir.path().join("other");
    for name in ["superblock", "superblock.copy"] {
        std::fs::write(path.join(name), [0; BLOCK]).unwrap();
    }
    assert!(matches!(Pool::create(&path, "test"), Err(PoolError::Occupied(_))));
    assert!(std::fs::read(path.join("data")).unwrap().starts_with(b"precious"));
}

#[test]
fn of_two_that_make_a_pool_in_one_place_one_does() {
    let dir = tempfile::tempdir().unwrap();
    for round in 0..8 {
        let path = dir.path().join(round.to_string());
        let make = || Pool::create(&path, "test").map(|pool| write(&pool, b"first"));
        let results = std::thread::scope(|scope| [scope.spawn(make), scope.spawn(make)].map(|t| t.join().unwrap()));
        let pool = Pool::open(&path, OpenOptions::default()).unwrap();
        assert!(pool.check(crate::Depth::Data).unwrap().is_clean());
        let written = results.iter().flatten().count();
        assert_eq!(pool.mblocks().len(), written, "what was committed is there: {results:?}");
    }
}

#[test]
fn a_memory_class_that_went_with_the_host_is_made_anew() {
    let dir = tempfile::tempdir().unwrap();
    let memory = dir.path().join("memory");
    let alone = pool(dir.path());
    let keep = write(&alone, b"keep");
    alone.add_class(MediaClass::Memory, &memory).unwrap();
    let allocation = Allocation { class: MediaClass::Memory, capacity: 10, fallback: Fallback::None };
    let gone = alone.mblock_alloc(allocation).unwrap().commit().unwrap();
    alone.mlog_create(MediaClass::Memory, 1000).unwrap();
    drop(alone);
    std::fs::rename(&memory, dir.path().join("away")).unwrap();
    let open = || Pool::open(&dir.path().join("pool"), OpenOptions::default()).unwrap();
    let pool = open();
    assert!(matches!(pool.mblock(gone), Err(ObjectError::NoClass(MediaClass::Memory))));
    // It is back: nothing of it may be lost.
    std::fs::rename(dir.path().join("away"), &memory).unwrap();
    assert!(matches!(pool.add_class(MediaClass::Memory, &memory), Err(PoolError::Exists(_))));
    drop(pool);
    assert!(open().mblock(gone).is_ok());
    std::fs::remove_dir_all(&memory).unwrap();
    open().add_class(MediaClass::Memory, &memory).unwrap();
    let pool = open();
    assert!(pool.check(crate::Depth::Data).unwrap().findings.is_empty());
    assert_eq!(pool.mblocks().iter().map(|m| m.id).collect::<Vec<_>>(), [keep]);
    assert!(pool.mlogs().is_empty() && pool.mblock_alloc(allocation).is_ok());
}

#[test]
fn a_pool_that_was_moved_says_where_it_is() {
    let dir = tempfile::tempdir().unwrap();
    drop(pool(dir.path()));
    let moved = dir.path().canonicalize().unwrap().join("moved");
    std::fs::rename(dir.path().join("pool"), &moved).unwrap();
    let pool = Pool::open(&moved, OpenOptions::default()).unwrap();
    assert_eq!(pool.usage().unwrap().classes[0].path, moved);
}

#[test]
fn a_writer_has_the_room_that_it_asked_for() {
    let dir = tempfile::tempdir().unwrap();
    let pool = pool(dir.path());
    let mut writer = pool.mblock_alloc(Allocation { capacity: 10, ..Allocation::default() }).unwrap();
    assert!(matches!(writer.write(&[IoSlice::new(&[0; 11])]), Err(ObjectError::Capacity { wanted: 11, .. })));
    writer.write(&[IoSlice::new(b"0123456789")]).unwrap();
    let id = writer.commit().unwrap();
    drop(pool.mblock_alloc(Allocation::default()).unwrap());
    pool.mblock_alloc(Allocation::default()).unwrap().abort();
    assert_eq!(pool.mblocks().len(), 1);
    assert_eq!(pool.mblock(id).unwrap().props().stored, 2 * BLOCK as u64);
}

#[test]
fn classes_fall_back() {
    let dir = tempfile::tempdir().unwrap();
    let pool = pool(dir.path());
    let staging = Allocation { class: MediaClass::Staging, capacity: 10, fallback: Fallback::None };
    assert!(matches!(pool.mblock_alloc(staging), Err(ObjectError::NoClass(MediaClass::Staging))));
    let fallback = Allocation { fallback: Fallback::Capacity, ..staging };
    assert_eq!(pool.mblock_alloc(fallback).unwrap().class(), MediaClass::Capacity);
    pool.add_class(MediaClass::Staging, &dir.path().join("staging")).unwrap();
    assert_eq!(pool.mblock_alloc(staging).unwrap().class(), MediaClass::Staging);
    assert!(matches!(pool.add_class(MediaClass::Staging, &dir.path().join("more")), Err(PoolError::ClassExists(_))));
    assert!(matches!(pool.add_class(MediaClass::Memory, &dir.path().join("staging")), Err(PoolError::Exists(_))));
    assert!(matches!(pool.add_class(MediaClass::Memory, &dir.path().join("pool")), Err(PoolError::Exists(_))));

    let mut writer = pool.mblock_alloc(staging).unwrap();
    writer.write(&[IoSlice::new(b"staged")]).unwrap();
    let id = writer.commit().unwrap();
    drop(pool);
    std::fs::rename(dir.path().join("staging"), dir.path().join("away")).unwrap();
    let open = |options| Pool::open(&dir.path().join("pool"), options);
    let missing = open(OpenOptions::default());
    assert!(matches!(missing, Err(PoolError::ClassMissing { class: MediaClass::Staging, .. })), "{missing:?}");
    let salvaged = open(OpenOptions { salvage: true, ..OpenOptions::default() }).unwrap();
    assert!(matches!(salvaged.mblock(id), Err(ObjectError::NoClass(_))));
    assert!(!salvaged.check(crate::Depth::Data).unwrap().is_clean());
    drop(salvaged);
    std::fs::rename(dir.path().join("away"), dir.path().join("staging")).unwrap();
    let mut bytes = [0; 6];
    open(OpenOptions::default()).unwrap().mblock(id).unwrap().read(0, &mut bytes).unwrap();
    assert_eq!(&bytes, b"staged");
    Pool::destroy(&dir.path().join("pool")).unwrap();
    assert!(!dir.path().join("staging").exists() && !dir.path().join("pool").exists());
}

#[test]
fn one_writer_or_many_readers() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("pool");
    let shared = OpenOptions { access: Access::Shared, ..OpenOptions::default() };
    assert!(matches!(Pool::open(&path, shared), Err(PoolError::NotAPool(_))));
    let alone = pool(dir.path());
    let id = write(&alone, b"hello");
    assert!(matches!(Pool::create(&path, "again"), Err(PoolError::Exists(_))));
    assert!(matches!(Pool::open(&path, OpenOptions::default()), Err(PoolError::Busy(_))));
    assert!(matches!(Pool::open(&path, shared), Err(PoolError::Busy(_))));
    assert!(matches!(Pool::destroy(&path), Err(PoolError::Busy(_))));
    drop(alone);
    let readers = [Pool::open(&path, shared).unwrap(), Pool::open(&path, shared).unwrap()];
    assert!(matches!(Pool::open(&path, OpenOptions::default()), Err(PoolError::Busy(_))));
    for reader in &readers {
        let mut bytes = [0; 5];
        reader.mblock(id).unwrap().read(0, &mut bytes).unwrap();
        assert_eq!(&bytes, b"hello");
        assert!(matches!(reader.mblock_alloc(Allocation::default()), Err(ObjectError::ReadOnly)));
        assert!(matches!(reader.mblock_delete(&[id]), Err(ObjectError::ReadOnly)));
        assert!(matches!(reader.rename("x"), Err(PoolError::ReadOnly)));
        assert!(matches!(reader.mlog_create(MediaClass::Capacity, 1), Err(ObjectError::ReadOnly)));
        assert!(reader.check(crate::Depth::Data).unwrap().is_clean());
    }
}

#[test]
fn logs_keep_records_and_generations() {
    let dir = tempfile::tempdir().unwrap();
    let pool = pool(dir.path());
    let id = pool.mlog_create(MediaClass::Capacity, 1000).unwrap();
    let mut log = pool.mlog_open(id).unwrap();
    assert!(matches!(pool.mlog_open(id), Err(ObjectError::Open(_))));
    assert!(matches!(pool.mlog_delete(id), Err(ObjectError::Open(_))));
    assert_eq!((log.generation(), log.is_empty(), log.read().unwrap()), (1, true, None));
    log.append(b"one", true).unwrap();
    log.append(b"", false).unwrap();
    log.append(b"three", false).unwrap();
    assert!(matches!(log.append(&[0; 1000], false), Err(ObjectError::Capacity { .. })));
    assert_eq!(log.read().unwrap().unwrap(), b"one");
    let second = log.position();
    assert_eq!(log.read().unwrap().unwrap(), b"");
    assert_eq!(log.read().unwrap().unwrap(), b"three");
    log.seek(second);
    assert_eq!(log.read().unwrap().unwrap(), b"");
    drop(log);
    let mut log = pool.mlog_open(id).unwrap();
    let all: Vec<_> = std::iter::from_fn(|| log.read().unwrap()).collect();
    assert_eq!(all, [&b"one"[..], b"", b"three"]);
    assert_eq!((log.erase(0).unwrap(), log.len()), (2, 0));
    assert_eq!(log.erase(9).unwrap(), 9);
    log.append(b"new", true).unwrap();
    drop(log);
    let mut log = pool.mlog_open(id).unwrap();
    assert_eq!((log.generation(), log.read().unwrap().unwrap()), (9, b"new".to_vec()));
    drop(log);
    pool.mlog_delete(id).unwrap();
    assert!(matches!(pool.mlog_open(id), Err(ObjectError::NotFound(_))));
}

#[test]
fn mdcs_compact_into_themselves() {
    let dir = tempfile::tempdir().unwrap();
    let pool = pool(dir.path());
    let mut root = pool.mdc_open(ROOT_MDC).unwrap();
    for round in 0..20u8 {
        root.append(&[&[round; 100]], true).unwrap();
    }
    let full = root.usage();
    root.start_compaction().unwrap();
    assert!(matches!(root.start_compaction(), Err(ObjectError::Compaction(..))));
    root.append(&[b"kept"], false).unwrap();
    root.end_compaction().unwrap();
    assert!(matches!(root.end_compaction(), Err(ObjectError::Compaction(..))));
    assert!(root.usage() < full / 10);
    root.append(&[b"more"], true).unwrap();
    // One that is not ended leaves everything as it was.
    root.start_compaction().unwrap();
    root.append(&[b"never"], true).unwrap();
    drop(root);
    drop(pool);
    let pool = Pool::open(&dir.path().join("pool"), OpenOptions::default()).unwrap();
    let mut root = pool.mdc_open(ROOT_MDC).unwrap();
    let all: Vec<_> = std::iter::from_fn(|| root.read().unwrap()).collect();
    assert_eq!(all, [b"kept", b"more"]);
    drop(root);
    assert!(pool.mdc_delete(ROOT_MDC).is_err());
    let id = pool.mdc_create(MediaClass::Capacity, 200).unwrap();
    let mut mdc = pool.mdc_open(id).unwrap();
    assert!(matches!(mdc.append(&[&[0; 300]], true), Err(ObjectError::Capacity { .. })));
    drop(mdc);
    pool.mdc_delete(id).unwrap();
    assert_eq!(pool.mdcs().len(), 1);
}

#[test]
fn metadata_are_compacted() {
    let dir = tempfile::tempdir().unwrap();
    let pool = pool(dir.path());
    let keep = write(&pool, b"keep");
    let before = pool.usage().unwrap().metadata_bytes;
    let mut most = before;
    for _ in 0..9000 {
        let writer = pool.mblock_alloc(Allocation { capacity: 4096, ..Allocation::default() }).unwrap();
        let id = writer.commit().unwrap();
        pool.mblock_delete(&[id]).unwrap();
        most = most.max(pool.usage().unwrap().metadata_bytes);
        if pool.usage().unwrap().metadata_bytes < most / 2 {
            break;
        }
    }
    assert!(pool.usage().unwrap().metadata_bytes < most / 2, "never compacted: {most}");
    drop(pool);
    let pool = Pool::open(&dir.path().join("pool"), OpenOptions::default()).unwrap();
    assert_eq!(pool.mblocks().iter().map(|m| m.id).collect::<Vec<_>>(), [keep]);
    let next = write(&pool, b"next");
    assert!(next > keep + 100, "identities are not used again");
}

#[test]
fn after_a_failed_write_nothing_is_written_until_it_is_opened_again() {
    let sim = Sim::default();
    let path = Path::new("/pool");
    let pool = Pool::create_on(sim.storage(), path, "test").unwrap();
    let mut writer = pool.mblock_alloc(Allocation::default()).unwrap();
    let block = AlignedBuf::zeroed(BLOCK);
    sim.plan(sim.operations(), Fault::Error);
    assert!(matches!(writer.write(&[IoSlice::new(&block)]), Err(ObjectError::Io(_))));
    let error = writer.write(&[IoSlice::new(&block)]).unwrap_err();
    assert!(matches!(error, ObjectError::Failed(Object::Mblock(_))), "{error}");
    assert!(error.to_string().starts_with("an earlier write to mblock "), "{error}");
    drop(writer);
    sim.plan(sim.operations(), Fault::Torn);
    assert!(matches!(pool.rename("other"), Err(PoolError::Io(_))));
    let error = pool.rename("other").unwrap_err();
    assert!(matches!(error, PoolError::Failed), "{error}");
    assert!(error.to_string().starts_with("an earlier write to the metadata failed"), "{error}");
    drop(pool);
    Pool::open_on(sim.storage(), path, OpenOptions::default()).unwrap().rename("other").unwrap();
}

#[test]
fn a_word_that_is_no_class_is_refused_with_those_there_are() {
    let error = "disk".parse::<MediaClass>().unwrap_err().to_string();
    assert_eq!(error, "\"disk\" is no media class: capacity, staging or memory");
    assert!(MediaClass::ALL.iter().all(|class| class.to_string().parse() == Ok(*class)));
}
