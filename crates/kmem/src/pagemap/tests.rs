use std::os::fd::AsFd;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};

use super::*;
use crate::testing::{Child, Memory, forking, uffd};
use crate::uffd::Features;
use crate::{memfd, mm};

const ASYNC: Features = Features::WP.union(Features::WP_ASYNC).union(Features::WP_UNPOPULATED);

/// Takes the pages written since the last scan, as the engine does each period.
const WRITTEN: Query = Query {
    write_protect: true,
    check_wp_async: true,
    inverted: Categories::empty(),
    required: Categories::WRITTEN,
    any_of: Categories::PRESENT.union(Categories::SWAPPED),
    returned: Categories::empty(),
};

/// All runs, as (first page, pages, categories).
fn scan(memory: &Memory, query: &Query) -> Vec<(usize, usize, Categories)> {
    let mut runs = Vec::new();
    let totals = Pagemap::open_self()
        .unwrap()
        .scan(memory.0, query, &mut |run| {
            runs.push(((run.start - memory.0.start) / PAGE_SIZE, run.pages(), run.categories));
        })
        .unwrap();
    assert_eq!(totals.runs, runs.len() as u64);
    assert_eq!(totals.pages, runs.iter().map(|run| run.1 as u64).sum::<u64>());
    runs
}

fn places(memory: &Memory, query: &Query) -> Vec<(usize, usize)> {
    scan(memory, query).into_iter().map(|(first, pages, _)| (first, pages)).collect()
}

#[test]
fn each_period_reports_what_was_written_in_it() {
    let Some(uffd) = uffd(ASYNC) else { return };
    let memory = Memory::new(16);
    memory.write(3, 1);
    memory.write(4, 1);
    uffd.register_wp(memory.0).unwrap();
    assert_eq!(places(&memory, &WRITTEN), [(3, 2)], "what was populated counts as written at first");
    assert_eq!(places(&memory, &WRITTEN), []);

    memory.write(4, 2);
    memory.write(9, 2);
    memory.write(10, 2);
    assert_eq!(memory.read(3), 1);
    assert_eq!(places(&memory, &Query { write_protect: false, ..WRITTEN }), [(4, 1), (9, 2)]);
    assert_eq!(places(&memory, &WRITTEN), [(4, 1), (9, 2)], "looking alone protects nothing");
    assert_eq!(places(&memory, &WRITTEN), []);
    memory.write(10, 3);
    assert_eq!(places(&memory, &WRITTEN), [(10, 1)]);
    assert!(uffd.read_event().unwrap().is_none(), "asynchronous: no fault reaches the descriptor");

    // As the balloon does: emptied pages are not reported before they are touched again.
    // SAFETY: the test's own memory, without references.
    unsafe { mm::advise(memory.pages(9, 2), libc::MADV_DONTNEED) }.unwrap();
    assert_eq!(places(&memory, &WRITTEN), []);
    memory.write(9, 4);
    assert_eq!(places(&memory, &WRITTEN), [(9, 1)]);

    uffd.unregister(memory.0).unwrap();
    let error = Pagemap::open_self().unwrap().scan(memory.0, &WRITTEN, &mut |_| {}).unwrap_err();
    assert_eq!(error, Errno::PERM, "not registered any more");
}

#[test]
fn untouched_memory_counts_as_written_unless_left_out() {
    let Some(uffd) = uffd(ASYNC) else { return };
    let memory = Memory::new(8);
    memory.write(3, 1);
    uffd.register_wp(memory.0).unwrap();
    let with_untouched = Query { any_of: Categories::empty(), ..WRITTEN };
    assert_eq!(places(&memory, &WRITTEN), [(3, 1)]);
    assert_eq!(places(&memory, &with_untouched), [(0, 3), (4, 4)]);
    assert_eq!(places(&memory, &with_untouched), [], "protected all the same");
    assert_eq!(memory.read(5), 0);
    assert_eq!(places(&memory, &WRITTEN), [], "reading is not writing");
    memory.write(6, 1);
    assert_eq!(places(&memory, &WRITTEN), [(6, 1)]);
}

