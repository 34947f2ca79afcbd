//! Encrypted pools: what lies on the medium, whose key opens them, and that files behave as they do
//! without encryption.

use std::collections::BTreeMap;
use std::fs::{self, File};
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use super::basic::write;
use super::model::{content, key};
use super::sectors::{ALL, PATH, STAGING, make_with, open, served};
use crate::disk::key::{Keys, NAMES, UserKey};
use crate::disk::medium::{MediumFile, Open, ReadPiece, Storage};
use crate::disk::sealed::over;
use crate::sim::{Fault, Random, Sim, Wrong};
use crate::{
    Access, AlignedBuf, BLOCK, Disk, Finding, KeyPlace, Leased, MediaClass, Object, OpenOptions, Pool, PoolError,
    ROOT_MDC, Rebuild,
};

const SHARED: OpenOptions = OpenOptions { access: Access::Shared, salvage: false, adopt: false };

/// A pool with an mblock, records and a second class; gives the identity of the mblock.
fn fill(pool: &Pool, staging: &Path) -> u64 {
    pool.add_class(MediaClass::Staging, staging).unwrap();
    let mut root = pool.mdc_open(ROOT_MDC).unwrap();
    root.append(&[b"checkpoint-of-a-tenant", &content(5, 32)], true).unwrap();
    write(pool, &content(4, 3 * BLOCK))
}

/// All bytes of all files below a directory.
fn files(directory: &Path) -> BTreeMap<PathBuf, Vec<u8>> {
    let mut all = BTreeMap::new();
    for path in fs::read_dir(directory).unwrap().map(|entry| entry.unwrap().path()) {
        if path.is_dir() {
            all.extend(files(&path));
        } else {
            all.insert(path.clone(), fs::read(&path).unwrap());
        }
    }
    all
}

#[test]
fn nothing_of_what_is_stored_can_be_read_on_the_medium() {
    let (dir, key) = (tempfile::tempdir().unwrap(), key(1));
    let page = content(4, 3 * BLOCK);
    let needles: [&[u8]; 6] = [
        &page[..16],
        &page[2 * BLOCK + 512..][..16],
        b"name-of-the-pool",
        b"checkpoint-of",
        &content(5, 32),
        b"note-of",
    ];
    let found = |key: Option<&Path>, at: &str| {
        let path = dir.path().join(at);
        let pool = match key {
            Some(key) => Pool::create_encrypted(&path, "name-of-the-pool", key).unwrap(),
            None => Pool::create(&path, "name-of-the-pool").unwrap(),
        };
        let id = fill(&pool, &path.join("staging"));
        assert_eq!(pool.props().key, key.map(|key| key.canonicalize().unwrap().into()));
        drop(pool);
        let pool = Pool::open(&path, SHARED).unwrap();
        let lease: File = pool.lease(&[id], b"note-of-a-lease").unwrap().into();
        drop(pool);
        let leased = Leased::open(&lease).unwrap();
        assert_eq!(leased.note(), b"note-of-a-lease");
        let mut read = AlignedBuf::zeroed(page.len());
        leased.into_mblocks()[&id].read(0, &mut read).unwrap();
        assert!(read[..] == page);
        let files = files(&path);
        assert!(files.keys().any(|name| name.to_string_lossy().contains("lease-")));
        needles.map(|needle| files.values().any(|bytes| bytes.windows(needle.len()).any(|part| part == needle)))
    };
    assert_eq!(found(None, "plain"), [true; 6], "what this test looks for");
    assert_eq!(found(Some(key.path()), "sealed"), [false; 6]);
}

