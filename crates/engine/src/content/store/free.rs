//! Free slots: which there are, and which are taken next.
//!
//! A segment is divided into pieces of a huge page each. One of which no slot was ever used is
//! *fresh*: it can be made a huge page at one stroke.

use std::collections::{BTreeMap, VecDeque};
use std::ops::Range;
use std::time::{Duration, Instant};

use dirty::DirtyTree;
use kmem::PAGE_SIZE;
use kmem::memfd::HUGE_PAGE_SIZE;
use wire::SEGMENT_PAGES;

use crate::content::frame::Frame;

/// Slots of a huge page.
pub(super) const HUGE: u32 = (HUGE_PAGE_SIZE / PAGE_SIZE) as u32;
/// The longest run of slots that one cursor reserves.
pub(super) const EXTENT: u32 = 512;
/// All pieces of a segment.
pub(super) const ALL_FRESH: u32 = u32::MAX;
const _: () = assert!(SEGMENT_PAGES == HUGE * u32::BITS);

/// Free slots of the writable segments, and what waits to become free.
#[derive(Default)]
pub(super) struct Free {
    /// One for each segment of the store; empty for those that cannot be written.
    pub(super) slots: Vec<DirtyTree>,
    /// Those among them that have memory.
    pub(super) backed: Vec<DirtyTree>,
    /// Huge pages of each segment of which no slot has ever had memory, a bit each.
    pub(super) fresh: Vec<u32>,
    /// The NUMA node of each segment, where nodes are kept apart.
    pub(super) nodes: Vec<Option<u32>>,
    /// Free slots on each node.
    pub(super) counts: BTreeMap<Option<u32>, u64>,
    /// What cursors left over of their reservations, the latest last.
    pub(super) begun: Vec<Range<u32>>,
    /// Freed slots, and since when, the earliest first.
    pub(super) quarantine: VecDeque<(Instant, Frame)>,
    /// Until when no huge page is requested: the kernel had none, or a slow one.
    pub(super) no_huge_until: Option<Instant>,
    /// When enough memory was last found to be left.
    pub(super) checked: Option<Instant>,
    /// State of a xorshift generator: where runs start.
    pub(super) random: u64,
}

impl Free {
    pub(super) fn random(&mut self) -> u64 {
        self.random ^= self.random << 13;
        self.random ^= self.random >> 7;
        self.random ^= self.random << 17;
        self.random
    }

    /// Free slots on this node.
    pub(super) fn count(&mut self, node: Option<u32>) -> &mut u64 {
        self.counts.entry(node).or_default()
    }

    /// The segments of a node.
    pub(super) fn segments(&self, node: Option<u32>) -> impl Iterator<Item = usize> {
        self.nodes.iter().enumerate().filter(move |&(_, of)| *of == node).map(|(at, _)| at)
    }

    /// Frees slots that have been quarantined for `time`.
    pub(super) fn end_quarantine(&mut self, now: Instant, time: Duration) {
        while let Some(&(since, frame)) = self.quarantine.front() {
            if now.duration_since(since) < time {
                break;
            }
            self.quarantine.pop_front();
            let (at, slot) = (frame.segment(), frame.slot());
            debug_assert!(!self.slots[at].contains(slot.into()), "{frame:?} is free already");
            self.slots[at].insert(slot.into());
            self.backed[at].insert(slot.into());
            let node = self.nodes[at];
            *self.count(node) += 1;
        }
    }

    /// A segment is closed: none of its slots is free any more.
    pub(super) fn close(&mut self, at: usize) {
        let (count, node) = (self.slots[at].count(), self.nodes[at]);
        *self.count(node) -= count;
        self.slots[at].clear();
        self.backed[at].clear();
        self.fresh[at] = 0;
        self.begun.retain(|begun| Frame(begun.start).segment() != at);
    }

    /// The first slot of a fresh huge page of a node, drawn at random, as a frame.
    pub(super) fn fresh_piece(&mut self, node: Option<u32>) -> Option<u32> {
        let count: u32 = self.segments(node).map(|at| self.fresh[at].count_ones()).sum();
        let mut skip = (count > 0).then(|| (self.random() % u64::from(count)) as u32)?;
        for at in self.segments(node) {
            let bits = self.fresh[at];
            if skip < bits.count_ones() {
                let piece = (0..u32::BITS).filter(|piece| bits & (1 << piece) != 0).nth(skip as usize)?;
                return Some(at as u32 * SEGMENT_PAGES + piece * HUGE);
            }
            skip -= bits.count_ones();
        }
        None
    }

    /// What is left of a reservation on a node, unless its slots were taken since.
    pub(super) fn take_begun(&mut self, node: Option<u32>) -> Option<Range<u32>> {
        while let Some(at) = self.begun.iter().rposition(|begun| self.nodes[Frame(begun.start).segment()] == node) {
            let begun = self.begun.remove(at);
            if self.slots[Frame(begun.start).segment()].contains(Frame(begun.start).slot().into()) {
                return Some(begun);
            }
        }
        None
    }

    /// Looks at some of a set's runs on a node, from places drawn at random, for one with `enough`
    /// slots. Returns it, or the longest of them: its first slot, as a frame, and its length.
    pub(super) fn longest(
        &mut self,
        node: Option<u32>,
        set: impl Fn(&Self) -> &Vec<DirtyTree>,
        enough: u32,
    ) -> (u32, u32) {
        const PLACES: u32 = 4;
        const RUNS: u32 = 16;
        let mut best = (0, 0);
        let segments: Vec<usize> = self.segments(node).collect();
        if segments.is_empty() {
            return best;
        }
        for _ in 0..PLACES {
            let at = segments[(self.random() % segments.len() as u64) as usize];
            let slot = (self.random() % u64::from(SEGMENT_PAGES)) as u32;
            let bits = &set(self)[at];
            // From where a run begins, or it would be cut in two and leave crumbs.
            let begin = (slot.saturating_sub(EXTENT)..slot).rev().take_while(|&s| bits.contains(s.into())).last();
            let mut from = begin.unwrap_or(slot);
            for _ in 0..RUNS {
                let Some(slot) = bits.next(from.into()).or_else(|| bits.next(0)).map(|slot| slot as u32) else { break };
                let len = run_length(bits, slot);
                if len > best.1 {
                    best = (at as u32 * SEGMENT_PAGES + slot, len);
                }
                if len >= enough {
                    return best;
                }
                from = slot + len;
            }
        }
        best
    }
}

/// Free slots from this one on, without a gap; [`EXTENT`] at most.
pub(super) fn run_length(free: &DirtyTree, slot: u32) -> u32 {
    (slot..SEGMENT_PAGES.min(slot + EXTENT)).take_while(|&s| free.contains(s.into())).count() as u32
}
