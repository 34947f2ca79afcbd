//! Checkpoints in a pool: pages kept once, and for each checkpoint a map of pages.
//!
//! A *data* mblock holds up to 8192 pages, and behind them their hashes. A *map* mblock holds 8
//! bytes for each page of a checkpoint: the data mblock's identity and the page in it (`id << 16 |
//! page`), or 0 for zeros. The pool's root MDC says which mblocks there are and what they are; a
//! data mblock counts from the record of a checkpoint on that follows it. An mblock that it
//! does not name is left of a checkpoint that was cut short, and is removed when the next one
//! begins.
//!
//! A page is found again by its hash (128 bits of XXH3, seeded with the pool's identity) and then
//! compared, byte by byte, with what the pool holds: that comparison decides, no hash. Both is
//! ONE's business ([`one`]); its store is the pool (`pages`), what is put into it comes
//! from a checkpoint (`writer`).
//!
//! *Damage.* mpool finds bytes that are not what was written, and what the records say is checked
//! against the mblocks before it is used. A damaged checkpoint is an error that says so; the others
//! are served. In a catalogue of which records are gone nothing is changed any more: an mblock that
//! no record names could be needed. A page of the pool that cannot be read is stored again.

mod pages;
#[cfg(test)]
mod tests;
mod writer;

use std::collections::{HashMap, HashSet};

use anyhow::{Context, Result, bail, ensure};
use mpool::{Access, Advice, BLOCK, Mcache, Mdc, ObjectError, Pool, ROOT_MDC, Temperature};
use serde::{Deserialize, Serialize};

pub(crate) use writer::{PutOff, Writer, hash};

/// Pages of a data mblock.
const PAGES: usize = 8192;
/// Bytes of a hash on the medium.
const HASH: usize = 16;
/// What the root MDC begins with.
const FORMAT: u32 = 1;

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

    /// Gives the memory of a checkpoint, run by run, ascending: the offset in bytes and what is
    /// there. Between them are zeros. The pages come from one mcache map of all data mblocks
    /// that the checkpoint needs.
    pub(crate) fn each_run(
        &self,
        cache: &Mcache,
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
