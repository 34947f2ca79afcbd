//! Files of `pageonefs`, the memory file system of `host/linux/pageonefs`: memory that is merged
//! below its mappings. No agent is in the processes that map them; the kernel does what an agent
//! does, and the daemon decides, with the ledger, the index and the governor that it has for
//! clients.
//!
//! ```text
//!   each merge period:  mounts ──▶ files ──▶ scan     harvest: which pages were written
//!                                             │
//!                                             ▼
//!                                 merge     candidates ──▶ digest ──▶ look up ──▶ merge
//!                                             ▲                                     │
//!                                             └───── different, or held just now ◀──┘
//! ```
//!
//! * A page that was clean for two merge periods is a candidate ([`crate::core::ledger`]). There
//!   are no cooldowns and no budget of mappings: the kernel sees who else holds a page.
//! * The first page with a content is *sighted*. The second becomes a frame, in the kernel, which
//!   copies it; then the first is merged with that ([`merge`]).
//! * Where page after page had contents that follow each other in the index, the next pages are
//!   merged without being digested ([`predict`]): the kernel compares them in full in any case.
//! * The kernel frees a frame when its last page leaves it. The index counts the pages of each
//!   content, and forgets it with the last ([`contents`]).
//! * What a guest marks as free is punched out of its file ([`recycle`]).
//! * Clients and files of one domain share one store: its frames are lent to the files ([`stores`],
//!   [`loans`], [`join`]).
//! * A new daemon asks the kernel which pages are merged, and digests each frame once ([`adopt`]).
//!
//! Mounts with one `domain=` share frames, and have one index here. The mount's root is opened for
//! each call and closed again, so that a mount can be unmounted at any time.

mod adopt;
mod contents;
mod file;
mod join;
mod kernel;
mod loans;
mod merge;
mod owner;
mod predict;
mod recycle;
mod round;
mod scan;
mod stores;
#[cfg(test)]
mod tests;

use std::collections::BTreeMap;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::time::{Duration, Instant};

use kmem::memfd::FileId;
use kmem::pageonefs::Stats;
use parking_lot::{Condvar, Mutex};

pub(crate) use self::contents::Contents;
pub(crate) use self::file::{File, Totals};
use self::kernel::MountPoint;
use self::recycle::Guests;
use crate::core::content::index::ClientId;
use crate::world::shared::Shared;

/// For whom the pacer counts this work: files belong to mounts, and mounts to root.
pub(crate) const USER: u32 = 0;

/// Time between two looks for news.
const LOOK_PAUSE: Duration = Duration::from_secs(1);

/// A mount that is managed.
pub(crate) struct Mount {
    pub(crate) point: Arc<MountPoint>,
    pub(crate) contents: Arc<Contents>,
    /// As of the last round.
    pub(crate) stats: Stats,
    /// By the kernel's ids.
    pub(crate) files: BTreeMap<u64, Arc<File>>,
}

#[derive(Default)]
struct State {
    /// By device number.
    mounts: BTreeMap<u64, Mount>,
    /// Segments of stores that can be lent to files, by the kernel's ids.
    stores: BTreeMap<u64, Arc<File>>,
    /// Mounts that cannot be managed, and why: told once.
    refused: BTreeMap<u64, String>,
    /// A round was requested.
    asked: bool,
    /// There is news of mounts.
    news: bool,
    /// When it was looked last for news.
    looked: Option<Instant>,
    /// Where mounts tell of news.
    told_by: Option<Arc<OwnedFd>>,
    /// A round is under way.
    busy: bool,
    /// Sums over files that are gone.
    gone: Totals,
}

impl State {
    /// The numbers of all files.
    fn numbers(&self) -> Vec<ClientId> {
        let files = self.mounts.values().flat_map(|mount| mount.files.values());
        files.chain(self.stores.values()).map(|file| file.number).collect()
    }
}

/// All mounts, and the thread that works on them.
#[derive(Default)]
pub(crate) struct Files {
    state: Mutex<State>,
    wake: Condvar,
    guests: Guests,
}

/// Why there can be no agents on this kernel, and what merges without.
pub(crate) fn no_agents() -> Option<String> {
    let release = kmem::pagemap::too_old()?;
    let module = match kmem::pageonefs::is_loaded() {
        true => "files of pageonefs are merged: start QEMU by `pageone run --backend module`",
        false => "and pageonefs is not loaded, so nothing is merged; `pageone doctor` says more",
    };
    Some(format!("Linux {release} is too old for them, 6.7 or later is needed; {module}"))
}

