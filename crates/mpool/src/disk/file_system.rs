//! The storage interface on the file system.

use std::fs::{File, OpenOptions};
use std::io::{self, Write};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering::Relaxed};

use rustix::fs::{AtFlags, Dir, FallocateFlags, FlockOperation, Gid, Mode, OFlags, Uid};
use rustix::io::Errno;

use super::medium::{Access, EachLease, Medium, MediumFile, Open, ReadPiece, Room, Storage};
use super::uring;

/// The file system.
#[derive(Clone, Copy, Debug, Default)]
pub struct Disk;

impl Storage for Disk {
    fn directory(&self, path: &Path) -> io::Result<Arc<dyn Medium>> {
        let path = path.canonicalize()?;
        // Not anything else: opening a pipe waits for its other end.
        let handle = OpenOptions::new().read(true).custom_flags(OFlags::DIRECTORY.bits() as i32).open(&path)?;
        Ok(Arc::new(DiskDirectory { path, handle, locked_by: AtomicU32::new(0) }))
    }

    fn make_directory(&self, path: &Path) -> io::Result<Arc<dyn Medium>> {
        make_directory(path)?;
        self.directory(path)
    }

    fn remove_directory(&self, path: &Path) -> io::Result<()> {
        std::fs::remove_dir(path)
    }
}

/// What the names of leases begin with.
pub(crate) const LEASE: &str = "lease-";

/// Makes a directory, and those that it lies in, durably.
pub(crate) fn make_directory(path: &Path) -> io::Result<()> {
    // The name of each is in the one above it. Its own is synced in any case: it may be as young as
    // that.
    let missing = path.ancestors().skip(1).take_while(|p| !p.as_os_str().is_empty() && !p.exists());
    let new: Vec<&Path> = std::iter::once(path).chain(missing).collect();
    std::fs::create_dir_all(path)?;
    for above in new.iter().filter_map(|made| made.parent()) {
        sync_directory(if above.as_os_str().is_empty() { Path::new(".") } else { above })?;
    }
    Ok(())
}

/// Makes the names in a directory durable.
pub(crate) fn sync_directory(path: &Path) -> io::Result<()> {
    File::open(path)?.sync_all()
}

struct DiskDirectory {
    path: PathBuf,
    handle: File,
    /// The process that locked it; 0: none did.
    locked_by: AtomicU32,
}

impl DiskDirectory {
    /// Opens a file of this directory: a regular one, and not one elsewhere that a link names.
    fn open_file(&self, name: &str, flags: OFlags) -> io::Result<File> {
        let mode = Mode::RUSR | Mode::WUSR;
        Ok(claims::open_at(&self.handle, Path::new(name), flags | OFlags::NOFOLLOW, mode)?)
    }
}

impl Drop for DiskDirectory {
    fn drop(&mut self) {
        // A child that another thread makes has the descriptor until it runs its program: closing
        // it here does not end the lock. A copy of this value in a child does not own the lock.
        if self.locked_by.load(Relaxed) == std::process::id() {
            let _ = rustix::fs::flock(&self.handle, FlockOperation::Unlock);
        }
    }
}

impl Medium for DiskDirectory {
    fn path(&self) -> &Path {
        &self.path
    }

    fn open(&self, name: &str, how: Open) -> io::Result<Arc<dyn MediumFile>> {
        let mut flags = if how.read_only { OFlags::RDONLY } else { OFlags::RDWR };
        flags.set(OFlags::CREATE, how.create);
        let direct = how.direct.then(|| self.open_file(name, flags | OFlags::DIRECT));
        let (file, direct) = match direct {
            // A file system without direct I/O refuses it when opening (EINVAL).
            Some(Err(e)) if e.raw_os_error() == Some(libc::EINVAL) => (self.open_file(name, flags)?, false),
            Some(file) => (file?, true),
            None => (self.open_file(name, flags)?, false),
        };
        Ok(Arc::new(DiskFile { file, direct, keeps_holes: AtomicBool::new(false) }))
    }

    fn remove(&self, name: &str) -> io::Result<()> {
        Ok(rustix::fs::unlinkat(&self.handle, name, AtFlags::empty())?)
    }

    fn list(&self) -> io::Result<Vec<String>> {
        let names = Dir::read_from(&self.handle)?.map(|entry| Ok(entry?.file_name().to_string_lossy().into_owned()));
        names.filter(|name: &io::Result<String>| !matches!(name.as_deref(), Ok("." | ".."))).collect()
    }

