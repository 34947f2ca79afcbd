#![allow(unsafe_code)] // Reads memory by its address.

use std::os::unix::fs::FileExt;

use kmem::memfd::MemfdError;
use kmem::mm;

use super::*;
use crate::intercept::probe::{Ksm, probe};
use crate::runtime::watch::Watch;

/// A segment whose pages of these numbers have bytes.
fn segment(pages: &[usize]) -> OwnedFd {
    memfd::create_written("pageone:snapshot", SEGMENT_LEN, |fd| {
        for &page in pages {
            rustix::io::pwrite(fd, &[page as u8 | 1; PAGE_SIZE], (page * PAGE_SIZE) as u64)
                .map_err(MemfdError::Seal)?;
        }
        Ok::<(), MemfdError>(())
    })
    .unwrap()
}

fn byte(range: Range, page: usize) -> u8 {
    let memory = File::open("/proc/self/mem").unwrap();
    let mut bytes = [0; PAGE_SIZE];
    memory.read_exact_at(&mut bytes, (range.start + page * PAGE_SIZE) as u64).unwrap();
    assert!(bytes.iter().all(|byte| *byte == bytes[0]), "page {page}");
    bytes[0]
}

#[test]
fn memory_is_the_snapshots_whether_it_is_mapped_or_copied() {
    const PAGES: usize = SEGMENT_PAGES as usize + 100;
    // The second run ends behind the memory.
    let (first, second) = ([0, 1, 5, 40, SEGMENT_PAGES as usize - 1], [98, 99, 100]);
    for maps in [true, false] {
        static WATCH: Watch = Watch::new();
        let mut state = State::new(&WATCH);
        let range = Range::new(mm::map_anonymous(PAGES * PAGE_SIZE).unwrap(), PAGES * PAGE_SIZE);
        let sources = vec![segment(&first), segment(&second)];
        // SAFETY: mapped just now, and known to this test alone.
        let mapped = unsafe { place(&mut state, range, Sticky::default(), sources, maps) }.unwrap();
        assert_eq!(mapped, if maps { 6 + 1 + 1 + 2 } else { 0 }, "with the three pages between 1 and 5");
        for page in 0..PAGES {
            let at = page % SEGMENT_PAGES as usize;
            let known = if page == at { &first[..] } else { &second };
            let want = if known.contains(&at) { at as u8 | 1 } else { 0 };
            assert_eq!(byte(range, page), want, "page {page}");
        }
        assert_eq!(state.regions.retained().within(range).len(), usize::from(maps));
        // Marked: what is mapped is merged from the beginning.
        let held: Vec<_> = state.segments.iter().map(|segment| segment.id).collect();
        let fit = probe(range, Ksm::Without, &held).unwrap();
        assert_eq!(fit.merged.iter().map(Range::pages).sum::<usize>(), mapped);
        assert_eq!(probe(range, Ksm::Without, &[]).is_err(), maps, "files of the program are not");
        // SAFETY: this test's alone.
        unsafe { mm::unmap(range) }.unwrap();
    }
}

#[test]
fn what_the_program_discards_before_it_marks_the_memory_is_zeros() {
    let range = Range::new(mm::map_anonymous(20 * PAGE_SIZE).unwrap(), 20 * PAGE_SIZE);
    let sources = vec![segment(&[2, 3, 4])];
    // SAFETY: mapped just now, and known to this test alone.
    unsafe { place(&mut STATE.lock(), range, Sticky::default(), sources, true) }.unwrap();
    // SAFETY: as above.
    unsafe { crate::intercept::guard::madvise(range.start + 3 * PAGE_SIZE, PAGE_SIZE, libc::MADV_DONTNEED) }.unwrap();
    assert_eq!([2, 3, 4].map(|page| byte(range, page)), [3, 0, 5]);
    // SAFETY: as above.
    unsafe { crate::intercept::guard::munmap(range.start, range.len) }.unwrap();
    assert!(STATE.lock().regions.retained().within(range).is_empty());
}
