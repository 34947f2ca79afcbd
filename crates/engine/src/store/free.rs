//! Free slots: which there are, which are taken next, and what becomes of dead ones.
//!
//! A segment is divided into pieces of a huge page each. One of which no slot was used since it was
//! made, or last punched, is *fresh*: it can be made a huge page at one stroke. A slot is *free*
//! until it becomes a frame. A frame that lost its last user and was quarantined is *dead*, and
//! stays so until its piece is punched, or its segment is closed. A piece is *spent* when all its
//! slots are free or dead.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::ops::Range;
use std::time::{Duration, Instant};

use kmem::PAGE_SIZE;
use kmem::memfd::HUGE_PAGE_SIZE;
use wire::SEGMENT_PAGES;

use crate::core::content::frame::Frame;

/// Slots of a piece: those of a huge page.
pub(super) const HUGE: u32 = (HUGE_PAGE_SIZE / PAGE_SIZE) as u32;
/// The longest run of slots that one cursor reserves.
pub(super) const EXTENT: u32 = HUGE;
pub(super) const PIECES: u32 = SEGMENT_PAGES / HUGE;
/// A piece that was begun is preferred to a fresh one while it has as many free slots.
const CRUMBS: u32 = 32;
/// Words of a set of a piece's slots.
const WORDS: usize = (HUGE / u64::BITS) as usize;

/// Dead frames that are never worth a copy: 64 MiB, as much as a segment.
pub(super) const SLACK: u64 = (64 << 20) / PAGE_SIZE as u64;
/// Slots in use and dead, as the bound counts them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Fill {
    pub(crate) live: u64,
    pub(crate) dead: u64,
}

impl Fill {
    /// Dead frames above the bound.
    pub(crate) fn excess(self) -> u64 {
        self.dead.saturating_sub(self.live / 4 + SLACK)
    }
}

/// A piece of the store: number of its segment times [`PIECES`], plus its place there.
#[repr(transparent)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(crate) struct Piece(u32);

impl Piece {
    pub(crate) fn of(frame: Frame) -> Self {
        Self(frame.0 / HUGE)
    }

    /// The pieces of a segment.
    pub(super) fn of_segment(at: usize) -> impl Iterator<Item = Self> {
        (0..PIECES).map(move |piece| Self(at as u32 * PIECES + piece))
    }

    pub(crate) fn index(self) -> usize {
        self.0 as usize
    }

    pub(crate) fn first(self) -> Frame {
        Frame(self.slots().start)
    }

    pub(crate) fn frames(self) -> impl Iterator<Item = Frame> {
        self.slots().map(Frame)
    }

    pub(super) fn slots(self) -> Range<u32> {
        self.0 * HUGE..(self.0 + 1) * HUGE
    }

    pub(super) fn segment(self) -> usize {
        (self.0 / PIECES) as usize
    }
}

/// What is known of the slots of a piece.
#[derive(Clone, Copy, Default)]
pub(super) struct Slots {
    /// The free ones, a bit each.
    free: [u64; WORDS],
    pub(super) dead: u32,
    /// None was used since the piece was made, or punched.
    pub(super) fresh: bool,
    /// It was made a huge page.
    pub(super) huge: bool,
    /// It holds a pinned frame, as was found when pieces were chosen for compaction.
    pub(super) pinned: bool,
}

/// What slots become.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Become {
    Free,
    Reserved,
}

impl Slots {
    pub(super) fn free(&self) -> u32 {
        self.free.iter().map(|word| word.count_ones()).sum()
    }

    fn is_free(&self, slot: u32) -> bool {
        self.free[(slot / u64::BITS) as usize] & 1 << (slot % u64::BITS) != 0
    }

    fn set(&mut self, slots: Range<u32>, to: Become) {
        for slot in slots {
            let (word, bit) = (&mut self.free[(slot / u64::BITS) as usize], 1 << (slot % u64::BITS));
            if to == Become::Free { *word |= bit } else { *word &= !bit }
        }
    }

    /// Free slots from this one on, without a gap.
    pub(super) fn run_length(&self, slot: u32) -> u32 {
        (slot..HUGE).take_while(|&slot| self.is_free(slot)).count() as u32
    }

    /// The longest run of free slots: the first, and how many.
    fn longest(&self) -> (u32, u32) {
        let (mut best, mut slot) = ((0, 0), 0);
        while slot < HUGE {
            let len = self.run_length(slot);
            if len > best.1 {
                best = (slot, len);
            }
            slot += len.max(1);
        }
        best
    }
}

/// The slots of one segment.
#[derive(Default)]
struct Segment {
    /// The NUMA node, where nodes are kept apart.
    node: Option<u32>,
    /// Whether pieces can be given back one by one.
    can_punch: bool,
    pieces: [Slots; PIECES as usize],
}

