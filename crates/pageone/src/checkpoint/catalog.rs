//! Checkpoints in a pool: pages kept once, and for each checkpoint a map of pages.
//!
//! A *data* mblock holds up to 8192 pages, and behind them their hashes. A *map* mblock holds 8 bytes for each page of a checkpoint:
//! the data mblock's identity and the page in it (`id << 16 | page`), or 0 for zeros. The pool's root MDC says which
//! mblocks there are and what they are; a data mblock counts from the record of a checkpoint on that follows it. An mblock that it
//! does not name is left of a checkpoint that was cut short, and is removed when the next one begins.
//!
//! A page is found again by its hash (128 bits of XXH3, seeded with the pool's identity) and then compared, byte by
//! byte, with what the pool holds: that comparison decides, no hash.
//!
//! *Damage.* mpool finds bytes that are not what was written, and what the records say is checked against the mblocks before it is used. A
//! damaged checkpoint is an error that says so; the others are served. In a catalogue of which records are gone nothing is changed
//! any more: an mblock that no record names could be needed. A page of the pool that cannot be read is stored again.

use std::collections::{HashMap, HashSet};
use std::hash::{BuildHasherDefault, Hasher};
use std::io::IoSlice;
use std::time::{SystemTime, UNIX_EPOCH};

use anyhow::{Context, Result, bail, ensure};
use mpool::{
    Access, Advice, AlignedBuf, Allocation, BLOCK, MblockWriter, Mcache, Mdc, ObjectError, Pool, ROOT_MDC, Settings,
    Temperature,
};
use serde::{Deserialize, Serialize};

/// Pages of a data mblock.
const PAGES: usize = 8192;
/// Bytes of a hash on the medium.
const HASH: usize = 16;
/// What the root MDC begins with.
const FORMAT: u32 = 1;
/// Pages of a data mblock that are read at once for comparing, at most. A divisor of 65536.
const CHUNK: usize = 256;

/// Bytes that a checkpoint's regions can have: a process's address space, and more.
const MOST_BYTES: u64 = 1 << 57;

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
        self.regions.iter().fold(0, |sum, (_, len)| sum.saturating_add(*len))
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
    /// Data mblocks that no checkpoint came of.
    orphans: Vec<u64>,
    checkpoints: Vec<Checkpoint>,
    /// Why nothing may be changed: records are gone.
    damage: Option<String>,
}

fn encode(entries: &[Entry]) -> Result<Vec<Vec<u8>>> {
    entries.iter().map(|entry| Ok(postcard::to_allocvec(entry)?)).collect()
}

impl Catalog {
    /// Reads it.
    pub(crate) fn open(pool: &Pool) -> Result<Self> {
        let mut mdc = pool.mdc_open(ROOT_MDC)?;
        let (mut data, mut orphans) = (Vec::<(u64, u32)>::new(), Vec::<(u64, u32)>::new());
        let (mut checkpoints, mut format, mut damage) = (Vec::<Checkpoint>::new(), None, None);
        loop {
            let record = match mdc.read() {
                Ok(Some(record)) => record,
                Ok(None) => break,
                Err(e @ ObjectError::Damaged(_)) => {
                    damage = damage.or(Some(e.to_string()));
                    mdc.skip_damaged()?;
                    continue;
                }
                Err(e) => return Err(e).context("cannot read the pool's list of checkpoints"),
            };
            match postcard::from_bytes(&record) {
                Ok(Entry::Format(found)) => format = Some(found),
                Ok(Entry::Data { id, pages }) => orphans.push((id, pages)),
                Ok(Entry::Checkpoint(checkpoint)) => {
                    data.append(&mut orphans);
                    checkpoints.push(checkpoint);
                }
                Ok(Entry::Gone(name)) => checkpoints.retain(|c| c.name != name),
                Ok(Entry::DataGone(gone)) => {
                    data.retain(|(id, _)| *id != gone);
                    orphans.retain(|(id, _)| *id != gone);
                }
                Err(_) => {
                    bail!("the pool's root MDC holds something else than checkpoints; give them a pool of their own")
                }
            }
        }
        damage = damage.or_else(|| mdc.damage().first().map(ToString::to_string));
        let empty = mdc.usage() < 128 && pool.mblocks().is_empty();
        ensure!(
            format == Some(FORMAT) || (format.is_none() && (empty || damage.is_some())),
            "this pool is not one of checkpoints of format {FORMAT}"
        );
        if checkpoints.is_empty() {
            // Nobody needs them, whatever became of the records of their going.
            orphans.append(&mut data);
        }
        if format.is_none() && damage.is_none() && pool.props().access == Access::Exclusive {
            let first = encode(&[Entry::Format(FORMAT)])?;
            mdc.append(&[&first[0]], true)?;
        }
        let orphans = orphans.into_iter().map(|(id, _)| id).collect();
        Ok(Self { pool: pool.clone(), mdc, data, orphans, checkpoints, damage })
    }

