//! `pidfd_open(2)`: a reference to a process. The kernel may give the process's number to another
//! process later; the reference stays right.

#![allow(unsafe_code)] // Signals go by number, which the typed wrapper does not take.

use std::io;
use std::os::fd::{AsRawFd, OwnedFd};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::process::{Pid, PidfdFlags, PidfdGetfdFlags, pidfd_getfd, pidfd_open};

use crate::raw::syscall;

/// A process.
#[derive(Debug)]
pub struct PidFd {
    fd: OwnedFd,
}

impl PidFd {
    /// The process that has this number now.
    ///
    /// # Errors
    ///
    /// `ESRCH`: there is no such process. `InvalidInput`: the number is not positive. `EINVAL`: a
    /// thread that is not a process.
    pub fn open(pid: i32) -> io::Result<Self> {
        let pid = Pid::from_raw(pid.max(0)).ok_or(io::ErrorKind::InvalidInput)?;
        Ok(Self { fd: pidfd_open(pid, PidfdFlags::empty())? })
    }

    /// Takes over a descriptor opened elsewhere.
    pub fn from_fd(fd: OwnedFd) -> Self {
        Self { fd }
    }

    /// Whether the process has ended; a zombie has ended. To wait for the end, `poll(2)` the
    /// descriptor for `POLLIN`.
    pub fn has_exited(&self) -> bool {
        let mut fds = [PollFd::new(&self.fd, PollFlags::IN)];
        let at_once = Timespec { tv_sec: 0, tv_nsec: 0 };
        loop {
            match poll(&mut fds, Some(&at_once)) {
                Err(rustix::io::Errno::INTR) => {}
                ready => return ready.is_ok_and(|ready| ready > 0),
            }
        }
    }

    /// A duplicate of the process's descriptor `number` (`pidfd_getfd(2)`). What the process has
    /// there is its own choice: look before use, and mind that closing a file of FUSE may wait.
    ///
    /// # Errors
    ///
    /// `ESRCH`: the process has ended. `EBADF`: it has no such descriptor. `EPERM`: this process
    /// may not trace it.
    pub fn descriptor(&self, number: u32) -> io::Result<OwnedFd> {
        let number = i32::try_from(number).map_err(|_| io::ErrorKind::InvalidInput)?;
        Ok(pidfd_getfd(&self.fd, number, PidfdGetfdFlags::empty())?)
    }

    /// Sends a signal (`SIG*`); 0 only asks whether one could be sent (`pidfd_send_signal(2)`).
    ///
    /// # Errors
    ///
    /// `ESRCH`: the process has ended and was reaped. `EPERM`: no permission. `EINVAL`: no such
    /// signal.
    pub fn send_signal(&self, signal: i32) -> io::Result<()> {
        let args = [self.fd.as_raw_fd() as usize, signal as usize, 0, 0];
        // SAFETY: the third argument is a null pointer, which the call allows: it then sends the
        // same information as kill(2). The kernel writes nothing to this process's memory.
        unsafe { syscall(libc::SYS_pidfd_send_signal, args) }?;
        Ok(())
    }
}

as_fd!(PidFd);

impl From<PidFd> for OwnedFd {
    fn from(pidfd: PidFd) -> OwnedFd {
        pidfd.fd
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_descriptor_of_a_process_is_duplicated() {
        let own = PidFd::open(std::process::id() as i32).unwrap();
        let (read, write) = rustix::pipe::pipe().unwrap();
        let there = own.descriptor(write.as_raw_fd() as u32).unwrap();
        drop(write);
        rustix::io::write(&there, b"x").unwrap();
        assert_eq!(rustix::io::read(&read, &mut [0; 2]), Ok(1));
        assert_eq!(own.descriptor(u32::MAX).unwrap_err().kind(), io::ErrorKind::InvalidInput);
        assert_eq!(own.descriptor(1 << 20).unwrap_err().raw_os_error(), Some(libc::EBADF));
    }

    #[test]
    fn knows_when_a_process_ends() {
        let _forking = crate::testing::forking();
        let mut child = std::process::Command::new("sleep").arg("60").spawn().unwrap();
        let process = PidFd::open(child.id() as i32).unwrap();
        assert!(!process.has_exited());
        process.send_signal(0).unwrap();
        process.send_signal(libc::SIGKILL).unwrap();
        poll(&mut [PollFd::new(&process, PollFlags::IN)], None).unwrap();
        assert!(process.has_exited(), "a zombie has ended");
        child.wait().unwrap();
        assert!(process.has_exited());
        assert_eq!(process.send_signal(0).unwrap_err().raw_os_error(), Some(libc::ESRCH));
    }

    #[test]
    fn refuses_what_is_no_process() {
        assert_eq!(PidFd::open(0).unwrap_err().kind(), io::ErrorKind::InvalidInput);
        assert_eq!(PidFd::open(-1).unwrap_err().kind(), io::ErrorKind::InvalidInput);
        assert_eq!(PidFd::open(i32::MAX).unwrap_err().raw_os_error(), Some(libc::ESRCH));
    }
}
