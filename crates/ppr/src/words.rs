//! The words of a pool: a mapping that the pool's user has made, or private memory.

#![allow(unsafe_code)] // Memory that another process maps too is read and written as atomic words.

use std::ops::Deref;

use crate::primitive::AtomicU64;

/// The words of a pool.
pub(crate) enum Words {
    /// The start and the length in words of a mapping that was passed to `Pool::from_mapping`.
    #[cfg(not(loom))]
    Mapped(std::ptr::NonNull<AtomicU64>, usize),
    /// Private memory.
    Owned(Box<[AtomicU64]>),
}

// SAFETY: the words are atomics, and neither a mapping nor a box is tied to a thread.
#[cfg(not(loom))]
unsafe impl Send for Words {}
// SAFETY: shared access gives out `&[AtomicU64]` only, which is `Sync`.
#[cfg(not(loom))]
unsafe impl Sync for Words {}

impl Words {
    /// `len` words, all 0.
    pub(crate) fn new(len: usize) -> Self {
        Self::Owned((0..len).map(|_| AtomicU64::new(0)).collect())
    }
}

impl Deref for Words {
    type Target = [AtomicU64];

    #[inline]
    fn deref(&self) -> &[AtomicU64] {
        match self {
            #[cfg(not(loom))]
            // SAFETY: by the contract of `Pool::from_mapping`, `len` words from `start` are mapped
            // and writable as long as the pool lives. The function has checked that they are
            // aligned. Other processes write to them, so this process accesses them only as
            // atomics.
            Self::Mapped(start, len) => unsafe { std::slice::from_raw_parts(start.as_ptr(), *len) },
            Self::Owned(words) => words,
        }
    }
}