    /// What is wrong with it, and what to do.
    pub(crate) fn damage(&self) -> Option<String> {
        let damage = self.damage.as_ref()?;
        let pool = self.pool.props().name;
        Some(format!(
            "the list of checkpoints in pool {pool} is damaged ({damage}): some may be missing from it. Those that `pageone pool ls` \
             shows can be restored; do so, and go on with a new pool"
        ))
    }

    fn ensure_whole(&self) -> Result<()> {
        self.damage().map_or(Ok(()), |damage| bail!("{damage}"))
    }

    /// All of them, the oldest first.
    pub(crate) fn checkpoints(&self) -> &[Checkpoint] {
        &self.checkpoints
    }

    /// One of them.
    pub(crate) fn find(&self, name: &str) -> Result<&Checkpoint> {
        let found = self.checkpoints.iter().find(|c| c.name == name);
        found.with_context(|| match self.damage() {
            None => format!("no checkpoint is called {name:?}; `pageone pool ls` shows those there are"),
            Some(damage) => format!("no checkpoint is called {name:?}, and {damage}"),
        })
    }

    /// What to say of a checkpoint that cannot be read.
    fn is_damaged(&self, name: &str) -> String {
        let pool = self.pool.props().name;
        format!(
            "checkpoint {name} in pool {pool} is damaged: `pageone pool check {pool}` lists all damage, \
             `pageone pool rm {pool} {name}` removes this checkpoint, and the others remain"
        )
    }

    fn append(&mut self, entries: &[Entry]) -> Result<()> {
        let records = encode(entries)?;
        let records: Vec<&[u8]> = records.iter().map(Vec::as_slice).collect();
        Ok(self.mdc.append(&records, true)?)
    }

    /// The map of a checkpoint: for each page where it is. All that it names is there.
    pub(crate) fn map(&self, checkpoint: &Checkpoint) -> Result<Vec<u64>> {
        self.read_map(checkpoint).with_context(|| self.is_damaged(&checkpoint.name))
    }

    fn read_map(&self, checkpoint: &Checkpoint) -> Result<Vec<u64>> {
        let len = checkpoint.bytes();
        let whole = checkpoint.regions.iter().all(|(_, len)| len % BLOCK as u64 == 0);
        ensure!(whole && len < MOST_BYTES, "its regions have {len} bytes, which cannot be");
        let mblock = self.pool.mblock(checkpoint.map)?;
        let (want, is) = (len / BLOCK as u64 * 8, mblock.props().len);
        ensure!(want == is, "its map has {is} bytes, and {want} for the memory that it stands for");
        let mut bytes = vec![0; want as usize];
        mblock.read(0, &mut bytes)?;
        let map: Vec<u64> = bytes.as_chunks::<8>().0.iter().map(|word| u64::from_le_bytes(*word)).collect();
        let data: HashMap<u64, u32> = self.data.iter().copied().collect();
        let mut known = (0, 0);
        for &at in map.iter().filter(|&&at| at != 0) {
            if known.0 != at >> 16 {
                known = (at >> 16, data.get(&(at >> 16)).copied().unwrap_or(0));
            }
            ensure!(
                at & 0xFFFF < u64::from(known.1),
                "page {} of data mblock {:#x} is not there",
                at & 0xFFFF,
                at >> 16
            );
        }
        Ok(map)
    }

