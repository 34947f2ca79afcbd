//! Merging a program's memory under its hands: nothing may be lost, whatever the program does with
//! it meanwhile.

#![allow(clippy::print_stdout, clippy::print_stderr, reason = "prints for who runs it")]
#![allow(clippy::unwrap_used)] // In tests.

mod support;

use std::collections::HashMap;

use kmem::pagemap::{Categories, Pagemap, Query};
use kmem::range::Range;
use support::client;
use support::daemon::{Daemon, MERGES, Program, Store, kernel_can};
use wire::{Digest, Outcome, PageNo, Run, ToAgent, ToDaemon};

/// Not a test: what the client runs.
#[test]
fn client() {
    client::run_if_asked();
}

/// A client with `pages` pages under management, and its daemon.
fn start(pages: usize, sabotage: Option<&str>) -> Option<(Daemon, Program, Store)> {
    if !kernel_can(MERGES) {
        return None;
    }
    let mut daemon = Daemon::new();
    let mut program = Program::start(&daemon.socket, sabotage);
    let store = daemon.manage(&mut program, pages);
    Some((daemon, program, store))
}

/// How many pages fared how.
fn count(fates: &[(u32, Outcome)]) -> HashMap<Outcome, usize> {
    let mut counts = HashMap::new();
    fates.iter().for_each(|&(_, fate)| *counts.entry(fate).or_default() += 1);
    counts
}

fn merge_all(daemon: &mut Daemon, store: &Store, pages: std::ops::Range<usize>) {
    let len = pages.len();
    let fates = daemon.merge(1, &store.runs(pages));
    assert_eq!(count(&fates), HashMap::from([(Outcome::Merged, len)]));
}

#[test]
fn nothing_is_lost_under_writers() {
    let pages = 65_536;
    let Some((mut daemon, mut program, store)) = start(pages, None) else { return };
    program.ask("start-writers");
    let runs = store.runs(0..pages);
    let (mut merged, mut differing, mut windows, mut cpu) = (0, 0, Vec::new(), 0);
    for _ in 0..4 {
        for report in daemon.merge_reports(1, &runs) {
            windows.push(report.window_ns / 1000);
            cpu = report.cpu_ns;
            for outcome in report.outcomes {
                match outcome.outcome {
                    Outcome::Merged => merged += outcome.run.len,
                    Outcome::Differs => differing += outcome.run.len,
                    other => panic!("{other:?} with {} mappings", report.maps),
                }
            }
        }
    }
    let writes = program.ask("stop-writers");
    windows.sort();
    let (middle, late, longest) =
        (windows[windows.len() / 2], windows[windows.len() * 99 / 100], windows[windows.len() - 1]);
    println!(
        "{merged} merged, {differing} differed, {writes} writes, {} ns of CPU a page",
        cpu / u64::from(merged + differing)
    );
    println!("{} windows: half within {middle} us, 99 of 100 within {late} us, longest {longest} us", windows.len());
    assert!(merged > pages as u32 && differing > 0, "too little happened");
    assert_eq!(program.ask(&format!("check 0 {pages}")), "0", "pages were lost");
    assert!(!store.is_damaged());
}

#[test]
fn memory_discarded_by_process_madvise_reads_as_zeros() {
    let Some((mut daemon, mut program, store)) = start(1024, None) else { return };
    merge_all(&mut daemon, &store, 0..1024);
    match program.ask(&format!("advise-process 100 100 {}", libc::MADV_DONTNEED)).as_str() {
        "0" => assert_eq!(program.ask("zeros 100 100"), "0"),
        // Kernels before 6.13 refuse this advice, and nothing may be discarded for it.
        "22" => assert_eq!(program.ask("check 100 100"), "0"),
        errno => panic!("process_madvise fails: errno {errno}"),
    }
    assert_eq!((program.ask("check 0 100"), program.ask("check 200 824")), ("0".into(), "0".into()));
}

/// Where a program maps frames.
fn frames_of(program: &Program) -> Vec<Range> {
    let maps = std::fs::read_to_string(format!("/proc/{}/maps", program.pid())).unwrap();
    let places = maps.lines().filter_map(|line| {
        let [place, "rw-p", _, _, inode, ..] = line.split_ascii_whitespace().collect::<Vec<_>>()[..] else {
            return None;
        };
        let (start, end) = place.split_once('-')?;
        let number = |text| usize::from_str_radix(text, 16).ok();
        (inode != "0" && line.contains("memfd:")).then_some(())?;
        Some(Range::new(number(start)?, number(end)? - number(start)?))
    });
    places.collect()
}

