//! Checkpoints in a pool: pages kept once, and for each checkpoint a map of pages.
//!
//! A *data* mblock holds up to 8192 pages, and behind them their hashes. A *map* mblock holds 8 bytes for each page of a checkpoint:
//! the data mblock's identity and the page in it (`id << 16 | page`), or 0 for zeros. The pool's root MDC says which
//! mblocks there are and what they are. An mblock that it does not name is left of a checkpoint that was cut short, and is
//! removed when the next one begins.
//!
//! A page is found again by its hash (128 bits of XXH3, seeded with the pool's identity) and then compared, byte by
//! byte, with what the pool holds: that comparison decides, no hash.

use std::collections::HashMap;
use std::io::IoSlice;
use std::time::{SystemTime, UNIX_EPOCH};

use anyhow::{Context, Result, bail, ensure};
use mpool::{Access, AlignedBuf, Allocation, BLOCK, Mdc, Pool, ROOT_MDC};
use serde::{Deserialize, Serialize};

/// Pages of a data mblock.
const PAGES: usize = 8192;
/// Bytes of a hash on the medium.
const HASH: usize = 16;
/// What the root MDC begins with.
const FORMAT: u32 = 1;
/// Pages of a data mblock that are read at once for comparing, at most. A divisor of 65536.
const CHUNK: usize = 256;

/// A record of the root MDC.
#[derive(Clone, Debug, Serialize, Deserialize)]
enum Entry {
    /// This pool holds checkpoints.
    Format(u32),
    Data {
        id: u64,
        pages: u32,
    },
    Checkpoint(Checkpoint),
    Gone(String),
    DataGone(u64),
}

/// A stored checkpoint.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct Checkpoint {
    /// Its name.
    pub(crate) name: String,
    /// When it was taken, in seconds since 1970.
    pub(crate) created: u64,
    /// What was stored: a process.
    pub(crate) source: String,
    /// Address and length of each region, in bytes.
    pub(crate) regions: Vec<(u64, u64)>,
    /// Pages that had to be stored.
    pub(crate) new_pages: u64,
    /// The map mblock.
    map: u64,
}

impl Checkpoint {
    /// Bytes of memory.
    pub(crate) fn bytes(&self) -> u64 {
        self.regions.iter().map(|(_, len)| len).sum()
    }

    /// Pages of the map mblock.
    pub(crate) fn map_pages(&self) -> u64 {
        (self.bytes() / BLOCK as u64 * 8).div_ceil(BLOCK as u64)
    }
}

/// The checkpoints of a pool.
pub(crate) struct Catalog {
    pool: Pool,
    mdc: Mdc,
    data: Vec<(u64, u32)>,
    checkpoints: Vec<Checkpoint>,
}

fn encode(entries: &[Entry]) -> Result<Vec<Vec<u8>>> {
    entries.iter().map(|entry| Ok(postcard::to_allocvec(entry)?)).collect()
}

impl Catalog {
    /// Reads it.
    pub(crate) fn open(pool: &Pool) -> Result<Self> {
        let mut mdc = pool.mdc_open(ROOT_MDC)?;
        let (mut data, mut checkpoints, mut format) = (Vec::new(), Vec::<Checkpoint>::new(), None);
        while let Some(record) = mdc.read()? {
            match postcard::from_bytes(&record) {
                Ok(Entry::Format(found)) => format = Some(found),
                Ok(Entry::Data { id, pages }) => data.push((id, pages)),
                Ok(Entry::Checkpoint(checkpoint)) => checkpoints.push(checkpoint),
                Ok(Entry::Gone(name)) => checkpoints.retain(|c| c.name != name),
                Ok(Entry::DataGone(gone)) => data.retain(|(id, _)| *id != gone),
                Err(_) => {
                    bail!("the pool's root MDC holds something else than checkpoints; give them a pool of their own")
                }
            }
        }
        let empty = mdc.usage() < 128 && pool.mblocks().is_empty();
        ensure!(
            format == Some(FORMAT) || (format.is_none() && empty),
            "this pool is not one of checkpoints of format {FORMAT}"
        );
        if format.is_none() && pool.props().access == Access::Exclusive {
            let first = encode(&[Entry::Format(FORMAT)])?;
            mdc.append(&[&first[0]], true)?;
        }
        Ok(Self { pool: pool.clone(), mdc, data, checkpoints })
    }

