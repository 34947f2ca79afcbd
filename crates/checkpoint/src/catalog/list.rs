//! The records of the root MDC, and what they add up to.

use std::collections::BTreeMap;

use mpool::{Mdc, ObjectError};
use serde::{Deserialize, Serialize};

use super::index::Run;
use super::{Checkpoint, OpenError, StoreError, is_known};

/// A record of the root MDC.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(super) enum Entry {
    /// The pool holds checkpoints of this format.
    Format(u32),
    /// Data mblocks, by identity and number of pages. Each counts while a checkpoint needs it.
    Data(Vec<(u64, u32)>),
    /// A checkpoint, and the mblocks that it needs. It replaces one of the same name.
    Checkpoint(Checkpoint, Needs),
    /// The checkpoint of this name is removed.
    Gone(String),
    /// These data mblocks are removed.
    DataGone(Vec<u64>),
    /// The runs of the index, the oldest first, in place of those that there were; and the identity
    /// below which data mblocks are in it.
    Index(Vec<Run>, u64),
    /// What is kept beside the checkpoint with this number. It comes before the checkpoint's own
    /// record, and counts as long as the checkpoint is there.
    Attached(u64, Attached),
    /// Compressed data mblocks, as in `Data`.
    Compressed(Vec<(u64, u32)>),
}

pub(super) fn encode(entries: &[Entry]) -> Result<Vec<Vec<u8>>, StoreError> {
    entries.iter().map(|entry| Ok(postcard::to_allocvec(entry)?)).collect()
}

/// What is kept beside a checkpoint: the mblocks that the bytes are in, one behind the other.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Attached {
    pub(super) mblocks: Vec<u64>,
    pub(super) bytes: u64,
}

/// The mblocks that a checkpoint needs, beside the root of its map.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Needs {
    /// Data mblocks with its pages.
    pub(super) data: Ids,
    /// Mblocks with leaves of its map, ascending. The root names them by their position in here.
    pub(super) leaves: Vec<u64>,
}

/// A set of mblocks, as runs of consecutive identities: first and count.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Ids(Vec<(u64, u32)>);

impl FromIterator<u64> for Ids {
    /// The identities must ascend.
    fn from_iter<I: IntoIterator<Item = u64>>(ids: I) -> Self {
        let mut runs: Vec<(u64, u32)> = Vec::new();
        for id in ids {
            match runs.last_mut() {
                Some((first, count)) if id == *first + u64::from(*count) => *count += 1,
                _ => runs.push((id, 1)),
            }
        }
        Self(runs)
    }
}

impl Ids {
    /// The data mblocks that places are in.
    pub(super) fn of_places(places: &[u64]) -> Self {
        let mut ids: Vec<u64> = Vec::new();
        for at in places.iter().filter(|at| **at != 0) {
            if ids.last() != Some(&(at >> 16)) {
                ids.push(at >> 16);
            }
        }
        ids.sort_unstable();
        ids.dedup();
        ids.into_iter().collect()
    }

    /// Those that are in any of these sets.
    pub(super) fn union<'a>(sets: impl Iterator<Item = &'a Self>) -> Self {
        let mut all: Vec<(u64, u32)> = Vec::new();
        // Most leaves name what the one before names.
        sets.flat_map(|set| &set.0).for_each(|run| {
            if all.last() != Some(run) {
                all.push(*run);
            }
        });
        all.sort_unstable();
        let mut union: Vec<(u64, u32)> = Vec::new();
        for (first, count) in all {
            let end = first.saturating_add(u64::from(count));
            match union.last_mut() {
                Some((start, len))
                    if first <= start.saturating_add(u64::from(*len)) && end - *start <= u64::from(u32::MAX) =>
                {
                    *len = (*len).max((end - *start) as u32);
                }
                _ => union.push((first, count)),
            }
        }
        Self(union)
    }

    /// Those of the set that are keys of `data`: what a record says is not taken for what there is.
    pub(super) fn of<'a, T>(&'a self, data: &'a BTreeMap<u64, T>) -> impl Iterator<Item = u64> + 'a {
        self.0.iter().flat_map(|&(first, count)| {
            let end = first.saturating_add(u64::from(count));
            data.range(first..end).map(|(id, _)| *id)
        })
    }

    /// Whether the set has this mblock.
    pub(super) fn contains(&self, id: u64) -> bool {
        let behind = self.0.partition_point(|(first, _)| *first <= id);
        let run = behind.checked_sub(1).map(|i| self.0[i]);
        run.is_some_and(|(first, count)| id.checked_sub(first).is_some_and(|at| at < u64::from(count)))
    }
}

/// A data mblock.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Data {
    /// Number of its pages.
    pub(super) pages: u32,
    /// Whether it is compressed.
    pub(super) compressed: bool,
    /// Number of the checkpoints that need it.
    pub(super) needed: u32,
}

impl Data {
    /// One that is not compressed, and that no checkpoint needs yet.
    pub(super) fn plain(pages: u32) -> Self {
        Self { pages, compressed: false, needed: 0 }
    }

    /// A compressed one that no checkpoint needs yet.
    pub(super) fn compressed(pages: u32) -> Self {
        Self { compressed: true, ..Self::plain(pages) }
    }
}

/// What the records of a root MDC add up to.
#[derive(Default)]
pub(super) struct List {
    pub(super) data: BTreeMap<u64, Data>,
    pub(super) checkpoints: Vec<Checkpoint>,
    /// By the numbers of checkpoints.
    pub(super) attached: BTreeMap<u64, Attached>,
    pub(super) runs: Vec<Run>,
    pub(super) covered: u64,
    pub(super) format: Option<u32>,
    pub(super) damage: Option<String>,
}

