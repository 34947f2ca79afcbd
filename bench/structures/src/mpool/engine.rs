//! A small reader of sorted tables: enough of a storage engine for point reads and updates.
//!
//! 16 tables share the key space. A table is several blocks (mblocks, or files) of sorted records
//! of 1 KiB, four to a page; the first key of each page is kept in memory. Updates go to a log and
//! to a memtable; when that holds 4 MiB it is written as one more block, whose keys are kept in
//! memory and are looked up before the tables.

use std::collections::HashMap;
use std::fs::File;
use std::io::{IoSlice, Write};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError, RwLock};

use ::mpool::{AlignedBuf, Allocation, Mcache, McacheMap, MediaClass, Mlog, OpenOptions, Pool, Settings, Temperature};
use anyhow::{Context, Result, ensure};
use bench_common::random::mix;

use super::files::{Mapped, mappings_in};

/// Bytes of a record: 8 of key, the rest value.
pub(super) const RECORD: usize = 1024;
const PAGE: usize = 4096;
/// Tables.
pub(super) const TABLES: usize = 16;
/// Records of the memtable when it is written out.
const FLUSH: usize = 4096;

/// The data of the tables.
#[derive(Clone, Copy, Debug)]
pub(super) struct Shape {
    /// Blocks of each table.
    pub(super) blocks: usize,
    /// Bytes of a block.
    pub(super) block_bytes: usize,
}

impl Shape {
    pub(super) fn bytes(&self) -> usize {
        TABLES * self.blocks * self.block_bytes
    }

    pub(super) fn records(&self) -> usize {
        self.bytes() / RECORD
    }

    /// All keys, sorted.
    pub(super) fn keys(&self) -> Vec<u64> {
        let mut keys: Vec<u64> = (0..self.records() as u64).map(mix).collect();
        keys.sort_unstable();
        keys
    }

    pub(super) fn table_file(directory: &Path, block: usize) -> PathBuf {
        directory.join(format!("{block:04}.table"))
    }
}

/// A record whose value follows from the key and a version.
pub(super) fn fill_record(record: &mut [u8], key: u64, version: u64) {
    let mut word = mix(key ^ version);
    for chunk in record.chunks_exact_mut(8) {
        chunk.copy_from_slice(&word.to_le_bytes());
        word = word.wrapping_mul(0x9E37_79B9_7F4A_7C15).wrapping_add(1);
    }
    record[..8].copy_from_slice(&key.to_le_bytes());
}

/// Reads all of a record.
pub(super) fn use_record(record: &[u8], key: u64) -> Result<u64> {
    let (words, _) = record.as_chunks::<8>();
    ensure!(u64::from_le_bytes(words[0]) == key, "another record than that of key {key:#x}");
    Ok(words.iter().fold(0, |sum: u64, word| sum.wrapping_add(u64::from_le_bytes(*word))))
}

/// What is measured.
pub(super) trait Store: Send + Sync {
    /// Reads all of a key's value; gives a number that depends on it.
    fn read(&self, key: u64) -> Result<u64>;
    /// Gives the key another value.
    fn update(&self, key: u64, version: u64) -> Result<()>;
    /// Pages read from the medium so far, if it counts them.
    fn loaded(&self) -> Option<u64>;
    /// Mappings that show the data.
    fn vmas(&self) -> usize;
    /// Something to be told about the run.
    fn note(&self) -> String;
}

/// Where blocks come from and go to.
trait Blocks: Send + Sync {
    type Table: Send + Sync;
    /// Opens the blocks of a table, from number `first` on.
    fn open(&self, first: usize, count: usize) -> Result<Self::Table>;
    /// Writes one more block and opens it.
    fn write(&self, bytes: &[u8]) -> Result<Self::Table>;
    /// A page of a table.
    fn page<'a>(&self, table: &'a Self::Table, block: usize, page: usize) -> Result<&'a [u8]>;
    /// Appends to the log.
    fn log(&self, record: &[u8]) -> Result<()>;
    fn loaded(&self) -> Option<u64>;
    fn vmas(&self, table: &Self::Table) -> usize;
    fn note(&self) -> String;
}

struct Overlay<T> {
    keys: Vec<u64>,
    table: T,
}

type Memtable = HashMap<u64, Box<[u8]>>;

struct Tables<B: Blocks> {
    shape: Shape,
    blocks: B,
    /// The first key of each page of all tables.
    index: Vec<u64>,
    tables: Vec<B::Table>,
    memtable: RwLock<(Memtable, Option<Arc<Memtable>>)>,
    /// Newest first.
    overlays: RwLock<Vec<Arc<Overlay<B::Table>>>>,
    flushing: Mutex<()>,
}