/// What is told of a mount.
pub(crate) struct OfMount {
    /// `domain=`, or the path where it has none.
    pub(crate) name: String,
    pub(crate) stats: Stats,
    pub(crate) contents: Arc<Contents>,
    pub(crate) files: Vec<Arc<File>>,
}

impl Files {
    /// Requests a round: a merge period has begun.
    pub(crate) fn ask(&self) {
        self.state.lock().asked = true;
        self.wake.notify_one();
    }

    /// Mounts tell of news by this eventfd from now on.
    pub(crate) fn told_by(&self, eventfd: Arc<OwnedFd>) {
        self.state.lock().told_by = Some(eventfd);
    }

    /// There is news of mounts: a file came or went, or is plain.
    pub(crate) fn news(&self) {
        self.state.lock().news = true;
        self.wake.notify_one();
    }

    /// Whether a round is requested or under way.
    pub(crate) fn is_busy(&self) -> bool {
        let state = self.state.lock();
        state.asked || state.busy
    }

    /// Whether there are mounts, by what the kernel says now.
    pub(crate) fn has_mounts() -> bool {
        kmem::pageonefs::mounts().is_ok_and(|mounts| !mounts.is_empty())
    }

    /// Whether there are files, as of the last round.
    pub(crate) fn is_empty(&self) -> bool {
        self.state.lock().mounts.values().all(|mount| mount.files.is_empty())
    }

    /// The segments of stores that can be lent to files.
    fn stores(&self) -> Vec<Arc<File>> {
        self.state.lock().stores.values().cloned().collect()
    }

    /// Whether this is the device of a mount that is managed.
    fn is_managed(&self, device: u64) -> bool {
        self.state.lock().mounts.contains_key(&device)
    }

    /// A file, as of the last round.
    fn file(&self, id: FileId) -> Option<Arc<File>> {
        let state = self.state.lock();
        state.mounts.get(&id.dev)?.files.values().find(|file| file.inode == id.ino).cloned()
    }

    /// What there is to tell, mount by mount.
    pub(crate) fn tell(&self) -> Vec<OfMount> {
        let of = |mount: &Mount| OfMount {
            name: mount.point.name(),
            stats: mount.stats,
            contents: mount.contents.clone(),
            files: mount.files.values().cloned().collect(),
        };
        self.state.lock().mounts.values().map(of).collect()
    }

    /// Sums over files that are gone.
    pub(crate) fn gone(&self) -> Totals {
        self.state.lock().gone
    }

    /// Frames of all domains, as of the last round.
    fn frames(&self) -> u64 {
        let mut of_domains: Vec<(*const Contents, u64)> = Vec::new();
        for mount in self.state.lock().mounts.values() {
            let domain = Arc::as_ptr(&mount.contents);
            if of_domains.iter().all(|&(other, _)| other != domain) {
                of_domains.push((domain, mount.stats.frames));
            }
        }
        of_domains.iter().map(|&(_, frames)| frames).sum()
    }

    /// The thread: a round each time that one is requested, and a look when there is news, until
    /// the engine stops.
    pub(crate) fn run(self: &Arc<Self>, shared: &Arc<Shared>) {
        loop {
            let asked = {
                let mut state = self.state.lock();
                while !state.asked && !shared.stopping() {
                    let soon = state.looked.map(|looked| looked + LOOK_PAUSE).filter(|soon| *soon > Instant::now());
                    match (state.news, soon) {
                        (false, _) => self.wake.wait(&mut state),
                        // A program that makes files in a loop costs a look a second.
                        (true, Some(soon)) => _ = self.wake.wait_until(&mut state, soon),
                        (true, None) => break,
                    }
                }
                if shared.stopping() {
                    return;
                }
                let asked = std::mem::take(&mut state.asked);
                (state.news, state.busy, state.looked) = (false, asked, Some(Instant::now()));
                asked
            };
            if asked {
                self.round(shared);
                self.state.lock().busy = false;
            } else {
                self.look(shared);
            }
        }
    }

    /// Ends the threads; the engine is stopping.
    pub(crate) fn wake(&self) {
        // Under the lock: the thread is between its look and its wait otherwise.
        drop(self.state.lock());
        self.wake.notify_all();
        self.guests.wake();
    }
}
