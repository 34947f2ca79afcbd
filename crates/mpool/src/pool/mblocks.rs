//! The mblocks of a pool: allocate, find, list, delete.

use std::sync::atomic::Ordering;

use super::Pool;
use crate::disk::record::Record;
use crate::error::{Object, ObjectError};
use crate::objects::info::MblockProps;
use crate::objects::mblock::{Allocation, Mblock, MblockWriter};

impl Pool {
    /// Allocates an mblock, to be written and committed.
    ///
    /// # Errors
    ///
    /// `Full`, `NoClass`, `ReadOnly`, `Io`.
    pub fn mblock_alloc(&self, allocation: Allocation) -> Result<MblockWriter, ObjectError> {
        self.inner.check_writable()?;
        let mut first_error = None;
        for class in allocation.classes() {
            let taken = self.inner.class(class).and_then(|class| Ok((class.take(allocation.capacity)?, class)));
            match taken {
                Ok((extent, class)) => {
                    let id = self.inner.meta().new_id();
                    return Ok(MblockWriter::new(self.inner.clone(), class, id, allocation.capacity, extent));
                }
                Err(e) => first_error = first_error.or(Some(e)),
            }
        }
        Err(first_error.unwrap_or(ObjectError::NoClass(allocation.class)))
    }

    /// Finds a committed mblock.
    ///
    /// # Errors
    ///
    /// `NotFound`; `NoClass`: its class is missing.
    pub fn mblock(&self, id: u64) -> Result<Mblock, ObjectError> {
        let info = self.inner.meta().tables.mblocks.get(&id).cloned();
        let info = info.ok_or(ObjectError::NotFound(Object::Mblock(id)))?;
        Ok(Mblock { class: self.inner.class(info.record.class)?, info })
    }

    /// All committed mblocks, by identity.
    pub fn mblocks(&self) -> Vec<MblockProps> {
        let mut all: Vec<_> = self.inner.meta().tables.mblocks.values().map(|m| m.props()).collect();
        all.sort_by_key(|m| m.id);
        all
    }

    /// Deletes mblocks: all of them, or after an error none. When this returns, they stay deleted
    /// and their space is free.
    ///
    /// # Errors
    ///
    /// `NotFound`, `Mapped`, `ReadOnly`, `Failed`, `Io`.
    pub fn mblock_delete(&self, ids: &[u64]) -> Result<(), ObjectError> {
        self.inner.check_writable()?;
        let mut meta = self.inner.meta();
        let mut infos = Vec::new();
        for &id in ids {
            let object = Object::Mblock(id);
            let info = meta.tables.mblocks.get(&id).cloned().ok_or(ObjectError::NotFound(object))?;
            let times = info.maps.load(Ordering::Acquire);
            if times > 0 {
                return Err(ObjectError::Mapped { object, times });
            }
            infos.push(info);
        }
        // An mblock that is named twice must not be freed twice.
        infos.sort_by_key(|info| info.record.id);
        infos.dedup_by_key(|info| info.record.id);
        let records: Vec<Record> = infos.iter().map(|info| Record::MblockGone(info.record.id)).collect();
        meta.commit(&records, true)?;
        for info in infos {
            info.deleted.store(true, Ordering::Release);
            if let Ok(class) = self.inner.class(info.record.class) {
                class.give(info.extent());
            }
        }
        Ok(())
    }
}
