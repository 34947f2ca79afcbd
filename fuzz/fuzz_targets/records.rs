//! A pool whose metadata say anything, in frames that are whole: it is opened, read, checked,
//! written and emptied.
//!
//! The input: for each record one byte, its length, and the record.

#![no_main]

use std::sync::OnceLock;

use mpool::{Allocation, MediaClass, Pool};

static DIRECTORY: OnceLock<tempfile::TempDir> = OnceLock::new();

libfuzzer_sys::fuzz_target!(|input: &[u8]| {
    let directory = DIRECTORY.get_or_init(|| {
        let directory = tempfile::tempdir_in("/dev/shm").or_else(|_| tempfile::tempdir()).expect("a directory");
        let pool = Pool::create(directory.path(), "fuzzed").expect("a pool");
        let mut writer = pool.mblock_alloc(Allocation { capacity: 5000, ..Allocation::default() }).expect("an mblock");
        writer.write(&[std::io::IoSlice::new(&[7; 5000])]).expect("written");
        writer.commit().expect("committed");
        pool.mlog_create(MediaClass::Capacity, 1 << 16).expect("an mlog");
        directory
    });
    let (mut rest, mut records) = (input, Vec::new());
    while let Some((&len, more)) = rest.split_first() {
        let (record, behind) = more.split_at(usize::from(len).min(more.len()));
        records.push(record);
        rest = behind;
    }
    mpool::fuzzing::write_metadata(directory.path(), &records);
    mpool::fuzzing::use_pool(directory.path());
});
