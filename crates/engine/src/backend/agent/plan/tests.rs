use super::*;
use crate::core::content::frame::Frame;

fn runs(pages: &[(u32, Target)]) -> Vec<(u32, u32)> {
    let mut plan = Plan::default();
    pages.iter().for_each(|&(page, target)| plan.push(PageNo(page), target));
    plan.runs.iter().map(|planned| (planned.run.page.0, planned.run.len)).collect()
}

#[test]
fn pages_join_a_run_when_they_and_their_frames_are_consecutive() {
    let f = |n| Target::Frame(Frame(n));
    assert_eq!(runs(&[(1, f(7)), (2, f(8)), (3, f(9))]), [(1, 3)]);
    assert_eq!(runs(&[(1, f(7)), (3, f(8))]), [(1, 1), (3, 1)], "a gap in the pages");
    assert_eq!(runs(&[(1, f(7)), (2, f(9))]), [(1, 1), (2, 1)], "a gap in the frames");
    assert_eq!(runs(&[(1, Target::Zero), (2, Target::Zero), (3, f(9))]), [(1, 2), (3, 1)]);
    let end = wire::SEGMENT_PAGES - 1;
    assert_eq!(runs(&[(1, f(end)), (2, f(end + 1))]), [(1, 1), (2, 1)], "two segments");
}

#[test]
fn a_short_budget_leaves_short_runs_out() {
    let mut plan = Plan { min_run: 2, ..Plan::default() };
    let f = |n| Target::Frame(Frame(n));
    for (page, target) in [(1, f(1)), (2, f(2)), (5, f(9)), (7, Target::Zero)] {
        plan.push(PageNo(page), target);
    }
    let (sent, short) = plan.into_runs();
    assert_eq!(sent.iter().map(|planned| planned.run.page.0).collect::<Vec<_>>(), [1, 7]);
    assert_eq!(short.iter().map(|planned| planned.run.page.0).collect::<Vec<_>>(), [5]);
}
