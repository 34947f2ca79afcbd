//! The map of a checkpoint: the place of each of its pages in the pool.
//!
//! A map consists of *leaves* and a *root*. A leaf has the places of [`LEAF`] consecutive pages, 8
//! bytes each: the data mblock's identity and the page in it (`id << 16 | page`), or 0 for zeros.
//! The root has an entry for each leaf: where it is, and which data mblocks it names; nothing for a
//! leaf of zeros. The leaves that a checkpoint writes are in one mblock, its root in another.
//!
//! A checkpoint that goes on from an earlier one writes the leaves that changed, and a root that
//! names the earlier checkpoint's mblocks for the others, which it does not read. What it needs is
//! the union of what the root's entries say.
//!
//! *The size of a leaf.* A leaf is a block of the medium and as large as a page: the leaves that a
//! checkpoint writes take at most as much as the pages that changed, even if these lie scattered.
//! The root takes about 9 bytes for a leaf, 4.5 MiB for 1 TiB of memory. Larger leaves would make
//! it smaller, and each scattered change dearer.
//!
//! *Chains.* Checkpoint after checkpoint, a map would name ever more mblocks, each for ever fewer
//! leaves. So a checkpoint copies the leaves of a mblock of which it names less than half, and of
//! the least named ones if there are more than [`MOST`] ([`View::write_map`]).

mod changes;
mod write;

use std::collections::VecDeque;
use std::iter::Peekable;

use mpool::{AlignedBuf, BLOCK};
use serde::{Deserialize, Serialize};

use super::list::Ids;
use super::{Checkpoint, Flaw, LEAF, View, memory};

pub(super) use changes::Changes;
pub(super) use write::NewMap;

/// Mblocks with leaves of one map, at most, when it is written.
pub(super) const MOST: usize = 64;
/// Leaves that are read at once: 1 MiB.
const AT_ONCE: usize = 256;

/// The places of a leaf's pages.
pub(super) type Places = [u64; LEAF];

/// A leaf, as the root names it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Leaf {
    /// The mblock that it is in.
    pub(super) mblock: u64,
    /// Its position there, in leaves.
    pub(super) slot: u32,
    /// The data mblocks that its places are in.
    pub(super) data: Ids,
}

/// A leaf in the root mblock, which has the number of pages and an entry for each leaf: position of
/// its mblock in the checkpoint's record, slot, data mblocks.
#[derive(Serialize, Deserialize)]
struct Entry(u32, u32, Ids);

/// The root of a map: its leaves; `None` is a leaf of zeros.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Root(pub(super) Vec<Option<Leaf>>);

impl Root {
    /// The leaves that are not zeros, with their numbers.
    pub(super) fn named(&self) -> impl Iterator<Item = (usize, &Leaf)> {
        self.0.iter().enumerate().filter_map(|(number, leaf)| Some((number, leaf.as_ref()?)))
    }

    /// The data mblocks that the leaves name.
    pub(super) fn data(&self) -> Ids {
        Ids::union(self.named().map(|(_, leaf)| &leaf.data))
    }
}

impl View {
    /// The root of a checkpoint's map.
    pub(super) fn root(&self, checkpoint: &Checkpoint) -> Result<Root, Flaw> {
        let len = memory(&checkpoint.regions).ok_or(Flaw::Regions(checkpoint.bytes()))?;
        let bytes = self.whole(checkpoint.root)?;
        let no_root = || Flaw::Root(checkpoint.root);
        let (pages, found): (u64, Vec<Option<Entry>>) = postcard::from_bytes(&bytes).map_err(|_| no_root())?;
        let expected = len / BLOCK as u64;
        if pages != expected {
            return Err(Flaw::Pages { is: pages, expected });
        }
        if found.len() as u64 != pages.div_ceil(LEAF as u64) {
            return Err(no_root());
        }
        let leaf = |Entry(mblock, slot, data)| {
            let mblock = *checkpoint.needs.leaves.get(mblock as usize).ok_or_else(no_root)?;
            Ok(Leaf { mblock, slot, data })
        };
        Ok(Root(found.into_iter().map(|entry| entry.map(leaf).transpose()).collect::<Result<_, Flaw>>()?))
    }

