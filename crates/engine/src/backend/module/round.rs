//! A round: mounts and files are found, scanned, and merged.

use std::collections::BTreeMap;
use std::os::fd::AsFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering::*};

use kmem::pageonefs::{File as Listed, Stats};
use rustix::io::Errno;

use super::adopt::Known;
use super::contents::Contents;
use super::file::{File, Kind, Mounted};
use super::kernel::MountPoint;
use super::merge::ByNumber;
use super::mounts::{Files, Mount, State, take_number};
use super::recycle::guests::find_guests;
use super::{USER, owner};
use crate::core::content::index::MAX_CLIENTS;
use crate::core::content::seed::Seed;
use crate::world::shared::Shared;

impl Files {
    pub(crate) fn find(&self, shared: &Shared) {
        for gone in self.find_mounts() {
            self.reap(gone.files.values());
        }
        self.find_files(shared);
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
                    mounts.insert(
                        device,
                        Mount { point: Arc::new(point), contents, stats: Stats::default(), files: BTreeMap::new() },
                    );
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
    fn find_files(&self, shared: &Shared) {
        let points: Vec<(u64, Arc<MountPoint>)> =
            self.state.lock().mounts.iter().map(|(&device, mount)| (device, mount.point.clone())).collect();
        for (device, point) in points {
            match point.files() {
                Ok(listed) => self.take_in(shared, device, &listed),
                Err(why) => tracing::debug!("{}: its files cannot be listed: {why}", point.path.display()),
            }
        }
    }

    fn take_in(&self, shared: &Shared, device: u64, listed: &[Listed]) {
        let mut known = Known::new();
        let mut gone = Vec::new();
        let mut new = Vec::new();
        {
            let mut state = self.state.lock();
            let State { mounts, numbers, .. } = &mut *state;
            let Some(mount) = mounts.get_mut(&device) else { return };
            let is_here = |file: &File| listed.iter().any(|other| other.id == file.id && other.size == file.size);
            mount.files.retain(|_, file| {
                let here = is_here(file);
                if !here {
                    gone.push(file.clone());
                }
                here
            });
            for listed in listed.iter().filter(|listed| listed.size > 0) {
                if let Some(file) = mount.files.get(&listed.id) {
                    file.is_plain(listed);
                    continue;
                }
                let Some(number) = take_number(numbers) else {
                    tracing::warn!("more than {MAX_CLIENTS} files: the others are not merged");
                    break;
                };
                match File::new(listed, number, mount.contents.clone(), mount.point.clone(), Mounted) {
                    Ok(file) => {
                        let file = Arc::new(file);
                        mount.files.insert(listed.id, file.clone());
                        new.push((file, listed.merged_pages));
                    }
                    Err(why) => {
                        numbers.remove(&number);
                        tracing::warn!(inode = listed.inode, "a file of {} bytes: {why}", listed.size);
                    }
                }
            }
        }
        self.reap(gone.iter());
        for (file, merged) in new {
            if merged > 0
                && !shared.stopping()
                && let Err(why) = file.adopt(&mut known, || shared.pacer.pause(USER, || shared.stopping()))
            {
                tracing::debug!(inode = file.inode, "merged pages are not known: {why}");
            }
        }
    }

    /// These files are gone: their sums are kept.
    fn reap<'a>(&self, files: impl Iterator<Item = &'a Arc<File>>) {
        for file in files {
            self.guests.forget(file);
            file.reap();
            let totals = file.state().totals;
            let mut state = self.state.lock();
            state.gone += totals;
            state.numbers.remove(&file.number);
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
        for (device, point, files) in mounts {
            if let Ok(stats) = point.stats()
                && let Some(mount) = self.state.lock().mounts.get_mut(&device)
            {
                mount.stats = stats;
            }
            let lives = |file: &Arc<File>| file.state().owner.as_ref().is_some_and(|owner| owner.lives());
            if !files.iter().all(lives) {
                let mut owners = owner::of(&point.path, device);
                for file in &files {
                    let of_file = owners.remove(&file.inode).unwrap_or_default();
                    find_guests(self, shared, file, &of_file);
                    file.state().owner = of_file.first().map(|owner| self.guests.same(owner));
                }
            }
        }
        let (mut pages, mut recycled, mut unmerged) = (0, 0, self.state.lock().gone.unmerged);
        for of in self.tell() {
            for file in &of.files {
                let state = file.state();
                let counts = state.region.counts();
                (pages, recycled) = (pages + counts.merged, recycled + counts.recycled);
                unmerged += state.totals.unmerged;
            }
        }
        shared.headroom.below.set((pages + lent).saturating_sub(self.frames()) + recycled, unmerged);
    }
}

impl File {
    /// The kernel says whether the file is plain. All its pages are private from then on.
    fn is_plain(&self, listed: &Listed) {
        let mut state = self.state();
        let plain = listed.plain();
        if plain.is_some() && state.plain.is_none() {
            let all = state.region.all();
            self.forget(&mut state, all);
            state.region.forget_ages(all);
            tracing::info!(inode = self.inode, "a file is not merged any more: {plain:?}");
        }
        state.plain = plain;
    }
}

/// Scans files. Returns those with candidates whose guests are not about to mark free pages.
pub(crate) fn scan<K: Kind>(shared: &Shared, files: impl Iterator<Item = Arc<File<K>>>) -> Vec<Arc<File<K>>> {
    let is_due = |file: &Arc<File<K>>| match file.scan() {
        Ok(0) => false,
        Ok(_) if file.is_awaited() => false,
        Ok(pages) => {
            shared.pacer.found(USER, pages);
            true
        }
        Err(why) => {
            tracing::debug!(inode = file.inode, "not scanned: {why}");
            false
        }
    };
    files.filter(is_due).collect()
}

/// Merges files, each by one thread at a time, as `one` does it.
pub(crate) fn merge<K: Kind>(
    shared: &Shared,
    due: &[Arc<File<K>>],
    one: impl Fn(&File<K>) -> Result<(), Errno> + Sync,
) {
    let next = AtomicUsize::new(0);
    let work = || {
        while let Some(file) = due.get(next.fetch_add(1, Relaxed)) {
            match one(file) {
                Ok(()) => {}
                Err(why @ (Errno::NOMEM | Errno::NOSPC)) => {
                    tracing::warn!(inode = file.inode, "merging a file stopped: {why}");
                }
                Err(why) => tracing::debug!(inode = file.inode, "merging a file stopped: {why}"),
            }
        }
    };
    let threads = shared.config().workers().min(due.len());
    std::thread::scope(|scope| {
        for _ in 1..threads {
            scope.spawn(work);
        }
        if threads > 0 {
            work();
        }
    });
}
