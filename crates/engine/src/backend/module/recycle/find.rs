//! Whether a process is a guest with a pool, and where its RAM lies in files.
//!
//! A thread of its own asks it: QEMU may take minutes to answer, and reading or closing what
//! another process made may take for ever. Nothing that the process says is trusted: it can have
//! pages of files punched that it maps for writing, and of no others.

use std::io::Read;
use std::os::fd::{AsFd, OwnedFd};
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use guests::Names;
use kmem::PAGE_SIZE;
use kmem::memfd::FileId;
use kmem::pidfd::PidFd;
use kmem::procfs::for_each_map;
use qmp::{Qmp, QmpError};
use rustix::net::{AddressFamily, sockopt};
use wire::recycle::{ENV_FILE_POOL, ENV_FILE_QMP, ENV_PERIOD, Extent};
use wire::{PageNo, RegionId};

use super::known::{Guest, Known};
use super::pool::{Pool, TakeError};
use super::process::{OfRam, Process, Qemu};
use super::sweep::Sweeper;
use crate::backend::module::file::File;
use crate::backend::module::owner::{self, Owner};
use crate::core::ledger::free_pages::FreePages;
use crate::core::recycle::device::{self, QMP_TIME};
use crate::core::recycle::layout::{LayoutError, Place, extents_of, find_ram};
use crate::core::recycle::state::{Device, Recycling};
use crate::sync::Mutex;
use crate::world::searches::Search;
use crate::world::shared::Shared;

const ENVIRONMENT: u64 = 1 << 20;
/// Pause between two looks, for a pool's lock or for files that no round has found yet.
const STEP: Duration = Duration::from_millis(200);
/// How long a round may take to find the files that a guest maps.
const ROUND_TIME: Duration = Duration::from_secs(60);

/// The files that are managed, and the guests that have them as RAM.
pub(in super::super) trait Managed: Send + Sync + 'static {
    /// Whether this is the device of a mount that is managed.
    fn is_managed(&self, device: u64) -> bool;

    /// A file, as of the last round.
    fn file(&self, id: FileId) -> Option<Arc<File>>;

    fn guests(&self) -> &Known;
}

/// A process that has a file open.
pub(super) struct Subject {
    pub(super) owner: Arc<Owner>,
    pub(super) file: Arc<File>,
}

/// Why a guest's pages are not punched.
#[derive(Debug, thiserror::Error)]
enum FindError {
    #[error("its descriptors cannot be had: {0}")]
    Descriptor(std::io::Error),
    #[error(
        "its monitor is no Unix socket; start the guest with `pageone run --backend module --ppr`, which \
             gives it one"
    )]
    NoMonitor,
    #[error(transparent)]
    Pool(#[from] TakeError),
    #[error(transparent)]
    Qmp(#[from] QmpError),
    #[error(transparent)]
    Layout(#[from] LayoutError),
    #[error("its mappings cannot be read: {0}")]
    Maps(std::io::Error),
    #[error(
        "none of its RAM is a file of pageonefs that it maps shared: describe its RAM by -m alone, or by a \
             memory-backend-file in the mount with share=on"
    )]
    Unmanaged,
    /// Nobody waits for the answer.
    #[error("it has ended")]
    Over,
}

/// What `pageone run --backend module --ppr` left in the environment.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Words {
    pool: u32,
    qmp: u32,
    period_ms: u32,
}

impl Words {
    fn parse(environment: &[u8]) -> Option<Self> {
        let number = |name: &str| {
            let value = |word: &[u8]| word.strip_prefix(name.as_bytes())?.strip_prefix(b"=").map(<[u8]>::to_vec);
            String::from_utf8(environment.split(|&byte| byte == 0).find_map(value)?).ok()?.parse::<u32>().ok()
        };
        Some(Self {
            pool: number(ENV_FILE_POOL)?,
            qmp: number(ENV_FILE_QMP)?,
            period_ms: number(ENV_PERIOD).unwrap_or(0),
        })
    }

