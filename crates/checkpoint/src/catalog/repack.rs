//! Repacking: what is left of data mblocks that are half empty moves into new ones.
//!
//! 1. The live pages of some data mblocks are read, checked and stored in new data mblocks.
//! 2. For each checkpoint that needs one of them the leaves of its map that name them are written
//!    anew, and recorded with the new data mblocks. That record replaces the one before; nothing
//!    else does. Leaves that checkpoints share are written once.
//! 3. When no checkpoint needs the old data mblocks any more they are removed.
//!
//! In a pool with a staging class all data mblocks there move to the capacity class that a
//! checkpoint before the newest one needs, however many of their pages are left
//! ([`classes`](super::classes)).
//!
//! With compression, pages count as left only if one of the newest checkpoints has them. The
//! others, which are *cold*, move into compressed data mblocks ([`compressed`](super::compressed)).
//! What is compressed stays so.
//!
//! It can be done in turns ([`Repacking`]), between which others use the pool: each ends when what
//! it has moved is recorded.
//!
//! An interruption leaves checkpoints with the old map and others with the new one. Both are whole,
//! because the data mblocks of both are kept as long as a record names them.

use std::collections::{HashMap, HashSet};
use std::ops::ControlFlow;

use mpool::{AlignedBuf, BLOCK, MblockWriter, ObjectError};

use super::classes::{Holds, is_staged};
use super::compressed::{Compressor, Reader, Stored};
use super::index::{Index, Known};
use super::list::{Data, Entry, discount};
use super::map::{Changes, Leaf, NewMap};
use super::pages::{Full, InPool, Pages};
use super::usage::{Marked, is_sparse};
use super::{COMPRESSED, Catalog, Checkpoint, LEAF, PageFlaw, RepackError, StoreError, View};

/// Pages that are moved before maps are written: 2 GiB.
const AT_ONCE: u64 = 64 * 8192;
/// Pages that are read at once, at most: 1 MiB.
const RUN: u64 = 256;

/// What repacking did.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Repacked {
    /// Data mblocks that are gone.
    pub mblocks: u64,
    /// Pages that were moved.
    pub moved: u64,
    /// Those of them that were compressed.
    pub compressed: u64,
    /// Bytes that these take now.
    pub compressed_bytes: u64,
    /// Pages that are free now.
    pub freed: u64,
    /// Data mblocks that stay, because they cannot be read, or a checkpoint's map cannot.
    pub left: u64,
}

/// What was moved.
#[derive(Default)]
struct Moved {
    /// Data mblocks whose pages are elsewhere too.
    from: HashSet<u64>,
    /// New places of pages by earlier ones.
    places: HashMap<u64, u64>,
    /// New leaves by mblock and slot of the earlier ones.
    leaves: HashMap<(u64, u32), Option<Leaf>>,
}

impl View {
    /// Whether a data mblock lies in the staging class and a checkpoint before the newest one needs
    /// it.
    fn is_staged_early(&self, id: u64) -> bool {
        let earlier = self.checkpoints.split_last().map_or(&[][..], |(_, earlier)| earlier);
        is_staged(&self.pool, id) && earlier.iter().any(|checkpoint| checkpoint.needs.data.contains(id))
    }
}

/// A repacking in turns. Between them the pool may be closed, and others change what they like:
/// each turn begins with what is there then.
#[derive(Default)]
pub struct Repacking {
    compress: Option<usize>,
    /// Data mblocks of which nothing is expected any more.
    tried: HashSet<u64>,
    /// Those with this identity, and above it, came later.
    end: Option<u64>,
    /// What was done so far.
    pub done: Repacked,
}

/// Called behind each data mblock, with the bytes that were moved since the last call, and those
/// that are left. Breaking off ends the turn.
pub type Each<'a> = dyn FnMut(u64, u64) -> ControlFlow<()> + 'a;

