//! All mutable statics of the agent, each with the reason why it is one.
//!
//! The agent has no object of its own in the program: the C library's symbols, the fork handlers
//! and the heap are entered without an argument. What they need is found here, and nowhere else.

use std::os::fd::RawFd;
use std::sync::atomic::{AtomicBool, AtomicI32, AtomicU8, AtomicUsize, Ordering};

use rustix::io::Errno;

use crate::runtime::bell::Bell;
use crate::runtime::heap::Heap;
use crate::runtime::kept::Numbers;
use crate::runtime::lineage::Lineage;
use crate::runtime::lock::Lock;
use crate::runtime::sharers::Sharers;
use crate::runtime::state::State;
use crate::runtime::watch::Watch;

/// The agent's heap. A static because the language asks for one; fork handlers hold it too.
#[global_allocator]
pub(crate) static HEAP: Heap = Heap::new();

/// All tables, behind one lock. A static because fork handlers and the C library's symbols need it.
pub(crate) static STATE: Lock<State> = Lock::new(State::new(&WATCH));

/// Where managed memory lies. Outside of [`STATE`] because every interposed call asks it, and may
/// not wait for a lock.
pub(crate) static WATCH: Watch = Watch::new();

/// Held by the one thread that starts the agent. Not [`STATE`], which the new threads take.
pub(crate) static STARTING: Lock<()> = Lock::new(());

/// A [`Phase`]. Outside of [`STATE`] because a panicking thread sets it before it takes the lock.
static PHASE: AtomicU8 = AtomicU8::new(Phase::Idle as u8);

/// What the agent does in this process.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[repr(u8)]
pub(crate) enum Phase {
    /// The program has marked no memory yet.
    Idle,
    /// The threads run, and memory that the program marks is taken.
    Running,
    /// No further memory is taken: the agent could not start, has given everything back, or this is
    /// a forked child. The guards stay.
    Ended,
}

/// The phase now.
pub(crate) fn phase() -> Phase {
    match PHASE.load(Ordering::Acquire) {
        0 => Phase::Idle,
        1 => Phase::Running,
        _ => Phase::Ended,
    }
}

/// Enters a phase.
pub(crate) fn set_phase(phase: Phase) {
    PHASE.store(phase as u8, Ordering::Release);
}

/// The fork handlers are registered with the C library. Outside of [`STATE`] because allocators
/// register theirs before constructors have run.
pub(crate) static FORKS_WATCHED: AtomicBool = AtomicBool::new(false);

/// The agent has begun to start. A copy of the process made meanwhile does not start another.
pub(crate) static STARTED: AtomicBool = AtomicBool::new(false);

/// The memory of a clone is being loaded, or is not marked yet: the daemon is told of it
/// afterwards. Set before the agent starts.
pub(crate) static LOADING: AtomicBool = AtomicBool::new(false);

/// The agent's threads. A program is attached again only after those of the last time have ended.
pub(crate) static THREADS: AtomicUsize = AtomicUsize::new(0);

/// The thread that keeps [`STATE`] across a fork, as pthread_self(3) names it in parent and child;
/// 0: none does.
pub(crate) static KEEPER: AtomicUsize = AtomicUsize::new(0);

/// The process in which the agent runs. A child of `vfork` shares this static.
pub(crate) static OWNER: AtomicI32 = AtomicI32::new(0);

/// The program has chosen who may trace it (`PR_SET_PTRACER`): the agent leaves that alone.
pub(crate) static TRACER_CHOSEN: AtomicBool = AtomicBool::new(false);

/// The agent has permitted the daemon to trace this process, and withdraws that.
pub(crate) static TRACER_OURS: AtomicBool = AtomicBool::new(false);

/// Tells a forked child from this process. Outside of [`STATE`], whose lock such a child may find
/// held for ever.
pub(crate) static LINEAGE: Lineage = Lineage::new();

/// Processes that share this one's memory. Outside of [`STATE`] because such a process may be made
/// while the agent waits for that.
pub(crate) static SHARERS: Sharers = Sharers::new();

/// A fork is between its steps: the forking thread holds [`STATE`] and changes nothing.
pub(crate) static FORKING: AtomicBool = AtomicBool::new(false);