    /// Gives the memory of a checkpoint, run by run, ascending: the offset in bytes and what is there. Between them are zeros.
    /// The pages come from one mcache map of all data mblocks that the checkpoint needs.
    pub(crate) fn each_run(
        &self,
        checkpoint: &Checkpoint,
        mut each: impl FnMut(u64, &[u8]) -> Result<()>,
    ) -> Result<()> {
        let map = self.map(checkpoint)?;
        let damaged = || self.is_damaged(&checkpoint.name);
        let mut ids: Vec<u64> = map.iter().filter(|&&at| at != 0).map(|at| at >> 16).collect();
        ids.sort_unstable();
        ids.dedup();
        if ids.is_empty() {
            return Ok(());
        }
        let cache = Mcache::new(Settings::default())?;
        let pages = cache.map(&self.pool, &ids, Temperature::Cold).with_context(damaged)?;
        pages.advise(0, 0, 0, Advice::Sequential)?;
        let mut at = 0;
        while at < map.len() {
            if map[at] == 0 {
                at += 1;
                continue;
            }
            // Pages that lie one behind the other are given in one go.
            let run = (1..256).take_while(|&i| map.get(at + i) == Some(&map[at].wrapping_add(i as u64))).count() + 1;
            let index =
                ids.binary_search(&(map[at] >> 16)).map_err(|_| anyhow::anyhow!("a data mblock is not mapped"))?;
            let bytes = pages.get(index, (map[at] & 0xFFFF) * BLOCK as u64, run * BLOCK).with_context(damaged)?;
            each((at * BLOCK) as u64, bytes)?;
            at += run;
        }
        Ok(())
    }

    /// What a checkpoint is called by those that count on its map.
    pub(crate) fn label(pool: &Pool, checkpoint: &Checkpoint) -> String {
        format!("{:032x}/{:x}", u128::from_be_bytes(pool.props().uuid), checkpoint.map)
    }

    /// Removes a checkpoint, and the data that no other one needs.
    pub(crate) fn remove(&mut self, name: &str) -> Result<()> {
        self.ensure_whole()?;
        let map = self.find(name)?.map;
        let mut needed = HashSet::new();
        for other in self.checkpoints.iter().filter(|c| c.name != name) {
            needed.extend(self.map(other)?.into_iter().filter(|&at| at != 0).map(|at| at >> 16));
        }
        let unneeded: Vec<u64> = self.data.iter().map(|(id, _)| *id).filter(|id| !needed.contains(id)).collect();
        let mut entries = vec![Entry::Gone(name.into())];
        entries.extend(unneeded.iter().map(|&id| Entry::DataGone(id)));
        self.append(&entries)?;
        self.checkpoints.retain(|c| c.name != name);
        self.data.retain(|(id, _)| !unneeded.contains(id));
        // Gone already, if the record of a removal survived a crash and the removal did not.
        let there: HashSet<u64> = self.pool.mblocks().iter().map(|m| m.id).collect();
        let mut gone = unneeded;
        gone.push(map);
        gone.retain(|id| there.contains(id));
        Ok(self.pool.mblock_delete(&gone)?)
    }

    /// Removes mblocks that no checkpoint needs: what was left by one that was cut short.
    fn sweep(&mut self) -> Result<()> {
        if !self.orphans.is_empty() {
            let gone: Vec<Entry> = self.orphans.drain(..).map(Entry::DataGone).collect();
            self.append(&gone)?;
        }
        let known: HashSet<u64> =
            self.data.iter().map(|(id, _)| *id).chain(self.checkpoints.iter().map(|c| c.map)).collect();
        let leftovers: Vec<u64> = self.pool.mblocks().iter().map(|m| m.id).filter(|id| !known.contains(id)).collect();
        Ok(self.pool.mblock_delete(&leftovers)?)
    }

