use wire::{Outcome, PageNo, RegionId, Report, RunOutcome};

use super::*;

fn discarded(page: u32, len: u32) -> ToDaemon {
    ToDaemon::Discarded { region: RegionId(1), run: Run::new(PageNo(page), len) }
}

#[test]
fn closed_takes_nothing_and_open_starts_with_the_account() {
    let mut outbox = Outbox::new();
    outbox.push(ToDaemon::Detached);
    assert!(outbox.queue.front().is_none());
    outbox.open([ToDaemon::Ready].into_iter());
    outbox.push(ToDaemon::Detached);
    assert_eq!(outbox.queue.front(), Some(&ToDaemon::Ready));
    outbox.queue.pop_front();
    assert_eq!(outbox.queue.front(), Some(&ToDaemon::Detached));
}

#[test]
fn neighbouring_discards_become_one_but_never_past_another_message() {
    let mut outbox = Outbox::new();
    outbox.open(std::iter::empty());
    for page in (10..20).chain((0..10).rev()) {
        outbox.push(discarded(page, 1));
    }
    outbox.push(ToDaemon::RegionShrunk { region: RegionId(1), run: Run::one(PageNo(20)) });
    outbox.push(discarded(20, 1));
    outbox.push(ToDaemon::Discarded { region: RegionId(2), run: Run::one(PageNo(21)) });
    assert_eq!(outbox.queue.len(), 4);
    assert_eq!(outbox.queue.front(), Some(&discarded(0, 20)));
}

#[test]
fn reports_on_one_batch_become_one_but_never_past_another_message() {
    let report = |batch, page, last| {
        let outcomes = vec![RunOutcome { run: Run::one(PageNo(page)), outcome: Outcome::Merged }];
        ToDaemon::Report(Report { batch, last, outcomes, ..Report::default() })
    };
    let mut outbox = Outbox::new();
    outbox.open(std::iter::empty());
    for message in [report(1, 1, false), report(1, 3, true), report(2, 5, false), discarded(1, 1), report(2, 7, true)] {
        outbox.push(message);
    }
    assert_eq!(outbox.queue.len(), 4);
    let Some(ToDaemon::Report(first)) = outbox.queue.front() else { panic!("a report") };
    assert!(first.last && first.outcomes.iter().map(|o| o.run.page.0).eq([1, 3]));
}

#[test]
fn overflow_is_noticed_and_forgets_everything() {
    let mut outbox = Outbox::new();
    outbox.open(std::iter::empty());
    for page in 0..=LIMIT as u32 {
        assert!(!outbox.has_overflowed());
        outbox.push(discarded(page * 2, 1));
    }
    assert!(outbox.has_overflowed() && outbox.queue.front().is_none());
    outbox.push(ToDaemon::Ready);
    assert!(outbox.queue.front().is_none(), "nothing may follow a gap");
}
