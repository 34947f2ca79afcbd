//! `PAGEMAP_SCAN`: finds the pages of a process that are in some state, and write-protects them in
//! the same step.
//!
//! One ioctl on `/proc/PID/pagemap` walks a range and reports runs of pages that match a [`Query`].
//! With [`Query::write_protect`] it also write-protects the pages that it reports, atomically with
//! respect to writers. A page that was written before is reported by this scan, a page that is
//! written afterwards by the next. This needs memory registered with a userfaultfd that has
//! [`WP_ASYNC`](crate::uffd::Features::WP_ASYNC).
//!
//! *What a protecting scan costs others.* It tells everybody who has the memory mapped a second
//! time (`mmu_notifier`) that its whole range changes, and not only the pages that match: KVM drops
//! all of a guest's stage-2 mappings there, and the guest faults on each page that it touches next.
//! So [`Pagemap::scan`] asks first, without protecting, and then protects the parts where something
//! matched. What it reports is what the second step found.
//!
//! Memory that was never touched counts as written, and protecting it allocates page tables. The
//! query `required: WRITTEN, any_of: PRESENT | SWAPPED` leaves it out until it is written.
//!
//! Source: Documentation/admin-guide/mm/pagemap.rst; Linux 6.7 or newer.

#![allow(unsafe_code)] // One ioctl whose argument points to an array.

use std::fs::File;
use std::io;
use std::os::fd::OwnedFd;

use linux_raw_sys::general as sys;
use rustix::io::Errno;
use rustix::ioctl::{self, Ioctl, IoctlOutput, Opcode, opcode};

use crate::{PAGE_SIZE, Range};

/// The kernel's release, if it is older than 6.7: it has neither this nor asynchronous
/// write-protection.
pub fn too_old() -> Option<String> {
    let (major, minor, release) = crate::procfs::kernel_release();
    ((major, minor) < (6, 7)).then_some(release)
}

bitflags::bitflags! {
    /// `PAGE_IS_*`: the states of a page.
    #[derive(Copy, Clone, PartialEq, Eq, Debug, Hash, Default)]
    pub struct Categories: u64 {
        /// Its mapping is registered with an asynchronous write-protecting userfaultfd.
        const WPALLOWED = sys::PAGE_IS_WPALLOWED as u64;
        /// Written since it was last write-protected, or never populated nor protected.
        const WRITTEN = sys::PAGE_IS_WRITTEN as u64;
        /// A page of a file (a memfd is one too), not a private copy of it.
        const FILE = sys::PAGE_IS_FILE as u64;
        /// In memory.
        const PRESENT = sys::PAGE_IS_PRESENT as u64;
        /// In swap.
        const SWAPPED = sys::PAGE_IS_SWAPPED as u64;
        /// The kernel's shared zero page.
        const PFNZERO = sys::PAGE_IS_PFNZERO as u64;
        /// Part of a huge page that is mapped as one.
        const HUGE = sys::PAGE_IS_HUGE as u64;
        /// Soft-dirty.
        const SOFT_DIRTY = sys::PAGE_IS_SOFT_DIRTY as u64;
    }
}

/// Which pages to report, and what to do with them.
///
/// A page matches when, after the categories in `inverted` are flipped, it has all of `required`
/// and, unless `any_of` is empty, at least one of `any_of`.
#[derive(Copy, Clone, PartialEq, Eq, Debug, Default)]
pub struct Query {
    /// Write-protect the reported pages (`PM_SCAN_WP_MATCHING`). Mappings that cannot be protected
    /// are skipped.
    pub write_protect: bool,
    /// Fail with `EPERM` when a mapping in the range is not registered for asynchronous
    /// write-protection (`PM_SCAN_CHECK_WPASYNC`).
    pub check_wp_async: bool,
    /// Categories to flip before matching.
    pub inverted: Categories,
    /// Categories that a page must all have.
    pub required: Categories,
    /// Categories of which a page must have at least one; empty: it need not.
    pub any_of: Categories,
    /// Categories to report, as they are (not flipped). A run ends where they change, so request
    /// few.
    pub returned: Categories,
}

