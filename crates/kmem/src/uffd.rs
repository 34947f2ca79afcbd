//! `userfaultfd(2)` for write-protection and for notice of changed mappings.
//!
//! A [`Uffd`] is created with the features that it shall have; the memory of *this* process is then
//! registered with it in write-protect mode. What a write to a protected page does depends on the
//! features:
//!
//! - without [`Features::WP_ASYNC`] the writing thread sleeps, and the descriptor yields
//!   [`Event::Pagefault`], until somebody lifts the protection, unregisters the range or wakes it;
//! - with it the kernel lifts the protection itself and remembers the page as written, which
//!   [`crate::pagemap::Pagemap::scan`] reports.
//!
//! The `EVENT_*` features make `fork`, `mremap`, `madvise(MADV_DONTNEED | MADV_REMOVE)` and
//! `munmap` of registered memory *wait* until their event is read: whoever asks for them needs a
//! thread that reads without fail, and that thread must not itself make such calls on registered
//! memory.
//!
//! Sources: `userfaultfd(2)`, `ioctl_userfaultfd(2)`, Documentation/admin-guide/mm/userfaultfd.rst.

#![allow(unsafe_code)] // ioctls, and the descriptor of a forked child arrives as a number in a message.

use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd, RawFd};

use linux_raw_sys::general as sys;
use linux_raw_sys::ioctl as op;
use rustix::fs::{Mode, OFlags};
use rustix::io::Errno;
use rustix::ioctl::{self, Updater};

use crate::Range;
use crate::raw::syscall;

bitflags::bitflags! {
    /// `UFFD_FEATURE_*`.
    #[derive(Copy, Clone, PartialEq, Eq, Debug, Hash)]
    pub struct Features: u64 {
        /// Write-protect faults on anonymous memory (`UFFD_FEATURE_PAGEFAULT_FLAG_WP`, Linux 5.7).
        const WP = sys::UFFD_FEATURE_PAGEFAULT_FLAG_WP as u64;
        /// [`Event::Fork`] (Linux 4.11); needs CAP_SYS_PTRACE.
        const EVENT_FORK = sys::UFFD_FEATURE_EVENT_FORK as u64;
        /// [`Event::Remap`] (Linux 4.11).
        const EVENT_REMAP = sys::UFFD_FEATURE_EVENT_REMAP as u64;
        /// [`Event::Remove`] (Linux 4.11).
        const EVENT_REMOVE = sys::UFFD_FEATURE_EVENT_REMOVE as u64;
        /// [`Event::Unmap`] (Linux 4.11).
        const EVENT_UNMAP = sys::UFFD_FEATURE_EVENT_UNMAP as u64;
        /// A fault raises SIGBUS instead of an event (Linux 4.14).
        const SIGBUS = sys::UFFD_FEATURE_SIGBUS as u64;
        /// Fault messages carry the thread (Linux 4.14).
        const THREAD_ID = sys::UFFD_FEATURE_THREAD_ID as u64;
        /// Minor faults on shared memory (Linux 5.14).
        const MINOR_SHMEM = sys::UFFD_FEATURE_MINOR_SHMEM as u64;
        /// Fault addresses are not rounded down to the page (Linux 5.18).
        const EXACT_ADDRESS = sys::UFFD_FEATURE_EXACT_ADDRESS as u64;
        /// Write-protection of shared and huge-page memory (Linux 5.19).
        const WP_HUGETLBFS_SHMEM = sys::UFFD_FEATURE_WP_HUGETLBFS_SHMEM as u64;
        /// Pages that are not populated yet can be write-protected too (Linux 6.4).
        const WP_UNPOPULATED = sys::UFFD_FEATURE_WP_UNPOPULATED as u64;
        /// `UFFDIO_POISON` (Linux 6.6).
        const POISON = sys::UFFD_FEATURE_POISON as u64;
        /// The kernel lifts write-protection itself and remembers the write (Linux 6.7).
        const WP_ASYNC = sys::UFFD_FEATURE_WP_ASYNC as u64;
        /// `UFFDIO_MOVE` (Linux 6.8).
        const MOVE = sys::UFFD_FEATURE_MOVE as u64;
    }
}

