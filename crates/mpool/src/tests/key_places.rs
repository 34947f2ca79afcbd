//! Where the key of an encrypted pool is: in a file or in the kernel's keyrings, from one to the
//! other and back.

use std::path::Path;

use kmem::testing::KernelKey;

use super::basic::write;
use super::model::{content, key};
use super::sealed::cut_key_change;
use super::sectors::{ALL, PATH, make_with, open, served};
use crate::disk::key::NAMES;
use crate::disk::medium::Open;
use crate::fuzzing::key_file;
use crate::sim::Sim;
use crate::{BLOCK, KeyPlace, OpenOptions, Pool, PoolError};

fn kernel(key: &KernelKey) -> KeyPlace {
    KeyPlace::Kernel(key.name().into())
}

/// The versions of both files with the wrapped key.
fn versions(path: &Path) -> [u8; 2] {
    NAMES.map(|name| std::fs::read(path.join(name)).unwrap()[8])
}

#[test]
fn a_pool_finds_its_key_in_a_file_or_in_the_kernels_keyrings() {
    let Some(first) = KernelKey::new("user", "mpool-first", &[3; 32]) else { return };
    let (dir, file) = (tempfile::tempdir().unwrap(), key(1));
    let path = dir.path().join("pool");
    let pool = Pool::create_encrypted(&path, "test", kernel(&first)).unwrap();
    let id = write(&pool, &content(4, 3 * BLOCK));
    assert_eq!(pool.props().key, Some(kernel(&first)));
    drop(pool);
    let opens = || {
        let pool = Pool::open(&path, OpenOptions::default()).unwrap();
        let mut read = vec![0; 3 * BLOCK];
        pool.mblock(id).unwrap().read(0, &mut read).unwrap();
        assert!(read == content(4, 3 * BLOCK));
        pool.props().key.unwrap()
    };
    assert_eq!((opens(), versions(&path)), (kernel(&first), [2, 2]));
    // To a file, which programs that know version 1 only can open, and back to another key.
    Pool::set_key(&path, file.path()).unwrap();
    assert_eq!((opens(), versions(&path)), (file.path().canonicalize().unwrap().into(), [1, 1]));
    let second = KernelKey::new("user", "mpool-second", &[4; 32]).unwrap();
    Pool::set_key(&path, kernel(&second)).unwrap();
    drop(file);
    assert_eq!((opens(), versions(&path)), (kernel(&second), [2, 2]));
    // The same key under another name: that of before need not be there.
    let (name, moved) = (second.name().to_owned(), KernelKey::new("user", "mpool-moved", &[4; 32]).unwrap());
    drop(second);
    let error = Pool::open(&path, OpenOptions::default()).unwrap_err();
    assert!(matches!(&error, PoolError::NoKey { key: KeyPlace::Kernel(gone), .. } if *gone == name), "{error:?}");
    Pool::set_key(&path, kernel(&moved)).unwrap();
    assert_eq!(opens(), kernel(&moved));
    drop(moved);
    Pool::destroy(&path).unwrap();
}

