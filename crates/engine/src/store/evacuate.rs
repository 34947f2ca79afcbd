//! The store's side of compaction: how full the store is, and which pieces to empty.

use std::sync::atomic::Ordering::*;

use wire::SEGMENT_PAGES;

use super::frames::Store;
use super::free::{Fill, Free, HUGE, Piece};
use super::segment::PINNED;
use crate::core::content::frame::Frame;

/// Pieces that can only be given back together.
struct Unit {
    pieces: Vec<Piece>,
    live: u32,
    dead: u32,
}

impl Store {
    /// Slots in use, and dead ones that can be given back.
    pub(crate) fn fill(&self) -> Fill {
        self.free.lock().fill()
    }

    /// Pieces whose dead slots, if these are given back, make up for `excess`: those with the
    /// fewest live frames first. Pieces to `skip` count as given back.
    pub(crate) fn emptiest(&self, excess: u64, skip: impl Fn(Piece) -> bool) -> Vec<Piece> {
        let mut free = self.free.lock();
        self.note_pinned(&mut free);
        let (mut excess, mut units) = (excess as i64, Vec::new());
        for unit in self.units(&free) {
            if unit.pieces.iter().any(|&piece| skip(piece)) {
                excess -= i64::from(unit.dead);
            } else if unit.dead > 0 && unit.live > 0 {
                units.push(unit);
            }
        }
        units.sort_by_key(|unit| unit.live);
        let mut chosen = Vec::new();
        for unit in units {
            if excess <= 0 {
                break;
            }
            excess -= i64::from(unit.dead);
            chosen.extend(unit.pieces);
        }
        chosen
    }

    /// Pieces, or whole segments that cannot be punched; without those that hold a pinned frame.
    fn units(&self, free: &Free) -> Vec<Unit> {
        let mut units = Vec::new();
        for (at, segment) in self.segments.read().iter().enumerate() {
            let Some(segment) = segment.as_ref().filter(|segment| segment.own().is_some()) else { continue };
            let of = |piece| {
                let slots = free.piece(piece);
                Unit { pieces: vec![piece], live: HUGE - slots.free() - slots.dead, dead: slots.dead }
            };
            if segment.can_punch() {
                units.extend(Piece::of_segment(at).filter(|&piece| !free.piece(piece).pinned).map(of));
            } else if !Piece::of_segment(at).any(|piece| free.piece(piece).pinned) {
                let all = Piece::of_segment(at).map(of);
                units.push(all.fold(Unit { pieces: Vec::new(), live: 0, dead: 0 }, |mut whole, piece| {
                    whole.pieces.extend(piece.pieces);
                    (whole.live, whole.dead) = (whole.live + piece.live, whole.dead + piece.dead);
                    whole
                }));
            }
        }
        units
    }

    /// Notes which pieces hold pinned frames.
    fn note_pinned(&self, free: &mut Free) {
        for (at, segment) in self.segments.read().iter().enumerate() {
            let Some(segment) = segment.as_ref().filter(|segment| segment.own().is_some()) else { continue };
            for slot in (0..SEGMENT_PAGES).filter(|&slot| segment.refs[slot as usize].load(Relaxed) & PINNED != 0) {
                free.piece_mut(Piece::of(Frame(at as u32 * SEGMENT_PAGES + slot))).pinned = true;
            }
        }
    }

    /// No new frame is made in this piece any more: its free slots are dead.
    pub(crate) fn retire(&self, piece: Piece) {
        self.free.lock().retire(piece);
    }

    pub(crate) fn handle(&self, frame: Frame) -> u32 {
        self.with(frame, |s, slot| s.handles[slot].load(Acquire)).unwrap_or(crate::core::content::frame::NO_HANDLE)
    }
}
