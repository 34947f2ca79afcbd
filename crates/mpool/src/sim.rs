//! A storage for tests that behaves as badly as the interface allows.
//!
//! Files live in memory. Unsynced data are lost at a [`Sim::crash`], or kept, or lost in part (512
//! bytes at a time, and then the block around them may hold anything), in any order; names of files
//! and directories too. Any number of operations can be made to fail once, to tear, to find the
//! medium full, or to be the last one before the power goes; and reads to fail, once or until the
//! block is written again. Nothing hangs on a clock or on an order of hashes: a seed replays.

mod bytes;
mod damage;

use std::collections::BTreeMap;
use std::io::{self, ErrorKind};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard};

pub(crate) use self::bytes::Random;
use self::bytes::{Bytes, Op};
pub(crate) use self::damage::Wrong;
use crate::BLOCK;
use crate::disk::medium::{Access, Medium, MediumFile, Open, Room, Storage};

/// What goes wrong.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Fault {
    /// The operation fails and does nothing.
    Error,
    /// A write does its first half and fails.
    Torn,
    /// From here on the medium is full.
    Full,
    /// From here on nothing works.
    PowerLoss,
}

/// Whether an operation is on the medium.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Fate {
    /// Not synced.
    Pending,
    /// A sync failed: no later one covers it.
    Limbo,
    Durable,
}

#[derive(Clone, Default)]
struct FileState {
    now: Bytes,
    durable: Bytes,
    /// What happened since, in order.
    journal: Vec<(Op, Fate)>,
    /// Bytes that cannot be read until they are written again.
    unreadable: Vec<(usize, usize)>,
}

#[derive(Clone, Default)]
struct Directory {
    now: BTreeMap<String, u64>,
    durable: BTreeMap<String, u64>,
    /// Names made and removed, not synced.
    pending: Vec<(String, Option<u64>)>,
    identity: u64,
    /// Its own name: whether it is there, and whether it is on the medium.
    there: bool,
    durable_there: bool,
    shared: usize,
    exclusive: bool,
}

#[derive(Default)]
struct World {
    directories: BTreeMap<PathBuf, Directory>,
    files: BTreeMap<u64, FileState>,
    next: u64,
    operations: u64,
    faults: BTreeMap<u64, Fault>,
    reads: u64,
    /// Reads that fail, and whether the block stays unreadable.
    read_faults: BTreeMap<u64, bool>,
    /// Something that was planned has happened.
    fired: bool,
    full: bool,
    dead: bool,
}

impl World {
    /// Counts an operation. Gives the fault that it meets.
    fn step(&mut self, takes_space: bool) -> io::Result<Option<Fault>> {
        let number = self.operations;
        self.operations += 1;
        let fault = self.faults.remove(&number);
        self.fired |= fault.is_some();
        self.full |= fault == Some(Fault::Full);
        self.dead |= fault == Some(Fault::PowerLoss);
        if self.dead || fault == Some(Fault::Error) {
            return Err(io::Error::from_raw_os_error(libc::EIO));
        }
        if self.full && takes_space {
            return Err(io::Error::from_raw_os_error(libc::ENOSPC));
        }
        Ok(fault)
    }
}

/// The storage.
#[derive(Clone, Default)]
pub(crate) struct Sim(Arc<Mutex<World>>);

impl Sim {
    fn world(&self) -> MutexGuard<'_, World> {
        self.0.lock().unwrap()
    }

    pub(crate) fn storage(&self) -> Arc<dyn Storage> {
        Arc::new(self.clone())
    }

    /// Operations so far that can go wrong.
    pub(crate) fn operations(&self) -> u64 {
        self.world().operations
    }

    /// Makes operation number `at`, counted from the beginning, go wrong too.
    pub(crate) fn plan(&self, at: u64, fault: Fault) {
        self.world().faults.insert(at, fault);
    }

    /// Makes the read that comes after `after` others fail too; the block stays unreadable until it
    /// is written, if it `stays`.
    pub(crate) fn plan_read(&self, after: u64, stays: bool) {
        let mut world = self.world();
        let at = world.reads + after;
        world.read_faults.insert(at, stays);
    }

    /// Whether something that was planned has happened.
    pub(crate) fn has_fired(&self) -> bool {
        self.world().fired
    }

    /// Whether the power is gone.
    pub(crate) fn is_dead(&self) -> bool {
        self.world().dead
    }

    /// The medium has room and works again, and all of it can be read.
    pub(crate) fn heal(&self) {
        let mut world = self.world();
        world.faults.clear();
        world.read_faults.clear();
        (world.full, world.fired) = (false, false);
        world.files.values_mut().for_each(|file| file.unreadable.clear());
    }

    /// The contents that a power loss now may leave. Handles of the old storage keep working on it.
    pub(crate) fn crash(&self, random: &mut Random) -> Sim {
        let old = self.world();
        let mut new = World { next: old.next, ..World::default() };
        for (path, directory) in &old.directories {
            let there = directory.durable_there == directory.there || random.below(2) == 0;
            let there = if there { directory.there } else { directory.durable_there };
            let mut names = directory.durable.clone();
            for (name, id) in &directory.pending {
                if random.below(2) == 0 {
                    match id {
                        Some(id) => names.insert(name.clone(), *id),
                        None => names.remove(name),
                    };
                }
            }
            if there {
                let (identity, now, durable) = (directory.identity, names.clone(), names);
                new.directories.insert(path.clone(), Directory { now, durable, ..Directory::durable(identity) });
            }
        }
        for (&id, file) in &old.files {
            let mut bytes = file.durable.clone();
            for (op, fate) in &file.journal {
                match (if *fate == Fate::Durable { 2 } else { random.below(3) }, op) {
                    (0, _) => {}
                    (1, Op::Write(offset, data)) => bytes.tear(*offset as usize, data, random),
                    _ => bytes.apply(op),
                }
            }
            let unreadable = file.unreadable.clone();
            new.files.insert(id, FileState { now: bytes.clone(), durable: bytes, unreadable, ..FileState::default() });
        }
        Sim(Arc::new(Mutex::new(new)))
    }
}

