//! The gate: the only place of the agent that takes pages of the program away.
//!
//! Whatever replaces, discards or moves a page that the program uses is called here. A test
//! (`tests/gate.rs`) names every other caller of these system calls in the agent, with the reason.
//!
//! A page may be taken away on one of these [`Grounds`]:
//!
//! | page | rule |
//! |---|---|
//! | never merged | stays where it is. A merge moves it by `UFFDIO_MOVE`, which refuses pinned pages |
//! | clean: maps a frame | may go at any time. A frame never changes, so a device only reads it |
//! | copy in a mapping of a segment | no kernel call shows short pins: only after its cooldown, and never while `VmPin` is above zero |
//! | discarded by the program | may go: nobody relies on its bytes |
//! | mapped just now, its address known to nobody | may go: it becomes a snapshot's page |
//! | claimed, since its guest marked it | by `UFFDIO_MOVE`, which leaves pinned pages; where it lies in a mapping of a segment, only while nothing is pinned |
//!
//! Writers wait while a page is replaced, and what replaces it has the same bytes. Some 10 us pass
//! between the look at the kernel's notes of writes and the moment when writers wait: a device that
//! pins a copy just then, after the whole cooldown, is not seen.

#![allow(unsafe_code)] // Replaces and discards mappings.

use std::ffi::c_void;
use std::os::fd::BorrowedFd;
use std::sync::OnceLock;
use std::time::Duration;

use kmem::pagemap::{Categories, Pagemap, Query};
use kmem::range::Range;
use kmem::{PAGE_SIZE, mm, raw};
use rustix::io::Errno;
use wire::{Outcome, Run};

use crate::runtime::proc_files::ProcFiles;
use crate::runtime::sabotage::{self, Sabotage};
use crate::runtime::state::region::{Region, Sticky};
use crate::runtime::state::window_uffd::{SCRATCH_LEN, WindowUffd};
use crate::window::pins::held_memory;

/// Why pages may be taken away.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Grounds {
    /// Compared in an open window, and taken by `UFFDIO_MOVE` where the kernel can.
    Merged,
    /// They map frames, or cooled down: [`may_go`] names them.
    MayGo,
    /// The program discards them, or its guest has marked them and they are claimed.
    Discarded,
}

/// Which copies in mappings of segments may be replaced.
#[derive(Clone, Debug)]
pub(crate) enum Copies {
    Stay,
    /// Those outside of these runs, which are ascending: they were written lately.
    CooledBut(Vec<Run>),
}

impl Copies {
    /// Outside of a detach nobody waits: copies may go only where no direct I/O takes any time.
    pub(crate) fn at_once(direct_io: Option<Duration>) -> Self {
        if direct_io == Some(Duration::ZERO) { Self::CooledBut(Vec::new()) } else { Self::Stay }
    }
}

/// Whether this process has pinned memory, or that is not known.
pub(crate) fn is_pinned(files: &ProcFiles) -> bool {
    matches!(held_memory(files), Some(Outcome::Pinned | Outcome::Failed))
}

/// The merged pages of a run that may be taken away now, ascending. Writers to them wait, and the
/// pages are in memory.
pub(crate) fn may_go(region: &Region, run: Run, copies: &Copies, files: &ProcFiles) -> Vec<Run> {
    if sabotage::is_on(Sabotage::NoPinCheck) {
        return merged(region, run);
    }
    let clean = files.pagemap().map(|pagemap| clean_pages(region, run, &pagemap)).unwrap_or_default();
    match copies {
        Copies::CooledBut(hot) if !is_pinned(files) => {
            // A page is hot, clean or cool; a clean page was never written.
            let hot: Vec<Run> = hot.iter().flat_map(|&part| without(part, &clean)).collect();
            merged(region, run).into_iter().flat_map(|part| without(part, &hot)).collect()
        }
        _ => clean,
    }
}

