//! The mounts that are managed, and their files; when to look at them.

use std::collections::BTreeMap;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::time::{Duration, Instant};

use kmem::memfd::FileId;
use kmem::pageonefs::Stats;
use parking_lot::{Condvar, Mutex};

use super::contents::Contents;
use super::file::{File, Totals};
use super::kernel::MountPoint;
use super::recycle::find::Managed;
use super::recycle::known::Known;
use crate::core::content::index::{ClientId, MAX_CLIENTS};
use crate::world::shared::Shared;

const LOOK_PAUSE: Duration = Duration::from_secs(1);

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Due {
    /// Mounts and files are found, and whose they are.
    Look,
    /// And they are scanned and merged.
    Round,
}

pub(crate) struct Mount {
    pub(crate) point: Arc<MountPoint>,
    pub(crate) contents: Arc<Contents>,
    /// As of the last round.
    pub(crate) stats: Stats,
    /// By the kernel's ids.
    pub(crate) files: BTreeMap<u64, Arc<File>>,
    /// Their ids by their inode numbers.
    pub(super) inodes: BTreeMap<u64, u64>,
    /// How many files of a user are not merged, as it has too many.
    pub(super) left_out: BTreeMap<u32, u64>,
}

impl Mount {
    pub(super) fn new(point: MountPoint, contents: Arc<Contents>) -> Self {
        let (files, inodes, left_out) = Default::default();
        Self { point: Arc::new(point), contents, stats: Stats::default(), files, inodes, left_out }
    }
}

/// Numbers of files, and of segments that are lent to them. A user may have as many as there are
/// left: so whoever comes later finds some.
#[derive(Default)]
pub(super) struct Numbers {
    /// Those below were given out once.
    next: u32,
    free: Vec<ClientId>,
    of_users: BTreeMap<u32, u32>,
}

impl Numbers {
    /// `uid`: of the file's user. `None`: the daemon's own.
    pub(super) fn take(&mut self, uid: Option<u32>) -> Option<ClientId> {
        let left = MAX_CLIENTS - self.next + self.free.len() as u32;
        let has = uid.and_then(|uid| self.of_users.get(&uid)).copied().unwrap_or_default();
        if has >= left {
            return None;
        }
        *uid.map_or(&mut 0, |uid| self.of_users.entry(uid).or_default()) += 1;
        self.free.pop().or_else(|| {
            self.next += 1;
            Some(ClientId(self.next - 1))
        })
    }

    pub(super) fn give_back(&mut self, number: ClientId, uid: Option<u32>) {
        self.free.push(number);
        if let Some(uid) = uid
            && let Some(has) = self.of_users.get_mut(&uid)
        {
            *has -= 1;
            if *has == 0 {
                self.of_users.remove(&uid);
            }
        }
    }
}

#[derive(Default)]
pub(super) struct State {
    pub(super) mounts: BTreeMap<u64, Mount>,
    pub(super) numbers: Numbers,
    /// Mounts that cannot be managed, and why: told once.
    pub(super) refused: BTreeMap<u64, String>,
    asked: bool,
    news: bool,
    /// When it was looked last for news.
    looked: Option<Instant>,
    /// Where mounts tell of news.
    pub(super) told_by: Option<Arc<OwnedFd>>,
    busy: bool,
    /// Sums over files that are gone.
    pub(super) gone: Totals,
}

/// All mounts, and the thread that works on them.
#[derive(Default)]
pub(crate) struct Files {
    pub(super) state: Mutex<State>,
    wake: Condvar,
    pub(crate) guests: Known,
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

pub(crate) struct OfMount {
    /// `domain=`, or the path where it has none.
    pub(crate) name: String,
    pub(crate) stats: Stats,
    pub(crate) contents: Arc<Contents>,
    pub(crate) files: Vec<Arc<File>>,
    /// How many files are not merged, by their user.
    pub(crate) left_out: BTreeMap<u32, u64>,
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
        let mut state = self.state.lock();
        if let Some(told_by) = &state.told_by {
            let _ = rustix::io::read(&**told_by, &mut [0u8; 8]);
        }
        state.news = true;
        drop(state);
        self.wake.notify_one();
    }

    /// Whether the next round is due.
    pub(crate) fn is_asked(&self) -> bool {
        self.state.lock().asked
    }

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

    /// A number for a segment that is lent to files. `None`: there are too many files.
    pub(crate) fn take_number(&self) -> Option<ClientId> {
        self.state.lock().numbers.take(None)
    }

    /// Nobody has this number any more.
    pub(crate) fn give_number_back(&self, number: ClientId) {
        self.state.lock().numbers.give_back(number, None);
    }

    pub(crate) fn domains(&self) -> BTreeMap<String, Arc<Contents>> {
        let of = |mount: &Mount| (mount.point.domain.clone(), mount.contents.clone());
        let all = self.state.lock().mounts.values().map(of).collect::<BTreeMap<_, _>>();
        all.into_iter().filter(|(name, _)| !name.is_empty()).collect()
    }

    pub(crate) fn tell(&self) -> Vec<OfMount> {
        let of = |mount: &Mount| OfMount {
            name: mount.point.name(),
            stats: mount.stats,
            contents: mount.contents.clone(),
            files: mount.files.values().cloned().collect(),
            left_out: mount.left_out.clone(),
        };
        self.state.lock().mounts.values().map(of).collect()
    }

    /// Sums over files that are gone.
    pub(crate) fn gone(&self) -> Totals {
        self.state.lock().gone
    }

    /// Frames of all domains, as of the last round.
    pub(super) fn frames(&self) -> u64 {
        let state = self.state.lock();
        let of_domains = state.mounts.values().map(|mount| (Arc::as_ptr(&mount.contents), mount.stats.frames));
        of_domains.collect::<BTreeMap<_, _>>().into_values().sum()
    }

    /// Waits until a round is requested, or there is news to look for. `None`: the engine stops.
    pub(crate) fn wait(&self, shared: &Shared) -> Option<Due> {
        let mut state = self.state.lock();
        state.busy = false;
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
            return None;
        }
        state.busy = std::mem::take(&mut state.asked);
        (state.news, state.looked) = (false, Some(Instant::now()));
        Some(if state.busy { Due::Round } else { Due::Look })
    }

    /// Ends the threads; the engine is stopping.
    pub(crate) fn wake(&self) {
        // Under the lock: the thread is between its look and its wait otherwise.
        drop(self.state.lock());
        self.wake.notify_all();
        self.guests.wake();
    }
}

impl Managed for Files {
    fn is_managed(&self, device: u64) -> bool {
        self.state.lock().mounts.contains_key(&device)
    }

    fn file(&self, id: FileId) -> Option<Arc<File>> {
        let state = self.state.lock();
        let mount = state.mounts.get(&id.dev)?;
        mount.files.get(mount.inodes.get(&id.ino)?).cloned()
    }

    fn guests(&self) -> &Known {
        &self.guests
    }
}
