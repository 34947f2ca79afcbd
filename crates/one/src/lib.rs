//! ONE, the Object Non-duplicate Engine: every object is kept once, and counts its users.
//!
//! An object is any row of bytes: a page, a chunk of a file, a whole file. The user of this crate
//! supplies an [`ObjectStore`], which keeps the bytes. ONE finds out whether an object is there
//! already, gives it an identity, and counts references.
//!
//! ```
//! use one::{MemoryStore, One};
//! let one = One::new(MemoryStore::new());
//! let first = one.put(b"some bytes")?;
//! let again = one.put(b"some bytes")?;
//! assert!(first.new && !again.new && first.id == again.id);
//! assert_eq!(one.release(first.id)?, 1);
//! assert_eq!(one.release(first.id)?, 0); // the last user: the object is gone
//! assert_eq!(one.query(b"some bytes"), None);
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
//!
//! # How it works
//!
//! The index is one [`SdTree`](sdtree::SdTree). **An object of up to
//! [`MAX_KEY_LEN`](sdtree::MAX_KEY_LEN) bytes is its own key**: no digest is made of it, and the
//! comparison that ends a search of the tree is the proof of equality. A longer object has a
//! 128-bit digest for a key. ONE compares it with the stored object, byte by byte, before it counts
//! as the same. If two different objects have one key (their digests collide), the second is kept
//! as well, but is not found by content. That costs space, never a wrong answer. When the store has
//! lost an object, the next duplicate that is put takes its place.
//!
//! # Objects that outlive the engine
//!
//! Reading the store may be expensive, or its objects may be older than the engine. Then the user
//! makes the digests and keeps them beside the objects. Nothing is read to fill the index
//! ([`One::over`]) or to search it ([`One::find`]); [`One::put_by`] and [`One::claim`] compare byte
//! by byte all the same. The key of such an object is its digest, however short it is. An object is
//! found only in the way that it was put: use one way for all.
//!
//! ```
//! use one::{MemoryStore, ObjectId, ObjectStore, One};
//! let digest = |object: &[u8]| object.iter().fold(0, |sum, &byte| sum * 31 + u128::from(byte));
//! let store = MemoryStore::new();
//! store.put(ObjectId(0), b"from before")?;
//! let one = One::over(store, [digest(b"from before")]);
//! let found = one.find(digest(b"from before")).filter(|&id| one.claim(id, b"from before"));
//! assert_eq!(found, Some(ObjectId(0)));
//! assert!(one.put_by(digest(b"another"), b"another")?.new);
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
//!
//! # Races
//!
//! The count of an object decides. It goes from 0 to 1 once, when the object is made, and from 1 to
//! 0 once, by its last release: it is dead then, and stays so. A [`put`](One::put) takes its
//! reference by raising a count that is not 0. One that meets the last release comes first, and the
//! object lives on; or second, and stores it again under another identity. It never returns a dead
//! object, and does not wait for the releasing thread, but takes the dead object out of the tree
//! itself.
//!
//! Identities are used again, when all operations that ran at the release have ended
//! (`crossbeam-epoch`): within one operation an identity means one object. All operations are
//! lock-free as far as the store is.

/// The examples of the README are tests.
#[cfg(doctest)]
#[doc = include_str!("../README.md")]
struct Readme;

mod entry;
mod memory;
mod one;
mod pin;
mod table;

#[cfg(test)]
mod tests;

pub use memory::MemoryStore;
pub use one::One;

/// The name of an object while a reference is held; later it may become the name of another object.
#[derive(Copy, Clone, PartialEq, Eq, PartialOrd, Ord, Debug, Hash)]
pub struct ObjectId(pub u64);

/// Where objects live. Identities are small numbers, so that a store may be an array.
///
/// An object must stay as it is from [`put`](ObjectStore::put) to [`remove`](ObjectStore::remove).
/// A store that cannot promise that may answer `None` for an object that is gone. Then a duplicate
/// that is put is stored as new, and found from then on; the lost object is never taken for another
/// one.
///
/// ```
/// use one::{ObjectId, ObjectStore, One};
/// use std::sync::Mutex;
///
/// /// A store with room for eight objects.
/// #[derive(Default)]
/// struct Small(Mutex<[Option<Vec<u8>>; 8]>);
///
/// impl ObjectStore for Small {
///     type Error = &'static str;
///
///     fn put(&self, id: ObjectId, object: &[u8]) -> Result<(), &'static str> {
///         let mut slots = self.0.lock().unwrap();
///         *slots.get_mut(id.0 as usize).ok_or("no room")? = Some(object.to_vec());
///         Ok(())
///     }
///
///     fn with_object<R>(&self, id: ObjectId, f: impl FnOnce(Option<&[u8]>) -> R) -> R {
///         // Not under the lock: `f` may take its time.
///         let object = self.0.lock().unwrap().get(id.0 as usize).cloned().flatten();
///         f(object.as_deref())
///     }
///
///     fn remove(&self, id: ObjectId) {
///         self.0.lock().unwrap()[id.0 as usize] = None;
///     }
/// }
///
/// let one = One::new(Small::default());
/// let puts: Vec<_> = (0..9u8).map(|i| one.put(&[i])).collect();
/// assert!(puts[..8].iter().all(|put| put.is_ok()) && puts[8] == Err("no room"));
/// ```
pub trait ObjectStore {
    /// Why an object cannot be stored.
    type Error;

    /// Keeps `object` under `id`, which has no object now.
    ///
    /// # Errors
    ///
    /// The store's own. Nothing is kept then.
    fn put(&self, id: ObjectId, object: &[u8]) -> Result<(), Self::Error>;

    /// Calls `f` once with the object, or with `None` if there is no such object (any more). May be
    /// called for an object that is being removed.
    fn with_object<R>(&self, id: ObjectId, f: impl FnOnce(Option<&[u8]>) -> R) -> R;

    /// Forgets the object, if it has not lost it.
    fn remove(&self, id: ObjectId);
}

/// What [`One::put`] did.
#[derive(Copy, Clone, PartialEq, Eq, Debug)]
pub struct Put {
    /// The object's identity. The caller holds one more reference to it.
    pub id: ObjectId,
    /// Whether the object was stored now; otherwise it was there, and its bytes were compared.
    pub new: bool,
}

/// The identity names no object that is there.
#[derive(Copy, Clone, PartialEq, Eq, Debug, thiserror::Error)]
#[error("object {} is not there: it was released more often than it was put and retained", id.0)]
pub struct UnknownObject {
    /// The identity.
    pub id: ObjectId,
}
