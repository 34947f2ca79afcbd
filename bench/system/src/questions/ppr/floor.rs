//! What the kernel alone takes for giving pages back: `madvise(MADV_DONTNEED)` of touched memory,
//! in this process, nothing else around it.

#![allow(unsafe_code)] // Maps and discards memory of its own.

use anyhow::{Result, ensure};
use kmem::PAGE_SIZE;
use kmem::cpu::thread_time;

/// Pages that are given back.
const PAGES: usize = 65_536;

/// Nanoseconds of CPU time for each page, in runs of `run` pages with as many kept behind each
/// (`kept`), or none.
pub(crate) fn ns_per_page(run: usize, kept: bool) -> Result<f64> {
    let len = PAGES * PAGE_SIZE;
    let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE;
    // SAFETY: a fresh mapping, which replaces nothing.
    let start = unsafe { libc::mmap(std::ptr::null_mut(), len, libc::PROT_READ | libc::PROT_WRITE, flags, -1, 0) };
    ensure!(start != libc::MAP_FAILED, "no memory: {}", std::io::Error::last_os_error());
    // SAFETY: the ranges lie inside of the mapping made here, which no other code uses.
    let (spent, pages) = unsafe {
        libc::madvise(start, len, libc::MADV_NOHUGEPAGE);
        std::ptr::write_bytes(start.cast::<u8>(), 7, len);
        let (begin, mut pages) = (thread_time(), 0);
        let step = if kept { 2 * run } else { run };
        for page in (0..PAGES).step_by(step) {
            libc::madvise(start.add(page * PAGE_SIZE), run * PAGE_SIZE, libc::MADV_DONTNEED);
            pages += run;
        }
        let spent = thread_time() - begin;
        libc::munmap(start, len);
        (spent, pages)
    };
    Ok(spent.as_nanos() as f64 / pages as f64)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn single_pages_cost_more_than_runs() {
        let (runs, single) = (ns_per_page(1024, false).unwrap(), ns_per_page(1, true).unwrap());
        assert!(runs > 1.0 && single > runs, "{runs} {single}");
    }
}
