//! Pieces of runs in memory: those that were searched lately.

use std::collections::{HashMap, HashSet, VecDeque};

use mpool::{AlignedBuf, Mblock, Pool};

use super::{ENTRY_BYTES, PIECE, Part};
use crate::catalog::PageFlaw;

/// Entries by which a search goes on from where a key should be; about the deviation in a piece.
const STEP: usize = 16;
/// Bytes of a whole piece.
const BYTES: usize = PIECE * ENTRY_BYTES;

/// An mblock of a run that was searched.
struct Opened {
    mblock: Mblock,
    /// The first key of each piece.
    firsts: Vec<u64>,
}

struct Piece {
    /// Whole blocks.
    bytes: AlignedBuf,
    /// Bytes of entries.
    len: usize,
    /// Whether it was searched since the hand passed it.
    used: bool,
}

/// Pieces in memory.
pub(super) struct Pieces {
    pool: Pool,
    limit: usize,
    opened: HashMap<u64, Opened>,
    pieces: HashMap<(u64, u32), Piece>,
    /// The pieces in the order in which the hand passes them.
    hand: VecDeque<(u64, u32)>,
    /// Mblocks that cannot be read.
    bad: HashSet<u64>,
    /// Why the first of them cannot be read.
    flaw: Option<PageFlaw>,
}

/// Opens an mblock of a run, if it has the length that its record says.
pub(super) fn open(pool: &Pool, part: &Part) -> Result<Mblock, PageFlaw> {
    let mblock = pool.mblock(part.id)?;
    let (is, (_, expected)) = (mblock.props().len, part.lens());
    if is != expected {
        return Err(PageFlaw::Index { mblock: part.id, is, expected });
    }
    Ok(mblock)
}

/// The numbers in little-endian bytes.
fn numbers(bytes: &[u8]) -> impl Iterator<Item = u64> + '_ {
    bytes.as_chunks::<8>().0.iter().map(|number| u64::from_le_bytes(*number))
}

/// The key and the place of an entry.
pub(super) fn entry(bytes: &[u8; ENTRY_BYTES]) -> (u64, u64) {
    let mut numbers = numbers(bytes);
    (numbers.next().unwrap_or(0), numbers.next().unwrap_or(0))
}

/// The number of the first entry whose key is not below `key`; `next` is the key behind them. Keys
/// are hashes, so an entry is about where its key's value says, and few of them are looked at.
fn position(entries: &[[u8; ENTRY_BYTES]], key: u64, next: u64) -> usize {
    let is_below = |at: usize| entry(&entries[at]).0 < key;
    let first = entries.first().map_or(0, |bytes| entry(bytes).0);
    let share = key.saturating_sub(first) as f64 / next.saturating_sub(first).max(1) as f64;
    let guess = ((share * entries.len() as f64) as usize).min(entries.len());
    let (mut low, mut high, mut step) = (guess, guess, STEP);
    while low > 0 && (low == entries.len() || !is_below(low)) {
        low = low.saturating_sub(step);
        step *= 2;
    }
    step = STEP;
    while high < entries.len() && is_below(high) {
        high = (high + step).min(entries.len());
        step *= 2;
    }
    low + entries[low..high].partition_point(|bytes| entry(bytes).0 < key)
}

impl Pieces {
    pub(super) fn new(pool: &Pool, limit: usize) -> Self {
        let (opened, pieces, hand, bad) = (HashMap::new(), HashMap::new(), VecDeque::new(), HashSet::new());
        Self { pool: pool.clone(), limit, opened, pieces, hand, bad, flaw: None }
    }

    /// The place that an mblock of a run has for a key.
    pub(super) fn find(&mut self, part: &Part, key: u64) -> Option<u64> {
        if self.bad.contains(&part.id) {
            return None;
        }
        self.search(part, key).unwrap_or_else(|flaw| {
            self.bad.insert(part.id);
            self.note(Some(flaw));
            None
        })
    }