#[test]
fn frames_are_in_the_page_tables_and_clean_once_they_are_mapped() {
    // Else each page that is read takes a fault, and one more when the next scan has protected it.
    let Some((mut daemon, program, store)) = start(4096, None) else { return };
    merge_all(&mut daemon, &store, 0..4096);
    let pagemap = Pagemap::open(program.pid()).unwrap();
    let count = |query: Query| {
        let pages = |place: &Range| pagemap.scan(*place, &query, &mut |_| {}).unwrap().pages;
        frames_of(&program).iter().map(pages).sum::<u64>()
    };
    let mapped = frames_of(&program).iter().map(|place| place.pages() as u64).sum::<u64>();
    assert!(mapped > 2000, "{mapped} pages map frames");
    assert_eq!(count(Query { required: Categories::PRESENT | Categories::FILE, ..Query::default() }), mapped);
    assert_eq!(count(Query { required: Categories::WRITTEN, ..Query::default() }), 0, "pages count as written");
}

#[test]
fn merged_pages_map_frames_and_zeros_map_nothing() {
    let Some((mut daemon, mut program, store)) = start(4096, None) else { return };
    merge_all(&mut daemon, &store, 0..4096);
    let zeros = (0..4096).filter(|&page| support::pattern_of(page) == 0).count();
    assert_eq!(program.ask("files"), (4096 - zeros).to_string());
    assert_eq!(program.ask("check 0 4096"), "0");
    // Written and zeroed again: a zero page inside a mapping of frames becomes anonymous memory.
    let page = (0..4096).find(|&page| support::pattern_of(page) == 1).unwrap();
    assert_eq!(program.ask(&format!("advise {page} 1 {}", libc::MADV_DONTNEED)), "0");
    assert_eq!(program.ask("files"), (4096 - zeros - 1).to_string());
    // What does not equal stays as it is.
    let fates = daemon.merge(1, &store.runs(page..page + 1));
    assert_eq!(count(&fates), HashMap::from([(Outcome::Differs, 1)]));
    assert_eq!(program.ask(&format!("zeros {page} 1")), "0");
    // Unknown segment, unknown region, past the end.
    let mut runs = store.runs(9..10);
    runs[0].target = wire::Target::Frames { segment: 1, slot: wire::Slot(0) };
    assert_eq!(daemon.merge(1, &runs), [(9, Outcome::Failed)]);
    assert_eq!(daemon.merge(77, &store.runs(9..10)), [(9, Outcome::Gone)]);
    assert!(daemon.merge(1, &store.runs(4094..4098)).iter().any(|&(_, fate)| fate == Outcome::Gone));
    assert!(daemon.merge(1, &[]).is_empty(), "an empty batch gets its report");
}

/// The digests that the agent tells of these pages.
fn digests(daemon: &mut Daemon, region: u32, request: u64, spans: &[(u32, u32)]) -> Vec<u64> {
    let runs = spans.iter().map(|&(page, len)| Run::new(PageNo(page), len)).collect();
    daemon.send(&ToAgent::Digest(Digest { request, region: wire::RegionId(region), seed: 7, runs }), &[]);
    loop {
        match daemon.next() {
            ToDaemon::Digests(answer) if answer.request == request => return answer.digests,
            other => daemon.seen.push(other),
        }
    }
}

#[test]
fn digests_are_of_what_pages_hold() {
    let Some((mut daemon, mut program, store)) = start(4096, None) else { return };
    let expected = |pages: std::ops::Range<usize>| -> Vec<u64> {
        let digest = |page| xxhash_rust::xxh3::xxh3_64_with_seed(&support::daemon::bytes(support::pattern_of(page)), 7);
        pages.map(digest).collect()
    };
    assert_eq!(digests(&mut daemon, 1, 1, &[(0, 1000)]), expected(0..1000));
    // Merged or not, in any pieces.
    merge_all(&mut daemon, &store, 0..100);
    let parts = [expected(3..9), expected(90..300)].concat();
    assert_eq!(digests(&mut daemon, 1, 2, &[(3, 6), (90, 210)]), parts);
    // They end where something can't be read, some pages before at most.
    for (request, unmap, page) in [(3, "unmap 500 50", 500), (4, "raw-unmap 1500 50", 1500)] {
        assert_eq!(program.ask(unmap), "0");
        let told = digests(&mut daemon, 1, request, &[(page - 300, 600)]);
        assert!(told.len() <= 300 && told.len() > 100, "{} digests", told.len());
        assert_eq!(told, expected(page as usize - 300..page as usize - 300 + told.len()));
    }
    assert!(digests(&mut daemon, 1, 5, &[(4000, 500)]).len() <= 96, "past the end");
    assert!(digests(&mut daemon, 77, 6, &[(0, 1)]).is_empty(), "no such region");
}

