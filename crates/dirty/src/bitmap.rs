//! The plain bitmap: one bit for each frame, in the layout of `KVM_GET_DIRTY_LOG`. A harvest reads
//! every word.

use std::ops::Range;

use crate::primitive::Ordering::{AcqRel, Acquire};
use crate::sink::{Frames, Ranges, Sink};
use crate::tree::{MAX_FRAMES, NewError, mask, zeroed};
use crate::words::Words;
use crate::{DirtySet, barrier};

/// A set of frame numbers below a fixed size: a bitmap. Best where most frames are dirty at each
/// harvest.
///
/// ```
/// use dirty::{Bitmap, DirtySet};
/// let bitmap = Bitmap::new(256)?;
/// assert!(bitmap.insert(7) && bitmap.insert(255));
/// let mut frames = [0; 8];
/// assert_eq!(bitmap.take_frames(&mut (0..256), &mut frames), 2);
/// assert_eq!(frames[..2], [7, 255]);
/// assert!(!bitmap.contains(7));
/// # Ok::<(), dirty::NewError>(())
/// ```
pub struct Bitmap {
    words: Words,
    frames: u64,
}

impl Bitmap {
    /// The empty set of frames below `frames`.
    ///
    /// # Errors
    ///
    /// [`NewError`].
    pub fn new(frames: u64) -> Result<Self, NewError> {
        if frames > MAX_FRAMES {
            return Err(NewError::TooLarge(frames));
        }
        barrier::set_up();
        Ok(Self { words: zeroed(frames.div_ceil(64) as usize)?, frames })
    }

    /// Writes the frames of the set that lie in `within` to `out`; see
    /// [`DirtyTree::harvest_frames`](crate::DirtyTree::harvest_frames).
    pub fn harvest_frames(&self, within: &mut Range<u64>, out: &mut [u64]) -> usize {
        let mut sink = Frames { out, filled: 0 };
        self.harvest::<false, _>(within, &mut sink);
        sink.filled
    }

    /// [`Bitmap::harvest_frames`], as ranges.
    pub fn harvest_ranges(&self, within: &mut Range<u64>, out: &mut [Range<u64>]) -> usize {
        let mut sink = Ranges { out, filled: 0 };
        self.harvest::<false, _>(within, &mut sink);
        sink.filled
    }

    fn harvest<const TAKE: bool, S: Sink>(&self, within: &mut Range<u64>, sink: &mut S) {
        let end = within.end.min(self.frames);
        let first = (within.start / 64) as usize;
        let last = end.div_ceil(64) as usize;
        if within.start < end {
            for (index, word) in (first..).zip(&self.words[first..last]) {
                let base = index as u64 * 64;
                let wanted = mask(end - base) & !mask(within.start.saturating_sub(base));
                let mut bits = word.load(Acquire) & wanted;
                if bits == 0 {
                    continue;
                }
                if TAKE {
                    bits = word.fetch_and(!wanted, AcqRel) & wanted;
                }
                let left = sink.put(base, bits);
                if left != 0 {
                    if TAKE {
                        word.fetch_or(left, AcqRel);
                    }
                    within.start = base + u64::from(left.trailing_zeros());
                    return;
                }
            }
        }
        within.start = within.end;
    }
}

impl DirtySet for Bitmap {
    fn frames(&self) -> u64 {
        self.frames
    }

    fn bytes(&self) -> usize {
        self.words.len() * 8 + size_of::<Self>()
    }

    #[inline]
    fn insert(&self, frame: u64) -> bool {
        if frame >= self.frames {
            return false;
        }
        let (word, bit) = (&self.words[frame as usize / 64], 1 << (frame % 64));
        if !barrier::light() || word.load(Acquire) & bit == 0 {
            word.fetch_or(bit, AcqRel);
        }
        true
    }

    fn contains(&self, frame: u64) -> bool {
        frame < self.frames && self.words[frame as usize / 64].load(Acquire) >> (frame % 64) & 1 == 1
    }

    fn take_frames(&self, within: &mut Range<u64>, out: &mut [u64]) -> usize {
        let mut sink = Frames { out, filled: 0 };
        self.harvest::<true, _>(within, &mut sink);
        if sink.filled > 0 {
            barrier::heavy();
        }
        sink.filled
    }

    fn take_ranges(&self, within: &mut Range<u64>, out: &mut [Range<u64>]) -> usize {
        let mut sink = Ranges { out, filled: 0 };
        self.harvest::<true, _>(within, &mut sink);
        if sink.filled > 0 {
            barrier::heavy();
        }
        sink.filled
    }
}