#[test]
fn only_the_right_key_opens_a_pool_and_nothing_is_written_without_it() {
    let (dir, right, wrong) = (tempfile::tempdir().unwrap(), key(1), key(2));
    let path = dir.path().join("pool");
    let pool = Pool::create_encrypted(&path, "test", right.path()).unwrap();
    let id = fill(&pool, &dir.path().join("staging"));
    drop(pool);
    let lease: File = Pool::open(&path, SHARED).unwrap().lease(&[id], b"").unwrap().into();
    let before = files(dir.path());
    let refused = |expected: &[&str]| {
        let errors = [
            Pool::open(&path, OpenOptions::default()).map(drop),
            Pool::open(&path, SHARED).map(drop),
            Pool::open(&path, OpenOptions { salvage: true, ..SHARED }).map(drop),
            Pool::rebuild(&path, Rebuild::default()).map(drop),
            Leased::open(&lease).map(drop),
        ];
        for error in errors.map(|result| result.unwrap_err().to_string()) {
            assert!(expected.iter().all(|part| error.contains(part)), "{error}");
        }
        assert!(files(dir.path()) == before, "files were written");
    };
    let name = right.path().display().to_string();
    let secret = fs::read(right.path()).unwrap();
    fs::copy(wrong.path(), right.path()).unwrap();
    refused(&["is not the key of", &name, "pageone pool key POOL --key-file FILE"]);
    fs::write(right.path(), &secret[..31]).unwrap();
    refused(&["cannot be a pool's key: a key is a file of 32 random bytes", &name]);
    fs::write(right.path(), [&secret[..], &[0]].concat()).unwrap();
    refused(&["a key is a file of 32 random bytes"]);
    fs::write(right.path(), &secret).unwrap();
    fs::set_permissions(right.path(), fs::Permissions::from_mode(0o604)).unwrap();
    refused(&["every user of this host may use it", "chmod 600"]);
    fs::set_permissions(right.path(), fs::Permissions::from_mode(0o600)).unwrap();
    let away = dir.path().with_extension("away");
    fs::rename(right.path(), &away).unwrap();
    refused(&["is encrypted, and its key", &name, "cannot be read", "No such file"]);
    // A pipe is not waited for.
    rustix::fs::mknodat(rustix::fs::CWD, right.path(), rustix::fs::FileType::Fifo, 0o600.into(), 0).unwrap();
    refused(&["a key is a file of 32 random bytes"]);
    fs::remove_file(right.path()).unwrap();
    fs::rename(&away, right.path()).unwrap();
    drop(lease);
    assert_eq!(Pool::open(&path, OpenOptions::default()).unwrap().mblocks()[0].id, id);
    // No pool is made with what is no key.
    let error = Pool::create_encrypted(&dir.path().join("other"), "test", dir.path()).unwrap_err();
    assert!(error.to_string().contains("a key is a file of 32"), "{error}");
    assert!(!dir.path().join("other").exists());
}

#[test]
fn a_key_is_moved_or_replaced_and_the_one_before_opens_nothing() {
    let (dir, first, second) = (tempfile::tempdir().unwrap(), key(1), key(2));
    let path = dir.path().join("pool");
    drop(Pool::create_encrypted(&path, "test", first.path()).unwrap());
    let opens =
        || Pool::open(&path, OpenOptions::default()).map(|pool| pool.check(crate::Depth::Data).unwrap().findings);
    // Moved: where it was is nothing.
    let moved = dir.path().join("moved");
    fs::rename(first.path(), &moved).unwrap();
    assert!(matches!(opens(), Err(PoolError::NoKey { .. })));
    let other = Pool::set_key(&path, second.path());
    assert!(matches!(other, Err(PoolError::NoKey { .. })), "another key needs the one before: {other:?}");
    Pool::set_key(&path, moved.as_path()).unwrap();
    assert_eq!(opens().unwrap(), []);
    // Replaced.
    let pool = Pool::open(&path, SHARED).unwrap();
    assert!(matches!(Pool::set_key(&path, second.path()), Err(PoolError::Busy(_))));
    drop(pool);
    Pool::set_key(&path, second.path()).unwrap();
    assert_eq!(opens().unwrap(), []);
    fs::copy(&moved, second.path()).unwrap();
    assert!(matches!(opens(), Err(PoolError::WrongKey { .. })), "{:?}", opens());
    // A pool without a key has none to be changed.
    let plain = dir.path().join("plain");
    drop(Pool::create(&plain, "plain").unwrap());
    let error = Pool::set_key(&plain, moved.as_path()).unwrap_err();
    assert!(matches!(error, PoolError::NotEncrypted(_)), "{error}");
    assert!(error.to_string().contains("is not encrypted"), "{error}");
}

/// Changes where the key of a pool is, cut short at each operation: one key or the other opens it,
/// and the next opening puts both files right.
pub(super) fn cut_key_change(sim: &Sim, place: &KeyPlace, served_by: impl Fn(&Pool) -> bool) {
    let set = |sim: &Sim| Pool::set_key_on(&sim.clone(), Path::new(PATH), place.clone());
    let whole = sim.copy();
    set(&whole).unwrap();
    for at in 0..whole.operations() {
        for fault in [Fault::Error, Fault::Torn, Fault::PowerLoss] {
            let (cut, what) = (sim.copy(), format!("{place}: {fault:?} at {at}"));
            cut.plan(at, fault);
            let _ = set(&cut);
            let crashed = cut.crash(&mut Random::new(at));
            let pool = open(&crashed, PATH, OpenOptions::default()).unwrap_or_else(|e| panic!("{what}: {e}"));
            assert!(served_by(&pool), "{what}");
            drop(pool);
            let again = open(&crashed, PATH, OpenOptions::default()).unwrap();
            assert_eq!(again.check(crate::Depth::Data).unwrap().findings, [], "{what}: it was put right");
            let [one, two] = NAMES
                .map(|name| crashed.bytes(Path::new(PATH)).into_iter().find(|(found, _)| found == name).unwrap().1);
            assert!(one == two, "{what}: both files say the same");
        }
    }
}

