//! What a log consists of: frames behind a header, in two files; and how to tell an unfinished end
//! from damage.
//!
//! A frame is 24 bytes of header and a payload, padded with zeros to 8 bytes. Little-endian:
//!
//! | bytes | what |
//! |---|---|
//! | 0..4 | crc32c of generation (8 bytes), position of the frame (8 bytes), bytes 4..24, payload |
//! | 4..8 | length of the payload |
//! | 8..12 | number of the record |
//! | 12 | kind: 1 record, 2 clean close, 3 end of a compaction |
//! | 13..16 | zeros |
//! | 16..24 | where the durable part of the log ended when the frame was written |
//!
//! The generation changes when a log is erased, so frames from before it are none. The position
//! makes a frame that landed elsewhere none.
//!
//! **Two files** hold the same bytes, at the same positions. A frame that is whole in one of them
//! is there. Where neither has one, bytes behind it decide:
//!
//! - a whole frame that says that they were durable: they are **damaged**. A gap in the numbers
//!   shows how many records were lost;
//! - else they are an **unfinished end**: nobody was told that they are safe. They are cut off.
//!
//! **Blocks.** What follows a durable end begins in the next block, so that no block that holds
//! durable frames is written again: a power failure may destroy a block that is being written.

use crate::BLOCK;
use crate::error::{Damage, Object};

/// Bytes of a frame's header.
pub(crate) const HEADER: usize = 24;
/// The longest payload.
pub(crate) const MAX_PAYLOAD: usize = 1 << 24;

/// What a frame is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub(crate) enum Kind {
    Record = 1,
    /// Nothing follows that was not appended after another opening. Its number is the last
    /// record's.
    Close = 2,
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

/// A whole frame.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Frame<'a> {
    pub(crate) position: u64,
    pub(crate) number: u32,
    pub(crate) kind: Kind,
    /// All before this position was durable when the frame was written.
    pub(crate) durable: u64,
    pub(crate) payload: &'a [u8],
}

impl Frame<'_> {
    pub(crate) fn end(&self) -> u64 {
        self.position + frame_len(self.payload.len()) as u64
    }

    /// Adds the frame to `out`.
    pub(crate) fn encode(&self, generation: u64, out: &mut Vec<u8>) {
        let mut header = [0; HEADER];
        header[4..8].copy_from_slice(&(self.payload.len() as u32).to_le_bytes());
        header[8..12].copy_from_slice(&self.number.to_le_bytes());
        header[12] = self.kind as u8;
        header[16..].copy_from_slice(&self.durable.to_le_bytes());
        let crc = checksum(generation, self.position, &header[4..], self.payload);
        header[..4].copy_from_slice(&crc.to_le_bytes());
        out.extend_from_slice(&header);
        out.extend_from_slice(self.payload);
        out.resize(out.len().next_multiple_of(8), 0);
    }
}

/// The frame at `position` of a log, if a whole one is there.
pub(crate) fn decode(bytes: &[u8], generation: u64, position: u64) -> Option<Frame<'_>> {
    decode_at(bytes.get(usize::try_from(position).ok()?..)?, generation, position)
}

/// The frame at the start of `rest`, which is the part of a log from `position` on.
pub(crate) fn decode_at(rest: &[u8], generation: u64, position: u64) -> Option<Frame<'_>> {
    let header = rest.first_chunk::<HEADER>()?;
    let kind = match header[12] {
        1 => Kind::Record,
        2 => Kind::Close,
        3 => Kind::CompactionEnd,
        _ => return None,
    };
    let word = |at: usize| u32::from_le_bytes([header[at], header[at + 1], header[at + 2], header[at + 3]]);
    let durable = u64::from(word(16)) | u64::from(word(20)) << 32;
    let len = word(4) as usize;
    if header[13..16] != [0; 3] || len > MAX_PAYLOAD || durable > position {
        return None;
    }
    let payload = rest.get(HEADER..HEADER + len)?;
    // The padding is not in the checksum, but it must be what was written.
    if !is_zero(rest.get(HEADER + len..frame_len(len))?) {
        return None;
    }
    let whole = word(0) == checksum(generation, position, &header[4..], payload);
    whole.then_some(Frame { position, number: word(8), kind, durable, payload })
}

