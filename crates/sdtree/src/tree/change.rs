//! The steps of insertions and removals: the way to a leaf, comparing, flagging and unlinking.

use super::{Path, SdTree, Step};
use crate::directory::Directory;
use crate::epoch::Pin;
use crate::key::{Key, first_difference};
use crate::primitive::Ordering;
use crate::word::{self, FLAG, LEAF, RECORD, TAG, handle, is_inner, is_record, position};
use crate::{Handle, KeySource};
use Ordering::{AcqRel, Acquire, Relaxed};

/// How the key of a leaf, read now, compares with the key of an insertion.
pub(super) enum Comparison {
    Same,
    /// They differ first at this position.
    Differ(u16),
    /// The leaf's key is gone, or is not the key that was inserted.
    Stale,
}

impl<K: KeySource> SdTree<K> {
    /// Follows `key` down to a leaf, and finishes the removals and moves whose tagged links lie on
    /// the way. Returns the directory in which the way begins.
    pub(super) fn seek<'p>(&self, pin: &'p Pin<'_>, key: &Key<'_>, path: &mut Path<'p>) -> &'p Directory {
        'again: loop {
            path.clear();
            let mut dir = self.current(pin);
            let mut slot = dir.slot(key.head);
            let mut step = Step { slot, word: slot.load(Acquire) };
            while step.word & TAG != 0 {
                let Some(next) = self.directory(&dir.next, pin) else {
                    unreachable!("a slot is frozen for the next directory")
                };
                self.move_unit(pin, dir, next, dir.unit(next, key.head));
                dir = next;
                slot = dir.slot(key.head);
                step = Step { slot, word: slot.load(Acquire) };
            }
            while is_inner(step.word) {
                let side = key.bit(position(step.word));
                let slot = &self.node(step.word, pin).0[side];
                let next = Step { slot, word: slot.load(Acquire) };
                if next.word & TAG != 0 {
                    self.unlink(pin, dir, step, side ^ 1);
                    continue 'again;
                }
                path.push(step);
                step = next;
            }
            path.push(step);
            return dir;
        }
    }

    /// Makes the record of a key: what later insertions need to know of it, so that they need not
    /// ask for it.
    #[cold]
    pub(super) fn record(&self, pin: &Pin<'_>, key: &Key<'_>, leaf: u64) -> u64 {
        let link = word::inner(self.far.allocate(&self.epoch, pin), RECORD);
        let node = self.node(link, pin);
        node.0[0].store(leaf, Relaxed);
        node.0[1].store(word::leaf(key.recorded(), key.head) | FLAG, Relaxed);
        link
    }

    /// The first position at which `key` differs from the key of the leaf at the end of `path`,
    /// which has the same fingerprint, if that key has a record and the record tells. Like a
    /// fingerprint, a record is of the key that was inserted, so nothing can mislead.
    pub(super) fn recorded_difference(&self, pin: &Pin<'_>, key: &Key<'_>, path: &Path<'_>) -> Option<u16> {
        let above = path[path.len().checked_sub(2)?].word;
        let record = is_record(above).then(|| self.node(above, pin).load(1))?;
        key.recorded_difference(handle(record))
    }

    /// Whether the record that led a search to `leaf` says that this is another key's leaf.
    #[cold]
    pub(super) fn differs_from_record(&self, pin: &Pin<'_>, key: &Key<'_>, above: u64, leaf: u64) -> bool {
        word::same_fingerprint(leaf, word::leaf(0, key.head))
            && key.recorded_difference(handle(self.node(above, pin).load(1))).is_some()
    }

    /// Compares `key` with the key of the leaf at the end of `path`, which has the same
    /// fingerprint.
    pub(super) fn compare(&self, pin: &Pin<'_>, key: &Key<'_>, path: &Path<'_>) -> Comparison {
        let end = path[path.len() - 1].word;
        let branches = || path.iter().rev().skip(1).map(|step| position(step.word));
        let comparison = self.source.with_key(Handle(handle(end)), |stored| {
            let Some(stored) = stored.map(|stored| self.mixer.key(stored)) else {
                return Comparison::Stale;
            };
            let Some(place) = first_difference(key, &stored) else {
                return Comparison::Same;
            };
            // The key that was inserted here has this fingerprint, and has the bits of `key` at all
            // positions where the path branches.
            let fits = |branch| key.bit(branch) == stored.bit(branch);
            if word::same_fingerprint(end, word::leaf(0, stored.head)) && branches().all(fits) {
                Comparison::Differ(place)
            } else {
                Comparison::Stale
            }
        });
        match comparison {
            Comparison::Differ(place) if !self.confirmed(pin, key, path, place) => Comparison::Stale,
            other => other,
        }
    }

    /// Whether a second key agrees that `key` leaves the others at `place`. The second key is from
    /// the other side of the node above which `key` would go. Without a second key, or if it has
    /// changed itself, the first one is believed.
    fn confirmed(&self, pin: &Pin<'_>, key: &Key<'_>, path: &Path<'_>, place: u16) -> bool {
        let below = path[place_in(path, place)].word;
        if !is_inner(below) {
            return true;
        }
        let side = key.bit(position(below)) ^ 1;
        let mut link = self.node(below, pin).load(side);
        while is_inner(link) {
            let node = self.node(link, pin);
            link = node.load(0);
            if link & FLAG != 0 {
                link = node.load(1);
            }
        }
        if link & (FLAG | LEAF) != LEAF {
            return true;
        }
        self.source.with_key(Handle(handle(link)), |second| {
            let Some(second) = second.map(|second| self.mixer.key(second)) else { return true };
            let above = path.iter().map(|step| step.word).take_while(|&word| is_inner(word) && position(word) < place);
            let fits = above.map(position).all(|branch| key.bit(branch) == second.bit(branch))
                && word::same_fingerprint(link, word::leaf(0, second.head))
                && second.bit(position(below)) == side;
            !fits || first_difference(key, &second) == Some(place)
        })
    }

    /// [`SdTree::remove_leaf`], where it is seldom called.
    #[cold]
    #[inline(never)]
    pub(super) fn drop_leaf(&self, pin: &Pin<'_>, key: &Key<'_>, leaf: u64) -> bool {
        self.remove_leaf(pin, key, leaf)
    }

    /// Removes the leaf `leaf` if `key` leads to it. Returns whether this call removed it.
    pub(super) fn remove_leaf(&self, pin: &Pin<'_>, key: &Key<'_>, leaf: u64) -> bool {
        let mut path = Path::new();
        let mut flagged = false; // by us: it is removed, and only to be unlinked
        loop {
            let dir = self.seek(pin, key, &mut path);
            let end = path[path.len() - 1];
            if end.word == leaf && !flagged {
                if end.slot.compare_exchange(leaf, leaf | FLAG, AcqRel, Relaxed).is_err() {
                    continue;
                }
                flagged = true;
            } else if end.word != leaf | FLAG && !(flagged && end.word & FLAG != 0) {
                break;
            }
            // Flagged by this thread, or by another one that is helped; or what its record left
            // behind. In a slot of the directory it may stay.
            if self.unlink_all(pin, dir, key, &path) || !flagged {
                break;
            }
        }
        if flagged {
            let look = pin.count_removed();
            if look {
                self.epoch.tick();
            }
            self.upkeep(pin);
            if look {
                self.look(pin);
            }
        }
        flagged
    }

    /// Unlinks the flagged leaf at the end of `path`, unless it may stay. `false`: there is more to
    /// unlink.
    #[inline]
    fn unlink_all(&self, pin: &Pin<'_>, dir: &Directory, key: &Key<'_>, path: &Path<'_>) -> bool {
        let [.., above, _] = path.as_slice() else { return true };
        let above = above.word;
        self.unlink_leaf(pin, dir, key, path) && !is_record(above)
    }

    /// Unlinks the flagged leaf at the end of `path`. `false`: another change came first there.
    pub(super) fn unlink_leaf(&self, pin: &Pin<'_>, dir: &Directory, key: &Key<'_>, path: &Path<'_>) -> bool {
        let parent = path[path.len() - 2];
        self.unlink(pin, dir, parent, key.bit(position(parent.word)))
    }

    /// Replaces a node by the sibling of its flagged leaf, which is on side `dead`. Does nothing if
    /// there is no such leaf: then the node is frozen because its slot is being moved.
    fn unlink(&self, pin: &Pin<'_>, dir: &Directory, step: Step<'_>, dead: usize) -> bool {
        let node = self.node(step.word, pin);
        if node.load(dead) & FLAG == 0 {
            return false;
        }
        let sibling = node.0[dead ^ 1].fetch_or(TAG, AcqRel) & !TAG; // its flag, if it has one, goes along
        let done = step.slot.compare_exchange(step.word, sibling, AcqRel, Relaxed).is_ok();
        if done {
            self.pool(dir, position(step.word)).retire(pin, word::address(step.word), dead);
        }
        done
    }
}

/// The step of a path whose link goes below a new node that branches at `place`.
pub(super) fn place_in(path: &Path<'_>, place: u16) -> usize {
    path.partition_point(|step| is_inner(step.word) && position(step.word) < place)
}