#[test]
fn the_whole_range_is_walked() {
    let Some(uffd) = uffd(ASYNC) else { return };
    let memory = Memory::new(3000);
    uffd.register_wp(memory.0).unwrap();
    for page in (0..3000).step_by(2) {
        memory.write(page, 1);
    }
    let runs = places(&memory, &WRITTEN);
    assert_eq!(runs.len(), 1500, "more than one array full");
    assert!(runs.iter().enumerate().all(|(i, &run)| run == (2 * i, 1)));
    assert_eq!(places(&memory, &WRITTEN), []);
    for page in 0..3000 {
        memory.write(page, 2);
    }
    assert_eq!(places(&memory, &WRITTEN), [(0, 3000)], "one run stays one run");
}

#[test]
fn categories_tell_what_a_page_is() {
    let Some(uffd) = uffd(ASYNC) else { return };
    let memory = Memory::new(8);
    let (fd, store) = memfd::create_sealed("kmem-test", 2 * PAGE_SIZE).unwrap();
    store.write_page(0, &[1; PAGE_SIZE]);
    store.write_page(1, &[1; PAGE_SIZE]);
    // SAFETY: the test's own memory, without references.
    unsafe { mm::map_fixed_private(fd.as_fd(), memory.pages(2, 2), 0) }.unwrap();
    uffd.register_wp(memory.0).unwrap();
    memory.write(0, 1);
    assert_eq!(memory.read(1), 0);
    assert_eq!(memory.read(2) & 0xff, 1);
    memory.write(3, 1);

    let all = Query { returned: Categories::all(), any_of: Categories::PRESENT, ..Query::default() };
    let is = |page: usize, has: Categories, lacks: Categories| {
        let runs = scan(&memory, &all);
        let run = runs.iter().find(|run| (run.0..run.0 + run.1).contains(&page));
        let categories = run.map(|run| run.2).unwrap_or_default();
        assert!(categories.contains(has) && !categories.intersects(lacks), "page {page}: {categories:?}");
    };
    let (file, zero, present) = (Categories::FILE, Categories::PFNZERO, Categories::PRESENT);
    is(0, present | Categories::WPALLOWED, file | zero);
    is(1, present | zero, file);
    is(2, present | file, zero);
    is(3, present | Categories::WRITTEN, file | zero);
    is(4, Categories::empty(), present);

    // Pages that are present and not a file's: the query before merging.
    let own =
        Query { inverted: Categories::FILE, required: Categories::FILE | Categories::PRESENT, ..Query::default() };
    assert_eq!(places(&memory, &own), [(0, 2), (3, 1)]);
}

#[test]
fn another_process_is_scanned_and_protected_from_outside() {
    let _forking = forking();
    let Some(uffd) = uffd(ASYNC | Features::EVENT_FORK) else {
        return;
    };
    let memory = Memory::new(8);
    for page in 0..8 {
        memory.write(page, 1);
    }
    uffd.register_wp(memory.0).unwrap();
    std::thread::scope(|scope| {
        let child = scope.spawn(Child::idle);
        let event = loop {
            if let Some(event) = uffd.read_event().unwrap() {
                break event;
            }
        };
        let crate::uffd::Event::Fork { child: fd } = event else { panic!("{event:?}") };
        let child = child.join().unwrap();
        let pagemap = Pagemap::open(child.0).unwrap();
        let count = || pagemap.scan(memory.0, &WRITTEN, &mut |_| {}).map(|totals| totals.pages);
        assert_eq!(count(), Ok(8));
        assert_eq!(count(), Ok(0));
        drop(child);
        assert_eq!(count(), Err(Errno::SRCH), "a process that is gone");
        drop(fd);
    });
}

#[test]
fn bad_ranges_are_refused() {
    let pagemap = Pagemap::open_self().unwrap();
    let error = pagemap.scan(Range::new(1, PAGE_SIZE), &Query::default(), &mut |_| {});
    if error == Err(Errno::NOTTY) {
        println!("SKIPPED: PAGEMAP_SCAN needs Linux 6.7");
        return;
    }
    assert_eq!(error, Err(Errno::INVAL));
    assert_eq!(pagemap.scan(Range::new(0, 0), &Query::default(), &mut |_| {}), Ok(ScanTotals::default()));
    assert_eq!(Pagemap::open(i32::MAX).unwrap_err().kind(), io::ErrorKind::NotFound);
}