/// The merged pages of a run that map their frame still.
pub(crate) fn clean_pages(region: &Region, run: Run, pagemap: &Pagemap) -> Vec<Run> {
    let query = Query { required: Categories::FILE | Categories::PRESENT, ..Query::default() };
    pages_like(region, run, &query, pagemap)
}

/// The merged pages of a run that were written since the last protection; all if it is not known.
pub(crate) fn written_pages(region: &Region, run: Run, pagemap: &Pagemap) -> Vec<Run> {
    let query =
        Query { required: Categories::WRITTEN, any_of: Categories::PRESENT | Categories::SWAPPED, ..Query::default() };
    pages_like(region, run, &query, pagemap)
}

fn pages_like(region: &Region, run: Run, query: &Query, pagemap: &Pagemap) -> Vec<Run> {
    let mut found = Vec::new();
    for part in merged(region, run) {
        let place = region.bytes(part);
        let scanned = pagemap.scan(place, query, &mut |pages| {
            found.push(Run::between(region.page_at(pages.start), region.page_at(pages.end)));
        });
        if scanned.is_err() {
            return if query.required.contains(Categories::WRITTEN) { merged(region, run) } else { Vec::new() };
        }
    }
    found
}

/// The maximal runs of merged pages.
pub(crate) fn merged(region: &Region, run: Run) -> Vec<Run> {
    region.mapped.runs(run).collect()
}

/// The parts of a run that lie in none of `holes`, which are ascending and disjoint.
pub(crate) fn without(run: Run, holes: &[Run]) -> Vec<Run> {
    let mut left = run;
    let mut parts = Vec::new();
    for hole in holes.iter().filter_map(|hole| hole.intersect(run)) {
        parts.push(Run::between(left.page, hole.page));
        left = Run::between(hole.end(), run.end());
    }
    parts.push(left);
    parts.retain(|part| part.len > 0);
    parts
}

/// Maps frames over pages of the program.
///
/// # Safety
///
/// - The window over the place is open, and the place holds the frames' bytes, or held them before
///   its pages were taken away. Or nobody knows the place but the caller.
/// - The file cannot shrink.
pub(crate) unsafe fn map_frames(fd: BorrowedFd<'_>, place: Range, offset: u64) -> Result<(), Errno> {
    // SAFETY: by the contract the frames have the bytes that the place has for the program, and no
    // thread can write to it meanwhile.
    unsafe { mm::map_fixed_private(fd, place, offset) }
}

/// Maps untouched memory over pages of the program.
///
/// # Safety
///
/// The grounds hold for the place: nobody relies on its bytes, or the caller fills them in while
/// no thread can see their absence.
pub(super) unsafe fn map_untouched(_: Grounds, place: Range, protection: i32, sticky: Sticky) -> Result<(), Errno> {
    // SAFETY: this function's contract is that of the call.
    unsafe { map(place.start, place.len, libc::MAP_FIXED, protection, sticky) }.map(drop)
}

/// Maps memory like a region's at an address that the kernel chooses, and returns the address.
pub(super) fn map_anywhere(len: usize, sticky: Sticky) -> Result<usize, Errno> {
    // SAFETY: a mapping that is not fixed replaces nothing.
    unsafe { map(0, len, 0, libc::PROT_READ | libc::PROT_WRITE, sticky) }
}

/// Maps anonymous memory with the program's own flags, so that the kernel joins it with neighbours.
///
/// # Safety
///
/// With `MAP_FIXED`, no code relies on what was mapped in the range.
unsafe fn map(start: usize, len: usize, fixed: i32, protection: i32, sticky: Sticky) -> Result<usize, Errno> {
    let reserve = if sticky.no_reserve { libc::MAP_NORESERVE } else { 0 };
    let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | fixed | reserve;
    // SAFETY: this function's contract is that of the call.
    unsafe { raw::mmap(start, len, protection, flags, -1, 0) }
}