impl Directory {
    /// An empty one, whose name is on the medium.
    fn durable(identity: u64) -> Self {
        Self { identity, there: true, durable_there: true, ..Self::default() }
    }
}

impl Storage for Sim {
    fn directory(&self, path: &Path) -> io::Result<Arc<dyn Medium>> {
        if !self.world().directories.get(path).is_some_and(|directory| directory.there) {
            return Err(ErrorKind::NotFound.into());
        }
        Ok(Arc::new(SimDirectory { sim: self.clone(), path: path.into(), locked: Mutex::new(None) }))
    }

    fn make_directory(&self, path: &Path) -> io::Result<Arc<dyn Medium>> {
        let mut world = self.world();
        if !world.directories.get(path).is_some_and(|directory| directory.there) {
            world.step(true)?;
            world.next += 1;
            let identity = world.next;
            let directory = Directory { identity, there: true, ..Directory::default() };
            world.directories.insert(path.into(), directory);
        }
        // As on the file system: the name is synced also where it was there.
        world.step(false)?;
        world.directories.get_mut(path).into_iter().for_each(|directory| directory.durable_there = true);
        drop(world);
        self.directory(path)
    }

    fn remove_directory(&self, path: &Path) -> io::Result<()> {
        let mut world = self.world();
        world.step(false)?;
        match world.directories.get_mut(path) {
            Some(directory) if directory.now.is_empty() => directory.there = false,
            _ => return Err(ErrorKind::DirectoryNotEmpty.into()),
        }
        Ok(())
    }
}

struct SimDirectory {
    sim: Sim,
    path: PathBuf,
    locked: Mutex<Option<Access>>,
}

impl Drop for SimDirectory {
    fn drop(&mut self) {
        let Some(access) = *self.locked.lock().unwrap() else { return };
        self.with(|directory| match access {
            Access::Exclusive => directory.exclusive = false,
            Access::Shared => directory.shared -= 1,
        });
    }
}

impl SimDirectory {
    fn with<R>(&self, f: impl FnOnce(&mut Directory) -> R) -> R {
        f(self.sim.world().directories.entry(self.path.clone()).or_default())
    }
}

impl Medium for SimDirectory {
    fn path(&self) -> &Path {
        &self.path
    }

    fn open(&self, name: &str, how: Open) -> io::Result<Arc<dyn MediumFile>> {
        let found = self.with(|d| d.now.get(name).copied());
        let id = match found {
            Some(id) => id,
            None if how.create => {
                let mut world = self.sim.world();
                world.step(true)?;
                world.next += 1;
                let id = world.next;
                world.files.insert(id, FileState::default());
                let directory = world.directories.entry(self.path.clone()).or_default();
                directory.now.insert(name.into(), id);
                directory.pending.push((name.into(), Some(id)));
                id
            }
            None => return Err(ErrorKind::NotFound.into()),
        };
        Ok(Arc::new(SimFile { sim: self.sim.clone(), id, direct: how.direct }))
    }

    fn remove(&self, name: &str) -> io::Result<()> {
        self.sim.world().step(false)?;
        self.with(|d| {
            d.now.remove(name).ok_or(ErrorKind::NotFound)?;
            d.pending.push((name.into(), None));
            Ok(())
        })
    }

    fn list(&self) -> io::Result<Vec<String>> {
        Ok(self.with(|d| d.now.keys().cloned().collect()))
    }

    fn sync_names(&self) -> io::Result<()> {
        self.sim.world().step(false)?;
        self.with(|d| {
            d.durable = d.now.clone();
            d.pending.clear();
        });
        Ok(())
    }

