//! Processes that share this one's memory and are none of its threads (`clone(2)` with `CLONE_VM`).
//!
//! Such a process outlives a client that is killed in the middle of a window: pages that were taken
//! away never come back. A thread that touches one waits for ever, for the other process has its
//! own descriptors of the userfaultfd; without them it would read zeros. So no memory merges while
//! there is such a process.

use std::sync::atomic::{AtomicBool, AtomicI32, AtomicUsize, Ordering};

use kmem::raw::kcmp_memory;
use rustix::io::Errno;
use rustix::process::{Pid, WaitId, WaitIdOptions, getpid, test_kill_process, waitid};

/// Processes that are known at a time. With more, there is one for ever.
const COUNT: usize = 16;

pub(crate) static SHARERS: Sharers = Sharers::new();

pub(crate) struct Sharers {
    /// Threads that are about to make one.
    making: AtomicUsize,
    /// Their numbers; 0: none.
    known: [AtomicI32; COUNT],
    too_many: AtomicBool,
}

impl Sharers {
    pub(crate) const fn new() -> Self {
        Self {
            making: AtomicUsize::new(0),
            known: [const { AtomicI32::new(0) }; COUNT],
            too_many: AtomicBool::new(false),
        }
    }

    /// Whether there is one, or may be.
    pub(crate) fn any(&self) -> bool {
        let lives = |slot: &AtomicI32| match slot.load(Ordering::SeqCst) {
            0 => false,
            number if shares(number) => true,
            number => {
                // Another thread may have put a new one there.
                let _ = slot.compare_exchange(number, 0, Ordering::SeqCst, Ordering::SeqCst);
                false
            }
        };
        self.making.load(Ordering::SeqCst) > 0 || self.too_many.load(Ordering::SeqCst) || self.known.iter().any(lives)
    }

    /// A thread is about to make one. [`Sharers::made`] follows.
    pub(crate) fn making(&self) {
        self.making.fetch_add(1, Ordering::SeqCst);
    }

    /// It has this number; negative: there is none.
    pub(crate) fn made(&self, number: i32) {
        let is_noted = number <= 0
            || self
                .known
                .iter()
                .any(|slot| slot.compare_exchange(0, number, Ordering::SeqCst, Ordering::SeqCst).is_ok());
        if !is_noted {
            self.too_many.store(true, Ordering::SeqCst);
        }
        self.making.fetch_sub(1, Ordering::SeqCst);
    }
}

/// Whether a process has this one's memory: not when it runs another program, or has ended.
fn shares(number: i32) -> bool {
    match kcmp_memory(getpid().as_raw_pid(), number) {
        Ok(order) => order == 0,
        Err(Errno::SRCH) => false,
        // There is no such call here, or it is not permitted.
        Err(_) => is_alive(number),
    }
}

/// Whether a process runs. The program's own wait still finds one that has ended.
fn is_alive(number: i32) -> bool {
    let Some(pid) = Pid::from_raw(number) else { return false };
    let options = WaitIdOptions::EXITED | WaitIdOptions::NOHANG | WaitIdOptions::NOWAIT;
    match waitid(WaitId::Pid(pid), options) {
        Ok(ended) => ended.is_none(),
        // Somebody has waited for it, or it is no child of this process.
        Err(_) => test_kill_process(pid) != Err(Errno::SRCH),
    }
}

#[cfg(test)]
mod tests;