impl Repacking {
    /// As [`Catalog::repack`] does.
    pub fn new(compress: Option<usize>) -> Self {
        Self { compress, ..Self::default() }
    }

    /// A turn: moves what there is to move, until `each` breaks off. Gives whether something may be
    /// left.
    ///
    /// # Errors
    /// Those of [`Catalog::repack`].
    pub fn turn(&mut self, catalog: &mut Catalog, each: &mut Each<'_>) -> Result<bool, RepackError> {
        catalog.ensure_whole()?;
        catalog.sweep()?;
        let mut index = match catalog.index.take() {
            Some(index) => index,
            None => catalog.open_index()?,
        };
        let view = catalog.view.clone();
        let (live, unreadable) = view.live();
        let newest = |count| &view.checkpoints[view.checkpoints.len().saturating_sub(count)..];
        let hot = self.compress.map(|count| view.named_by(newest(count)).0);
        let left = |id: u64, data: &Data| match &hot {
            Some(hot) if !data.compressed => hot.count(id),
            _ => live.count(id),
        };
        let moves = |id: u64, data: &Data| is_sparse(data.pages, left(id, data)) || view.is_staged_early(id);
        let end = *self.end.get_or_insert_with(|| view.data.last_key_value().map_or(0, |(id, _)| id + 1));
        let new = view.data.range(..end).filter(|(id, _)| !self.tried.contains(id));
        let moving = new.filter(|(id, data)| moves(**id, data));
        // What a map names that cannot be read is not known to be gone.
        let (keep, go): (Vec<u64>, Vec<u64>) =
            moving.map(|(id, _)| *id).partition(|id| unreadable.iter().any(|c| c.needs.data.contains(*id)));
        self.done.left += keep.len() as u64;
        self.tried.extend(keep);
        let bytes = |ids: &[u64]| ids.iter().map(|id| u64::from(live.count(*id)) * BLOCK as u64).sum::<u64>();
        let mut rest = &go[..];
        let mut ends = ControlFlow::Continue(());
        while !rest.is_empty() && ends.is_continue() {
            let (mut sum, mut count) = (0, 0);
            let mut next = || {
                let id = rest[count];
                sum += u64::from(live.count(id));
                count += 1;
                ends = each(bytes(&[id]), bytes(&rest[count..]));
                count < rest.len() && sum < AT_ONCE && ends.is_continue()
            };
            catalog.repack_some(rest, &mut next, (&live, hot.as_ref()), &mut index, &mut self.done)?;
            let (now, later) = rest.split_at(count);
            self.tried.extend(now);
            rest = later;
        }
        // What the index lacks, if this fails, the next checkpoint adds. It is not used again: the
        // hashes that it has in memory are of mblocks that are gone.
        let _ = catalog.write_index(&mut index, None);
        Ok(!rest.is_empty())
    }
}

impl Catalog {
    /// Moves what is left of data mblocks of which at least half of the pages are gone, or that lie
    /// in the staging class and are not the newest checkpoint's alone, and removes these. With
    /// `compress`, pages that none of this number of newest checkpoints has count as gone, and are
    /// compressed.
    ///
    /// # Errors
    /// If the catalogue is damaged, or the pool is full or cannot be written. What was moved until
    /// then stays moved.
    pub fn repack(&mut self, compress: Option<usize>) -> Result<Repacked, RepackError> {
        let mut all = Repacking::new(compress);
        all.turn(self, &mut |_, _| ControlFlow::Continue(()))?;
        Ok(all.done)
    }

