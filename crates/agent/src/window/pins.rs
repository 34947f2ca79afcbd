//! What keeps memory from being merged: pins and locks of the process, and sharing after a fork.
//!
//! Pinned pages themselves are found by [`crate::runtime::state::window_uffd`].

#![allow(unsafe_code)] // Advises on the program's memory.

use kmem::range::Range;
use kmem::{PAGE_SIZE, raw};
use wire::Outcome;

use crate::runtime::proc_files::ProcFiles;
use crate::runtime::sabotage::{self, Sabotage};

/// Why no memory of this process may be merged or recycled now; `None` if it may.
pub(crate) fn held_memory(files: &ProcFiles) -> Option<Outcome> {
    if sabotage::is_on(Sabotage::NoPinCheck) {
        return None;
    }
    match files.status() {
        Ok(status) if status.vm_pin_kib > 0 => Some(Outcome::Pinned),
        Ok(status) if status.vm_lck_kib > 0 => Some(Outcome::Locked),
        Ok(_) => None,
        Err(_) => Some(Outcome::Failed),
    }
}

/// Makes the kernel see that a page is this process's alone.
///
/// After a fork the kernel takes pages for shared until they are written, and refuses to move them.
/// A write fault without a write (`MADV_POPULATE_WRITE`) settles that; the page counts as written.
/// A page that a child still maps stays as it is, since the fault would copy it.
pub(super) fn unshare(page: Range, files: &ProcFiles) {
    /// Bit 56: the page is mapped here only (Documentation/admin-guide/mm/pagemap.rst).
    const EXCLUSIVE: u64 = 1 << 56;
    let mut entry = [0; 8];
    let offset = (page.start / PAGE_SIZE * entry.len()) as u64;
    let read = files.pagemap().map(|pagemap| rustix::io::pread(&*pagemap, &mut entry, offset));
    if read == Some(Ok(8)) && u64::from_ne_bytes(entry) & EXCLUSIVE != 0 {
        // SAFETY: the advice changes no bytes and no access.
        let _ = unsafe { raw::madvise(page.start, page.len, libc::MADV_POPULATE_WRITE) };
    }
}
