use super::*;

/// A process that writes some pages, and a scan of it in each period.
struct Model {
    hot: Hot,
    young: DirtyTree,
    older: DirtyTree,
    /// Written since they were protected.
    unprotected: DirtyTree,
}

impl Model {
    fn new(pages: u32) -> Self {
        let set = || DirtyTree::new(pages.into()).unwrap();
        Self { hot: Hot::new(0, pages).unwrap(), young: set(), older: set(), unprotected: set() }
    }

    /// Returns how many of the writes were faults.
    fn period(&mut self, writes: &[u64]) -> usize {
        let faults = writes.iter().filter(|&&page| !self.unprotected.contains(page)).count();
        for &page in writes {
            self.unprotected.insert(page);
        }
        let written = DirtyTree::new(self.young.frames()).unwrap();
        written.unite(&self.unprotected);
        let spared = self.hot.spared.clone();
        for page in self.unprotected.iter().filter(|&page| !spared.contains(page)).collect::<Vec<_>>() {
            self.unprotected.remove(page);
        }
        drop(spared);
        self.hot.end_period(&written, &self.young, &self.older);
        std::mem::swap(&mut self.older, &mut self.young);
        self.older.subtract(&written);
        self.young = written;
        faults
    }

    fn is_candidate(&self, page: u64) -> bool {
        !self.young.contains(page) && !self.older.contains(page)
    }
}

#[test]
fn a_page_that_is_written_in_every_period_is_protected_ever_more_rarely() {
    let mut model = Model::new(2000);
    let faults: Vec<usize> = (0..64).map(|_| model.period(&[3])).collect();
    assert!(faults[..16].iter().sum::<usize>() <= 8, "{faults:?}");
    assert_eq!(faults[32..].iter().sum::<usize>(), 32 >> LEVELS, "{faults:?}");
}

#[test]
fn a_page_that_calms_down_is_noticed_after_no_more_time_than_it_was_written() {
    for written in 1..40 {
        let mut model = Model::new(2000);
        (0..written).for_each(|_| {
            model.period(&[1700]);
        });
        let clean = (1..).find(|_| {
            model.period(&[]);
            model.is_candidate(1700)
        });
        assert!(clean.unwrap() <= written.min(1 << LEVELS) + 2, "after {written}: {clean:?}");
    }
}

#[test]
fn a_page_that_never_becomes_a_candidate_is_hot() {
    let mut model = Model::new(2000);
    let every_other = |period: usize| if period.is_multiple_of(2) { &[3][..] } else { &[] };
    let faults: Vec<usize> = (0..64).map(|period| model.period(every_other(period))).collect();
    assert!(faults[32..].iter().sum::<usize>() <= 4, "{faults:?}");
}

#[test]
fn pages_that_are_written_now_and_then_are_protected_at_once() {
    let mut model = Model::new(2000);
    let faults: usize = (0..30).map(|period| model.period(if period % 3 == 0 { &[5] } else { &[] })).sum();
    assert_eq!(faults, 10);
    assert!(model.hot.spared.clone().is_empty());
}

#[test]
fn hot_pages_are_not_all_protected_in_the_same_period() {
    let mut model = Model::new(8 * 512);
    let all: Vec<u64> = (0..8 * 512).collect();
    let faults: Vec<usize> = (0..40).map(|_| model.period(&all)).collect();
    assert!(faults[24..].iter().all(|&faults| faults == 512), "{faults:?}");
}