impl Features {
    /// The kernel that has all of these features first, as far as known here.
    pub fn since(self) -> &'static str {
        const SINCE: [(Features, &str); 9] = [
            (Features::MOVE, "Linux 6.8"),
            (Features::WP_ASYNC, "Linux 6.7"),
            (Features::POISON, "Linux 6.6"),
            (Features::WP_UNPOPULATED, "Linux 6.4"),
            (Features::WP_HUGETLBFS_SHMEM, "Linux 5.19"),
            (Features::EXACT_ADDRESS, "Linux 5.18"),
            (Features::MINOR_SHMEM, "Linux 5.14"),
            (Features::WP, "Linux 5.7"),
            (Features::SIGBUS.union(Features::THREAD_ID), "Linux 4.14"),
        ];
        SINCE.iter().find(|(feature, _)| self.intersects(*feature)).map_or("Linux 4.11", |(_, since)| since)
    }
}

/// Why there is no userfaultfd.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
pub enum CreateError {
    /// Neither the system call nor `/dev/userfaultfd` is allowed.
    #[error(
        "not permitted to create a userfaultfd: run as root or with CAP_SYS_PTRACE, set \
         `sysctl vm.unprivileged_userfaultfd=1`, or give access to /dev/userfaultfd"
    )]
    NoPermission,
    /// A userfaultfd is allowed, but not the fork event.
    #[error(
        "not permitted to receive fork events on a userfaultfd: run as root or with CAP_SYS_PTRACE, or do without EVENT_FORK"
    )]
    NoForkEvents,
    /// The kernel is too old, or was built without, for some of the features.
    #[error(
        "this kernel's userfaultfd lacks {missing:?}: it needs {} or newer on an architecture that has it",
        missing.since()
    )]
    MissingFeatures {
        /// What was asked for and is not there.
        missing: Features,
    },
    /// `ENOSYS`: the kernel was built without userfaultfd, or a seccomp filter hides it.
    #[error("this kernel has no userfaultfd: it needs CONFIG_USERFAULTFD=y (or a seccomp filter hides it)")]
    NotCompiledIn,
    /// Something else, such as no descriptor being left.
    #[error("userfaultfd: {0}")]
    Os(#[from] Errno),
}

/// What happened to registered memory.
#[derive(Debug)]
pub enum Event {
    /// The process forked; `child` is the userfaultfd of the child's copy of the registered memory.
    Fork {
        /// The child's userfaultfd, with this one's features.
        child: OwnedFd,
    },
    /// `mremap(2)` moved memory; it stays registered at its new place. An [`Event::Unmap`] of the
    /// old place follows, and the call returns when both have been read.
    Remap {
        /// Its old address.
        from: usize,
        /// Its new address.
        to: usize,
        /// Bytes (of the old place).
        len: usize,
    },
    /// `madvise(2)` with `MADV_DONTNEED` or `MADV_REMOVE` is about to empty the range.
    Remove(Range),
    /// The range was unmapped, or something else was mapped over it.
    Unmap(Range),
    /// A thread waits for this page.
    Pagefault {
        /// The faulting address, rounded down to the page unless [`Features::EXACT_ADDRESS`] was
        /// asked for.
        address: usize,
        /// Whether it wrote to a write-protected page.
        write_protect: bool,
    },
}

// What the kernel writes into `read_event`'s buffer.
const _: () = assert!(size_of::<sys::uffd_msg>() == 32);
const _: () = assert!(size_of::<sys::uffdio_api>() == 24);
const _: () = assert!(size_of::<sys::uffdio_register>() == 32);
const _: () = assert!(size_of::<sys::uffdio_writeprotect>() == 24);
const _: () = assert!(size_of::<sys::uffdio_range>() == 16);
const _: () = assert!(size_of::<sys::uffdio_copy>() == 40);
const _: () = assert!(size_of::<sys::uffdio_move>() == 40 && UFFDIO_MOVE == 0xC028_AA05);

/// `UFFDIO_WRITEPROTECT_MODE_WP`; the bindings leave out values written as shifts.
const WRITEPROTECT_MODE_WP: u64 = 1;
/// `UFFDIO_COPY_MODE_DONTWAKE`.
const COPY_MODE_DONTWAKE: u64 = 1;
/// `_IOWR(0xAA, _UFFDIO_MOVE, struct uffdio_move)`; the bindings leave it out.
const UFFDIO_MOVE: ioctl::Opcode = ioctl::opcode::read_write::<sys::uffdio_move>(0xAA, sys::_UFFDIO_MOVE as u8);
/// `UFFDIO_MOVE_MODE_DONTWAKE | UFFDIO_MOVE_MODE_ALLOW_SRC_HOLES`; the bindings leave out values
/// written as shifts.
const MOVE_MODE: u64 = 1 | 2;
/// `USERFAULTFD_IOC_NEW` = `_IO(0xAA, 0x00)`, the one ioctl of `/dev/userfaultfd` (Linux 6.1).
const USERFAULTFD_IOC_NEW: usize = 0xAA00;