    /// Moves the first of these data mblocks, as many as `goes_on` says behind each.
    fn repack_some(
        &mut self,
        ids: &[u64],
        goes_on: &mut dyn FnMut() -> bool,
        marked: (&Marked, Option<&Marked>),
        index: &mut Index,
        all: &mut Repacked,
    ) -> Result<(), RepackError> {
        let (mut moved, mut new) = self.move_pages(ids, goes_on, marked, index, all)?;
        for checkpoint in self.view.checkpoints.clone() {
            if moved.from.iter().any(|id| checkpoint.needs.data.contains(*id)) {
                self.replace_map(&checkpoint, &mut moved, std::mem::take(&mut new))?;
            }
        }
        let unneeded = |id: &&u64| self.view.data.get(*id).is_some_and(|data| data.needed == 0);
        let mut gone: Vec<u64> = moved.from.iter().filter(unneeded).copied().collect();
        if self.pool.is_kept() {
            gone.clear();
        }
        let before: u64 = gone.iter().filter_map(|id| self.view.data.get(id)).map(|data| u64::from(data.pages)).sum();
        self.remove_data(&gone)?;
        all.mblocks += gone.len() as u64;
        all.moved += moved.places.len() as u64;
        all.freed += before.saturating_sub(moved.places.len() as u64);
        Ok(())
    }

    /// Stores the live pages of some data mblocks in others; gives what was moved, and the records
    /// of the new ones. Cold pages, which are not in `hot`, are compressed.
    fn move_pages(
        &mut self,
        ids: &[u64],
        goes_on: &mut dyn FnMut() -> bool,
        (live, hot): (&Marked, Option<&Marked>),
        index: &mut Index,
        all: &mut Repacked,
    ) -> Result<(Moved, Vec<Entry>), RepackError> {
        let mut pages = Pages::new(&self.view.pool, Holds::Moved);
        let mut compressor = Compressor::new(&self.view.pool);
        let (mut moved, mut filled, mut compressed) = (Moved::default(), Vec::new(), Vec::new());
        for &id in ids {
            // One that cannot be read is left: it is damaged, and its checkpoints say so.
            let was_compressed = self.view.data.get(&id).is_some_and(|data| data.compressed);
            let Some((hashes, runs)) = self.read_live(id, live)? else {
                all.left += 1;
                if goes_on() {
                    continue;
                }
                break;
            };
            for (first, run) in runs {
                for (page, bytes) in (first..).zip(run.chunks_exact(BLOCK)) {
                    let (at, hash) = (id << 16 | page, hashes[page as usize]);
                    if was_compressed || hot.is_some_and(|hot| !hot.contains(at)) {
                        moved.places.insert(at, compressor.put(bytes, hash)?);
                        if let Some(full) = compressor.store_full()? {
                            compressed.push(self.enter_compressed(full, index, all)?);
                        }
                        continue;
                    }
                    let new = pages.put(bytes, hash)?;
                    moved.places.insert(at, new);
                    let known = InPool { pool: &self.view.pool, data: &self.view.data, pages: Some(&pages) };
                    index.add(hash, new, &known)?;
                    if let Some(full) = pages.take_full() {
                        filled.push(self.store_moved(full, &mut pages, index)?);
                    }
                }
            }
            moved.from.insert(id);
            if !goes_on() {
                break;
            }
        }
        if let Some(last) = pages.take_open() {
            filled.push(self.store_moved(last, &mut pages, index)?);
        }
        if let Some(last) = compressor.store()? {
            compressed.push(self.enter_compressed(last, index, all)?);
        }
        let mut new = vec![Entry::Data(filled)];
        if !compressed.is_empty() {
            // Before what only this version knows.
            let newer = (self.format < COMPRESSED).then_some(Entry::Format(COMPRESSED));
            new.extend(newer.into_iter().chain([Entry::Compressed(compressed)]));
        }
        Ok((moved, new))
    }

    /// Stores a data mblock of moved pages; gives its identity and number of pages.
    fn store_moved(&mut self, full: Full, pages: &mut Pages, index: &mut Index) -> Result<(u64, u32), StoreError> {
        let (id, count) = (full.contents.id, full.contents.hashes.len() as u32);
        index.filled();
        full.store()?;
        pages.landed(id);
        self.view.data.insert(id, Data::plain(count));
        Ok((id, count))
    }

