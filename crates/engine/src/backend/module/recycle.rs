//! Free pages of guests whose RAM lies in files: the daemon punches them, without an agent.
//!
//! The guest marks its free pages in a pool (see [`ppr`]). The process that is the guest has pool
//! and monitor among its descriptors, as `pageone run --backend module --ppr` left them there.
//!
//! ```text
//!   process that has a file open ──▶ find    environment: pool, monitor; QEMU: where the RAM lies
//!                                     │
//!                                     ▼
//!   each reclaim period, marks? ──▶ sweep    claim ──▶ punch ──▶ ledger ──▶ release
//! ```
//!
//! A guest waits for a page that is claimed. Agents claim in the guest's own process; the daemon
//! may be killed between claim and release. So one daemon alone works on a pool, whose file it
//! locks (`flock(2)`). The kernel gives the lock to the next one when the last thread of the dead
//! one has left its last system call: then nothing is being punched any more, and what was claimed
//! is released ([`pool`]).
//!
//! The ledger has a page as recycled before it is released. What the guest writes afterwards has a
//! dirty bit, and so has what was punched: the scan asks the kernel which of them are still holes.

mod find;
mod plug;
mod pool;
mod process;
mod sweep;
#[cfg(test)]
mod tests;

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

use kmem::pidfd::PidFd;
use parking_lot::{Condvar, Mutex};

use super::Files;
use super::file::File;
use super::owner::Owner;
use crate::client::recycling::Recycling;
use crate::core::recycle::policy::{LOOK_AFTER, SWEEP_SHARE};
use crate::world::shared::Shared;
use process::Qemu;
use sweep::Sweeper;

/// How often it is looked whether guests have ended, at least. Without guests the thread rests.
const IDLE: Duration = Duration::from_secs(1);

/// A guest whose free pages are punched.
pub(super) struct Guest {
    qemu: Arc<Qemu>,
    /// Locked for as long as somebody has a session with QEMU's monitor.
    sweeper: Mutex<Sweeper>,
    recycling: Arc<Mutex<Recycling>>,
    files: Vec<Arc<File>>,
}

/// A process that has a file open.
struct Looked {
    process: PidFd,
    uid: u32,
    /// Once it was found to have a pool: the file that tells of it.
    told: Option<(Arc<File>, Arc<Mutex<Recycling>>)>,
    /// Once it is known where its RAM lies.
    guest: Option<Arc<Guest>>,
}

impl Looked {
    /// The process has ended.
    fn end(&mut self) {
        self.guest.take().iter().for_each(|guest| guest.end());
        if let Some((file, recycling)) = &self.told {
            file.untold(recycling);
        }
    }
}

/// The processes that have files open, by their numbers.
#[derive(Default)]
pub(super) struct Guests {
    all: Mutex<BTreeMap<i32, Looked>>,
    wake: Condvar,
}

impl Guests {
    /// The process has a pool.
    fn tell(&self, pid: i32, file: &Arc<File>, recycling: &Arc<Mutex<Recycling>>) {
        if let Some(looked) = self.all.lock().get_mut(&pid) {
            looked.told = Some((file.clone(), recycling.clone()));
            file.state().recycling = Some(recycling.clone());
        }
        self.wake.notify_all();
    }

    /// The process has been looked at, and is this guest.
    fn add(&self, pid: i32, guest: Arc<Guest>) {
        if let Some(looked) = self.all.lock().get_mut(&pid) {
            looked.guest = Some(guest);
        }
        self.wake.notify_all();
    }

    /// The file is gone, and with it the guest that had it as RAM.
    pub(super) fn forget(&self, file: &Arc<File>) {
        let has = |guest: &Arc<Guest>| guest.files.iter().any(|other| Arc::ptr_eq(other, file));
        for looked in self.all.lock().values_mut() {
            if looked.guest.as_ref().is_some_and(has) {
                looked.end();
            }
        }
    }

    /// Ends the thread; the engine is stopping.
    pub(super) fn wake(&self) {
        // Under the lock: the thread is between its look and its wait otherwise.
        drop(self.all.lock());
        self.wake.notify_all();
    }

    /// Lets those go that have ended. Returns the guests.
    fn reap(&self) -> Vec<Arc<Guest>> {
        let mut all = self.all.lock();
        all.retain(|_, looked| {
            let lives = !looked.process.has_exited();
            if !lives {
                looked.end();
            }
            lives
        });
        all.values().filter_map(|looked| looked.guest.clone()).collect()
    }
}

impl Files {
    /// Looks for a pool in processes that have this file open, each once.
    pub(super) fn find_guests(self: &Arc<Self>, shared: &Arc<Shared>, file: &Arc<File>, holders: &[Owner]) {
        self.guests.reap();
        for holder in holders {
            let (pid, file) = (holder.pid, file.clone());
            let mut all = self.guests.all.lock();
            if all.get(&pid).is_some_and(|looked| !looked.process.has_exited()) {
                continue;
            }
            let (Ok(kept), Ok(process)) = (PidFd::open(pid), PidFd::open(pid)) else { continue };
            let before = all.insert(pid, Looked { process: kept, uid: holder.uid, told: None, guest: None });
            drop(all);
            before.into_iter().for_each(|mut looked| looked.end());
            find::start(self, shared, find::Subject { pid, process, uid: holder.uid, file });
        }
    }

    /// The owner of a process that is a guest with a pool.
    pub(crate) fn owner(&self, pid: i32) -> Option<u32> {
        self.guests.all.lock().get(&pid).filter(|looked| looked.told.is_some()).map(|looked| looked.uid)
    }

    /// The thread: sweeps where one is due, until the engine stops.
    pub(crate) fn recycle(&self, shared: &Shared) {
        while !shared.stopping() {
            let next = self.guests.reap().iter().filter_map(|guest| guest.look(shared)).min();
            let mut all = self.guests.all.lock();
            if !shared.stopping() {
                let wait = next.map_or(IDLE, |next| next.saturating_duration_since(Instant::now()).min(IDLE));
                match all.values().any(|looked| looked.told.is_some()) {
                    true => _ = self.guests.wake.wait_for(&mut all, wait),
                    false => self.guests.wake.wait(&mut all),
                }
            }
        }
    }
}

impl Guest {
    /// Sweeps if it is time. Returns when to look again; `None`: never.
    fn look(&self, shared: &Shared) -> Option<Instant> {
        let now = Instant::now();
        let period = {
            let mut recycling = self.recycling.lock();
            if now < recycling.due {
                return Some(recycling.due);
            }
            recycling.due = now + recycling.period.mul_f64(LOOK_AFTER);
            recycling.period
        };
        // The device is being plugged, which may take minutes.
        let Some(mut sweeper) = self.sweeper.try_lock() else { return Some(self.recycling.lock().due) };
        sweeper.drain();
        let has_work = {
            let recycling = self.recycling.lock();
            !recycling.is_dropped() && !recycling.is_paused() && recycling.has_marks()
        };
        if has_work && let Some(budget) = shared.pacer.allowance(period.mul_f64(SWEEP_SHARE)) {
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
