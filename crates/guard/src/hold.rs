//! Ctrl-Z waits until nothing stands: a command that is stopped lets nothing go on.

#![allow(unsafe_code)] // Handlers of signals.

use std::ffi::c_int;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, PoisonError};

/// SIGTSTP came meanwhile.
static ASKED: AtomicBool = AtomicBool::new(false);
/// There is a hold.
static HOLDS_ON: AtomicBool = AtomicBool::new(false);
/// Number of holds, and the signals whose usual action they have replaced.
static HOLDS: Mutex<(usize, [bool; 2])> = Mutex::new((0, [false; 2]));

extern "C" fn note(_: c_int) {
    ASKED.store(true, Ordering::SeqCst);
    // The last hold may have ended on another thread since the kernel chose this handler.
    if !HOLDS_ON.load(Ordering::SeqCst) {
        stop_if_asked();
    }
}

/// Of a handler and the end of the last hold at least one sees what the other has stored.
fn stop_if_asked() {
    if ASKED.swap(false, Ordering::SeqCst) {
        // SAFETY: raise(3) may be called in a handler. The usual action is to stop this process.
        unsafe { libc::raise(libc::SIGTSTP) };
    }
}

/// Until this is dropped SIGTSTP waits, and writing to a terminal of others does not stop.
pub(crate) struct Hold;

impl Hold {
    pub(crate) fn begin() -> Self {
        let mut holds = HOLDS.lock().unwrap_or_else(PoisonError::into_inner);
        if holds.0 == 0 {
            HOLDS_ON.store(true, Ordering::SeqCst);
            let note = note as extern "C" fn(c_int) as libc::sighandler_t;
            // A handler of SIGTTOU would be called again and again by the write that it interrupts.
            holds.1 = [replace(libc::SIGTSTP, note), replace(libc::SIGTTOU, libc::SIG_IGN)];
        }
        holds.0 += 1;
        Self
    }
}

impl Drop for Hold {
    fn drop(&mut self) {
        let mut holds = HOLDS.lock().unwrap_or_else(PoisonError::into_inner);
        holds.0 -= 1;
        if holds.0 > 0 {
            return;
        }
        HOLDS_ON.store(false, Ordering::SeqCst);
        for (signal, _) in [libc::SIGTSTP, libc::SIGTTOU].into_iter().zip(holds.1).filter(|(_, ours)| *ours) {
            set(signal, libc::SIG_DFL);
        }
        drop(holds);
        stop_if_asked();
    }
}

/// Sets an action where the usual one is set. Gives whether it did.
fn replace(signal: c_int, action: libc::sighandler_t) -> bool {
    // SAFETY: all fields are numbers, for which zero is a value.
    let mut before: libc::sigaction = unsafe { std::mem::zeroed() };
    // SAFETY: the kernel writes the action to a local variable.
    unsafe { libc::sigaction(signal, std::ptr::null(), &mut before) };
    let is_usual = before.sa_sigaction == libc::SIG_DFL;
    if is_usual {
        set(signal, action);
    }
    is_usual
}

fn set(signal: c_int, action: libc::sighandler_t) {
    // SAFETY: all fields are numbers, for which zero is a value: no mask.
    let mut new: libc::sigaction = unsafe { std::mem::zeroed() };
    (new.sa_sigaction, new.sa_flags) = (action, libc::SA_RESTART);
    // SAFETY: the action is SIG_DFL, SIG_IGN, or a function that stores an atomic, which a handler
    // may do at any moment.
    unsafe { libc::sigaction(signal, &new, std::ptr::null_mut()) };
}
