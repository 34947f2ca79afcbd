//! `userfaultfd(2)` for write-protection and for notice of changed mappings.
//!
//! A [`Uffd`] is created with a set of features. Memory of *this* process is then registered with
//! it in write-protect mode. The features decide what a write to a protected page does:
//!
//! - without [`Features::WP_ASYNC`] the writing thread sleeps, and the descriptor yields
//!   [`Event::Pagefault`]. The thread sleeps until another one lifts the protection, unregisters
//!   the range or wakes it;
//! - with it the kernel lifts the protection itself and remembers the page as written, which
//!   [`crate::pagemap::Pagemap::scan`] reports.
//!
//! The `EVENT_*` features make `fork`, `mremap`, `madvise(MADV_DONTNEED | MADV_REMOVE)` and
//! `munmap` of registered memory *wait* until their event is read. A process with these features
//! needs a thread that always reads the events. That thread must not make such calls on registered
//! memory itself.
//!
//! Sources: `userfaultfd(2)`, `ioctl_userfaultfd(2)`, Documentation/admin-guide/mm/userfaultfd.rst.

#![allow(unsafe_code)] // ioctls, and the descriptor of a forked child arrives as a number in a message.

use std::os::fd::{AsRawFd, FromRawFd, OwnedFd, RawFd};

use linux_raw_sys::general as sys;
use linux_raw_sys::ioctl as op;
use rustix::fs::{Mode, OFlags};
use rustix::io::Errno;
use rustix::ioctl::{self, Updater};

use crate::raw::syscall;
use crate::{PAGE_SIZE, Range};

mod features;

pub use features::{CreateError, Features};

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
        /// The old address.
        from: usize,
        /// The new address.
        to: usize,
        /// Bytes, as long as the old place was.
        len: usize,
    },
    /// `madvise(2)` with `MADV_DONTNEED` or `MADV_REMOVE` is about to empty the range.
    Remove(Range),
    /// The range was unmapped, or something else was mapped over it.
    Unmap(Range),
    /// A thread waits for a page.
    Pagefault {
        /// The faulting address, rounded down to the page without [`Features::EXACT_ADDRESS`].
        address: usize,
        /// Whether the thread wrote to a write-protected page.
        write_protect: bool,
    },
}

// The layouts that the kernel and this module must agree on.
const _: () = assert!(size_of::<sys::uffd_msg>() == 32);
const _: () = assert!(size_of::<sys::uffdio_api>() == 24);
const _: () = assert!(size_of::<sys::uffdio_register>() == 32);
const _: () = assert!(size_of::<sys::uffdio_writeprotect>() == 24);
const _: () = assert!(size_of::<sys::uffdio_range>() == 16);
const _: () = assert!(size_of::<sys::uffdio_copy>() == 40);
const _: () = assert!(size_of::<sys::uffdio_poison>() == 32 && UFFDIO_POISON == 0xC020_AA08);
const _: () = assert!(size_of::<sys::uffdio_move>() == 40 && UFFDIO_MOVE == 0xC028_AA05);

/// What [`Uffd::write_protect`] does, as `UFFDIO_WRITEPROTECT` has it. The bindings leave out
/// values written as shifts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u64)]
pub enum Protection {
    /// Protects, and wakes nobody.
    Set = 1,
    /// Lifts the protection, and wakes the threads that wait.
    Lift = 0,
}

/// `UFFDIO_COPY_MODE_DONTWAKE`.
const COPY_MODE_DONTWAKE: u64 = 1;
/// `_IOWR(0xAA, _UFFDIO_MOVE, struct uffdio_move)`; the bindings leave it out.
const UFFDIO_MOVE: ioctl::Opcode = ioctl::opcode::read_write::<sys::uffdio_move>(0xAA, sys::_UFFDIO_MOVE as u8);
/// `UFFDIO_MOVE_MODE_DONTWAKE | UFFDIO_MOVE_MODE_ALLOW_SRC_HOLES`; the bindings leave out values
/// written as shifts.
const MOVE_MODE: u64 = 1 | 2;
/// `_IOWR(0xAA, _UFFDIO_POISON, struct uffdio_poison)`; the bindings leave it out.
const UFFDIO_POISON: ioctl::Opcode = ioctl::opcode::read_write::<sys::uffdio_poison>(0xAA, sys::_UFFDIO_POISON as u8);
/// `UFFDIO_POISON_MODE_DONTWAKE`.
const POISON_MODE_DONTWAKE: u64 = 1;
/// `USERFAULTFD_IOC_NEW` = `_IO(0xAA, 0x00)`, the one ioctl of `/dev/userfaultfd` (Linux 6.1).
const USERFAULTFD_IOC_NEW: usize = 0xAA00;

