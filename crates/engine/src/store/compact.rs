//! Compaction: pieces of the store with few live frames are evacuated, so that they can be given
//! back.
//!
//! ```text
//!   choose ──▶ copy ──▶ move ──▶ end
//!     │         │        │        └── no page maps the old frame: it dies, and its piece with it
//!     │         │        └── passes of the clients: merge requests, page ──▶ new frame
//!     │         └── the frame's bytes go to a new slot, the index names the new frame
//!     └── dead frames take more than the bound: the pieces with the fewest live frames
//! ```
//!
//! The memory of dead frames comes back only with their whole piece. The *bound* is a quarter of
//! the live frames' memory and [`SLACK`](super::free::SLACK) more: above it, pieces are chosen
//! until the rest is below, the emptiest first. In a store that is sealed ([`super`]) whole
//! segments are chosen.
//!
//! A page is moved as it was merged: its agent compares it with the new frame in a window, and
//! maps that. Until the agent has reported, the page uses both frames. A page that was written
//! meanwhile leaves the old frame as usual. Whatever goes wrong, both frames hold the same bytes,
//! and each stays as long as it has users.
//!
//! A page that cannot be moved, since its client is refused or does not answer, keeps its frame.
//! After [`LONGEST`] merge periods the evacuation ends, and the piece is left alone for [`PAUSE`].

use std::sync::atomic::Ordering::*;
use std::time::{Duration, Instant};

use kmem::PAGE_SIZE;
use wire::SegmentId;

use super::cursor::{Cursor, Payer};
use super::domain::Domain;
use super::error::GrowError;
use super::free::Piece;
use super::moves::Work;
use crate::core::content::frame::{Frame, NO_HANDLE};
use crate::core::content::index::Place;

/// Frames that one call copies at most: a few milliseconds.
const FRAMES_AT_A_TIME: u32 = 4096;
/// Merge periods after which an evacuation ends.
const LONGEST: u32 = 16;
/// Merge periods for which a piece that could not be evacuated is left alone.
const PAUSE: u32 = 16 * LONGEST;

impl Domain {
    /// Chooses pieces where no evacuation is under way, and copies some frames. Called in each scan
    /// of a client; does nothing while another worker does it.
    /// `Err`: the store is full: the rest waits.
    pub(crate) fn compact(&self, now: Instant) -> Result<(), GrowError> {
        let Some(mut work) = self.compaction.work.try_lock() else { return Ok(()) };
        if work.chosen.is_empty() && work.began.is_empty() {
            let excess = self.store.fill().excess();
            if excess > 0 {
                work.left_alone.retain(|_, until| *until > now);
                work.chosen = self.store.emptiest(excess, |piece| work.left_alone.contains_key(&piece)).into();
                // All of them first, or frames would be copied from one to the next.
                work.chosen.iter().for_each(|&piece| self.store.retire(piece));
            }
        }
        let mut left = FRAMES_AT_A_TIME;
        while let Some(&piece) = work.chosen.front().filter(|_| left > 0) {
            work.began.insert(piece, now);
            left = left.saturating_sub(self.evacuate(piece)?.max(1));
            work.chosen.pop_front();
        }
        Ok(())
    }

    /// Ends evacuations that are over, then tidies the store. In this order: a slot must have no
    /// move left when it becomes another frame. While a worker compacts, nothing is done.
    pub(crate) fn tidy(&self, now: Instant, period: Duration) -> Vec<SegmentId> {
        self.tidy_replicas();
        let Some(mut work) = self.compaction.work.try_lock() else { return Vec::new() };
        self.end_moves(&mut work, now, period);
        for (frame, handle) in self.store.take_unused_snapshots() {
            self.index.forget(handle, Place::Frame(frame));
        }
        self.store.tidy(now)
    }

    /// Copies the live frames of a piece. Returns how many.
    fn evacuate(&self, piece: Piece) -> Result<u32, GrowError> {
        self.forget_replicas(piece);
        let mut cursor = Cursor::new(&self.store, self.store.node(piece.first()));
        let mut copied = 0;
        let mut bytes = [0; PAGE_SIZE];
        for old in piece.frames() {
            let is_moving = self.compaction.with_moves(|moves| moves.of(old).is_some());
            if is_moving || !self.store.try_ref(old) {
                continue;
            }
            if !self.store.read(old, &mut bytes) {
                self.give_up(old);
            } else {
                cursor.payer = Some(Payer::AsFor(old));
                match cursor.put(&bytes, 1) {
                    Ok(new) => {
                        self.compaction.begin_move(old, new);
                        self.replace(old, new);
                        copied += 1;
                    }
                    // It stays where it is, and so does its piece.
                    Err(GrowError::Payer(why)) => {
                        tracing::debug!(?old, "not evacuated: {why}");
                        self.release(old);
                        break;
                    }
                    Err(e) => {
                        self.release(old);
                        return Err(e);
                    }
                }
            }
            self.release(old);
        }
        self.compaction.copied.fetch_add(copied.into(), Relaxed);
        Ok(copied)
    }

    /// The index names the new frame from now on.
    fn replace(&self, old: Frame, new: Frame) {
        let handle = self.store.handle(old);
        if handle == NO_HANDLE {
            return;
        }
        self.store.set_handle(new, handle);
        if self.index.change(handle, Place::Frame(old), Place::Frame(new)) {
            self.store.take_handle(old);
        } else {
            self.store.set_handle(new, NO_HANDLE);
        }
    }

    /// Ends the moves of frames without users, and those of pieces that took too long.
    fn end_moves(&self, work: &mut Work, now: Instant, period: Duration) {
        if !self.compaction.is_active() && work.began.is_empty() {
            return;
        }
        let longest = period * LONGEST;
        let late: Vec<Piece> =
            work.began.iter().filter(|(_, began)| now - **began > longest).map(|(&piece, _)| piece).collect();
        let is_over = |old: Frame| self.store.users(old) == 0 || late.contains(&Piece::of(old));
        let over = {
            let mut moves = self.compaction.moves.write();
            let over = moves.end(is_over);
            work.began.retain(|piece, _| moves.pieces.get(piece.index()).copied().unwrap_or(false));
            self.compaction.active.store(!moves.to.is_empty(), Release);
            over
        };
        over.into_iter().for_each(|(_, new)| self.release(new));
        work.left_alone.extend(late.into_iter().map(|piece| (piece, now + period * PAUSE)));
    }
}

#[cfg(test)]
mod tests;
