//! The ordered mode: a tree whose positions follow the order of its keys.

use std::cmp::Ordering;
use std::ops::{Bound, Deref, RangeBounds};

use crate::directory::MIN_BITS;
use crate::key::Mixer;
use crate::tree::SdTree;
use crate::tree::iter::Iter;
use crate::{Handle, KeySource};

/// An [`SdTree`] that keeps its keys in order, as byte strings.
///
/// It has all functions of an [`SdTree`], by reference, and in addition those that need an order.
/// Keys are not mixed, so it is a plain PATRICIA trie below a directory for the first bits. A way
/// has as many nodes as there are positions at which keys differ. For most keys these are few. Keys
/// can be made for which they are as many as the key has bits; do not use an ordered tree for keys
/// that an attacker chooses. The directory grows only where keys are spread over its slots. A key
/// that agrees with another one in the first 28 bits costs a call of the source at each insertion
/// and each look-up that meets it.
///
/// ```
/// use sdtree::{Handle, KeySource, OrderedTree};
///
/// struct Words(Vec<&'static str>);
///
/// impl KeySource for Words {
///     fn with_key<R>(&self, handle: Handle, f: impl FnOnce(Option<&[u8]>) -> R) -> R {
///         f(self.0.get(handle.0 as usize).map(|word| word.as_bytes()))
///     }
/// }
///
/// let tree = OrderedTree::new(Words(vec!["pear", "apple", "fig", "apricot"]));
/// for (i, word) in tree.keys().0.iter().enumerate() {
///     tree.insert(word.as_bytes(), Handle(i as u64));
/// }
/// let words = |handles: &mut dyn Iterator<Item = Handle>| -> Vec<&str> {
///     handles.map(|handle| tree.keys().0[handle.0 as usize]).collect()
/// };
/// assert_eq!(words(&mut tree.iter()), ["apple", "apricot", "fig", "pear"]);
/// assert_eq!(words(&mut tree.range("b".."pear")), ["fig"]);
/// assert_eq!(words(&mut tree.prefix(b"ap")), ["apple", "apricot"]);
/// assert_eq!((tree.min(), tree.max()), (Some(Handle(1)), Some(Handle(0))));
/// ```
pub struct OrderedTree<K: KeySource>(pub(crate) SdTree<K>);

impl<K: KeySource> Deref for OrderedTree<K> {
    type Target = SdTree<K>;

    fn deref(&self) -> &SdTree<K> {
        &self.0
    }
}

impl<K: KeySource> OrderedTree<K> {
    /// An empty tree over the keys in `keys`.
    pub fn new(keys: K) -> Self {
        Self(SdTree::with(keys, Mixer::ordered(), MIN_BITS))
    }

    /// The handle of the first key.
    pub fn min(&self) -> Option<Handle> {
        self.iter().next()
    }

    /// The handle of the last key.
    pub fn max(&self) -> Option<Handle> {
        let mut iter = self.iter();
        iter.backward = true;
        iter.next()
    }

    /// The handles of the keys in `range`, in the order of their keys.
    ///
    /// Weakly consistent, as [`Iter`]. The source is asked for each key, and must have it: a key
    /// that it has lost is left out.
    pub fn range<B: AsRef<[u8]>>(&self, range: impl RangeBounds<B>) -> Range<'_, K> {
        let own = |bound: Bound<&B>| bound.map(|key| key.as_ref().to_vec());
        self.between(own(range.start_bound()), own(range.end_bound()))
    }

    /// The handles of the keys that begin with `prefix`, in the order of their keys. See
    /// [`range`](OrderedTree::range).
    pub fn prefix(&self, prefix: &[u8]) -> Range<'_, K> {
        // The first key behind them: the prefix with its last byte that can be raised raised.
        let mut end = prefix.to_vec();
        while end.pop_if(|last| *last == u8::MAX).is_some() {}
        let end = match end.last_mut() {
            Some(last) => {
                *last += 1;
                Bound::Excluded(end)
            }
            None => Bound::Unbounded,
        };
        self.between(Bound::Included(prefix.to_vec()), end)
    }

    /// [`SdTree::clear`].
    pub fn clear(&mut self) {
        self.0.clear();
    }

    fn between(&self, start: Bound<Vec<u8>>, end: Bound<Vec<u8>>) -> Range<'_, K> {
        let mut iter = self.iter();
        if let Bound::Included(key) | Bound::Excluded(key) = &start {
            iter.start_at(key);
        }
        Range { iter: Some(iter), start, end }
    }
}

impl<'t, K: KeySource> IntoIterator for &'t OrderedTree<K> {
    type Item = Handle;
    type IntoIter = Iter<'t, K>;

    fn into_iter(self) -> Iter<'t, K> {
        self.iter()
    }
}

/// Handles of an [`OrderedTree`], in the order of their keys; from [`OrderedTree::range`]. While
/// this lives, no memory of the tree is reclaimed.
pub struct Range<'t, K: KeySource> {
    /// `None` when the end was reached.
    iter: Option<Iter<'t, K>>,
    /// Unbounded as soon as a key was beyond it.
    start: Bound<Vec<u8>>,
    end: Bound<Vec<u8>>,
}

impl<K: KeySource> Iterator for Range<'_, K> {
    type Item = Handle;

    fn next(&mut self) -> Option<Handle> {
        let iter = self.iter.as_mut()?;
        while let Some(handle) = iter.next() {
            let place = iter.tree.keys().with_key(handle, |key| {
                let key = key?;
                let before = match &self.start {
                    Bound::Included(start) => key < start.as_slice(),
                    Bound::Excluded(start) => key <= start.as_slice(),
                    Bound::Unbounded => false,
                };
                let behind = match &self.end {
                    Bound::Included(end) => key > end.as_slice(),
                    Bound::Excluded(end) => key >= end.as_slice(),
                    Bound::Unbounded => false,
                };
                Some(if behind {
                    Ordering::Greater
                } else if before {
                    Ordering::Less
                } else {
                    Ordering::Equal
                })
            });
            match place {
                Some(Ordering::Equal) => {
                    self.start = Bound::Unbounded;
                    return Some(handle);
                }
                Some(Ordering::Greater) => break,
                _ => {}
            }
        }
        self.iter = None;
        None
    }
}