/// Consecutive pages with the same categories.
#[derive(Copy, Clone, PartialEq, Eq, Debug, Hash)]
pub struct PageRun {
    /// The first page's address.
    pub start: usize,
    /// The address behind the last page.
    pub end: usize,
    /// Those of [`Query::returned`] that these pages have.
    pub categories: Categories,
}

impl PageRun {
    /// The number of pages.
    pub const fn pages(&self) -> usize {
        (self.end - self.start) / PAGE_SIZE
    }
}

/// What a scan reported.
#[derive(Copy, Clone, PartialEq, Eq, Debug, Default)]
pub struct ScanTotals {
    /// Number of runs.
    pub runs: u64,
    /// Number of pages in the runs.
    pub pages: u64,
}

/// Whether a page, by its address and its categories, is to stay writable.
pub type Spare<'a> = &'a dyn Fn(usize, Categories) -> bool;

/// `PAGEMAP_SCAN` = `_IOWR('f', 16, struct pm_scan_arg)`.
const PAGEMAP_SCAN: Opcode = opcode::read_write::<sys::pm_scan_arg>(b'f', 16);
const _: () = assert!(PAGEMAP_SCAN == 0xC060_6610);
const _: () = assert!(size_of::<sys::pm_scan_arg>() == 96);
const _: () = assert!(std::mem::offset_of!(sys::pm_scan_arg, walk_end) == 32);
const _: () = assert!(size_of::<sys::page_region>() == 24);

/// Runs in one call, at most. The kernel itself works in steps of 2 MiB (512 pages).
const RUNS: usize = 512;

/// The longest gap between two runs, in bytes, that one call protects along with them. The guest
/// faults on the pages of the gap once more. Two such faults cost it about as much as a further
/// call would, which interrupts all its processors.
const GAP: usize = 2 * PAGE_SIZE;
/// Bytes of a block in which at most [`BLOCK_PARTS`] parts are protected each by a call of its own:
/// what one entry of a page directory maps.
const BLOCK: usize = 2 << 20;
/// See [`BLOCK`].
const BLOCK_PARTS: usize = 64;

/// An open `/proc/PID/pagemap`. It means the same address space for ever, even when the process
/// number is used again.
#[derive(Debug)]
pub struct Pagemap {
    fd: OwnedFd,
}

impl Pagemap {
    /// Opens the page map of a process.
    ///
    /// # Errors
    ///
    /// `NotFound`: there is no such process; `PermissionDenied`: this process may not look at it
    /// (`ptrace(2)`, "PTRACE_MODE_READ_FSCREDS").
    pub fn open(pid: i32) -> io::Result<Self> {
        Ok(Self { fd: File::open(format!("/proc/{pid}/pagemap"))?.into() })
    }

    /// Opens the page map of this process.
    ///
    /// # Errors
    ///
    /// `NotFound`: `/proc` is not mounted; those of `open(2)`.
    pub fn open_self() -> io::Result<Self> {
        Ok(Self { fd: File::open("/proc/self/pagemap")?.into() })
    }

    /// Takes over a page map opened elsewhere.
    pub fn from_fd(fd: OwnedFd) -> Self {
        Self { fd }
    }

    /// Whether no process uses the address space any more: they have ended, or run other programs.
    /// Takes no lock of the address space, so nothing that its processes do can delay it.
    pub fn is_gone(&self) -> bool {
        // The kernel first looks whether the address space is there, and returns nothing if not.
        // Only then does it refuse a length that is no multiple of eight bytes (`EINVAL`).
        rustix::io::pread(&self.fd, &mut [0u8; 1][..], 0) == Ok(0)
    }

    /// Calls `each`, in ascending order, for every run of matching pages in `range`. The whole
    /// range is walked, whatever the number of runs. Adjacent pages with equal categories are one
    /// run.
    ///
    /// When it fails midway, `each` has been called for all runs found until then. They are
    /// protected, if the query says so.
    ///
    /// # Errors
    ///
    /// `ENOTTY`: the kernel is older than 6.7. `EPERM`: see [`Query::check_wp_async`]. `EINVAL`:
    /// the range is not page aligned, or the query needs asynchronous write-protection and the
    /// kernel has none. `EFAULT`: not a range of addresses. `ESRCH`: the process is gone.
    pub fn scan(&self, range: Range, query: &Query, each: &mut dyn FnMut(PageRun)) -> Result<ScanTotals, Errno> {
        self.scan_sparing(range, query, None, each)
    }

