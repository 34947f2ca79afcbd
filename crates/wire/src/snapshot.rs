//! Where the pages of a clone's RAM lie in the segments of its snapshot: what the agent in it gets.

use crate::{PageNo, Run};

/// Bytes of a part.
const LEN: usize = 12;

/// Consecutive pages that lie in consecutive slots.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Part {
    /// The pages of the RAM.
    pub run: Run,
    /// The slot of the first: those of the second segment follow those of the first, and so on.
    pub slot: u32,
}

/// The parts as bytes: first page, number of pages and slot of each, in 4 bytes each.
pub fn encode_parts(parts: &[Part]) -> Vec<u8> {
    let words = |part: &Part| [part.run.page.0, part.run.len, part.slot];
    parts.iter().flat_map(words).flat_map(u32::to_le_bytes).collect()
}

/// The parts that these bytes stand for. `None`: they are not ascending and disjoint, or go beyond
/// this number of pages or slots.
pub fn decode_parts(bytes: &[u8], pages: u32, slots: u32) -> Option<Vec<Part>> {
    let (parts, rest) = bytes.as_chunks::<LEN>();
    let mut next = 0;
    let part = |bytes: &[u8; LEN]| {
        let [page, len, slot] = [0, 4, 8].map(|at| u32::from_le_bytes([0, 1, 2, 3].map(|i| bytes[at + i])));
        let (end, last) = (page.checked_add(len)?, slot.checked_add(len)?);
        let fits = len > 0 && page >= next && end <= pages && last <= slots;
        next = end;
        fits.then_some(Part { run: Run::new(PageNo(page), len), slot })
    };
    if rest.is_empty() { parts.iter().map(part).collect() } else { None }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn part(page: u32, len: u32, slot: u32) -> Part {
        Part { run: Run::new(PageNo(page), len), slot }
    }

    #[test]
    fn parts_survive_their_bytes_and_nothing_else_is_one() {
        let parts = [part(0, 3, 7), part(3, 128, 100), part(500, 1, 100)];
        let bytes = encode_parts(&parts);
        assert_eq!(decode_parts(&bytes, 501, 228).unwrap(), parts);
        assert_eq!(decode_parts(&bytes, 500, 228), None, "behind the RAM");
        assert_eq!(decode_parts(&bytes, 501, 227), None, "behind the segments");
        assert_eq!(decode_parts(&bytes[1..], 501, 228), None);
        for wrong in [part(0, 0, 0), part(u32::MAX, 2, 0), part(1, 2, u32::MAX)] {
            assert_eq!(decode_parts(&encode_parts(&[wrong]), u32::MAX, u32::MAX), None, "{wrong:?}");
        }
        let swapped = [parts[1], parts[0]];
        assert_eq!(decode_parts(&encode_parts(&swapped), 501, 228), None, "descending");
    }
}
