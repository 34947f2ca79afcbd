//! The two files of a log, read: where one is missing, or a part of it cannot be read, it has
//! zeros.

use std::io;
use std::sync::Arc;

use super::{DATA, Place, decode_header, header, names};
use crate::BLOCK;
use crate::disk::frame;
use crate::disk::medium::{Access, MediumFile, Open};
use crate::error::{During, ObjectError};

/// One of a log's files, and what is in it. Bytes that cannot be read are zeros.
pub(super) struct Copy {
    /// `None`: it is missing.
    pub(super) file: Option<Arc<dyn MediumFile>>,
    pub(super) bytes: Vec<u8>,
    /// Blocks that cannot be read, by their place in the file.
    pub(super) bad: Vec<u64>,
}

impl Copy {
    fn read(file: Arc<dyn MediumFile>, place: &Place<'_>) -> Result<Self, ObjectError> {
        let len = file.len().during("looking at", place.object)?;
        let mut bytes = claims::zeroed(len).during("reading", place.object)?;
        let bad = read_blocks(&*file, &mut bytes);
        Ok(Self { file: Some(file), bytes, bad })
    }

    /// Why a part of it, or all, is not what was written.
    pub(super) fn damage(&self) -> Option<(u64, &'static str)> {
        match self.file {
            None => Some((0, "one of its two files is missing")),
            Some(_) => Some((*self.bad.first()?, "a part of one of its files cannot be read")),
        }
    }

    pub(super) fn generation(&self, id: u64) -> Option<u64> {
        self.bytes.get(..BLOCK).and_then(|block| decode_header(block, id))
    }

    pub(super) fn has_whole_header(&self, generation: u64, id: u64) -> bool {
        self.bytes.get(..BLOCK).is_some_and(|block| *block == *header(generation, id))
    }

    pub(super) fn frames(&self) -> &[u8] {
        self.bytes.get(DATA as usize..).unwrap_or(&[])
    }

    /// Whether it says what a block, by its place among the frames, holds: also that it holds
    /// nothing.
    pub(super) fn knows(&self, at: u64) -> bool {
        self.file.is_some() && DATA + at < self.bytes.len() as u64 && !self.bad.contains(&(DATA + at))
    }
}

/// The log's files, where they are there.
pub(super) fn copies(place: &Place<'_>, access: Access) -> Result<[Copy; 2], ObjectError> {
    let how = Open { read_only: access == Access::Shared, ..Open::default() };
    let open = |name: &String| match place.medium.open(name, how) {
        Err(e) if e.kind() == io::ErrorKind::NotFound => Ok(Copy { file: None, bytes: Vec::new(), bad: Vec::new() }),
        file => Copy::read(file.during("opening", place.object)?, place),
    };
    let [first, second] = names(place.name);
    Ok([open(&first)?, open(&second)?])
}

/// Reads a file from its start; blocks that cannot be read become zeros. Returns where they are.
pub(super) fn read_blocks(file: &dyn MediumFile, into: &mut [u8]) -> Vec<u64> {
    let mut bad = Vec::new();
    if file.read_at(into, 0).is_err() {
        for (at, block) in (0u64..).step_by(BLOCK).zip(into.chunks_mut(BLOCK)) {
            if file.read_at(block, at).is_err() {
                block.fill(0);
                bad.push(at);
            }
        }
    }
    bad
}

/// Generations and blocks that are tried for a log that has lost its header.
const GENERATIONS: u64 = 1 << 16;
const BLOCKS: usize = 64;

/// The generation of a log whose header neither file has: that of the first whole frame at the
/// start of a block.
pub(super) fn lost_generation(copies: [&[u8]; 2]) -> Option<u64> {
    let starts = (0..BLOCKS).map(|block| block * BLOCK);
    starts.flat_map(|at| copies.map(|bytes| (at, bytes))).find_map(|(at, bytes)| {
        let rest = bytes.get(at..)?;
        // Longer ones would take long.
        let rest = &rest[..rest.len().min(frame::HEADER + (64 << 10))];
        let may_be = rest.get(12).is_some_and(|kind| (1..=3).contains(kind));
        let whole = |&generation: &u64| frame::decode_at(rest, generation, at as u64).is_some();
        may_be.then(|| (1..=GENERATIONS).find(whole)).flatten()
    })
}
