//! A process that lets go on what a command has stopped, whatever becomes of the command.
//!
//! ```text
//! command                                    guard, a process in a session of its own
//!   start ──────────────────────────────────▶ run: signals ignored, other descriptors closed
//!   watch(Stopped, pidfd) ──────────────────▶ knows it               ──▶ answer
//!   stands(promise) ────────────────────────▶ looks at the command from now on
//!   …the guest stands…  beat, beat ─────────▶ the promise begins anew
//!   runs ───────────────────────────────────▶ looks no more          ──▶ answer
//!   done ───────────────────────────────────▶ ends                   ──▶ answer
//! ```
//!
//! The guard puts back all that it watches when the command has ended without [`Guard::done`].
//! While anything stands it also does so when the command is stopped (SIGSTOP), or does not beat
//! for as long as it has promised. It tries until the guest is seen running, or is gone. A command
//! that comes back later hears of that by [`Guard::runs`]: what it has copied is worth nothing,
//! since the guest ran meanwhile.
//!
//! Ctrl-Z in the command waits until nothing stands. The guard is the calling program itself,
//! started with words that have it call [`run`].

mod alone;
mod first;
mod hold;
mod serve;

use std::ffi::OsString;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::process::{Child, Command, Stdio};
use std::sync::Mutex;
use std::time::{Duration, Instant};

use kmem::pidfd::PidFd;
use kmem::seqpacket::Conn;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use serde::{Deserialize, Serialize};
use serde_json::Value;

pub use alone::stand_alone;
pub use first::First;
pub use serve::run;

/// How long a guest stands at most without a beat, if nothing else is promised.
pub const PROMISE: Duration = Duration::from_secs(60);
/// How long a guard may take to answer: on a busy host it starts late.
const ANSWER: Duration = Duration::from_secs(60);
/// The longest message, bytes: the paths of a guest's disks.
const MAX_MESSAGE: usize = 128 << 10;
/// What the guard answers.
const YES: &[u8] = b"yes";

/// Why there is no guard, or not any more.
#[derive(Debug, thiserror::Error)]
pub enum GuardError {
    /// The program cannot be started.
    #[error("cannot start the guard")]
    Start(#[source] io::Error),
    /// The program ended, or is another one.
    #[error("the guard did not start")]
    NotReady(#[source] io::Error),
    /// The guard has put everything back.
    #[error(
        "this command was stopped, or hung, while the guest stood: the guest was let go on, and what was copied is worth \
         nothing; try again"
    )]
    LetGo,
}

/// How something was stopped, and so is put back. A guard watches one of each.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub enum Stopped {
    /// By SIGSTOP; threads may also have been raised ([`First`]).
    Signal,
    /// By ptrace(2): the kernel lets its threads go when the command ends. If that is stopped it is
    /// continued, and killed if that does not help.
    Trace,
    /// By QEMU's monitor: what [`run`] is given puts it back. Sockets that go along are shut down
    /// first.
    Qmp(Value),
}

/// What the command says.
#[derive(Serialize, Deserialize)]
enum Message {
    /// With a descriptor of the process, and those that it holds.
    Watch {
        pid: i32,
        stopped: Stopped,
    },
    Stands {
        promise: Duration,
    },
    Beat,
    Runs,
    Done,
}

/// While something stands.
struct Standing {
    _hold: hold::Hold,
    promise: Duration,
    beat: Instant,
}

/// A running guard. Dropping it without [`Guard::done`] makes it do its work, and waits for that.
pub struct Guard {
    link: Option<Conn>,
    child: Option<Child>,
    #[cfg(feature = "testing")]
    thread: Option<std::thread::JoinHandle<io::Result<()>>>,
    standing: Mutex<Option<Standing>>,
}

impl Guard {
    /// Starts a guard. `words` are the program and its arguments.
    ///
    /// # Errors
    /// If there is no such program, or the kernel refuses.
    pub fn start(words: &[OsString]) -> Result<Self, GuardError> {
        let (program, arguments) = words.split_first().ok_or(GuardError::Start(io::ErrorKind::InvalidInput.into()))?;
        let (ours, theirs) = Conn::pair().map_err(GuardError::Start)?;
        let theirs = theirs.as_fd().try_clone_to_owned().map_err(GuardError::Start)?;
        let mut command = Command::new(program);
        let child = command.args(arguments).stdin(Stdio::from(theirs)).stdout(Stdio::null()).spawn();
        Ok(Self {
            link: Some(ours),
            child: Some(child.map_err(GuardError::Start)?),
            #[cfg(feature = "testing")]
            thread: None,
            standing: Mutex::new(None),
        })
    }

    /// A guard that is a thread of this process, and so does not outlive it. Nothing is put back by
    /// QEMU's monitor.
    #[cfg(feature = "testing")]
    #[doc(hidden)]
    pub fn thread() -> Self {
        let (ours, theirs) = Conn::pair().expect("a pair of sockets");
        let thread = Some(std::thread::spawn(move || serve::serve(&theirs, &|_, _| {})));
        Self { link: Some(ours), child: None, thread, standing: Mutex::new(None) }
    }

