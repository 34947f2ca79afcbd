//! An asymmetric memory barrier: all but free for those who insert, a system call for the one who
//! takes.
//!
//! A thread writes to a page and then inserts its frame. If the bit is set already, inserting is a
//! load, and a load may be done before the write to the page is visible to others. A harvester
//! could then clear the bit, read the page, miss the write, and nobody would ever hear of it. An
//! atomic read-modify-write for every insertion would prevent that, at three times the price.
//! Instead the harvester asks the kernel for a full barrier on every CPU that runs a thread of this
//! process (`membarrier(2)`, private expedited), after it has cleared bits and before its caller
//! looks at pages: an insertion that saw the bit before it was cleared has its writes made visible
//! by then.
//!
//! Where the system call is missing (`CONFIG_MEMBARRIER=n`, seccomp), insertions always use the
//! read-modify-write.

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

    /// Asks the kernel, once.
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

    /// The inserter's side. Says whether a load may stand for the read-modify-write. The compiler
    /// keeps earlier writes before it.
    #[inline]
    pub(crate) fn light() -> bool {
        compiler_fence(Ordering::SeqCst);
        ASYMMETRIC.load(Ordering::Relaxed)
    }

    /// The harvester's side.
    pub(crate) fn heavy() {
        compiler_fence(Ordering::SeqCst);
        // A forked child has to register anew.
        if ASYMMETRIC.load(Ordering::Relaxed) && !barrier() && !(register() && barrier()) {
            // A filter came since: from now on without. What other CPUs have under way is visible
            // in nanoseconds.
            ASYMMETRIC.store(false, Ordering::Relaxed);
            std::thread::sleep(std::time::Duration::from_millis(1));
        }
    }
}

/// Loom knows no such barrier. A model chooses whether loads may stand for read-modify-writes;
/// where what was written before an insertion matters, they may not.
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
