//! Telling the processor what will be read soon.
#![allow(unsafe_code)] // the instruction takes a pointer; it reads nothing that the program could see

/// Asks for the cache line at `at`. Any address is allowed.
#[inline]
pub fn prefetch<T>(at: *const T) {
    #[cfg(all(target_arch = "x86_64", not(any(miri, loom))))]
    // SAFETY: a prefetch has no effect but on speed, whatever the address.
    unsafe {
        std::arch::x86_64::_mm_prefetch::<{ std::arch::x86_64::_MM_HINT_T0 }>(at.cast());
    }
    #[cfg(not(all(target_arch = "x86_64", not(any(miri, loom)))))]
    let _ = at;
}