/// This is a child, and [`STATE`] was copied while a thread of the parent changed it. Its tables
/// are never read again.
pub(crate) static TORN: AtomicBool = AtomicBool::new(false);

/// The event thread has read events that it has not acted upon yet. Set while another thread may
/// hold [`STATE`].
pub(crate) static STASHED: AtomicBool = AtomicBool::new(false);

/// The event thread reads without [`STATE`], and may have the descriptor of a fork's event. A child
/// that is made meanwhile would inherit it.
pub(crate) static READING: AtomicBool = AtomicBool::new(false);

/// A thread that holds [`STATE`] takes memory under management: no event may be read until it is
/// in the tables.
pub(crate) static ADOPTING: AtomicBool = AtomicBool::new(false);

/// The numbers of the agent's descriptors. Outside of [`STATE`] because every interposed `close`
/// asks it.
pub(crate) static NUMBERS: Numbers = Numbers::new();

/// Wakes the agent thread. Outside of [`STATE`] because it is rung without the lock.
pub(crate) static WAKE: Bell = Bell::new();
/// Ends the event thread.
pub(crate) static STOP: Bell = Bell::new();
/// The event thread's spare descriptor, a second one of [`STOP`]; -1 without one.
static SPARE: AtomicI32 = AtomicI32::new(-1);
/// [`WAKE`] was rung, and the agent thread has not looked yet: saves further system calls.
static WOKEN: AtomicBool = AtomicBool::new(false);

/// Sets the descriptor that the event thread keeps in reserve.
pub(crate) fn set_spare(spare: Option<RawFd>) {
    SPARE.store(spare.unwrap_or(-1), Ordering::Release);
}

/// The number of the event thread's spare descriptor, which a forked child closes.
pub(crate) fn take_spare() -> Option<RawFd> {
    let number = SPARE.swap(-1, Ordering::AcqRel);
    STOP.hears_by(number).then_some(number)
}

/// A [`Leaving`]. Outside of [`STATE`] because the thread that asks waits without the lock.
static LEAVING: AtomicU8 = AtomicU8::new(Leaving::No as u8);

/// Whether the program has asked the agent to leave.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[repr(u8)]
pub(crate) enum Leaving {
    /// It has not.
    No,
    /// It has, and waits.
    Asked,
    /// Memory could not be given back.
    Failed,
    /// The agent thread has ended.
    Gone,
}

/// What became of the program's wish that the agent leave.
pub(crate) fn leaving() -> Leaving {
    match LEAVING.load(Ordering::Acquire) {
        0 => Leaving::No,
        1 => Leaving::Asked,
        2 => Leaving::Failed,
        _ => Leaving::Gone,
    }
}

/// Asks the agent thread to leave, unless it has left.
pub(crate) fn ask_to_leave() {
    let asked = |now| (now != Leaving::Gone as u8).then_some(Leaving::Asked as u8);
    if LEAVING.fetch_update(Ordering::AcqRel, Ordering::Acquire, asked).is_ok() {
        wake();
    }
}

/// Notes what became of the wish.
pub(crate) fn set_leaving(leaving: Leaving) {
    LEAVING.store(leaving as u8, Ordering::Release);
}

/// Opens [`WAKE`] for a new agent thread. In a program that is attached again somebody may have
/// rung after the thread of the last time had looked: that is forgotten, or nobody would ring
/// again.
///
/// # Errors
///
/// Those of `socketpair(2)`.
pub(crate) fn open_wake() -> Result<(), Errno> {
    WAKE.open()?;
    WOKEN.store(false, Ordering::Release);
    Ok(())
}

/// Tells the agent thread that messages are queued.
pub(crate) fn wake() {
    if !WOKEN.swap(true, Ordering::AcqRel) {
        WAKE.ring();
    }
}

/// The agent thread is about to look at the queue; a later [`wake`] rings again.
pub(crate) fn woken() {
    WAKE.silence();
    WOKEN.store(false, Ordering::Release);
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::runtime::poll;

    #[test]
    fn a_new_agent_thread_hears_although_the_last_one_was_woken_when_it_had_gone() {
        wake();
        open_wake().unwrap();
        wake();
        let mut fds = [poll::interest(WAKE.ear(), libc::POLLIN)];
        poll::wait(&mut fds, 0);
        assert_ne!(fds[0].revents, 0);
        woken();
        WAKE.close();
    }
}
