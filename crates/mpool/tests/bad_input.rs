//! What may be wrong with the files of a pool, and where they lie: the pool works and says what it
//! did, or an error names the object and what to do.

#![allow(clippy::print_stdout, clippy::print_stderr, reason = "prints for who runs it")]
#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::fs;
use std::io::IoSlice;
use std::path::{Path, PathBuf};
use std::process::Command;

use mpool::{Access, Allocation, Fallback, MediaClass, ObjectError, OpenOptions, Pool, PoolError, Rebuild};

const DATA: &[u8] = b"what was stored";

fn write(pool: &Pool) -> Result<u64, mpool::ObjectError> {
    let mut writer = pool.mblock_alloc(Allocation { capacity: 4096, ..Allocation::default() })?;
    writer.write(&[IoSlice::new(DATA)])?;
    writer.commit()
}

/// A closed pool with an mblock and an mlog.
fn make(dir: &Path, name: &str) -> (PathBuf, u64) {
    let path = dir.join(name);
    let pool = Pool::create(&path, name).unwrap();
    let id = write(&pool).unwrap();
    let log = pool.mlog_create(MediaClass::Capacity, 1 << 20).unwrap();
    pool.mlog_open(log).unwrap().append(b"a record", true).unwrap();
    drop(pool);
    (path, id)
}

fn open(path: &Path) -> Result<Pool, PoolError> {
    Pool::open(path, OpenOptions::default())
}

fn text<T: std::fmt::Debug>(result: Result<T, PoolError>) -> String {
    result.unwrap_err().to_string()
}

fn assert_says(text: &str, parts: &[&str]) {
    assert!(parts.iter().all(|part| text.contains(part)), "{text:?} says not all of {parts:?}");
}

fn works(path: &Path, id: u64, what: &str) -> usize {
    let pool = open(path).unwrap_or_else(|e| panic!("{what}: {e}"));
    let mut bytes = [0; DATA.len()];
    pool.mblock(id).and_then(|mblock| mblock.read(0, &mut bytes)).unwrap_or_else(|e| panic!("{what}: {e}"));
    assert_eq!(bytes, DATA, "{what}");
    pool.check(mpool::Depth::Data).unwrap().findings.len()
}

#[test]
fn any_file_may_be_missing_or_empty() {
    let dir = tempfile::tempdir().unwrap();
    let (path, _) = make(dir.path(), "names");
    let names: Vec<String> =
        fs::read_dir(&path).unwrap().map(|e| e.unwrap().file_name().into_string().unwrap()).collect();
    for (i, name) in names.iter().enumerate() {
        for empty in [false, true] {
            let what = format!("{name}, {}", if empty { "empty" } else { "missing" });
            let (path, id) = make(dir.path(), &format!("{i}{empty}"));
            // The names of objects are the same in each pool.
            let file = path.join(name);
            if empty {
                fs::write(&file, b"").unwrap()
            } else {
                fs::remove_file(&file).unwrap()
            }
            match (name.as_str(), empty) {
                ("data", false) => assert_says(&text(open(&path)), &["data", "restore"]),
                ("data", true) => {
                    let report = open(&path).unwrap().check(mpool::Depth::Data).unwrap();
                    let said: String = report.findings.iter().map(|finding| format!("{finding}\n")).collect();
                    assert_says(&said, &[&format!("mblock {id:#x}"), "the data file ends before it does"]);
                    assert!(!report.is_clean());
                }
                _ => {
                    let said = works(&path, id, &what);
                    assert!(said > 0, "{what}: nothing was said");
                    assert_eq!(works(&path, id, &what), 0, "{what}: it was put right");
                }
            }
        }
    }
}

#[test]
fn both_superblocks_lost_is_said_with_the_remedy_and_rebuilding_helps() {
    let dir = tempfile::tempdir().unwrap();
    let (path, id) = make(dir.path(), "lost");
    ["superblock", "superblock.copy"].iter().for_each(|name| fs::write(path.join(name), b"").unwrap());
    assert_says(&text(open(&path)), &["holds no pool", "pool rebuild"]);
    assert_says(&text(Pool::create(&path, "over")), &["no superblock", "move it away"]);
    let rebuilt = Pool::rebuild(&path, Rebuild::default()).unwrap();
    assert_eq!((rebuilt.mblocks, rebuilt.superblocks), (1, vec![MediaClass::Capacity]));
    works(&path, id, "rebuilt");
}