    /// Takes a compressed data mblock that was stored; gives its identity and number of pages.
    fn enter_compressed(
        &mut self,
        stored: Stored,
        index: &mut Index,
        all: &mut Repacked,
    ) -> Result<(u64, u32), StoreError> {
        let Stored { id, hashes, bytes } = stored;
        let count = hashes.len() as u32;
        self.view.data.insert(id, Data::compressed(count));
        let known = InPool { pool: &self.view.pool, data: &self.view.data, pages: None };
        for (page, hash) in (0..).zip(hashes) {
            index.enter(hash, id << 16 | page, &known)?;
        }
        all.compressed += u64::from(count);
        all.compressed_bytes += bytes;
        Ok((id, count))
    }

    /// The hashes of a data mblock's pages, and its live pages in runs, each with the number of its
    /// first page. `None`: they cannot be read.
    #[expect(clippy::type_complexity, reason = "used once")]
    fn read_live(&self, id: u64, live: &Marked) -> Result<Option<(Vec<u128>, Vec<(u64, AlignedBuf)>)>, StoreError> {
        let known = InPool { pool: &self.view.pool, data: &self.view.data, pages: None };
        let (Ok(hashes), Ok(mblock)) = (known.hashes(id), self.data_mblock(id)) else { return Ok(None) };
        let (mut runs, mut reader) = (Vec::new(), Reader::default());
        let mut pages = live.pages(id).peekable();
        while let Some(first) = pages.next() {
            let mut end = first + 1;
            while end - first < RUN && pages.next_if_eq(&end).is_some() {
                end += 1;
            }
            if end > hashes.len() as u64 {
                return Ok(None);
            }
            let mut bytes = AlignedBuf::zeroed((end - first) as usize * BLOCK);
            match mblock.read(first, &mut bytes, &mut reader) {
                Ok(()) => runs.push((first, bytes)),
                Err(PageFlaw::Object(ObjectError::Damaged(_))) => return Ok(None),
                Err(PageFlaw::Object(e)) => return Err(e.into()),
                Err(_) => return Ok(None),
            }
        }
        Ok(Some((hashes, runs)))
    }

    /// Gives a checkpoint a map with the new places, recorded behind `entries`.
    fn replace_map(&mut self, old: &Checkpoint, moved: &mut Moved, mut entries: Vec<Entry>) -> Result<(), RepackError> {
        let flawed = |flaw| self.view.damaged(&old.name, flaw);
        let before = self.view.root(old).map_err(flawed)?;
        let mut base = before.clone();
        for leaf in &mut base.0 {
            let new = leaf.as_ref().and_then(|leaf| moved.leaves.get(&(leaf.mblock, leaf.slot)));
            if let Some(new) = new {
                leaf.clone_from(new);
            }
        }
        let mut changes = Changes::new((old.bytes() / BLOCK as u64) as usize);
        let names = |leaf: &Leaf| moved.from.iter().any(|id| leaf.data.contains(*id));
        for (number, places) in self.view.leaves(base.named().filter(|(_, leaf)| names(leaf))) {
            for (page, at) in places.map_err(flawed)?.iter().enumerate() {
                if let Some(new) = moved.places.get(at) {
                    changes.set((number * LEAF + page) as u64, *new);
                }
            }
        }
        let new = self.view.write_map(base, &changes)?;
        for (before, after) in before.0.into_iter().zip(&new.root.0).filter(|(before, after)| before != *after) {
            moved.leaves.extend(before.map(|leaf| ((leaf.mblock, leaf.slot), after.clone())));
        }
        let NewMap { id, needs, writers, .. } = new;
        MblockWriter::commit_all(writers)?;
        let new = Checkpoint { root: id, needs: needs.clone(), ..old.clone() };
        entries.push(Entry::Checkpoint(new.clone(), needs));
        self.append(&entries)?;
        discount(&mut self.view.data, &old.needs.data);
        self.enter(new);
        Ok(self.delete_map(old)?)
    }
}