    /// Has the guard put this back, in place of another one that was stopped in the same way. It
    /// keeps duplicates of `held` until then. From now on the process may be stopped.
    ///
    /// # Errors
    /// If there is no guard any more. Nothing may be stopped then.
    pub fn watch(
        &self,
        stopped: Stopped,
        pid: i32,
        process: &PidFd,
        held: &[BorrowedFd<'_>],
    ) -> Result<(), GuardError> {
        let fds: Vec<BorrowedFd<'_>> = [process.as_fd()].into_iter().chain(held.iter().copied()).collect();
        self.ask(&Message::Watch { pid, stopped }, &fds).map_err(GuardError::NotReady)
    }

    /// From now on something stands, for at most `promise` without a [`Guard::beat`]. To be said
    /// before it is stopped.
    ///
    /// # Errors
    /// If there is no guard any more. Nothing may be stopped then.
    pub fn stands(&self, promise: Duration) -> Result<(), GuardError> {
        self.send(&Message::Stands { promise }, &[]).map_err(GuardError::NotReady)?;
        let standing = Standing { _hold: hold::Hold::begin(), promise, beat: Instant::now() };
        *self.standing() = Some(standing);
        Ok(())
    }

    /// Looks whether the guard is there, right after something was stopped: a command that hung
    /// before that has none any more.
    ///
    /// # Errors
    /// [`GuardError::LetGo`].
    pub fn is_there(&self) -> Result<(), GuardError> {
        let link = self.link.as_ref().ok_or(GuardError::LetGo)?;
        match link.recv(&mut [0; YES.len()], &mut Vec::new()) {
            Ok(None) => Ok(()),
            _ => Err(GuardError::LetGo),
        }
    }

    /// The work on what stands gets on.
    pub fn beat(&self) {
        if let Some(standing) = &mut *self.standing()
            && standing.beat.elapsed() > standing.promise / 16
        {
            standing.beat = Instant::now();
            // If there is no guard any more, `runs` says so.
            let _ = self.send(&Message::Beat, &[]);
        }
    }

    /// Everything was let go on.
    ///
    /// # Errors
    /// [`GuardError::LetGo`]: that had happened before, so it ran all the while.
    pub fn runs(&self) -> Result<(), GuardError> {
        let answer = self.ask(&Message::Runs, &[]);
        *self.standing() = None;
        answer.map_err(|_| GuardError::LetGo)
    }

    /// There is nothing to put back any more.
    pub fn done(&self) {
        // A guard that was killed has nothing to do either.
        let _ = self.ask(&Message::Done, &[]);
    }

    fn standing(&self) -> std::sync::MutexGuard<'_, Option<Standing>> {
        self.standing.lock().unwrap_or_else(std::sync::PoisonError::into_inner)
    }

    fn send(&self, message: &Message, fds: &[BorrowedFd<'_>]) -> io::Result<()> {
        let link = self.link.as_ref().ok_or(io::ErrorKind::BrokenPipe)?;
        link.send(&serde_json::to_vec(message)?, fds)
    }

    fn ask(&self, message: &Message, fds: &[BorrowedFd<'_>]) -> io::Result<()> {
        self.send(message, fds)?;
        let link = self.link.as_ref().ok_or(io::ErrorKind::BrokenPipe)?;
        let (mut answer, mut none, end) = ([0; YES.len()], Vec::new(), Instant::now() + ANSWER);
        loop {
            match link.recv(&mut answer, &mut none)? {
                Some(len) if answer[..len] == *YES => return Ok(()),
                Some(_) => return Err(io::ErrorKind::UnexpectedEof.into()),
                None if Instant::now() >= end => return Err(io::ErrorKind::TimedOut.into()),
                None => wait(link, Some(end.saturating_duration_since(Instant::now()))),
            }
        }
    }
}

impl Drop for Guard {
    fn drop(&mut self) {
        drop(self.link.take());
        // It does not end before what it watches is seen running, or is gone.
        let _ = self.child.take().map(|mut child| child.wait());
        #[cfg(feature = "testing")]
        let _ = self.thread.take().map(std::thread::JoinHandle::join);
    }
}

/// Waits until there is a message, but for no longer than `limit`.
fn wait(link: &Conn, limit: Option<Duration>) {
    let limit = limit.map(|limit| Timespec { tv_sec: limit.as_secs() as i64, tv_nsec: limit.subsec_nanos().into() });
    // An interrupted call only looks once more.
    let _ = poll(&mut [PollFd::new(link, PollFlags::IN)], limit.as_ref());
}

/// Descriptors that came with a message: the process's, and the others.
fn descriptors(mut fds: Vec<OwnedFd>) -> Option<(PidFd, Vec<OwnedFd>)> {
    if fds.is_empty() {
        return None;
    }
    let process = PidFd::from_fd(fds.remove(0));
    Some((process, fds))
}