    fn of(pid: i32) -> Option<Self> {
        let mut bytes = Vec::new();
        let file = std::fs::File::open(format!("/proc/{pid}/environ")).ok()?;
        file.take(ENVIRONMENT).read_to_end(&mut bytes).ok()?;
        Self::parse(&bytes)
    }
}

/// Looks at a process, in a thread of its own.
pub(super) fn start(files: &Arc<impl Managed>, shared: &Arc<Shared>, subject: Subject) {
    let Some(search) = Search::begin(shared, Some(claims::Owner::of(subject.owner.uid))) else {
        tracing::warn!(pid = subject.owner.pid, "not recycled: too many processes of its user are being looked at");
        return;
    };
    let (files, shared) = (files.clone(), shared.clone());
    let look = move || {
        let pid = subject.owner.pid;
        let own = Names::of(Path::new("/"), pid);
        if subject.owner.lives() {
            let _ = subject.owner.own.set(own);
        }
        if let Some(words) = Words::of(pid) {
            find(&files, &shared, &search, subject, words);
        }
    };
    if let Err(why) = std::thread::Builder::new().name("guest-files".into()).spawn(look) {
        tracing::warn!("not recycled: no thread to look at a process with: {why}");
    }
}

fn find(files: &Arc<impl Managed>, shared: &Shared, search: &Search, subject: Subject, words: Words) {
    let (pid, file) = (subject.owner.pid, subject.file.clone());
    let goes_on = || search.goes_on() && subject.owner.lives();
    let (pool, monitor) = match inherited(&subject.owner.process, words, &goes_on) {
        Ok(both) => both,
        Err(why) => return tracing::warn!(pid, "not recycled: {why}"),
    };
    let period = Recycling::period_of(words.period_ms, shared.config().reclaim_period);
    let recycling = Arc::new(Mutex::new(Recycling::new(pool.marks.clone(), period).booting()));
    // Not merged until the guest has said what is free, and told in status.
    files.guests().tell(pid, &file, &recycling);
    match locate(&**files, &subject, &monitor, &goes_on) {
        Ok((mapped, extents, is_plugged)) => {
            let is_first = !pool.is_used();
            recycling.lock().set_device(if is_plugged { Device::In } else { Device::Out });
            let of_qemu = (monitor, words.pool);
            let guest = Arc::new(manage(subject, pool, of_qemu, recycling, mapped, extents));
            files.guests().add(pid, guest.clone());
            if !is_plugged && let Err(why) = guest.plug_by_itself(shared, is_first) {
                tracing::warn!(pid, "its free pages are not recycled yet: {why}");
            }
        }
        Err(why) => {
            tracing::warn!(pid, "not recycled: {why}");
            recycling.lock().refuse(why.to_string());
        }
    }
}

/// The pool, locked, and the monitor that a process has.
fn inherited(process: &PidFd, words: Words, goes_on: &dyn Fn() -> bool) -> Result<(Pool, OwnedFd), FindError> {
    let theirs = process.descriptor(words.pool).map_err(FindError::Descriptor)?;
    let monitor = process.descriptor(words.qmp).map_err(FindError::Descriptor)?;
    // Closing any other kind of descriptor may wait.
    if sockopt::socket_domain(&monitor) != Ok(AddressFamily::UNIX) {
        return Err(FindError::NoMonitor);
    }
    Ok((lock(&theirs, goes_on)?, monitor))
}

/// Where its RAM lies, and whether it has its device.
fn locate(
    files: &impl Managed,
    subject: &Subject,
    monitor: &OwnedFd,
    goes_on: &(dyn Fn() -> bool + Sync),
) -> Result<(Mapped, Vec<Extent>, bool), FindError> {
    let mut qmp = Qmp::open(monitor.as_fd(), QMP_TIME, goes_on)?;
    let (ram, is_plugged) = (find_ram(&mut qmp)?, device::is_plugged(&mut qmp)?);
    let mapped = mapped(files, subject.owner.pid, goes_on)?;
    let extents = extents_of(&mapped.places, &ram);
    if extents.is_empty() {
        return Err(FindError::Unmanaged);
    }
    // All that was asked by its number was asked of this process.
    if subject.owner.lives() { Ok((mapped, extents, is_plugged)) } else { Err(FindError::Over) }
}