    /// All of them, the oldest first.
    pub(crate) fn checkpoints(&self) -> &[Checkpoint] {
        &self.checkpoints
    }

    /// One of them.
    pub(crate) fn find(&self, name: &str) -> Result<&Checkpoint> {
        let found = self.checkpoints.iter().find(|c| c.name == name);
        found.with_context(|| format!("no checkpoint is called {name:?}; `pageone pool ls` shows those there are"))
    }

    fn append(&mut self, entries: &[Entry]) -> Result<()> {
        let records = encode(entries)?;
        let records: Vec<&[u8]> = records.iter().map(Vec::as_slice).collect();
        Ok(self.mdc.append(&records, true)?)
    }

    /// The map of a checkpoint: for each page where it is.
    pub(crate) fn map(&self, checkpoint: &Checkpoint) -> Result<Vec<u64>> {
        let mut bytes = vec![0; (checkpoint.bytes() / BLOCK as u64 * 8) as usize];
        self.pool.mblock(checkpoint.map)?.read(0, &mut bytes)?;
        Ok(bytes.as_chunks::<8>().0.iter().map(|word| u64::from_le_bytes(*word)).collect())
    }

    /// Removes a checkpoint, and the data that no other one needs.
    pub(crate) fn remove(&mut self, name: &str) -> Result<()> {
        let map = self.find(name)?.map;
        let mut needed = std::collections::HashSet::new();
        for other in self.checkpoints.iter().filter(|c| c.name != name) {
            needed.extend(self.map(other)?.into_iter().filter(|&at| at != 0).map(|at| at >> 16));
        }
        let unneeded: Vec<u64> = self.data.iter().map(|(id, _)| *id).filter(|id| !needed.contains(id)).collect();
        let mut entries = vec![Entry::Gone(name.into())];
        entries.extend(unneeded.iter().map(|&id| Entry::DataGone(id)));
        self.append(&entries)?;
        self.checkpoints.retain(|c| c.name != name);
        self.data.retain(|(id, _)| !unneeded.contains(id));
        let mut gone = unneeded;
        gone.push(map);
        Ok(self.pool.mblock_delete(&gone)?)
    }

    /// Begins a checkpoint of `pages` pages.
    pub(crate) fn begin(mut self, name: &str, pages: usize) -> Result<Writer> {
        ensure!(!self.checkpoints.iter().any(|c| c.name == name), "there is a checkpoint called {name:?} already");
        ensure!(!name.is_empty() && name.len() < 128, "a checkpoint's name has 1 to 127 bytes");
        let known: Vec<u64> =
            self.data.iter().map(|(id, _)| *id).chain(self.checkpoints.iter().map(|c| c.map)).collect();
        let leftovers: Vec<u64> = self.pool.mblocks().iter().map(|m| m.id).filter(|id| !known.contains(id)).collect();
        self.pool.mblock_delete(&leftovers)?;
        if self.mdc.usage() > 1 << 20 {
            self.compact()?;
        }
        let mut index = HashMap::new();
        for &(id, pages) in &self.data {
            let mut hashes = vec![0; pages as usize * HASH];
            self.pool.mblock(id)?.read(u64::from(pages) * BLOCK as u64, &mut hashes)?;
            for (page, hash) in hashes.as_chunks::<HASH>().0.iter().enumerate() {
                index.entry(u128::from_le_bytes(*hash)).or_insert(id << 16 | page as u64);
            }
        }
        let seed = u64::from_le_bytes(self.pool.props().uuid[..8].try_into().unwrap_or_default());
        Ok(Writer {
            catalog: self,
            name: name.into(),
            index,
            seed,
            map: vec![0; pages],
            open: None,
            new: Vec::new(),
            new_pages: 0,
            off: Vec::new(),
            cache: AlignedBuf::zeroed(0),
            cached: 0..0,
        })
    }

