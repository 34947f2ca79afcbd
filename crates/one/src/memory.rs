//! Objects in this process's memory.

use std::convert::Infallible;

use parking_lot::RwLock;

use crate::table::Table;
use crate::{ObjectId, ObjectStore};

type Slot = RwLock<Option<Box<[u8]>>>;

/// Keeps objects in memory, each in an allocation of its own.
///
/// Each object has its own lock, which is held for writing only while the object comes or goes.
/// Readers never wait for each other, and operations on different objects never wait for each
/// other.
pub struct MemoryStore {
    slots: Table<Slot>,
}

impl MemoryStore {
    /// An empty store.
    pub fn new() -> Self {
        Self { slots: Table::new() }
    }

    fn set(&self, id: ObjectId, object: Option<Box<[u8]>>) {
        *self.slots.ensure(id.0).write() = object;
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
        f(slot.read().as_deref())
    }

    fn remove(&self, id: ObjectId) {
        self.set(id, None);
    }
}
