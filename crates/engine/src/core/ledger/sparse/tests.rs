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
    /// A page is predicted, and whether it then differs.
    Predict(u32, bool),
    End(bool),
}

fn step() -> impl Strategy<Value = Step> {
    let page = || prop_oneof![0..SOME, (0..6u32, 0..3u32).prop_map(|(part, at)| (part * PART + at).saturating_sub(1))];
    let run = move || {
        (page(), prop_oneof![3 => 1..4u32, 2 => 1..70u32, 1 => 1..SOME])
            .prop_map(|(page, len)| (page, len.min(SOME - page)))
    };
    prop_oneof![
        3 => run().prop_map(|(page, len)| Step::Written(page, len)),
        3 => (page(), 0..4u32).prop_map(|(page, handle)| Step::Set(page, handle)),
        1 => page().prop_map(Step::Looked),
        1 => page().prop_map(Step::Defer),
        1 => page().prop_map(Step::Restart),
        1 => run().prop_map(|(page, len)| Step::Recycle(page, len)),
        1 => run().prop_map(|(page, len)| Step::Forget(page, len)),
        2 => (page(), any::<bool>()).prop_map(|(page, differs)| Step::Predict(page, differs)),
        4 => any::<bool>().prop_map(Step::End),
    ]
}

proptest! {
    #[test]
    fn parts_are_as_one_region(steps in prop::collection::vec(step(), 1..60)) {
        let (mut sparse, mut dense) = (Sparse::<Content>::new(), Region::<Content>::new(0, SOME).unwrap());
        // A pass tells what became of its predictions before the scan ends.
        let mut predicted = Vec::new();
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
                    dense.recycle(run(page, len), &mut u64::from(len), |page, entry| other.push((page, entry)));
                    prop_assert_eq!(one, other);
                }
                Step::Forget(page, len) => {
                    sparse.forget_ages(run(page, len));
                    dense.forget_ages(run(page, len));
                }
                Step::Predict(page, differs) => {
                    let page = PageNo(page);
                    let predicts = sparse.predict(page);
                    prop_assert_eq!(predicts, dense.predict(page));
                    predicted.extend(predicts.then_some(page));
                    if differs && predicted.contains(&page) {
                        prop_assert_eq!(sparse.differs(page), dense.ages.differs(page));
                    }
                }
                Step::End(retry) => {
                    predicted.clear();
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
    let run = |page, len| Run::new(PageNo(page), len);
    let first = 7 * PART - 64;
    // In lists, and in regions.
    let [few, many] = [0, 1000].map(|others| {
        let mut sparse = Sparse::<Content>::new();
        for part in [6, 7].into_iter().filter(|_| others > 0) {
            sparse.found_written(run(part * PART + 128, others)).unwrap();
            (0..others).for_each(|at| _ = sparse.set(PageNo(part * PART + 128 + at), Entry::Merged(Content(1))));
        }
        let period = |sparse: &mut Sparse<Content>| {
            sparse.found_written(run(first, 192)).unwrap();
            sparse.took(PageNo(first), &[u64::MAX, u64::MAX, u64::MAX >> 1]);
            sparse.end_scan();
            sparse.spared()
        };
        let seen: Vec<Vec<Run>> = (0..20).map(|_| period(&mut sparse)).collect();
        assert!(sparse.parts.iter().all(|part| matches!(part.pages, Many(_)) == (others > 0)));
        seen
    });
    assert_eq!(few, many);
    assert!(few.iter().flatten().all(|spared| [run(first, 64), run(first + 64, 64)].contains(spared)));
    assert_eq!((few[0].len(), few.iter().flatten().count()), (0, 2 * 16));
}

#[test]
fn what_a_ledger_costs_follows_what_is_there_wherever_it_lies() {
    let region = Region::<Content>::new(0, PART).map(|mut region| {
        region.set(PageNo(0), Entry::Zero);
        region.bytes() + size_of::<Region<Content>>() as u64
    });
    let region = region.unwrap();
    let cost = |pages: &[u32], left: &[u32]| {
        let mut sparse = Sparse::<Content>::new();
        for page in pages.iter().map(|&page| PageNo(page)) {
            sparse.found_written(Run::new(page, 1)).unwrap();
            sparse.set(page, Entry::Merged(Content(1)));
        }
        (0..10).for_each(|_| sparse.end_scan());
        for page in pages.iter().filter(|page| !left.contains(page)) {
            sparse.set(PageNo(*page), Entry::Fresh);
            sparse.looked_at(PageNo(*page));
        }
        sparse.end_scan();
        assert_eq!(sparse.counts().merged, left.len() as u64);
        sparse.bytes()
    };
    for every in [1, 8, 15, 16, 64, 500, PART, 10 * PART] {
        let pages: Vec<u32> = (0..1000).map(|at| at * every).collect();
        let bytes = cost(&pages, &pages);
        let parts = u64::from(999 * every / PART + 1).min(1000);
        println!("a page in {every}: {} bytes a page; as regions {}", bytes / 1000, parts * region / 1000);
        assert!(bytes <= 100 * 1000, "{bytes} bytes, a page in {every}");
    }
    let all: Vec<u32> = (0..2 * PART).collect();
    let (one, last) = (cost(&[7], &[7]), cost(&all, &[7]));
    println!("a page alone: {one} bytes; the last of {}: {last}; as a region {region}", all.len());
    assert!(one < 512 && last < 512);
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