    /// The hashes of a data mblock's pages.
    fn hashes(&self, id: u64, pages: u32) -> Result<Vec<u8>> {
        let mblock = self.pool.mblock(id)?;
        let (want, is) = (u64::from(pages) * (BLOCK + HASH) as u64, mblock.props().len);
        ensure!(
            want == is && pages as usize <= PAGES,
            "data mblock {id:#x} has {is} bytes, and {want} for {pages} pages"
        );
        let mut hashes = vec![0; pages as usize * HASH];
        mblock.read(u64::from(pages) * BLOCK as u64, &mut hashes)?;
        Ok(hashes)
    }

    /// Begins a checkpoint.
    pub(crate) fn begin(mut self, name: &str) -> Result<Writer> {
        ensure!(!self.checkpoints.iter().any(|c| c.name == name), "there is a checkpoint called {name:?} already");
        ensure!(!name.is_empty() && name.len() < 128, "a checkpoint's name has 1 to 127 bytes");
        self.ensure_whole()?;
        self.sweep()?;
        if self.mdc.usage() > 1 << 20 {
            self.compact()?;
        }
        let mut index = Index::default();
        for &(id, pages) in &self.data {
            match self.hashes(id, pages) {
                Ok(hashes) => {
                    index.reserve(pages as usize);
                    for (page, hash) in hashes.as_chunks::<HASH>().0.iter().enumerate() {
                        index.entry(u128::from_le_bytes(*hash)).or_insert(id << 16 | page as u64);
                    }
                }
                Err(e) => self.warn_of(id, &e),
            }
        }
        let seed = u64::from_le_bytes(self.pool.props().uuid[..8].try_into().unwrap_or_default());
        Ok(Writer {
            catalog: self,
            name: name.into(),
            index,
            seed,
            map: Vec::new(),
            open: None,
            new: Vec::new(),
            new_pages: 0,
            off: Vec::new(),
            cache: AlignedBuf::zeroed(0),
            cached: 0..0,
            damaged: HashSet::new(),
        })
    }

    /// Pages of this mblock are stored again.
    fn warn_of(&self, id: u64, why: &anyhow::Error) {
        let needs = |c: &&Checkpoint| self.read_map(c).map_or(true, |map| map.iter().any(|at| at >> 16 == id));
        let names: Vec<&str> = self.checkpoints.iter().filter(needs).map(|c| c.name.as_str()).collect();
        let pool = self.pool.props().name;
        eprintln!(
            "pageone: {why:#}: what it holds is stored again. Checkpoints that may not be restored: {}; `pageone pool check {pool}` \
             lists all damage",
            names.join(", ")
        );
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
    writer: MblockWriter,
    /// Pieces of [`CHUNK`] pages: most second checkpoints need one.
    bytes: Vec<AlignedBuf>,
    hashes: Vec<u128>,
}

impl OpenData {
    fn page(&self, number: usize) -> &[u8] {
        &self.bytes[number / CHUNK][number % CHUNK * BLOCK..][..BLOCK]
    }
}

/// The hashes are as good as random already.
#[derive(Default)]
pub(crate) struct Low(u64);

impl Hasher for Low {
    fn write(&mut self, bytes: &[u8]) {
        self.0 = bytes.first_chunk().map_or(0, |low| u64::from_ne_bytes(*low));
    }

    fn write_u128(&mut self, hash: u128) {
        self.0 = hash as u64;
    }

    fn finish(&self) -> u64 {
        self.0
    }
}

type Index = HashMap<u128, u64, BuildHasherDefault<Low>>;

/// A checkpoint that is being stored.
pub(crate) struct Writer {
    catalog: Catalog,
    name: String,
    /// Where a page of this hash is.
    index: Index,
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
    /// Data mblocks of which something could not be read.
    damaged: HashSet<u64>,
}

/// What a page is known by; `None` for zeros.
pub(crate) fn hash(page: &[u8], seed: u64) -> Option<u128> {
    let zeros = page.as_chunks::<16>().0.iter().all(|word| u128::from_ne_bytes(*word) == 0);
    (!zeros).then(|| xxhash_rust::xxh3::xxh3_128_with_seed(page, seed))
}

impl Writer {
    /// Says how many pages there are. All are zeros until they are stored.
    pub(crate) fn set_pages(&mut self, pages: usize) {
        self.map = vec![0; pages];
    }