    /// Reads leaves; gives number and places of each. Every page that they name exists.
    pub(super) fn leaves<'a, I: Iterator<Item = (usize, &'a Leaf)>>(&'a self, wanted: I) -> Leaves<'a, I> {
        Leaves { view: self, wanted: wanted.peekable(), read: VecDeque::new(), buffer: None }
    }

    /// The places of a leaf, if they are what the root says, and every page that they name exists.
    fn parse(&self, leaf: &Leaf, block: &[u8]) -> Result<Box<Places>, Flaw> {
        let mut places = Box::new([0; LEAF]);
        places.iter_mut().zip(block.as_chunks::<8>().0).for_each(|(at, bytes)| *at = u64::from_le_bytes(*bytes));
        if Ids::of_places(&places[..]) != leaf.data {
            return Err(Flaw::Leaf { slot: leaf.slot, mblock: leaf.mblock });
        }
        let mut known = (0, 0);
        for &at in places.iter().filter(|&&at| at != 0) {
            if known.0 != at >> 16 {
                known = (at >> 16, self.data.get(&(at >> 16)).map_or(0, |data| data.pages));
            }
            if at & 0xFFFF >= u64::from(known.1) {
                return Err(Flaw::NoPage { page: at & 0xFFFF, mblock: at >> 16 });
            }
        }
        Ok(places)
    }

    /// Reads the blocks of leaves that lie one behind the other.
    fn read_leaves(&self, first: &Leaf, into: &mut [u8]) -> Result<(), Flaw> {
        Ok(self.pool.mblock(first.mblock)?.read(u64::from(first.slot) * BLOCK as u64, into)?)
    }
}

/// Leaves that are being read.
pub(super) struct Leaves<'a, I: Iterator<Item = (usize, &'a Leaf)>> {
    view: &'a View,
    wanted: Peekable<I>,
    read: VecDeque<(usize, Result<Box<Places>, Flaw>)>,
    buffer: Option<AlignedBuf>,
}

impl<'a, I: Iterator<Item = (usize, &'a Leaf)>> Leaves<'a, I> {
    /// Reads some leaves that lie one behind the other.
    fn fill(&mut self) {
        let Some(first) = self.wanted.next() else { return };
        let mut batch = vec![first];
        let is_next = |batch: &[(usize, &Leaf)], leaf: &Leaf| {
            batch.len() < AT_ONCE
                && leaf.mblock == first.1.mblock
                && u64::from(leaf.slot) == u64::from(first.1.slot) + batch.len() as u64
        };
        while let Some(next) = self.wanted.next_if(|(_, leaf)| is_next(&batch, leaf)) {
            batch.push(next);
        }
        let buffer = self.buffer.get_or_insert_with(|| AlignedBuf::zeroed(AT_ONCE * BLOCK));
        let whole = self.view.read_leaves(first.1, &mut buffer[..batch.len() * BLOCK]).is_ok();
        for ((number, leaf), block) in batch.into_iter().zip(buffer.chunks_exact_mut(BLOCK)) {
            // Which of them cannot be read shows when each is read alone.
            let read = if whole { Ok(()) } else { self.view.read_leaves(leaf, block) };
            self.read.push_back((number, read.and_then(|()| self.view.parse(leaf, block))));
        }
    }
}

impl<'a, I: Iterator<Item = (usize, &'a Leaf)>> Iterator for Leaves<'a, I> {
    type Item = (usize, Result<Box<Places>, Flaw>);

    fn next(&mut self) -> Option<Self::Item> {
        if self.read.is_empty() {
            self.fill();
        }
        self.read.pop_front()
    }
}