#[test]
fn a_call_protects_what_was_written_and_short_gaps() {
    let run = |first: usize, pages: usize| PageRun {
        start: first * PAGE_SIZE,
        end: (first + pages) * PAGE_SIZE,
        categories: Categories::empty(),
    };
    let parts = |runs: &[PageRun]| {
        let part = |range: Range| (range.start / PAGE_SIZE, range.pages());
        to_protect(runs).into_iter().map(part).collect::<Vec<_>>()
    };
    assert_eq!(parts(&[]), []);
    assert_eq!(parts(&[run(3, 2)]), [(3, 2)]);
    assert_eq!(parts(&[run(3, 2), run(7, 1), run(11, 1)]), [(3, 5), (11, 1)], "two pages between, and three");
    let each = |count: usize| (0..count).map(|i| run(512 + 7 * i, 1)).collect::<Vec<_>>();
    assert_eq!(parts(&each(64)).len(), 64);
    let many: Vec<PageRun> = [run(100, 1)].into_iter().chain(each(65)).chain([run(1024, 600), run(2000, 1)]).collect();
    assert_eq!(parts(&many), [(100, 1), (512, 449), (1024, 600), (2000, 1)], "a whole block, but no other");
}

#[test]
fn spared_pages_are_reported_and_stay_writable() {
    let Some(uffd) = uffd(ASYNC) else { return };
    let memory = Memory::new(64);
    uffd.register_wp(memory.0).unwrap();
    let pagemap = Pagemap::open_self().unwrap();
    let scan = |spared: &[usize]| {
        let page = |address: usize| (address - memory.0.start) / PAGE_SIZE;
        let spare = |address: usize, _: Categories| spared.contains(&page(address));
        let mut runs = Vec::new();
        let each = &mut |run: PageRun| runs.push((page(run.start), run.pages()));
        pagemap.scan_sparing(memory.0, &WRITTEN, Some(&spare), each).unwrap();
        runs
    };
    let write = |pages: &[usize]| pages.iter().for_each(|&page| memory.write(page, 1));
    scan(&[]);
    write(&[1, 2, 3, 20, 40, 41, 60]);
    // Alone; at the ends of a part and within it; behind the last part.
    let spared = [1, 20, 41, 60];
    assert_eq!(scan(&spared), [(1, 3), (20, 1), (40, 2), (60, 1)]);
    assert_eq!(scan(&spared), [(1, 1), (20, 1), (41, 1), (60, 1)], "written still, as far as anybody knows");
    write(&[40]);
    assert_eq!(scan(&[]), [(1, 1), (20, 1), (40, 2), (60, 1)]);
    assert_eq!(scan(&spared), [], "protected by the last scan");
}

#[test]
fn no_write_is_lost_between_asking_and_protecting() {
    let Some(uffd) = uffd(ASYNC) else { return };
    let memory = Memory::new(2048);
    uffd.register_wp(memory.0).unwrap();
    let stop = AtomicBool::new(false);
    let mut seen = vec![0; 2048];
    let mut look = || {
        let runs = places(&memory, &WRITTEN);
        for page in runs.into_iter().flat_map(|(first, pages)| first..first + pages) {
            seen[page] = memory.read(page);
        }
    };
    std::thread::scope(|scope| {
        scope.spawn(|| {
            let mut value = 0u64;
            while !stop.load(Relaxed) {
                value += 1;
                // Neighbours and far pages in turns.
                memory.write((value.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 53) as usize, value);
                memory.write((value % 2048) as usize, value);
            }
        });
        (0..2000).for_each(|_| look());
        stop.store(true, Relaxed);
    });
    look();
    assert!(seen.iter().enumerate().all(|(page, &value)| value == memory.read(page)));
}