#[test]
fn writers_go_on_while_digests_are_computed() {
    let Some((mut daemon, mut program, _store)) = start(4096, None) else { return };
    program.ask("start-writers");
    for request in 0..200 {
        assert_eq!(digests(&mut daemon, 1, request, &[(2000, 1000)]).len(), 1000);
    }
    program.ask("stop-writers");
    assert_eq!(program.ask("check 0 4096"), "0");
}

#[test]
fn stretches_over_several_mappings_merge() {
    let Some((mut daemon, mut program, store)) = start(1024, None) else { return };
    // Each end of such a range is a border between two mappings; no stretch can be taken away as a
    // whole.
    for (page, len) in [(7, 93), (257, 1), (300, 211), (640, 2), (643, 200)] {
        assert_eq!(program.ask(&format!("advise {page} {len} {}", libc::MADV_RANDOM)), "0");
    }
    merge_all(&mut daemon, &store, 0..1024);
    assert_eq!(program.ask("check 0 1024"), "0");
}

/// Tells which of the first `pages` pages were written since the last call with `true`, which marks
/// them all as clean.
fn scanner(program: &mut Program, pages: usize) -> impl Fn(bool) -> Vec<usize> + use<> {
    use kmem::pagemap::{Categories, Pagemap, Query};
    let start: usize = program.ask("start").parse().unwrap();
    let pagemap = Pagemap::open(program.pid()).unwrap();
    move |protect| {
        let any_of = Categories::PRESENT | Categories::SWAPPED;
        let query = Query { write_protect: protect, required: Categories::WRITTEN, any_of, ..Query::default() };
        let mut written = Vec::new();
        let range = kmem::range::Range::new(start, pages * 4096);
        let page = |address: usize| (address - start) / 4096;
        pagemap.scan(range, &query, &mut |run| written.extend(page(run.start)..page(run.end))).unwrap();
        written
    }
}

#[test]
fn what_was_written_since_the_last_scan_is_let_be() {
    let Some((mut daemon, mut program, store)) = start(512, None) else { return };
    let written = scanner(&mut program, 512);
    assert_eq!(written(true).len(), 512);
    for page in [0, 28, 100, 101, 511] {
        // It holds what it held; only that it was written counts.
        program.ask(&format!("write {page} 0"));
    }
    daemon.calm = true;
    let fates = daemon.merge(1, &store.runs(0..512));
    let mut differing: Vec<u32> =
        fates.iter().filter(|&&(_, fate)| fate == Outcome::Differs).map(|&(page, _)| page).collect();
    differing.sort_unstable();
    assert_eq!(differing, [0, 28, 100, 101, 511]);
    assert_eq!(count(&fates), HashMap::from([(Outcome::Differs, 5), (Outcome::Merged, 507)]));
    let mut kept = written(false);
    kept.retain(|page| differing.contains(&(*page as u32)));
    assert_eq!(kept, [0, 28, 100, 101, 511], "their notes are for the next scan");
    assert_eq!(program.ask("check 0 512"), "0");
}

#[test]
fn the_note_of_a_write_between_runs_is_kept() {
    let Some((mut daemon, mut program, store)) = start(512, None) else { return };
    let written = scanner(&mut program, 512);
    assert_eq!(written(true).len(), 512);
    // Of 16 pages each, the last four belong to no run; in the second, two of these are written.
    program.ask("write 28 5");
    program.ask("write 30 5");
    let mut runs: Vec<wire::MergeRun> = (0..32).flat_map(|i| store.runs(i * 16..i * 16 + 12)).collect();
    runs.sort_by_key(|merge| merge.run.page);
    let fates = daemon.merge(1, &runs);
    assert_eq!(count(&fates), HashMap::from([(Outcome::Merged, 32 * 12)]));
    let between: Vec<usize> = written(false).into_iter().filter(|page| page % 16 >= 12).collect();
    assert_eq!(between, [28, 30], "and no other: windows leave what they span as clean as it was");
}

