//! The lowest floor: the shared state behind its lock, the statics, memory and logging.
//!
//! Everything above imports from here; nothing here imports from above.

pub(crate) mod bell;
pub(crate) mod denied;
pub(crate) mod globals;
pub(crate) mod heap;
pub(crate) mod kept;
pub(crate) mod ksm;
pub(crate) mod late;
pub(crate) mod lineage;
pub(crate) mod lock;
pub(crate) mod log;
pub(crate) mod own_files;
pub(crate) mod poll;
pub(crate) mod sabotage;
pub(crate) mod sharers;
pub(crate) mod state;
pub(crate) mod watch;

/// CPU time that the calling thread has used, in nanoseconds. The agent's other thread uses next to
/// none, so reports give this as the agent's.
pub(crate) fn cpu_ns() -> u64 {
    kmem::cpu::thread_time().as_nanos() as u64
}
