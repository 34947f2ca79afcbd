//! `PAGEMAP_SCAN`: which pages of a process are in which state, and write-protecting them in the
//! same step.
//!
//! One ioctl on `/proc/PID/pagemap` walks a range and reports runs of pages that match a [`Query`].
//! With [`Query::write_protect`] the pages reported are write-protected as they are reported,
//! atomically with respect to writers: a page that is written afterwards is reported by the next
//! scan, one that was written before by this. This needs memory registered with a userfaultfd that
//! has [`WP_ASYNC`](crate::uffd::Features::WP_ASYNC).
//!
//! Memory that was never touched counts as written, and protecting it takes page tables. Asking for
//! `required: WRITTEN, any_of: PRESENT | SWAPPED` leaves it out; it is reported when somebody has
//! written to it.
//!
//! Source: Documentation/admin-guide/mm/pagemap.rst; Linux 6.7 or newer.

#![allow(unsafe_code)] // One ioctl whose argument points to an array.

use std::fs::File;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use linux_raw_sys::general as sys;
use rustix::io::Errno;
use rustix::ioctl::{self, Ioctl, IoctlOutput, Opcode, opcode};

use crate::{PAGE_SIZE, Range};

bitflags::bitflags! {
    /// `PAGE_IS_*`: the states of a page.
    #[derive(Copy, Clone, PartialEq, Eq, Debug, Hash, Default)]
    pub struct Categories: u64 {
        /// Its mapping is registered with an asynchronous write-protecting userfaultfd.
        const WPALLOWED = sys::PAGE_IS_WPALLOWED as u64;
        /// Written since it was last write-protected, or never populated nor protected.
        const WRITTEN = sys::PAGE_IS_WRITTEN as u64;
        /// It is a page of a file (a memfd's too), not a private copy of one.
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
    /// Write-protect what is reported (`PM_SCAN_WP_MATCHING`). Mappings where this cannot be done
    /// are passed over.
    pub write_protect: bool,
    /// Fail with `EPERM` when a mapping in the range is not registered for asynchronous
    /// write-protection (`PM_SCAN_CHECK_WPASYNC`).
    pub check_wp_async: bool,
    /// Categories to flip before matching.
    pub inverted: Categories,
    /// Categories that must all be there.
    pub required: Categories,
    /// Categories of which one must be there; empty asks for none.
    pub any_of: Categories,
    /// Categories to report, as they are (not flipped). Runs are cut where these differ, so ask for
    /// little.
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
    /// How many pages.
    pub const fn pages(&self) -> usize {
        (self.end - self.start) / PAGE_SIZE
    }
}

/// What a scan reported.
#[derive(Copy, Clone, PartialEq, Eq, Debug, Default)]
pub struct ScanTotals {
    /// Runs.
    pub runs: u64,
    /// Pages in them.
    pub pages: u64,
}

/// `PAGEMAP_SCAN` = `_IOWR('f', 16, struct pm_scan_arg)`.
const PAGEMAP_SCAN: Opcode = opcode::read_write::<sys::pm_scan_arg>(b'f', 16);
const _: () = assert!(PAGEMAP_SCAN == 0xC060_6610);
const _: () = assert!(size_of::<sys::pm_scan_arg>() == 96);
const _: () = assert!(std::mem::offset_of!(sys::pm_scan_arg, walk_end) == 32);
const _: () = assert!(size_of::<sys::page_region>() == 24);

/// Runs per call. The kernel works through 2 MiB (512 pages) at a time itself; the array takes 12
/// KiB of stack.
const RUNS: usize = 512;

/// An open `/proc/PID/pagemap`. It goes on meaning the same process image, even when the PID is
/// used again.
#[derive(Debug)]
pub struct Pagemap {
    fd: OwnedFd,
}

impl Pagemap {
    /// Opens the page map of a process.
    ///
    /// # Errors
    ///
    /// `NotFound` when there is no such process, `PermissionDenied` when this one may not look at
    /// it (`ptrace(2)`, "PTRACE_MODE_READ_FSCREDS").
    pub fn open(pid: i32) -> io::Result<Pagemap> {
        Ok(Pagemap { fd: File::open(format!("/proc/{pid}/pagemap"))?.into() })
    }

    /// Opens this process's own.
    ///
    /// # Errors
    ///
    /// As [`Pagemap::open`]; also when `/proc` is not mounted.
    pub fn open_self() -> io::Result<Pagemap> {
        Ok(Pagemap { fd: File::open("/proc/self/pagemap")?.into() })
    }

    /// Takes over a page map opened elsewhere.
    pub fn from_fd(fd: OwnedFd) -> Pagemap {
        Pagemap { fd }
    }

    /// Calls `each`, in ascending order, for every run of matching pages in `range`. The whole
    /// range is walked, however many runs there are; adjacent pages with equal categories are
    /// one run.
    ///
    /// When it fails midway, what was reported by then is reported (and protected, if that was
    /// asked for).
    ///
    /// # Errors
    ///
    /// `ENOTTY`: the kernel is older than 6.7. `EPERM`: see [`Query::check_wp_async`]. `EINVAL`:
    /// not page aligned, or the kernel has no asynchronous write-protection and was asked for
    /// it. `EFAULT`: not an address range. `ESRCH`: the process is gone.
    pub fn scan(&self, range: Range, query: &Query, each: &mut dyn FnMut(PageRun)) -> Result<ScanTotals, Errno> {
        const NONE: sys::page_region = sys::page_region { start: 0, end: 0, categories: 0 };
        let mut regions = [NONE; RUNS];
        let mut flags = 0;
        if query.write_protect {
            flags |= u64::from(sys::PM_SCAN_WP_MATCHING);
        }
        if query.check_wp_async {
            flags |= u64::from(sys::PM_SCAN_CHECK_WPASYNC);
        }
        let end = range.end() as u64;
        let mut call = ScanCall(sys::pm_scan_arg {
            size: size_of::<sys::pm_scan_arg>() as u64,
            flags,
            start: range.start as u64,
            end,
            walk_end: 0,
            vec: regions.as_mut_ptr() as u64,
            vec_len: RUNS as u64,
            max_pages: 0,
            category_inverted: query.inverted.bits(),
            category_mask: query.required.bits(),
            category_anyof_mask: query.any_of.bits(),
            return_mask: query.returned.bits(),
        });
        let mut totals = ScanTotals::default();
        let mut report = |run: PageRun| {
            totals.runs += 1;
            totals.pages += run.pages() as u64;
            each(run);
        };
        // The kernel cuts a run where its array is full, so each call's last run waits for the next call.
        let mut last: Option<PageRun> = None;
        while call.0.start < end {
            // SAFETY: `ScanCall` is PAGEMAP_SCAN with its argument, whose `vec` is an array of `vec_len`
            // regions that outlives the call.
            let filled = match unsafe { ioctl::ioctl(&self.fd, &mut call) } {
                Ok(filled) => filled,
                Err(errno) => {
                    if let Some(run) = last {
                        report(run);
                    }
                    return Err(errno);
                }
            };
            for region in &regions[..filled.min(RUNS)] {
                let run = PageRun {
                    start: region.start as usize,
                    end: region.end as usize,
                    categories: Categories::from_bits_retain(region.categories),
                };
                match &mut last {
                    Some(last) if last.end == run.start && last.categories == run.categories => last.end = run.end,
                    _ => {
                        if let Some(run) = last.replace(run) {
                            report(run);
                        }
                    }
                }
            }
            if call.0.walk_end <= call.0.start {
                return Err(Errno::IO); // The kernel promises progress; without it this would go on for ever.
            }
            call.0.start = call.0.walk_end;
        }
        if let Some(run) = last {
            report(run);
        }
        Ok(totals)
    }
}

impl AsFd for Pagemap {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }
}

/// The ioctl with its argument; it returns how many regions it filled in.
struct ScanCall(sys::pm_scan_arg);

// SAFETY: PAGEMAP_SCAN takes a `pm_scan_arg`, changes it (`walk_end`) and what its `vec` points to,
// and returns a count.
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