impl<B: Blocks> Tables<B> {
    fn new(shape: Shape, blocks: B) -> Result<Self> {
        let index: Vec<u64> = shape.keys().chunks(PAGE / RECORD).map(|keys| keys[0]).collect();
        let tables = (0..TABLES).map(|t| blocks.open(t * shape.blocks, shape.blocks)).collect::<Result<_>>()?;
        let (memtable, overlays, flushing) = Default::default();
        Ok(Self { shape, blocks, index: index.into_boxed_slice().into_vec(), tables, memtable, overlays, flushing })
    }

    /// Writes the memtable out when it is large enough and no other thread does.
    fn flush(&self) -> Result<()> {
        let Ok(_flushing) = self.flushing.try_lock() else { return Ok(()) };
        let frozen = {
            let mut memtable = self.memtable.write().unwrap_or_else(PoisonError::into_inner);
            if memtable.0.len() < FLUSH {
                return Ok(());
            }
            let frozen = Arc::new(std::mem::take(&mut memtable.0));
            memtable.1 = Some(frozen.clone());
            frozen
        };
        let mut keys: Vec<u64> = frozen.keys().copied().collect();
        keys.sort_unstable();
        let mut bytes = AlignedBuf::zeroed(keys.len() * RECORD);
        for (record, key) in bytes.chunks_exact_mut(RECORD).zip(&keys) {
            record.copy_from_slice(&frozen[key]);
        }
        let table = self.blocks.write(&bytes)?;
        let mut overlays = self.overlays.write().unwrap_or_else(PoisonError::into_inner);
        overlays.insert(0, Arc::new(Overlay { keys, table }));
        drop(overlays);
        self.memtable.write().unwrap_or_else(PoisonError::into_inner).1 = None;
        Ok(())
    }
}

impl<B: Blocks> Store for Tables<B> {
    fn read(&self, key: u64) -> Result<u64> {
        {
            let memtable = self.memtable.read().unwrap_or_else(PoisonError::into_inner);
            let found = memtable.0.get(&key).or_else(|| memtable.1.as_ref()?.get(&key));
            if let Some(record) = found {
                return use_record(record, key);
            }
        }
        let overlays = self.overlays.read().unwrap_or_else(PoisonError::into_inner).clone();
        for overlay in overlays {
            if let Ok(at) = overlay.keys.binary_search(&key) {
                let page = self.blocks.page(&overlay.table, 0, at / (PAGE / RECORD))?;
                return use_record(&page[at % (PAGE / RECORD) * RECORD..][..RECORD], key);
            }
        }
        let page =
            self.index.partition_point(|&first| first <= key).checked_sub(1).context("a key before all others")?;
        let pages = self.shape.block_bytes / PAGE;
        let block = page / pages;
        let table = &self.tables[block / self.shape.blocks];
        let bytes = self.blocks.page(table, block % self.shape.blocks, page % pages)?;
        let record = bytes.chunks_exact(RECORD).find(|record| record[..8] == key.to_le_bytes());
        use_record(record.context("a key that is not there")?, key)
    }

    fn update(&self, key: u64, version: u64) -> Result<()> {
        let mut record = vec![0; RECORD].into_boxed_slice();
        fill_record(&mut record, key, version);
        self.blocks.log(&record)?;
        let full = {
            let mut memtable = self.memtable.write().unwrap_or_else(PoisonError::into_inner);
            memtable.0.insert(key, record);
            memtable.0.len() >= FLUSH && memtable.1.is_none()
        };
        if full { self.flush() } else { Ok(()) }
    }

    fn loaded(&self) -> Option<u64> {
        self.blocks.loaded()
    }

    fn vmas(&self) -> usize {
        self.tables.iter().map(|table| self.blocks.vmas(table)).sum()
    }

    fn note(&self) -> String {
        self.blocks.note()
    }
}

struct PoolBlocks {
    pool: Pool,
    cache: Mcache,
    ids: Vec<u64>,
    log: Mutex<Mlog>,
    /// Pages are not asked for, but touched; with the ordinary read-ahead.
    touch: bool,
}

impl Blocks for PoolBlocks {
    type Table = McacheMap;

    fn open(&self, first: usize, count: usize) -> Result<McacheMap> {
        let ids = &self.ids[first..first + count];
        if self.touch {
            return Ok(self.cache.map_touched(&self.pool, ids, Temperature::Cold)?);
        }
        let map = self.cache.map(&self.pool, ids, Temperature::Cold)?;
        map.advise(0, 0, 0, ::mpool::Advice::Random)?;
        Ok(map)
    }

    fn write(&self, bytes: &[u8]) -> Result<McacheMap> {
        let mut writer =
            self.pool.mblock_alloc(Allocation { capacity: bytes.len() as u64, ..Allocation::default() })?;
        writer.write(&[IoSlice::new(bytes)])?;
        let id = writer.commit()?;
        Ok(match self.touch {
            true => self.cache.map_touched(&self.pool, &[id], Temperature::Cold)?,
            false => self.cache.map(&self.pool, &[id], Temperature::Cold)?,
        })
    }