/// A userfaultfd. Dropping it unregisters its memory and wakes whoever waits.
#[derive(Debug)]
pub struct Uffd {
    fd: OwnedFd,
}

impl Uffd {
    /// Creates a userfaultfd (`O_CLOEXEC | O_NONBLOCK`) with exactly these features. Where the
    /// system call is not permitted, `/dev/userfaultfd` is tried.
    ///
    /// # Errors
    ///
    /// [`CreateError`] tells missing permission, missing features and a kernel without userfaultfd
    /// apart.
    pub fn new(features: Features) -> Result<Uffd, CreateError> {
        let uffd = Uffd { fd: open()? };
        match uffd.handshake(features) {
            Ok(_) => Ok(uffd),
            Err(Errno::PERM) if features.contains(Features::EVENT_FORK) => Err(CreateError::NoForkEvents),
            Err(Errno::PERM) => Err(CreateError::NoPermission),
            Err(Errno::INVAL) => {
                let missing = features - Self::supported_features()?;
                if missing.is_empty() {
                    Err(Errno::INVAL.into())
                } else {
                    Err(CreateError::MissingFeatures { missing })
                }
            }
            Err(other) => Err(other.into()),
        }
    }

    /// The features that this kernel has; bits without a name in [`Features`] are kept.
    ///
    /// # Errors
    ///
    /// As [`Uffd::new`].
    pub fn supported_features() -> Result<Features, CreateError> {
        // A descriptor is told its features once; one that asks for none is told all that there are.
        let uffd = Uffd { fd: open()? };
        Ok(uffd.handshake(Features::empty())?)
    }

    /// Takes over a userfaultfd that was set up elsewhere: passed by another process, or from
    /// [`Event::Fork`].
    pub fn from_fd(fd: OwnedFd) -> Uffd {
        Uffd { fd }
    }

    fn handshake(&self, features: Features) -> Result<Features, Errno> {
        let mut api = sys::uffdio_api { api: sys::UFFD_API.into(), features: features.bits(), ioctls: 0 };
        // SAFETY: `uffdio_api` is UFFDIO_API's argument.
        unsafe { ioctl::ioctl(&self.fd, Updater::<{ op::UFFDIO_API }, _>::new(&mut api)) }?;
        Ok(Features::from_bits_retain(api.features))
    }

    /// Registers the range for write-protection (`UFFDIO_REGISTER` with `UFFDIO_REGISTER_MODE_WP`).
    /// Nothing is protected yet.
    ///
    /// # Errors
    ///
    /// `EBUSY`: another userfaultfd has it. `EINVAL`: not page aligned, not mapped, or memory of a
    /// kind that this cannot be done with (a file mapped shared that is no memfd). `EPERM`: a
    /// writable mapping of a file sealed against writing.
    pub fn register_wp(&self, range: Range) -> Result<(), Errno> {
        self.register(range, sys::UFFDIO_REGISTER_MODE_WP)
    }

    /// Registers the range for write-protection and for missing pages: a thread that touches a page
    /// which has no memory waits too.
    ///
    /// # Errors
    ///
    /// Those of [`Uffd::register_wp`].
    pub fn register_missing_wp(&self, range: Range) -> Result<(), Errno> {
        self.register(range, sys::UFFDIO_REGISTER_MODE_MISSING | sys::UFFDIO_REGISTER_MODE_WP)
    }

    fn register(&self, range: Range, mode: u32) -> Result<(), Errno> {
        let mut register = sys::uffdio_register { range: raw(range), mode: mode.into(), ioctls: 0 };
        // SAFETY: `uffdio_register` is UFFDIO_REGISTER's argument.
        unsafe { ioctl::ioctl(&self.fd, Updater::<{ op::UFFDIO_REGISTER }, _>::new(&mut register)) }
    }

    /// Unregisters the range: protection is lifted, waiters wake and write.
    ///
    /// `UFFDIO_UNREGISTER` wakes nobody who waits in a range registered for write-protection only
    /// (seen up to Linux 6.18), so this adds `UFFDIO_WAKE`, also when unregistering failed:
    /// nobody is left asleep.
    ///
    /// # Errors
    ///
    /// `EINVAL`: nothing in the range is mapped, or part of it is of a kind that cannot be
    /// registered. `ENOMEM`: the process is gone.
    pub fn unregister(&self, range: Range) -> Result<(), Errno> {
        let mut raw_range = raw(range);
        // SAFETY: `uffdio_range` is UFFDIO_UNREGISTER's argument.
        let result = unsafe { ioctl::ioctl(&self.fd, Updater::<{ op::UFFDIO_UNREGISTER }, _>::new(&mut raw_range)) };
        result.and(self.wake(range))
    }

