//! All mutable statics of the agent, each with the reason why it is one.
//!
//! The agent has no object of its own in the program: the C library's symbols, the fork handlers
//! and the heap are entered without an argument. What they need is found here, and nowhere else.

use std::os::fd::{AsRawFd, RawFd};
use std::sync::atomic::{AtomicBool, AtomicI32, AtomicU8, Ordering};

use crate::runtime::heap::Heap;
use crate::runtime::lineage::Lineage;
use crate::runtime::lock::Lock;
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

/// Tells a forked child from this process. Outside of [`STATE`], whose lock such a child may find
/// held for ever.
pub(crate) static LINEAGE: Lineage = Lineage::new();

/// A fork is between its steps: the forking thread holds [`STATE`] and changes nothing.
pub(crate) static FORKING: AtomicBool = AtomicBool::new(false);

/// This is a child, and [`STATE`] was copied while a thread of the parent changed it. Its tables
/// are never read again.
pub(crate) static TORN: AtomicBool = AtomicBool::new(false);

/// The event thread has read events that it has not acted upon yet. Set while another thread may
/// hold [`STATE`].
pub(crate) static STASHED: AtomicBool = AtomicBool::new(false);

/// A thread that holds [`STATE`] takes memory under management: no event may be read until it is
/// in the tables.
pub(crate) static ADOPTING: AtomicBool = AtomicBool::new(false);

/// Eventfd that wakes the agent thread; -1 without one.
///
/// This one and the next two are plain numbers outside of [`STATE`]: they are signalled without the
/// lock. A forked child closes them by number, since it does not have the threads that own them.
static WAKE: AtomicI32 = AtomicI32::new(-1);
/// Eventfd that ends the event thread; -1 without one.
static STOP: AtomicI32 = AtomicI32::new(-1);
/// The event thread's spare descriptor; -1 without one.
static SPARE: AtomicI32 = AtomicI32::new(-1);
/// [`WAKE`] was signalled, and the agent thread has not looked yet: saves further system calls.
static WOKEN: AtomicBool = AtomicBool::new(false);

/// Sets the eventfds that wake the agent thread and end the event thread.
pub(crate) fn set_eventfds(wake: &impl AsRawFd, stop: &impl AsRawFd) {
    WAKE.store(wake.as_raw_fd(), Ordering::Release);
    STOP.store(stop.as_raw_fd(), Ordering::Release);
}

/// Sets the descriptor that the event thread keeps in reserve.
pub(crate) fn set_spare(spare: Option<&impl AsRawFd>) {
    SPARE.store(spare.map_or(-1, AsRawFd::as_raw_fd), Ordering::Release);
}

/// Forgets all three descriptors; returns those that were set.
pub(crate) fn take_eventfds() -> impl Iterator<Item = RawFd> {
    [&WAKE, &STOP, &SPARE].map(|fd| fd.swap(-1, Ordering::AcqRel)).into_iter().filter(|&fd| fd >= 0)
}

/// Forgets all three descriptors and leaves them open.
pub(crate) fn forget_eventfds() {
    take_eventfds().for_each(drop);
}

/// Tells the agent thread that messages are queued.
pub(crate) fn wake() {
    let fd = WAKE.load(Ordering::Acquire);
    if fd >= 0 && !WOKEN.swap(true, Ordering::AcqRel) {
        signal(fd);
    }
}

/// The agent thread is about to look at the queue; a later [`wake`] signals again.
pub(crate) fn woken() {
    WOKEN.store(false, Ordering::Release);
}

/// Tells the event thread to end.
pub(crate) fn stop() {
    signal(STOP.load(Ordering::Acquire));
}

/// Makes an eventfd readable.
#[allow(unsafe_code)] // The descriptor is a number, see `WAKE`.
fn signal(fd: RawFd) {
    let one = 1u64;
    // SAFETY: the kernel reads eight bytes of `one`, which lives until the call returns. A number
    // that is no open descriptor is answered with EBADF.
    unsafe { libc::write(fd, (&raw const one).cast(), size_of_val(&one)) };
}