    /// As [`Pagemap::scan`], but matching pages for which `spare` is true are reported without
    /// being protected. It is given the page's address and its [`Query::returned`] categories.
    /// Between pages that are protected some may be protected all the same.
    pub fn scan_sparing(
        &self,
        range: Range,
        query: &Query,
        spare: Option<Spare<'_>>,
        each: &mut dyn FnMut(PageRun),
    ) -> Result<ScanTotals, Errno> {
        let mut joiner = Joiner { last: None, totals: ScanTotals::default(), each };
        let mut found = |runs: &[PageRun]| {
            runs.iter().for_each(|&run| joiner.add(run));
            Ok(())
        };
        let result = if query.write_protect {
            // Runs end where categories change: asked for only if they decide.
            let returned = if spare.is_some() { query.returned } else { Categories::empty() };
            let ask = Query { write_protect: false, returned, ..*query };
            self.walk(range, &ask, &mut |runs| {
                let (wanted, spared) = divide(runs, spare);
                let mut spared = spared.iter().peekable();
                for part in to_protect(&wanted) {
                    while let Some(run) = spared.next_if(|run| run.start < part.start) {
                        found(&[*run])?;
                    }
                    // Those within the part are protected with it.
                    while spared.next_if(|run| run.start < part.end()).is_some() {}
                    self.walk(part, query, &mut found)?;
                }
                spared.try_for_each(|run| found(&[*run]))
            })
        } else {
            self.walk(range, query, &mut found)
        };
        let totals = joiner.finish();
        result.map(|()| totals)
    }

    /// Protects the matching pages of a short range, in one call. As [`Pagemap::scan`], but without
    /// asking first which these are: others who have mapped the range lose all of it.
    pub fn protect(&self, range: Range, query: &Query) -> Result<(), Errno> {
        self.walk(range, &Query { write_protect: true, ..*query }, &mut |_| Ok(()))
    }

    /// Calls `each` with the runs of each system call.
    fn walk(
        &self,
        range: Range,
        query: &Query,
        each: &mut dyn FnMut(&[PageRun]) -> Result<(), Errno>,
    ) -> Result<(), Errno> {
        const NONE: sys::page_region = sys::page_region { start: 0, end: 0, categories: 0 };
        // For each call the kernel allocates, and may clear, as much again.
        let mut regions = vec![NONE; (range.len / PAGE_SIZE).clamp(1, RUNS)];
        let end = range.end() as u64;
        let mut call = ScanCall(query.argument(range, &mut regions));
        let mut runs = Vec::new();
        while call.0.start < end {
            // SAFETY: `ScanCall` is PAGEMAP_SCAN with its argument, whose `vec` is an array of
            // `vec_len` regions that outlives the call.
            let filled = unsafe { ioctl::ioctl(&self.fd, &mut call) }?;
            // Not every kernel says `ESRCH` of an address space that is gone.
            if filled == 0 && self.is_gone() {
                return Err(Errno::SRCH);
            }
            runs.clear();
            runs.extend(regions[..filled.min(regions.len())].iter().map(|region| PageRun {
                start: region.start as usize,
                end: region.end as usize,
                categories: Categories::from_bits_retain(region.categories),
            }));
            each(&runs)?;
            if call.0.walk_end <= call.0.start {
                // The kernel promises progress. Without it this loop would not end.
                return Err(Errno::IO);
            }
            call.0.start = call.0.walk_end;
        }
        Ok(())
    }
}

