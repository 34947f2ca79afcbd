//! An asymmetric memory barrier: almost free for threads that insert, a system call for the thread
//! that takes.
//!
//! A thread writes to a page and then inserts its frame. If the bit is set already, inserting is a
//! load, which may run before the write to the page is visible to others: a harvester could clear
//! the bit, read the page and miss the write. An atomic read-modify-write for every insertion would
//! prevent that, at three times the cost. Instead the harvester asks the kernel for a full barrier
//! on every CPU that runs a thread of this process (`membarrier(2)`, private expedited), after it
//! has cleared bits and before its caller reads pages.
//!
//! Where the system call is missing (`CONFIG_MEMBARRIER=n`, or a seccomp filter), insertions always
//! use the read-modify-write.

#[cfg(not(loom))]
pub(crate) use kernel::{heavy, light, set_up};
#[cfg(loom)]
pub(crate) use model::{choose, heavy, light, set_up};

#[cfg(not(loom))]
mod kernel {
    use std::sync::Once;
    use std::sync::atomic::{AtomicBool, Ordering, compiler_fence};

    use rustix::thread::{MembarrierCommand, membarrier};

    /// Whether insertions may rely on the harvester's side.
    static ASYMMETRIC: AtomicBool = AtomicBool::new(false);

    /// Asks the kernel once whether it has the barrier.
    pub(crate) fn set_up() {
        static ONCE: Once = Once::new();
        ONCE.call_once(|| ASYMMETRIC.store(register() && barrier(), Ordering::Relaxed));
    }

    fn register() -> bool {
        membarrier(MembarrierCommand::RegisterPrivateExpedited).is_ok()
    }

    fn barrier() -> bool {
        membarrier(MembarrierCommand::PrivateExpedited).is_ok()
    }

    /// The inserter's side. Returns whether a load may replace the read-modify-write. The compiler
    /// keeps earlier writes before it.
    #[inline]
    pub(crate) fn light() -> bool {
        compiler_fence(Ordering::SeqCst);
        ASYMMETRIC.load(Ordering::Relaxed)
    }

    /// The harvester's side.
    pub(crate) fn heavy() {
        compiler_fence(Ordering::SeqCst);
        // A forked child has to register again.
        if ASYMMETRIC.load(Ordering::Relaxed) && !barrier() && !(register() && barrier()) {
            // A seccomp filter forbids the call since. From now on insertions use the
            // read-modify-write; the present writes of other CPUs become visible within
            // nanoseconds.
            ASYMMETRIC.store(false, Ordering::Relaxed);
            std::thread::sleep(std::time::Duration::from_millis(1));
        }
    }
}

/// Loom has no such barrier. A model chooses whether loads may replace read-modify-writes; where
/// writes before an insertion matter, they may not.
#[cfg(loom)]
mod model {
    use std::cell::Cell;

    // Loom runs all threads of a model on one thread of the system.
    thread_local!(static ASYMMETRIC: Cell<bool> = const { Cell::new(false) });

    pub(crate) fn choose(asymmetric: bool) {
        ASYMMETRIC.set(asymmetric);
    }

    pub(crate) fn set_up() {}

    pub(crate) fn light() -> bool {
        ASYMMETRIC.get()
    }

    pub(crate) fn heavy() {}
}