#[test]
fn what_keeps_a_key_of_the_kernel_away_is_said_with_the_remedy() {
    let Some(right) = KernelKey::new("user", "mpool-right", &[3; 32]) else { return };
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("pool");
    drop(Pool::create_encrypted(&path, "test", kernel(&right)).unwrap());
    let refused = |expected: &[&str]| {
        let at_opening = Pool::open(&path, OpenOptions::default()).unwrap_err().to_string();
        let at_making = Pool::create_encrypted(&dir.path().join("other"), "test", kernel(&right)).map(drop);
        for error in [Some(at_opening), at_making.err().map(|e| e.to_string())].into_iter().flatten() {
            assert!(error.contains(right.name()) && expected.iter().all(|part| error.contains(part)), "{error}");
        }
        let _ = Pool::destroy(&dir.path().join("other"));
    };
    right.set(&[3; 31]);
    refused(&["cannot be a pool's key: a key is 32 random bytes", "keyctl padd"]);
    right.set(&[3; 33]);
    refused(&["cannot be a pool's key: a key is 32 random bytes", "keyctl padd"]);
    right.set(&[4; 32]);
    let error = Pool::open(&path, OpenOptions::default()).unwrap_err();
    assert!(matches!(error, PoolError::WrongKey { .. }), "{error:?}");
    right.set(&[3; 32]);
    drop(Pool::open(&path, OpenOptions::default()).unwrap());
    right.revoke();
    refused(&["cannot be read: it was revoked", "add it again"]);
    right.unlink();
    refused(&["cannot be read: neither the session's keyring nor the user's", "`keyctl padd user NAME @u < FILE`"]);
    let logon = KernelKey::new("logon", "mpool-right", &[3; 32]).unwrap();
    refused(&["cannot be read: it is of type `logon`", "add it with type `user`"]);
    drop(logon);
    let denied = KernelKey::new("user", "mpool-denied", &[3; 32]).unwrap();
    Pool::create_encrypted(&dir.path().join("denied"), "test", kernel(&denied)).unwrap();
    denied.permit(0);
    let error = Pool::open(&dir.path().join("denied"), OpenOptions::default()).unwrap_err().to_string();
    assert!(error.contains("cannot be read: its permissions") && error.contains("keyctl setperm"), "{error}");
    let error = Pool::create_encrypted(&path.join("long"), "test", KeyPlace::Kernel("x".repeat(5000))).unwrap_err();
    assert!(matches!(error, PoolError::KernelKey { .. }), "{error:?}");
}

#[test]
fn a_change_from_one_place_to_another_that_is_cut_short_leaves_the_one_or_the_other() {
    let Some(second) = KernelKey::new("user", "mpool-cut", &[3; 32]) else { return };
    let first = key(1);
    let (to_kernel, blocks, log) = make_with(true, Some(first.path()));
    let to_file = to_kernel.copy();
    Pool::set_key_on(&to_file.clone(), Path::new(PATH), kernel(&second)).unwrap();
    for (sim, place) in [(to_kernel, kernel(&second)), (to_file, first.path().into())] {
        cut_key_change(&sim, &place, |pool| served(pool, &blocks, log) == ALL);
    }
}

#[test]
fn a_wrapped_key_of_a_later_version_is_not_taken_for_a_lost_one() {
    let key = key(1);
    let (sim, blocks, log) = make_with(true, Some(key.path()));
    let replace = |sim: &Sim, name: &str, bytes: &[u8]| {
        let medium = sim.storage().directory(Path::new(PATH)).unwrap();
        medium.open(name, Open::default()).unwrap().write_at(bytes, 0).unwrap();
    };
    let block = sim.bytes(Path::new(PATH)).into_iter().find(|(name, _)| name == NAMES[0]).unwrap().1;
    let later = key_file(3, &block[12..BLOCK - 4]);
    // One file is enough.
    let one = sim.copy();
    replace(&one, NAMES[0], &later);
    assert_eq!(served(&open(&one, PATH, OpenOptions::default()).unwrap(), &blocks, log), ALL);
    NAMES.iter().for_each(|name| replace(&sim, name, &later));
    let error = open(&sim, PATH, OpenOptions::default()).unwrap_err();
    assert!(matches!(error, PoolError::Version { found: 3, known: [1, 2], .. }), "{error:?}");
    assert!(error.to_string().contains("wrapped-key has format version 3, and this program knows versions 1 and 2"));
    // Which must be whole for that.
    NAMES.iter().for_each(|name| replace(&sim, name, &[&later[..90], &[1; 40], &later[130..]].concat()));
    let error = open(&sim, PATH, OpenOptions::default()).unwrap_err();
    assert!(matches!(error, PoolError::KeyLost(_)), "{error:?}");
}
