//! Walking a whole tree, slot by slot.

use std::ops::Range;

use super::SdTree;
use crate::directory::Directory;
use crate::epoch::Pin;
use crate::key::{Key, first_difference};
use crate::primitive::Ordering::Acquire;
use crate::word::{self, FLAG, LEAF, TAG, VACANT, handle, is_inner, position};
use crate::{Handle, KeySource};

/// The handles of a tree, from [`SdTree::iter`].
///
/// Weakly consistent. A key that is in the tree throughout is seen exactly once. A key that comes
/// or goes meanwhile may be seen or not; one that goes and comes back may be seen twice.
///
/// While this lives, no memory of the tree is reclaimed; it need not run to its end. The tree may
/// be changed meanwhile, by this thread too.
pub struct Iter<'t, K: KeySource> {
    pub(crate) tree: &'t SdTree<K>,
    pub(crate) pin: Pin<'t>,
    /// The directory in which the walk began. Like those in `todo` it was read under `pin`.
    dir: *const Directory,
    /// Its slots that are not visited yet.
    slots: Range<usize>,
    /// The last one to be visited comes first.
    todo: Vec<Todo>,
    /// From the last key to the first one.
    pub(crate) backward: bool,
    /// The first bits of the heads of all keys in the slot that is being visited.
    first_bits: u64,
}

enum Todo {
    Slot(*const Directory, usize),
    Link(u64),
}

impl<K: KeySource> SdTree<K> {
    /// All handles, in no particular order; in the tree of an [`OrderedTree`](crate::OrderedTree)
    /// in the order of the keys. [`Iter`] says what is seen while the tree changes.
    pub fn iter(&self) -> Iter<'_, K> {
        let pin = self.epoch.pin();
        let dir = self.current(&pin);
        let (dir, slots) = (std::ptr::from_ref(dir), 0..dir.slots.len());
        Iter { tree: self, pin, dir, slots, todo: Vec::new(), backward: false, first_bits: 0 }
    }

    /// Calls `f` for every handle: [`iter`](SdTree::iter) in other words. `f` may change the tree.
    pub fn for_each(&self, f: impl FnMut(Handle)) {
        self.iter().for_each(f);
    }

    /// Removes every key for whose handle `f` returns `false`.
    ///
    /// Weakly consistent, as [`iter`](SdTree::iter). The source is asked only for keys that agree
    /// with another key in the first 28 bits of their heads (in an ordered tree: of themselves).
    /// Such a key stays if the source does not have it; the next insertion that meets it drops it.
    pub fn retain(&self, mut f: impl FnMut(Handle) -> bool) {
        let mut all = self.iter();
        while let Some(leaf) = all.next_leaf() {
            let handle = Handle(handle(leaf));
            if f(handle) {
                continue;
            }
            // What is known of the head suffices, unless nodes behind the fingerprint lead there.
            let head = word::known_head(all.first_bits, leaf);
            let remove = |key: Key<'_>| self.drop_leaf(&all.pin, &key, leaf);
            if !remove(self.mixer.with_head(head, &[])) {
                self.keys().with_key(handle, |key| key.is_some_and(|key| remove(self.mixer.key(key))));
            }
        }
    }
}

impl<'t, K: KeySource> IntoIterator for &'t SdTree<K> {
    type Item = Handle;
    type IntoIter = Iter<'t, K>;

    fn into_iter(self) -> Iter<'t, K> {
        self.iter()
    }
}

impl<K: KeySource> Iterator for Iter<'_, K> {
    type Item = Handle;

    fn next(&mut self) -> Option<Handle> {
        self.next_leaf().map(|leaf| Handle(handle(leaf)))
    }
}