#[test]
fn a_change_of_the_key_that_is_cut_short_leaves_the_one_or_the_other() {
    let (first, second) = (key(1), key(2));
    let (sim, blocks, log) = make_with(true, Some(first.path()));
    cut_key_change(&sim, &second.path().into(), |pool| served(pool, &blocks, log) == ALL);
}

#[test]
fn a_wrapped_key_that_was_tampered_with_is_refused_or_wraps_the_same_key() {
    let key = key(1);
    let (sim, blocks, log) = make_with(true, Some(key.path()));
    let block = sim.bytes(Path::new(PATH)).into_iter().find(|(name, _)| name == NAMES[0]).unwrap().1;
    let mut opened = 0;
    for at in (0..200).chain(BLOCK - 20..BLOCK - 4) {
        let mut bytes = block[..BLOCK - 4].to_vec();
        bytes[at] ^= 0x40;
        bytes.extend(crc32c::crc32c(&bytes).to_le_bytes());
        let bad = sim.copy();
        let medium = bad.storage().directory(Path::new(PATH)).unwrap();
        for name in NAMES {
            medium.open(name, Open::default()).unwrap().write_at(&bytes, 0).unwrap();
        }
        drop(medium);
        match open(&bad, PATH, OpenOptions::default()) {
            // The serial number means nothing when both files have the same.
            Ok(pool) => {
                assert!((32..40).contains(&at), "byte {at}");
                assert_eq!(served(&pool, &blocks, log), ALL);
                opened += 1;
            }
            Err(PoolError::KeyLost(_) | PoolError::WrongKey { .. } | PoolError::NoKey { .. }) => {}
            Err(PoolError::Version { .. }) if (8..12).contains(&at) => {}
            Err(e) => panic!("byte {at}: {e:?}"),
        }
    }
    assert_eq!(opened, 8);
    // One that is damaged is written anew from the other.
    for name in NAMES {
        let bad = sim.copy();
        assert!(bad.damage(Path::new(PATH), name, 90, 1, Wrong::Flipped));
        let pool = open(&bad, PATH, OpenOptions::default()).unwrap();
        let is_key =
            |f: &Finding| matches!(f, Finding::Damage { damage, repaired: true } if damage.object == Object::Key);
        assert!(pool.findings().iter().any(is_key), "{:?}", pool.findings());
        drop(pool);
        assert_eq!(open(&bad, PATH, OpenOptions::default()).unwrap().findings(), []);
    }
    // Without both nobody reads the pool, and the error says so.
    NAMES.iter().for_each(|name| sim.lose(Path::new(PATH), name));
    let error = open(&sim, PATH, OpenOptions::default()).unwrap_err();
    assert!(
        error.to_string().contains("neither of its files `wrapped-key` and `wrapped-key.copy` is what was written"),
        "{error}"
    );
}

#[test]
fn a_pool_is_removed_without_its_key_too_and_the_wrapped_key_goes_first() {
    let key = key(1);
    let (sim, ..) = make_with(true, Some(key.path()));
    let lost = sim.copy();
    Pool::destroy_on(sim.storage(), Path::new(PATH)).unwrap();
    for path in [PATH, STAGING] {
        assert!(sim.storage().directory(Path::new(path)).is_err(), "{path} is left");
    }
    drop(key);
    let begin = lost.operations();
    Pool::destroy_on(lost.copy().storage(), Path::new(PATH)).unwrap();
    // When one file is gone, no key is left.
    lost.plan(begin + 6, Fault::PowerLoss);
    assert!(Pool::destroy_on(lost.storage(), Path::new(PATH)).is_err());
    let left = lost.bytes(Path::new(PATH));
    assert!(left.iter().all(|(name, bytes)| !name.starts_with("wrapped-key") || bytes.iter().all(|&byte| byte == 0)));
    assert!(left.iter().any(|(name, _)| name == "data"));
}

