//! Checkpoints that are stored at once: what they share.
//!
//! A [`Store`] has the catalogue, its index and the data mblock that is being filled, behind one
//! lock. Each checkpoint has a [`Writer`] with what it alone needs. The lock is held to look pages
//! up and to add them. Pages on the medium are compared without it, and data mblocks and maps
//! are written without it: the writer that fills a data mblock writes it. Until that has ended its
//! pages stay in memory, where the others find and compare them.
//!
//! A checkpoint is recorded when every data mblock is on the medium that it has pages in: it writes
//! the open one, even if others go on, and waits for those that others write. What failed to be
//! written is *lost*; checkpoints with pages in it are not recorded. Data mblocks of a checkpoint
//! that is given up stay until the last one ends, since others may have found pages there.

use std::collections::{BTreeSet, HashSet};

use mpool::{Kept, MblockWriter, ObjectError, Pool};
use parking_lot::{Condvar, Mutex, MutexGuard};

use super::classes::Holds;
use super::here::Here;
use super::index::{Index, key};
use super::list::{Attached, Data, Entry, Needs};
use super::map::NewMap;
use super::pages::{Compared, Full, InPool, Pages};
use super::{BeginError, Catalog, Checkpoint, PageFlaw, StoreError, View, Warning};

/// Bytes of the longest name.
const LONGEST_NAME: usize = 127;

/// A catalogue into which checkpoints are stored, several at once.
pub struct Store {
    pub(super) state: Mutex<State>,
    /// A data mblock was written, or was lost.
    landed: Condvar,
}

/// What the writers share.
pub(super) struct State {
    pub(super) catalog: Here<Catalog>,
    pub(super) pages: Here<Pages>,
    /// Keeps all mblocks from the first turn on.
    pub(super) keep: Option<Kept>,
    /// Identity and number of pages of data mblocks on the medium that no record names.
    pub(super) unrecorded: Vec<(u64, u32)>,
    /// Data mblocks that could not be written.
    lost: HashSet<u64>,
    /// The checkpoints that are being stored.
    pub(super) names: HashSet<String>,
    /// Whether one of them was given up.
    pub(super) left_over: bool,
    /// Whether mblocks were kept that nobody needs, perhaps.
    unswept: bool,
    /// Data mblocks with a warning.
    damaged: HashSet<u64>,
    /// Whether there was a warning of the index.
    flawed: bool,
}

/// Where a page is.
pub(super) enum Place {
    /// There.
    At(u64),
    /// Perhaps there, on the medium: it is to be compared.
    Compare(u64),
}

impl Store {
    /// Stores checkpoints into this catalogue.
    pub fn new(catalog: Catalog) -> Self {
        let pages = Here::new(Pages::new(&catalog.view.pool, Holds::Soon));
        let (catalog, keep) = (Here::new(catalog), None);
        let (unrecorded, lost, names, damaged) = Default::default();
        let state = State {
            catalog,
            pages,
            keep,
            unrecorded,
            lost,
            names,
            left_over: false,
            unswept: false,
            damaged,
            flawed: false,
        };
        Self { state: Mutex::new(state), landed: Condvar::new() }
    }

    /// The checkpoints that are stored now.
    pub fn view(&self) -> View {
        self.state.lock().catalog.view()
    }

    /// The catalogue, when nothing is stored any more.
    pub fn into_catalog(self) -> Catalog {
        let mut state = self.state.into_inner();
        if state.unswept {
            state.sweep();
        }
        std::mem::replace(&mut state.catalog, Here(None)).into_inner()
    }

    /// Finds a page, or adds it. `differs`: a place on the medium where it is not. The lock is
    /// released while a data mblock that became full is written.
    pub(super) fn keep(
        &self,
        state: &mut MutexGuard<'_, State>,
        (bytes, hash): (&[u8], u128),
        differs: Option<u64>,
        new_pages: &mut u64,
    ) -> Result<Place, StoreError> {
        if let Some(at) = state.find(hash)? {
            match state.pages.get(at) {
                Some(known) if known == bytes => return Ok(Place::At(at)),
                None if differs != Some(at) => return Ok(Place::Compare(at)),
                _ => {}
            }
        }
        let at = state.add(bytes, hash)?;
        *new_pages += 1;
        if let Some(full) = state.take(Pages::take_full) {
            let (id, count) = (full.contents.id, full.contents.hashes.len() as u32);
            let stored = MutexGuard::unlocked(state, || full.store());
            self.land(state, id, count, stored)?;
        }
        Ok(Place::At(at))
    }

