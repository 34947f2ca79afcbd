//! Objects in this process's memory.

use super::table::Table;
use super::{ObjectId, ObjectStore};
use std::convert::Infallible;
use std::sync::{PoisonError, RwLock};

type Slot = RwLock<Option<Box<[u8]>>>;

/// Keeps objects in memory, each in an allocation of its own.
///
/// An object has a lock of its own, which is held for writing only while the object comes or goes:
/// readers never wait for each other, and nobody waits for what is done to another object.
pub struct MemoryStore {
    slots: Table<Slot>,
}

impl MemoryStore {
    /// An empty store.
    pub fn new() -> Self {
        MemoryStore { slots: Table::new() }
    }

    fn set(&self, id: ObjectId, object: Option<Box<[u8]>>) {
        *self.slots.ensure(id.0).write().unwrap_or_else(PoisonError::into_inner) = object;
    }
}

impl Default for MemoryStore {
    fn default() -> Self {
        Self::new()
    }
}

impl ObjectStore for MemoryStore {
    type Error = Infallible;

    fn put(&self, id: ObjectId, object: &[u8]) -> Result<(), Infallible> {
        self.set(id, Some(object.into()));
        Ok(())
    }

    fn with_object<R>(&self, id: ObjectId, f: impl FnOnce(Option<&[u8]>) -> R) -> R {
        let Some(slot) = self.slots.get(id.0) else { return f(None) };
        f(slot.read().unwrap_or_else(PoisonError::into_inner).as_deref())
    }

    fn remove(&self, id: ObjectId) {
        self.set(id, None);
    }
}