    fn page<'a>(&self, table: &'a McacheMap, block: usize, page: usize) -> Result<&'a [u8]> {
        match self.touch {
            true => Ok(&table.mblock(block)[page * PAGE..][..PAGE]),
            false => Ok(table.get(block, (page * PAGE) as u64, PAGE)?),
        }
    }

    fn log(&self, record: &[u8]) -> Result<()> {
        Ok(self.log.lock().unwrap_or_else(PoisonError::into_inner).append(record, false)?)
    }

    fn loaded(&self) -> Option<u64> {
        Some(self.cache.stats().loaded)
    }

    fn vmas(&self, table: &McacheMap) -> usize {
        let first = table.mblock(0).as_ptr().addr();
        mappings_in(first..first + table.virtual_bytes() as usize)
    }

    fn note(&self) -> String {
        format!("{:?}", self.cache.stats())
    }
}

struct FileBlocks {
    directory: PathBuf,
    random: bool,
    written: Mutex<usize>,
    log: Mutex<File>,
}

impl FileBlocks {
    fn map(&self, path: &Path) -> Result<Mapped> {
        let file = File::open(path).with_context(|| format!("cannot open {}", path.display()))?;
        let mapped = Mapped::new(&file, file.metadata()?.len() as usize)?;
        if self.random {
            mapped.advise(libc::MADV_RANDOM);
        }
        Ok(mapped)
    }
}

impl Blocks for FileBlocks {
    type Table = Vec<Mapped>;

    fn open(&self, first: usize, count: usize) -> Result<Vec<Mapped>> {
        (first..first + count).map(|block| self.map(&Shape::table_file(&self.directory, block))).collect()
    }

    fn write(&self, bytes: &[u8]) -> Result<Vec<Mapped>> {
        let mut written = self.written.lock().unwrap_or_else(PoisonError::into_inner);
        *written += 1;
        let path = self.directory.join(format!("new-{written}.table"));
        let mut file = File::create(&path)?;
        file.write_all(bytes)?;
        file.sync_data()?;
        Ok(vec![self.map(&path)?])
    }

    fn page<'a>(&self, table: &'a Vec<Mapped>, block: usize, page: usize) -> Result<&'a [u8]> {
        Ok(&table[block].bytes()[page * PAGE..][..PAGE])
    }

    fn log(&self, record: &[u8]) -> Result<()> {
        Ok(self.log.lock().unwrap_or_else(PoisonError::into_inner).write_all(record)?)
    }

    fn loaded(&self) -> Option<u64> {
        None
    }

    fn vmas(&self, table: &Vec<Mapped>) -> usize {
        table.len()
    }

    fn note(&self) -> String {
        String::new()
    }
}

/// Opens the tables as this subject does.
pub(super) fn open(subject: &str, directory: &Path, shape: Shape) -> Result<Box<dyn Store>> {
    Ok(match subject {
        "pageone" | "pageone-no-reaper" | "touched" | "touched-no-reaper" => {
            let pool = Pool::open(&directory.join("pool"), OpenOptions::default())?;
            let mut ids: Vec<u64> = pool.mblocks().iter().map(|m| m.id).collect();
            ids.truncate(TABLES * shape.blocks);
            let cache = Mcache::new(Settings { reaper: !subject.ends_with("no-reaper"), ..Settings::default() })?;
            let log = pool.mlog_create(MediaClass::Capacity, 1 << 40)?;
            let log = Mutex::new(pool.mlog_open(log)?);
            Box::new(Tables::new(shape, PoolBlocks { pool, cache, ids, log, touch: subject.starts_with("touched") })?)
        }
        "mmap" | "mmap-default" => {
            let directory = directory.join("files");
            let log = Mutex::new(File::create(directory.join("log"))?);
            let random = subject == "mmap";
            Box::new(Tables::new(shape, FileBlocks { directory, random, written: Mutex::new(0), log })?)
        }
        other => anyhow::bail!("no subject is called {other}"),
    })
}

/// Removes the files that a run has added.
pub(super) fn clean(directory: &Path, shape: Shape) -> Result<()> {
    let pool = Pool::open(&directory.join("pool"), OpenOptions::default())?;
    let more: Vec<u64> = pool.mblocks().iter().map(|m| m.id).skip(TABLES * shape.blocks).collect();
    pool.mblock_delete(&more)?;
    pool.mlogs().iter().try_for_each(|log| pool.mlog_delete(log.id))?;
    for entry in std::fs::read_dir(directory.join("files"))? {
        let path = entry?.path();
        let name = path.file_name().map(|name| name.to_string_lossy().into_owned()).unwrap_or_default();
        if name.starts_with("new-") || name == "log" {
            std::fs::remove_file(path)?;
        }
    }
    Ok(())
}
