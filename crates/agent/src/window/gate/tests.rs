use wire::{PageNo, RegionId};

use super::*;
use crate::runtime::state::window_uffd::PutBack;

fn run(start: u32, len: u32) -> Run {
    Run::new(PageNo(start), len)
}

#[test]
fn parts_outside_of_holes() {
    assert_eq!(without(run(5, 10), &[]), [run(5, 10)]);
    assert_eq!(without(run(5, 10), &[run(0, 6), run(8, 2), run(14, 9)]), [run(6, 2), run(10, 4)]);
    assert!(without(run(5, 10), &[run(0, 30)]).is_empty());
}

#[test]
fn memory_is_given_back_in_one_call_or_in_many() {
    let pages = 3000;
    let start = mm::map_anonymous(pages * PAGE_SIZE).unwrap();
    // SAFETY: mapped above, readable and writable, and known to this test alone.
    let memory = unsafe { std::slice::from_raw_parts_mut(start as *mut u8, pages * PAGE_SIZE) };
    memory.fill(7);
    let places: Vec<Range> = (0..pages).step_by(2).map(|p| Range::new(start + p * PAGE_SIZE, PAGE_SIZE)).collect();
    // SAFETY: the test expects zeros in these pages; an address that is not aligned is refused.
    unsafe {
        discard(Grounds::Discarded, &places).unwrap();
        let wrong = [Range::new(start + 1, PAGE_SIZE)];
        assert!(discard(Grounds::Discarded, &wrong).is_err(), "an error is returned");
    }
    assert!(memory.chunks(PAGE_SIZE).enumerate().all(|(p, page)| page[0] == if p % 2 == 0 { 0 } else { 7 }));
    // SAFETY: mapped above, and not used any more.
    unsafe { raw::munmap(start, pages * PAGE_SIZE).unwrap() };
}

#[test]
fn merged_pages_are_found_in_runs() {
    let mut region = Region::new(RegionId(1), Range::new(0x10_0000, 100 * PAGE_SIZE), Sticky::default()).unwrap();
    region.mapped.set(run(3, 4));
    region.mapped.set(run(50, 50));
    assert_eq!(merged(&region, run(0, 60)), [run(3, 4), run(50, 10)]);
}

/// Registers memory with io_uring, which pins it. `None`: this process may not.
fn pin(memory: Range) -> Option<usize> {
    let mut params = [0u8; 120];
    let buffer = libc::iovec { iov_base: memory.start as *mut c_void, iov_len: memory.len };
    // SAFETY: io_uring_setup takes a zeroed io_uring_params of 120 bytes; IORING_REGISTER_BUFFERS
    // (0) an array of iovecs. The memory stays mapped.
    unsafe {
        let ring = libc::syscall(libc::SYS_io_uring_setup, 2, params.as_mut_ptr());
        let done = ring >= 0 && libc::syscall(libc::SYS_io_uring_register, ring, 0, &raw const buffer, 1) == 0;
        done.then_some(ring as usize)
    }
}

#[test]
fn claimed_pages_that_are_pinned_stay() {
    let uffd = match WindowUffd::new() {
        Ok(uffd) if uffd.can_check_pins() => uffd,
        _ => return println!("SKIPPED: no UFFDIO_MOVE"),
    };
    // More than the scratch area holds.
    let pages = 1500;
    let start = mm::map_anonymous(pages * PAGE_SIZE).unwrap();
    // SAFETY: mapped above, readable and writable, and known to this test alone.
    let memory = unsafe { std::slice::from_raw_parts_mut(start as *mut u8, pages * PAGE_SIZE) };
    memory.fill(7);
    let pinned = Range::new(start + 700 * PAGE_SIZE, 50 * PAGE_SIZE);
    if pin(pinned).is_none() {
        return println!("SKIPPED: no io_uring");
    }
    let mut kept = Vec::new();
    let mut taker = Taker::new(Some(&uffd)).unwrap();
    // SAFETY: the test relies on no byte of the pages that are taken.
    unsafe { taker.take(Range::new(start, pages * PAGE_SIZE), |address| kept.push((address - start) / PAGE_SIZE)) };
    drop(taker);
    assert!(kept.iter().copied().eq(700..750));
    assert!(
        memory.chunks(PAGE_SIZE).enumerate().all(|(p, page)| page[0] == if (700..750).contains(&p) { 7 } else { 0 })
    );
}

#[test]
fn a_scratch_area_that_somebody_reads_takes_pages_all_the_same() {
    let uffd = match WindowUffd::new() {
        Ok(uffd) if uffd.can_check_pins() => uffd,
        _ => return println!("SKIPPED: no UFFDIO_MOVE"),
    };
    let start = mm::map_anonymous(64 * PAGE_SIZE).unwrap();
    for (touched, writes) in [(0, false), (20, false), (0, true), (63, true)] {
        // SAFETY: mapped above, readable and writable, and known to this test alone.
        unsafe { std::slice::from_raw_parts_mut(start as *mut u8, 64 * PAGE_SIZE) }.fill(7);
        let place = (uffd.taken_at(0).unwrap() + touched * PAGE_SIZE) as *mut u8;
        // SAFETY: the scratch area is mapped, and nobody else uses it now.
        unsafe {
            place.read_volatile();
            if writes {
                place.write_volatile(1);
            }
        }
        let mut kept = 0;
        let mut taker = Taker::new(Some(&uffd)).unwrap();
        // SAFETY: the test relies on no byte of the pages that are taken.
        unsafe { taker.take(Range::new(start, 64 * PAGE_SIZE), |_| kept += 1) };
        assert_eq!(kept, 0, "page {touched} of the scratch area was touched");
    }
}

#[test]
fn a_page_whose_memory_failed_while_it_was_away_comes_back_unreadable() {
    let uffd = match WindowUffd::new() {
        Ok(uffd) if uffd.can_check_pins() => uffd,
        _ => return println!("SKIPPED: no UFFDIO_MOVE"),
    };
    let place = Range::new(mm::map_anonymous(2 * PAGE_SIZE).unwrap(), 2 * PAGE_SIZE);
    // SAFETY: mapped above, readable and writable, and known to this test alone.
    unsafe { std::slice::from_raw_parts_mut(place.start as *mut u8, place.len) }.fill(7);
    uffd.block_readers(place).unwrap();
    // SAFETY: nobody reads the place while its pages are away.
    assert_eq!(unsafe { uffd.take_away(place, 0) }, (place.len, Ok(())));
    let scratch = uffd.taken_at(PAGE_SIZE).unwrap();
    // Neither can the kernel read what is there now.
    // SAFETY: the scratch area has two pages in use, and nobody reads them by a pointer.
    unsafe { raw::mprotect(scratch, PAGE_SIZE, libc::PROT_NONE).unwrap() };
    assert_eq!(uffd.put_back(place, 0), PutBack::Done);
    let mut bytes = [0; 2 * PAGE_SIZE];
    assert_eq!((kmem::procmem::read_own(place, &mut bytes), bytes[0]), (1, 7));
}