    fn compact(&mut self) -> Result<()> {
        let mut entries = vec![Entry::Format(FORMAT)];
        entries.extend(self.data.iter().map(|&(id, pages)| Entry::Data { id, pages }));
        entries.extend(self.checkpoints.iter().cloned().map(Entry::Checkpoint));
        let records = encode(&entries)?;
        let records: Vec<&[u8]> = records.iter().map(Vec::as_slice).collect();
        self.mdc.start_compaction()?;
        self.mdc.append(&records, false)?;
        Ok(self.mdc.end_compaction()?)
    }
}

/// A data mblock that is being filled. It gets its identity at once, so that the map can name its pages.
struct OpenData {
    writer: mpool::MblockWriter,
    bytes: AlignedBuf,
    hashes: Vec<u128>,
}

/// A checkpoint that is being stored.
pub(crate) struct Writer {
    catalog: Catalog,
    name: String,
    /// Where a page of this hash is.
    index: HashMap<u128, u64>,
    seed: u64,
    map: Vec<u64>,
    open: Option<OpenData>,
    /// Data mblocks of this checkpoint.
    new: Vec<Entry>,
    new_pages: u64,
    /// Pages that look like one of the pool, and where that is.
    off: Vec<(u64, u64)>,
    /// What was read last to compare with, and which pages that is.
    cache: AlignedBuf,
    cached: std::ops::Range<u64>,
}

/// What a page is known by; `None` for zeros.
pub(crate) fn hash(page: &[u8], seed: u64) -> Option<u128> {
    let zeros = page.as_chunks::<16>().0.iter().all(|word| u128::from_ne_bytes(*word) == 0);
    (!zeros).then(|| xxhash_rust::xxh3::xxh3_128_with_seed(page, seed))
}

impl Writer {
    /// For [`hash`].
    pub(crate) fn seed(&self) -> u64 {
        self.seed
    }

    /// Stores pages; `hashes` are their hashes, `None` for zeros. What looks like a page of the pool is put off: it is given
    /// back by [`Writer::put_off`] in the order in which the pool has it.
    pub(crate) fn put(&mut self, pages: &[u64], bytes: &[u8], hashes: &[Option<u128>]) -> Result<()> {
        for ((&page, bytes), &hash) in pages.iter().zip(bytes.chunks_exact(BLOCK)).zip(hashes) {
            match hash.map(|hash| (hash, self.index.get(&hash).copied())) {
                None => self.map[page as usize] = 0,
                Some((hash, None)) => self.append(page, bytes, hash)?,
                Some((hash, Some(at))) => match self.is_in_open(at, bytes) {
                    Some(true) => self.map[page as usize] = at,
                    Some(false) => self.append(page, bytes, hash)?,
                    None => self.off.push((at, page)),
                },
            }
        }
        Ok(())
    }

    /// The pages that were put off: where the pool has what they look like, and their numbers. Sorted.
    pub(crate) fn put_off(&mut self) -> Vec<(u64, u64)> {
        let mut off = std::mem::take(&mut self.off);
        off.sort_unstable();
        off
    }

    /// Stores pages that were put off; `bytes` is what they are now. Sorted, the pool is read from front to back.
    pub(crate) fn put_again(&mut self, off: &[(u64, u64)], bytes: &[u8]) -> Result<()> {
        for (i, (&(at, page), bytes)) in off.iter().zip(bytes.chunks_exact(BLOCK)).enumerate() {
            if !self.is_at_hand(at) {
                let in_chunk = off[i..].iter().take_while(|(next, _)| next / CHUNK as u64 == at / CHUNK as u64);
                self.fetch(at, in_chunk.last().map_or(at, |last| last.0))?;
            }
            if self.is_equal(at, bytes)? {
                self.map[page as usize] = at;
                continue;
            }
            // It has been written since, or was only like it.
            match hash(bytes, self.seed) {
                None => self.map[page as usize] = 0,
                Some(hash) => match self.index.get(&hash).copied() {
                    Some(other) if other != at && self.is_equal(other, bytes)? => self.map[page as usize] = other,
                    _ => self.append(page, bytes, hash)?,
                },
            }
        }
        Ok(())
    }

