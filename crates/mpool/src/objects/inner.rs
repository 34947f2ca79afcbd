//! An open pool, as its objects see it.

use std::path::PathBuf;
use std::sync::Arc;

use parking_lot::{Mutex, MutexGuard, RwLock};

use crate::MediaClass;
use crate::disk::medium::Storage;
use crate::disk::superblock::{State, Superblock, write_superblock};
use crate::error::ObjectError;
use crate::finding::Finding;
use crate::objects::class::Class;
use crate::objects::meta::Meta;

/// Whether others may open the pool at the same time.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Access {
    /// No: for reading and writing.
    #[default]
    Exclusive,
    /// Yes, any number; all for reading only.
    Shared,
}

/// What the handles of an open pool share: the pool is closed when the last of them is gone.
pub(crate) struct Inner {
    pub(crate) storage: Arc<dyn Storage>,
    pub(crate) path: PathBuf,
    pub(crate) superblock: Superblock,
    pub(crate) access: Access,
    pub(crate) classes: RwLock<[Option<Arc<Class>>; 3]>,
    pub(crate) metadata: Mutex<Meta>,
    /// Findings of opening the pool.
    pub(crate) findings: Vec<Finding>,
}

impl Inner {
    pub(crate) fn meta(&self) -> MutexGuard<'_, Meta> {
        self.metadata.lock()
    }

    pub(crate) fn class(&self, class: MediaClass) -> Result<Arc<Class>, ObjectError> {
        let classes = self.classes.read();
        classes[class as usize].clone().ok_or(ObjectError::NoClass(class))
    }

    pub(crate) fn access(&self) -> Access {
        self.access
    }

    pub(crate) fn check_writable(&self) -> Result<(), ObjectError> {
        if self.access == Access::Shared { Err(ObjectError::ReadOnly) } else { Ok(()) }
    }
}

impl Drop for Inner {
    fn drop(&mut self) {
        if self.access == Access::Shared {
            return;
        }
        let end = self.meta().close();
        if let (Some(end), Ok(class)) = (end, self.class(MediaClass::Capacity)) {
            // Without it, an end that is missing when the pool is opened looks unfinished.
            let _ = write_superblock(&*class.medium, &self.superblock.in_state(State::Closed(end)));
        }
    }
}
