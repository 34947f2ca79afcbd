use super::*;
use crate::core::content::frame::Frame;

fn scan(region: &mut Region, written: &[u32]) -> Vec<u32> {
    written.iter().for_each(|&page| region.ages.found_written(run(page, 1)));
    region.end_scan(crate::core::ledger::Cool::Copies);
    candidates(region)
}

fn candidates(region: &mut Region) -> Vec<u32> {
    let mut out = Vec::new();
    region.candidates(PageNo(0), usize::MAX, &mut out);
    out.into_iter().map(|page| page.0).collect()
}

fn run(page: u32, len: u32) -> Run {
    Run::new(PageNo(page), len)
}

#[test]
fn a_page_is_a_candidate_when_it_was_clean_for_two_periods() {
    let mut region = Region::new(0, 100).unwrap();
    assert!(scan(&mut region, &[3, 4, 70]).is_empty());
    assert!(scan(&mut region, &[4]).is_empty(), "one period");
    assert_eq!(scan(&mut region, &[]), [3, 70], "two periods");
    assert_eq!(scan(&mut region, &[70]), [3, 4], "a write takes it back");
    region.ages.looked_at(PageNo(3));
    assert_eq!(scan(&mut region, &[]), [4]);
    assert_eq!(scan(&mut region, &[]), [4, 70]);
}

#[test]
fn a_wrong_prediction_is_not_repeated_until_the_page_was_read() {
    let mut region = Region::new(0, 10).unwrap();
    for _ in 0..3 {
        scan(&mut region, &[]);
    }
    (0..10).for_each(|page| region.ages.restart(PageNo(page)));
    scan(&mut region, &[]);
    scan(&mut region, &[]);
    assert!(region.predict(PageNo(3)) && !region.predict(PageNo(3)), "no candidate any more");
    assert!(region.ages.differs(PageNo(3)));
    assert!(candidates(&mut region).contains(&3) && !region.predict(PageNo(3)), "to be read");
    region.ages.looked_at(PageNo(3));
    assert!(!region.ages.differs(PageNo(3)), "no prediction: what was read was written since");
    assert!(region.predict(PageNo(4)));
    region.ages.settled(PageNo(4));
    assert!(!region.ages.differs(PageNo(4)), "it has its outcome");
}

#[test]
fn a_page_found_written_between_two_periods_is_no_candidate_from_then_on() {
    let mut region = Region::new(0, 10).unwrap();
    for _ in 0..3 {
        scan(&mut region, &[]);
    }
    [2, 3, 4].iter().for_each(|&page| region.ages.restart(PageNo(page)));
    scan(&mut region, &[]);
    assert_eq!(scan(&mut region, &[]), [2, 3, 4]);
    region.ages.found_written(run(3, 1));
    assert_eq!((candidates(&mut region), region.predict(PageNo(3))), (vec![2, 4], false));
    assert!(region.ages.is_written(run(3, 1)) && region.ages.is_written(run(0, 10)));
    assert!(!region.ages.is_written(run(2, 1)) && !region.ages.is_written(run(4, 6)));
    assert_eq!(scan(&mut region, &[]), [2, 4]);
    assert!(!region.ages.is_written(run(0, 10)));
    assert_eq!(scan(&mut region, &[]), [2, 4]);
    assert_eq!(scan(&mut region, &[]), [2, 3, 4]);
}

#[test]
fn deferred_pages_wait_until_they_are_asked_for_or_written() {
    let mut region = Region::new(0, 10).unwrap();
    region.ages.defer(PageNo(1));
    region.ages.defer(PageNo(2));
    assert!(scan(&mut region, &[2]).is_empty());
    region.ages.retry_deferred();
    assert_eq!(scan(&mut region, &[]), [1]);
}

#[test]
fn copies_cool_down_for_a_whole_period_more() {
    let mut region = Region::new(0, 100).unwrap();
    region.ages.copied(PageNo(7));
    scan(&mut region, &[7, 8]);
    scan(&mut region, &[]);
    assert_eq!(scan(&mut region, &[]), [8], "the copy cools down");
    region.ages.end_cooldown();
    assert_eq!(scan(&mut region, &[]), [8], "less than a period, perhaps");
    region.ages.end_cooldown();
    assert_eq!(scan(&mut region, &[]), [7, 8]);
    scan(&mut region, &[7]);
    scan(&mut region, &[]);
    scan(&mut region, &[]);
    region.ages.end_cooldown();
    assert_eq!(scan(&mut region, &[7]), [8], "a write while it cools down starts everything again");
    region.ages.end_cooldown();
    assert_eq!(scan(&mut region, &[]), [8]);
}

#[test]
fn where_a_device_writes_unseen_every_page_that_was_written_cools_down() {
    let mut region = Region::new(0, 100).unwrap();
    let period = |region: &mut Region, written: &[u32]| {
        written.iter().for_each(|&page| {
            region.ages.note_recent(run(page, 1));
            region.ages.found_written(run(page, 1));
        });
        region.end_scan(crate::core::ledger::Cool::All);
        candidates(region)
    };
    region.ages.restart(PageNo(9));
    period(&mut region, &[8]);
    period(&mut region, &[]);
    assert_eq!(period(&mut region, &[]), [9], "not written lately");
    region.ages.end_cooldown();
    assert_eq!(period(&mut region, &[]), [9], "less than a period, perhaps");
    region.ages.end_cooldown();
    assert_eq!(period(&mut region, &[]), [8, 9]);
}