    fn search(&mut self, part: &Part, key: u64) -> Result<Option<u64>, PageFlaw> {
        if !self.opened.contains_key(&part.id) {
            let mblock = open(&self.pool, part)?;
            let (entries, len) = part.lens();
            let mut bytes = vec![0; (len - entries) as usize];
            mblock.read(entries, &mut bytes)?;
            self.opened.insert(part.id, Opened { mblock, firsts: numbers(&bytes).collect() });
        }
        let Some(opened) = self.opened.get(&part.id) else { return Ok(None) };
        let Some(number) = opened.firsts.partition_point(|first| *first <= key).checked_sub(1) else { return Ok(None) };
        let next = opened.firsts.get(number + 1).copied().unwrap_or(u64::MAX);
        let name = (part.id, number as u32);
        if !self.pieces.contains_key(&name) {
            let at = number * BYTES;
            let len = BYTES.min(part.lens().0 as usize - at);
            let mut bytes = AlignedBuf::zeroed(len);
            opened.mblock.read(at as u64, &mut bytes[..len])?;
            self.make_room();
            self.pieces.insert(name, Piece { bytes, len, used: false });
            self.hand.push_back(name);
        }
        let Some(piece) = self.pieces.get_mut(&name) else { return Ok(None) };
        piece.used = true;
        let entries = piece.bytes[..piece.len].as_chunks::<ENTRY_BYTES>().0;
        let at = position(entries, key, next);
        Ok(entries.get(at).map(entry).filter(|entry| entry.0 == key).map(|entry| entry.1))
    }

    /// Gives up a piece that was not searched since the hand passed it last.
    fn make_room(&mut self) {
        while self.pieces.len() >= self.limit.max(1)
            && let Some(name) = self.hand.pop_front()
        {
            match self.pieces.get_mut(&name) {
                Some(piece) if piece.used => {
                    piece.used = false;
                    self.hand.push_back(name);
                }
                _ => drop(self.pieces.remove(&name)),
            }
        }
    }

    /// Forgets mblocks.
    pub(super) fn forget<'a>(&mut self, mblocks: impl Iterator<Item = &'a u64>) {
        let gone: HashSet<u64> = mblocks.copied().collect();
        self.opened.retain(|id, _| !gone.contains(id));
        self.pieces.retain(|(id, _), _| !gone.contains(id));
        self.hand.retain(|(id, _)| !gone.contains(id));
    }

    pub(super) fn note(&mut self, flaw: Option<PageFlaw>) {
        self.flaw = self.flaw.take().or(flaw);
    }

    pub(super) fn flaw(&self) -> Option<&PageFlaw> {
        self.flaw.as_ref()
    }

    pub(super) fn memory(&self) -> usize {
        let firsts: usize = self.opened.values().map(|opened| opened.firsts.capacity() * 8 + 128).sum();
        // A checksum of 4 bytes for each block is in memory too.
        let pieces: usize = self.pieces.values().map(|piece| piece.bytes.len() + piece.bytes.len() / 1024 + 128).sum();
        firsts + pieces
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_key_is_found_wherever_it_lies() {
        let entries: Vec<[u8; ENTRY_BYTES]> = [3_u64, 4, 5, 6, 7, 8, 9, 1 << 20, 1 << 60]
            .iter()
            .map(|key| {
                let mut bytes = [0; ENTRY_BYTES];
                bytes[..8].copy_from_slice(&key.to_le_bytes());
                bytes
            })
            .collect();
        for entries in (0..=9).map(|len| &entries[..len]) {
            for key in [0, 3, 4, 9, 10, 1 << 20, (1 << 20) + 1, 1 << 60, u64::MAX] {
                let want = entries.partition_point(|bytes| entry(bytes).0 < key);
                for next in [0, 10, 1 << 61, u64::MAX] {
                    assert_eq!(position(entries, key, next), want, "{key} of {}", entries.len());
                }
            }
        }
    }
}
