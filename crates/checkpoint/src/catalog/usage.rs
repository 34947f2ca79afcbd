//! What the checkpoints hold of the data mblocks.

use std::collections::{BTreeMap, HashMap};

use mpool::BLOCK;

use super::list::Data;
use super::{Checkpoint, Flaw, PAGES, View};

/// A bit for each page of a data mblock.
pub(super) type Bits = Box<[u64; PAGES / 64]>;

/// Sets of pages, by data mblock.
#[derive(Default)]
pub(super) struct Marked(HashMap<u64, Bits>);

impl Marked {
    /// Adds the page at a place.
    fn insert(&mut self, at: u64) {
        let bits = self.0.entry(at >> 16).or_insert_with(|| Box::new([0; PAGES / 64]));
        let page = (at & 0xFFFF) as usize;
        bits[page / 64 % (PAGES / 64)] |= 1 << (page % 64);
    }

    /// Whether it has the page at a place.
    pub(super) fn contains(&self, at: u64) -> bool {
        let page = (at & 0xFFFF) as usize;
        self.0.get(&(at >> 16)).is_some_and(|bits| bits[page / 64 % (PAGES / 64)] >> (page % 64) & 1 != 0)
    }

    /// Adds the pages of another set. Gives those that were there.
    fn unite(&mut self, other: Self) -> Self {
        let mut both = Self::default();
        for (mblock, new) in other.0 {
            let Some(bits) = self.0.get_mut(&mblock) else {
                self.0.insert(mblock, new);
                continue;
            };
            let mut common = new.clone();
            common.iter_mut().zip(bits.iter_mut()).zip(new.iter()).for_each(|((common, bits), new)| {
                *common &= *bits;
                *bits |= new;
            });
            both.0.insert(mblock, common);
        }
        both
    }

    /// Number of pages that are not in another set.
    fn count_without(&self, other: &Self) -> u64 {
        let left = |(mblock, bits): (&u64, &Bits)| {
            let others = other.0.get(mblock);
            let words = bits.iter().enumerate();
            words.map(|(i, word)| u64::from((word & !others.map_or(0, |bits| bits[i])).count_ones())).sum::<u64>()
        };
        self.0.iter().map(left).sum()
    }

    /// Number of marked pages of a data mblock.
    pub(super) fn count(&self, mblock: u64) -> u32 {
        self.0.get(&mblock).map_or(0, |bits| bits.iter().map(|word| word.count_ones()).sum())
    }

    /// Numbers of the marked pages of a data mblock, ascending.
    pub(super) fn pages(&self, mblock: u64) -> impl Iterator<Item = u64> {
        let words = self.0.get(&mblock).into_iter().flat_map(|bits| bits.iter().enumerate());
        words.flat_map(|(i, word)| (0..64).filter(move |bit| word >> bit & 1 != 0).map(move |bit| i as u64 * 64 + bit))
    }
}

/// The pages that a checkpoint holds.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Held {
    /// Pages of its memory that no other checkpoint has.
    pub alone: u64,
    /// Pages that are free when it is removed. Pages that it holds alone stay until
    /// [`Catalog::repack`](super::Catalog::repack), if another checkpoint holds their data mblock.
    pub freed: u64,
}

/// What the checkpoints hold of the data mblocks.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Usage {
    /// By name.
    pub checkpoints: BTreeMap<String, Held>,
    /// Pages in all data mblocks.
    pub stored: u64,
    /// Pages in data mblocks that a checkpoint has.
    pub live: u64,
    /// Pages in data mblocks that are compressed.
    pub compressed: u64,
    /// Bytes of blocks that these take, with their hashes.
    pub compressed_bytes: u64,
    /// Pages that repacking would free.
    pub repack: u64,
    /// Checkpoints whose maps cannot be read; what only they have does not count as live.
    pub unreadable: Vec<String>,
}

/// Whether repacking moves what is left of a data mblock: half of its pages are gone.
pub(super) fn is_sparse(pages: u32, live: u32) -> bool {
    live <= pages / 2
}

impl View {
    /// The pages that a map names, by data mblock.
    fn held(&self, checkpoint: &Checkpoint) -> Result<Marked, Flaw> {
        let (root, mut held) = (self.root(checkpoint)?, Marked::default());
        for (_, leaf) in self.leaves(root.named()) {
            leaf?.iter().filter(|at| **at != 0).for_each(|at| held.insert(*at));
        }
        Ok(held)
    }

    /// The pages that the maps name, by data mblock, and the checkpoints whose maps cannot be read.
    pub(super) fn live(&self) -> (Marked, Vec<&Checkpoint>) {
        self.named_by(&self.checkpoints)
    }

    /// The pages that the maps of some checkpoints name, and those whose maps cannot be read.
    pub(super) fn named_by<'a>(&self, some: &'a [Checkpoint]) -> (Marked, Vec<&'a Checkpoint>) {
        let (mut live, mut unreadable) = (Marked::default(), Vec::new());
        for checkpoint in some {
            match self.held(checkpoint) {
                Ok(held) => drop(live.unite(held)),
                Err(_) => unreadable.push(checkpoint),
            }
        }
        (live, unreadable)
    }

    /// Pages that a data mblock takes on the medium, without what every one has beside its pages.
    fn taken(&self, id: u64, data: &Data) -> u64 {
        let len = || self.pool.mblock(id).map_or(0, |mblock| mblock.props().len);
        if data.compressed { len().div_ceil(BLOCK as u64) } else { data.pages.into() }
    }

    /// What each checkpoint holds alone, and what repacking would give. Reads all maps twice.
    pub fn usage(&self) -> Usage {
        let (mut live, mut shared, mut usage) = (Marked::default(), Marked::default(), Usage::default());
        for checkpoint in &self.checkpoints {
            match self.held(checkpoint) {
                Ok(held) => drop(shared.unite(live.unite(held))),
                Err(_) => usage.unreadable.push(checkpoint.name.clone()),
            }
        }
        for checkpoint in &self.checkpoints {
            let alone = self.held(checkpoint).map_or(0, |held| held.count_without(&shared));
            let needed = checkpoint.needs.data.of(&self.data).filter_map(|id| Some((id, self.data.get(&id)?)));
            let freed = needed.filter(|(_, data)| data.needed == 1).map(|(id, data)| self.taken(id, data)).sum();
            usage.checkpoints.insert(checkpoint.name.clone(), Held { alone, freed });
        }
        for (id, data) in &self.data {
            let count = live.count(*id);
            usage.stored += u64::from(data.pages);
            usage.live += u64::from(count);
            if data.compressed {
                usage.compressed += u64::from(data.pages);
                usage.compressed_bytes += self.taken(*id, data) * BLOCK as u64;
            }
            if is_sparse(data.pages, count) {
                let gone = u64::from(data.pages - count.min(data.pages));
                usage.repack += self.taken(*id, data) * gone / u64::from(data.pages.max(1));
            }
        }
        usage
    }
}