#[test]
fn a_class_whose_record_is_lost_is_not_emptied() {
    let dir = tempfile::tempdir().unwrap();
    let (path, _) = make(dir.path(), "lost");
    let staging = dir.path().join("staging");
    let pool = open(&path).unwrap();
    pool.add_class(MediaClass::Staging, &staging).unwrap();
    let mut writer =
        pool.mblock_alloc(Allocation { class: MediaClass::Staging, capacity: 4096, ..Allocation::default() }).unwrap();
    writer.write(&[IoSlice::new(DATA)]).unwrap();
    writer.commit().unwrap();
    drop(pool);
    // All records are gone: the capacity class, too, is known only by its directory.
    for entry in fs::read_dir(&path).unwrap() {
        let entry = entry.unwrap();
        if entry.file_name().to_str().unwrap().starts_with("meta-") {
            fs::remove_file(entry.path()).unwrap();
        }
    }
    Pool::rebuild(&path, Rebuild::default()).unwrap();
    let before = fs::read(staging.join("data")).unwrap();
    assert!(before.windows(DATA.len()).any(|bytes| bytes == DATA));
    let pool = open(&path).unwrap();
    assert_says(&text(pool.add_class(MediaClass::Staging, &staging)), &["staging", "already", "pool rebuild"]);
    assert_eq!(fs::read(staging.join("data")).unwrap(), before);
    drop(pool);
    Pool::rebuild(&path, Rebuild { staging: Some(staging), ..Rebuild::default() }).unwrap();
    drop(open(&path).unwrap());
}

#[test]
fn files_of_another_pool_or_format_are_refused() {
    let dir = tempfile::tempdir().unwrap();
    let (path, _) = make(dir.path(), "one");
    // Format 1, one of the future, and that of an encrypted pool, which this is not.
    for (version, says) in [
        (1u32, ["format version 1", "use the program that made it"]),
        (4, ["format version 4, and this program knows versions 2 and 3", "use the program that made it"]),
        (3, ["is encrypted", "`wrapped-key.copy` is what was written"]),
    ] {
        for name in ["superblock", "superblock.copy"] {
            let mut block = fs::read(path.join(name)).unwrap();
            block[8..12].copy_from_slice(&version.to_le_bytes());
            let crc = crc32c::crc32c(&block[..4092]);
            block[4092..].copy_from_slice(&crc.to_le_bytes());
            fs::write(path.join(name), block).unwrap();
        }
        assert_says(&text(open(&path)), &["one", says[0], says[1]]);
        assert_says(&text(Pool::rebuild(&path, Rebuild::default())), &says[..1]);
    }
    // The staging class of another pool.
    let (ours, _) = make(dir.path(), "ours");
    let (theirs, _) = make(dir.path(), "theirs");
    let (a, b) = (dir.path().join("a"), dir.path().join("b"));
    let pool = open(&ours).unwrap();
    pool.add_class(MediaClass::Staging, &a).unwrap();
    let staging = Allocation { class: MediaClass::Staging, capacity: 4096, ..Allocation::default() };
    pool.mblock_alloc(staging).unwrap().commit().unwrap();
    drop(pool);
    open(&theirs).unwrap().add_class(MediaClass::Staging, &b).unwrap();
    fs::rename(&a, dir.path().join("c")).unwrap();
    fs::rename(&b, &a).unwrap();
    assert_says(&text(open(&ours)), &["class staging is missing", "/a", "mount it there"]);
}

#[test]
fn two_programs_at_once_are_told() {
    let dir = tempfile::tempdir().unwrap();
    let (path, _) = make(dir.path(), "busy");
    let _one = open(&path).unwrap();
    assert_says(&text(open(&path)), &["busy", "in use"]);
    assert_says(&text(Pool::rebuild(&path, Rebuild::default())), &["busy", "in use"]);
}

