//! Memory that direct I/O accepts: aligned to a block.

#![allow(unsafe_code)] // Blocks are looked at as bytes.

use crate::BLOCK;

#[derive(Clone, Copy)]
#[repr(C, align(4096))]
struct Block([u8; BLOCK]);

const _: () = assert!(size_of::<Block>() == BLOCK && align_of::<Block>() == BLOCK);

/// A byte buffer of whole blocks ([`BLOCK`] bytes), aligned to a block.
pub struct AlignedBuf(Vec<Block>);

impl AlignedBuf {
    /// Zeros, at least `len` bytes, rounded up to whole blocks.
    pub fn zeroed(len: usize) -> Self {
        Self(vec![Block([0; BLOCK]); len.div_ceil(BLOCK)])
    }
}

impl std::ops::Deref for AlignedBuf {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        // SAFETY: a `Block` is BLOCK bytes without padding, and the slice borrows `self`.
        unsafe { std::slice::from_raw_parts(self.0.as_ptr().cast(), self.0.len() * BLOCK) }
    }
}

impl std::ops::DerefMut for AlignedBuf {
    fn deref_mut(&mut self) -> &mut [u8] {
        // SAFETY: a `Block` is BLOCK bytes without padding, the slice borrows `self` mutably, and
        // every byte value is a valid `Block` content.
        unsafe { std::slice::from_raw_parts_mut(self.0.as_mut_ptr().cast(), self.0.len() * BLOCK) }
    }
}

/// Whether direct I/O accepts this memory.
pub(crate) fn is_aligned(bytes: &[u8]) -> bool {
    bytes.as_ptr().addr().is_multiple_of(BLOCK) && bytes.len().is_multiple_of(BLOCK)
}
