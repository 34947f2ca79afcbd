//! Which pages of a snapshot lie where in its segments.
//!
//! Each run of pages costs a clone a mapping, so pages lie in the order of the RAM. Zeros have no
//! slot, unless they are few between other pages: those cost memory only when somebody reads them.
//! How many are few depends on the mappings that there would be.
//! One content that fills many consecutive pages, such as free memory that the guest's kernel has
//! poisoned, gets [`REPLICAS`] slots once, as in the daemon's store: one mapping is 128 pages long.

use std::collections::HashMap;

use wire::{PageNo, Part, Run, SEGMENT_PAGES};

/// Pages of zeros that are mapped with what is around them, at most: the first number with which
/// there are [`FEW`] mappings or fewer, or the last.
const GAPS: [u32; 4] = [8, 32, 128, 512];
/// Mappings of which a process has enough left (`vm.max_map_count` is 65,530).
const FEW: usize = 8192;
/// Slots of a content that fills many pages.
const REPLICAS: u32 = 128;
/// How many consecutive pages of one content are many.
const MANY: u32 = 64;

/// See the module.
pub(super) struct Plan {
    /// What clones map, by page.
    parts: Vec<Part>,
    /// What lies in the slots, by slot.
    fills: Vec<Fill>,
    slots: u32,
}

/// What lies in consecutive slots.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Fill {
    /// The first slot.
    pub(super) slot: u32,
    /// How many.
    pub(super) len: u32,
    /// The page in the first slot.
    pub(super) page: u32,
    /// It lies in the others too. Otherwise the pages behind it do.
    pub(super) repeats: bool,
}

impl Plan {
    /// For this number of pages. `place`: equal numbers stand for equal pages; `None` for zeros.
    pub(super) fn new(pages: u32, place: impl Fn(u32) -> Option<u64>) -> Self {
        let mut plan = Self::with_gaps(GAPS[0], pages, &place);
        for gap in &GAPS[1..] {
            if plan.parts.len() > FEW {
                plan = Self::with_gaps(*gap, pages, &place);
            }
        }
        plan
    }

    fn with_gaps(gap: u32, pages: u32, place: impl Fn(u32) -> Option<u64>) -> Self {
        let mut plan = Self { parts: Vec::new(), fills: Vec::new(), slots: 0 };
        let mut replicas = HashMap::new();
        let mut page = 0;
        while page < pages {
            let Some(here) = place(page) else {
                page += 1;
                continue;
            };
            let same = (page + 1..pages).take_while(|&next| place(next) == Some(here)).count() as u32 + 1;
            if same >= MANY {
                let first = *replicas.entry(here).or_insert_with(|| plan.fill(page, REPLICAS, true));
                for done in (0..same).step_by(REPLICAS as usize) {
                    plan.map(page + done, (same - done).min(REPLICAS), first);
                }
            } else {
                plan.add(page, same, gap);
            }
            page += same;
        }
        plan
    }

    /// New slots.
    fn fill(&mut self, page: u32, len: u32, repeats: bool) -> u32 {
        let slot = self.slots;
        self.fills.push(Fill { slot, len, page, repeats });
        self.slots += len;
        slot
    }

    fn map(&mut self, page: u32, len: u32, slot: u32) {
        self.parts.push(Part { run: Run::new(PageNo(page), len), slot });
    }

    /// Adds pages with slots of their own, to the last ones if these are near.
    fn add(&mut self, page: u32, len: u32, gap: u32) {
        if let (Some(part), Some(fill)) = (self.parts.last_mut(), self.fills.last_mut())
            && (part.slot, part.run.len, fill.repeats) == (fill.slot, fill.len, false)
            && page - part.run.end().0 <= gap
        {
            let more = page + len - part.run.end().0;
            part.run.len += more;
            fill.len += more;
            self.slots += more;
        } else {
            let slot = self.fill(page, len, false);
            self.map(page, len, slot);
        }
    }

    /// What clones map: ascending, each page once.
    pub(super) fn parts(&self) -> &[Part] {
        &self.parts
    }

    /// Number of segments.
    pub(super) fn segments(&self) -> u32 {
        self.slots.div_ceil(SEGMENT_PAGES)
    }

    /// What lies in one of them.
    pub(super) fn of_segment(&self, at: u32) -> impl Iterator<Item = Fill> {
        let (start, end) = (at * SEGMENT_PAGES, (at + 1) * SEGMENT_PAGES);
        let first = self.fills.partition_point(|fill| fill.slot + fill.len <= start);
        self.fills[first..].iter().take_while(move |fill| fill.slot < end).map(move |&fill| {
            let (slot, last) = (fill.slot.max(start), (fill.slot + fill.len).min(end));
            let page = if fill.repeats { fill.page } else { fill.page + (slot - fill.slot) };
            Fill { slot, len: last - slot, page, ..fill }
        })
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    /// The page that lies in each slot.
    fn contents(plan: &Plan) -> Vec<u32> {
        let mut slots = Vec::new();
        for at in 0..plan.segments() {
            for fill in plan.of_segment(at) {
                assert_eq!((fill.slot as usize, fill.slot / SEGMENT_PAGES), (slots.len(), at));
                slots.extend((0..fill.len).map(|i| if fill.repeats { fill.page } else { fill.page + i }));
            }
        }
        slots
    }

    #[test]
    fn one_content_in_many_pages_takes_its_replicas_and_near_pages_one_mapping() {
        let place = |page: u32| match page {
            10..1000 | 2000..2100 => Some(5),
            1000..1003 | 1006 | 1030 => Some(u64::from(page)),
            _ => None,
        };
        let plan = Plan::new(3000, place);
        assert_eq!(plan.slots, REPLICAS + 7 + 1);
        assert_eq!(plan.parts().len(), 8 + 1 + 1 + 1);
        assert_eq!(plan.parts()[8], Part { run: Run::new(PageNo(1000), 7), slot: REPLICAS });
    }

    #[test]
    fn the_more_mappings_there_would_be_the_more_zeros_are_mapped() {
        let parts = |every: u32| Plan::new(9000 * every, |page| (page % every == 0).then(|| page.into())).parts().len();
        assert_eq!((parts(9), parts(10), parts(100), parts(600)), (1, 1, 1, 9000));
    }

    proptest! {
        #[test]
        fn each_page_lies_where_the_plan_says(
            runs in proptest::collection::vec((0u64..6, prop_oneof![1u32..12, 60u32..70, 100u32..9000]), 1..60),
        ) {
            let pages: Vec<u64> = runs.iter().flat_map(|&(place, len)| {
                // Content 1 differs from page to page.
                (0..len).map(move |i| if place == 1 { u64::from(i) + 100 } else { place })
            }).collect();
            let place = |page: u32| Some(pages[page as usize]).filter(|place| *place != 0);
            let plan = Plan::new(pages.len() as u32, place);
            let slots = contents(&plan);
            let decoded = wire::decode_parts(&wire::encode_parts(plan.parts()), pages.len() as u32, slots.len() as u32);
            prop_assert_eq!(decoded.as_deref(), Some(plan.parts()));
            let mut mapped = vec![0; pages.len()];
            for part in plan.parts() {
                for (page, slot) in part.run.pages().zip(part.slot..) {
                    mapped[page.index()] = pages[slots[slot as usize] as usize];
                }
            }
            prop_assert_eq!(mapped, pages);
        }
    }
}