/// What a walk over a log found.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Walk {
    /// Where the last frame ends.
    pub(crate) end: u64,
    /// The number of the next record.
    pub(crate) next_number: u32,
    /// Bytes that are not what was written.
    pub(crate) damage: Vec<Damage>,
    /// Records that neither file has.
    pub(crate) lost: u32,
    /// Where neither file has frames, though there were some.
    pub(crate) gaps: Vec<(u64, u64)>,
    /// Whether there are bytes behind the end.
    pub(crate) torn: bool,
    /// The first frame that one file lacks, and of which nobody knows that it was durable.
    pub(crate) single: Option<u64>,
    /// All before this was durable when the last frame was written.
    pub(crate) durable: u64,
    /// Bytes of frames.
    pub(crate) content: u64,
    /// The last frame is that of a clean close.
    pub(crate) closed: bool,
}

/// Walks over the frames of a log from position 0. `copies` are what its files hold, from the first
/// frame on; `each` gets every frame that is whole in one of them.
pub(crate) fn walk(copies: [&[u8]; 2], generation: u64, object: Object, each: &mut dyn FnMut(&Frame<'_>)) -> Walk {
    let mut walk = Walk { next_number: 1, ..Walk::default() };
    // Frames that one file lacks: which file, and where the frame begins and ends.
    let mut lacking: Vec<(usize, u64, u64)> = Vec::new();
    loop {
        let found = copies.map(|bytes| decode(bytes, generation, walk.end));
        if let Some(frame) = found.iter().flatten().next() {
            for (copy, _) in found.iter().enumerate().filter(|(_, found)| found.is_none()) {
                lacking.push((copy, frame.position, frame.end()));
            }
            walk.step(frame);
            each(frame);
            continue;
        }
        let Some(next) = find_next(copies, generation, walk.end) else { break };
        let follows = next.durable == walk.end && next.position == walk.end.next_multiple_of(BLOCK as u64);
        let between =
            |bytes: &[u8]| bytes.get(walk.end as usize..next.position as usize).is_some_and(|bytes| !is_zero(bytes));
        if !follows {
            let what = "no whole frame in either file where a durable one was";
            walk.damage.push(Damage { object, offset: walk.end, what });
            walk.gaps.push((walk.end, next.position));
        } else if copies.into_iter().any(between) {
            let what = "bytes in the rest of a block";
            walk.damage.push(Damage { object, offset: walk.end, what });
        }
        walk.end = next.position;
    }
    let behind = |bytes: &[u8]| bytes.get(walk.end as usize..).is_some_and(|bytes| !is_zero(bytes));
    walk.torn = copies.into_iter().any(behind);
    for (copy, position, end) in lacking {
        if end <= walk.durable {
            let what = ["no whole frame in its first file", "no whole frame in its second file"][copy];
            walk.damage.push(Damage { object, offset: position, what });
        } else {
            // It was on its way to both files when the program ended.
            walk.single = walk.single.or(Some(position));
        }
    }
    walk
}

/// Whether all bytes are zeros; looks at many at a time.
pub(crate) fn is_zero(bytes: &[u8]) -> bool {
    bytes.chunks(256).all(|part| part.iter().fold(0, |all, byte| all | byte) == 0)
}

impl Walk {
    fn step(&mut self, frame: &Frame<'_>) {
        let next = frame.number.wrapping_add(1);
        let ahead = next.wrapping_sub(self.next_number);
        let skipped = if frame.kind == Kind::Close { ahead } else { ahead.wrapping_sub(1) };
        // Huge (behind) if the numbers of a damaged log make no sense.
        if skipped < u32::MAX / 2 {
            self.lost += skipped;
            self.next_number = next;
        }
        self.end = frame.end();
        self.durable = self.durable.max(frame.durable);
        self.content += self.end - frame.position;
        self.closed = frame.kind == Kind::Close;
    }
}

/// The first whole frame behind `position`, if one of those behind says that something there was
/// durable; or the one in the next block, if all before `position` was durable when it was written.
fn find_next<'a>(copies: [&'a [u8]; 2], generation: u64, position: u64) -> Option<Frame<'a>> {
    // Zeros begin no frame: its kind is none.
    let zeros = |bytes: &[u8]| bytes.rchunks(BLOCK).take_while(|chunk| is_zero(chunk)).map(<[u8]>::len).sum::<usize>();
    let len = copies.map(|bytes| bytes.len() - zeros(bytes)).into_iter().max()? as u64;
    let at = |place: u64| copies.into_iter().find_map(|bytes| decode(bytes, generation, place));
    let next = at(position.next_multiple_of(BLOCK as u64)).filter(|frame| frame.durable == position);
    let behind = || (position + 8..len).step_by(8).filter_map(at);
    next.or_else(|| behind().any(|frame| frame.durable > position).then(|| behind().next()).flatten())
}

#[cfg(test)]
mod tests;
