//! What one thread is in the midst of, where another one, or a copy of the process, must know it
//! without the lock of the tables.
//!
//! The event thread reads events without the lock, and acts on them later. Memory that is marked
//! meanwhile must not be taken for older memory at its address. So nothing is adopted while events
//! are stashed, and none is read while memory is adopted:
//!
//! ```text
//!   Quiet ── begin_reading ──▶ Reading ── stash ──▶ Stashed ── begin_reading ──▶ Reading
//!     ▲ ◀────── end_reading ──────┘                    │
//!     │ ◀──────────────── end_stash ───────────────────┘
//!     └── begin_adopting ──▶ Adopting ── end_adopting ──▶ Quiet
//! ```
//!
//! A copy of the process begins anew, without an event thread. If the tables were copied while a
//! thread changed them, it is `Inconsistent` for ever, and so are its own copies.
//!
//! Which thread forks is no part of that: a fork waits until its event is read.
//!
//! Each change is one atomic operation: a handler or a copy may run at any moment.

use std::sync::atomic::{AtomicU8, AtomicUsize, Ordering};

pub(crate) static INTERLOCK: Interlock = Interlock::new();

#[derive(Clone, Copy)]
#[repr(u8)]
enum Step {
    Quiet,
    /// The event thread may have the descriptor of a fork's event. A child that is made meanwhile
    /// would inherit it.
    Reading,
    /// The event thread has read events that it has not acted upon.
    Stashed,
    /// A thread that holds the lock takes memory under management.
    Adopting,
    /// The tables are never read again.
    Inconsistent,
}

pub(crate) struct Interlock {
    step: AtomicU8,
    /// The thread that keeps the lock and the heap across a fork, and changes nothing. Its number
    /// is that of pthread_self(3) in parent and child; 0: there is none.
    forking: AtomicUsize,
}

impl Interlock {
    const fn new() -> Self {
        Self { step: AtomicU8::new(Step::Quiet as u8), forking: AtomicUsize::new(0) }
    }

    /// Enters a step from one of these; whether it was one of these.
    fn change(&self, from: &[Step], to: Step) -> bool {
        let next = |now| from.iter().any(|&step| step as u8 == now).then_some(to as u8);
        self.step.fetch_update(Ordering::AcqRel, Ordering::Acquire, next).is_ok()
    }

    /// The event thread is about to read an event without the lock. False: it must not.
    pub(crate) fn begin_reading(&self) -> bool {
        self.change(&[Step::Quiet, Step::Stashed], Step::Reading)
    }

    /// It has read none, and none is stashed.
    pub(crate) fn end_reading(&self) {
        self.change(&[Step::Reading], Step::Quiet);
    }

    /// What it has read is stashed, and has no descriptor any more.
    pub(crate) fn stash(&self) {
        self.change(&[Step::Reading], Step::Stashed);
    }

    /// All stashed events were acted upon, or the event thread ends: then nobody will.
    pub(crate) fn end_stash(&self) {
        self.change(&[Step::Stashed], Step::Quiet);
    }

    /// Whether the event thread may have the descriptor of a fork's event.
    pub(crate) fn is_reading(&self) -> bool {
        self.step.load(Ordering::Acquire) == Step::Reading as u8
    }

    /// A thread that holds the lock is about to take memory under management. False: events are
    /// stashed, and it has to let go of the lock first.
    pub(crate) fn begin_adopting(&self) -> bool {
        self.change(&[Step::Quiet], Step::Adopting)
    }

    pub(crate) fn end_adopting(&self) {
        self.change(&[Step::Adopting], Step::Quiet);
    }

    pub(crate) fn has_tables(&self) -> bool {
        self.step.load(Ordering::Acquire) != Step::Inconsistent as u8
    }

    /// This thread holds the lock and the heap until [`Interlock::end_fork`].
    pub(crate) fn begin_fork(&self, thread: usize) {
        self.forking.store(thread, Ordering::Release);
    }

    /// Whether this thread, or the one that it is the copy of, kept the lock across the fork.
    pub(crate) fn end_fork(&self, thread: usize) -> bool {
        self.forking.compare_exchange(thread, 0, Ordering::AcqRel, Ordering::Relaxed).is_ok()
    }

    /// In a copy of the process: whether a thread of the parent was in the midst of a fork. None
    /// is here.
    pub(crate) fn forget_fork(&self) -> bool {
        self.forking.swap(0, Ordering::AcqRel) != 0
    }

    /// In a copy of the process whose parent changed nothing when it was made. False: the parent's
    /// own tables were inconsistent.
    pub(crate) fn begin_anew(&self) -> bool {
        self.change(&[Step::Quiet, Step::Reading, Step::Stashed, Step::Adopting], Step::Quiet)
    }

    /// In a copy of the process that was made in the midst of a change.
    pub(crate) fn lose_tables(&self) {
        self.step.store(Step::Inconsistent as u8, Ordering::Release);
    }
}

#[cfg(test)]
mod tests;
