//! The rights of another account: for a program that root starts, and for a piece of work on files.
//!
//! Sources: credentials(7); setfsuid(2); setgroups(2), "C library/kernel differences": by their
//! numbers the calls change the calling thread alone; `PR_SET_NO_NEW_PRIVS`; capabilities(7).

#![allow(unsafe_code)] // System calls; Command::pre_exec.

use std::io;
use std::os::unix::process::CommandExt;
use std::process::Command;

use rustix::io::Errno;

use crate::pidfd::PidFd;

/// The last capability that 64 bits can name.
const CAPABILITIES: usize = 64;
/// Joins a session keyring of its own.
const JOIN_SESSION: usize = 1;

/// An account, and what a program of it may do.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Account {
    /// User.
    pub uid: u32,
    /// Group.
    pub gid: u32,
    /// Other groups.
    pub groups: Vec<u32>,
    /// Capabilities that it may have, a bit each. Only root's programs have any.
    pub capabilities: u64,
}

fn call(number: libc::c_long, arguments: [usize; 3]) -> io::Result<usize> {
    let [a, b, c] = arguments;
    // SAFETY: the callers pass numbers, or a list and its length. No call has a fourth argument but
    // prctl, which wants zeros.
    let done = unsafe { libc::syscall(number, a, b, c, 0_usize, 0_usize) };
    usize::try_from(done).map_err(|_| io::Error::last_os_error())
}

/// Has a command's program be killed when the thread that starts it ends, also if that is killed.
/// To be called behind [`Account::start`]: another account forgets it.
///
/// # Errors
///
/// If this process has no descriptor left.
pub fn end_with_caller(command: &mut Command) -> io::Result<&mut Command> {
    let caller = PidFd::open(std::process::id() as i32)?;
    let set = move || {
        call(libc::SYS_prctl, [libc::PR_SET_PDEATHSIG as usize, libc::SIGKILL as usize, 0])?;
        // It may have ended before.
        if caller.has_exited() { Err(Errno::SRCH.into()) } else { Ok(()) }
    };
    // SAFETY: the child makes two system calls, and allocates nothing.
    Ok(unsafe { command.pre_exec(set) })
}

impl Account {
    /// The account of a process, and the capabilities that it may use.
    ///
    /// # Errors
    ///
    /// If the process has ended. `Other`: it has more than one, as a setuid program has, which runs
    /// with its owner's rights and the words of whoever started it.
    pub fn of(pid: u32) -> io::Result<Self> {
        let text = std::fs::read_to_string(format!("/proc/{pid}/status"))?;
        let field =
            |name: &str| text.lines().find_map(|line| line.strip_prefix(name)).ok_or(io::ErrorKind::InvalidData);
        let numbers = |name: &str| -> Result<Vec<u32>, io::ErrorKind> {
            Ok(field(name)?.split_whitespace().filter_map(|number| number.parse().ok()).collect())
        };
        // Real, effective, saved, file system.
        let only = |name: &str| match numbers(name)?[..] {
            [one, a, b, c] if [a, b, c] == [one; 3] => Ok(one),
            [..] => Err(io::Error::other(format!("it has more than one user or group ({name}{})", field(name)?))),
        };
        let capabilities = u64::from_str_radix(field("CapPrm:")?.trim(), 16).map_err(|_| io::ErrorKind::InvalidData)?;
        Ok(Self { uid: only("Uid:")?, gid: only("Gid:")?, groups: numbers("Groups:")?, capabilities })
    }

    fn set_groups(&self) -> io::Result<()> {
        call(libc::SYS_setgroups, [self.groups.len(), self.groups.as_ptr() as usize, 0]).map(drop)
    }

    /// Makes this thread one of the account for ever, which is a process's only one.
    fn enter(&self) -> io::Result<()> {
        if !rustix::process::geteuid().is_root() {
            return Ok(());
        }
        if self.uid != 0 {
            // No keys of root's, and no terminal to type at. Without either it has none.
            let _ = call(libc::SYS_keyctl, [JOIN_SESSION, 0, 0]);
            let _ = call(libc::SYS_setsid, [0; 3]);
        }
        for one in (0..CAPABILITIES).filter(|&one| self.capabilities & 1 << one == 0) {
            match call(libc::SYS_prctl, [libc::PR_CAPBSET_DROP as usize, one, 0]) {
                // The kernel has none of this number.
                Err(error) if error.raw_os_error() == Some(Errno::INVAL.raw_os_error()) => break,
                done => done.map(drop)?,
            }
        }
        self.set_groups()?;
        let (uid, gid) = (self.uid as usize, self.gid as usize);
        call(libc::SYS_setresgid, [gid; 3])?;
        call(libc::SYS_setresuid, [uid; 3])?;
        call(libc::SYS_prctl, [libc::PR_SET_NO_NEW_PRIVS as usize, 1, 0]).map(drop)
    }

    /// Has a command start its program as this account, and without ways to more rights. Who is not
    /// root can give no others than its own, which stay as they are.
    pub fn start(&self, command: &mut Command) {
        let account = self.clone();
        // SAFETY: the child makes system calls, and allocates nothing: errors are numbers.
        unsafe { command.pre_exec(move || account.enter()) };
    }

    /// Does something with files as this account would, in a thread of its own. Without root, and
    /// for root's files, this process's rights stay.
    ///
    /// # Errors
    ///
    /// Those of the work; or the thread cannot become one of the account, and nothing was done.
    pub fn with_files<T: Send>(&self, work: impl FnOnce() -> io::Result<T> + Send) -> io::Result<T> {
        if !rustix::process::geteuid().is_root() || self.uid == 0 {
            return work();
        }
        let enter = || -> io::Result<()> {
            self.set_groups()?;
            for (number, id) in [(libc::SYS_setfsgid, self.gid), (libc::SYS_setfsuid, self.uid)] {
                call(number, [id as usize, 0, 0])?;
                // The calls give the one before, and no error. This asks.
                if call(number, [usize::MAX, 0, 0])? != id as usize {
                    return Err(io::ErrorKind::PermissionDenied.into());
                }
            }
            Ok(())
        };
        let thread = || enter().and_then(|()| work());
        let done = std::thread::scope(|scope| scope.spawn(thread).join());
        done.unwrap_or_else(|_| Err(io::Error::other("the thread panicked")))
    }
}

#[cfg(test)]
mod tests;
