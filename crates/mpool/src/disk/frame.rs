//! What a log consists of: frames behind a header; and how to tell a torn tail from damage.
//!
//! A frame is 16 bytes of header and a payload, padded with zeros to 8 bytes. Little-endian:
//!
//! | bytes | what |
//! |---|---|
//! | 0..4 | crc32c of: generation (8 bytes), position of the frame (8 bytes), bytes 4..16, payload |
//! | 4..8 | length of the payload |
//! | 8..12 | number of the record |
//! | 12 | kind: 1 record, 2 durable mark, 3 end of a compaction |
//! | 13..16 | zeros |
//!
//! The generation changes when a log is erased, so frames from before it are none. The position
//! makes a frame that landed elsewhere none.
//!
//! **Durable marks.** After every successful sync a mark is written, itself not synced. It stands
//! only where everything before it had reached the medium. So of bytes that are no frame:
//!
//! - with a mark of this generation somewhere behind them, they were durable once and are
//!   **damaged**;
//! - else they are a **torn tail**: no one was told that they are safe. They are cut off.
//!
//! **Copies.** A log may hold each record more than once in a row, with the same number. Damage
//! to one copy loses nothing. A gap in the numbers shows which records were lost.

use crate::error::{Damage, Object};

/// Bytes of a frame's header.
pub(crate) const HEADER: usize = 16;
/// The longest payload.
pub(crate) const MAX_PAYLOAD: usize = 1 << 24;

/// What a frame is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub(crate) enum Kind {
    Record = 1,
    Mark = 2,
    CompactionEnd = 3,
}

/// Bytes of a frame with such a payload.
pub(crate) const fn frame_len(payload: usize) -> usize {
    HEADER + payload.next_multiple_of(8)
}

fn checksum(generation: u64, position: u64, header: &[u8], payload: &[u8]) -> u32 {
    let crc = crc32c::crc32c(&generation.to_le_bytes());
    let crc = crc32c::crc32c_append(crc, &position.to_le_bytes());
    let crc = crc32c::crc32c_append(crc, header);
    crc32c::crc32c_append(crc, payload)
}

/// Adds a frame to `out`. `position` is its place in the log.
pub(crate) fn encode(out: &mut Vec<u8>, generation: u64, position: u64, number: u32, kind: Kind, payload: &[u8]) {
    let mut header = [0; HEADER];
    header[4..8].copy_from_slice(&(payload.len() as u32).to_le_bytes());
    header[8..12].copy_from_slice(&number.to_le_bytes());
    header[12] = kind as u8;
    let crc = checksum(generation, position, &header[4..], payload);
    header[..4].copy_from_slice(&crc.to_le_bytes());
    out.extend_from_slice(&header);
    out.extend_from_slice(payload);
    out.resize(out.len().next_multiple_of(8), 0);
}

/// A whole frame.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Frame<'a> {
    pub(crate) position: u64,
    pub(crate) number: u32,
    pub(crate) kind: Kind,
    pub(crate) payload: &'a [u8],
}

impl Frame<'_> {
    pub(crate) fn end(&self) -> u64 {
        self.position + frame_len(self.payload.len()) as u64
    }
}

/// The frame at `position` of a log, if a whole one is there.
pub(crate) fn decode(bytes: &[u8], generation: u64, position: u64) -> Option<Frame<'_>> {
    decode_at(bytes.get(usize::try_from(position).ok()?..)?, generation, position)
}

/// The frame at the start of `rest`, which is the part of a log from `position` on.
pub(crate) fn decode_at(rest: &[u8], generation: u64, position: u64) -> Option<Frame<'_>> {
    let header = rest.first_chunk::<HEADER>()?;
    let word = |at: usize| u32::from_le_bytes([header[at], header[at + 1], header[at + 2], header[at + 3]]);
    let kind = match header[12] {
        1 => Kind::Record,
        2 => Kind::Mark,
        3 => Kind::CompactionEnd,
        _ => return None,
    };
    let len = word(4) as usize;
    if header[13..] != [0; 3] || len > MAX_PAYLOAD {
        return None;
    }
    let payload = rest.get(HEADER..HEADER + len)?;
    // The padding is not in the checksum, but it must be what was written.
    if rest.get(HEADER + len..frame_len(len))?.iter().any(|&b| b != 0) {
        return None;
    }
    let whole = word(0) == checksum(generation, position, &header[4..], payload);
    whole.then_some(Frame { position, number: word(8), kind, payload })
}

/// What a walk over a log found.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Walk {
    /// Where the next frame goes.
    pub(crate) end: u64,
    /// The number of the next record.
    pub(crate) next_number: u32,
    /// Bytes that are not what was written.
    pub(crate) damage: Vec<Damage>,
    /// Records that no copy is left of.
    pub(crate) lost: u32,
    /// Whether a tail was not whole.
    pub(crate) torn: bool,
    /// The last mark: all before it was durable when it was written.
    pub(crate) last_mark: Option<u64>,
}

/// Walks over the frames of a log from position 0. `each` gets every whole frame; a record of which
/// there are copies comes once for each copy.
pub(crate) fn walk(bytes: &[u8], generation: u64, object: Object, each: &mut dyn FnMut(&Frame<'_>)) -> Walk {
    let mut walk = Walk { next_number: 1, ..Walk::default() };
    let mut last_mark = None;
    loop {
        if let Some(frame) = decode(bytes, generation, walk.end) {
            // A mark has the number of the record before it.
            let next = frame.number.wrapping_add(1);
            let ahead = next.wrapping_sub(walk.next_number);
            let skipped = if frame.kind == Kind::Mark { ahead } else { ahead.wrapping_sub(1) };
            // Small when records are missing; huge (behind) for a copy.
            if skipped > 0 && skipped < u32::MAX / 2 {
                walk.lost += skipped;
            }
            if ahead < u32::MAX / 2 {
                walk.next_number = next;
            }
            if frame.kind == Kind::Mark {
                walk.last_mark = Some(frame.position);
            }
            walk.end = frame.end();
            each(&frame);
            continue;
        }
        let at = walk.end as usize;
        if bytes.get(at..).is_none_or(<[u8]>::is_empty) {
            return walk;
        }
        let mark = *last_mark.get_or_insert_with(|| find_last_mark(bytes, generation));
        if mark.is_none_or(|mark| mark < walk.end) {
            walk.torn = bytes[at..].iter().any(|&b| b != 0);
            return walk;
        }
        walk.damage.push(Damage { object, offset: walk.end, what: "no whole frame where a durable one was" });
        // There is a frame ahead: the mark, if no other.
        let mut next = walk.end + 8;
        while decode(bytes, generation, next).is_none() {
            next += 8;
        }
        walk.end = next;
    }
}

fn find_last_mark(bytes: &[u8], generation: u64) -> Option<u64> {
    let last = bytes.len().checked_sub(HEADER)? / 8 * 8;
    (0..=last / 8).rev().map(|word| word as u64 * 8).find(|&at| {
        bytes[at as usize + 12] == Kind::Mark as u8
            && decode(bytes, generation, at).is_some_and(|f| f.kind == Kind::Mark)
    })
}

#[cfg(test)]
mod tests;