    /// The map of the checkpoint of that [`Catalog::label`], if it is in this pool and of the same regions.
    pub(crate) fn earlier(&self, label: &str, regions: &[(u64, u64)]) -> Result<Option<Vec<u64>>> {
        let catalog = &self.catalog;
        let found = catalog.checkpoints.iter().find(|c| Catalog::label(&catalog.pool, c) == label);
        found.filter(|c| c.regions == regions).map(|c| catalog.map(c)).transpose()
    }

    /// The page is what an earlier checkpoint's map says.
    pub(crate) fn carry(&mut self, page: u64, at: u64) {
        self.map[page as usize] = at;
    }

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
                none.insert(OpenData { writer, bytes: Vec::new(), hashes: Vec::new() })
            }
        };
        let at = open.hashes.len();
        if at == open.bytes.len() * CHUNK {
            open.bytes.push(AlignedBuf::zeroed(CHUNK * BLOCK));
        }
        open.bytes[at / CHUNK][at % CHUNK * BLOCK..][..BLOCK].copy_from_slice(bytes);
        open.hashes.push(hash);
        let at = open.writer.id() << 16 | at as u64;
        self.map[page as usize] = at;
        // Another one of that hash was not equal, or cannot be read.
        self.index.insert(hash, at);
        self.new_pages += 1;
        if open.hashes.len() == PAGES
            && let Some(writer) = self.finish_data()?
        {
            writer.commit()?;
        }
        Ok(())
    }

    /// Whether the page there has these bytes, if it is in the data mblock that is being filled.
    fn is_in_open(&self, at: u64, page: &[u8]) -> Option<bool> {
        let open = self.open.as_ref().filter(|open| open.writer.id() == at >> 16)?;
        Some(open.page((at & 0xFFFF) as usize) == page)
    }

    fn is_at_hand(&self, at: u64) -> bool {
        self.cached.contains(&at) || self.open.as_ref().is_some_and(|open| open.writer.id() == at >> 16)
    }

    /// Reads the pages `first..=last` of one chunk, to compare with them. Those that cannot be read are not there afterwards.
    fn fetch(&mut self, first: u64, last: u64) -> Result<()> {
        if self.cache.is_empty() {
            self.cache = AlignedBuf::zeroed(CHUNK * BLOCK);
        }
        self.cached = 0..0;
        let len = (last - first + 1) as usize * BLOCK;
        let mblock = self.catalog.pool.mblock(first >> 16)?;
        match mblock.read((first & 0xFFFF) * BLOCK as u64, &mut self.cache[..len]) {
            Ok(()) => self.cached = first..last + 1,
            Err(e @ ObjectError::Damaged(_)) => {
                if self.damaged.insert(first >> 16) {
                    self.catalog.warn_of(first >> 16, &e.into());
                }
            }
            Err(e) => return Err(e.into()),
        }
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
        if !self.cached.contains(&at) {
            return Ok(false);
        }
        let start = (at - self.cached.start) as usize * BLOCK;
        Ok(self.cache[start..start + BLOCK] == *page)
    }

    /// Writes the data mblock that is being filled; it is still to be committed.
    fn finish_data(&mut self) -> Result<Option<MblockWriter>> {
        let Some(mut open) = self.open.take() else { return Ok(None) };
        let pages = open.hashes.len();
        let hashes: Vec<u8> = open.hashes.iter().flat_map(|hash| hash.to_le_bytes()).collect();
        for (i, piece) in open.bytes.iter().enumerate() {
            let pages = (pages - i * CHUNK).min(CHUNK);
            open.writer.write(&[IoSlice::new(&piece[..pages * BLOCK])])?;
        }
        open.writer.write(&[IoSlice::new(&hashes)])?;
        self.new.push(Entry::Data { id: open.writer.id(), pages: pages as u32 });
        Ok(Some(open.writer))
    }

    /// Gives up: frees what was stored.
    pub(crate) fn abandon(mut self) {
        self.open = None;
        // What cannot be removed now is when the next checkpoint begins.
        let _ = self.catalog.sweep();
    }

    /// Commits the checkpoint.
    pub(crate) fn commit(mut self, source: String, regions: Vec<(u64, u64)>) -> Result<Checkpoint> {
        let mut writers: Vec<MblockWriter> = self.finish_data()?.into_iter().collect();
        let bytes: Vec<u8> = self.map.iter().flat_map(|at| at.to_le_bytes()).collect();
        let mut writer =
            self.catalog.pool.mblock_alloc(Allocation { capacity: bytes.len() as u64, ..Allocation::default() })?;
        writer.write(&[IoSlice::new(&bytes)])?;
        let map = writer.id();
        writers.push(writer);
        MblockWriter::commit_all(writers)?;
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
        let mut writer = Catalog::open(pool).unwrap().begin(name).unwrap();
        writer.set_pages(seeds.len());
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
        assert!(Catalog::open(&pool).unwrap().begin("one").is_err());
        Catalog::open(&pool).unwrap().remove("one").unwrap();
        assert!(load(&pool, "two") == want(&[3, 2, 4, 0, 0, 1]));
        Catalog::open(&pool).unwrap().remove("two").unwrap();
        assert!(pool.mblocks().is_empty());
    }

    #[test]
    fn equal_hashes_are_not_equality() {
        let dir = tempfile::tempdir().unwrap();
        let pool = Pool::create(&dir.path().join("pool"), "test").unwrap();
        let mut writer = Catalog::open(&pool).unwrap().begin("lie").unwrap();
        writer.set_pages(2);
        writer.put(&[0], &page(1), &[Some(7)]).unwrap();
        writer.put(&[1], &page(2), &[Some(7)]).unwrap();
        writer.commit("test".into(), vec![(0, 2 * BLOCK as u64)]).unwrap();
        assert!(load(&pool, "lie") == [page(1), page(2)]);
    }

    #[test]
    fn data_of_no_checkpoint_are_removed_and_never_missed() {
        let dir = tempfile::tempdir().unwrap();
        let pool = Pool::create(&dir.path().join("pool"), "test").unwrap();
        store(&pool, "one", &[1, 2]);
        // A crash cut the list's end off: the record of data is there, that of their checkpoint is not.
        let mut writer = pool.mblock_alloc(Allocation::default()).unwrap();
        writer.write(&[IoSlice::new(&[7; BLOCK + HASH])]).unwrap();
        let id = writer.commit().unwrap();
        Catalog::open(&pool).unwrap().append(&[Entry::Data { id, pages: 1 }]).unwrap();
        assert_eq!(store(&pool, "two", &[2, 3]).new_pages, 1);
        assert!(pool.mblock(id).is_err(), "its space is free");
        assert_eq!(store(&pool, "three", &[3]).new_pages, 0);
        assert!(load(&pool, "two") == [page(2), page(3)] && load(&pool, "three") == [page(3)]);
        // The record that the last checkpoint is gone is there, those of its data are not.
        let gone = ["one", "two", "three"].map(|name| Entry::Gone(name.into()));
        Catalog::open(&pool).unwrap().append(&gone).unwrap();
        assert_eq!(store(&pool, "four", &[3]).new_pages, 1);
        assert_eq!(pool.mblocks().len(), 2, "data and map of the last one");
    }

    #[test]
    fn what_is_given_up_frees_its_space_at_once() {
        let dir = tempfile::tempdir().unwrap();
        let pool = Pool::create(&dir.path().join("pool"), "test").unwrap();
        store(&pool, "one", &[1, 2]);
        let before = pool.mblocks();
        let mut writer = Catalog::open(&pool).unwrap().begin("cut").unwrap();
        writer.set_pages(PAGES + 5);
        for number in 0..PAGES + 5 {
            writer.put(&[number as u64], &page(number as u64 + 5), &[Some(number as u128)]).unwrap();
        }
        assert!(pool.mblocks().len() > before.len());
        writer.abandon();
        assert_eq!(pool.mblocks(), before);
        assert!(load(&pool, "one") == [page(1), page(2)]);
    }

    #[test]
    fn what_is_carried_is_what_an_earlier_checkpoint_has() {
        let dir = tempfile::tempdir().unwrap();
        let pool = Pool::create(&dir.path().join("pool"), "test").unwrap();
        let first = store(&pool, "first", &[1, 2, 3]);
        let label = Catalog::label(&pool, &first);
        let mut writer = Catalog::open(&pool).unwrap().begin("second").unwrap();
        assert!(writer.earlier("something", &first.regions).unwrap().is_none());
        assert!(writer.earlier(&label, &[(4096, 3 * BLOCK as u64)]).unwrap().is_none(), "of other memory");
        let map = writer.earlier(&label, &first.regions).unwrap().unwrap();
        writer.set_pages(3);
        (0..3).for_each(|page| writer.carry(page, map[page as usize]));
        writer.put(&[1], &page(9), &[hash(&page(9), writer.seed())]).unwrap();
        writer.put(&[2], &[0; BLOCK], &[None]).unwrap();
        writer.commit("test".into(), first.regions.clone()).unwrap();
        Catalog::open(&pool).unwrap().remove("first").unwrap();
        assert!(load(&pool, "second") == [page(1), page(9), vec![0; BLOCK]]);
    }

    #[test]
    fn records_that_do_not_fit_the_mblocks_are_refused() {
        let dir = tempfile::tempdir().unwrap();
        let pool = Pool::create(&dir.path().join("pool"), "test").unwrap();
        let one = store(&pool, "one", &[1, 2, 3]);
        let page = BLOCK as u64;
        let wrong = [
            Checkpoint { regions: vec![(0, 4 * page)], ..one.clone() },
            Checkpoint { regions: vec![(0, 3 * page - 1)], ..one.clone() },
            Checkpoint { regions: vec![(0, u64::MAX - 4095), (0, u64::MAX - 4095)], ..one.clone() },
            Checkpoint { map: 77, ..one.clone() },
            // Data, not a map.
            Checkpoint { map: one.map - 1, regions: vec![(0, (3 * (page + HASH as u64)) / 8 * page)], ..one.clone() },
        ];
        for (i, wrong) in wrong.into_iter().enumerate() {
            let name = format!("wrong-{i}");
            let entry = Entry::Checkpoint(Checkpoint { name: name.clone(), ..wrong });
            Catalog::open(&pool).unwrap().append(&[entry]).unwrap();
            let catalog = Catalog::open(&pool).unwrap();
            let error = catalog.map(catalog.find(&name).unwrap()).unwrap_err();
            assert!(error.to_string().contains(&format!("pageone pool rm test {name}")), "{error:#}");
            drop(catalog);
            Catalog::open(&pool).unwrap().append(&[Entry::Gone(name)]).unwrap();
        }
        assert!(load(&pool, "one") == [super::tests::page(1), super::tests::page(2), super::tests::page(3)]);
    }

    #[test]
    fn what_was_cut_short_leaves_nothing() {
        let dir = tempfile::tempdir().unwrap();
        let pool = Pool::create(&dir.path().join("pool"), "test").unwrap();
        let mut writer = Catalog::open(&pool).unwrap().begin("cut").unwrap();
        writer.set_pages(PAGES + 5);
        for number in 0..PAGES + 5 {
            writer.put(&[number as u64], &page(number as u64 + 1), &[Some(number as u128 + 1)]).unwrap();
        }
        drop(writer);
        assert_eq!(pool.mblocks().len(), 1, "the first data mblock was committed");
        store(&pool, "whole", &[1]);
        assert_eq!(pool.mblocks().len(), 2, "it is gone; data and map of the new one are there");
    }
}
