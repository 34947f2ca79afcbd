//! The rivals' way: files, each mapped on its own through the page cache.

#![allow(unsafe_code)] // Mappings of files.

use std::fs::File;
use std::io;
use std::os::fd::AsRawFd;

/// A file mapped for reading.
pub(super) struct Mapped {
    start: *mut libc::c_void,
    len: usize,
}

// SAFETY: read-only memory of a file that does not change.
unsafe impl Send for Mapped {}
// SAFETY: shared access only reads memory of a file that does not change.
unsafe impl Sync for Mapped {}

impl Mapped {
    pub(super) fn new(file: &File, len: usize) -> io::Result<Self> {
        // SAFETY: a mapping that is not fixed replaces nothing.
        let start =
            unsafe { libc::mmap(std::ptr::null_mut(), len, libc::PROT_READ, libc::MAP_SHARED, file.as_raw_fd(), 0) };
        if start == libc::MAP_FAILED { Err(io::Error::last_os_error()) } else { Ok(Self { start, len }) }
    }

    pub(super) fn bytes(&self) -> &[u8] {
        // SAFETY: mapped as long as `self` lives; the benches do not change or cut their files.
        unsafe { std::slice::from_raw_parts(self.start.cast(), self.len) }
    }

    pub(super) fn advise(&self, advice: i32) {
        // SAFETY: the range is this mapping; the advice changes no contents.
        unsafe { libc::madvise(self.start, self.len, advice) };
    }
}

impl Drop for Mapped {
    fn drop(&mut self) {
        // SAFETY: the mapping is ours, and slices borrowed from `self` have ended.
        unsafe { libc::munmap(self.start, self.len) };
    }
}

/// Lets the page cache go, as far as root may ask for it.
pub(super) fn drop_page_cache() {
    rustix::fs::sync();
    if let Err(e) = std::fs::write("/proc/sys/vm/drop_caches", "1") {
        eprintln!("mpool: the page cache stays, so rivals start warm: {e}");
    }
}

/// Mappings of this process whose file's path holds `name`.
pub(super) fn mappings(name: &str) -> usize {
    let maps = std::fs::read_to_string("/proc/self/maps").unwrap_or_default();
    maps.lines().filter(|line| line.contains(name)).count()
}

/// Mappings of this process that begin in this range of addresses.
pub(super) fn mappings_in(range: std::ops::Range<usize>) -> usize {
    let maps = std::fs::read_to_string("/proc/self/maps").unwrap_or_default();
    let start = |line: &str| usize::from_str_radix(line.split('-').next()?, 16).ok();
    maps.lines().filter_map(start).filter(|start| range.contains(start)).count()
}

/// Bytes of kernel memory that one mapping takes: the slab object, as the kernel says to root.
pub(super) fn vma_bytes() -> f64 {
    let slabs = std::fs::read_to_string("/proc/slabinfo").unwrap_or_default();
    let line = slabs.lines().find(|line| line.starts_with("vm_area_struct"));
    line.and_then(|line| line.split_whitespace().nth(3)?.parse().ok()).unwrap_or(192.0)
}