    fn lock(&self, access: Access) -> io::Result<bool> {
        let free = self.with(|directory| match access {
            _ if directory.exclusive => false,
            Access::Exclusive if directory.shared > 0 => false,
            Access::Exclusive => {
                directory.exclusive = true;
                true
            }
            Access::Shared => {
                directory.shared += 1;
                true
            }
        });
        if free {
            *self.locked.lock().unwrap() = Some(access);
        }
        Ok(free)
    }

    fn identity(&self) -> io::Result<u64> {
        Ok(self.with(|directory| directory.identity))
    }

    fn room(&self) -> io::Result<Room> {
        Ok(Room { total: 1 << 40, free: 1 << 39 })
    }
}

struct SimFile {
    sim: Sim,
    id: u64,
    direct: bool,
}

impl SimFile {
    fn with<R>(&self, f: impl FnOnce(&mut FileState) -> R) -> R {
        f(self.sim.world().files.entry(self.id).or_default())
    }

    fn change(&self, op: Op) {
        self.with(|file| {
            file.now.apply(&op);
            file.journal.push((op, Fate::Pending));
        });
    }

    fn check(&self, address: usize, offset: u64, len: usize) {
        let whole = |n: usize| n.is_multiple_of(BLOCK);
        assert!(
            !self.direct || (whole(address) && whole(offset as usize) && whole(len)),
            "direct I/O needs whole blocks"
        );
    }
}

impl MediumFile for SimFile {
    fn len(&self) -> io::Result<u64> {
        Ok(self.with(|file| file.now.data.len() as u64))
    }

    fn used(&self) -> io::Result<u64> {
        Ok(self.with(|file| file.now.space.iter().filter(|&&s| s).count() as u64 * BLOCK as u64))
    }

    fn is_direct(&self) -> bool {
        self.direct
    }

    fn read_at(&self, into: &mut [u8], offset: u64) -> io::Result<()> {
        self.check(into.as_ptr().addr(), offset, into.len());
        let mut world = self.sim.world();
        if world.dead {
            return Err(io::Error::from_raw_os_error(libc::EIO));
        }
        let number = world.reads;
        world.reads += 1;
        let fault = world.read_faults.remove(&number);
        world.fired |= fault.is_some();
        drop(world);
        self.with(|file| {
            let (start, end) = (offset as usize, offset as usize + into.len());
            if let Some(stays) = fault {
                // One of the blocks that are read.
                let blocks = into.len().div_ceil(BLOCK).max(1);
                let bad = start / BLOCK * BLOCK + number as usize % blocks * BLOCK;
                file.unreadable.extend(stays.then_some((bad, bad + BLOCK)));
                return Err(io::Error::from_raw_os_error(libc::EIO));
            }
            if file.unreadable.iter().any(|&(bad, bad_end)| start < bad_end && bad < end) {
                return Err(io::Error::from_raw_os_error(libc::EIO));
            }
            let from = file.now.data.get(start..end);
            into.copy_from_slice(from.ok_or(ErrorKind::UnexpectedEof)?);
            Ok(())
        })
    }

    fn write_at(&self, from: &[u8], offset: u64) -> io::Result<()> {
        self.check(from.as_ptr().addr(), offset, from.len());
        let torn = self.sim.world().step(true)? == Some(Fault::Torn);
        let len = if torn { from.len() / 2 } else { from.len() };
        self.with(|file| {
            let covers = |&(at, end): &(usize, usize)| offset as usize <= at && end <= offset as usize + len;
            file.unreadable.retain(|bad| !covers(bad));
        });
        self.change(Op::Write(offset, from[..len].to_vec()));
        if torn { Err(io::Error::from_raw_os_error(libc::EIO)) } else { Ok(()) }
    }

    fn sync(&self) -> io::Result<()> {
        let result = self.sim.world().step(false);
        let torn = matches!(result, Ok(Some(Fault::Torn)));
        self.with(|file| {
            let fate = if result.is_err() || torn { Fate::Limbo } else { Fate::Durable };
            file.journal.iter_mut().filter(|(_, f)| *f == Fate::Pending).for_each(|(_, f)| *f = fate);
            if file.journal.iter().all(|(_, f)| *f == Fate::Durable) {
                file.journal.drain(..).for_each(|(op, _)| file.durable.apply(&op));
            }
        });
        result?;
        if torn { Err(io::Error::from_raw_os_error(libc::EIO)) } else { Ok(()) }
    }

    fn allocate(&self, offset: u64, len: u64) -> io::Result<()> {
        self.sim.world().step(true)?;
        self.change(Op::Allocate(offset, len));
        Ok(())
    }

    fn punch(&self, offset: u64, len: u64) -> io::Result<()> {
        self.sim.world().step(false)?;
        self.change(Op::Punch(offset, len));
        Ok(())
    }

    fn set_len(&self, len: u64) -> io::Result<()> {
        self.sim.world().step(false)?;
        // What is cut off lies elsewhere when the file grows again.
        self.with(|file| file.unreadable.retain(|&(at, _)| (at as u64) < len));
        self.change(Op::SetLen(len));
        Ok(())
    }
}