    fn sync_names(&self) -> io::Result<()> {
        self.handle.sync_all()
    }

    fn lock(&self, access: Access) -> io::Result<bool> {
        let how = match access {
            Access::Exclusive => FlockOperation::NonBlockingLockExclusive,
            Access::Shared => FlockOperation::NonBlockingLockShared,
        };
        match rustix::fs::flock(&self.handle, how) {
            Ok(()) => {
                self.locked_by.store(std::process::id(), Relaxed);
                Ok(true)
            }
            Err(Errno::WOULDBLOCK) => Ok(false),
            Err(errno) => Err(errno.into()),
        }
    }

    fn identity(&self) -> io::Result<u64> {
        use std::os::unix::fs::MetadataExt;
        Ok(self.handle.metadata()?.ino())
    }

    fn room(&self) -> io::Result<Room> {
        let stat = rustix::fs::fstatvfs(&self.handle)?;
        Ok(Room { total: stat.f_blocks * stat.f_frsize, free: stat.f_bavail * stat.f_frsize })
    }

    fn lease(&self, bytes: &[u8]) -> io::Result<OwnedFd> {
        let mut random = [0; 8];
        rustix::rand::getrandom(&mut random, rustix::rand::GetRandomFlags::empty())?;
        let name = format!("{LEASE}{:016x}", u64::from_le_bytes(random));
        let in_memory = || -> io::Result<OwnedFd> {
            let file: File = rustix::fs::memfd_create(LEASE, rustix::fs::MemfdFlags::CLOEXEC)?.into();
            file.write_all_at(bytes, 0)?;
            Ok(file.into())
        };
        let mut file = match self.open_file(&name, OFlags::RDWR | OFlags::CREATE | OFlags::EXCL) {
            // Nobody can write there, so nobody has to be told.
            Err(e) if e.kind() == io::ErrorKind::ReadOnlyFilesystem => return in_memory(),
            made => made?,
        };
        let mut fill = || -> io::Result<()> {
            let (owner, own) = (rustix::fs::fstat(&self.handle)?, rustix::fs::fstat(&file)?);
            if own.st_uid != owner.st_uid {
                rustix::fs::fchown(&file, Some(Uid::from_raw(owner.st_uid)), Some(Gid::from_raw(owner.st_gid)))?;
            }
            rustix::fs::flock(&file, FlockOperation::NonBlockingLockExclusive)?;
            file.write_all(bytes)
        };
        match fill() {
            Ok(()) => Ok(file.into()),
            // An empty lease is not understood: nobody writes to the pool while this process lives.
            Err(e) if matches!(e.kind(), io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded) => {
                file.set_len(0)?;
                rustix::fs::flock(&file, FlockOperation::NonBlockingLockExclusive)?;
                std::mem::forget(file);
                in_memory()
            }
            Err(error) => {
                let _ = self.remove(&name);
                Err(error)
            }
        }
    }

    fn leases(&self, each: &mut EachLease<'_>) -> io::Result<()> {
        for name in self.list()?.into_iter().filter(|name| name.starts_with(LEASE)) {
            let mut file = self.open_file(&name, OFlags::RDONLY)?;
            match rustix::fs::flock(&file, FlockOperation::NonBlockingLockExclusive) {
                // One that stays counts no more than before.
                Ok(()) => drop(self.remove(&name)),
                Err(Errno::WOULDBLOCK) => each(&name, file.metadata()?.len(), &mut file)?,
                Err(errno) => return Err(errno.into()),
            }
        }
        Ok(())
    }
}

struct DiskFile {
    file: File,
    direct: bool,
    /// The file system refused to punch holes.
    keeps_holes: AtomicBool,
}

impl MediumFile for DiskFile {
    fn len(&self) -> io::Result<u64> {
        Ok(self.file.metadata()?.len())
    }

    fn used(&self) -> io::Result<u64> {
        use std::os::unix::fs::MetadataExt;
        Ok(self.file.metadata()?.blocks() * 512)
    }

    fn is_direct(&self) -> bool {
        self.direct
    }

    fn punches(&self) -> bool {
        !self.keeps_holes.load(Relaxed)
    }

    fn read_at(&self, into: &mut [u8], offset: u64) -> io::Result<()> {
        self.file.read_exact_at(into, offset)
    }