    /// Protects the range against writing, or lifts the protection and wakes whoever waits.
    ///
    /// # Errors
    ///
    /// `ENOENT`: not registered. `EAGAIN`: an event about a changed mapping waits to be read; read,
    /// then try again.
    pub fn write_protect(&self, range: Range, on: bool) -> Result<(), Errno> {
        let mode = if on { WRITEPROTECT_MODE_WP } else { 0 };
        let mut protect = sys::uffdio_writeprotect { range: raw(range), mode };
        // SAFETY: `uffdio_writeprotect` is UFFDIO_WRITEPROTECT's argument.
        unsafe { ioctl::ioctl(&self.fd, Updater::<{ op::UFFDIO_WRITEPROTECT }, _>::new(&mut protect)) }
    }

    /// Gives registered memory that has no pages yet pages with these bytes (`UFFDIO_COPY`), at one
    /// stroke: they are not cleared first, and take no faults. Returns how many bytes were
    /// copied: it ends before the first page that is there already, and when there
    /// is no memory.
    ///
    /// # Safety
    ///
    /// Nobody refers to the bytes of `to`..`to` + `bytes.len()`, or relies on what they are.
    ///
    /// # Errors
    ///
    /// If nothing was copied. `EEXIST`: the first page is there; `ENOENT`: the range is not
    /// registered with this, or not all of one mapping; `ENOMEM`: no memory; `EAGAIN`: as
    /// [`Uffd::write_protect`].
    pub unsafe fn copy(&self, to: usize, bytes: &[u8]) -> Result<usize, Errno> {
        let (dst, src, len) = (to as u64, bytes.as_ptr().expose_provenance() as u64, bytes.len() as u64);
        let mut copy = sys::uffdio_copy { dst, src, len, mode: COPY_MODE_DONTWAKE, copy: 0 };
        // SAFETY: `uffdio_copy` is UFFDIO_COPY's argument, which reads `bytes`; the caller vouches for what
        // is written.
        let result = unsafe { ioctl::ioctl(&self.fd, Updater::<{ op::UFFDIO_COPY }, _>::new(&mut copy)) };
        // After a part of it the call fails with EAGAIN, and tells how much it was.
        match result {
            Err(errno) if copy.copy <= 0 => Err(errno),
            _ => Ok(copy.copy as usize),
        }
    }

    /// Moves pages of anonymous memory from one place to another (`UFFDIO_MOVE`, Linux 6.8); pages
    /// without memory are passed over. Returns how many bytes were moved, at least one page; it ends
    /// before the first page that cannot be moved. Nobody is woken.
    ///
    /// The kernel refuses pages that may be pinned or that another process shares. `to` is registered
    /// with this userfaultfd, which has [`Features::MOVE`], and has no pages yet.
    ///
    /// # Safety
    ///
    /// - No code relies on what `from` held: afterwards it has no pages.
    /// - No reference exists into either range.
    ///
    /// # Errors
    ///
    /// If nothing was moved. `EBUSY`: the first page may be pinned or is shared; `EAGAIN`: the kernel
    /// is busy with the page; `EEXIST`: there is a page at `to`; `EINVAL`: a range is not page
    /// aligned, spans several mappings, or is not of private anonymous memory.
    pub unsafe fn move_pages(&self, from: Range, to: usize) -> Result<usize, Errno> {
        let (dst, src, len) = (to as u64, from.start as u64, from.len as u64);
        let mut request = sys::uffdio_move { dst, src, len, mode: MOVE_MODE, move_: 0 };
        // SAFETY: `uffdio_move` is UFFDIO_MOVE's argument. By the contract no code relies on the pages
        // of `from`, and pages at `to` are not replaced but refused.
        let result = unsafe { ioctl::ioctl(&self.fd, Updater::<{ UFFDIO_MOVE }, _>::new(&mut request)) };
        // After a part of it the call fails with EAGAIN, and tells how much it was.
        match result {
            Err(errno) if request.move_ <= 0 => Err(errno),
            Err(_) => Ok(request.move_ as usize),
            Ok(()) => Ok(from.len),
        }
    }

