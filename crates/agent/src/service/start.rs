//! The agent's two threads, started with the first marked memory, with all signals blocked.
//!
//! The *agent* thread speaks with the daemon and merges ([`crate::daemon::link`]), the *event*
//! thread reads the tracking userfaultfd ([`crate::service::events`]). A panic in either ends
//! management and never the program: tables and guards stay.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::{Duration, Instant};
use std::{env, io, mem, thread};

use kmem::uffd::{CreateError, Features, Uffd};
use rustix::io::Errno;

use crate::daemon::link;
use crate::recycle::pool;
use crate::runtime::denied::{self, Need};
use crate::runtime::descriptors::Descriptor;
use crate::runtime::heap::HEAP;
use crate::runtime::injected::is_injected;
use crate::runtime::lifecycle::{LOADING, Leaving, Phase, STARTING, phase, set_leaving, set_phase};
use crate::runtime::lineage;
use crate::runtime::lineage::LINEAGE;
use crate::runtime::lock::Blocked;
use crate::runtime::log;
use crate::runtime::prctl;
use crate::runtime::sabotage::{self, Sabotage};
use crate::runtime::state::STATE;
use crate::runtime::state::uffds::ForkEvents;
use crate::runtime::state::window_uffd::WindowUffd;
use crate::runtime::waker::{STOP, WAKE};
use crate::service::{calls, events, fork};
use crate::window::filler;

/// Bytes of stack for each thread.
const STACK: usize = 256 << 10;
/// Pause between two looks at whether the event thread has begun.
const PAUSE: Duration = Duration::from_micros(50);
/// The longest wait for that, where nothing lets it run.
const PATIENCE: Duration = Duration::from_secs(5);

/// Time between two looks whether a clone's memory is loaded.
const LOADING_STEP: Duration = Duration::from_millis(5);