/// Moves memory of the agent over pages of the program.
///
/// # Safety
///
/// The window over the place is open, its pages [`may_go`], and nobody knows `from` but the caller.
/// It holds the place's bytes, or gets them before any thread can see it.
pub(super) unsafe fn move_over(from: Range, place: usize) -> Result<(), Errno> {
    // SAFETY: this function's contract is that of the call.
    unsafe { mm::remap_fixed(from, place) }
}

/// Unmaps memory of the agent that was to be [moved](move_over), and was not.
///
/// # Safety
///
/// Nobody refers to the memory.
pub(super) unsafe fn unmap_own(memory: Range) {
    // SAFETY: this function's contract is that of the call.
    let _ = unsafe { mm::unmap(memory) };
}

/// Takes claimed pages away, but pinned ones. Empties the scratch area when it is full.
pub(crate) struct Taker<'a> {
    uffd: &'a WindowUffd,
    used: usize,
}

impl<'a> Taker<'a> {
    /// `None` where the kernel does not tell pinned pages from others.
    pub(crate) fn new(uffd: Option<&'a WindowUffd>) -> Option<Self> {
        let uffd = uffd.filter(|uffd| uffd.can_check_pins() && !sabotage::is_on(Sabotage::NoPinCheck))?;
        Some(Self { uffd, used: 0 })
    }

    /// Takes the pages of a place that lies in no mapping of a segment. Calls `pinned` with the
    /// address of each page that may be pinned, and stays.
    ///
    /// # Safety
    ///
    /// The pages are claimed: nobody relies on what they hold.
    pub(crate) unsafe fn take(&mut self, place: Range, mut pinned: impl FnMut(usize)) {
        let mut at = place.start;
        while at < place.end() {
            if self.used == SCRATCH_LEN {
                self.empty();
            }
            let part = Range::new(at, (place.end() - at).min(SCRATCH_LEN - self.used));
            // SAFETY: by the contract nobody relies on the pages, so none has to be put back. The
            // scratch area has nothing from `used` on.
            let (done, result) = unsafe { self.uffd.take_away(part, self.used) };
            (at, self.used) = (at + done, self.used + done);
            if result.is_err() {
                pinned(at);
                at += PAGE_SIZE;
            }
        }
    }

    fn empty(&mut self) {
        self.uffd.discard_taken(Range::new(0, self.used));
        self.used = 0;
    }
}

impl Drop for Taker<'_> {
    fn drop(&mut self) {
        self.empty();
    }
}

/// Gives memory back to the kernel, in one call where it takes lists (Linux 6.14), so that it
/// flushes translations once.
///
/// # Safety
///
/// No code relies on what the places hold, and none lies in a mapping of a segment.
pub(crate) unsafe fn discard(_: Grounds, places: &[Range]) -> Result<(), Errno> {
    /// Whether the kernel takes lists. The first call shows it; older kernels refuse any list.
    static LISTS: OnceLock<bool> = OnceLock::new();
    let mut left = places;
    while left.len() > 1 && LISTS.get() != Some(&false) {
        let count = left.len().min(libc::UIO_MAXIOV as usize);
        let entry = |range: &Range| libc::iovec { iov_base: range.start as *mut c_void, iov_len: range.len };
        let list: Vec<libc::iovec> = left[..count].iter().map(entry).collect();
        let wanted: usize = left[..count].iter().map(|range| range.len).sum();
        // SAFETY: by the contract no code relies on what these ranges hold.
        match unsafe { raw::madvise_many(&list, libc::MADV_DONTNEED) } {
            Ok(done) if done == wanted => {
                LISTS.get_or_init(|| true);
                left = &left[count..];
            }
            Ok(_) => break,
            Err(_) => {
                LISTS.get_or_init(|| false);
                break;
            }
        }
    }
    for range in left {
        // SAFETY: by the contract no code relies on what the range holds.
        unsafe { raw::madvise(range.start, range.len, libc::MADV_DONTNEED) }?;
    }
    Ok(())
}

#[cfg(test)]
mod tests;