    /// Wakes whoever waits for a page of the range. A thread whose page is still protected waits
    /// again.
    ///
    /// # Errors
    ///
    /// `EINVAL`: not page aligned, or empty.
    pub fn wake(&self, range: Range) -> Result<(), Errno> {
        let mut range = raw(range);
        // SAFETY: `uffdio_range` is UFFDIO_WAKE's argument.
        unsafe { ioctl::ioctl(&self.fd, Updater::<{ op::UFFDIO_WAKE }, _>::new(&mut range)) }
    }

    /// Takes the next event; `None` when there is none now. Wait for one with `poll(2)` (`POLLIN`).
    ///
    /// # Errors
    ///
    /// `EPROTO`: an event of a kind that is not known here; those of `read(2)`, among them `EMFILE`
    /// when a fork event finds no descriptor free (the forking thread then waits on).
    pub fn read_event(&self) -> Result<Option<Event>, Errno> {
        let mut message = [0; size_of::<sys::uffd_msg>()];
        loop {
            match rustix::io::read(&self.fd, &mut message) {
                Ok(len) if len == message.len() => break,
                Ok(_) => return Err(Errno::PROTO),
                Err(Errno::INTR) => {}
                Err(Errno::AGAIN) => return Ok(None),
                Err(errno) => return Err(errno),
            }
        }
        // A byte of type and seven reserved ones, then the arguments: three words, or one half word for a
        // descriptor.
        let word = |at: usize| {
            let mut word = [0; 8];
            word.copy_from_slice(&message[at..at + 8]);
            usize::from_ne_bytes(word)
        };
        let between = |start: usize, end: usize| Range::new(start, end - start);
        Ok(Some(match u32::from(message[0]) {
            sys::UFFD_EVENT_PAGEFAULT => Event::Pagefault {
                address: word(16),
                write_protect: word(8) & sys::UFFD_PAGEFAULT_FLAG_WP as usize != 0,
            },
            sys::UFFD_EVENT_FORK => {
                let fd = RawFd::from_ne_bytes([message[8], message[9], message[10], message[11]]);
                // SAFETY: the kernel has just opened this descriptor for the reader of this message: it is ours
                // alone.
                let child = unsafe { OwnedFd::from_raw_fd(fd) };
                Event::Fork { child }
            }
            sys::UFFD_EVENT_REMAP => Event::Remap { from: word(8), to: word(16), len: word(24) },
            sys::UFFD_EVENT_REMOVE => Event::Remove(between(word(8), word(16))),
            sys::UFFD_EVENT_UNMAP => Event::Unmap(between(word(8), word(16))),
            _ => return Err(Errno::PROTO),
        }))
    }
}

impl AsFd for Uffd {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }
}

impl AsRawFd for Uffd {
    fn as_raw_fd(&self) -> RawFd {
        self.fd.as_raw_fd()
    }
}

impl From<Uffd> for OwnedFd {
    fn from(uffd: Uffd) -> OwnedFd {
        uffd.fd
    }
}

fn raw(range: Range) -> sys::uffdio_range {
    sys::uffdio_range { start: range.start as u64, len: range.len as u64 }
}

const FLAGS: libc::c_int = libc::O_CLOEXEC | libc::O_NONBLOCK;

/// A new userfaultfd that has not been told its features.
fn open() -> Result<OwnedFd, CreateError> {
    // SAFETY: the call takes one integer.
    match unsafe { syscall(libc::SYS_userfaultfd, [FLAGS as usize]) } {
        // SAFETY: the kernel has just opened this descriptor for us.
        Ok(fd) => Ok(unsafe { OwnedFd::from_raw_fd(fd as RawFd) }),
        Err(Errno::NOSYS) => Err(CreateError::NotCompiledIn),
        Err(Errno::PERM) => open_device(),
        Err(errno) => Err(errno.into()),
    }
}

/// The same from `/dev/userfaultfd` (Linux 6.1), whose file permissions say who may.
fn open_device() -> Result<OwnedFd, CreateError> {
    let Ok(device) = rustix::fs::open("/dev/userfaultfd", OFlags::RDWR | OFlags::CLOEXEC, Mode::empty()) else {
        return Err(CreateError::NoPermission);
    };
    let args = [device.as_raw_fd() as usize, USERFAULTFD_IOC_NEW, FLAGS as usize];
    // SAFETY: this ioctl takes an integer and returns a new descriptor.
    let fd = unsafe { syscall(libc::SYS_ioctl, args) }?;
    // SAFETY: the kernel has just opened this descriptor for us.
    Ok(unsafe { OwnedFd::from_raw_fd(fd as RawFd) })
}

#[cfg(test)]
mod tests;