/// Runs to protect, and runs to spare: both ascending.
fn divide(runs: &[PageRun], spare: Option<Spare<'_>>) -> (Vec<PageRun>, Vec<PageRun>) {
    let Some(spare) = spare else { return (runs.to_vec(), Vec::new()) };
    let (mut wanted, mut spared) = (Vec::new(), Vec::new());
    for run in runs {
        let mut start = run.start;
        while start < run.end {
            let is = spare(start, run.categories);
            let alike = |&page: &usize| spare(page, run.categories) == is;
            let pages = (start..run.end).step_by(PAGE_SIZE).skip(1).take_while(alike).count() + 1;
            let part = PageRun { start, end: start + pages * PAGE_SIZE, ..*run };
            if is { &mut spared } else { &mut wanted }.push(part);
            start = part.end;
        }
    }
    (wanted, spared)
}

/// What is protected in one call each, so that all these runs are: with short gaps between them,
/// and whole blocks of which many parts are to be protected.
fn to_protect(runs: &[PageRun]) -> Vec<Range> {
    let mut parts: Vec<Range> = Vec::new();
    for run in runs {
        match parts.last_mut() {
            Some(last) if run.start - last.end() <= GAP => last.len = run.end - last.start,
            _ => parts.push(Range::new(run.start, run.end - run.start)),
        }
    }
    let blocks = parts.chunk_by(|one, next| one.start / BLOCK == next.start / BLOCK);
    let of_block = |parts: &[Range]| match parts {
        [first, .., last] if parts.len() > BLOCK_PARTS => vec![Range::new(first.start, last.end() - first.start)],
        _ => parts.to_vec(),
    };
    blocks.flat_map(of_block).collect()
}

impl Query {
    /// The ioctl's argument for a scan of `range` that reports to `regions`.
    fn argument(&self, range: Range, regions: &mut [sys::page_region]) -> sys::pm_scan_arg {
        let mut flags = 0;
        if self.write_protect {
            flags |= u64::from(sys::PM_SCAN_WP_MATCHING);
        }
        if self.check_wp_async {
            flags |= u64::from(sys::PM_SCAN_CHECK_WPASYNC);
        }
        sys::pm_scan_arg {
            size: size_of::<sys::pm_scan_arg>() as u64,
            flags,
            start: range.start as u64,
            end: range.end() as u64,
            walk_end: 0,
            vec: regions.as_mut_ptr().expose_provenance() as u64,
            vec_len: regions.len() as u64,
            max_pages: 0,
            category_inverted: self.inverted.bits(),
            category_mask: self.required.bits(),
            category_anyof_mask: self.any_of.bits(),
            return_mask: self.returned.bits(),
        }
    }
}

/// Joins runs that continue each other. The kernel ends a run where its array is full, so the last
/// run of each call waits for the next call.
struct Joiner<'a> {
    last: Option<PageRun>,
    totals: ScanTotals,
    each: &'a mut dyn FnMut(PageRun),
}

impl Joiner<'_> {
    fn add(&mut self, run: PageRun) {
        match &mut self.last {
            Some(last) if last.end == run.start && last.categories == run.categories => last.end = run.end,
            _ => {
                let before = self.last.replace(run);
                self.report(before);
            }
        }
    }

    fn report(&mut self, run: Option<PageRun>) {
        if let Some(run) = run {
            self.totals.runs += 1;
            self.totals.pages += run.pages() as u64;
            (self.each)(run);
        }
    }

    fn finish(mut self) -> ScanTotals {
        let last = self.last.take();
        self.report(last);
        self.totals
    }
}

as_fd!(Pagemap);

/// The ioctl with its argument. It returns the number of regions that it filled in.
struct ScanCall(sys::pm_scan_arg);

// SAFETY: the trait asks that opcode, argument and output fit together. PAGEMAP_SCAN takes a
// pointer to a `pm_scan_arg`, changes it (`walk_end`) and the array behind its `vec`, and returns a
// count.
unsafe impl Ioctl for &mut ScanCall {
    type Output = usize;

    const IS_MUTATING: bool = true;

    fn opcode(&self) -> Opcode {
        PAGEMAP_SCAN
    }

    fn as_ptr(&mut self) -> *mut libc::c_void {
        (&raw mut self.0).cast()
    }

    unsafe fn output_from_ptr(filled: IoctlOutput, _: *mut libc::c_void) -> Result<usize, Errno> {
        Ok(filled as usize)
    }
}

#[cfg(test)]
mod tests;
