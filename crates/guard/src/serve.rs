//! The guard's process: it listens to the command, looks at it, and puts back.

use std::fs::File;
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::path::PathBuf;
use std::sync::mpsc::{Sender, channel};
use std::time::{Duration, Instant};

use kmem::peer::Peer;
use kmem::pidfd::PidFd;
use kmem::procfs;
use kmem::seqpacket::Conn;
use rustix::fs::FileType;
use rustix::net::Shutdown;
use serde_json::Value;

use crate::{MAX_MESSAGE, Message, Stopped, YES, alone, descriptors, first, wait};

/// Time between two looks at the command while something stands.
pub(crate) const LOOK: Duration = Duration::from_millis(50);
/// How long a command that was continued may take to let go what it traces.
const CONTINUED: Duration = Duration::from_secs(10);
/// A thread that exits has this flag: `PF_EXITING` of the kernel, in proc_pid_stat(5).
const EXITING: u64 = 4;

/// What QEMU's monitor puts back: the task, and whether the guest is gone. It returns when the
/// guest runs, or is gone, and gives whether all is put back.
pub(crate) type Undo<'a> = &'a dyn Fn(&Value, &dyn Fn() -> bool) -> bool;

/// Something that is watched.
struct Watched {
    pid: i32,
    process: PidFd,
    stopped: Stopped,
    /// The policies that its threads had.
    policies: Vec<(i32, i32)>,
    held: Vec<OwnedFd>,
}

/// The guard's process. `undo` puts back what [`Stopped::Qmp`] describes: it is called with that,
/// and with a function that says whether the guest is gone. It returns when the guest runs, and
/// gives whether all is put back. If not, the next command tries it.
///
/// # Errors
/// If standard input is not a command's socket.
pub fn run(undo: impl Fn(&Value, &dyn Fn() -> bool) -> bool) -> io::Result<()> {
    alone::stand_alone();
    let link = Conn::from_fd(io::stdin().as_fd().try_clone_to_owned()?);
    serve(&link, &undo)
}

/// Listens until there is nothing to put back any more, or that is done.
pub(crate) fn serve(link: &Conn, undo: Undo<'_>) -> io::Result<()> {
    let command = Peer::of(link)?;
    // Later there may be no room for a thread, and nothing may be stopped without one.
    let (pipes, come) = channel::<OwnedFd>();
    std::thread::Builder::new().spawn(move || come.into_iter().for_each(empty))?;
    let (mut watched, mut mark): (Vec<Watched>, _) = (Vec::new(), None);
    if listen(link, command.pid, &mut watched, &mut mark) {
        return Ok(());
    }
    let command = PidFd::open(command.pid).ok().map(|process| (command.pid, process));
    // The command hears that it is too late.
    let _ = rustix::net::shutdown(link, Shutdown::Both);
    watched.sort_by_key(|one| rank(&one.stopped));
    // All of them, also if one fails.
    let left = watched.iter_mut().map(|one| one.put_back(command.as_ref(), undo, &pipes)).filter(|done| !done).count();
    if let (0, Some((path, _))) = (left, mark) {
        let _ = std::fs::remove_file(path);
    }
    Ok(())
}

/// Whether the command has said that there is nothing to put back.
fn listen(link: &Conn, command: i32, watched: &mut Vec<Watched>, mark: &mut Option<(PathBuf, OwnedFd)>) -> bool {
    let mut buffer = vec![0; MAX_MESSAGE];
    let mut promise = None;
    let mut end = Instant::now();
    loop {
        let mut fds = Vec::new();
        let message = match link.recv(&mut buffer, &mut fds) {
            Ok(Some(0)) | Err(_) => return false,
            Ok(Some(len)) => serde_json::from_slice(&buffer[..len]),
            Ok(None) if promise.is_some() && (is_stopped(command) || is_dying(command) || Instant::now() >= end) => {
                return false;
            }
            Ok(None) => {
                wait(link, promise.map(|_| LOOK));
                continue;
            }
        };
        let is_asked = !matches!(message, Ok(Message::Note(_) | Message::Beat | Message::Stands { .. }));
        match message {
            // The lock is held by its descriptor.
            Ok(Message::Note(path)) => *mark = fds.pop().map(|fd| (path, fd)),
            Ok(Message::Watch { pid, stopped }) => {
                let Some((process, held)) = descriptors(fds) else { return false };
                watched.retain(|one| rank(&one.stopped) != rank(&stopped));
                let policies = first::usual_policies(pid);
                watched.push(Watched { pid, process, stopped, policies, held });
            }
            Ok(Message::Stands { promise: new }) => promise = Some(new),
            Ok(Message::Beat) => {}
            Ok(Message::Runs) => promise = None,
            Ok(Message::Done) => {
                let _ = link.send(YES, &[]);
                return true;
            }
            Err(_) => return false,
        }
        end = Instant::now() + promise.unwrap_or_default();
        // A command that was killed meanwhile does not hear it, and is noticed next.
        if is_asked {
            let _ = link.send(YES, &[]);
        }
    }
}

