//! The agent's two threads, started when the program marks memory for the first time, with every
//! signal blocked.
//!
//! The *agent* thread speaks with the daemon and merges. The *event* thread reads what the tracking
//! userfaultfd tells: whoever forks, moves or unmaps registered memory past the C library waits
//! until it has. A panic in either ends management and never the program: the tables and the guards
//! stay.

#![allow(unsafe_code)] // poll(2) on descriptors kept as numbers.

use crate::daemon::link;
use crate::intercept::fork;
use crate::runtime::lock::Blocked;
use crate::runtime::log;
use crate::runtime::sabotage::{self, Sabotage};
use crate::runtime::state::{self, ENDED, FORKING, IDLE, PHASE, RUNNING, STASHED, STATE, State};
use crate::window::pins::Waiting;
use kmem::range::Range;
use kmem::uffd::{CreateError, Event, Features, Uffd};
use rustix::event::{EventfdFlags, eventfd};
use std::os::fd::{OwnedFd, RawFd};
use std::path::PathBuf;
use std::sync::atomic::Ordering;
use std::sync::{Arc, Mutex};
use std::time::Duration;

/// Bytes of stack for each thread.
const STACK: usize = 256 << 10;

/// Makes the agent run if it can. The caller has blocked all signals.
pub fn start() -> bool {
    static STARTING: Mutex<()> = Mutex::new(());
    if PHASE.load(Ordering::Acquire) == IDLE {
        let _one = STARTING.lock();
        if PHASE.load(Ordering::Acquire) == IDLE {
            sabotage::read();
            let phase = match try_start() {
                Ok(()) => RUNNING,
                Err(why) => {
                    log::line(format_args!("memory is left to the kernel: {why}"));
                    ENDED
                }
            };
            PHASE.store(phase, Ordering::Release);
        }
    }
    PHASE.load(Ordering::Acquire) == RUNNING
}

fn try_start() -> Result<(), String> {
    let path = std::env::var_os(wire::ENV_SOCKET).filter(|path| !path.is_empty());
    let path = PathBuf::from(path.ok_or_else(|| format!("{} is not set", wire::ENV_SOCKET))?);
    if kmem::page_size() != kmem::PAGE_SIZE {
        return Err(format!("pages of {} bytes", kmem::page_size()));
    }
    let tracking = Arc::new(tracking_uffd().map_err(|error| error.to_string())?);
    let waiting = Waiting::new().map_err(|error| error.to_string())?;
    let pipe =
        || eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK).map_err(|error| format!("eventfd: {error}"));
    let (wake, stop) = (pipe()?, Arc::new(pipe()?));
    if !fork::watch_forks() {
        return Err("no memory for fork handlers".into());
    }
    std::panic::set_hook(Box::new(|panic| log::line(format_args!("{panic}"))));
    let (events, events_stop) = (tracking.clone(), stop.clone());
    spawn("pageone-events", move || watch_events(&events, &events_stop))?;
    let mut state = STATE.lock();
    state.tracking = Some(tracking);
    state.waiting = Some(waiting);
    state.recycler = crate::recycle::from_environment();
    drop(state);
    state::set_eventfds(state::number(&wake), state::number(&*stop));
    spawn("pageone-agent", move || {
        link::serve(&path, &wake);
        // Detached: nothing is registered any more.
        state::stop();
        state::take_eventfds().for_each(drop);
        drop(stop);
    })
}

/// The userfaultfd that regions are registered with. Fork events need CAP_SYS_PTRACE: without it,
/// forks that bypass the C library's `fork` go unseen.
fn tracking_uffd() -> Result<Uffd, CreateError> {
    let features =
        Features::WP | Features::WP_ASYNC | Features::WP_UNPOPULATED | Features::EVENT_REMAP | Features::EVENT_UNMAP;
    Uffd::new(features | Features::EVENT_FORK).or_else(|error| match error {
        CreateError::NoForkEvents | CreateError::NoPermission => Uffd::new(features),
        other => Err(other),
    })
}