/// A file system of its own; unmounted at the end.
struct Mount(PathBuf);

impl Mount {
    fn new(dir: &Path, options: &str) -> Option<Self> {
        Self::of_type(dir, "tmpfs", options)
    }

    fn of_type(dir: &Path, kind: &str, options: &str) -> Option<Self> {
        let path = dir.join("mount");
        fs::create_dir_all(&path).unwrap();
        let status = Command::new("mount").args(["-t", kind, "-o", options, kind]).arg(&path).status();
        if status.is_ok_and(|status| status.success()) {
            return Some(Self(path));
        }
        println!("SKIPPED: a file system cannot be mounted here (needs root)");
        None
    }
}

impl Drop for Mount {
    fn drop(&mut self) {
        let _ = Command::new("umount").arg(&self.0).status();
    }
}

#[test]
fn a_read_only_file_system_can_be_read() {
    let dir = tempfile::tempdir().unwrap();
    let Some(mount) = Mount::new(dir.path(), "size=64m") else { return };
    let (path, id) = make(&mount.0, "pool");
    let status = Command::new("mount").args(["-o", "remount,ro"]).arg(&mount.0).status().unwrap();
    assert!(status.success());
    assert_says(&text(open(&path)), &["pool", "Read-only file system", "--read-only"]);
    let pool = Pool::open(&path, OpenOptions { access: Access::Shared, ..OpenOptions::default() }).unwrap();
    pool.mblock(id).unwrap().read(0, &mut [0; 4]).unwrap();
}

#[test]
fn a_full_medium_refuses_and_loses_nothing() {
    let dir = tempfile::tempdir().unwrap();
    let Some(mount) = Mount::new(dir.path(), "size=6m") else { return };
    let (path, id) = make(&mount.0, "pool");
    let pool = open(&path).unwrap();
    let mut more = Vec::new();
    let refused = loop {
        match write(&pool) {
            Ok(id) => more.push(id),
            Err(e) => break e.to_string(),
        }
    };
    assert_says(&refused, &["no space for", "class capacity"]);
    pool.mblock_delete(&more).unwrap();
    write(&pool).unwrap();
    drop(pool);
    works(&path, id, "after a full medium");
    drop(mount);
}

/// `ramfs` can neither punch holes nor do direct I/O.
#[test]
fn a_file_system_without_punching_or_direct_io_works_and_says_so() {
    let dir = tempfile::tempdir().unwrap();
    let Some(mount) = Mount::of_type(dir.path(), "ramfs", "mode=700") else { return };
    let (path, id) = make(&mount.0, "pool");
    let pool = open(&path).unwrap();
    let class = |pool: &Pool| pool.usage().unwrap().classes.into_iter().find(|c| c.present).unwrap();
    assert!(!class(&pool).direct_io && !class(&pool).gives_back, "{:?}", class(&pool));
    // Space is used again, and what lay there before is not taken for anything.
    let mut ids: Vec<u64> = (0..8).map(|_| write(&pool).unwrap()).collect();
    let held = fs::metadata(path.join("data")).unwrap().len();
    for _ in 0..20 {
        pool.mblock_delete(&ids.split_off(4)).unwrap();
        ids.extend((0..4).map(|_| write(&pool).unwrap()));
    }
    assert_eq!(fs::metadata(path.join("data")).unwrap().len(), held);
    drop(pool);
    assert_eq!(works(&path, id, "without punching"), 0);
    drop(mount);
    // Elsewhere neither is said.
    let (path, _) = make(dir.path(), "other");
    assert!(class(&open(&path).unwrap()).gives_back);
}

