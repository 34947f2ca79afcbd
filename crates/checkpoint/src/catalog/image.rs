//! The memory of a checkpoint, to be read page by page in any order.

use std::collections::HashMap;

use mpool::{BLOCK, Mblock};

use super::map::LEAF;
use super::{Checkpoint, Flaw, ReadError, View};

/// A checkpoint that is open for reading. What it needs must stay in the pool: whoever has it keeps
/// the pool open.
pub struct Image {
    view: View,
    name: String,
    /// The place of each page; 0 is zeros. 8 bytes for 4 KiB.
    places: Vec<u64>,
    /// The data mblocks. Kept open, since each reads its checksums only once.
    mblocks: HashMap<u64, Mblock>,
}

impl View {
    /// Opens the memory of a checkpoint: all regions, one after the other. Reads its map.
    ///
    /// # Errors
    /// If the map cannot be read, or a data mblock that it names is not there.
    pub fn image(&self, checkpoint: &Checkpoint) -> Result<Image, ReadError> {
        let flawed = |flaw: Flaw| self.damaged(&checkpoint.name, flaw);
        let root = self.root(checkpoint).map_err(flawed)?;
        let mut places = vec![0; (checkpoint.bytes() / BLOCK as u64) as usize];
        for (number, leaf) in self.leaves(root.named()) {
            let pages = places.iter_mut().skip(number * LEAF);
            pages.zip(*leaf.map_err(flawed)?).for_each(|(to, at)| *to = at);
        }
        let open = |id: u64| Ok((id, self.pool.mblock(id)?));
        let mblocks: Result<HashMap<u64, Mblock>, Flaw> = root.data().of(&self.data).map(open).collect();
        let mblocks = mblocks.map_err(flawed)?;
        Ok(Image { view: self.clone(), name: checkpoint.name.clone(), places, mblocks })
    }
}

impl Image {
    /// Number of pages.
    pub fn pages(&self) -> u64 {
        self.places.len() as u64
    }

    /// The numbers of the pages that are not zeros, in ascending order.
    pub fn filled(&self) -> impl Iterator<Item = u64> + '_ {
        (0..).zip(&self.places).filter(|(_, at)| **at != 0).map(|(page, _)| page)
    }

    /// Reads whole pages from number `first` on, and checks them. Pages behind the last one are
    /// zeros.
    ///
    /// # Errors
    /// If the pool does not hold what was stored. `into` holds anything then.
    ///
    /// # Panics
    /// If `into` is not whole pages.
    pub fn read(&self, first: u64, into: &mut [u8]) -> Result<(), ReadError> {
        assert!(into.len().is_multiple_of(BLOCK), "whole pages are read");
        let places: Vec<u64> = (first..)
            .take(into.len() / BLOCK)
            .map(|page| self.places.get(page as usize).copied().unwrap_or(0))
            .collect();
        let mut done = 0;
        while done < places.len() {
            let at = places[done];
            // Pages with consecutive places are read at once.
            let follows = |i: &usize| places.get(done + i) == Some(&if at == 0 { 0 } else { at + *i as u64 });
            let run = (1..).take_while(follows).count() + 1;
            let bytes = &mut into[done * BLOCK..(done + run) * BLOCK];
            if at == 0 {
                bytes.fill(0)
            } else {
                self.read_run(at, bytes).map_err(|e| self.view.damaged(&self.name, e))?
            }
            done += run;
        }
        Ok(())
    }

    fn read_run(&self, at: u64, bytes: &mut [u8]) -> Result<(), Flaw> {
        let gone = || Flaw::NoPage { page: at & 0xFFFF, mblock: at >> 16 };
        let mblock = self.mblocks.get(&(at >> 16)).ok_or_else(gone)?;
        Ok(mblock.read((at & 0xFFFF) * BLOCK as u64, bytes)?)
    }
}
