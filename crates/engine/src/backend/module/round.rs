//! A round: mounts and files are found, scanned, and merged.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::os::fd::AsFd;
use std::path::PathBuf;
use std::sync::Arc;

use kmem::PAGE_SIZE;
use kmem::memfd::FileId;
use kmem::pageonefs::File as Listed;
use rustix::io::Errno;
use wire::PageNo;

use super::USER;
use super::contents::Contents;
use super::file::{File, Kind, Mounted};
use super::kernel::MountPoint;
use super::merge::ByNumber;
use super::mounts::{Files, Mount, State};
use super::numbers::Holder;
use super::owner::{self, Key, Owner, Turn};
use super::recycle::find::Managed;
use super::recycle::guests::find_guests;
use crate::core::content::seed::Seed;
use crate::core::ledger::ALL;
use crate::core::merge::pass::{self, Steps};
use crate::sync::Mutex;
use crate::world::headroom::{Below, Part, Who};
use crate::world::shared::Shared;

impl Files {
    pub(crate) fn find(&self) {
        for gone in self.find_mounts() {
            self.reap(gone.files.values());
        }
        self.find_files();
    }

    /// Takes new mounts in. Returns those that are gone.
    fn find_mounts(&self) -> Vec<Mount> {
        let found = match kmem::pageonefs::mounts() {
            Ok(found) => found,
            Err(why) => {
                tracing::warn!("cannot read which file systems are mounted: {why}");
                return Vec::new();
            }
        };
        let mut state = self.state.lock();
        let State { mounts, refused, told_by, .. } = &mut *state;
        let is_gone = |device: &u64| !found.iter().any(|info| info.device == *device);
        let gone: Vec<u64> = mounts.keys().copied().filter(is_gone).collect();
        refused.retain(|device, _| !is_gone(device));
        for info in found {
            let device = info.device;
            if mounts.contains_key(&device) {
                continue;
            }
            match MountPoint::new(info) {
                Ok(point) => {
                    // Before its files are listed. Without, the next round sees what is new.
                    if let Some(Err(why)) = told_by.as_ref().map(|news| point.notify(news.as_fd())) {
                        tracing::debug!("{}: it does not tell of news: {why}", point.path.display());
                    }
                    let shares = |mount: &&Mount| !point.domain.is_empty() && mount.point.domain == point.domain;
                    let contents = mounts.values().find(shares).map(|mount| mount.contents.clone());
                    let contents = contents.unwrap_or_else(|| {
                        let domain = &point.domain;
                        let seed = if domain.is_empty() { Seed::random() } else { Seed::of(domain) };
                        Arc::new(Contents::new(seed))
                    });
                    tracing::info!(domain = point.name(), "merges the files of {}", point.path.display());
                    refused.remove(&device);
                    mounts.insert(device, Mount::new(point, contents));
                }
                Err(why) => {
                    let why = why.to_string();
                    if refused.insert(device, why.clone()).is_none_or(|before| before != why) {
                        tracing::warn!("not managed: {why}");
                    }
                }
            }
        }
        gone.into_iter().filter_map(|device| mounts.remove(&device)).collect()
    }

    /// Takes new files in, and lets those go that are gone.
    fn find_files(&self) {
        let points: BTreeMap<u64, Arc<MountPoint>> =
            self.state.lock().mounts.iter().map(|(&device, mount)| (device, mount.point.clone())).collect();
        let (mut newest, mut plain) = (None, Vec::new());
        for (&device, point) in &points {
            match point.files() {
                Ok(listed) => {
                    newest = listed.iter().rfind(|listed| !has_pages(listed)).map(|listed| listed.id).max(newest);
                    self.take_in(device, &listed);
                    let merged = listed.iter().filter(|file| file.plain().is_some() && file.merged_pages > 0);
                    plain.extend(merged.map(|file| (device, file.id)));
                }
                Err(why) => tracing::debug!("{}: its files cannot be listed: {why}", point.path.display()),
            }
        }
        self.state.lock().look_again(newest);
        // A part of some in each round: who has pinned memory holds up nobody.
        let made = self.state.lock().made_plain;
        for (device, id) in in_turn(plain, made) {
            self.state.lock().made_plain = (device, id);
            if let Err(why) = points[&device].make_plain(id) {
                tracing::debug!(id, "some of a plain file is still merged: {why}");
            }
        }
    }