/// Mode bits do not hold root up; the attribute for files that must not be changed does.
#[test]
fn a_file_that_must_not_be_changed_is_named() {
    let dir = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let (path, id) = make(dir.path(), "fixed");
    let chattr = |how: &str, name: &str| {
        Command::new("chattr").arg(how).arg(path.join(name)).status().is_ok_and(|status| status.success())
    };
    let names = [
        ("data", "fixed/data"),
        ("superblock", "the superblock"),
        ("superblock.copy", "the superblock"),
        ("meta-0", "metadata log 0"),
        ("meta-1.copy", "metadata log 1"),
    ];
    for (name, said) in names {
        if !chattr("+i", name) {
            println!("SKIPPED: files cannot be made immutable here (needs root, and ext4, XFS or btrfs)");
            return;
        }
        let result = open(&path);
        let read = Pool::open(&path, OpenOptions { access: Access::Shared, ..OpenOptions::default() })
            .map(|pool| pool.mblock(id).unwrap().read(0, &mut [0; 4]).unwrap());
        assert!(chattr("-i", name));
        read.unwrap_or_else(|e| panic!("{name}: {e}"));
        assert_says(&text(result), &["fixed", said, "not permitted", "--read-only"]);
        works(&path, id, name);
    }
}

#[test]
fn what_finds_no_room_is_told_of_a_full_class_and_not_of_one_that_the_pool_has_not() {
    let dir = tempfile::tempdir().unwrap();
    let pool = Pool::create(&dir.path().join("pool"), "full").unwrap();
    let wanted = Allocation { class: MediaClass::Staging, capacity: 1 << 60, fallback: Fallback::Capacity };
    let refused = pool.mblock_alloc(wanted).map(drop);
    assert!(matches!(refused, Err(ObjectError::Full { class: MediaClass::Capacity, .. })), "{refused:?}");
}

/// A FIFO would be waited for, a link may name anybody's file, and a length is only a number.
#[test]
fn a_file_that_is_no_file_or_says_that_it_is_huge_is_refused_at_once() {
    let dir = tempfile::tempdir().unwrap();
    let (path, _) = make(dir.path(), "names");
    let names: Vec<String> =
        fs::read_dir(&path).unwrap().map(|e| e.unwrap().file_name().into_string().unwrap()).collect();
    for (i, name) in names.iter().enumerate() {
        for is_link in [false, true] {
            let (path, _) = make(dir.path(), &format!("{i}{is_link}"));
            let (file, elsewhere) = (path.join(name), dir.path().join(format!("{i}{is_link}-elsewhere")));
            fs::rename(&file, &elsewhere).unwrap();
            let before = fs::read(&elsewhere).unwrap();
            if is_link {
                std::os::unix::fs::symlink(&elsewhere, &file).unwrap();
            } else {
                rustix::fs::mknodat(rustix::fs::CWD, &file, rustix::fs::FileType::Fifo, 0o600.into(), 0).unwrap();
            }
            let kind = if is_link { "it is a symbolic link" } else { "it is a FIFO" };
            // An mlog is opened when it is asked for; until then nobody looks at its files.
            match open(&path) {
                Err(error) => assert_says(&error.to_string(), &[kind, "regular file"]),
                Ok(pool) => {
                    let error = pool.mlogs().iter().find_map(|log| pool.mlog_open(log.id).err());
                    let error = error.or_else(|| pool.mdc_open(mpool::ROOT_MDC).err());
                    assert_says(&error.unwrap_or_else(|| panic!("{name} was opened")).to_string(), &[kind]);
                }
            }
            assert_eq!(fs::read(&elsewhere).unwrap(), before, "{name} was written through a link");
        }
    }
    let (path, _) = make(dir.path(), "lease");
    rustix::fs::mknodat(rustix::fs::CWD, path.join("lease-x"), rustix::fs::FileType::Fifo, 0o600.into(), 0).unwrap();
    assert_says(&text(open(&path)), &["reading the leases", "it is a FIFO"]);
    assert_says(&text(Pool::destroy(&path)), &["reading the leases", "it is a FIFO"]);
    for name in ["meta-0", "meta-0.copy"] {
        let (path, _) = make(dir.path(), &format!("huge{name}"));
        let file = fs::File::options().write(true).open(path.join(name)).unwrap();
        // Holes: the file takes nothing.
        file.set_len(1 << 43).unwrap();
        assert_says(&text(open(&path)), &["metadata log 0", "it says that it needs 8796093022208 bytes of memory"]);
    }
}