    fn append(&mut self, page: u64, bytes: &[u8], hash: u128) -> Result<()> {
        let open = match &mut self.open {
            Some(open) => open,
            none => {
                let capacity = (PAGES * (BLOCK + HASH)) as u64;
                let writer = self.catalog.pool.mblock_alloc(Allocation { capacity, ..Allocation::default() })?;
                none.insert(OpenData { writer, bytes: AlignedBuf::zeroed(PAGES * BLOCK), hashes: Vec::new() })
            }
        };
        let at = open.hashes.len();
        open.bytes[at * BLOCK..(at + 1) * BLOCK].copy_from_slice(bytes);
        open.hashes.push(hash);
        let at = open.writer.id() << 16 | at as u64;
        self.map[page as usize] = at;
        self.index.entry(hash).or_insert(at);
        self.new_pages += 1;
        if open.hashes.len() == PAGES { self.flush() } else { Ok(()) }
    }

    /// Whether the page there has these bytes, if it is in the data mblock that is being filled.
    fn is_in_open(&self, at: u64, page: &[u8]) -> Option<bool> {
        let open = self.open.as_ref().filter(|open| open.writer.id() == at >> 16)?;
        let number = (at & 0xFFFF) as usize;
        Some(open.bytes[number * BLOCK..(number + 1) * BLOCK] == *page)
    }

    fn is_at_hand(&self, at: u64) -> bool {
        self.cached.contains(&at) || self.open.as_ref().is_some_and(|open| open.writer.id() == at >> 16)
    }

    /// Reads the pages `first..=last` of one chunk, to compare with them.
    fn fetch(&mut self, first: u64, last: u64) -> Result<()> {
        if self.cache.is_empty() {
            self.cache = AlignedBuf::zeroed(CHUNK * BLOCK);
        }
        self.cached = 0..0;
        let len = (last - first + 1) as usize * BLOCK;
        let mblock = self.catalog.pool.mblock(first >> 16)?;
        mblock.read((first & 0xFFFF) * BLOCK as u64, &mut self.cache[..len])?;
        self.cached = first..last + 1;
        Ok(())
    }

    /// Whether the page stored there has these bytes.
    fn is_equal(&mut self, at: u64, page: &[u8]) -> Result<bool> {
        if let Some(equal) = self.is_in_open(at, page) {
            return Ok(equal);
        }
        if !self.cached.contains(&at) {
            self.fetch(at, at)?;
        }
        let start = (at - self.cached.start) as usize * BLOCK;
        Ok(self.cache[start..start + BLOCK] == *page)
    }

    /// Commits the data mblock that is being filled.
    fn flush(&mut self) -> Result<()> {
        let Some(mut open) = self.open.take() else { return Ok(()) };
        let pages = open.hashes.len();
        let hashes: Vec<u8> = open.hashes.iter().flat_map(|hash| hash.to_le_bytes()).collect();
        open.writer.write(&[IoSlice::new(&open.bytes[..pages * BLOCK]), IoSlice::new(&hashes)])?;
        self.new.push(Entry::Data { id: open.writer.commit()?, pages: pages as u32 });
        Ok(())
    }

    /// Commits the checkpoint.
    pub(crate) fn commit(mut self, source: String, regions: Vec<(u64, u64)>) -> Result<Checkpoint> {
        self.flush()?;
        let bytes: Vec<u8> = self.map.iter().flat_map(|at| at.to_le_bytes()).collect();
        let mut writer =
            self.catalog.pool.mblock_alloc(Allocation { capacity: bytes.len() as u64, ..Allocation::default() })?;
        writer.write(&[IoSlice::new(&bytes)])?;
        let map = writer.commit()?;
        let created = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |t| t.as_secs());
        let new_pages = self.new_pages;
        let checkpoint = Checkpoint { name: self.name, created, source, regions, new_pages, map };
        self.new.push(Entry::Checkpoint(checkpoint.clone()));
        self.catalog.append(&self.new)?;
        Ok(checkpoint)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn page(seed: u64) -> Vec<u8> {
        (0..BLOCK as u64).map(|i| (seed * 31 + i * (seed + 7)) as u8).collect()
    }