impl<K: KeySource> Iter<'_, K> {
    /// The next link to a leaf that is not removed, without its mark.
    fn next_leaf(&mut self) -> Option<u64> {
        loop {
            match self.todo.pop() {
                Some(Todo::Link(link)) if is_inner(link) => {
                    let node = self.tree.node(link, &self.pin);
                    let [first, last] = if self.backward { [1, 0] } else { [0, 1] };
                    self.todo.extend([last, first].map(|side| Todo::Link(node.load(side))));
                }
                Some(Todo::Link(link)) if link & (FLAG | LEAF) == LEAF => return Some(link & !TAG),
                Some(Todo::Link(_)) => {}
                Some(Todo::Slot(dir, slot)) => self.visit(dir, slot),
                None => {
                    let slot = if self.backward { self.slots.next_back() } else { self.slots.next() };
                    self.visit(self.dir, slot?);
                }
            }
        }
    }

    fn visit(&mut self, dir: *const Directory, slot: usize) {
        let Some(dir) = self.tree.directory_at(dir, &self.pin) else { return };
        match self.split(dir, slot) {
            Ok(next) => {
                let order = if self.backward { [2 * slot, 2 * slot + 1] } else { [2 * slot + 1, 2 * slot] };
                self.todo.extend(order.map(|slot| Todo::Slot(next, slot)));
            }
            Err(link) => {
                self.first_bits = (slot as u64) << (64 - dir.bits);
                self.todo.push(Todo::Link(link));
            }
        }
    }

    /// The next directory, if the slot became two slots there; otherwise the slot's link.
    fn split(&self, dir: &Directory, slot: usize) -> Result<*const Directory, u64> {
        let link = dir.slots[slot].load(Acquire);
        if link & TAG != 0
            && let Some(next) = self.tree.directory(&dir.next, &self.pin)
            && next.bits > dir.bits
            && next.slots[2 * slot].load(Acquire) != VACANT
        {
            // Both slots are visited, and a key is in one of them. After a shrunk directory the
            // next one is not visited: the frozen links have all keys that are in the tree
            // throughout.
            return Ok(next);
        }
        Err(dir.slots[slot].load(Acquire))
    }

    /// Leaves out what comes before `start` in an ordered tree, or most of it. Nothing was visited
    /// yet.
    pub(crate) fn start_at(&mut self, start: &[u8]) {
        let key = self.tree.mixer.key(start);
        let mut dir = self.dir;
        while let Some(at) = self.tree.directory_at(dir, &self.pin) {
            let slot = (key.head >> (64 - at.bits)) as usize;
            if std::ptr::eq(at, self.dir) {
                self.slots.start = slot + 1;
            }
            match self.split(at, slot) {
                Ok(next) => {
                    if key.bit(at.bits as u16) == 0 {
                        self.todo.push(Todo::Slot(next, 2 * slot + 1));
                    }
                    dir = next;
                }
                Err(link) => return self.start_below(&key, link),
            }
        }
    }

    /// [`Iter::start_at`], below the link of a slot.
    fn start_below(&mut self, key: &Key<'_>, slot: u64) {
        let (tree, mut way, mut link) = (self.tree, Vec::new(), slot);
        while is_inner(link) {
            way.push(link);
            link = tree.node(link, &self.pin).load(key.bit(position(link)));
        }
        let leaf = link;
        // Where the way of `start` leaves the stored keys. Without a key there, nothing is left
        // out.
        let found = (leaf & (FLAG | LEAF) == LEAF).then(|| {
            tree.keys().with_key(Handle(handle(leaf)), |stored| {
                stored.map(|stored| first_difference(key, &tree.mixer.key(stored)))
            })
        });
        let Some(place) = found.flatten() else {
            self.todo.push(Todo::Link(slot));
            return;
        };
        let above = |&link: &u64| place.is_none_or(|place| position(link) < place);
        let below = way.partition_point(above);
        for &link in &way[..below] {
            if key.bit(position(link)) == 0 {
                self.todo.push(Todo::Link(tree.node(link, &self.pin).load(1)));
            }
        }
        // All keys below are on one side of `start`.
        if place.is_none_or(|place| key.bit(place) == 0) {
            self.todo.push(Todo::Link(way.get(below).copied().unwrap_or(leaf)));
        }
    }
}
