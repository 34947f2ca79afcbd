//! The mblocks of a pool: allocate, find, list, delete.

use std::collections::HashSet;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use super::Pool;
use crate::disk::log::Reserve;
use crate::disk::record::Record;
use crate::error::{Object, ObjectError};
use crate::objects::info::{MblockInfo, MblockProps};
use crate::objects::mblock::{Allocation, Mblock, MblockWriter};
use crate::objects::meta::Meta;

/// So many records of deletions fit into half of what a log keeps for them.
const DELETED_AT_ONCE: usize = 500;

impl Pool {
    /// Allocates an mblock, to be written and committed.
    ///
    /// # Errors
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
                // That a class is full says more than that a pool does not have another one.
                Err(e) => first_error = first_error.filter(|e| !matches!(e, ObjectError::NoClass(_))).or(Some(e)),
            }
        }
        Err(first_error.unwrap_or(ObjectError::NoClass(allocation.class)))
    }

    /// Finds a committed mblock.
    ///
    /// # Errors
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

    /// Deletes mblocks. When this returns, they stay deleted and their space is free. They are
    /// deleted in the order given, some at a time, which a full medium has room for too; after an
    /// error of the medium the first of them may be gone.
    ///
    /// # Errors
    /// `NotFound`, `Mapped`: none was deleted. `ReadOnly`, `Failed`, `Io`.
    pub fn mblock_delete(&self, ids: &[u64]) -> Result<(), ObjectError> {
        self.inner.check_writable()?;
        let infos = self.let_go(ids)?;
        let stay = |infos: &[Arc<MblockInfo>]| {
            let _lock = self.inner.meta();
            infos.iter().for_each(|info| info.leaving.store(false, Ordering::Release));
        };
        for (i, some) in infos.chunks(DELETED_AT_ONCE).enumerate() {
            let records = some.iter().map(|info| Record::MblockGone(info.record.id)).collect();
            if let Err(e) = self.inner.commit(records, Reserve::Use) {
                stay(&infos[i * DELETED_AT_ONCE..]);
                return Err(e);
            }
            for info in some {
                info.deleted.store(true, Ordering::Release);
                if let Ok(class) = self.inner.class(info.record.class) {
                    class.give(info.extent());
                }
            }
        }
        Ok(())
    }

    /// Marks mblocks, so that nobody maps them or deletes them too: all of them, or none.
    fn let_go(&self, ids: &[u64]) -> Result<Vec<Arc<MblockInfo>>, ObjectError> {
        let meta = self.inner.meta();
        // An mblock that is named twice must not be freed twice.
        let mut seen = HashSet::new();
        let ids = ids.iter().filter(|&&id| seen.insert(id));
        let infos = ids.map(|&id| may_go(&meta, id)).collect::<Result<Vec<_>, _>>()?;
        infos.iter().for_each(|info| info.leaving.store(true, Ordering::Release));
        Ok(infos)
    }
}

/// A committed mblock that nobody has mapped.
fn may_go(meta: &Meta, id: u64) -> Result<Arc<MblockInfo>, ObjectError> {
    let object = Object::Mblock(id);
    let info = meta.tables.mblocks.get(&id).filter(|info| !info.leaving.load(Ordering::Acquire));
    let info = info.cloned().ok_or(ObjectError::NotFound(object))?;
    match info.maps.load(Ordering::Acquire) {
        0 => Ok(info),
        times => Err(ObjectError::Mapped { object, times }),
    }
}
