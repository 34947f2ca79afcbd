//! Making a log's two files what one of them is.
//!
//! At no time is a block written of which the other file does not have a synced copy:
//!
//! - **Headers.** Erasing writes file 0 and syncs it, then file 1. So where file 1 has a whole
//!   older header, that of file 0 may be in the page cache only: it is written again, and synced,
//!   before file 1 is. In all other cases a whole one is on its medium, and only the other is
//!   written.
//! - **Frames.** First the blocks that differ from what was found, of one file and then the other.
//!   Then the last blocks, behind what is known to be durable: they may be in the page cache only,
//!   if a sync failed before.
//!
//! A block in which neither file has what was written stays as it is, for whoever can read more.

use super::copy::Copy;
use super::{DATA, Log, Place, STEP, header, names};
use crate::BLOCK;
use crate::disk::medium::{MediumFile, Open};
use crate::error::{During, ObjectError};

/// What [`Log::mend`] needs to know.
pub(crate) struct Mending {
    pub(super) copies: [Copy; 2],
    /// All frames that were found.
    pub(super) whole: Vec<u8>,
    /// Where neither file has frames.
    pub(super) gaps: Vec<(u64, u64)>,
    /// All before it was durable.
    pub(super) durable: u64,
    /// Whether something unfinished is behind the end.
    pub(super) torn: bool,
}

impl Mending {
    /// Blocks that may be written: what belongs there is known.
    fn blocks(&self) -> impl Iterator<Item = u64> {
        let known = |at: &u64| self.gaps.iter().all(|&(from, to)| to <= *at || at + BLOCK as u64 <= from);
        (0..self.whole.len() as u64).step_by(BLOCK).filter(known)
    }

    /// What belongs there: to the end of the block.
    fn block(&self, at: u64) -> Vec<u8> {
        let at = at as usize;
        let mut bytes = self.whole[at..self.whole.len().min(at + BLOCK)].to_vec();
        bytes.resize(BLOCK, 0);
        bytes
    }

    fn is_right(&self, i: usize, at: u64) -> bool {
        let (from, to) = (at as usize, self.whole.len().min(at as usize + BLOCK));
        self.copies[i].knows(at) && self.copies[i].frames().get(from..to) == Some(&self.whole[from..to])
    }
}

impl Log {
    /// Makes both files what they should be, with all that was found in them, and syncs them.
    pub(crate) fn mend(&mut self, place: &Place<'_>, mending: &Mending) -> Result<(), ObjectError> {
        if self.broken.is_some() {
            return Ok(());
        }
        let object = self.object;
        for (i, name) in names(place.name).iter().enumerate() {
            if mending.copies[i].file.is_none() {
                let file = place.medium.open(name, Open { create: true, ..Open::default() });
                self.files[i] = file.during("making", object)?;
            }
        }
        self.mend_headers(mending)?;
        let mut again = [Vec::new(), Vec::new()];
        for (i, again) in again.iter_mut().enumerate() {
            let file = &*self.files[i];
            if mending.torn || mending.copies[i].frames().len() < mending.whole.len() {
                file.set_len(DATA + self.end).during("cutting", object)?;
                // Without space the file stays short; the next append asks for it again.
                let _ = file.allocate(DATA + self.end, self.allocated.max(STEP).saturating_sub(self.end));
            }
            let (right, wrong): (Vec<u64>, Vec<u64>) = mending.blocks().partition(|&at| mending.is_right(i, at));
            if !wrong.is_empty() {
                write(file, object, mending, &wrong)?;
            }
            *again = right.into_iter().filter(|&at| at >= mending.durable).collect();
        }
        for (file, again) in self.files.iter().zip(again) {
            write(&**file, object, mending, &again)?;
        }
        Ok(())
    }

    fn mend_headers(&self, mending: &Mending) -> Result<(), ObjectError> {
        let whole = mending.copies.each_ref().map(|copy| copy.has_whole_header(self.generation, self.id));
        let older = mending.copies[1].generation(self.id).is_some_and(|generation| generation < self.generation);
        for (file, _) in self.files.iter().zip([!whole[0] || older, !whole[1]]).filter(|(_, wrong)| *wrong) {
            file.write_at(&header(self.generation, self.id), 0).during("repairing", self.object)?;
            file.sync().during("syncing", self.object)?;
        }
        Ok(())
    }
}

/// Writes blocks of frames, and syncs the file.
fn write(file: &dyn MediumFile, object: crate::Object, mending: &Mending, blocks: &[u64]) -> Result<(), ObjectError> {
    for &at in blocks {
        // A block of allocated space reads as zeros until its first write has ended. When that
        // fails, ext4 (6.12) takes the next write of the cached page for a later one: it is synced,
        // and the block reads as zeros after a mount. Without a page it is a first one again. Where
        // this fails, the write alone must do.
        let _ = file.clear(DATA + at, BLOCK as u64);
        file.write_at(&mending.block(at), DATA + at).during("writing again", object)?;
    }
    Ok(file.sync().during("syncing", object)?)
}
