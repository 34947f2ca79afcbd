//! The numbers of segments: inode numbers, by which clients and the state file name them.
//!
//! Each file system counts its inodes on its own. So a file on a mount for stores may have the
//! number of a memfd, or of a file on another such mount. A segment is made of another file then:
//! no two segments that this daemon knows have one number, unless it is one file.

use std::collections::{BTreeMap, BTreeSet};

use parking_lot::Mutex;
use wire::SegmentId;

/// How many segments have each number.
static USED: Mutex<BTreeMap<SegmentId, u32>> = Mutex::new(BTreeMap::new());
/// Numbers of segments that earlier daemons made.
static EARLIER: Mutex<BTreeSet<SegmentId>> = Mutex::new(BTreeSet::new());

/// A segment has this number as long as this is kept.
pub(super) struct Id(SegmentId);

impl Id {
    /// The number of a segment that another process may know already.
    pub(super) fn of(id: SegmentId) -> Self {
        *USED.lock().entry(id).or_default() += 1;
        Self(id)
    }

    /// The number of a segment that is being made. `None`: another has it, or may have it.
    pub(super) fn new(id: SegmentId) -> Option<Self> {
        let mut used = USED.lock();
        if used.contains_key(&id) || EARLIER.lock().contains(&id) {
            return None;
        }
        used.insert(id, 1);
        Some(Self(id))
    }

    pub(super) fn get(&self) -> SegmentId {
        self.0
    }
}

impl Drop for Id {
    fn drop(&mut self) {
        let mut used = USED.lock();
        if let Some(count) = used.get_mut(&self.0) {
            *count -= 1;
            if *count == 0 {
                used.remove(&self.0);
            }
        }
    }
}

/// Segments of earlier daemons have these numbers, and clients may still hold them.
pub(crate) fn made_earlier(ids: impl Iterator<Item = SegmentId>) {
    EARLIER.lock().extend(ids);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_new_segment_has_a_number_of_its_own() {
        let first = u64::MAX - 10;
        let held = Id::new(first).unwrap();
        assert!(Id::new(first).is_none());
        let again = Id::of(first);
        drop(held);
        assert!(Id::new(first).is_none(), "one segment has it still");
        drop(again);
        assert_eq!(Id::new(first).map(|id| id.get()), Some(first));
        made_earlier([first + 1].into_iter());
        assert!(Id::new(first + 1).is_none());
    }
}