#[test]
fn discarding_gives_zeros() {
    let Some((mut daemon, mut program, store)) = start(4096, None) else { return };
    for (i, advice) in [libc::MADV_DONTNEED, libc::MADV_DONTNEED_LOCKED].into_iter().enumerate() {
        let first = 500 + i * 1000;
        merge_all(&mut daemon, &store, 1000 * i..1000 * (i + 1));
        assert_eq!(program.ask(&format!("advise {first} 300 {advice}")), "0");
        let page = first as u32;
        daemon.wait_for(|message| {
            *message == ToDaemon::Discarded { region: wire::RegionId(1), run: Run::new(PageNo(page), 300) }
        });
        assert_eq!(program.ask(&format!("zeros {first} 300")), "0");
        assert_eq!(program.ask(&format!("check {} 500", 1000 * i)), "0");
    }
    merge_all(&mut daemon, &store, 2000..4096);
    assert_eq!(program.ask(&format!("advise 2000 10 {}", libc::MADV_FREE)), "0");
    assert_eq!(program.ask(&format!("advise 3000 10 {}", libc::MADV_REMOVE)), libc::EINVAL.to_string());
    assert_eq!(program.ask("check 3000 100"), "0");
    assert!(!store.is_damaged());
}

#[test]
fn unmapping_moving_and_protecting_parts() {
    let Some((mut daemon, mut program, store)) = start(4096, None) else { return };
    let shrunk = |page, len| {
        move |message: &ToDaemon| {
            *message == ToDaemon::RegionShrunk { region: wire::RegionId(1), run: Run::new(PageNo(page), len) }
        }
    };
    merge_all(&mut daemon, &store, 0..4096);

    assert_eq!(program.ask("unmap 100 50"), "0");
    daemon.wait_for(shrunk(100, 50));
    assert_eq!(program.ask("fresh 100 50"), "0");
    assert_eq!(program.ask("zeros 100 50"), "0");
    assert_eq!(count(&daemon.merge(1, &store.runs(90..160)))[&Outcome::Gone], 50 + count_gone_around(&store));

    assert_eq!(program.ask("fresh 200 50"), "0");
    daemon.wait_for(shrunk(200, 50));
    assert_eq!(program.ask("zeros 200 50"), "0");

    assert_eq!(program.ask("protect 300 50 1"), "0");
    daemon.wait_for(shrunk(300, 50));
    assert_eq!(program.ask("check 300 50"), "0");
    assert_eq!(program.ask("protect 300 50 3"), "0");
    assert_eq!(program.ask("write 300 0"), "0");

    // Growing needs one mapping: the part is unmerged first, and its bytes come along.
    let place: isize = program.ask(&format!("move 400 64 128 {}", libc::MREMAP_MAYMOVE)).parse().unwrap();
    daemon.wait_for(shrunk(400, 64));
    assert!(!(0..4096).contains(&place));
    assert_eq!(program.ask("check 464 100"), "0");
    assert_eq!(program.ask(&format!("zeros {} 64", place + 64)), "0", "what was grown");
    assert_eq!(program.ask("move 600 64 128 0"), libc::ENOMEM.to_string(), "others may use what cannot move");
    assert_eq!(program.ask("move 600 64 32 0"), "600", "shrinking in place");
    daemon.wait_for(shrunk(632, 32));
    assert_eq!(program.ask("check 600 32"), "0");

    assert_eq!(program.ask(&format!("advise 700 50 {}", libc::MADV_UNMERGEABLE)), "0");
    daemon.wait_for(shrunk(700, 50));
    assert_eq!(program.ask("check 664 300"), "0");
    assert_eq!(program.ask(&format!("advise 800 50 {}", libc::MADV_DONTFORK)), "0");
    daemon.wait_for(shrunk(800, 50));
    assert_eq!(program.ask("check 664 300"), "0");

    // Past the C library: the event thread learns of it.
    assert_eq!(program.ask("raw-unmap 900 50"), "0");
    daemon.wait_for(shrunk(900, 50));
    assert!(!store.is_damaged());
}

#[test]
fn a_move_that_fails_has_unmapped_its_place() {
    let Some((mut daemon, mut program, store)) = start(4096, None) else { return };
    merge_all(&mut daemon, &store, 0..4096);
    assert_eq!(program.ask("move-onto 1000 600"), "0");
    daemon.wait_for(|message| {
        *message == ToDaemon::RegionShrunk { region: wire::RegionId(1), run: Run::new(PageNo(1000), 600) }
    });
    assert_eq!(program.ask("check 900 100"), "0");
    assert_eq!(program.ask("check 1600 100"), "0");
    // What is mapped there now is not what was marked.
    assert_eq!(program.ask("fresh 1000 600"), "0");
    let fates = count(&daemon.merge(1, &store.runs(1000..1600)));
    assert_eq!(fates.get(&Outcome::Gone), Some(&600), "{fates:?}");
    assert_eq!(program.ask("zeros 1000 600"), "0");
    assert!(!store.is_damaged());
}

