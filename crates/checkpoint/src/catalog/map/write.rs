//! Writing the map of a checkpoint that goes on from an earlier one, or from zeros.

use std::collections::{BTreeMap, BTreeSet};
use std::io::IoSlice;

use mpool::{BLOCK, MblockWriter};

use super::super::classes::{Holds, allocate};
use super::super::list::{Ids, Needs};
use super::super::{LEAF, StoreError, View};
use super::{Changes, Entry, Leaf, MOST, Root};

/// A map that was written, but not committed.
pub(in super::super) struct NewMap {
    /// Its mblocks.
    pub(in super::super) writers: Vec<MblockWriter>,
    /// The mblock of its root.
    pub(in super::super) id: u64,
    pub(in super::super) root: Root,
    pub(in super::super) needs: Needs,
}

impl NewMap {
    /// Blocks of its mblocks.
    pub(in super::super) fn blocks(&self) -> u64 {
        self.writers.iter().map(|writer| writer.len().div_ceil(BLOCK as u64)).sum()
    }
}

impl View {
    /// Writes the map that changes make of another one. Leaves that do not change stay where they
    /// are, but for those of mblocks with few of them.
    pub(in super::super) fn write_map(&self, base: Root, changes: &Changes) -> Result<NewMap, StoreError> {
        let copied = self.copied(&base, changes);
        let is_copied = |leaf: &Leaf| copied.contains(&leaf.mblock);
        let earlier = |number: usize| base.0.get(number).and_then(Option::as_ref);
        let is_open = |number: usize| {
            changes.has(number) || earlier(number).is_some_and(|leaf| is_copied(leaf) || changes.has_absent(number))
        };
        let open: Vec<usize> = (0..changes.leaves()).filter(|&number| is_open(number)).collect();
        let wanted = open.iter().filter(|&&number| !changes.is_whole(number));
        let mut read = self.leaves(wanted.filter_map(|&number| Some((number, earlier(number)?)))).peekable();
        let (mut writer, mut new) = (None, Vec::new());
        for &number in &open {
            let mut before = None;
            match read.next_if(|(read, _)| *read == number) {
                Some((_, Ok(places))) => before = Some(places),
                // It is damaged, and stays so.
                Some((_, Err(_))) if !changes.has(number) && !changes.has_absent(number) => continue,
                Some((_, Err(flaw))) => return Err(StoreError::Earlier(flaw)),
                None => {}
            }
            let mut places = before.as_deref().copied().unwrap_or([0; LEAF]);
            changes.apply(number, &mut places);
            if earlier(number).is_some_and(|leaf| before.is_some_and(|before| *before == places) && !is_copied(leaf)) {
                continue;
            }
            let leaf = if places == [0; LEAF] {
                None
            } else {
                let writer = match &mut writer {
                    Some(writer) => writer,
                    none => none.insert(self.map_mblock(open.len() * BLOCK)?),
                };
                let (slot, data) = ((writer.len() / BLOCK as u64) as u32, Ids::of_places(&places));
                let bytes: Vec<u8> = places.iter().flat_map(|at| at.to_le_bytes()).collect();
                writer.write(&[IoSlice::new(&bytes)])?;
                Some(Leaf { mblock: writer.id(), slot, data })
            };
            new.push((number, leaf));
        }
        drop(read);
        let mut root = base;
        root.0.resize(changes.leaves(), None);
        new.into_iter().for_each(|(number, leaf)| root.0[number] = leaf);
        let leaves: BTreeSet<u64> = root.named().map(|(_, leaf)| leaf.mblock).collect();
        let needs = Needs { data: root.data(), leaves: leaves.into_iter().collect() };
        let position = |mblock: u64| needs.leaves.partition_point(|id| *id < mblock) as u32;
        let entry = |leaf: &Leaf| Entry(position(leaf.mblock), leaf.slot, leaf.data.clone());
        let entries: Vec<Option<Entry>> = root.0.iter().map(|leaf| leaf.as_ref().map(entry)).collect();
        let bytes = postcard::to_allocvec(&(changes.pages(), entries))?;
        let mut last = self.map_mblock(bytes.len())?;
        last.write(&[IoSlice::new(&bytes)])?;
        let id = last.id();
        Ok(NewMap { writers: writer.into_iter().chain([last]).collect(), id, root, needs })
    }

    fn map_mblock(&self, len: usize) -> Result<MblockWriter, StoreError> {
        Ok(allocate(&self.pool, Holds::Soon, len as u64)?)
    }

    /// The mblocks whose leaves are copied: those of which the map would name less than half, and
    /// the least named ones if there would be more than [`MOST`].
    fn copied(&self, base: &Root, changes: &Changes) -> BTreeSet<u64> {
        let mut named: BTreeMap<u64, u64> = BTreeMap::new();
        for (_, leaf) in base.named().filter(|(number, _)| !changes.has(*number)) {
            *named.entry(leaf.mblock).or_default() += 1;
        }
        let leaves = |id: u64| self.pool.mblock(id).map_or(0, |mblock| mblock.props().len / BLOCK as u64);
        let mut stay: Vec<(u64, u64)> = named.iter().map(|(id, count)| (*count, *id)).collect();
        stay.retain(|(count, id)| count * 2 >= leaves(*id));
        stay.sort_unstable();
        if stay.len() >= MOST {
            stay.drain(..stay.len() - MOST / 2);
        }
        stay.iter().for_each(|(_, id)| {
            named.remove(id);
        });
        named.into_keys().collect()
    }
}
