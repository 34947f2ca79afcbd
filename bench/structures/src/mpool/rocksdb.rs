//! RocksDB as a rival, through its C interface (`rocksdb/c.h`): Debian's `librocksdb-dev`.

#![allow(unsafe_code)] // A C library.

use std::ffi::{CString, c_char, c_int, c_uchar, c_void};
use std::path::Path;
use std::ptr::null_mut;

use anyhow::{Result, bail};

use super::engine::{RECORD, Store, fill_record, use_record};

type Ptr = *mut c_void;

#[link(name = "rocksdb")]
unsafe extern "C" {
    fn rocksdb_options_create() -> Ptr;
    fn rocksdb_options_destroy(options: Ptr);
    fn rocksdb_options_set_create_if_missing(options: Ptr, on: c_uchar);
    fn rocksdb_options_set_compression(options: Ptr, kind: c_int);
    fn rocksdb_options_set_write_buffer_size(options: Ptr, bytes: usize);
    fn rocksdb_options_set_use_direct_reads(options: Ptr, on: c_uchar);
    fn rocksdb_options_set_use_direct_io_for_flush_and_compaction(options: Ptr, on: c_uchar);
    fn rocksdb_options_set_block_based_table_factory(options: Ptr, table: Ptr);
    fn rocksdb_block_based_options_create() -> Ptr;
    fn rocksdb_block_based_options_set_block_cache(table: Ptr, cache: Ptr);
    fn rocksdb_block_based_options_set_filter_policy(table: Ptr, filter: Ptr);
    fn rocksdb_filterpolicy_create_bloom(bits: f64) -> Ptr;
    fn rocksdb_cache_create_lru(bytes: usize) -> Ptr;
    fn rocksdb_open(options: Ptr, path: *const c_char, error: *mut *mut c_char) -> Ptr;
    fn rocksdb_close(db: Ptr);
    fn rocksdb_writeoptions_create() -> Ptr;
    fn rocksdb_readoptions_create() -> Ptr;
    fn rocksdb_put(
        db: Ptr,
        how: Ptr,
        key: *const u8,
        key_len: usize,
        value: *const u8,
        len: usize,
        error: *mut *mut c_char,
    );
    fn rocksdb_get(
        db: Ptr,
        how: Ptr,
        key: *const u8,
        key_len: usize,
        len: *mut usize,
        error: *mut *mut c_char,
    ) -> *mut u8;
    fn rocksdb_compact_range(db: Ptr, start: *const u8, start_len: usize, end: *const u8, end_len: usize);
    fn rocksdb_free(memory: Ptr);
}

/// An open database. What it holds is freed with the process.
pub(super) struct Rocks {
    db: Ptr,
    reading: Ptr,
    writing: Ptr,
}

// SAFETY: "a DB is safe for concurrent access from multiple threads without any external
// synchronization" (its manual).
unsafe impl Send for Rocks {}
// SAFETY: RocksDB allows calls from several threads; the options are only read.
unsafe impl Sync for Rocks {}

fn check(error: *mut c_char) -> Result<()> {
    if error.is_null() {
        return Ok(());
    }
    // SAFETY: errors are strings that end with a zero.
    let text = unsafe { std::ffi::CStr::from_ptr(error) }.to_string_lossy().into_owned();
    bail!("rocksdb: {text}")
}

impl Rocks {
    /// `rocksdb` has its defaults, but no compression, as no other subject compresses.
    /// `rocksdb-tuned` reads directly, with a block cache of half the memory limit, write
    /// buffers of a sixteenth (the default of 64 MiB does not fit) and bloom filters.
    pub(super) fn open(path: &Path, subject: &str, limit: usize) -> Result<Self> {
        let name = CString::new(path.as_os_str().as_encoded_bytes())?;
        let mut error = null_mut();
        // SAFETY: each call gets the pointer that its constructor returned; the strings outlive the
        // calls.
        let this = unsafe {
            let options = rocksdb_options_create();
            rocksdb_options_set_create_if_missing(options, 1);
            rocksdb_options_set_compression(options, 0);
            if subject == "rocksdb-tuned" {
                let table = rocksdb_block_based_options_create();
                rocksdb_block_based_options_set_block_cache(table, rocksdb_cache_create_lru(limit / 2));
                rocksdb_block_based_options_set_filter_policy(table, rocksdb_filterpolicy_create_bloom(10.0));
                rocksdb_options_set_block_based_table_factory(options, table);
                rocksdb_options_set_write_buffer_size(options, limit / 16);
                rocksdb_options_set_use_direct_reads(options, 1);
                rocksdb_options_set_use_direct_io_for_flush_and_compaction(options, 1);
            }
            let db = rocksdb_open(options, name.as_ptr(), &mut error);
            rocksdb_options_destroy(options);
            Self { db, reading: rocksdb_readoptions_create(), writing: rocksdb_writeoptions_create() }
        };
        check(error)?;
        Ok(this)
    }

    /// Writes all records, sorted, and compacts.
    pub(super) fn load(path: &Path, subject: &str, keys: &[u64], limit: usize) -> Result<()> {
        let this = Self::open(path, subject, limit)?;
        keys.iter().try_for_each(|&key| this.update(key, 0))?;
        // SAFETY: no bounds: all of it.
        unsafe { rocksdb_compact_range(this.db, std::ptr::null(), 0, std::ptr::null(), 0) };
        Ok(())
    }
}

impl Store for Rocks {
    fn read(&self, key: u64) -> Result<u64> {
        let (name, mut len, mut error) = (key.to_be_bytes(), 0, null_mut());
        // SAFETY: the key outlives the call.
        let value = unsafe { rocksdb_get(self.db, self.reading, name.as_ptr(), 8, &mut len, &mut error) };
        check(error)?;
        anyhow::ensure!(!value.is_null(), "key {key:#x} is not there");
        // SAFETY: it gave `len` bytes, which are ours until they are freed.
        let result = use_record(unsafe { std::slice::from_raw_parts(value, len) }, key);
        // SAFETY: as its manual asks.
        unsafe { rocksdb_free(value.cast()) };
        result
    }

    fn update(&self, key: u64, version: u64) -> Result<()> {
        let (name, mut record, mut error) = (key.to_be_bytes(), [0; RECORD], null_mut());
        fill_record(&mut record, key, version);
        // SAFETY: key and value outlive the call, which copies them.
        unsafe { rocksdb_put(self.db, self.writing, name.as_ptr(), 8, record.as_ptr(), RECORD, &mut error) };
        check(error)
    }

    fn vmas(&self) -> usize {
        super::files::mappings(".sst")
    }
}

impl Drop for Rocks {
    fn drop(&mut self) {
        // SAFETY: `self` is the last user of these pointers.
        unsafe { rocksdb_close(self.db) };
    }
}
