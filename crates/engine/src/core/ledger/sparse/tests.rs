use proptest::prelude::*;

use super::*;
use crate::core::content::index::Content;

/// Pages of the property test's region: five parts, and a bit.
const SOME: u32 = 5 * PART + 100;

#[derive(Clone, Debug)]
enum Step {
    Written(u32, u32),
    Set(u32, u32),
    Looked(u32),
    Defer(u32),
    Restart(u32),
    Recycle(u32, u32),
    Forget(u32, u32),
    End(bool),
}

fn step() -> impl Strategy<Value = Step> {
    let page = || prop_oneof![0..SOME, (0..6u32, 0..3u32).prop_map(|(part, at)| (part * PART + at).saturating_sub(1))];
    let run = move || (page(), prop_oneof![1..70u32, 1..SOME]).prop_map(|(page, len)| (page, len.min(SOME - page)));
    prop_oneof![
        3 => run().prop_map(|(page, len)| Step::Written(page, len)),
        3 => (page(), 0..4u32).prop_map(|(page, handle)| Step::Set(page, handle)),
        1 => page().prop_map(Step::Looked),
        1 => page().prop_map(Step::Defer),
        1 => page().prop_map(Step::Restart),
        1 => run().prop_map(|(page, len)| Step::Recycle(page, len)),
        1 => run().prop_map(|(page, len)| Step::Forget(page, len)),
        4 => any::<bool>().prop_map(Step::End),
    ]
}

proptest! {
    #[test]
    fn parts_are_as_one_region(steps in prop::collection::vec(step(), 1..60)) {
        let (mut sparse, mut dense) = (Sparse::<Content>::new(), Region::<Content>::new(0, SOME).unwrap());
        for step in steps {
            let run = |page, len| Run::new(PageNo(page), len);
            match step {
                Step::Written(page, len) => {
                    sparse.found_written(run(page, len)).unwrap();
                    dense.ages.found_written(run(page, len));
                }
                // What is known of a page, a scan has found before.
                Step::Set(page, handle) => {
                    if sparse.of(PageNo(page)).is_some() {
                        let entry = if handle == 0 { Entry::Fresh } else { Entry::Merged(Content(handle)) };
                        prop_assert_eq!(sparse.set(PageNo(page), entry), dense.set(PageNo(page), entry));
                    }
                }
                Step::Looked(page) => {
                    sparse.looked_at(PageNo(page));
                    dense.ages.looked_at(PageNo(page));
                }
                Step::Defer(page) if sparse.of(PageNo(page)).is_some() => {
                    sparse.defer(PageNo(page));
                    dense.ages.defer(PageNo(page));
                }
                Step::Restart(page) if sparse.of(PageNo(page)).is_some() => {
                    sparse.restart(PageNo(page));
                    dense.ages.restart(PageNo(page));
                }
                Step::Defer(_) | Step::Restart(_) => {}
                Step::Recycle(page, len) => {
                    let (mut one, mut other) = (Vec::new(), Vec::new());
                    sparse.recycle(run(page, len), |page, entry| one.push((page, entry)));
                    dense.recycle(run(page, len), |page, entry| other.push((page, entry)));
                    prop_assert_eq!(one, other);
                }
                Step::Forget(page, len) => {
                    sparse.forget_ages(run(page, len));
                    dense.forget_ages(run(page, len));
                }
                Step::End(retry) => {
                    sparse.end_scan();
                    dense.end_scan(Cool::Copies);
                    if retry {
                        sparse.retry_deferred();
                        dense.ages.retry_deferred();
                    }
                }
            }
            prop_assert_eq!(sparse.counts(), dense.counts());
            prop_assert_eq!((sparse.due(), sparse.volatile()), (dense.ages.due(), dense.ages.volatile));
            for from in [0, 1, PART - 1, PART, 3 * PART + 70] {
                let (mut one, mut other) = (Vec::new(), Vec::new());
                sparse.candidates(PageNo(from), 300, &mut one);
                dense.candidates(PageNo(from), 300, &mut other);
                prop_assert_eq!(one, other, "from {}", from);
            }
            for page in (0..SOME).step_by(7).map(PageNo) {
                prop_assert_eq!(sparse.entry(page), dense.entry(page));
            }
        }
        // What is at rest and unknown costs nothing.
        let all = ALL;
        sparse.known(all).collect::<Vec<_>>().into_iter().for_each(|page| _ = sparse.set(page, Entry::Fresh));
        sparse.forget_ages(all);
        (0..3).for_each(|_| sparse.end_scan());
        let mut left = Vec::new();
        sparse.candidates(PageNo(0), usize::MAX, &mut left);
        left.into_iter().for_each(|page| sparse.looked_at(page));
        sparse.end_scan();
        prop_assert!(sparse.parts.is_empty());
    }
}

#[test]
fn words_that_are_hot_and_were_all_written_are_spared() {
    let mut sparse = Sparse::<Content>::new();
    let run = |page, len| Run::new(PageNo(page), len);
    let first = 7 * PART - 64;
    let mut seen = Vec::new();
    for _ in 0..20 {
        sparse.found_written(run(first, 192)).unwrap();
        sparse.took(PageNo(first), &[u64::MAX, u64::MAX, u64::MAX >> 1]);
        sparse.end_scan();
        seen.extend(sparse.spared());
    }
    seen.sort_unstable_by_key(|run| run.page);
    seen.dedup();
    assert_eq!(seen, [run(first, 64), run(first + 64, 64)]);
}

#[test]
fn there_are_no_more_parts_than_there_may_be() {
    let mut sparse = Sparse::<Content>::new();
    sparse.most = 3;
    for number in 0..5 {
        sparse.found_written(Run::new(PageNo(number * PART), 1)).unwrap();
        sparse.recycle(Run::new(PageNo((10 + number) * PART), 1), |_, _| {});
    }
    assert_eq!(sparse.parts.len(), 3);
    sparse.found_written(Run::new(PageNo(PAGES), 5)).unwrap();
    (0..3).for_each(|_| sparse.end_scan());
    let mut found = Vec::new();
    sparse.candidates(PageNo(0), 10, &mut found);
    assert_eq!(found, [0, PART].map(PageNo));
}

#[test]
fn recycled_pages_become_ordinary_ones_in_steps() {
    let mut sparse = Sparse::<Content>::new();
    sparse.recycle(Run::new(PageNo(PART - 10), 20), |_, _| {});
    assert_eq!(sparse.recycled(ALL).count(), 20);
    let (mut next, mut steps) = (Some(PageNo(0)), 0);
    while let Some(from) = next {
        next = sparse.forget_recycled(from, 8);
        steps += 1;
    }
    assert_eq!((steps, sparse.counts()), (4, Counts::default()));
}
