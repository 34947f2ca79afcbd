#![allow(unsafe_code)] // Reads memory by its address.

use kmem::memfd::MemfdError;
use kmem::mm;
use wire::{PageNo, Run};

use super::*;
use crate::intercept::probe::{Ksm, probe};
use crate::runtime::watch::Watch;

/// A segment whose pages of these numbers have bytes.
fn segment(pages: &[usize]) -> OwnedFd {
    memfd::create_written("pageone:snapshot", SEGMENT_PAGES as usize * PAGE_SIZE, |fd| {
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

fn part(page: u32, len: u32, slot: u32) -> Part {
    Part { run: Run::new(PageNo(page), len), slot }
}

#[test]
fn memory_is_the_snapshots_whether_it_is_mapped_or_copied() {
    const PAGES: usize = 300;
    // The second part goes over the border of two segments. The last is there twice.
    let parts = [part(0, 6, 0), part(10, 4, SEGMENT_PAGES - 2), part(100, 3, 40), part(103, 3, 40)];
    for (bytes, maps) in [(Bytes::Mapped, true), (Bytes::Copied, false)] {
        static WATCH: Watch = Watch::new();
        let mut state = State::new(&WATCH);
        let range = Range::new(mm::map_anonymous(PAGES * PAGE_SIZE).unwrap(), PAGES * PAGE_SIZE);
        let last = SEGMENT_PAGES as usize - 1;
        let sources = vec![segment(&[0, 1, 5, 40, 42, last]), segment(&[1, 3])];
        // SAFETY: mapped just now, and known to this test alone.
        let mapped = unsafe { place(&mut state, range, Sticky::default(), &parts, sources, bytes) }.unwrap();
        assert_eq!(mapped, if maps { 16 } else { 0 });
        let wanted = [(0, 1), (1, 1), (5, 5), (11, last as u8), (13, 1), (100, 41), (102, 43), (103, 41), (105, 43)];
        for page in 0..PAGES {
            let want = wanted.iter().find(|(at, _)| *at == page).map_or(0, |(_, byte)| *byte);
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
fn parts_that_lie_nowhere_are_not_mapped() {
    let list = |part| {
        let mut file = tempfile::tempfile().unwrap();
        file.write_all(&wire::encode_parts(&[part])).unwrap();
        file
    };
    let range = Range::new(0x10_0000, 20 * PAGE_SIZE);
    assert_eq!(read_parts(&list(part(2, 3, 4)), range, 1).unwrap(), [part(2, 3, 4)]);
    for wrong in [part(18, 3, 4), part(2, 3, SEGMENT_PAGES - 2), part(2, 0, 0)] {
        assert!(read_parts(&list(wrong), range, 1).is_err(), "{wrong:?}");
    }
}

#[test]
fn what_the_program_discards_before_it_marks_the_memory_is_zeros() {
    let range = Range::new(mm::map_anonymous(20 * PAGE_SIZE).unwrap(), 20 * PAGE_SIZE);
    let sources = vec![segment(&[2, 3, 4])];
    // SAFETY: mapped just now, and known to this test alone.
    unsafe { place(&mut STATE.lock(), range, Sticky::default(), &[part(2, 3, 2)], sources, Bytes::Mapped) }.unwrap();
    // SAFETY: this test alone knows the memory, and relies on none of these bytes.
    unsafe { crate::intercept::guard::madvise(range.start + 3 * PAGE_SIZE, PAGE_SIZE, libc::MADV_DONTNEED) }.unwrap();
    assert_eq!([2, 3, 4].map(|page| byte(range, page)), [3, 0, 5]);
    // SAFETY: this test alone knows the memory.
    unsafe { crate::intercept::guard::munmap(range.start, range.len) }.unwrap();
    assert!(STATE.lock().regions.retained().within(range).is_empty());
}
