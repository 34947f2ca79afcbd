//! A pool whose files are damaged: it is opened, read and checked.
//!
//! The input says where: 8 bytes a hit: the file (1), the way (1: cut there; the file's end written
//! there, whole frames among it; two bytes changed), an offset (4), a value (2).

#![no_main]

use std::fs;
use std::io::IoSlice;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::sync::OnceLock;

use mpool::{Allocation, MediaClass, Pool};

struct Whole {
    files: Vec<(PathBuf, Vec<u8>)>,
    directory: tempfile::TempDir,
}

fn directory() -> tempfile::TempDir {
    tempfile::tempdir_in("/dev/shm").or_else(|_| tempfile::tempdir()).expect("a directory")
}

/// A pool with some of everything, and the bytes of its files.
fn whole() -> &'static Whole {
    static WHOLE: OnceLock<Whole> = OnceLock::new();
    WHOLE.get_or_init(|| {
        let directory = directory();
        {
            let pool = Pool::create(directory.path(), "fuzzed").expect("a pool");
            for len in [1, 5000, 20_000] {
                let bytes = vec![len as u8; len];
                let mut writer = pool.mblock_alloc(Allocation { capacity: 1 << 16, ..Allocation::default() }).expect("an mblock");
                writer.write(&[IoSlice::new(&bytes)]).expect("written");
                writer.commit().expect("committed");
            }
            let log = pool.mlog_create(MediaClass::Capacity, 1 << 16).expect("an mlog");
            let mut log = pool.mlog_open(log).expect("open");
            (0..20u8).for_each(|i| log.append(&vec![i; usize::from(i) * 9], i % 3 == 0).expect("appended"));
            let mut mdc = pool.mdc_open(mpool::ROOT_MDC).expect("the root MDC");
            mdc.append(&[b"one", b"two"], true).expect("appended");
        }
        let files = fs::read_dir(directory.path()).expect("files").flatten();
        let mut files: Vec<_> = files.map(|file| (file.path(), fs::read(file.path()).expect("a file"))).collect();
        files.sort();
        Whole { files, directory }
    })
}

fn restore(file: &Path, bytes: &[u8]) {
    fs::write(file, bytes).expect("written");
}

libfuzzer_sys::fuzz_target!(|input: &[u8]| {
    let whole = whole();
    for hit in input.chunks_exact(8).take(8) {
        let (path, bytes) = &whole.files[usize::from(hit[0]) % whole.files.len()];
        let at = u32::from_le_bytes([hit[2], hit[3], hit[4], hit[5]]) as usize % bytes.len().max(1);
        let file = fs::OpenOptions::new().write(true).open(path).expect("open");
        match hit[1] % 4 {
            0 => file.set_len(at as u64).expect("cut"),
            1 => file.write_all_at(&bytes[bytes.len() - at.min(bytes.len())..], at as u64 / 2).expect("moved"),
            _ => file.write_all_at(&hit[6..8], at as u64).expect("hit"),
        }
    }
    mpool::fuzzing::use_pool(whole.directory.path());
    whole.files.iter().for_each(|(path, bytes)| restore(path, bytes));
});
