//! The mounts that are managed, and their files; when to look at them.

use std::collections::BTreeMap;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::time::{Duration, Instant};

use kmem::memfd::FileId;
use kmem::pageonefs::Stats;

use super::contents::Contents;
use super::file::{File, Totals};
use super::kernel::MountPoint;
use super::numbers::{Holder, Numbers, Taken};
use super::recycle::find::Managed;
use super::recycle::known::Known;
use super::walk::Walk;
use crate::core::content::index::ClientId;
use crate::sync::{Condvar, Mutex};
use crate::world::shared::Shared;

const LOOK_PAUSE: Duration = Duration::from_secs(1);
/// The kernel does not tell that a file has its first page. So after one has come it is looked
/// again, each time after twice as long, up to this; then the rounds see it.
const LONG_PAUSE: Duration = Duration::from_secs(64);

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
    /// How many files of a user are not merged, as there are too many.
    pub(super) left_out: BTreeMap<claims::Owner, u64>,
}

impl Mount {
    pub(super) fn new(point: MountPoint, contents: Arc<Contents>) -> Self {
        let (files, inodes, left_out) = Default::default();
        Self { point: Arc::new(point), contents, stats: Stats::default(), files, inodes, left_out }
    }
}

#[derive(Default)]
pub(super) struct State {
    pub(super) mounts: BTreeMap<u64, Mount>,
    pub(super) numbers: Numbers,
    /// Mounts that cannot be managed, and why: told once.
    pub(super) refused: BTreeMap<u64, String>,
    asked: bool,
    /// When it is to be looked next, as there is news, or there may be.
    pub(super) look: Option<Instant>,
    /// When it was looked last.
    pub(super) looked: Option<Instant>,
    /// How long after that again, if files have no pages; and the newest of these.
    pub(super) pause: Duration,
    pub(super) newest: u64,
    /// Where mounts tell of news.
    pub(super) told_by: Option<Arc<OwnedFd>>,
    busy: bool,
    /// The plain file, with its device, of which a part was made private last.
    pub(super) made_plain: (u64, u64),
    /// Sums over files that are gone.
    pub(super) gone: Totals,
}

impl State {
    /// `newest`: the newest file without pages, as it was found now.
    pub(super) fn look_again(&mut self, newest: Option<u64>) {
        let Some(newest) = newest else { return };
        let is_new = std::mem::replace(&mut self.newest, newest) < newest;
        self.pause = if is_new { LOOK_PAUSE } else { (2 * self.pause).min(2 * LONG_PAUSE) };
        if let (true, Some(looked)) = (self.pause <= LONG_PAUSE, self.looked) {
            self.look_at(looked + self.pause);
        }
    }

    /// It is to be looked then, if not before.
    fn look_at(&mut self, then: Instant) {
        self.look = Some(self.look.map_or(then, |look| look.min(then)));
    }
}

/// All mounts, and the thread that works on them.
#[derive(Default)]
pub(crate) struct Files {
    pub(super) state: Mutex<State>,
    pub(super) walk: Mutex<Walk>,
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
    pub(crate) left_out: BTreeMap<claims::Owner, u64>,
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
        // A program that makes files in a loop costs a look a second.
        let soon = state.looked.map_or_else(Instant::now, |looked| looked + LOOK_PAUSE);
        state.look_at(soon);
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

    /// A number for a segment that is lent to files. `None`: there are too many.
    pub(crate) fn take_number(&self) -> Option<ClientId> {
        self.state.lock().numbers.take(None).ok()
    }

    /// Nobody has this number any more.
    pub(crate) fn give_number_back(&self, number: ClientId) {
        self.state.lock().numbers.give_back(number);
    }

    /// A number for a file. Another may have to give way. `None`: there are too many.
    pub(super) fn number_for(&self, holder: Holder) -> Option<ClientId> {
        loop {
            let mut state = self.state.lock();
            let other = match state.numbers.take(Some(holder)) {
                Ok(number) => return Some(number),
                Err(Taken::ForGood) => return None,
                Err(Taken::By(other)) => other,
            };
            let file = state.mounts.get_mut(&other.mount)?.files.remove(&other.id)?;
            drop(state);
            self.reap([&file].into_iter());
        }
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
            match state.look {
                None => self.wake.wait(&mut state),
                Some(look) if look > Instant::now() => _ = self.wake.wait_until(&mut state, look),
                Some(_) => break,
            }
        }
        if shared.stopping() {
            return None;
        }
        state.busy = std::mem::take(&mut state.asked);
        (state.look, state.looked) = (None, Some(Instant::now()));
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
