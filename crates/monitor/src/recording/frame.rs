//! Frames: the pieces of a recording.
//!
//! ```text
//! file    MAGIC, then frames
//! frame   SYNC 4 · kind 1 · length of the payload 4 · number 4 · time 8 · summary 40 · CRC32C 4 ·
//!         payload
//! ```
//!
//! Numbers are little-endian. The checksum is over everything between SYNC and itself, and over the
//! payload. A reader that finds damage looks for the next SYNC whose frame has the right checksum.

use crate::moment::Summary;

/// How a recording begins. The number is the format's version.
pub(super) const MAGIC: [u8; 16] = *b"PageONE record 1";
/// The beginning of [`MAGIC`], which every version has.
pub(super) const FAMILY: &[u8] = b"PageONE record ";
/// How a frame begins: bytes that neither text nor deflate begins with.
pub(super) const SYNC: [u8; 4] = [0xa5, 0x1f, 0xf4, 0x5a];
/// Bytes before the payload.
pub(super) const HEAD: usize = SYNC.len() + 1 + 4 + 4 + 8 + SUMMARY + 4;
/// The last time that is understood: the year 9999, in milliseconds since 1970.
const LAST: i64 = 253_402_200_000_000;
/// The longest payload, in bytes; and the longest that one may inflate to.
pub(super) const MAX_PAYLOAD: usize = 16 << 20;
const SUMMARY: usize = 5 * 8;

/// What a frame holds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Kind {
    /// A whole moment.
    Key,
    /// What changed since the frame before.
    Delta,
    /// What is asked for less often than the status: see [`crate::Depth`].
    Depth,
}

/// What stands before a payload.
#[derive(Clone, Copy, Debug)]
pub(super) struct Head {
    pub(super) kind: Kind,
    /// Length of the payload in bytes.
    pub(super) length: usize,
    /// That of the frame before of a moment, and one.
    pub(super) number: u32,
    /// Milliseconds since 1970.
    pub(super) time: i64,
    pub(super) summary: Summary,
    crc: u32,
    /// That of the head's own bytes.
    own_crc: u32,
}

fn values(summary: &Summary) -> [f64; 5] {
    [summary.used, summary.saved, summary.could_be_saved, summary.cpu, summary.clients]
}

/// A frame's bytes.
pub(super) fn encode(kind: Kind, number: u32, time: i64, summary: &Summary, payload: &[u8]) -> Vec<u8> {
    let mut out = Vec::with_capacity(HEAD + payload.len());
    out.extend(SYNC);
    out.push(match kind {
        Kind::Key => 0,
        Kind::Delta => 1,
        Kind::Depth => 2,
    });
    out.extend((payload.len() as u32).to_le_bytes());
    out.extend(number.to_le_bytes());
    out.extend(time.to_le_bytes());
    values(summary).iter().for_each(|value| out.extend(value.to_le_bytes()));
    let crc = crc32c::crc32c_append(crc32c::crc32c(&out[SYNC.len()..]), payload);
    out.extend(crc.to_le_bytes());
    out.extend(payload);
    out
}

/// Understands the bytes before a payload. `None`: they are not a frame's.
pub(super) fn decode(bytes: &[u8; HEAD]) -> Option<Head> {
    let (sync, rest) = bytes.split_first_chunk::<4>()?;
    let kind = match rest[0] {
        0 => Kind::Key,
        1 => Kind::Delta,
        2 => Kind::Depth,
        _ => return None,
    };
    let own_crc = crc32c::crc32c(&rest[..HEAD - SYNC.len() - 4]);
    let (length, rest) = rest[1..].split_first_chunk()?;
    let length = u32::from_le_bytes(*length) as usize;
    if *sync != SYNC || length > MAX_PAYLOAD {
        return None;
    }
    let (number, rest) = rest.split_first_chunk()?;
    let (time, rest) = rest.split_first_chunk()?;
    let value = |at: usize| Some(f64::from_le_bytes(*rest[8 * at..].first_chunk()?));
    let summary =
        Summary { used: value(0)?, saved: value(1)?, could_be_saved: value(2)?, cpu: value(3)?, clients: value(4)? };
    let crc = u32::from_le_bytes(*rest[SUMMARY..].first_chunk()?);
    let time = i64::from_le_bytes(*time);
    if !(0..=LAST).contains(&time) {
        return None;
    }
    let number = u32::from_le_bytes(*number);
    Some(Head { kind, length, number, time, summary, crc, own_crc })
}

impl Head {
    /// Whether this payload belongs to it, and both are as they were written.
    pub(super) fn fits(&self, payload: &[u8]) -> bool {
        // A fuzzer finds no checksums.
        if cfg!(fuzzing) {
            return payload.len() == self.length;
        }
        payload.len() == self.length && crc32c::crc32c_append(self.own_crc, payload) == self.crc
    }
}