    /// `listed`: in ascending order of the ids.
    pub(super) fn take_in(&self, device: u64, listed: &[Listed]) {
        let mut gone = Vec::new();
        let mut new: Vec<&Listed> = Vec::new();
        if let Some(mount) = self.state.lock().mounts.get_mut(&device) {
            mount.files.retain(|&id, file| {
                let here = listed.binary_search_by_key(&id, |listed| listed.id);
                let stays = here.is_ok_and(|at| file.is_listed(&listed[at]));
                if !stays {
                    gone.push(file.clone());
                }
                stays
            });
            new.extend(listed.iter().filter(|listed| has_pages(listed) && !mount.files.contains_key(&listed.id)));
        }
        // First: others may have their numbers.
        self.reap(gone.iter());
        let mut left_out: BTreeMap<claims::Owner, u64> = BTreeMap::new();
        for listed in new {
            let user = claims::Owner::of(listed.uid);
            let holder = Holder { mount: device, user, id: listed.id };
            let Some(number) = self.number_for(holder) else {
                *left_out.entry(user).or_default() += 1;
                continue;
            };
            if let Some(mount) = self.state.lock().mounts.get_mut(&device) {
                let file = File::new(listed, number, mount.contents.clone(), mount.point.clone(), Mounted);
                mount.files.insert(listed.id, Arc::new(file));
            }
        }
        let mut state = self.state.lock();
        let Some(mount) = state.mounts.get_mut(&device) else { return };
        mount.inodes = mount.files.iter().map(|(&id, file)| (file.inode, id)).collect();
        for (uid, files) in left_out.iter().filter(|(uid, _)| !mount.left_out.contains_key(uid)) {
            let path = mount.point.path.display();
            tracing::warn!("{path}: {files} files of uid {uid} are not merged: there are too many");
        }
        mount.left_out = left_out;
    }

    /// These files are gone, or give way: their sums are kept.
    pub(super) fn reap<'a>(&self, files: impl Iterator<Item = &'a Arc<File>>) {
        for file in files {
            self.guests.forget(file);
            file.reap();
            let totals = file.state().totals;
            let mut state = self.state.lock();
            state.gone += totals;
            state.numbers.give_back(file.number);
        }
    }

    /// The files that may be merged, of all mounts.
    pub(crate) fn managed(&self) -> ByNumber {
        let state = self.state.lock();
        let files = state.mounts.values().flat_map(|mount| mount.files.values());
        files.filter(|file| file.state().plain.is_none()).map(|file| (file.number, file.clone())).collect()
    }

    /// Notes what status and headroom tell, and owners. `lent`: frames without memory of their own.
    pub(crate) fn note(self: &Arc<Self>, shared: &Arc<Shared>, lent: u64) {
        let mounts: Vec<(u64, Arc<MountPoint>, Vec<Arc<File>>)> = {
            let state = self.state.lock();
            let of = |(&device, mount): (&u64, &Mount)| {
                (device, mount.point.clone(), mount.files.values().cloned().collect())
            };
            state.mounts.iter().map(of).collect()
        };
        let (mut missing, mut paths) = (BTreeSet::new(), Vec::new());
        for (device, point, files) in mounts {
            if let Ok(stats) = point.stats()
                && let Some(mount) = self.state.lock().mounts.get_mut(&device)
            {
                mount.stats = stats;
            }
            for file in files {
                let mut state = file.state();
                state.owner = state.owner.take().filter(|owner| owner.lives());
                if state.owner.is_none() {
                    missing.insert((device, file.inode));
                }
            }
            paths.push((point.path.clone(), device));
        }
        self.find_owners(shared, missing, &paths);
        let (mut pages, mut recycled, mut unmerged) = (0, 0, self.state.lock().gone.unmerged);
        let mut parts = BTreeMap::<Who, Part>::new();
        for of in self.tell() {
            // The ledger may not know yet what was merged before.
            pages += of.stats.merged_pages;
            for file in &of.files {
                let state = file.state();
                let counts = state.region.counts();
                recycled += counts.recycled;
                unmerged += state.totals.unmerged;
                let part = parts.entry(file.who()).or_default();
                part.unmerge_bytes += (counts.merged.max(state.merged) + counts.recycled) * PAGE_SIZE as u64;
                part.unmerged_pages += state.totals.unmerged;
            }
        }
        let pages = (pages + lent).saturating_sub(self.frames()) + recycled;
        let all = Part { unmerge_bytes: pages * PAGE_SIZE as u64, unmerged_pages: unmerged };
        *shared.headroom.below.lock() = Below { all, parts };
    }

    /// A part of the walk for the owners of these files. Of several processes the lowest number
    /// counts.
    fn find_owners(self: &Arc<Self>, shared: &Arc<Shared>, missing: BTreeSet<Key>, mounts: &[(PathBuf, u64)]) {
        let mut found = Vec::new();
        let mut keep = |(dev, ino): Key, owner: &Arc<Owner>| {
            found.extend(self.file(FileId { dev, ino }).map(|file| (file, owner.clone())));
        };
        let look = |turn: &Turn| owner::look(turn, mounts, &mut keep);
        self.walk.lock().go_on(missing, owner::processes, look, || shared.stopping());
        find_guests(self, shared, &found);
        for (file, owner) in found {
            let mut state = file.state();
            if state.owner.as_ref().is_none_or(|other| other.pid > owner.pid) {
                state.owner = Some(self.guests.same(&owner));
            }
        }
    }
}

/// Plain files of which a round makes a part private.
const PLAIN_FILES: usize = 8;

/// The next ones behind the last one, and from the beginning again; `all` is in ascending order.
fn in_turn<K: Ord + Copy>(mut all: Vec<K>, last: K) -> Vec<K> {
    let next = all.partition_point(|&key| key <= last);
    all.rotate_left(next);
    all.truncate(PLAIN_FILES);
    all
}

