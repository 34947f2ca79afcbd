//! Atomic words whose memory can be given back while other threads use them.

#![allow(unsafe_code)] // A slice of a mapping of its own.

use std::ops::Deref;
use std::sync::atomic::AtomicU64;

use rustix::io::Errno;

use crate::range::Range;
use crate::{mm, raw};

/// Words in a mapping of their own. Those that were never touched take no memory.
pub struct AtomicWords(Range);

impl AtomicWords {
    /// `len` words, all 0.
    ///
    /// # Errors
    ///
    /// Those of [`mm::map_anonymous`].
    pub fn new(len: usize) -> Result<Self, Errno> {
        let bytes = len * size_of::<AtomicU64>();
        Ok(Self(Range::new(mm::map_anonymous(bytes)?, bytes)))
    }

    /// Sets all words to 0, and gives their memory back to the kernel.
    pub fn give_back(&self) {
        // SAFETY: private anonymous memory reads as zeros from then on, which atomics may become at
        // any time. A failure leaves it as it is: the range is mapped.
        let _ = unsafe { raw::madvise(self.0.start, self.0.len, libc::MADV_DONTNEED) };
    }
}

impl Deref for AtomicWords {
    type Target = [AtomicU64];

    fn deref(&self) -> &[AtomicU64] {
        let start = std::ptr::with_exposed_provenance(self.0.start);
        // SAFETY: the mapping is page aligned, as long as that, and lives as long as this value.
        // It began as zeros, and is reached as atomics only.
        unsafe { std::slice::from_raw_parts(start, self.0.len / size_of::<AtomicU64>()) }
    }
}

impl Drop for AtomicWords {
    fn drop(&mut self) {
        // SAFETY: `new` mapped this memory, and no reference into it outlives this value.
        let _ = unsafe { mm::unmap(self.0) };
    }
}
