//! Merged pages become anonymous memory again.

#![allow(unsafe_code)] // Replaces mappings of the program's memory.

use kmem::PAGE_SIZE;
use kmem::procfs::Perms;
use kmem::range::Range;
use rustix::io::Errno;
use wire::{RegionId, Run};

use crate::runtime::proc_files::ProcFiles;
use crate::runtime::state::State;
use crate::runtime::state::region::{Region, Sticky};
use crate::window::MAX_PAGES;
use crate::window::anonymous::{Backing, cover, repeat_advice, replace_by_copy};
use crate::window::gate::{self, Copies, Grounds};
use crate::window::safe_read::Buffer;

/// Who uses the memory while it is unmerged.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Users {
    /// Other threads read and write it: each run is replaced in one step.
    Active,
    /// No thread may use it, since the program is about to move it. It is filled in place, so that
    /// it is one mapping afterwards. Where a page may not be taken away nothing is changed, and the
    /// call fails.
    None,
}

/// Turns merged pages back into anonymous memory with the same bytes. Those that may not be taken
/// away stay in their mappings of segments ([`Region::mapped`]).
pub(crate) fn unmerge(state: &mut State, id: RegionId, run: Run, users: Users) -> Result<(), Errno> {
    let copies = Copies::at_once(state.direct_io);
    let State { regions, uffds, files, .. } = state;
    let Some(region) = regions.get_mut(id) else { return Ok(()) };
    if !region.mapped.any(run) {
        return Ok(());
    }
    let mut buffer = Buffer::new(MAX_PAGES as usize)?;
    if users == Users::None && has_to_stay(region, run, &copies, files, &mut buffer) {
        return Err(Errno::NOMEM);
    }
    let mut left = run;
    loop {
        let Some(merged) = region.mapped.runs(left).next() else { return Ok(()) };
        let last = left.end().0.min(merged.page.0.saturating_add(MAX_PAGES));
        let window = Run::new(merged.page, last - merged.page.0);
        let span = region.bytes(window);
        uffds.open_window(span)?;
        // SAFETY: the window is open.
        let done = unsafe { unmerge_window(region, window, users, &copies, files, &mut buffer) };
        uffds.close_window(span);
        done?;
        left = Run::between(window.end(), left.end());
    }
}

/// Whether some page may not be taken away. A copy that is written now was one before.
fn has_to_stay(region: &Region, run: Run, copies: &Copies, files: &ProcFiles, buffer: &mut Buffer) -> bool {
    let windows = gate::merged(region, run).into_iter().flat_map(|merged| {
        (merged.page.0..merged.end().0)
            .step_by(MAX_PAGES as usize)
            .map(move |start| Run::new(wire::PageNo(start), MAX_PAGES.min(merged.end().0 - start)))
    });
    for part in windows {
        // Brings the pages into memory, so that the kernel can say what they are.
        buffer.read(region.bytes(part));
        if gate::may_go(region, part, copies, files) != [part] {
            return true;
        }
    }
    false
}

/// Unmerges the merged pages of a window that may go.
///
/// # Safety
///
/// The window is open: its pages are managed, so mapped and readable; writers are blocked; and the
/// tracking userfaultfd does not have them. With [`Users::None`], no thread uses them.
unsafe fn unmerge_window(
    region: &mut Region,
    window: Run,
    users: Users,
    copies: &Copies,
    files: &ProcFiles,
    buffer: &mut Buffer,
) -> Result<(), Errno> {
    for run in gate::merged(region, window) {
        buffer.read(region.bytes(run));
    }
    for run in gate::may_go(region, window, copies, files) {
        let place = region.bytes(run);
        let bytes = buffer.read(place);
        if bytes.len() < place.len {
            // A page is gone, or poisoned: it stays what it is.
            continue;
        }
        match users {
            // SAFETY: the run lies in the open window and may go; the bytes were read while writers
            // were blocked.
            Users::Active => unsafe {
                replace_by_copy::<Errno>(region, run, |copy| {
                    copy.copy_from_slice(bytes);
                    Ok(())
                })
            }?,
            // SAFETY: the run lies in the open window and may go, and by the contract no thread
            // uses it.
            Users::None => unsafe { refill(region, run, bytes) }?,
        }
    }
    Ok(())
}

/// Maps anonymous memory over the pages and writes their bytes back.
///
/// # Safety
///
/// The pages lie in an open window, may be taken away, hold these bytes, and no thread uses them.
unsafe fn refill(region: &mut Region, run: Run, bytes: &[u8]) -> Result<(), Errno> {
    let place = region.bytes(run);
    debug_assert_eq!(bytes.len() % PAGE_SIZE, 0);
    // SAFETY: by the contract no thread uses the pages while they are empty. The new mapping is
    // writable, is as long as the bytes, and lies elsewhere.
    unsafe {
        cover(region, run, Grounds::MayGo)?;
        std::ptr::copy_nonoverlapping(bytes.as_ptr(), place.start as *mut u8, place.len);
    }
    Ok(())
}

/// Makes merged pages untouched memory.
///
/// # Safety
///
/// No code relies on the pages' bytes: the program is discarding them, or its guest has marked them
/// as free and they are claimed.
pub(crate) unsafe fn discard(state: &mut State, id: RegionId, run: Run) -> Result<(), Errno> {
    let State { regions, uffds, .. } = state;
    let Some(region) = regions.get_mut(id) else { return Ok(()) };
    let Some(first) = region.mapped.runs(run).next() else { return Ok(()) };
    let span = region.bytes(Run::between(first.page, run.end()));
    uffds.untrack(span)?;
    let merged = gate::merged(region, run);
    // SAFETY: by the contract no code relies on the bytes. The pages have left tracking just now.
    let result = merged.into_iter().try_for_each(|run| unsafe { cover(region, run, Grounds::Discarded) });
    uffds.track(span);
    result
}

/// Makes retained memory untouched memory with the same protection.
///
/// # Safety
///
/// The program discards the place, and relies on nothing that it holds.
pub(crate) unsafe fn discard_retained(place: Range, perms: Perms, sticky: Sticky) -> Result<(), Errno> {
    let bits = [(perms.read, libc::PROT_READ), (perms.write, libc::PROT_WRITE), (perms.exec, libc::PROT_EXEC)];
    let protection = bits.into_iter().filter(|(is_set, _)| *is_set).fold(0, |all, (_, bit)| all | bit);
    // SAFETY: by the contract nobody relies on the bytes, and the new mapping allows the same
    // access.
    unsafe { gate::map_untouched(Grounds::Discarded, place, protection, sticky) }?;
    repeat_advice(place, sticky, Backing::Anonymous);
    Ok(())
}