/// From now on it is recycled, and what it marks is not merged.
fn manage(
    subject: Subject,
    pool: Pool,
    (monitor, number): (OwnedFd, u32),
    recycling: Arc<Mutex<Recycling>>,
    mapped: Mapped,
    extents: Vec<Extent>,
) -> Guest {
    let Mapped { files, ram, .. } = mapped;
    for (number, file) in files.iter().enumerate() {
        let own = |extent: &&Extent| extent.region == RegionId(number as u32);
        let own = extents.iter().filter(own).copied().collect();
        file.state().region.free = Some(FreePages::new(pool.marks.clone(), own));
    }
    recycling.lock().locate(extents.clone());
    let pages: u64 = extents.iter().map(|extent| u64::from(extent.run.len)).sum();
    tracing::info!(pid = subject.owner.pid, "free pages of {} MiB are punched", (pages * PAGE_SIZE as u64) >> 20);
    let qemu = Arc::new(Qemu { owner: subject.owner, monitor, pool: number });
    let ground = Process::new(qemu.clone(), ram);
    Guest { qemu, sweeper: Mutex::new(Sweeper::new(pool, extents, Box::new(ground))), recycling, files }
}

/// Waits until no other daemon works on the pool.
fn lock(theirs: &OwnedFd, goes_on: &dyn Fn() -> bool) -> Result<Pool, FindError> {
    loop {
        match Pool::take(theirs) {
            Err(TakeError::Busy) if goes_on() => std::thread::sleep(STEP),
            Err(TakeError::Busy) => return Err(FindError::Over),
            taken => return Ok(taken?),
        }
    }
}

/// Files that a process maps for writing, in the order of their addresses.
struct Mapped {
    files: Vec<Arc<File>>,
    ram: Vec<OfRam>,
    /// The region is the number of the file.
    places: Vec<Place>,
}

/// What it maps of files that are managed. Waits for those that no round has found yet.
fn mapped(files: &impl Managed, pid: i32, goes_on: &dyn Fn() -> bool) -> Result<Mapped, FindError> {
    let deadline = Instant::now() + ROUND_TIME;
    loop {
        if !goes_on() {
            return Err(FindError::Over);
        }
        let (found, missing) = mapped_now(files, pid).map_err(FindError::Maps)?;
        if !missing || Instant::now() >= deadline {
            return Ok(found);
        }
        std::thread::sleep(STEP);
    }
}

/// The same, and whether there are files that are not managed yet.
fn mapped_now(files: &impl Managed, pid: i32) -> std::io::Result<(Mapped, bool)> {
    let mut found = Mapped { files: Vec::new(), ram: Vec::new(), places: Vec::new() };
    let mut missing = false;
    let open = owner::descriptors(pid);
    for_each_map(Some(pid), |line| {
        let id = FileId { dev: line.dev, ino: line.inode };
        if !line.perms.write || !line.perms.shared || !files.is_managed(line.dev) {
            return;
        }
        let Some(file) = files.file(id) else {
            missing = true;
            return;
        };
        let known = found.files.iter().position(|other| Arc::ptr_eq(other, &file));
        let number = known.or_else(|| {
            let &(_, number) = open.iter().find(|&&(other, _)| other == id)?;
            found.files.push(file.clone());
            found.ram.push(OfRam { file: file.clone(), id, number });
            Some(found.files.len() - 1)
        });
        let first = u32::try_from(line.offset / PAGE_SIZE as u64);
        let pages = u32::try_from(line.range.len / PAGE_SIZE);
        if let (Some(number), Ok(first), Ok(pages)) = (number, first, pages)
            && first.checked_add(pages).is_some()
        {
            let region = RegionId(number as u32);
            found.places.push(Place { start: line.range.start as u64, pages, region, first: PageNo(first) });
        }
    })?;
    Ok((found, missing))
}

#[cfg(test)]
mod tests;
