//! A snapshot's RAM as a file that the kernel asks for page by page (FUSE).
//!
//! Each clone maps the file privately. A page that no clone has touched yet is read from the pool
//! and checked. From then on it lies in the kernel's page cache, once for all clones, and can be
//! evicted. A page that a clone writes is its own.
//!
//! The file system is not mounted in any directory: it consists of one file, whose descriptor the
//! clones inherit. It ends with the last of them.
//!
//! *Two processes.* The supervisor ([`start`]) holds the FUSE device, and starts a page server
//! ([`serve`]), which reads from the pool. If the server ends, whatever the reason, the clones wait
//! until the next one answers: what the first had taken from the kernel stands in memory that the
//! supervisor keeps (`slots`). If the supervisor ends, the server goes on. Only if both have ended
//! can the kernel not read a page. It ends the clone that asked for it then (SIGBUS), as it does
//! when the pool's bytes are damaged. It never gives other bytes, or zeros.
//!
//! The protocol is our own (`fuse`), not the crate fuser's: a session of that crate can neither be
//! continued by another process, nor does it say which requests it has taken.

mod fuse;
pub mod segments;
mod serve;
mod slots;
pub mod uffd;
mod working_set;

use std::ffi::OsString;
use std::fs::File;
use std::io;
use std::os::fd::{AsRawFd, OwnedFd};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::time::{Duration, Instant};

use kmem::pidfd::PidFd;
use rustix::fs::{Mode, OFlags};
use rustix::mount::{FsMountFlags, FsOpenFlags, MountAttrFlags};

pub use serve::{Report, serve};
use slots::Slots;
pub use working_set::prefetch;

/// The file's name.
const NAME: &str = "ram";
/// Threads of a server, and its slots.
const THREADS: usize = 2;
/// How long a server may take until it is ready for the first time: it reads the snapshot's map.
const PATIENCE: Duration = Duration::from_secs(60);
const PAUSE: Duration = Duration::from_millis(2);
/// Time between two starts of a server, at least, so that one that ends at once is no busy loop.
const BETWEEN: Duration = Duration::from_secs(1);

/// The page server that runs, and what the next one needs.
pub struct Server {
    device: OwnedFd,
    slots: Slots,
    lease: File,
    words: Vec<OsString>,
    child: Child,
    /// When it was started.
    start: Instant,
    /// How many were started.
    started: usize,
}

/// Why there is no file.
#[derive(Debug, thiserror::Error)]
pub enum MemoryError {
    /// The kernel has no FUSE, or this account may not mount.
    #[error("cannot serve the guests' memory through FUSE: {0}; that takes root, and the kernel's module fuse")]
    Fuse(#[source] io::Error),
    /// The server does not start, or not as it should.
    #[error("the page server did not start: {0}")]
    Server(String),
}

/// Makes the file, and starts its page server. `words` are a program, which must call [`serve`],
/// and its arguments; `--lease N` is added, the number of the lease's descriptor. The lease is held
/// by this process, and by each server.
///
/// # Errors
/// If the kernel or the server cannot serve it.
pub fn start(words: Vec<OsString>, lease: File) -> Result<(File, Server), MemoryError> {
    let (device, root) = mount().map_err(MemoryError::Fuse)?;
    let failed = |error: io::Error| MemoryError::Server(error.to_string());
    let slots = Slots::create(THREADS).map_err(failed)?;
    let child = spawn(&words, &device, &slots, &lease).map_err(failed)?;
    let mut server = Server { device, slots, lease, words, child, start: Instant::now(), started: 1 };
    while server.slots.server().map_err(failed)? == 0 {
        if let Some(status) = server.child.try_wait().map_err(failed)? {
            return Err(MemoryError::Server(format!("it ended, {status}")));
        }
        if server.start.elapsed() > PATIENCE {
            let _ = server.child.kill();
            return Err(MemoryError::Server("it does not get ready".into()));
        }
        std::thread::sleep(PAUSE);
    }
    let file = rustix::fs::openat(&root, NAME, OFlags::RDWR | OFlags::CLOEXEC, Mode::empty());
    Ok((file.map_err(|e| MemoryError::Fuse(e.into()))?.into(), server))
}

impl Server {
    /// Starts another server if this one has ended. Gives how it ended, and what hinders the next
    /// one. To be called again and again.
    pub fn watch(&mut self) -> Option<(ExitStatus, io::Result<()>)> {
        let ended = self.child.try_wait().ok()??;
        if self.start.elapsed() < BETWEEN && self.started > 1 {
            return None;
        }
        self.start = Instant::now();
        self.started += 1;
        let next = spawn(&self.words, &self.device, &self.slots, &self.lease).map(|child| self.child = child);
        Some((ended, next))
    }