/// A sealed file beside a plain one: whatever is done to both, they read the same.
fn alike(storage: &dyn Storage, path: &Path, seed: u64) {
    let (medium, key) = (storage.make_directory(path).unwrap(), key(1));
    let keys = Arc::new(Keys::create(&*medium, [7; 16], &UserKey::read(&key.path().into()).unwrap()).unwrap());
    let how = Open { create: true, ..Open::default() };
    let plain = medium.open("plain", how).unwrap();
    let sealed = over(medium.clone(), Some(&keys), MediaClass::Staging).open("sealed", how).unwrap();
    let both = |act: &dyn Fn(&dyn MediumFile) -> Result<(), std::io::Error>| {
        [&plain, &sealed].map(|file| act(&**file).is_ok())
    };
    let mut random = Random::new(seed);
    for step in 0..400 {
        let offset = random.below(60_000);
        let sector = offset / 512 * 512;
        let end = (offset + random.below(20_000)).next_multiple_of(512);
        let len = (end - offset) as usize;
        let done = match random.below(9) {
            0..2 => both(&|file| file.write_at(&content(step, len), offset)),
            2 => {
                let (at, parts) = (offset / 4096 * 4096, content(step, 1 + random.below(30) as usize * BLOCK));
                let parts: Vec<&[u8]> = parts.chunks_exact(2 * BLOCK).collect();
                both(&|file| {
                    let mut seen = Vec::new();
                    file.write_while(&parts, at, &mut |part| seen.extend_from_slice(part))?;
                    assert!(seen == parts.concat(), "each part is given once, in order");
                    Ok(())
                })
            }
            3 => both(&|file| file.punch(sector, len as u64 / 512 * 512)),
            4 => both(&|file| file.allocate(offset, len as u64)),
            5 if step % 8 == 0 => both(&|file| file.set_len(sector)),
            6 => both(&|file| file.sync()),
            _ => [true; 2],
        };
        // Only one that begins behind the end of the file can differ: then both fail or none.
        assert_eq!(done[0], done[1], "step {step}");
        assert_eq!(plain.len().unwrap(), sealed.len().unwrap(), "step {step}");
        let (at, len) = (random.below(70_000), random.below(9_000) as usize);
        let read = [&plain, &sealed].map(|file| {
            let mut bytes = vec![0; len];
            file.read_at(&mut bytes, at).ok().map(|()| bytes)
        });
        assert!(read[0] == read[1], "step {step}: {len} bytes at {at}");
    }
    let blocks = plain.len().unwrap() as usize / BLOCK;
    let read = [&plain, &sealed].map(|file| {
        let (mut whole, mut landed) = (AlignedBuf::zeroed(blocks * BLOCK), vec![0; blocks * BLOCK]);
        file.read_while(&mut whole, 0, &mut |at, part| landed[at..at + part.len()].copy_from_slice(part)).unwrap();
        assert!(whole[..] == landed);
        let mut scattered = AlignedBuf::zeroed(blocks * BLOCK);
        let mut pieces: Vec<ReadPiece<'_>> = (0u64..)
            .step_by(BLOCK)
            .zip(scattered.chunks_exact_mut(BLOCK))
            .map(|(offset, into)| ReadPiece { offset, into })
            .collect();
        file.read_many(&mut pieces).unwrap();
        assert!(scattered[..] == landed);
        landed
    });
    assert!(read[0] == read[1]);
}

#[test]
fn a_file_reads_the_same_as_without_encryption_holes_and_parts_of_sectors_too() {
    let dir = tempfile::tempdir().unwrap();
    for seed in 1..9 {
        alike(&Sim::default(), Path::new("/medium"), seed);
        alike(&Disk, &dir.path().join(seed.to_string()), seed);
    }
}

#[test]
fn each_file_and_class_has_keys_of_its_own() {
    let (sim, key) = (Sim::default(), key(1));
    let medium = sim.storage().make_directory(Path::new("/medium")).unwrap();
    let keys = Arc::new(Keys::create(&*medium, [7; 16], &UserKey::read(&key.path().into()).unwrap()).unwrap());
    let mut seen = std::collections::BTreeSet::new();
    for (class, name) in
        [(MediaClass::Capacity, "data"), (MediaClass::Staging, "data"), (MediaClass::Capacity, "data.copy")]
    {
        let mut bytes = [9; BLOCK];
        keys.of_file(class, name).encrypt(&mut bytes, 0);
        bytes.chunks(512).for_each(|sector| assert!(seen.insert(sector.to_vec()), "two sectors are the same"));
    }
}
