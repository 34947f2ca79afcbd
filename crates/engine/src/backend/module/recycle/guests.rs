//! Guests come, are swept, and go.

use std::sync::Arc;
use std::time::{Duration, Instant};

use super::find::{self, Managed};
use super::known::{Known, Looked};
use crate::backend::module::file::File;
use crate::backend::module::owner::Owner;
use crate::world::shared::Shared;

/// How often it is looked whether guests have ended, at least. Without guests the thread rests.
const IDLE: Duration = Duration::from_secs(1);

/// Looks for a pool in processes that have one of these files open, each once.
pub(in super::super) fn find_guests(files: &Arc<impl Managed>, shared: &Arc<Shared>, all: &[(Arc<File>, Arc<Owner>)]) {
    files.guests().reap();
    for (file, owner) in all {
        let (owner, file) = (owner.clone(), file.clone());
        let mut all = files.guests().all.lock();
        if all.get(&owner.pid).is_some_and(|looked| looked.owner.lives()) {
            continue;
        }
        let before = all.insert(owner.pid, Looked { owner: owner.clone(), told: None, guest: None });
        drop(all);
        before.into_iter().for_each(|mut looked| looked.end());
        find::start(files, shared, find::Subject { owner, file });
    }
}

impl Known {
    /// The process of this number, if it is a guest with a pool.
    pub(crate) fn owner(&self, pid: i32) -> Option<Arc<Owner>> {
        self.all.lock().get(&pid).filter(|looked| looked.told.is_some()).map(|looked| looked.owner.clone())
    }

    /// The same process as it is known here, where its name was asked.
    pub(in super::super) fn same(&self, owner: &Arc<Owner>) -> Arc<Owner> {
        let all = self.all.lock();
        let known = all.get(&owner.pid).map(|looked| &looked.owner).filter(|known| known.lives());
        known.unwrap_or(owner).clone()
    }

    /// The thread: sweeps where one is due, until the engine stops.
    pub(crate) fn run(&self, shared: &Shared) {
        while !shared.stopping() {
            let next = self.reap().iter().filter_map(|guest| guest.look(shared)).min();
            let mut all = self.all.lock();
            if !shared.stopping() {
                let wait = next.map_or(IDLE, |next| next.saturating_duration_since(Instant::now()).min(IDLE));
                match all.values().any(|looked| looked.told.is_some()) {
                    true => _ = self.wake.wait_for(&mut all, wait),
                    false => self.wake.wait(&mut all),
                }
            }
        }
    }
}
