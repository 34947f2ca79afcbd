//! What a simulated file holds, and what a power failure makes of a write.

use crate::BLOCK;

/// What a medium writes at a time, at least.
const SECTOR: usize = 512;

/// A change of a file.
#[derive(Clone)]
pub(super) enum Op {
    Write(u64, Vec<u8>),
    SetLen(u64),
    Punch(u64, u64),
    Allocate(u64, u64),
}

/// Contents, and which blocks have space.
#[derive(Clone, Default)]
pub(super) struct Bytes {
    pub(super) data: Vec<u8>,
    pub(super) space: Vec<bool>,
}

impl Bytes {
    pub(super) fn grow(&mut self, len: usize) {
        if self.data.len() < len {
            self.data.resize(len, 0);
        }
        self.space.resize(self.data.len().div_ceil(BLOCK), false);
    }

    pub(super) fn mark(&mut self, offset: usize, len: usize, space: bool) {
        if len > 0 {
            self.space[offset / BLOCK..(offset + len).div_ceil(BLOCK)].fill(space);
        }
    }

    /// A write that the power failed in: some sectors are there, and a block that was being written
    /// may hold anything, also where the write did not reach.
    pub(super) fn tear(&mut self, offset: usize, data: &[u8], random: &mut Random) {
        let mut at = offset;
        while at < offset + data.len() {
            let end = ((at / SECTOR + 1) * SECTOR).min(offset + data.len());
            match random.below(8) {
                0..4 => self.apply(&Op::Write(at as u64, data[at - offset..end - offset].to_vec())),
                4 => {
                    let block = at / BLOCK * BLOCK;
                    let all = self.data.len().max(end);
                    self.grow(all);
                    self.data[block..(block + BLOCK).min(all)].fill(0xa5);
                }
                _ => {}
            }
            at = end;
        }
    }

    pub(super) fn apply(&mut self, op: &Op) {
        match op {
            Op::Write(offset, bytes) => {
                let at = *offset as usize;
                self.grow(at + bytes.len());
                self.data[at..at + bytes.len()].copy_from_slice(bytes);
                self.mark(at, bytes.len(), true);
            }
            Op::SetLen(len) => {
                self.grow(*len as usize);
                self.data.truncate(*len as usize);
                self.space.truncate(self.data.len().div_ceil(BLOCK));
            }
            Op::Punch(offset, len) => {
                let (at, end) = (*offset as usize, ((offset + len) as usize).min(self.data.len()));
                if at < end {
                    self.data[at..end].fill(0);
                    self.mark(at, end - at, false);
                }
            }
            Op::Allocate(offset, len) => {
                self.grow((offset + len) as usize);
                self.mark(*offset as usize, *len as usize, true);
            }
        }
    }
}

/// A small random number generator (xorshift64*).
pub(crate) struct Random(u64);

impl Random {
    pub(crate) fn new(seed: u64) -> Self {
        Self(seed.wrapping_mul(0x9E37_79B9_7F4A_7C15) | 1)
    }

    pub(crate) fn next(&mut self) -> u64 {
        self.0 ^= self.0 >> 12;
        self.0 ^= self.0 << 25;
        self.0 ^= self.0 >> 27;
        self.0.wrapping_mul(0x2545_F491_4F6C_DD1D) >> 16
    }

    pub(crate) fn below(&mut self, limit: u64) -> u64 {
        self.next() % limit.max(1)
    }
}