/// The slots of all segments, and what waits to die; nothing is free where nothing is written.
#[derive(Default)]
pub(super) struct Free {
    segments: Vec<Segment>,
    counts: BTreeMap<Option<u32>, u64>,
    fresh: BTreeSet<Piece>,
    /// Pieces that were begun: those with [`CRUMBS`] free slots or more, and those with fewer.
    begun_pieces: BTreeSet<Piece>,
    crumbs: BTreeSet<Piece>,
    /// Pieces that can be punched.
    spent: BTreeSet<Piece>,
    /// What cursors left over of their reservations, the latest last.
    pub(super) begun: Vec<Range<u32>>,
    /// Frames without users, and since when, the earliest first.
    pub(super) quarantine: VecDeque<(Instant, Frame)>,
    /// Until when no huge page is requested: the kernel had none, or a slow one.
    pub(super) no_huge_until: Option<Instant>,
    /// When enough memory was last found to be left.
    pub(super) checked: Option<Instant>,
    /// State of a xorshift generator: where runs start.
    random: u64,
}

impl Free {
    /// No segments; `seed`: of places drawn at random.
    pub(super) fn new(seed: u64) -> Self {
        Self { random: seed | 1, ..Self::default() }
    }

    pub(super) fn random(&mut self) -> u64 {
        self.random ^= self.random << 13;
        self.random ^= self.random >> 7;
        self.random ^= self.random << 17;
        self.random
    }

    pub(super) fn piece(&self, piece: Piece) -> &Slots {
        &self.segments[piece.segment()].pieces[(piece.0 % PIECES) as usize]
    }

    pub(super) fn piece_mut(&mut self, piece: Piece) -> &mut Slots {
        &mut self.segments[piece.segment()].pieces[(piece.0 % PIECES) as usize]
    }

    /// Free slots on this node.
    pub(super) fn count(&mut self, node: Option<u32>) -> &mut u64 {
        self.counts.entry(node).or_default()
    }

    /// A segment begins at this place; all of it is fresh if it can be written.
    pub(super) fn open(&mut self, at: usize, of: &super::segment::Segment) {
        if at >= self.segments.len() {
            self.segments.resize_with(at + 1, Segment::default);
        }
        self.segments[at] = Segment { node: of.node, can_punch: of.can_punch(), ..Segment::default() };
        if of.own().is_some() {
            Piece::of_segment(at).for_each(|piece| self.renew(piece));
        }
    }

    /// A segment is closed: none of its slots is free any more.
    pub(super) fn close(&mut self, at: usize) {
        for piece in Piece::of_segment(at) {
            self.take_free(piece);
            *self.piece_mut(piece) = Slots::default();
            self.note(piece);
        }
        self.begun.retain(|begun| Frame(begun.start).segment() != at);
    }

    /// Slots of a segment that are free or dead: not frames, reserved, or in quarantine.
    pub(super) fn idle(&self, at: usize) -> u32 {
        self.segments[at].pieces.iter().map(|slots| slots.free() + slots.dead).sum()
    }

    /// A piece without memory: all its slots are free.
    pub(super) fn renew(&mut self, piece: Piece) {
        *self.piece_mut(piece) = Slots { fresh: true, ..Slots::default() };
        self.add(piece.slots());
    }

    /// Slots of one piece become free.
    pub(super) fn add(&mut self, slots: Range<u32>) {
        self.change(slots, Become::Free);
    }

    /// Slots of one piece that were free are reserved.
    pub(super) fn remove(&mut self, slots: Range<u32>) {
        self.piece_mut(Piece::of(Frame(slots.start))).fresh = false;
        self.change(slots, Become::Reserved);
    }

    fn change(&mut self, slots: Range<u32>, to: Become) {
        let (piece, first, len) = (Piece::of(Frame(slots.start)), slots.start % HUGE, slots.end - slots.start);
        self.piece_mut(piece).set(first..first + len, to);
        let node = self.segments[piece.segment()].node;
        let count = self.count(node);
        *count = if to == Become::Free { *count + u64::from(len) } else { *count - u64::from(len) };
        self.note(piece);
    }

    /// No slot of a piece is free any more; returns how many were.
    fn take_free(&mut self, piece: Piece) -> u32 {
        let (node, slots) = (self.segments[piece.segment()].node, self.piece_mut(piece));
        let free = slots.free();
        slots.free = [0; WORDS];
        *self.count(node) -= u64::from(free);
        free
    }

