//! How far the agent's life has come in this process.
//!
//! All of it stands outside of the tables and their lock: a thread that panics notes its end before
//! it takes the lock, and the thread that asks the agent to leave waits without it.

use std::sync::atomic::{AtomicBool, AtomicU8, Ordering};

use crate::runtime::lock::Lock;
use crate::runtime::waker::WAKE;

/// Held by the one thread that starts the agent. Not the lock of the tables, which the new threads
/// take.
pub(crate) static STARTING: Lock<()> = Lock::new(());

/// The memory of a clone is being loaded, or is not marked yet: the daemon is told of it
/// afterwards. Set before the agent starts.
pub(crate) static LOADING: AtomicBool = AtomicBool::new(false);

static PHASE: AtomicU8 = AtomicU8::new(Phase::Idle as u8);

/// What the agent does in this process.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[repr(u8)]
pub(crate) enum Phase {
    /// The program has marked no memory yet.
    Idle,
    /// A thread starts it. A copy of the process that is made meanwhile does not start another.
    Starting,
    /// The threads run, and memory that the program marks is taken.
    Running,
    /// No further memory is taken: the agent could not start, has given everything back, or this is
    /// a forked child. The guards stay.
    Ended,
}

pub(crate) fn phase() -> Phase {
    match PHASE.load(Ordering::Acquire) {
        0 => Phase::Idle,
        1 => Phase::Starting,
        2 => Phase::Running,
        _ => Phase::Ended,
    }
}

pub(crate) fn set_phase(phase: Phase) {
    PHASE.store(phase as u8, Ordering::Release);
}

static LEAVING: AtomicU8 = AtomicU8::new(Leaving::No as u8);

/// Whether the program has asked the agent to leave.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[repr(u8)]
pub(crate) enum Leaving {
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
        WAKE.wake();
    }
}

pub(crate) fn set_leaving(leaving: Leaving) {
    LEAVING.store(leaving as u8, Ordering::Release);
}
