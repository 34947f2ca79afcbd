//! Leases, on real files.

use std::fs::File;
use std::path::Path;

use super::basic::write;
use super::model::{content, key};
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

#[test]
fn what_is_read_without_room_for_a_lease_nobody_changes() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("pool");
    let id = write(&Pool::create(&path, "test").unwrap(), &content(1, BLOCK));
    let pool = open(&path, Access::Shared);
    let full = || {
        kmem::testing::refuse(libc::SYS_write, None, libc::ENOSPC);
        pool.lease(&[id], b"note")
    };
    let lease: File = std::thread::scope(|scope| scope.spawn(full).join()).unwrap().unwrap().into();
    drop(pool);
    let leased = Leased::open(&lease).unwrap();
    assert!(leased.note() == b"note" && leased.into_mblocks()[&id].read(0, &mut [0; BLOCK]).is_ok());
    assert!(matches!(Pool::open(&path, OpenOptions::default()), Err(PoolError::Leased(_))));
}

#[test]
fn who_opens_a_pool_knows_that_its_mblocks_are_kept_as_long_as_somebody_keeps_them() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("pool");
    let pool = Pool::create(&path, "test").unwrap();
    assert!(!pool.is_kept());
    let kept = [pool.keep().unwrap(), pool.keep().unwrap()];
    drop(pool);
    assert!(matches!(Pool::destroy(&path), Err(PoolError::Leased(_))));
    let pool = open(&path, Access::Exclusive);
    for one in kept {
        assert!(pool.is_kept());
        drop(one);
    }
    assert!(!pool.is_kept());
    drop(pool);
    Pool::destroy(&path).unwrap();
}

#[test]
fn the_file_of_a_lease_is_its_directorys_owners_and_is_made_in_the_directory_that_is_open() {
    use std::os::unix::fs::{MetadataExt, chown};
    let dir = tempfile::tempdir().unwrap();
    let (path, other) = (dir.path().join("pool"), dir.path().join("other"));
    drop(Pool::create(&path, "test").unwrap());
    let Ok(()) = chown(&path, Some(12_345), Some(54_321)) else {
        println!("SKIPPED: only root can give a directory to others");
        return;
    };
    let files = |path: &Path| {
        let all = std::fs::read_dir(path)
            .unwrap()
            .flatten()
            .filter(|e| e.file_name().to_string_lossy().starts_with("lease-"));
        all.map(|entry| entry.metadata().unwrap()).collect::<Vec<_>>()
    };
    let are_the_owners = |count| {
        let files = files(&path);
        let owners = files.iter().map(|file| (file.uid(), file.gid(), file.mode() & 0o777));
        assert!(owners.eq(vec![(12_345, 54_321, 0o600); count]), "{files:?}");
    };
    let pool = open(&path, Access::Exclusive);
    let kept = pool.keep().unwrap();
    are_the_owners(1);
    drop(pool);
    let pool = open(&path, Access::Shared);
    let lease = pool.lease(&[], b"").unwrap();
    are_the_owners(2);
    drop((pool, lease));
    // Another directory gets the name.
    let pool = open(&path, Access::Exclusive);
    std::fs::rename(&path, dir.path().join("moved")).unwrap();
    std::fs::create_dir_all(&other).unwrap();
    std::fs::rename(&other, &path).unwrap();
    let new = pool.keep().unwrap();
    assert!(files(&path).is_empty() && pool.keeping().unwrap().len() == 2 && new.holds() && kept.holds());
    drop((new, kept));
    assert!(!pool.is_kept() && files(&dir.path().join("moved")).is_empty());
}

#[test]
fn what_is_kept_is_not_known_to_be_when_the_file_is_gone() {
    let dir = tempfile::tempdir().unwrap();
    let pool = Pool::create(&dir.path().join("pool"), "test").unwrap();
    let kept = pool.keep().unwrap();
    let files = pool.keeping().unwrap();
    assert!(kept.holds() && files.len() == 1);
    std::fs::remove_file(&files[0]).unwrap();
    assert!(!kept.holds() && !pool.is_kept());
}

/// Whoever may write beside a pool can make a lease of any length that takes no space.
#[test]
fn a_lease_of_any_length_takes_little_memory() {
    const NAME: &str = "tests::leases::a_lease_of_any_length_takes_little_memory";
    // What other tests take at the same time must not count.
    if std::env::var_os("PAGEONE_ALONE").is_none() {
        let mut alone = std::process::Command::new(std::env::current_exe().unwrap());
        assert!(alone.args([NAME, "--exact"]).env("PAGEONE_ALONE", "").status().unwrap().success());
        return;
    }
    let (dir, key) = (tempfile::tempdir().unwrap(), key(1));
    let [plain, sealed] = ["plain", "sealed"].map(|name| dir.path().join(name));
    drop(Pool::create(&plain, "test").unwrap());
    drop(Pool::create_encrypted(&sealed, "test", key.path()).unwrap());
    let of = |magic: &[u8], numbers: &[u64]| -> Vec<u8> {
        magic.iter().copied().chain(numbers.iter().flat_map(|number| number.to_le_bytes())).collect()
    };
    let gib = 1 << 30;
    let leases = [
        Vec::new(),
        of(b"PGKEEP01", &[]),
        of(b"PGLEASE1", &[gib - 20]),
        of(b"PGLEASE1", &[0]),
        of(b"PGLEASE1", &[u64::MAX]),
        of(b"PGLEASEX", &[0, gib - 512, 0, 0]),
        of(b"PGLEASEX", &[gib - 40, 0, 0, 0]),
        of(b"PGLEASEX", &[u64::MAX, u64::MAX, 0, 0]),
    ];
    for (path, begin) in [&plain, &sealed].into_iter().flat_map(|path| leases.iter().map(move |begin| (path, begin))) {
        let name = path.join("lease-x");
        std::fs::write(&name, begin).unwrap();
        let lease = File::options().read(true).write(true).open(&name).unwrap();
        let sectors = if begin.starts_with(b"PGLEASEX") { 40 - 512 } else { 0_i64 };
        lease.set_len(gib.saturating_add_signed(sectors)).unwrap();
        rustix::fs::flock(&lease, rustix::fs::FlockOperation::NonBlockingLockExclusive).unwrap();
        let error = Pool::open(path, OpenOptions::default()).unwrap_err();
        assert!(matches!(error, PoolError::Leased(_)), "{error}");
        assert!(matches!(Pool::destroy(path), Err(PoolError::Leased(_))));
        std::fs::remove_file(name).unwrap();
    }
    let most = kmem::procfs::status(None).unwrap().vm_hwm_kib;
    assert!(most < 256 << 10, "{most} KiB");
}