    fn store(pool: &Pool, name: &str, seeds: &[u64]) -> Checkpoint {
        let mut writer = Catalog::open(pool).unwrap().begin(name, seeds.len()).unwrap();
        let bytes: Vec<u8> = seeds.iter().flat_map(|&s| if s == 0 { vec![0; BLOCK] } else { page(s) }).collect();
        let hashes: Vec<_> = bytes.chunks(BLOCK).map(|page| hash(page, writer.seed())).collect();
        writer.put(&(0..seeds.len() as u64).collect::<Vec<_>>(), &bytes, &hashes).unwrap();
        let off = writer.put_off();
        let again: Vec<u8> =
            off.iter().flat_map(|(_, page)| &bytes[*page as usize * BLOCK..][..BLOCK]).copied().collect();
        writer.put_again(&off, &again).unwrap();
        writer.commit("test".into(), vec![(0, (seeds.len() * BLOCK) as u64)]).unwrap()
    }

    fn load(pool: &Pool, name: &str) -> Vec<Vec<u8>> {
        let catalog = Catalog::open(pool).unwrap();
        let map = catalog.map(catalog.find(name).unwrap()).unwrap();
        map.into_iter()
            .map(|at| {
                let mut page = vec![0; BLOCK];
                if at != 0 {
                    pool.mblock(at >> 16).unwrap().read((at & 0xFFFF) * BLOCK as u64, &mut page).unwrap();
                }
                page
            })
            .collect()
    }

    #[test]
    fn pages_are_kept_once() {
        let dir = tempfile::tempdir().unwrap();
        let pool = Pool::create(&dir.path().join("pool"), "test").unwrap();
        assert_eq!(store(&pool, "one", &[1, 2, 0, 1, 3]).new_pages, 3);
        assert_eq!(store(&pool, "two", &[3, 2, 4, 0, 0, 1]).new_pages, 1);
        let want = |seeds: &[u64]| -> Vec<Vec<u8>> {
            seeds.iter().map(|&seed| if seed == 0 { vec![0; BLOCK] } else { page(seed) }).collect()
        };
        assert!(load(&pool, "one") == want(&[1, 2, 0, 1, 3]) && load(&pool, "two") == want(&[3, 2, 4, 0, 0, 1]));
        assert!(Catalog::open(&pool).unwrap().begin("one", 1).is_err());
        Catalog::open(&pool).unwrap().remove("one").unwrap();
        assert!(load(&pool, "two") == want(&[3, 2, 4, 0, 0, 1]));
        Catalog::open(&pool).unwrap().remove("two").unwrap();
        assert!(pool.mblocks().is_empty());
    }

    #[test]
    fn equal_hashes_are_not_equality() {
        let dir = tempfile::tempdir().unwrap();
        let pool = Pool::create(&dir.path().join("pool"), "test").unwrap();
        let mut writer = Catalog::open(&pool).unwrap().begin("lie", 2).unwrap();
        writer.put(&[0], &page(1), &[Some(7)]).unwrap();
        writer.put(&[1], &page(2), &[Some(7)]).unwrap();
        writer.commit("test".into(), vec![(0, 2 * BLOCK as u64)]).unwrap();
        assert!(load(&pool, "lie") == [page(1), page(2)]);
    }

    #[test]
    fn what_was_cut_short_leaves_nothing() {
        let dir = tempfile::tempdir().unwrap();
        let pool = Pool::create(&dir.path().join("pool"), "test").unwrap();
        let mut writer = Catalog::open(&pool).unwrap().begin("cut", PAGES + 5).unwrap();
        for number in 0..PAGES + 5 {
            writer.put(&[number as u64], &page(number as u64 + 1), &[Some(number as u128 + 1)]).unwrap();
        }
        drop(writer);
        assert_eq!(pool.mblocks().len(), 1, "the first data mblock was committed");
        store(&pool, "whole", &[1]);
        assert_eq!(pool.mblocks().len(), 2, "it is gone; data and map of the new one are there");
    }
}
