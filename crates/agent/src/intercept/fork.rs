//! Fork: the lock is held across it, so that the child gets whole tables.
//!
//! A child has the parent's mappings (but where `MADV_DONTFORK` holds), merged pages among them,
//! and none of its threads. It keeps the tables for the guards, closes what it inherited, and takes
//! no memory of its own under management. A fork that copies mappings of frames is counted in the
//! control page before the child exists; one made by a bare `clone` is counted when its event is
//! read, which is when the child may begin to run: somewhat too late.

#![allow(unsafe_code)] // Registers handlers with the C library.

use crate::HEAP;
use crate::runtime::state::{ENDED, FORKING, PHASE, STATE, State, take_eventfds};
use std::sync::atomic::Ordering;

/// Registers the handlers; once, before the first region.
pub fn watch_forks() -> bool {
    // SAFETY: the handlers are functions of this library, which is never unloaded.
    unsafe { libc::pthread_atfork(Some(prepare), Some(parent), Some(child)) == 0 }
}

extern "C" fn prepare() {
    let mut state = STATE.lock();
    if state.is_inherited() {
        state.count_fork();
    }
    FORKING.store(true, Ordering::Release);
    HEAP.hold();
    state.keep_across_fork();
}

extern "C" fn parent() {
    HEAP.release();
    FORKING.store(false, Ordering::Release);
    // SAFETY: kept by `prepare`.
    drop(unsafe { STATE.after_fork() });
}

extern "C" fn child() {
    HEAP.release();
    FORKING.store(false, Ordering::Release);
    PHASE.store(ENDED, Ordering::Release);
    STATE.forget_waiting();
    // SAFETY: kept by `prepare`, on the thread that this one is the copy of.
    unsafe { STATE.after_fork() }.orphan();
}

impl State {
    /// Closes what a child inherited.
    fn orphan(&mut self) {
        // The control page stays: this process's own forks are counted there too.
        self.conn = None;
        self.outbox.close();
        // The parent's guest, and the parent's marks.
        self.recycler = None;
        self.waiting = None;
        let tracking = self.tracking.take().map(|tracking| {
            let number = crate::runtime::state::number(&*tracking);
            std::mem::forget(tracking);
            number
        });
        for number in take_eventfds().chain(tracking) {
            // SAFETY: the threads that own it do not exist in this process.
            unsafe { libc::close(number) };
        }
        for segment in self.segments.drain(..) {
            // The mapping itself was not inherited, and something else may be there by now.
            std::mem::forget(segment.map);
        }
        self.untracked.clear();
    }
}
