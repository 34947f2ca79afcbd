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
//! While anything stands it also does so when the command is stopped (SIGSTOP), was killed and does
//! not end, or does not beat for as long as it has promised. It tries until the guest is seen
//! running, or is gone. A command that comes back later hears of that by [`Guard::runs`]: what it
//! has copied is worth nothing, since the guest ran meanwhile.
//!
//! Ctrl-Z in the command waits until nothing stands. A guard that is stopped is continued when the
//! command waits for it. If both are killed, the next command does the guard's work ([`mend`]). The
//! guard is the calling program itself, started with words that have it call [`run`].

mod alone;
mod first;
mod hold;
mod mark;
mod serve;

use std::ffi::OsString;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::Mutex;
use std::time::{Duration, Instant};

use kmem::pidfd::PidFd;
use kmem::seqpacket::Conn;
use mark::Mark;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use serde::{Deserialize, Serialize};
use serde_json::Value;

pub use alone::{apart, stand_alone};
pub use first::First;
pub use mark::{End, Hold};
pub use serve::run;

/// How long a guest stands at most without a beat, if nothing else is promised.
pub const PROMISE: Duration = Duration::from_secs(60);
/// How long a guard may take to answer: on a busy host it starts late.
const ANSWER: Duration = Duration::from_secs(60);
/// How long a command waits until what another one has left is put back.
const MENDING: Duration = Duration::from_secs(2);
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
    /// It was stopped, and frozen or starved after that.
    #[error("the guard does not answer, so it is not known whether the guest was let go on meanwhile; try again")]
    Silent,
    /// Nothing may be stopped then.
    #[error("cannot note what this command is about to stop")]
    Note(#[source] io::Error),
    /// Another command is at work on it.
    #[error("what was left cannot be put back now; the next command tries it again")]
    Held(#[source] io::Error),
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
    /// first, and pipes are emptied.
    Qmp(Value),
}

/// What the command says.
#[derive(Serialize, Deserialize)]
enum Message {
    /// With a descriptor of the note at this path, which is locked.
    Note(PathBuf),
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
    mark: Option<Mark>,
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
            mark: None,
            #[cfg(feature = "testing")]
            thread: None,
            standing: Mutex::new(None),
        })
    }

    /// Notes in this directory, which nobody else may write to, what is watched from now on.
    ///
    /// # Errors
    /// [`GuardError::Note`].
    pub fn note_in(&mut self, directory: &Path) -> Result<(), GuardError> {
        let guard = self.child.as_ref().map_or(0, |child| child.id() as i32);
        let mark = Mark::make(directory, [guard, std::process::id() as i32]).map_err(GuardError::Note)?;
        self.take_note(mark).map_err(GuardError::NotReady)
    }

    fn take_note(&mut self, mark: Mark) -> io::Result<()> {
        self.send(&Message::Note(mark.path.clone()), &[mark.file.as_fd()])?;
        self.mark = Some(mark);
        Ok(())
    }

    /// A guard that is a thread of this process, and so does not outlive it. Nothing is put back by
    /// QEMU's monitor.
    #[cfg(feature = "testing")]
    #[doc(hidden)]
    pub fn thread() -> Self {
        let (ours, theirs) = Conn::pair().expect("a pair of sockets");
        let thread = Some(std::thread::spawn(move || serve::serve(&theirs, &|_, _| true)));
        Self { link: Some(ours), child: None, mark: None, thread, standing: Mutex::new(None) }
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
        // What is traced runs when nobody traces it.
        if let Some(mark) = self.mark.as_ref().filter(|_| !matches!(stopped, Stopped::Trace)) {
            mark.add(pid, &stopped).map_err(GuardError::Note)?;
        }
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
        answer.map_err(|error| match error.kind() {
            io::ErrorKind::TimedOut => GuardError::Silent,
            _ => GuardError::LetGo,
        })
    }

    /// There is nothing to put back any more.
    pub fn done(&self) {
        // A guard that was killed has nothing to do either.
        let _ = self.ask(&Message::Done, &[]);
        if let Some(mark) = &self.mark {
            mark.remove();
        }
    }

    /// Continues the guard, if it was stopped.
    fn wake(&self) {
        if let Some(pid) = self.child.as_ref().map(|child| child.id() as i32)
            && serve::is_stopped(pid)
        {
            let pid = rustix::process::Pid::from_raw(pid);
            let _ = pid.map(|pid| rustix::process::kill_process(pid, rustix::process::Signal::CONT));
        }
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
                None => {
                    wait(link, Some(serve::LOOK));
                    self.wake();
                }
            }
        }
    }
}

impl Guard {
    /// Gives whether it has ended within this time.
    fn wait_for_its_end(&mut self, limit: Option<Duration>) -> bool {
        let start = Instant::now();
        while let Some(Ok(None)) = self.child.as_mut().map(Child::try_wait) {
            if limit.is_some_and(|limit| start.elapsed() > limit) {
                return false;
            }
            self.wake();
            std::thread::sleep((start.elapsed() / 8).clamp(Duration::from_micros(100), serve::LOOK));
        }
        true
    }
}

/// Puts back what commands have left that were killed together with their guards, as their notes in
/// this directory say. `words` as for [`Guard::start`]; `hold`: what the guard is to hold until it
/// has put back a [`Stopped::Qmp`]; `end`: what is done when that one's process has ended. Gives
/// the processes, and whether each is put back already: a guard may be left to go on with that.
pub fn mend(
    words: &[OsString],
    directory: &Path,
    hold: Hold<'_>,
    end: End<'_>,
) -> Vec<(i32, Result<bool, GuardError>)> {
    let one = |left: mark::Left| {
        let pid = left.watched[0].0;
        let mended = || {
            let mut guard = Guard::start(words)?;
            for (pid, process, stopped) in left.watched {
                let held = match &stopped {
                    Stopped::Qmp(task) => hold(task).map_err(GuardError::Held)?,
                    _ => Vec::new(),
                };
                let held: Vec<BorrowedFd<'_>> = held.iter().map(OwnedFd::as_fd).collect();
                guard.watch(stopped, pid, &process, &held)?;
            }
            guard.take_note(left.mark).map_err(GuardError::NotReady)?;
            drop(guard.link.take());
            let has_ended = guard.wait_for_its_end(Some(MENDING));
            guard.child = None;
            Ok(has_ended)
        };
        (pid, mended())
    };
    mark::left(directory, end).into_iter().map(one).collect()
}

impl Drop for Guard {
    fn drop(&mut self) {
        drop(self.link.take());
        // It does not end before what it watches is seen running, or is gone.
        self.wait_for_its_end(None);
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
