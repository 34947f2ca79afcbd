//! Moves: the evacuations of a store that are under way ([`super::compact`]).

use std::collections::{BTreeMap, HashMap, VecDeque};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::*};
use std::time::Instant;

use super::free::Piece;
use crate::core::content::frame::Frame;
use crate::sync::{Mutex, RwLock};

/// The evacuations of a domain's store.
#[derive(Default)]
pub(crate) struct Compaction {
    /// Held by the worker that compacts.
    pub(super) work: Mutex<Work>,
    /// Where the frames of pieces that are evacuated went. The table is a user of each new frame.
    pub(super) moves: RwLock<Moves>,
    pub(super) active: AtomicBool,
    pub(crate) copied: AtomicU64,
}

#[derive(Default)]
pub(super) struct Work {
    /// Chosen, and not copied yet.
    pub(super) chosen: VecDeque<Piece>,
    /// Since when a piece is evacuated.
    pub(super) began: BTreeMap<Piece, Instant>,
    /// Until when a piece is left alone.
    pub(super) left_alone: BTreeMap<Piece, Instant>,
}

/// Frames that are evacuated, and the frames that take their place.
#[derive(Default)]
pub(crate) struct Moves {
    pub(super) to: HashMap<Frame, Frame>,
    /// By its number: whether a piece has moves.
    pub(super) pieces: Vec<bool>,
}

impl Moves {
    /// The frame that takes the place of this one, if it is evacuated.
    pub(crate) fn of(&self, frame: Frame) -> Option<Frame> {
        let has_moves = self.pieces.get(Piece::of(frame).index()).copied().unwrap_or(false);
        has_moves.then(|| self.to.get(&frame).copied()).flatten()
    }

    fn add(&mut self, old: Frame, new: Frame) {
        let at = Piece::of(old).index();
        if self.pieces.len() <= at {
            self.pieces.resize(at + 1, false);
        }
        self.pieces[at] = true;
        self.to.insert(old, new);
    }

    /// Takes the moves out for which `is_over`; returns them.
    pub(super) fn end(&mut self, is_over: impl Fn(Frame) -> bool) -> Vec<(Frame, Frame)> {
        let over: Vec<(Frame, Frame)> = self.to.extract_if(|&old, _| is_over(old)).collect();
        self.pieces.fill(false);
        for frame in self.to.keys() {
            self.pieces[Piece::of(*frame).index()] = true;
        }
        over
    }
}

impl Compaction {
    pub(crate) fn is_active(&self) -> bool {
        self.active.load(Acquire)
    }

    /// Calls `f` with the moves under way.
    pub(crate) fn with_moves<R>(&self, f: impl FnOnce(&Moves) -> R) -> R {
        f(&self.moves.read())
    }

    /// Pages move from a frame to another of the same bytes from now on.
    pub(crate) fn begin_move(&self, old: Frame, new: Frame) {
        self.moves.write().add(old, new);
        self.active.store(true, Release);
    }
}
