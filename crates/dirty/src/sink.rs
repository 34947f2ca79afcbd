//! The buffer of a harvest, filled from words: frame numbers, or ranges of them.

use std::ops::Range;

/// Takes words of a bitmap, in ascending order.
pub(crate) trait Sink {
    /// Stores the frames `base + i` for every bit `i` of `word`. Returns the bits without room.
    fn put(&mut self, base: u64, word: u64) -> u64;
}

/// Writes `base + i` for every bit `i` of `word` to `out`. Returns their number.
///
/// It writes four at a time, also where fewer bits are left: the processor cannot predict the
/// number of bits, but often the number of fours. The next call overwrites the excess.
#[inline]
pub(crate) fn positions<T: Place>(word: u64, base: T, out: &mut [T; 64]) -> usize {
    let count = word.count_ones() as usize;
    let (mut rest, mut at) = (word, 0);
    while at < count {
        for i in 0..4 {
            out[(at + i) % 64] = base.plus(rest.trailing_zeros());
            rest &= rest.wrapping_sub(1);
        }
        at += 4;
    }
    count
}

/// A number that counts frames or leaves.
pub(crate) trait Place: Copy {
    fn plus(self, more: u32) -> Self;
}

impl Place for u64 {
    #[inline]
    fn plus(self, more: u32) -> Self {
        self + u64::from(more)
    }
}

impl Place for usize {
    #[inline]
    fn plus(self, more: u32) -> Self {
        self + more as usize
    }
}

pub(crate) struct Frames<'a> {
    pub(crate) out: &'a mut [u64],
    pub(crate) filled: usize,
}

impl Sink for Frames<'_> {
    #[inline(always)]
    fn put(&mut self, base: u64, word: u64) -> u64 {
        let Some(room) = self.out[self.filled..].first_chunk_mut::<64>() else {
            return self.put_few(base, word);
        };
        let rest = word & word.wrapping_sub(1);
        if rest == 0 {
            // One frame, the most frequent case where few are dirty; or none.
            room[0] = base + u64::from(word.trailing_zeros());
            self.filled += usize::from(word != 0);
            return 0;
        }
        if word == u64::MAX {
            let mut next = base;
            for eight in room.as_chunks_mut::<8>().0 {
                for (i, frame) in eight.iter_mut().enumerate() {
                    *frame = next + i as u64;
                }
                next += 8;
            }
            self.filled += 64;
            return 0;
        }
        self.filled += positions(word, base, room);
        0
    }
}

impl Frames<'_> {
    #[cold]
    fn put_few(&mut self, base: u64, mut word: u64) -> u64 {
        while word != 0 && self.filled < self.out.len() {
            self.out[self.filled] = base + u64::from(word.trailing_zeros());
            self.filled += 1;
            word &= word - 1;
        }
        word
    }
}

/// Ranges of frame numbers; neighbours are one range.
pub(crate) struct Ranges<'a> {
    pub(crate) out: &'a mut [Range<u64>],
    pub(crate) filled: usize,
}

impl Sink for Ranges<'_> {
    #[inline]
    fn put(&mut self, base: u64, mut word: u64) -> u64 {
        while word != 0 {
            let first = word.trailing_zeros();
            let len = (word >> first).trailing_ones();
            let (start, end) = (base + u64::from(first), base + u64::from(first + len));
            match self.filled.checked_sub(1).and_then(|last| self.out.get_mut(last)) {
                Some(last) if last.end == start => last.end = end,
                _ => match self.out.get_mut(self.filled) {
                    Some(free) => {
                        *free = start..end;
                        self.filled += 1;
                    }
                    None => return word,
                },
            }
            // All ones up to the run's end.
            word &= u64::MAX.checked_shl(first + len).unwrap_or(0);
        }
        0
    }
}

pub(crate) struct Nowhere;

impl Sink for Nowhere {
    fn put(&mut self, _: u64, _: u64) -> u64 {
        0
    }
}
