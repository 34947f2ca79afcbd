//! Leases, on real files.

use std::fs::File;
use std::path::Path;

use super::basic::write;
use super::model::content;
use crate::{Access, BLOCK, Leased, OpenOptions, Pool, PoolError, Rebuild};

fn open(dir: &Path, access: Access) -> Pool {
    Pool::open(dir, OpenOptions { access, ..OpenOptions::default() }).unwrap()
}

fn used(pool: &Pool) -> u64 {
    pool.usage().unwrap().classes[0].used_bytes
}

#[test]
fn what_is_leased_can_be_read_whatever_is_written_and_deleted_meanwhile() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("pool");
    let pool = Pool::create(&path, "test").unwrap();
    let bytes = content(1, 4 << 20);
    let [kept, deleted] = [(); 2].map(|()| write(&pool, &bytes));
    assert!(pool.lease(&[kept], b"").is_err(), "a pool that is being written");
    drop(pool);
    let pool = open(&path, Access::Shared);
    let lease: File = pool.lease(&[kept, deleted], b"note").unwrap().into();
    drop(pool);
    let read = || {
        let leased = Leased::open(&lease).unwrap();
        assert_eq!(leased.note(), b"note");
        let mblocks = leased.into_mblocks();
        for id in [kept, deleted] {
            let mut read = vec![0; bytes.len()];
            mblocks[&id].read(0, &mut read).unwrap();
            assert!(read == bytes);
        }
        mblocks
    };
    let before = read();
    // In this opening, and in a later one, which finds the space without an mblock.
    let pool = open(&path, Access::Exclusive);
    pool.mblock_delete(&[deleted]).unwrap();
    let others: Vec<u64> = (0..3).map(|n| write(&pool, &content(n + 2, 3 << 20))).collect();
    pool.mblock_delete(&others[..1]).unwrap();
    read();
    drop(pool);
    let pool = open(&path, Access::Exclusive);
    write(&pool, &content(7, 4 << 20));
    assert!(pool.check(crate::Depth::Data).unwrap().is_clean());
    read();
    let full = used(&pool);
    drop(pool);
    // What holds a lease cannot be destroyed or rebuilt.
    assert!(matches!(Pool::destroy(&path), Err(PoolError::Leased(_))));
    let error = Pool::rebuild(&path, Rebuild::default()).unwrap_err();
    assert!(matches!(error, PoolError::Leased(_)), "{error}");
    assert!(error.to_string().contains("end these guests first"), "{error}");
    // A copy of the descriptor is as good; without both the space is free.
    let copy = lease.try_clone().unwrap();
    drop(lease);
    let names = || std::fs::read_dir(&path).unwrap().flatten().map(|entry| entry.file_name().into_string().unwrap());
    drop(open(&path, Access::Exclusive));
    assert_eq!(names().filter(|name| name.starts_with("lease-")).count(), 1);
    before[&deleted].read(0, &mut [0; 10]).unwrap();
    drop(copy);
    let pool = open(&path, Access::Exclusive);
    assert_eq!(names().filter(|name| name.starts_with("lease-")).count(), 0);
    assert!(used(&pool) + (4 << 20) <= full, "{} of {full}", used(&pool));
    // A reader without a lease gets an error, and no other byte.
    assert!(before[&deleted].read(0, &mut [0; 10]).is_err());
    drop(pool);
    Pool::destroy(&path).unwrap();
}

#[test]
fn a_lease_that_is_not_understood_is_obeyed() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("pool");
    let pool = Pool::create(&path, "test").unwrap();
    let id = write(&pool, &content(1, BLOCK));
    drop(pool);
    let lease: File = open(&path, Access::Shared).lease(&[id], b"").unwrap().into();
    use std::os::unix::fs::FileExt;
    for at in 0..lease.metadata().unwrap().len() {
        let mut byte = [0];
        lease.read_exact_at(&mut byte, at).unwrap();
        lease.write_all_at(&[byte[0] ^ 1], at).unwrap();
        assert!(Leased::open(&lease).is_err());
        let error = Pool::open(&path, OpenOptions::default()).unwrap_err();
        assert!(matches!(error, PoolError::Leased(_)), "{error}");
        lease.write_all_at(&byte, at).unwrap();
    }
    assert!(Leased::open(&lease).is_ok());
    drop(open(&path, Access::Exclusive));
}
