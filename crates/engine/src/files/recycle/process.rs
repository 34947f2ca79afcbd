//! The process that is a guest, and its files.

use std::os::fd::OwnedFd;
use std::sync::Arc;

use kmem::memfd::{FileId, identity};
use kmem::pidfd::PidFd;
use rustix::fs::{FallocateFlags, fallocate};
use rustix::io::Errno;
use wire::Run;
use wire::recycle::Refusal;

/// Makes pages of a file holes. The number says which of the guest's files.
pub(super) type Punch<'a> = Box<dyn Fn(usize, Run) -> Result<(), Errno> + 'a>;

/// What a sweep needs of the process. The tests have a model.
pub(super) trait Ground: Send {
    /// Why no page may be taken now.
    fn held(&self) -> Option<Refusal>;

    /// Opens the files for one sweep: they are the guest's, and go with it.
    fn open(&self) -> Result<Punch<'_>, Errno>;

    /// Reads and drops what the monitor has said: QEMU would keep it.
    fn drain(&self);
}

/// A QEMU.
pub(super) struct Qemu {
    pub(super) pid: i32,
    pub(super) process: PidFd,
    pub(super) monitor: OwnedFd,
    /// The number of its descriptor for the pool.
    pub(super) pool: u32,
}

/// The same, with its descriptors for its RAM.
pub(super) struct Process {
    qemu: Arc<Qemu>,
    files: Vec<(FileId, u32)>,
}

impl Process {
    pub(super) fn new(qemu: Arc<Qemu>, files: Vec<(FileId, u32)>) -> Self {
        Self { qemu, files }
    }
}

impl Ground for Process {
    fn held(&self) -> Option<Refusal> {
        // A device that has pinned pages would go on with those that are punched away.
        match kmem::procfs::status(Some(self.qemu.pid)) {
            Ok(status) if status.vm_pin_kib > 0 => Some(Refusal::Pinned),
            Ok(status) if status.vm_lck_kib > 0 => Some(Refusal::Locked),
            Ok(_) => None,
            Err(_) => Some(Refusal::Kernel),
        }
    }

    fn open(&self) -> Result<Punch<'_>, Errno> {
        let mut open = Vec::new();
        for &(file, number) in &self.files {
            let fd = self.qemu.process.descriptor(number).map_err(errno)?;
            if identity(&fd).ok() != Some(file) {
                // It is another file now. Closing it may wait for its server.
                let _ = std::thread::Builder::new().name("closing".into()).spawn(move || drop(fd));
                return Err(Errno::STALE);
            }
            open.push(fd);
        }
        Ok(Box::new(move |file, run| {
            let page = kmem::PAGE_SIZE as u64;
            let flags = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
            let fd = open.get(file).ok_or(Errno::BADF)?;
            loop {
                match fallocate(fd, flags, u64::from(run.page.0) * page, u64::from(run.len) * page) {
                    Err(Errno::INTR) => {}
                    punched => return punched,
                }
            }
        }))
    }

    fn drain(&self) {
        qmp::drain(&self.qemu.monitor);
    }
}

pub(super) fn errno(error: std::io::Error) -> Errno {
    Errno::from_io_error(&error).unwrap_or(Errno::IO)
}

#[cfg(test)]
mod tests {
    use std::os::fd::AsRawFd;

    use wire::PageNo;

    use super::*;

    #[test]
    fn pages_of_the_processes_own_file_are_punched_and_no_other_file_in_its_place() {
        let (ram, _map) = kmem::memfd::create_fixed("ram", 16 << 12).unwrap();
        let (other, _other_map) = kmem::memfd::create_fixed("other", 16 << 12).unwrap();
        for fd in [&ram, &other] {
            rustix::io::pwrite(fd, &[7; 16 << 12], 0).unwrap();
        }
        let pid = std::process::id() as i32;
        let (monitor, _qemu) = std::os::unix::net::UnixStream::pair().unwrap();
        let process = PidFd::open(pid).unwrap();
        let qemu = Arc::new(Qemu { pid, process, monitor: monitor.into(), pool: 0 });
        let number = ram.as_raw_fd() as u32;
        let id = identity(&ram).unwrap();
        let process = Process::new(qemu.clone(), vec![(id, number)]);
        process.open().unwrap()(0, Run::new(PageNo(2), 3)).unwrap();
        let byte = |fd: &OwnedFd, page: u64| {
            let mut byte = [0];
            rustix::io::pread(fd, &mut byte, page << 12).unwrap();
            byte[0]
        };
        assert_eq!([1, 2, 4, 5].map(|page| byte(&ram, page)), [7, 0, 0, 7]);
        assert_eq!(process.open().unwrap()(1, Run::new(PageNo(0), 1)), Err(Errno::BADF));
        let there = other.as_raw_fd() as u32;
        let process = Process::new(qemu, vec![(id, there)]);
        assert_eq!(process.open().err(), Some(Errno::STALE));
        assert_eq!(byte(&other, 3), 7);
    }
}
