//! Merging runs, and writing one.

use std::cell::RefCell;
use std::io::IoSlice;
use std::iter::Peekable;

use mpool::{Mblock, MblockWriter, ObjectError, Pool};

use super::pieces::{entry, open};
use super::{ENTRY_BYTES, PART, PIECE, Part, Run};
use crate::catalog::PageFlaw;
use crate::catalog::classes::{Holds, allocate};
use crate::catalog::index::near::ByKey;

/// Bytes that are read at once: 1 MiB.
const READ: usize = 64 * PIECE * ENTRY_BYTES;

/// The collected entries, ascending by key.
pub(super) struct Collected(std::vec::IntoIter<(u64, u64)>);

impl Collected {
    pub(super) fn new(entries: &ByKey) -> Self {
        let mut entries: Vec<(u64, u64)> = entries.iter().map(|(key, at)| (*key, *at)).collect();
        entries.sort_unstable();
        Self(entries.into_iter())
    }

    pub(super) fn len(&self) -> usize {
        self.0.len()
    }
}

/// The entries of a run, ascending by key. A part that cannot be read is left out.
struct Reader<'a> {
    pool: &'a Pool,
    parts: std::vec::IntoIter<Part>,
    /// The part that is being read, and how many bytes of it were.
    now: Option<(Mblock, u64, u64)>,
    bytes: Vec<u8>,
    at: usize,
    /// Why the first part that cannot be read cannot be.
    flaw: &'a RefCell<Option<PageFlaw>>,
}

impl Reader<'_> {
    fn note(&self, flaw: PageFlaw) {
        self.flaw.borrow_mut().get_or_insert(flaw);
    }

    /// Reads more entries. False: there are none.
    fn fill(&mut self) -> bool {
        loop {
            let Some((mblock, done, len)) = self.now.take_if(|(_, done, len)| done < len) else {
                let Some(part) = self.parts.next() else { return false };
                match open(self.pool, &part) {
                    Ok(mblock) => self.now = Some((mblock, 0, part.lens().0)),
                    Err(flaw) => self.note(flaw),
                }
                continue;
            };
            self.bytes.resize(READ.min((len - done) as usize), 0);
            self.at = 0;
            match mblock.read(done, &mut self.bytes) {
                Ok(()) => {
                    self.now = Some((mblock, done + self.bytes.len() as u64, len));
                    return true;
                }
                Err(e) => {
                    self.note(e.into());
                    self.bytes.clear();
                }
            }
        }
    }
}

impl Iterator for Reader<'_> {
    type Item = (u64, u64);

    fn next(&mut self) -> Option<(u64, u64)> {
        if self.at == self.bytes.len() && !self.fill() {
            return None;
        }
        let bytes = self.bytes.get(self.at..)?.first_chunk::<ENTRY_BYTES>()?;
        self.at += ENTRY_BYTES;
        Some(entry(bytes))
    }
}

/// The mblocks of a run that is being written.
struct Output<'a> {
    pool: &'a Pool,
    /// Entries that may still come.
    left: u64,
    full: Vec<(MblockWriter, Part)>,
    part: Option<(MblockWriter, Part)>,
    bytes: Vec<u8>,
    firsts: Vec<u8>,
}

impl Output<'_> {
    fn push(&mut self, key: u64, at: u64) -> Result<(), ObjectError> {
        if self.part.is_none() {
            let most = self.left.min(PART);
            let (_, capacity) = Part { id: 0, entries: most as u32, first: 0 }.lens();
            let writer = allocate(self.pool, Holds::Soon, capacity)?;
            let part = Part { id: writer.id(), entries: 0, first: key };
            self.part = Some((writer, part));
        }
        let Some((writer, part)) = &mut self.part else { return Ok(()) };
        if (part.entries as usize).is_multiple_of(PIECE) {
            self.firsts.extend(key.to_le_bytes());
        }
        self.bytes.extend(key.to_le_bytes());
        self.bytes.extend(at.to_le_bytes());
        part.entries += 1;
        self.left = self.left.saturating_sub(1);
        if self.bytes.len() >= READ {
            writer.write(&[IoSlice::new(&self.bytes)])?;
            self.bytes.clear();
        }
        if u64::from(part.entries) == PART { self.end_part() } else { Ok(()) }
    }

    fn end_part(&mut self) -> Result<(), ObjectError> {
        let Some((mut writer, part)) = self.part.take() else { return Ok(()) };
        writer.write(&[IoSlice::new(&self.bytes), IoSlice::new(&self.firsts)])?;
        self.bytes.clear();
        self.firsts.clear();
        self.full.push((writer, part));
        Ok(())
    }
}

/// Merges runs, the oldest first, and then the collected entries into mblocks. Of two entries with
/// one key the later one counts, if it is to be kept. Also gives the first reason why some could
/// not be read.
pub(super) fn merge(
    pool: &Pool,
    runs: &[Run],
    collected: Collected,
    most: u64,
    keep: &dyn Fn(u64, u64) -> bool,
) -> Result<(Vec<Part>, Option<PageFlaw>), ObjectError> {
    let mut output = Output { pool, left: most, full: Vec::new(), part: None, bytes: Vec::new(), firsts: Vec::new() };
    let mut collected = collected.0.peekable();
    let flaw = RefCell::new(None);
    let parts = |run: &Run| run.parts.clone().into_iter();
    let reader = |run| Reader { pool, parts: parts(run), now: None, bytes: Vec::new(), at: 0, flaw: &flaw }.peekable();
    let mut readers: Vec<Peekable<Reader<'_>>> = runs.iter().map(reader).collect();
    loop {
        let heads = readers.iter_mut().filter_map(|reader| reader.peek().map(|entry| entry.0));
        let Some(key) = heads.chain(collected.peek().map(|entry| entry.0)).min() else { break };
        let mut found = None;
        let old = readers.iter_mut().filter_map(|reader| reader.next_if(|entry| entry.0 == key));
        for (key, at) in old.chain(collected.next_if(|entry| entry.0 == key)) {
            found = if keep(key, at) { Some(at) } else { found };
        }
        if let Some(at) = found {
            output.push(key, at)?;
        }
    }
    drop(readers);
    output.end_part()?;
    let (writers, parts): (Vec<MblockWriter>, Vec<Part>) = output.full.into_iter().unzip();
    MblockWriter::commit_all(writers)?;
    Ok((parts, flaw.into_inner()))
}