    /// Ends the server, so that [`Server::watch`] starts another one: its program may be newer.
    pub fn replace(&self) {
        // One that has ended is replaced in any case.
        if let Ok(process) = PidFd::open(self.child.id() as i32) {
            let _ = process.send_signal(libc::SIGTERM);
        }
    }
}

fn spawn(words: &[OsString], device: &OwnedFd, slots: &Slots, lease: &File) -> io::Result<Child> {
    let (program, arguments) = words.split_first().ok_or(io::ErrorKind::InvalidInput)?;
    // A duplicate is inherited. A clone that is started at this moment may have it too: then the
    // lease lives as long as that clone, at most.
    let lease = rustix::io::dup(lease)?;
    let mut command = Command::new(program);
    command.args(arguments).arg("--lease").arg(lease.as_raw_fd().to_string());
    command.stdin(device.try_clone()?).stdout(Stdio::from(slots.file()?)).spawn()
}

/// Makes the file system, and gives the FUSE device and the root directory.
fn mount() -> io::Result<(OwnedFd, OwnedFd)> {
    let device: OwnedFd = File::options().read(true).write(true).open("/dev/fuse")?.into();
    let context = rustix::mount::fsopen("fuse", FsOpenFlags::FSOPEN_CLOEXEC)?;
    let (uid, gid) = (rustix::process::geteuid(), rustix::process::getegid());
    for (key, value) in [
        ("fd", device.as_raw_fd().to_string()),
        ("rootmode", "40500".into()),
        ("user_id", uid.as_raw().to_string()),
        ("group_id", gid.as_raw().to_string()),
    ] {
        rustix::mount::fsconfig_set_string(&context, key, value)?;
    }
    // A clone of another account opens the file anew. No name leads to it: who has no descriptor of
    // it, and may not look into a process that has, cannot reach it.
    rustix::mount::fsconfig_set_flag(&context, "allow_other")?;
    rustix::mount::fsconfig_create(&context)?;
    let safe = MountAttrFlags::MOUNT_ATTR_NOSUID | MountAttrFlags::MOUNT_ATTR_NODEV | MountAttrFlags::MOUNT_ATTR_NOEXEC;
    let root = rustix::mount::fsmount(&context, FsMountFlags::FSMOUNT_CLOEXEC, safe)?;
    let mut bytes = vec![0; fuse::BUFFER];
    let len = rustix::io::read(&device, &mut bytes)?;
    let request = fuse::Request::parse(&bytes[..len]).filter(|request| request.kind == fuse::INIT);
    let hello = request.and_then(|request| Some((request.unique, fuse::hello(&request)?)));
    let (unique, hello) = hello.ok_or_else(|| io::Error::other("the kernel speaks another protocol"))?;
    fuse::answer(&device, unique, Ok(&hello))?;
    Ok((device, root))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_server_that_ends_at_once_is_no_memory() {
        let Err(error) = start(vec!["false".into()], File::open("/dev/null").unwrap()) else {
            panic!("it serves nothing")
        };
        if matches!(error, MemoryError::Fuse(_)) {
            println!("SKIPPED: {error}");
            return;
        }
        assert!(error.to_string().starts_with("the page server did not start: it ended"), "{error}");
    }
}