/// A process that is stopped answers nobody: it is continued first.
pub(crate) fn rank(stopped: &Stopped) -> u8 {
    match stopped {
        Stopped::Signal => 0,
        Stopped::Trace => 1,
        Stopped::Qmp(_) => 2,
    }
}

/// Whether the process is stopped by a signal. A debugger's stops are short as a rule.
pub(crate) fn is_stopped(pid: i32) -> bool {
    procfs::Stat::of(Some(pid)).is_ok_and(|stat| stat.state() == Some('T'))
}

/// Whether the process was killed, or exits, but does not end, since one of its threads waits for
/// storage: before it has seen that it is to end, or when it closes its files.
fn is_dying(pid: i32) -> bool {
    let exits = procfs::Stat::of(Some(pid)).and_then(|stat| stat.field(9)).is_ok_and(|flags| flags & EXITING != 0);
    let was_killed = |thread: i32| {
        let pending = field(pid, thread, "SigPnd:").and_then(|signals| u64::from_str_radix(&signals, 16).ok());
        pending.is_some_and(|signals| signals & 1 << (libc::SIGKILL - 1) != 0)
    };
    exits || procfs::threads(pid).is_ok_and(|threads| threads.into_iter().any(was_killed))
}

/// The process that traces a process's first thread, which one of its threads does.
fn tracer(pid: i32) -> Option<i32> {
    let number = |pid, name| -> Option<i32> { field(pid, pid, name)?.parse().ok() };
    number(number(pid, "TracerPid:")?, "Tgid:")
}

/// A line of what the kernel says of a process's thread (proc_pid_status(5)).
fn field(pid: i32, thread: i32, name: &str) -> Option<String> {
    let status = std::fs::read_to_string(format!("/proc/{pid}/task/{thread}/status")).ok()?;
    status.lines().find_map(|line| Some(line.strip_prefix(name)?.trim().to_owned()))
}

/// Reads a pipe to its end: QEMU, which waits until it is read, answers nobody meanwhile.
fn empty(pipe: OwnedFd) {
    let _ = io::copy(&mut File::from(pipe), &mut io::sink());
}

impl Watched {
    fn put_back(&mut self, command: Option<&(i32, PidFd)>, undo: Undo<'_>, pipes: &Sender<OwnedFd>) -> bool {
        match &self.stopped {
            Stopped::Signal => self.continue_it(),
            Stopped::Trace => self.have_it_let_go(command),
            Stopped::Qmp(task) => {
                // The command may be stopped, and QEMU serves one client. A file is no socket.
                self.held.iter().for_each(|fd| _ = rustix::net::shutdown(fd, Shutdown::Both));
                let kind = |fd: &OwnedFd| rustix::fs::fstat(fd).map(|stat| FileType::from_raw_mode(stat.st_mode));
                self.held.extract_if(.., |fd| kind(fd) == Ok(FileType::Fifo)).for_each(|pipe| drop(pipes.send(pipe)));
                return undo(task, &|| self.process.has_exited());
            }
        }
        true
    }

    fn continue_it(&self) {
        first::take_back(self.pid, &self.policies);
        while !self.process.has_exited() {
            let _ = self.process.send_signal(libc::SIGCONT);
            if !procfs::is_stopped(self.pid).unwrap_or(false) {
                return;
            }
            std::thread::sleep(LOOK);
        }
    }

    fn have_it_let_go(&self, command: Option<&(i32, PidFd)>) {
        let (Some((pid, command)), start) = (command, Instant::now()) else { return };
        while !self.process.has_exited() && !command.has_exited() && tracer(self.pid) == Some(*pid) {
            let _ = command.send_signal(libc::SIGCONT);
            if start.elapsed() > CONTINUED {
                let _ = command.send_signal(libc::SIGKILL);
            }
            std::thread::sleep(LOOK);
        }
    }
}

#[cfg(test)]
mod tests;