    /// Notes what a piece has to offer.
    fn note(&mut self, piece: Piece) {
        let slots = self.piece(piece);
        let (free, fresh) = (slots.free(), slots.fresh);
        let spent = !fresh && self.segments[piece.segment()].can_punch && slots.dead > 0 && free + slots.dead == HUGE;
        let put = |set: &mut BTreeSet<Piece>, is_in| if is_in { set.insert(piece) } else { set.remove(&piece) };
        put(&mut self.fresh, fresh);
        put(&mut self.begun_pieces, !fresh && free >= CRUMBS);
        put(&mut self.crumbs, !fresh && (1..CRUMBS).contains(&free));
        put(&mut self.spent, spent);
    }

    pub(super) fn is_free(&self, frame: Frame) -> bool {
        self.piece(Piece::of(frame)).is_free(frame.0 % HUGE)
    }

    /// Frames that have been quarantined for `time` are dead, but for those that are `pinned`.
    pub(super) fn end_quarantine(&mut self, now: Instant, time: Duration, pinned: impl Fn(Frame) -> bool) {
        while let Some(&(since, frame)) = self.quarantine.front() {
            if now.duration_since(since) < time {
                break;
            }
            self.quarantine.pop_front();
            debug_assert!(!self.is_free(frame), "{frame:?} is free");
            if !pinned(frame) {
                let piece = Piece::of(frame);
                self.piece_mut(piece).dead += 1;
                self.note(piece);
            }
        }
    }

    /// Takes up to `most` spent pieces: until they are [renewed](Free::renew) nothing of them is
    /// free, and their segments are not closed.
    pub(super) fn take_spent(&mut self, most: usize) -> Vec<Piece> {
        let taken: Vec<Piece> = self.spent.iter().copied().take(most).collect();
        for &piece in &taken {
            self.take_free(piece);
            self.piece_mut(piece).dead = 0;
            self.note(piece);
        }
        taken
    }

    /// No slot of a piece is free any more: those that were are dead.
    pub(super) fn retire(&mut self, piece: Piece) {
        let free = self.take_free(piece);
        let slots = self.piece_mut(piece);
        slots.dead += free;
        slots.fresh = false;
        self.note(piece);
    }

    /// Slots in use, and dead ones but for those of pinned pieces.
    pub(super) fn fill(&self) -> Fill {
        let begun = self.segments.iter().flat_map(|segment| &segment.pieces).filter(|slots| !slots.fresh);
        begun.fold(Fill { live: 0, dead: 0 }, |fill, slots| Fill {
            live: fill.live + u64::from(HUGE - slots.free() - slots.dead),
            dead: fill.dead + if slots.pinned { 0 } else { u64::from(slots.dead) },
        })
    }

    /// A piece could not be punched: all its slots stay dead.
    pub(super) fn kill(&mut self, piece: Piece) {
        self.piece_mut(piece).dead = HUGE;
    }

    /// Slots of pieces that were begun: free ones, dead ones with those in quarantine, and these.
    pub(super) fn waste(&self) -> (u64, u64, u64) {
        let pieces = || self.segments.iter().flat_map(|segment| &segment.pieces);
        let free: u32 = pieces().filter(|slots| !slots.fresh).map(|slots| slots.free()).sum();
        let dead: u32 = pieces().map(|slots| slots.dead).sum();
        let quarantined = self.quarantine.len() as u64;
        (free.into(), u64::from(dead) + quarantined, quarantined)
    }

    /// A piece of a node out of `set`, drawn at random.
    fn draw(&mut self, node: Option<u32>, set: impl Fn(&Self) -> &BTreeSet<Piece>) -> Option<Piece> {
        let from = Piece((self.random() % (self.segments.len() as u64 * u64::from(PIECES)).max(1)) as u32);
        let (set, of_node) = (set(self), |piece: &&Piece| self.segments[piece.segment()].node == node);
        set.range(from..).find(of_node).or_else(|| set.iter().find(of_node)).copied()
    }

    /// Free slots of a node to begin with: of a piece that was begun and has enough, else a fresh
    /// piece, else what there is.
    pub(super) fn find(&mut self, node: Option<u32>) -> Option<(Frame, u32)> {
        let piece = self.draw(node, |free| &free.begun_pieces);
        let piece = piece.or_else(|| self.draw(node, |free| &free.fresh));
        let piece = piece.or_else(|| self.draw(node, |free| &free.crumbs))?;
        let (slot, len) = self.piece(piece).longest();
        Some((Frame(piece.slots().start + slot), len))
    }

    /// What is left of a reservation on a node, unless its slots were taken since.
    pub(super) fn take_begun(&mut self, node: Option<u32>) -> Option<Range<u32>> {
        let is_of = |begun: &Range<u32>| self.segments[Frame(begun.start).segment()].node == node;
        while let Some(at) = self.begun.iter().rposition(is_of) {
            let begun = self.begun.remove(at);
            if self.is_free(Frame(begun.start)) {
                return Some(begun);
            }
        }
        None
    }
}