    fn write_at(&self, from: &[u8], offset: u64) -> io::Result<()> {
        self.file.write_all_at(from, offset)
    }

    fn sync(&self) -> io::Result<()> {
        self.file.sync_data()
    }

    fn sync_both(&self, other: &dyn MediumFile) -> io::Result<()> {
        let at_once = other.descriptor().and_then(|other| uring::sync_both([self.file.as_fd(), other]));
        at_once.unwrap_or_else(|| {
            self.sync()?;
            other.sync()
        })
    }

    fn descriptor(&self) -> Option<BorrowedFd<'_>> {
        Some(self.file.as_fd())
    }

    fn allocate(&self, offset: u64, len: u64) -> io::Result<()> {
        match fallocate(&self.file, FallocateFlags::empty(), offset, len) {
            // No such operation on this file system: space is taken when it is written.
            Err(e) if e.raw_os_error() == Some(libc::EOPNOTSUPP) => {
                if self.len()? < offset + len {
                    self.set_len(offset + len)
                } else {
                    Ok(())
                }
            }
            result => result,
        }
    }

    fn punch(&self, offset: u64, len: u64) -> io::Result<()> {
        match fallocate(&self.file, FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE, offset, len) {
            // No such operation on this file system: the space is used again, but not given back.
            Err(e) if e.raw_os_error() == Some(libc::EOPNOTSUPP) => {
                self.keeps_holes.store(true, Relaxed);
                Ok(())
            }
            result => result,
        }
    }

    fn clear(&self, offset: u64, len: u64) -> io::Result<()> {
        fallocate(&self.file, FallocateFlags::ZERO_RANGE | FallocateFlags::KEEP_SIZE, offset, len)
    }

    fn set_len(&self, len: u64) -> io::Result<()> {
        self.file.set_len(len)
    }

    fn read_many(&self, pieces: &mut [ReadPiece<'_>]) -> io::Result<()> {
        if pieces.len() > 1 && uring::read_many(self.file.as_fd(), pieces)? {
            return Ok(());
        }
        pieces.iter_mut().try_for_each(|piece| self.read_at(piece.into, piece.offset))
    }

    fn write_while(&self, parts: &[&[u8]], mut offset: u64, meanwhile: &mut dyn FnMut(&[u8])) -> io::Result<()> {
        let done = uring::write_while(self.file.as_fd(), parts, offset, meanwhile).transpose()?;
        if done == Some(true) {
            return Ok(());
        }
        for part in parts {
            if done.is_none() {
                meanwhile(part);
            }
            self.write_at(part, offset)?;
            offset += part.len() as u64;
        }
        Ok(())
    }

    fn read_while(&self, into: &mut [u8], offset: u64, landed: &mut dyn FnMut(usize, &mut [u8])) -> io::Result<()> {
        // A single request has nothing to overlap with, and this way is shorter.
        let several =
            (into.len() > uring::REQUEST).then(|| uring::read_while(&self.file, into, offset, landed)).flatten();
        several.unwrap_or_else(|| {
            self.read_at(into, offset)?;
            landed(0, into);
            Ok(())
        })
    }
}

fn fallocate(file: &File, flags: FallocateFlags, offset: u64, len: u64) -> io::Result<()> {
    loop {
        match rustix::fs::fallocate(file, flags, offset, len) {
            Err(Errno::INTR) => {}
            result => return Ok(result?),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_lock_ends_with_its_owner_though_a_child_has_the_descriptor_too() {
        let dir = tempfile::tempdir().unwrap();
        let open = || DiskDirectory {
            path: dir.path().into(),
            handle: File::open(dir.path()).unwrap(),
            locked_by: AtomicU32::new(0),
        };
        let (first, second, third) = (open(), open(), open());
        assert!(first.lock(Access::Exclusive).unwrap());
        // As a child has it between fork and exec.
        let child = first.handle.try_clone().unwrap();
        assert!(!second.lock(Access::Exclusive).unwrap());
        drop(first);
        assert!(second.lock(Access::Exclusive).unwrap());
        // The copy of a child that goes on without exec.
        let child_of_second = DiskDirectory {
            path: dir.path().into(),
            handle: second.handle.try_clone().unwrap(),
            locked_by: AtomicU32::new(std::process::id() + 1),
        };
        drop(child_of_second);
        assert!(!third.lock(Access::Exclusive).unwrap());
        drop((second, child));
        assert!(third.lock(Access::Exclusive).unwrap());
    }
}