/// A userfaultfd. Dropping it unregisters its memory and wakes the threads that wait.
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
    /// [`CreateError`], which distinguishes missing permission, missing features and a kernel
    /// without userfaultfd.
    pub fn new(features: Features) -> Result<Self, CreateError> {
        let uffd = Self { fd: open()? };
        match uffd.handshake(features) {
            Ok(_) => Ok(uffd),
            Err(Errno::PERM) if features.contains(Features::EVENT_FORK) => Err(CreateError::NoForkEvents),
            Err(Errno::PERM) => Err(CreateError::NoPermission(Errno::PERM)),
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

    /// The features that this kernel has. Bits without a name in [`Features`] are kept.
    ///
    /// # Errors
    ///
    /// Those of [`Uffd::new`] that are not about features.
    pub fn supported_features() -> Result<Features, CreateError> {
        // The handshake works once for a descriptor, and answers with all features of the kernel.
        let uffd = Self { fd: open()? };
        Ok(uffd.handshake(Features::empty())?)
    }

    /// Takes over a userfaultfd that was set up elsewhere: passed by another process, or from
    /// [`Event::Fork`].
    pub fn from_fd(fd: OwnedFd) -> Self {
        Self { fd }
    }

    fn handshake(&self, features: Features) -> Result<Features, Errno> {
        let mut api = sys::uffdio_api { api: sys::UFFD_API.into(), features: features.bits(), ioctls: 0 };
        // SAFETY: `uffdio_api` is UFFDIO_API's argument, a local that outlives the call.
        unsafe { ioctl::ioctl(&self.fd, Updater::<{ op::UFFDIO_API }, _>::new(&mut api)) }?;
        Ok(Features::from_bits_retain(api.features))
    }

    /// Registers the range for write-protection (`UFFDIO_REGISTER` with `UFFDIO_REGISTER_MODE_WP`).
    /// Nothing is protected yet.
    ///
    /// # Errors
    ///
    /// `EBUSY`: the range is registered with another userfaultfd. `EINVAL`: it is not page aligned,
    /// not mapped, or of a kind that cannot be registered (a shared mapping of a file that is not a
    /// memfd). `EPERM`: a writable mapping of a file sealed against writing.
    pub fn register_wp(&self, range: Range) -> Result<(), Errno> {
        self.register(range, sys::UFFDIO_REGISTER_MODE_WP)
    }

    /// Registers the range for missing pages: a thread that touches a page which has no memory
    /// waits. Pages that are there, and their protection, are left alone.
    pub fn register_missing(&self, range: Range) -> Result<(), Errno> {
        self.register(range, sys::UFFDIO_REGISTER_MODE_MISSING)
    }

    /// Registers the range for write-protection and for missing pages: a thread that touches a page
    /// which has no memory waits too.
    pub fn register_missing_wp(&self, range: Range) -> Result<(), Errno> {
        self.register(range, sys::UFFDIO_REGISTER_MODE_MISSING | sys::UFFDIO_REGISTER_MODE_WP)
    }

    fn register(&self, range: Range, mode: u32) -> Result<(), Errno> {
        let mut register = sys::uffdio_register { range: raw(range), mode: mode.into(), ioctls: 0 };
        // SAFETY: `uffdio_register` is UFFDIO_REGISTER's argument, a local that outlives the call.
        unsafe { ioctl::ioctl(&self.fd, Updater::<{ op::UFFDIO_REGISTER }, _>::new(&mut register)) }
    }

    /// Unregisters the range: its protection is lifted, and waiting threads wake and write.
    ///
    /// `UFFDIO_UNREGISTER` does not wake threads in a range that is registered for write-protection
    /// only (seen up to Linux 6.18). Therefore this adds `UFFDIO_WAKE`, also when unregistering
    /// failed: no thread is left asleep.
    ///
    /// # Errors
    ///
    /// `EINVAL`: the range has no mapping, or part of it is of a kind that cannot be registered.
    /// `ENOMEM`: the process is gone.
    pub fn unregister(&self, range: Range) -> Result<(), Errno> {
        let mut raw_range = raw(range);
        // SAFETY: `uffdio_range` is UFFDIO_UNREGISTER's argument, a local that outlives the call.
        let result = unsafe { ioctl::ioctl(&self.fd, Updater::<{ op::UFFDIO_UNREGISTER }, _>::new(&mut raw_range)) };
        result.and(self.wake(range))
    }

    /// Protects the range against writing, or lifts the protection.
    ///
    /// # Errors
    ///
    /// `ENOENT`: the range is not registered. `EAGAIN`: an event about a changed mapping has not
    /// been read yet; read it, then try again.
    pub fn write_protect(&self, range: Range, protection: Protection) -> Result<(), Errno> {
        let mut protect = sys::uffdio_writeprotect { range: raw(range), mode: protection as u64 };
        // SAFETY: `uffdio_writeprotect` is UFFDIO_WRITEPROTECT's argument, a local that outlives
        // the call.
        unsafe { ioctl::ioctl(&self.fd, Updater::<{ op::UFFDIO_WRITEPROTECT }, _>::new(&mut protect)) }
    }

    /// Gives registered memory that has no pages yet pages with these bytes (`UFFDIO_COPY`), in one
    /// step: the kernel neither clears them first nor takes faults. Returns how many bytes were
    /// copied. It ends before the first page that has memory already, and when there is no free
    /// memory.
    ///
    /// # Safety
    ///
    /// No reference exists to the bytes of `to`..`to + bytes.len()`, and no code relies on their
    /// being zeros.
    ///
    /// # Errors
    ///
    /// If nothing was copied. `EEXIST`: the first page has memory; `ENOENT`: the range is not
    /// registered with this userfaultfd, or is not one mapping; `ENOMEM`: no free memory; `EAGAIN`:
    /// an event about a changed mapping has not been read yet.
    pub unsafe fn copy(&self, to: usize, bytes: &[u8]) -> Result<usize, Errno> {
        let (dst, src, len) = (to as u64, bytes.as_ptr().expose_provenance() as u64, bytes.len() as u64);
        let mut copy = sys::uffdio_copy { dst, src, len, mode: COPY_MODE_DONTWAKE, copy: 0 };
        // SAFETY: `uffdio_copy` is UFFDIO_COPY's argument, a local that outlives the call. The
        // kernel reads `bytes`, which is borrowed, and writes to `to` only where there is no page;
        // the contract covers the users of that range.
        let result = unsafe { ioctl::ioctl(&self.fd, Updater::<{ op::UFFDIO_COPY }, _>::new(&mut copy)) };
        // After a part the call fails with EAGAIN and says how many bytes that part was.
        match result {
            Err(errno) if copy.copy <= 0 => Err(errno),
            _ => Ok(copy.copy as usize),
        }
    }

    /// Makes a page that has no memory unreadable (`UFFDIO_POISON`, Linux 6.6): reading it raises
    /// SIGBUS, or is an error of a system call, as with memory that has failed. Wakes no thread.
    ///
    /// # Safety
    ///
    /// No code of this process relies on reading the page.
    ///
    /// # Errors
    ///
    /// `EEXIST`: the page has memory; `ENOENT`: it is not registered with this userfaultfd, or not
    /// mapped; `EINVAL`: the userfaultfd lacks [`Features::POISON`]; `EAGAIN`: an event about a
    /// changed mapping has not been read yet.
    pub unsafe fn poison(&self, page: usize) -> Result<(), Errno> {
        let range = raw(Range::new(page, PAGE_SIZE));
        let mut poison = sys::uffdio_poison { range, mode: POISON_MODE_DONTWAKE, updated: 0 };
        // SAFETY: `uffdio_poison` is UFFDIO_POISON's argument, a local that outlives the call. By
        // the contract no code relies on reading the page, which had no bytes.
        unsafe { ioctl::ioctl(&self.fd, Updater::<{ UFFDIO_POISON }, _>::new(&mut poison)) }
    }

    /// Moves pages of anonymous memory from one place to another (`UFFDIO_MOVE`, Linux 6.8); pages
    /// without memory are passed over. Returns how many bytes were moved, at least one page; it
    /// ends before the first page that cannot be moved. No thread is woken.
    ///
    /// The kernel refuses pages that may be pinned or that another process shares. `to` is
    /// registered with this userfaultfd, which has [`Features::MOVE`], and has no pages yet.
    ///
    /// # Safety
    ///
    /// - No code relies on what `from` held: afterwards it has no pages.
    /// - No reference exists into either range.
    ///
    /// # Errors
    ///
    /// If nothing was moved. `EBUSY`: the first page may be pinned or is shared; `EAGAIN`: the
    /// kernel is busy with the page; `EEXIST`: there is a page at `to`; `EINVAL`: a range is not
    /// page aligned, spans several mappings, or is not of private anonymous memory.
    pub unsafe fn move_pages(&self, from: Range, to: usize) -> Result<usize, Errno> {
        let (dst, src, len) = (to as u64, from.start as u64, from.len as u64);
        let mut request = sys::uffdio_move { dst, src, len, mode: MOVE_MODE, move_: 0 };
        // SAFETY: `uffdio_move` is UFFDIO_MOVE's argument, a local that outlives the call. By the
        // contract no code relies on the pages of `from`. A page that exists at `to` is not
        // replaced: the kernel refuses.
        let result = unsafe { ioctl::ioctl(&self.fd, Updater::<{ UFFDIO_MOVE }, _>::new(&mut request)) };
        // After a part the call fails with EAGAIN and says how many bytes that part was.
        match result {
            Err(errno) if request.move_ <= 0 => Err(errno),
            Err(_) => Ok(request.move_ as usize),
            Ok(()) => Ok(from.len),
        }
    }

    /// Wakes the threads that wait for a page of the range. A thread whose page is still protected
    /// waits again.
    ///
    /// # Errors
    ///
    /// `EINVAL`: the range is not page aligned, or is empty.
    pub fn wake(&self, range: Range) -> Result<(), Errno> {
        let mut range = raw(range);
        // SAFETY: `uffdio_range` is UFFDIO_WAKE's argument, a local that outlives the call.
        unsafe { ioctl::ioctl(&self.fd, Updater::<{ op::UFFDIO_WAKE }, _>::new(&mut range)) }
    }

    /// Takes the next event. `None`: no event has come; wait for one with `poll(2)` (`POLLIN`).
    ///
    /// # Errors
    ///
    /// `EPROTO`: an event of an unknown kind. Those of `read(2)`, among them `EMFILE`: a fork event
    /// finds no free descriptor, and the forking thread goes on waiting.
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
        // One byte of type, seven reserved bytes, then the arguments: three words, or half a word
        // for a descriptor.
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
                // SAFETY: the kernel has just opened this descriptor for the reader of this
                // message, and no other code knows it.
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

as_fd!(Uffd);

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

/// A new userfaultfd, before its handshake.
fn open() -> Result<OwnedFd, CreateError> {
    // SAFETY: the call takes a number.
    match unsafe { syscall(libc::SYS_userfaultfd, [FLAGS as usize]) } {
        // SAFETY: the kernel has just opened this descriptor, and no other code knows it.
        Ok(fd) => Ok(unsafe { OwnedFd::from_raw_fd(fd as RawFd) }),
        Err(Errno::NOSYS) => Err(CreateError::NotCompiledIn),
        Err(Errno::PERM) => open_device(),
        Err(errno) => Err(errno.into()),
    }
}

/// [`open`] by way of `/dev/userfaultfd` (Linux 6.1), whose file permissions decide.
fn open_device() -> Result<OwnedFd, CreateError> {
    let device = rustix::fs::open("/dev/userfaultfd", OFlags::RDWR | OFlags::CLOEXEC, Mode::empty())
        .map_err(CreateError::NoPermission)?;
    let args = [device.as_raw_fd() as usize, USERFAULTFD_IOC_NEW, FLAGS as usize];
    // SAFETY: this ioctl takes a number and returns a new descriptor.
    let fd = unsafe { syscall(libc::SYS_ioctl, args) }?;
    // SAFETY: the kernel has just opened this descriptor, and no other code knows it.
    Ok(unsafe { OwnedFd::from_raw_fd(fd as RawFd) })
}

#[cfg(test)]
mod tests;
