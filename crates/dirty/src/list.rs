//! The bounded list: a ring of frame numbers in the order of their insertion. It is the fastest set
//! for few frames, and refuses frames when it is full. It does not notice that a frame is in it
//! already.
//!
//! An inserter draws a place (`tail`) and then stores its frame there. One harvester at a time
//! reads the places from `head` on, and skips those that were drawn and are not filled yet. A place
//! is free again when `head` has passed it, and is [`EMPTY`] by then.

use std::ops::Range;
use std::sync::{Mutex, MutexGuard, PoisonError};

use crate::DirtySet;
use crate::primitive::AtomicU64;
use crate::primitive::Ordering::{AcqRel, Acquire, Relaxed, Release};
use crate::sink::{Frames, Ranges, Sink};
use crate::tree::{MAX_FRAMES, NewError, zeroed};
use crate::words::Words;

/// The value of a place that was drawn, or never used.
const EMPTY: u64 = 0;
/// The value of a place whose frame was taken while an earlier place is still in use.
const TAKEN: u64 = u64::MAX;

/// A bounded multiset of frame numbers below a fixed size. Its harvests are in no order, and
/// `contains` reads the whole list.
///
/// ```
/// use dirty::{DirtyList, DirtySet};
/// let list = DirtyList::new(1000, 2)?;
/// assert!(list.insert(7) && list.insert(7));
/// assert!(!list.insert(8), "it is full");
/// let mut frames = [0; 8];
/// assert_eq!(list.take_frames(&mut (0..1000), &mut frames), 2);
/// assert_eq!(frames[..2], [7, 7]);
/// # Ok::<(), dirty::NewError>(())
/// ```
pub struct DirtyList {
    /// A frame number plus 1, [`EMPTY`] or [`TAKEN`].
    places: Words,
    frames: u64,
    head: AtomicU64,
    tail: AtomicU64,
    harvester: Mutex<()>,
}

impl DirtyList {
    /// The empty list of up to `capacity` (at least 1) frames below `frames`.
    ///
    /// # Errors
    ///
    /// [`NewError`].
    pub fn new(frames: u64, capacity: usize) -> Result<Self, NewError> {
        if frames > MAX_FRAMES {
            return Err(NewError::TooLarge(frames));
        }
        // A power of two, so that places follow each other when the counters wrap.
        let places = zeroed(capacity.max(1).checked_next_power_of_two().unwrap_or(usize::MAX))?;
        Ok(Self { places, frames, head: AtomicU64::new(0), tail: AtomicU64::new(0), harvester: Mutex::new(()) })
    }

    fn place(&self, at: u64) -> &AtomicU64 {
        &self.places[at as usize & (self.places.len() - 1)]
    }

    /// Copies the oldest frames to `out`. Returns their number. They stay in the list.
    pub fn harvest_frames(&self, out: &mut [u64]) -> usize {
        let _guard = self.harvester();
        let mut sink = Frames { out, filled: 0 };
        for at in self.places() {
            let value = self.place(at).load(Acquire);
            // As a word with one bit.
            if value != EMPTY && value != TAKEN && sink.put(value - 1, 1) != 0 {
                break;
            }
        }
        sink.filled
    }

    fn harvester(&self) -> MutexGuard<'_, ()> {
        self.harvester.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn places(&self) -> Range<u64> {
        let head = self.head.load(Acquire);
        head..self.tail.load(Acquire)
    }

    fn take<S: Sink>(&self, within: &mut Range<u64>, sink: &mut S) {
        let _guard = self.harvester();
        let places = self.places();
        let mut passed = places.start;
        for at in places {
            let place = self.place(at);
            let value = place.load(Acquire);
            if value == EMPTY {
                continue;
            }
            let frame = value.wrapping_sub(1);
            if value != TAKEN {
                if !within.contains(&frame) {
                    continue;
                }
                if sink.put(frame, 1) != 0 {
                    self.head.store(passed, Release);
                    return;
                }
            }
            if passed == at {
                place.store(EMPTY, Relaxed);
                passed += 1;
            } else {
                place.store(TAKEN, Relaxed);
            }
        }
        // Inserters read this before they fill a place again.
        self.head.store(passed, Release);
        within.start = within.end;
    }
}

impl DirtySet for DirtyList {
    fn frames(&self) -> u64 {
        self.frames
    }

    fn bytes(&self) -> usize {
        self.places.len() * 8 + size_of::<Self>()
    }

    fn insert(&self, frame: u64) -> bool {
        if frame >= self.frames {
            return false;
        }
        let mut tail = self.tail.load(Acquire);
        loop {
            // The tail may be old and the head past it: then the exchange fails.
            let used = tail.saturating_sub(self.head.load(Acquire));
            if used >= self.places.len() as u64 {
                return false;
            }
            match self.tail.compare_exchange_weak(tail, tail + 1, AcqRel, Acquire) {
                Ok(_) => break,
                Err(now) => tail = now,
            }
        }
        self.place(tail).store(frame + 1, Release);
        true
    }

    fn contains(&self, frame: u64) -> bool {
        frame < self.frames && self.places().any(|at| self.place(at).load(Acquire) == frame + 1)
    }

    /// The frames are in no order. If `within` does not become empty, it is unchanged.
    fn take_frames(&self, within: &mut Range<u64>, out: &mut [u64]) -> usize {
        let mut sink = Frames { out, filled: 0 };
        self.take(within, &mut sink);
        sink.filled
    }

    fn take_ranges(&self, within: &mut Range<u64>, out: &mut [Range<u64>]) -> usize {
        let mut sink = Ranges { out, filled: 0 };
        self.take(within, &mut sink);
        sink.filled
    }
}
