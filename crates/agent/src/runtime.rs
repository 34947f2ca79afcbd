//! The lowest floor: the shared state behind its lock, memory and logging.
//!
//! The agent has no object of its own in the program: the C library's symbols, the fork handlers
//! and the heap are entered without an argument. So what they need is a static, which stands beside
//! its type. What may be asked without the lock, or while it is held for ever, stands outside of
//! the [state](state::STATE):
//!
//! ```text
//! watch         whether memory is managed: each call that the program makes asks
//! descriptors   which descriptors are the agent's: each close of the program asks
//! lifecycle     what the agent does, and whether it is to leave
//! interlock     what a thread is in the midst of
//! lineage       whose process this is: a copy may find the lock held for ever
//! sharers       processes that share the memory: one may be made while the agent waits for that
//! waker         wakes the agent's threads
//! ```

pub(crate) mod denied;
pub(crate) mod descriptors;
pub(crate) mod heap;
pub(crate) mod injected;
pub(crate) mod interlock;
pub(crate) mod lifecycle;
pub(crate) mod lineage;
pub(crate) mod lock;
pub(crate) mod log;
pub(crate) mod poll;
pub(crate) mod prctl;
pub(crate) mod proc_files;
pub(crate) mod sabotage;
pub(crate) mod sharers;
pub(crate) mod state;
pub(crate) mod waker;
pub(crate) mod watch;

/// CPU time that the calling thread has used, in nanoseconds. The agent's other thread uses next to
/// none, so reports give this as the agent's.
pub(crate) fn cpu_ns() -> u64 {
    kmem::cpu::thread_time().as_nanos() as u64
}