fn spawn(name: &str, body: impl FnOnce() + Send + 'static) -> Result<(), String> {
    let signals = Blocked::all();
    let body = move || {
        if sabotage::is_on(Sabotage::SignalsUnblocked) {
            std::mem::forget(Blocked::none());
        }
        if std::panic::catch_unwind(std::panic::AssertUnwindSafe(body)).is_err() {
            end();
        }
    };
    let thread = std::thread::Builder::new().name(name.into()).stack_size(STACK).spawn(body);
    drop(signals);
    thread.map(drop).map_err(|error| format!("thread {name}: {error}"))
}

/// Ends management after a panic. Closing the userfaultfds unregisters everything and wakes whoever
/// waits; merged pages stay merged, and guarded.
fn end() {
    PHASE.store(ENDED, Ordering::Release);
    let mut state = STATE.lock();
    state.disconnect();
    state.tracking = None;
    state.waiting.take().into_iter().for_each(Waiting::close);
}

/// Waits until one of the descriptors is ready; false after an error.
pub fn wait(fds: &mut [libc::pollfd], timeout_ms: i32) -> bool {
    // SAFETY: the slice is valid for its length; descriptors that are closed are reported, not used.
    let ready = unsafe { libc::poll(fds.as_mut_ptr(), fds.len() as libc::nfds_t, timeout_ms) };
    ready >= 0 || kmem::raw::errno() == libc::EINTR
}

/// An entry for [`wait`].
pub fn interest(fd: RawFd, events: i16) -> libc::pollfd {
    libc::pollfd { fd, events, revents: 0 }
}

/// The event thread. Events are read under the lock, so that memory marked later at the same
/// address is not taken for the one that an old event is about. During a fork the forking thread
/// holds the lock and waits for the event to be read: then it is read without, and acted upon
/// later.
fn watch_events(uffd: &Uffd, stop: &OwnedFd) {
    let mut stash = Vec::new();
    // Reading a fork's event takes a descriptor: when the program has used up its own, this one makes
    // room.
    let mut spare = keep_spare(stop);
    loop {
        let mut fds = [interest(state::number(uffd), libc::POLLIN), interest(state::number(stop), libc::POLLIN)];
        if stash.is_empty() && !wait(&mut fds, -1) || fds[1].revents != 0 || fds[0].revents & !libc::POLLIN != 0 {
            return;
        }
        let event = if FORKING.load(Ordering::Acquire) {
            STASHED.store(true, Ordering::Release);
            let event = uffd.read_event();
            if let Ok(Some(event)) = event {
                stash.push(event);
                continue;
            }
            if stash.is_empty() {
                STASHED.store(false, Ordering::Release);
            }
            event
        } else if let Some(mut state) = STATE.try_lock() {
            stash.drain(..).for_each(|event| state.act(event));
            STASHED.store(false, Ordering::Release);
            let event = loop {
                match uffd.read_event() {
                    Ok(Some(event)) => state.act(event),
                    nothing => break nothing,
                }
            };
            drop(state);
            state::wake();
            event
        } else {
            Ok(None)
        };
        if event.is_err() {
            state::set_spare(-1);
            spare = None;
        } else if spare.is_none() {
            spare = keep_spare(stop);
        }
        std::thread::sleep(Duration::from_micros(100));
    }
}

fn keep_spare(stop: &OwnedFd) -> Option<OwnedFd> {
    let spare = stop.try_clone().ok();
    state::set_spare(spare.as_ref().map_or(-1, state::number));
    spare
}

impl State {
    fn act(&mut self, event: Event) {
        match event {
            Event::Fork { child } => {
                if self.is_inherited() {
                    self.count_fork();
                }
                // Unregisters the child's copy.
                drop(child);
            }
            Event::Unmap(range) => self.lose(range),
            Event::Remap { from, to, len } => {
                self.lose(Range::new(from, len));
                self.untrack(Range::new(to, len));
            }
            Event::Remove(_) | Event::Pagefault { .. } => {}
        }
    }

    /// Mappings went away behind our back.
    fn lose(&mut self, range: Range) {
        for (id, pages) in self.pieces(range) {
            self.give_up(id, pages);
        }
    }
}
