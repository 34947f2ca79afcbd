//! The process that is a guest, and its files.

use std::os::fd::OwnedFd;
use std::sync::Arc;

use kmem::memfd::{FileId, identity};
use rustix::fs::{OFlags, fcntl_getfl};
use rustix::io::Errno;
use wire::Run;
use wire::recycle::Refusal;

use crate::backend::module::file::File;
use crate::backend::module::owner::Owner;

/// Makes pages of the guest's file of this number holes, unless pinned; calls back with holes.
pub(super) type Punch<'a> = Box<dyn Fn(usize, &[Run], &mut dyn FnMut(Run)) -> Result<(), Errno> + 'a>;

/// What a sweep needs of the process. The tests have a model.
pub(super) trait Ground: Send {
    /// Why no page may be taken now.
    fn held(&self) -> Option<Refusal>;

    /// Opens the files for one sweep: the guest must have them open for writing still.
    fn open(&self) -> Result<Punch<'_>, Errno>;

    /// Reads and drops what the monitor has said: QEMU would keep it.
    fn drain(&self);
}

pub(super) struct Qemu {
    pub(super) owner: Arc<Owner>,
    pub(super) monitor: OwnedFd,
    /// The number of its descriptor for the pool.
    pub(super) pool: u32,
}

pub(super) struct OfRam {
    pub(super) file: Arc<File>,
    pub(super) id: FileId,
    /// The number of its descriptor for it.
    pub(super) number: u32,
}

pub(super) struct Process {
    qemu: Arc<Qemu>,
    files: Vec<OfRam>,
}

impl Process {
    pub(super) fn new(qemu: Arc<Qemu>, files: Vec<OfRam>) -> Self {
        Self { qemu, files }
    }
}

impl Ground for Process {
    fn held(&self) -> Option<Refusal> {
        // A device that has pinned pages would go on with those that are punched away.
        match kmem::procfs::status(Some(self.qemu.owner.pid)) {
            Ok(status) if status.vm_pin_kib > 0 => Some(Refusal::Pinned),
            Ok(status) if status.vm_lck_kib > 0 => Some(Refusal::Locked),
            Ok(_) => None,
            Err(_) => Some(Refusal::Kernel),
        }
    }

    fn open(&self) -> Result<Punch<'_>, Errno> {
        let mut open = Vec::new();
        for &OfRam { id, number, .. } in &self.files {
            let fd = self.qemu.owner.process.descriptor(number).map_err(errno)?;
            if identity(&fd).ok() != Some(id) {
                // It is another file now. Closing it may wait for its server.
                let _ = std::thread::Builder::new().name("closing".into()).spawn(move || drop(fd));
                return Err(Errno::STALE);
            }
            if !fcntl_getfl(&fd)?.intersects(OFlags::RDWR | OFlags::WRONLY) {
                return Err(Errno::BADF);
            }
            open.push(fd);
        }
        Ok(Box::new(move |number, runs, punched| {
            // For as long as it is punched.
            let _open = &open;
            let OfRam { file, .. } = self.files.get(number).ok_or(Errno::BADF)?;
            file.kernel.punch(file.id, runs, punched)
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

    use crate::sync::Mutex;
    use wire::PageNo;

    use super::*;
    use crate::backend::module::tests::Fake;

    #[test]
    fn pages_of_the_processes_own_file_are_punched_and_no_other_file_in_its_place() {
        let (ram, _map) = kmem::memfd::create_fixed("ram", 16 << 12).unwrap();
        let (other, _other_map) = kmem::memfd::create_fixed("other", 16 << 12).unwrap();
        let fake = Arc::new(Fake(Mutex::default()));
        fake.0.lock().fill(1, 16);
        let file = crate::backend::module::tests::file(fake.clone(), 16);
        let (monitor, _qemu) = std::os::unix::net::UnixStream::pair().unwrap();
        let owner = Owner::this();
        let qemu = Arc::new(Qemu { owner, monitor: monitor.into(), pool: 0 });
        let id = identity(&ram).unwrap();
        let with = |fd: &OwnedFd| {
            let number = fd.as_raw_fd() as u32;
            Process::new(qemu.clone(), vec![OfRam { file: file.clone(), id, number }])
        };
        let punch = |process: &Process, number| {
            let mut all = Vec::new();
            process.open()?(number, &[Run::new(PageNo(2), 3)], &mut |run| all.push(run))?;
            Ok::<_, Errno>(all)
        };
        assert_eq!(punch(&with(&ram), 0), Ok([2, 3, 4].map(|page| Run::new(PageNo(page), 1)).to_vec()));
        let holds = |page: usize| fake.0.lock().files[&1][page].content != 0;
        assert_eq!([1, 2, 4, 5].map(holds), [true, false, false, true]);
        assert_eq!(punch(&with(&ram), 1), Err(Errno::BADF), "there is no second file");
        assert_eq!(punch(&with(&other), 0), Err(Errno::STALE));
        // It may no longer write to it.
        let path = format!("/proc/self/fd/{}", ram.as_raw_fd());
        let read_only: OwnedFd = std::fs::File::open(path).unwrap().into();
        assert_eq!(punch(&with(&read_only), 0), Err(Errno::BADF));
    }
}