/// Pages of the runs of 90..160 that are gone with the unmapped 100..150: a run that is partly
/// unmanaged is gone whole.
fn count_gone_around(store: &Store) -> usize {
    let partly = |merge: &&wire::MergeRun| merge.run.page.0 < 150 && merge.run.end().0 > 100;
    store.runs(90..160).iter().filter(partly).map(|merge| merge.run.len as usize).sum::<usize>() - 50
}

#[test]
fn a_forked_child_has_the_same_memory() {
    let Some((mut daemon, mut program, store)) = start(4096, None) else { return };
    merge_all(&mut daemon, &store, 0..2048);
    let forks = |daemon: &Daemon| daemon.control.as_ref().unwrap().load_u64(wire::control::FORKS);
    assert_eq!(forks(&daemon), 0);
    for i in 1..=3 {
        assert_eq!(program.ask("fork"), "0");
        assert!(forks(&daemon) >= i, "a fork was not counted");
    }
    assert_eq!(program.ask("check 0 4096"), "0");
    // Pages that a child had cannot be told from pinned ones at first.
    daemon.merge(1, &store.runs(2048..4096));
    merge_all(&mut daemon, &store, 2048..4096);
    assert_eq!(program.ask("fork-full"), "0", "with no descriptor free");
    // With MADV_DONTFORK on all of it children get nothing, and nothing is counted.
    assert_eq!(program.ask(&format!("advise 0 4096 {}", libc::MADV_DONTFORK)), "0");
    merge_all(&mut daemon, &store, 0..4096);
    let before = forks(&daemon);
    assert_eq!(program.ask("fork"), (-libc::SIGSEGV).to_string(), "the child has no such memory");
    assert_eq!(forks(&daemon), before);
    assert_eq!(program.ask("check 0 4096"), "0");
}

#[test]
fn detaching_leaves_plain_memory() {
    let Some((mut daemon, mut program, store)) = start(8192, None) else { return };
    merge_all(&mut daemon, &store, 0..8192);
    program.ask("start-writers");
    daemon.send(&ToAgent::Detach, &[]);
    daemon.wait_for(|message| {
        *message == ToDaemon::RegionShrunk { region: wire::RegionId(1), run: Run::new(PageNo(0), 8192) }
    });
    daemon.wait_for(|message| *message == ToDaemon::Detached);
    daemon.wait_for_close();
    program.ask("stop-writers");
    assert_eq!(program.ask("files"), "0");
    assert_eq!(program.ask("check 0 8192"), "0");
    let end = std::time::Instant::now() + std::time::Duration::from_secs(60);
    // The one that runs the tests, and the one of the test.
    while program.ask("threads") != "2" {
        assert!(std::time::Instant::now() < end, "{} threads", program.ask("threads"));
    }
}

#[test]
fn held_memory_is_refused() {
    let Some((mut daemon, mut program, store)) = start(512, None) else { return };
    assert_eq!(program.ask("lock 0 1"), "0");
    // Several windows, each of which must see it.
    assert_eq!(count(&daemon.merge(1, &store.runs(0..512))), HashMap::from([(Outcome::Locked, 512)]));
    assert_eq!(program.ask("unlock 0 1"), "0");
    match program.ask("pin 0 16").as_str() {
        "0" => assert_eq!(count(&daemon.merge(1, &store.runs(0..512))), HashMap::from([(Outcome::Pinned, 512)])),
        errno => println!("SKIPPED the pinned part: io_uring answers {errno}"),
    }
    assert_eq!(program.ask("check 0 512"), "0");
}

#[test]
fn mappings_have_a_budget() {
    let most = kmem::procfs::max_map_count().unwrap();
    if most > 200_000 {
        return println!("SKIPPED: vm.max_map_count is {most}");
    }
    let Some((mut daemon, mut program, store)) = start(512, None) else { return };
    assert_eq!(program.ask(&format!("mappings {}", most - most / 3)), "0");
    let fates = count(&daemon.merge(1, &store.runs(1..100)));
    assert_eq!(fates[&Outcome::NoMaps], 99 - fates.get(&Outcome::Merged).unwrap_or(&0), "zeros take no mapping");
    assert_eq!(program.ask("files"), "0");
    assert_eq!(program.ask("check 0 512"), "0");
}