    /// Notes how writing a data mblock ended.
    pub(super) fn land(
        &self,
        state: &mut State,
        id: u64,
        pages: u32,
        stored: Result<(), ObjectError>,
    ) -> Result<(), StoreError> {
        state.pages.landed(id);
        if stored.is_ok() {
            state.unrecorded.push((id, pages));
            state.catalog.view.data.insert(id, Data::plain(pages));
        } else {
            state.lost.insert(id);
            state.catalog.index.iter_mut().for_each(|index| index.forget(id));
        }
        self.landed.notify_all();
        Ok(stored?)
    }

    /// Waits until these data mblocks are on the medium. Writes the one that is being filled, if it
    /// is one of them, but does not commit it.
    fn settle(&self, used: &BTreeSet<u64>) -> Result<Option<Full>, StoreError> {
        let mut state = self.state.lock();
        // Whoever has taken a data mblock to write it does not wait.
        while used.iter().any(|id| state.pages.is_written(*id)) {
            self.landed.wait(&mut state);
        }
        if used.iter().any(|id| state.lost.contains(id)) {
            return Err(StoreError::Lost);
        }
        if !used.iter().any(|id| state.pages.is_open(*id)) {
            return Ok(None);
        }
        let Some(mut last) = state.take(Pages::take_open) else { return Ok(None) };
        let written = MutexGuard::unlocked(&mut state, || last.write());
        if written.is_err() {
            self.land(&mut state, last.contents.id, 0, written)?;
        }
        Ok(Some(last))
    }

    /// Commits the data mblocks that a checkpoint uses, and its map, and records it. `write_map`
    /// writes the map, and what is kept beside the checkpoint; `describe` makes the checkpoint of
    /// its root, blocks and needs.
    pub(super) fn commit(
        &self,
        used: &BTreeSet<u64>,
        write_map: impl FnOnce(&View) -> Result<(NewMap, Option<Attached>), StoreError>,
        describe: impl FnOnce(u64, u64, Needs) -> Checkpoint,
    ) -> Result<Checkpoint, StoreError> {
        let (data, writer) = self.settle(used)?.map(|Full { contents, writer }| (contents, writer)).unzip();
        let mut map = write_map(&self.view());
        let blocks = map.as_ref().map_or(0, |(map, _)| map.blocks());
        let mut writers: Vec<MblockWriter> = writer.into_iter().collect();
        // Others may have pages in the data mblock: it is committed even if the map failed.
        if let Ok((map, _)) = &mut map {
            writers.append(&mut map.writers);
        }
        let committed = MblockWriter::commit_all(writers).map(drop);
        let mut state = self.state.lock();
        match data {
            Some(data) => self.land(&mut state, data.id, data.hashes.len() as u32, committed)?,
            None => committed?,
        }
        let (NewMap { id, needs, .. }, attached) = map?;
        let checkpoint = describe(id, blocks, needs);
        state.record(&checkpoint, attached)?;
        Ok(checkpoint)
    }

    /// Warnings since the last call; each data mblock is reported once.
    pub(super) fn warnings(&self, compared: Vec<(u64, PageFlaw)>) -> Vec<Warning> {
        let State { catalog, damaged, flawed, .. } = &mut *self.state.lock();
        let Some(catalog) = catalog.if_here() else { return Vec::new() };
        let mut new = compared;
        catalog.index.iter_mut().for_each(|index| new.append(&mut index.take_damaged()));
        new.retain(|(id, _)| damaged.insert(*id));
        let mut warnings: Vec<Warning> = new.into_iter().map(|(id, why)| catalog.warning(id, why)).collect();
        let flaw = catalog.index.as_ref().and_then(Index::flaw);
        if let Some(flaw) = flaw.filter(|_| !std::mem::replace(flawed, true)) {
            warnings.push(Warning::Index { pool: catalog.pool.props().name, why: crate::chain(flaw) });
        }
        warnings
    }
}

/// Refuses what is no checkpoint's name.
///
/// # Errors
/// [`BeginError::Name`].
pub fn ensure_name(name: &str) -> Result<(), BeginError> {
    match name.is_empty() || name.len() > LONGEST_NAME || name.chars().any(char::is_control) {
        true => Err(BeginError::Name),
        false => Ok(()),
    }
}

impl State {
    pub(super) fn begin(&mut self, name: &str) -> Result<(Pool, Compared), BeginError> {
        if self.names.contains(name) {
            return Err(BeginError::Exists(name.into()));
        }
        self.catalog.ensure_new(name)?;
        self.catalog.ensure_whole()?;
        // What the others have stored looks like leftovers.
        if self.names.is_empty() {
            self.catalog.sweep()?;
            self.catalog.compact()?;
        }
        self.index()?;
        self.names.insert(name.into());
        let view = &self.catalog.view;
        Ok((view.pool.clone(), Compared::new(&view.pool, &view.data)))
    }