/// Why the agent does not run in this program.
#[derive(Debug, thiserror::Error)]
pub(crate) enum StartError {
    #[error("the agent of this process has ended")]
    Ended,
    #[error("{} is not set", wire::ENV_SOCKET)]
    NoSocket,
    /// The wire, the store and the tables count pages of 4 KiB.
    #[error("pages of {0} bytes")]
    PageSize(usize),
    /// The program has little address space left (`RLIMIT_AS`).
    #[error("no memory for the agent's heap")]
    Heap,
    /// Its merges would lose the bit by which a window keeps writers away.
    #[error("the kernel's KSM has all memory of this process (PR_SET_MEMORY_MERGE)")]
    Ksm,
    /// Nothing tells merged pages from copies: the program lets nobody look at it
    /// (`PR_SET_DUMPABLE`), itself included where it is not privileged.
    #[error("its page map cannot be read: {0}")]
    Pagemap(io::Error),
    #[error(transparent)]
    Userfaultfd(#[from] CreateError),
    #[error("sockets to wake threads: {0}")]
    Waker(#[from] Errno),
    #[error("a descriptor: {0}")]
    Descriptor(#[from] io::Error),
    #[error("fork handlers cannot be registered")]
    ForkHandlers,
    /// A child could not be told from its parent.
    #[error("no memory that is wiped in forked children (Linux 4.14): {0}")]
    Lineage(Errno),
    #[error("thread {name}: {error}")]
    Thread { name: &'static str, error: io::Error },
}

/// Starts the agent if it does not run yet. Without `socket` the environment names it. The caller
/// has blocked all signals. After an error it will not run in this process.
pub(crate) fn start(socket: Option<&Path>) -> Result<(), StartError> {
    let _one = matches!(phase(), Phase::Idle | Phase::Starting).then(|| STARTING.lock());
    match phase() {
        Phase::Running => return Ok(()),
        Phase::Ended => return Err(StartError::Ended),
        Phase::Idle | Phase::Starting => {}
    }
    let named = || env::var_os(wire::ENV_SOCKET).filter(|path| !path.is_empty()).map(PathBuf::from);
    let socket = socket.map(Path::to_path_buf).or_else(named).ok_or(StartError::NoSocket);
    socket.and_then(begin).inspect_err(|error| {
        // Also where nothing was begun.
        set_phase(Phase::Ended);
        tell_if_denied(error);
        log::line(format_args!("memory is left to the kernel: {error}"));
    })
}

/// Starts the agent, which has ended before, in a program that is attached. The caller has blocked
/// all signals.
pub(crate) fn start_attached(socket: PathBuf) -> Result<(), StartError> {
    let _one = STARTING.lock();
    begin(socket)
}

fn begin(socket: PathBuf) -> Result<(), StartError> {
    sabotage::read();
    set_phase(Phase::Starting);
    set_leaving(Leaving::No);
    let begun = try_start(socket).inspect_err(|_| undo());
    set_phase(if begun.is_ok() { Phase::Running } else { Phase::Ended });
    begun
}

/// Standard error gets a sentence if something was denied, whoever asked for a log.
fn tell_if_denied(error: &StartError) {
    match error {
        StartError::Pagemap(error) => denied::tell(Need::Pagemap, error),
        StartError::Userfaultfd(CreateError::NoPermission(device)) => {
            denied::tell(Need::Userfaultfd, &(*device).into())
        }
        other if other.is_denied() => denied::tell_of_filter(other),
        _ => {}
    }
}

impl StartError {
    fn is_denied(&self) -> bool {
        let errno = match self {
            Self::Userfaultfd(CreateError::Os(errno)) | Self::Waker(errno) | Self::Lineage(errno) => *errno,
            Self::Descriptor(error) | Self::Thread { error, .. } => {
                return error.kind() == io::ErrorKind::PermissionDenied;
            }
            Self::Userfaultfd(CreateError::NotCompiledIn) => return true,
            _ => return false,
        };
        matches!(errno, Errno::PERM | Errno::ACCESS)
    }

    /// What to tell those who attach the program.
    pub(crate) fn explain(&self) -> String {
        match self {
            Self::Pagemap(error) => denied::explain(Need::Pagemap, error),
            Self::Userfaultfd(CreateError::NoPermission(device)) => {
                denied::explain(Need::Userfaultfd, &(*device).into())
            }
            other => other.to_string(),
        }
    }
}

fn try_start(path: PathBuf) -> Result<(), StartError> {
    if !fork::is_watched() {
        return Err(StartError::ForkHandlers);
    }
    if kmem::page_size() != kmem::PAGE_SIZE {
        return Err(StartError::PageSize(kmem::page_size()));
    }
    if !HEAP.grow() {
        return Err(StartError::Heap);
    }
    if prctl::has_process() {
        return Err(StartError::Ksm);
    }
    STATE.lock().files.open_pagemap().map_err(StartError::Pagemap)?;
    LINEAGE.begin().map_err(StartError::Lineage)?;
    let (tracking, forks) = tracking_uffd()?;
    lineage::set_owner();
    let tracking = Arc::new(Descriptor::new(tracking)?);
    let window = WindowUffd::new()?;
    let filler = Descriptor::new(filler::create()?)?;
    WAKE.open()?;
    STOP.open().inspect_err(|_| STOP.close())?;
    std::panic::set_hook(Box::new(|panic| log::line(format_args!("{panic}"))));
    let events_uffd = tracking.clone();
    let (is_ready, begun) = (Arc::new(AtomicBool::new(false)), Instant::now());
    let tell = is_ready.clone();
    let body = move || events::watch(&events_uffd, || tell.store(true, Ordering::Release));
    spawn("pageone-events", body).inspect_err(|_| STOP.close())?;
    // From the first registered page on a fork waits for that thread, with the heap held.
    while !is_ready.load(Ordering::Acquire) && begun.elapsed() < PATIENCE {
        thread::sleep(PAUSE);
    }
    let recycler = pool::from_environment();
    let mut state = STATE.lock();
    state.uffds.open(tracking, window, filler, forks);
    state.recycler = recycler;
    drop(state);
    spawn("pageone-agent", move || {
        // The daemon looks for the guest's RAM as soon as it knows the program.
        while LOADING.load(Ordering::Acquire) {
            thread::sleep(LOADING_STEP);
        }
        let opened = STATE.lock().files.open_status();
        match opened {
            Ok(()) if is_injected() && !calls::wait() => end(),
            Ok(()) => link::serve(&path),
            // Pinned and locked memory could not be told from other memory.
            Err(error) => {
                denied::tell(Need::Status, &error);
                log::line(format_args!("nothing is merged: the status of this process cannot be read: {error}"));
                end();
            }
        }
        // Nothing is registered any more, so no event will come.
        STOP.wake();
        WAKE.close();
        set_leaving(Leaving::Gone);
    })
    .inspect_err(|_| STOP.wake())
}

/// Takes back what has begun: nothing is registered yet.
fn undo() {
    STATE.lock().end();
    WAKE.close();
}

/// The userfaultfd that regions are registered with, and whether it reports forks past the C
/// library: that needs CAP_SYS_PTRACE.
fn tracking_uffd() -> Result<(Uffd, ForkEvents), CreateError> {
    let features =
        Features::WP | Features::WP_ASYNC | Features::WP_UNPOPULATED | Features::EVENT_REMAP | Features::EVENT_UNMAP;
    match Uffd::new(features | Features::EVENT_FORK) {
        Err(CreateError::NoForkEvents | CreateError::NoPermission(_)) => {
            Uffd::new(features).map(|uffd| (uffd, ForkEvents::None))
        }
        created => created.map(|uffd| (uffd, ForkEvents::Reported)),
    }
}

/// The agent's threads. A program is attached again only after those of the last time have ended.
static THREADS: AtomicUsize = AtomicUsize::new(0);

pub(crate) fn has_threads() -> bool {
    THREADS.load(Ordering::Acquire) > 0
}

/// Starts a thread of the agent's.
pub(crate) fn spawn(name: &'static str, body: impl FnOnce() + Send + 'static) -> Result<(), StartError> {
    let signals = Blocked::all();
    let body = move || {
        if sabotage::is_on(Sabotage::SignalsUnblocked) {
            mem::forget(Blocked::none());
        }
        if catch_unwind(AssertUnwindSafe(body)).is_err() {
            end();
        }
        THREADS.fetch_sub(1, Ordering::Release);
    };
    THREADS.fetch_add(1, Ordering::Relaxed);
    let started = thread::Builder::new().name(name.into()).stack_size(STACK).spawn(body);
    drop(signals);
    if started.is_err() {
        THREADS.fetch_sub(1, Ordering::Release);
    }
    started.map(drop).map_err(|error| StartError::Thread { name, error })
}

/// Ends management after a panic. Merged pages stay merged, and guarded.
fn end() {
    set_phase(Phase::Ended);
    STATE.lock().end();
    set_leaving(Leaving::Gone);
}
