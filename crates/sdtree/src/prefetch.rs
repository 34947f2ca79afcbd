//! Hints to the processor about memory that will be read soon.
#![allow(unsafe_code)] // The instruction takes a pointer.

/// Bytes of a cache line.
pub(crate) const LINE: usize = 64;

/// Requests the cache line at `at`; for key sources ([`KeySource::prefetch`](crate::KeySource)).
/// Any address is allowed.
#[inline]
pub fn prefetch<T>(at: *const T) {
    #[cfg(all(target_arch = "x86_64", not(any(miri, loom))))]
    // SAFETY: a prefetch of any address, mapped or not, changes nothing but the caches.
    unsafe {
        std::arch::x86_64::_mm_prefetch::<{ std::arch::x86_64::_MM_HINT_T0 }>(at.cast());
    }
    #[cfg(not(all(target_arch = "x86_64", not(any(miri, loom)))))]
    let _ = at;
}