    /// The index, and what it names. Opens it, if it is not open.
    fn index(&mut self) -> Result<(&mut Index, InPool<'_>), StoreError> {
        let mut index = self.catalog.index.take();
        if index.is_none() {
            let mut new = self.catalog.open_index()?;
            let known = known(&self.catalog.view, &self.pages);
            for contents in self.pages.in_memory() {
                for (page, hash) in contents.hashes.iter().enumerate() {
                    new.enter(*hash, contents.id << 16 | page as u64, &known)?;
                }
            }
            index = Some(new);
        }
        let Catalog { index: place, view, .. } = &mut *self.catalog;
        *place = index;
        match place {
            Some(index) => Ok((index, known(view, &self.pages))),
            None => unreachable!(),
        }
    }

    /// Where pages may be.
    pub(super) fn find_many(&mut self, hashes: &[Option<u128>]) -> Result<Vec<Option<u64>>, StoreError> {
        let (index, known) = self.index()?;
        Ok(index.find_many(hashes, &known))
    }

    fn find(&mut self, hash: u128) -> Result<Option<u64>, StoreError> {
        let (index, known) = self.index()?;
        Ok(index.find(key(hash), &known))
    }

    /// Whether a place is in memory, so that its page need not be read.
    pub(super) fn has(&self, at: u64) -> bool {
        self.pages.get(at).is_some()
    }

    /// Adds a page.
    fn add(&mut self, bytes: &[u8], hash: u128) -> Result<u64, StoreError> {
        let at = self.pages.put(bytes, hash)?;
        let (index, known) = self.index()?;
        index.add(hash, at, &known)?;
        Ok(at)
    }

    /// Takes the data mblock that is being filled.
    pub(super) fn take(&mut self, take: impl FnOnce(&mut Pages) -> Option<Full>) -> Option<Full> {
        let full = take(&mut self.pages)?;
        self.catalog.index.iter_mut().for_each(Index::filled);
        Some(full)
    }

    /// Records a checkpoint whose mblocks are committed.
    fn record(&mut self, checkpoint: &Checkpoint, attached: Option<Attached>) -> Result<(), StoreError> {
        let data = Entry::Data(self.unrecorded.clone());
        let beside = attached.iter().map(|attached| Entry::Attached(checkpoint.number, attached.clone()));
        let own = Entry::Checkpoint(checkpoint.clone(), checkpoint.needs.clone());
        self.catalog.append(&[data].into_iter().chain(beside).chain([own]).collect::<Vec<_>>())?;
        self.catalog.view.attached.extend(attached.map(|attached| (checkpoint.number, attached)));
        self.unrecorded.clear();
        self.catalog.enter(checkpoint.clone());
        // The checkpoint is stored. What the index lacks, if this fails, the next one adds.
        if let Some(mut index) = self.catalog.index.take()
            && self.catalog.write_index(&mut index, Some(&self.pages)).is_ok()
            && index.flaw().is_none()
        {
            self.catalog.index = Some(index);
        }
        Ok(())
    }

    /// Ends a checkpoint. The last one removes what those have left that were given up.
    pub(super) fn leave(&mut self, name: &str) {
        self.names.remove(name);
        // What others have removed meanwhile is kept no longer.
        self.unswept |= self.names.is_empty() && self.keep.take().is_some();
        if self.names.is_empty() && std::mem::take(&mut self.left_over) {
            self.sweep();
        }
    }

    fn sweep(&mut self) {
        // What a panic has left half done is no list of what is needed.
        if self.catalog.if_here().is_some() && !std::thread::panicking() {
            self.unswept = false;
            self.pages.give_up();
            self.lost.clear();
            // It names what will be gone.
            self.catalog.index = None;
            // Mblocks that cannot be removed now are removed when the next checkpoint begins.
            let _ = self.catalog.sweep();
            let there = &self.catalog.view.data;
            self.unrecorded.retain(|(id, _)| there.contains_key(id));
        }
    }
}

impl Catalog {
    /// Sees that a checkpoint may be stored by this name.
    ///
    /// # Errors
    /// If one has it, or it is no name of a checkpoint.
    pub fn ensure_new(&self, name: &str) -> Result<(), BeginError> {
        if self.checkpoints.iter().any(|c| c.name == name) {
            return Err(BeginError::Exists(name.into()));
        }
        ensure_name(name)
    }
}

impl Drop for State {
    fn drop(&mut self) {
        // Not before: with many data mblocks it takes long, and whoever stored a checkpoint had
        // something to do that was urgent.
        if self.unswept {
            self.sweep();
        }
    }
}

/// The data mblocks on the medium and in memory.
fn known<'a>(view: &'a View, pages: &'a Pages) -> InPool<'a> {
    InPool { pool: &view.pool, data: &view.data, pages: Some(pages) }
}
