//! Anonymous memory as the program mapped it, and the program's advice.

#![allow(unsafe_code)] // Maps over the program's memory.

use kmem::range::Range;
use kmem::raw;
use rustix::io::Errno;
use wire::Run;

use crate::runtime::sabotage::{self, Sabotage};
use crate::runtime::state::region::{Region, Sticky};

/// Maps untouched memory over pages of a region and repeats the program's advice. The pages are not
/// tracked afterwards.
///
/// # Safety
///
/// - The pages are managed, and not registered with the tracking userfaultfd.
/// - No code relies on their bytes; or they are zeros, and writers are blocked.
pub(crate) unsafe fn cover(region: &mut Region, run: Run) -> Result<(), Errno> {
    let place = region.bytes(run);
    // SAFETY: by the contract nothing is lost with the mapping that was there. The new one allows
    // the same access.
    unsafe { map(place.start, place.len, libc::MAP_FIXED, region.sticky) }?;
    region.mapped.clear(run);
    advise(region, place, true);
    Ok(())
}

/// Maps memory like a region's at an address that the kernel chooses, and returns the address.
pub(crate) fn map_anywhere(len: usize, sticky: Sticky) -> Result<usize, Errno> {
    // SAFETY: a mapping that is not fixed replaces nothing.
    unsafe { map(0, len, 0, sticky) }
}

/// Maps anonymous memory with the flags of the program's own, so that the kernel joins it with its
/// neighbours.
///
/// # Safety
///
/// With `MAP_FIXED`, no code relies on what was mapped in the range.
unsafe fn map(start: usize, len: usize, fixed: i32, sticky: Sticky) -> Result<usize, Errno> {
    let reserve = if sticky.no_reserve { libc::MAP_NORESERVE } else { 0 };
    let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | fixed | reserve;
    // SAFETY: this function's contract is that of the call.
    unsafe { raw::mmap(start, len, libc::PROT_READ | libc::PROT_WRITE, flags, -1, 0) }
}

/// Repeats the program's advice on a new mapping of a region.
pub(crate) fn advise(region: &mut Region, place: Range, is_anonymous: bool) {
    let sticky = region.sticky;
    if sabotage::is_on(Sabotage::NoStickyAdvice) {
        return;
    }
    let huge = match sticky.huge {
        Some(true) if is_anonymous => Some(libc::MADV_HUGEPAGE),
        Some(false) if is_anonymous => Some(libc::MADV_NOHUGEPAGE),
        _ => None,
    };
    let all = [sticky.dont_fork.then_some(libc::MADV_DONTFORK), sticky.dont_dump.then_some(libc::MADV_DONTDUMP), huge];
    for advice in all.into_iter().flatten() {
        // SAFETY: none of these advices changes the bytes of memory or the access to it.
        if unsafe { raw::madvise(place.start, place.len, advice) }.is_err() && advice == libc::MADV_DONTFORK {
            region.leaks_into_children = true;
        }
    }
}
