//! Anonymous memory as the program mapped it, and the program's advice.

#![allow(unsafe_code)] // Maps over the program's memory.

use kmem::range::Range;
use kmem::raw;
use rustix::io::Errno;
use wire::Run;

use crate::runtime::sabotage::{self, Sabotage};
use crate::runtime::state::region::{Region, Sticky};
use crate::window::gate::{self, Grounds};

/// Maps untouched memory over pages of a region and repeats the program's advice. The pages are not
/// tracked afterwards.
///
/// # Safety
///
/// - The pages are managed, and not registered with the tracking userfaultfd.
/// - No code relies on their bytes; or they are zeros, and writers are blocked.
pub(crate) unsafe fn cover(region: &mut Region, run: Run, grounds: Grounds) -> Result<(), Errno> {
    let place = region.bytes(run);
    // SAFETY: by the contract nothing is lost with the mapping that was there. The new one allows
    // the same access.
    unsafe { gate::map_untouched(grounds, place, libc::PROT_READ | libc::PROT_WRITE, region.sticky) }?;
    region.mapped.clear(run);
    advise(region, place, Backing::Anonymous);
    Ok(())
}

/// Moves a copy over pages of a region, in one step, once `fill` has given it their bytes. After an
/// error they are as they were.
///
/// # Safety
///
/// The pages lie in an open window and may be taken away; `fill` writes the bytes that they have
/// for the program.
pub(super) unsafe fn replace_by_copy<E: From<Errno>>(
    region: &mut Region,
    run: Run,
    fill: impl FnOnce(&mut [u8]) -> Result<(), E>,
) -> Result<(), E> {
    let place = region.bytes(run);
    let copy = Range::new(gate::map_anywhere(place.len, region.sticky)?, place.len);
    // SAFETY: mapped just now for reading and writing, and nobody else knows it.
    let moved = fill(unsafe { std::slice::from_raw_parts_mut(copy.start as *mut u8, copy.len) }).and_then(|()| {
        advise(region, copy, Backing::Anonymous);
        // SAFETY: the window is open. By the contract the copy has the bytes that the place had,
        // so readers see no difference, and nobody refers to it any more.
        Ok(unsafe { gate::move_over(copy, place.start) }?)
    });
    match moved {
        Ok(()) => region.mapped.clear(run),
        // SAFETY: the copy stays where it was mapped above, and nothing refers to it.
        Err(_) => unsafe { gate::unmap_own(copy) },
    }
    moved
}

/// What a new mapping is of. Advice on huge pages is for anonymous memory.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Backing {
    Anonymous,
    Segment,
}

/// Repeats the program's advice on a new mapping of a region.
pub(crate) fn advise(region: &mut Region, place: Range, memory: Backing) {
    region.leaks_into_children |= !repeat_advice(place, region.sticky, memory);
}

/// Repeats advice on a new mapping. False if children may inherit what they should not.
pub(crate) fn repeat_advice(place: Range, sticky: Sticky, memory: Backing) -> bool {
    if sabotage::is_on(Sabotage::NoStickyAdvice) {
        return true;
    }
    let huge = match sticky.huge {
        Some(true) if memory == Backing::Anonymous => Some(libc::MADV_HUGEPAGE),
        Some(false) if memory == Backing::Anonymous => Some(libc::MADV_NOHUGEPAGE),
        _ => None,
    };
    let all = [sticky.dont_fork.then_some(libc::MADV_DONTFORK), sticky.dont_dump.then_some(libc::MADV_DONTDUMP), huge];
    let mut kept_from_children = true;
    for advice in all.into_iter().flatten() {
        // SAFETY: none of these advices changes the bytes of memory or the access to it.
        let failed = unsafe { raw::madvise(place.start, place.len, advice) }.is_err();
        kept_from_children &= !(failed && advice == libc::MADV_DONTFORK);
    }
    kept_from_children
}
