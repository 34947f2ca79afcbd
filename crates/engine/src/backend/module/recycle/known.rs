//! The guests that are known, and the processes that were looked at.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Instant;

use super::process::Qemu;
use super::sweep::Sweeper;
use crate::backend::module::file::File;
use crate::backend::module::owner::Owner;
use crate::core::recycle::state::Recycling;
use crate::sync::{Condvar, Mutex};
use crate::world::shared::Shared;

/// A guest whose free pages are punched.
pub(super) struct Guest {
    pub(super) qemu: Arc<Qemu>,
    /// Locked for as long as somebody has a session with QEMU's monitor.
    pub(super) sweeper: Mutex<Sweeper>,
    pub(super) recycling: Arc<Mutex<Recycling>>,
    pub(super) files: Vec<Arc<File>>,
}

pub(super) struct Looked {
    pub(super) owner: Arc<Owner>,
    /// Once it was found to have a pool: the file that tells of it.
    pub(super) told: Option<(Arc<File>, Arc<Mutex<Recycling>>)>,
    /// Once it is known where its RAM lies.
    pub(super) guest: Option<Arc<Guest>>,
}

impl Looked {
    pub(super) fn end(&mut self) {
        self.guest.take().iter().for_each(|guest| guest.end());
        if let Some((file, recycling)) = &self.told {
            file.untold(recycling);
        }
    }
}

/// The processes that have files open, by their numbers.
#[derive(Default)]
pub(crate) struct Known {
    pub(super) all: Mutex<BTreeMap<i32, Looked>>,
    pub(super) wake: Condvar,
}

impl Known {
    pub(super) fn tell(&self, pid: i32, file: &Arc<File>, recycling: &Arc<Mutex<Recycling>>) {
        if let Some(looked) = self.all.lock().get_mut(&pid) {
            looked.told = Some((file.clone(), recycling.clone()));
            file.state().recycling = Some(recycling.clone());
        }
        self.wake.notify_all();
    }

    /// The process has been looked at, and is this guest.
    pub(super) fn add(&self, pid: i32, guest: Arc<Guest>) {
        if let Some(looked) = self.all.lock().get_mut(&pid) {
            looked.guest = Some(guest);
        }
        self.wake.notify_all();
    }

    /// The file is gone, and with it the guest that had it as RAM.
    pub(in super::super) fn forget(&self, file: &Arc<File>) {
        let has = |guest: &Arc<Guest>| guest.files.iter().any(|other| Arc::ptr_eq(other, file));
        for looked in self.all.lock().values_mut() {
            if looked.guest.as_ref().is_some_and(has) {
                looked.end();
            }
        }
    }

    /// Ends the thread; the engine is stopping.
    pub(in super::super) fn wake(&self) {
        // Under the lock: the thread is between its look and its wait otherwise.
        drop(self.all.lock());
        self.wake.notify_all();
    }

    /// Lets those go that have ended. Returns the guests.
    pub(super) fn reap(&self) -> Vec<Arc<Guest>> {
        let mut all = self.all.lock();
        all.retain(|_, looked| {
            let lives = looked.owner.lives();
            if !lives {
                looked.end();
            }
            lives
        });
        all.values().filter_map(|looked| looked.guest.clone()).collect()
    }
}

impl Guest {
    /// Sweeps if it is time. Returns when to look again; `None`: never.
    pub(super) fn look(&self, shared: &Shared) -> Option<Instant> {
        {
            let mut recycling = self.recycling.lock();
            if !recycling.is_due(Instant::now()) {
                return Some(recycling.due);
            }
        }
        // The device is being plugged, which may take minutes.
        let Some(mut sweeper) = self.sweeper.try_lock() else { return Some(self.recycling.lock().due) };
        sweeper.ground.drain();
        let budget = {
            let recycling = self.recycling.lock();
            if recycling.may_be_swept() { recycling.budget(&shared.pacer) } else { None }
        };
        if let Some(budget) = budget {
            sweeper.sweep(&self.files, budget, &self.recycling, || shared.stopping());
        }
        Some(self.recycling.lock().due)
    }

    /// Its process has ended: what it recycled counts for its first file.
    fn end(&self) {
        let recycled = self.recycling.lock().totals.pages;
        for (at, file) in self.files.iter().enumerate() {
            file.untold(&self.recycling);
            let mut state = file.state();
            state.region.free = None;
            state.totals.recycled += if at == 0 { recycled } else { 0 };
        }
    }
}
