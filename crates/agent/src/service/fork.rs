//! Fork handlers: the lock is held across a fork, so that the child gets consistent tables.
//!
//! A child has the parent's mappings (except where `MADV_DONTFORK` holds), merged pages among them,
//! and none of its threads. It keeps the tables for the guards, closes what it inherited, and takes
//! no memory of its own under management. A fork that copies mappings of frames is counted in the
//! control page before the child exists. One made by a raw `clone` is counted when its event is
//! read, a moment after the child may begin to run.

#![allow(unsafe_code)] // Registers handlers with the C library.

use std::sync::atomic::Ordering;

use crate::runtime::globals::{FORKING, HEAP, Phase, STATE, set_phase, take_eventfds};

/// Registers the handlers, once, before the first region. False if there is no memory.
pub(super) fn watch_forks() -> bool {
    // SAFETY: the handlers are functions of this library, which is never unloaded. They take no
    // argument, as the C library expects.
    unsafe { libc::pthread_atfork(Some(prepare), Some(parent), Some(child)) == 0 }
}

extern "C" fn prepare() {
    let mut state = STATE.lock();
    if state.regions.is_inherited() {
        state.uplink.control.count_fork();
    }
    FORKING.store(true, Ordering::Release);
    HEAP.hold();
    state.keep_across_fork();
}

extern "C" fn parent() {
    HEAP.release();
    FORKING.store(false, Ordering::Release);
    // SAFETY: `prepare` kept the lock on this thread, just before the fork.
    drop(unsafe { STATE.after_fork() });
}

extern "C" fn child() {
    HEAP.release();
    FORKING.store(false, Ordering::Release);
    set_phase(Phase::Ended);
    STATE.forget_waiting();
    // SAFETY: `prepare` kept the lock on the thread that this one is the copy of.
    let mut state = unsafe { STATE.after_fork() };
    let tracking = state.orphan();
    for number in take_eventfds().chain(tracking) {
        // SAFETY: this process's copies of the descriptors belong to the agent's threads, which do
        // not exist here; nothing else uses the numbers.
        unsafe { libc::close(number) };
    }
}