impl List {
    /// Reads all records, and counts the checkpoints that need each data mblock.
    pub(super) fn read(mdc: &mut Mdc) -> Result<Self, OpenError> {
        let mut list = Self::default();
        loop {
            match mdc.read() {
                Ok(Some(record)) => {
                    // Records of another format may not even be understood.
                    let entry = postcard::from_bytes(&record);
                    let other = list.format.is_some_and(|format| !is_known(format));
                    match entry.map_err(|_| if other { OpenError::Format } else { OpenError::Foreign })? {
                        Entry::Checkpoint(one, _) if !one.is_sound() => {
                            list.damage.get_or_insert("a checkpoint has a name or counts that none can have".into());
                        }
                        entry => list.apply(entry),
                    }
                }
                Ok(None) => break,
                Err(e @ ObjectError::Damaged(_)) => {
                    list.damage = list.damage.or(Some(e.to_string()));
                    mdc.skip_damaged().map_err(StoreError::from)?;
                }
                Err(e) => return Err(OpenError::Read(e)),
            }
        }
        list.damage = list.damage.or_else(|| mdc.damage().first().map(ToString::to_string));
        for checkpoint in &list.checkpoints {
            count(&mut list.data, &checkpoint.needs.data);
        }
        Ok(list)
    }

    fn apply(&mut self, entry: Entry) {
        match entry {
            Entry::Format(found) => self.format = Some(found),
            Entry::Data(some) => self.add(some, Data::plain),
            Entry::Compressed(some) => self.add(some, Data::compressed),
            Entry::Checkpoint(checkpoint, needs) => replace(&mut self.checkpoints, Checkpoint { needs, ..checkpoint }),
            Entry::Gone(name) => self.checkpoints.retain(|c| c.name != name),
            Entry::DataGone(gone) => gone.iter().for_each(|id| {
                self.data.remove(id);
            }),
            Entry::Attached(number, attached) => drop(self.attached.insert(number, attached)),
            Entry::Index(runs, covered) => (self.runs, self.covered) = (runs, covered),
        }
    }

    fn add(&mut self, some: Vec<(u64, u32)>, of_pages: fn(u32) -> Data) {
        self.data.extend(some.into_iter().map(|(id, pages)| (id, of_pages(pages))));
    }
}

/// Adds a checkpoint, or puts it in the place of the one with its name.
pub(super) fn replace(checkpoints: &mut Vec<Checkpoint>, new: Checkpoint) {
    match checkpoints.iter_mut().find(|c| c.name == new.name) {
        Some(old) => *old = new,
        None => checkpoints.push(new),
    }
}

/// Counts one more checkpoint for what it needs.
pub(super) fn count(data: &mut BTreeMap<u64, Data>, needs: &Ids) {
    let there: Vec<u64> = needs.of(data).collect();
    for id in there {
        if let Some(data) = data.get_mut(&id) {
            data.needed = data.needed.saturating_add(1);
        }
    }
}

/// Counts one checkpoint less for what it needed. Gives the data mblocks that no other needs.
pub(super) fn discount(data: &mut BTreeMap<u64, Data>, needs: &Ids) -> Vec<u64> {
    let there: Vec<u64> = needs.of(data).collect();
    let last = |id: &u64| {
        data.get_mut(id).is_some_and(|data| {
            data.needed = data.needed.saturating_sub(1);
            data.needed == 0
        })
    };
    there.into_iter().filter(last).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn mblocks_are_counted_by_what_names_them() {
        let map = [5 << 16, 0, 5 << 16 | 3, 9 << 16, 6 << 16, 5 << 16 | 1];
        let needs = Ids::of_places(&map);
        assert_eq!(needs, Ids(vec![(5, 2), (9, 1)]));
        assert!(
            [5, 6, 9].iter().all(|id| needs.contains(*id)) && ![0, 4, 7, 8, 10].iter().any(|id| needs.contains(*id))
        );
        let mut data: BTreeMap<u64, Data> = [5, 6, 7, 9].map(|id| (id, Data::plain(1))).into();
        count(&mut data, &needs);
        count(&mut data, &Ids(vec![(6, 1), (7, u32::MAX), (u64::MAX, 7)]));
        let counts = |data: &BTreeMap<u64, Data>| data.values().map(|data| data.needed).collect::<Vec<_>>();
        assert_eq!(counts(&data), [1, 2, 1, 2]);
        assert_eq!(discount(&mut data, &needs), [5]);
        assert_eq!(counts(&data), [0, 1, 1, 1]);
    }

    #[test]
    fn the_union_of_sets_has_each_mblock_once() {
        let sets = [vec![(5, 2), (9, 1)], vec![(5, 2), (9, 1)], vec![(1, 1), (6, 2), (8, 1)], vec![(5, 1), (12, 3)]];
        let sets = sets.map(Ids);
        assert_eq!(Ids::union(sets.iter()), Ids(vec![(1, 1), (5, 5), (12, 3)]));
        let wide = [Ids(vec![(0, u32::MAX), (u64::MAX - 1, 7)]), Ids(vec![(7, u32::MAX), (u64::MAX, u32::MAX)])];
        let union = Ids::union(wide.iter());
        assert!([0, 7, 1 << 32, u64::MAX - 1].iter().all(|id| union.contains(*id)), "{union:?}");
    }
}
