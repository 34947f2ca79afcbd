//! QEMU, a clone's process: a child of this one, or of the [template](super::Template).

use std::io;
use std::os::fd::{AsFd, AsRawFd};
use std::os::unix::process::ExitStatusExt;
use std::process::{Child, Command, ExitStatus};
use std::time::Duration;

use kmem::pidfd::PidFd;
use kmem::procfs::Stat;
use rustix::event::{PollFd, PollFlags, poll};

/// Fields of a process's `stat`, by their numbers in proc_pid_stat(5).
const PARENT: usize = 4;
const EXIT_CODE: usize = 52;

/// A clone's process.
#[derive(Debug)]
pub struct Process {
    pid: u32,
    fd: PidFd,
    /// Where it is this process's child, which must ask for its end.
    child: Option<Child>,
}

impl Process {
    /// A child.
    ///
    /// # Errors
    /// If this process has no descriptor left for it. Then the child has ended.
    pub(super) fn child(mut child: Child) -> io::Result<Self> {
        let fd = PidFd::open(child.id() as i32).inspect_err(|_| {
            let _ = child.kill();
            let _ = child.wait();
        })?;
        Ok(Self { pid: child.id(), fd, child: Some(child) })
    }

    /// A child of this process. Who gives the descriptor may be another account's, and it is
    /// killed by it: so it can be no other process's.
    pub(super) fn of_parent(parent: u32, fd: PidFd) -> io::Result<Self> {
        let text = std::fs::read_to_string(format!("/proc/self/fdinfo/{}", fd.as_fd().as_raw_fd()))?;
        let number = text.lines().find_map(|line| line.strip_prefix("Pid:")?.trim().parse::<u32>().ok());
        // None, 0 or -1: it has ended.
        let pid = number.filter(|&pid| pid > 0).ok_or(io::ErrorKind::NotFound)?;
        let is_child = Stat::of(Some(pid as i32))?.field(PARENT)? == u64::from(parent);
        if is_child { Ok(Self { pid, fd, child: None }) } else { Err(io::ErrorKind::PermissionDenied.into()) }
    }

    /// Its number.
    pub fn id(&self) -> u32 {
        self.pid
    }

    /// How it has ended, as far as that is known. `None`: it runs.
    pub fn ended(&mut self) -> Option<ExitStatus> {
        let code = |pid| Stat::of(Some(pid)).and_then(|stat| stat.field(EXIT_CODE));
        self.fd.has_exited().then(|| match &mut self.child {
            Some(child) => child.try_wait().ok().flatten().unwrap_or_default(),
            // Its parent, which does not wait for it, may be gone.
            None => ExitStatus::from_raw(code(self.pid as i32).unwrap_or_default() as i32),
        })
    }

    /// Sends it a signal, unless it has ended.
    pub fn signal(&self, signal: i32) {
        let _ = self.fd.send_signal(signal);
    }

    /// Kills it, and waits for its end.
    pub fn kill(&mut self) {
        self.signal(libc::SIGKILL);
        while !self.fd.has_exited() {
            let _ = poll(&mut [PollFd::new(&self.fd, PollFlags::IN)], None);
        }
        let _ = self.child.as_mut().map(Child::wait);
    }
}

/// Starts a program whose advice to use huge pages is ignored. QEMU gives it for all RAM; the
/// kernel then reads 2 MiB of the pool for each page that a guest needs, and a file has no huge
/// pages anyway.
pub(super) fn spawn_without_huge_pages(command: &mut Command) -> io::Result<Child> {
    let start = || {
        ignore_huge_pages();
        command.spawn()
    };
    let started = std::thread::scope(|scope| scope.spawn(start).join());
    started.unwrap_or_else(|_| Err(io::Error::other("the thread that starts it panicked")))
}

/// The same for what this thread starts from now on.
pub(super) fn ignore_huge_pages() {
    // Without it a clone is slower.
    let _ = kmem::seccomp::answer(libc::SYS_madvise, Some((2, libc::MADV_HUGEPAGE as u32)), 0);
}

/// Waits until there is something to receive; `false`: not within this time.
pub(super) fn readable(fd: impl AsFd, within: Duration) -> bool {
    let within = within.try_into().ok();
    poll(&mut [PollFd::new(&fd, PollFlags::IN)], within.as_ref()).is_ok_and(|ready| ready > 0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_another_process_has_started_is_not_taken() {
        let mut child = Command::new("sleep").arg("600").spawn().unwrap();
        let taken = |parent| Process::of_parent(parent, PidFd::open(child.id() as i32)?).map(|one| one.pid);
        let (own, others) = (taken(std::process::id()), taken(1));
        child.kill().unwrap();
        child.wait().unwrap();
        assert_eq!((own.unwrap(), others.unwrap_err().kind()), (child.id(), io::ErrorKind::PermissionDenied));
    }
}
