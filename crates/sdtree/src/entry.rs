//! A key for several calls.

use crate::key::Key;
use crate::tree::SdTree;
use crate::{Handle, Insert, KeySource};

/// A key of a tree, from [`SdTree::entry`]: present or not.
///
/// The key is mixed once for all calls. Each call is linearisable by itself, and nothing is held
/// between calls: other threads may insert or remove the key at any time.
///
/// ```
/// # use sdtree::{Handle, Insert, KeySource, SdTree};
/// # struct Words([&'static str; 2]);
/// # impl KeySource for Words {
/// #     fn with_key<R>(&self, handle: Handle, f: impl FnOnce(Option<&[u8]>) -> R) -> R {
/// #         f(self.0.get(handle.0 as usize).map(|word| word.as_bytes()))
/// #     }
/// # }
/// let tree = SdTree::new(Words(["tree", "tree"]));
/// let entry = tree.entry(b"tree");
/// assert_eq!(entry.get(), None);
/// assert_eq!(entry.or_insert_with(|| Handle(0)), Handle(0));
/// assert_eq!(entry.or_insert_with(|| unreachable!("it is there")), Handle(0));
/// assert_eq!(entry.upsert(Handle(1)), Some(Handle(0)));
/// assert_eq!(entry.remove(), Some(Handle(1)));
/// ```
pub struct Entry<'t, K: KeySource> {
    pub(crate) tree: &'t SdTree<K>,
    pub(crate) key: Key<'t>,
}

impl<K: KeySource> SdTree<K> {
    /// The key `key`, for several calls: it is mixed once.
    pub fn entry<'t>(&'t self, key: &'t [u8]) -> Entry<'t, K> {
        Entry { tree: self, key: self.mixer.key(key) }
    }

    /// Removes `key`, whatever its handle is. Returns the handle under which it was stored.
    ///
    /// The source must still have the key: it is compared.
    pub fn remove_key(&self, key: &[u8]) -> Option<Handle> {
        self.entry(key).remove()
    }
}

impl<K: KeySource> Entry<'_, K> {
    /// [`SdTree::query`].
    pub fn get(&self) -> Option<Handle> {
        self.tree.query_key(&self.key)
    }

    /// [`SdTree::insert`].
    ///
    /// # Panics
    /// As [`SdTree::insert`].
    pub fn insert(&self, handle: Handle) -> Insert {
        self.tree.insert_key::<false>(&self.key, handle)
    }

    /// The key's handle. If it is not there, `make` makes one, which is inserted.
    ///
    /// If another thread inserts the key while `make` runs, that thread's handle is returned, and
    /// the one that `make` made is not in the tree.
    ///
    /// # Panics
    /// As [`SdTree::insert`].
    pub fn or_insert_with(&self, make: impl FnOnce() -> Handle) -> Handle {
        self.get().unwrap_or_else(|| {
            let handle = make();
            match self.insert(handle) {
                Insert::Inserted => handle,
                Insert::Exists(there) => there,
            }
        })
    }

    /// [`SdTree::upsert`].
    ///
    /// # Panics
    /// As [`SdTree::insert`].
    pub fn upsert(&self, handle: Handle) -> Option<Handle> {
        match self.tree.insert_key::<true>(&self.key, handle) {
            Insert::Inserted => None,
            Insert::Exists(before) => Some(before),
        }
    }

    /// [`SdTree::remove_key`].
    pub fn remove(&self) -> Option<Handle> {
        loop {
            let handle = self.get()?;
            if self.remove_handle(handle) {
                return Some(handle);
            }
        }
    }

    /// [`SdTree::remove`].
    pub fn remove_handle(&self, handle: Handle) -> bool {
        self.tree.remove_from(&self.key, handle)
    }
}
