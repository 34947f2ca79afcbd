//! The words of a pool: memory that somebody else has mapped, or memory of our own.

#![allow(unsafe_code)] // Memory that another process maps too is read and written as atomic words.

use std::ops::Deref;

use crate::primitive::AtomicU64;

/// Words that live as long as their owner says.
pub(crate) enum Words {
    /// A mapping that the caller of `Pool::from_mapping` keeps.
    #[cfg(not(loom))]
    Mapped(std::ptr::NonNull<AtomicU64>, usize),
    /// Private memory.
    Owned(Box<[AtomicU64]>),
}

// SAFETY: the words are atomic, and neither kind is tied to a thread.
#[cfg(not(loom))]
unsafe impl Send for Words {}
// SAFETY: shared access gives out `&[AtomicU64]` only.
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
            // SAFETY: `Pool::from_mapping`'s caller promised `len` aligned words that stay mapped
            // for as long as the pool lives. Other processes write to them: they are only ever
            // accessed as atomics.
            Self::Mapped(start, len) => unsafe { std::slice::from_raw_parts(start.as_ptr(), *len) },
            Self::Owned(words) => words,
        }
    }
}