/// Nothing can be merged of a file that has none, and anybody can make many of those.
fn has_pages(listed: &Listed) -> bool {
    listed.private_pages + listed.merged_pages > 0
}

/// Looks that find a file without pages before it gives its number back.
const EMPTY: u32 = 8;

impl File {
    /// The kernel lists it so now. If it is plain, all its pages are private from then on. `false`:
    /// it has had no pages for a while.
    fn is_listed(&self, listed: &Listed) -> bool {
        let mut state = self.state();
        state.listed(listed);
        state.empty = if has_pages(listed) { 0 } else { state.empty + 1 };
        let plain = listed.plain();
        if plain.is_some() && state.plain.is_none() {
            self.forget(&mut state, ALL);
            state.region.forget_ages(ALL);
            tracing::info!(inode = self.inode, "a file is not merged any more: {plain:?}");
        }
        state.plain = plain;
        state.empty < EMPTY
    }
}

/// Files that are scanned while their mounts are open: these cannot be unmounted meanwhile.
const TOGETHER: usize = 64;

/// Scans files. Returns those with candidates whose guests are not about to mark free pages.
pub(crate) fn scan<K: Kind>(shared: &Shared, files: &[Arc<File<K>>]) -> Vec<Arc<File<K>>> {
    let is_due = |file: &Arc<File<K>>| match file.scan(|| shared.stopping()) {
        Ok(found) if found.due == 0 || file.is_awaited() => false,
        Ok(found) => {
            shared.pacer.found(USER, found.new);
            file.state().told = found.due;
            true
        }
        Err(why) => {
            tracing::debug!(inode = file.inode, "not scanned: {why}");
            false
        }
    };
    let (queue, due) = (Mutex::new(files.chunks(TOGETHER)), Mutex::new(Vec::new()));
    let work = || {
        loop {
            let Some(some) = queue.lock().next() else { return };
            let _held: Vec<_> = some.iter().map(|file| file.kernel.hold()).collect();
            let some: Vec<_> = some.iter().filter(|file| is_due(file)).cloned().collect();
            due.lock().extend(some);
        }
    };
    by_threads(shared.config().workers().min(files.len().div_ceil(TOGETHER)), work);
    let mut due = due.into_inner();
    due.sort_by_key(|file| file.number);
    due
}

/// Has so many threads work, with this one.
fn by_threads(threads: usize, work: impl Fn() + Sync) {
    // 2 MiB, as others have it, would be a huge page where the stack is aligned.
    let thread = || std::thread::Builder::new().stack_size(1 << 20);
    std::thread::scope(|scope| {
        // Who gets no thread works alone.
        (1..threads).for_each(|_| _ = thread().spawn_scoped(scope, &work));
        work();
    });
}

/// Steps of a file before the next file's turn comes: some 16,000 pages.
const TURN: usize = 32;

/// Merges files, each by one thread at a time, in turns: no file waits for all of another's pages.
/// Ends when the next round is due (`over`) and each has had a turn: the rest is due then again.
pub(crate) fn merge<'a, K: Kind, S: Steps<Stop = Errno> + Send>(
    shared: &Shared,
    due: &'a [Arc<File<K>>],
    steps: impl Fn(&'a File<K>) -> S + Sync,
    over: impl Fn() -> bool + Sync,
) {
    let begin = due.iter().map(|file| (&**file, None)).collect::<VecDeque<(&File<K>, Option<(S, PageNo)>)>>();
    let queue = Mutex::new(begin);
    let pace = shared.pace(USER);
    let work = || {
        loop {
            let Some((file, begun)) = queue.lock().pop_front() else { return };
            if begun.is_some() && over() || shared.stopping() {
                continue;
            }
            let (mut steps, from) = begun.unwrap_or_else(|| (steps(file), PageNo(0)));
            match pass::turn(&mut steps, &pace, from, TURN) {
                Ok(None) => {}
                Ok(Some(next)) => queue.lock().push_back((file, Some((steps, next)))),
                Err(why @ (Errno::NOMEM | Errno::NOSPC)) => {
                    tracing::warn!(inode = file.inode, "merging a file stopped: {why}");
                }
                Err(why) => tracing::debug!(inode = file.inode, "merging a file stopped: {why}"),
            }
        }
    };
    by_threads(shared.config().workers().min(due.len()), work);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn plain_files_have_their_turns_some_in_each_round() {
        let all: Vec<u64> = (10..30).collect();
        let (mut last, mut seen) = (0, Vec::new());
        for _ in 0..5 {
            let some = in_turn(all.clone(), last);
            assert_eq!(some.len(), PLAIN_FILES);
            last = some[PLAIN_FILES - 1];
            seen.extend(some);
        }
        assert_eq!(seen, [&all[..], &all[..]].concat());
        assert_eq!(in_turn(vec![3, 5], 3), [5, 3]);
        assert!(in_turn(Vec::<u64>::new(), 3).is_empty());
    }
}