#[test]
fn after_a_hold_what_a_device_may_have_written_unseen_cools_down() {
    let mut region = Region::new(0, 100).unwrap();
    scan(&mut region, &[3]);
    scan(&mut region, &[]);
    assert_eq!(scan(&mut region, &[]), [3]);
    region.ages.cool_written();
    assert!(scan(&mut region, &[3]).is_empty());
    scan(&mut region, &[]);
    assert!(scan(&mut region, &[]).is_empty());
    region.ages.end_cooldown();
    assert!(candidates(&mut region).is_empty(), "less than a period, perhaps");
    region.ages.end_cooldown();
    assert_eq!(candidates(&mut region), [3]);
    scan(&mut region, &[3]);
    scan(&mut region, &[]);
    assert_eq!(scan(&mut region, &[]), [3], "that once only");
}

#[test]
fn after_a_hold_copies_restart_cooldown() {
    let mut region = Region::new(0, 100).unwrap();
    region.ages.copied(PageNo(7));
    scan(&mut region, &[7]);
    scan(&mut region, &[]);
    scan(&mut region, &[]);
    region.ages.end_cooldown();
    region.ages.restart_cooldown();
    region.ages.end_cooldown();
    assert!(scan(&mut region, &[]).is_empty(), "it would have been due");
    scan(&mut region, &[]);
    region.ages.end_cooldown();
    assert!(scan(&mut region, &[]).is_empty(), "it cools down again");
    region.ages.end_cooldown();
    assert_eq!(scan(&mut region, &[]), [7]);
}

#[test]
fn pages_written_recently_are_known_for_a_cooldown_period() {
    let mut region = Region::<Frame>::new(0, 100).unwrap();
    region.ages.note_recent(run(3, 2));
    region.ages.end_cooldown();
    region.ages.note_recent(run(50, 1));
    assert_eq!(region.ages.recent().map(|page| page.0).collect::<Vec<_>>(), [50, 3, 4]);
    region.ages.end_cooldown();
    assert_eq!(
        region.ages.recent().map(|page| page.0).collect::<Vec<_>>(),
        [50],
        "those were written longer ago than a period"
    );
    region.ages.end_cooldown();
    assert_eq!(region.ages.recent().count(), 0);
}

#[test]
fn discarded_copies_are_copies_no_more() {
    let mut region = Region::new(0, 100).unwrap();
    region.ages.copied(PageNo(7));
    region.forget_ages(run(0, 100));
    scan(&mut region, &[7]);
    scan(&mut region, &[]);
    assert_eq!(scan(&mut region, &[]), [7]);
}

#[test]
fn recycled_pages_are_counted_and_what_was_known_of_them_is_given_back() {
    let mut region = Region::new(0, 8).unwrap();
    region.set(PageNo(1), Entry::Merged(Frame(5)));
    region.set(PageNo(2), Entry::Pending);
    region.set(PageNo(3), Entry::Unshared(9));
    region.set(PageNo(7), Entry::Merged(Frame(6)));
    region.ages.restart(PageNo(4));
    region.ages.held.insert_range(0, 5);
    let mut left = Vec::new();
    region.recycle(run(0, 6), &mut 0, |page, entry| left.push((page.0, entry)));
    assert_eq!(left, [(1, Entry::Merged(Frame(5))), (3, Entry::Unshared(9))]);
    assert_eq!(
        region.counts(),
        Counts { merged: 1, pending: 1, recycled: 4, ..Counts::default() },
        "5 never was there"
    );
    scan(&mut region, &[]);
    assert!(scan(&mut region, &[]).is_empty(), "recycled pages are no candidates");
    region.recycle(run(0, 6), &mut 0, |_, _| panic!("nothing is left"));
    assert_eq!(region.counts().recycled, 4);
    region.recycle(run(7, 2), &mut 9, |_, _| panic!("past the end: nothing"));
    let mut most = 3;
    region.recycle(run(5, 1), &mut most, |_, _| panic!("nothing was known"));
    assert_eq!((region.counts().recycled, most), (5, 2), "it may have been there between two scans");
}

#[test]
fn a_region_that_there_is_no_memory_for_is_refused() {
    crate::testing::alone(|| {
        use rustix::process::{Resource, getrlimit, setrlimit};
        let pages = std::fs::read_to_string("/proc/self/statm").unwrap();
        let data: u64 = pages.split(' ').nth(5).unwrap().parse().unwrap();
        let mut limit = getrlimit(Resource::Data);
        // The rest of the test needs little.
        limit.current = Some(data * kmem::PAGE_SIZE as u64 + (1 << 20));
        setrlimit(Resource::Data, limit).unwrap();
        let refused = Region::<Frame>::new(0, u32::MAX).err().unwrap();
        assert!(matches!(refused, LedgerError::Entries(_)), "{refused}");
    });
}
