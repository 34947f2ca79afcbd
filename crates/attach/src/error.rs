//! Why a process is not attached.

use std::io;
use std::path::PathBuf;

/// Why a process is not attached. It runs on as before.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum AttachError {
    /// There is none of this number.
    #[error("there is no process {0}; `pgrep -a qemu` lists those of QEMU")]
    NoProcess(i32),
    /// A process has one number, each of its threads another.
    #[error("{tid} is a thread of process {pid}; attach the process")]
    Thread {
        /// The number given.
        tid: i32,
        /// Its process.
        pid: i32,
    },
    /// It has no program.
    #[error("process {0} is a thread of the kernel, or has ended")]
    NoProgram(i32),
    /// Other threads could not give back the locks that the loader needs.
    #[error("process {0} is stopped; let it go on first (kill -CONT {0})")]
    Stopped(i32),
    /// Only one process may trace another.
    #[error("process {pid} is traced by process {tracer} ({name}); end that first")]
    Traced {
        /// The process.
        pid: i32,
        /// What traces it.
        tracer: i32,
        /// The tracer's name.
        name: String,
    },
    /// The kernel, or a security module, does not let this account trace it.
    #[error("not permitted to trace process {pid}: {remedy}")]
    NoPermission {
        /// The process.
        pid: i32,
        /// What permits it.
        remedy: String,
    },
    /// Its instructions are not those of this program.
    #[error("process {0} is a program for another architecture than this one; start it with `pageone run`")]
    Architecture(i32),
    /// Registers are saved and restored for x86-64 only.
    #[error("attaching is not there for this machine's architecture yet; start the program with `pageone run`")]
    NotHere,
    /// It has no loader.
    #[error(
        "process {0} is statically linked: it loads no libraries, so the agent cannot be in it; use a build \
             that is linked dynamically against the GNU C library"
    )]
    Static(i32),
    /// The agent is linked against the GNU C library.
    #[error(
        "process {0} does not use the GNU C library, which the agent needs; use a build of the program for \
             it"
    )]
    OtherLibrary(i32),
    /// Its kernel-kept return addresses would not fit a call from outside.
    #[error("process {0} has a shadow stack, which forbids calls from outside; start it with `pageone run`")]
    ShadowStack(i32),
    /// Its mount namespace or root directory has no such file.
    #[error(
        "process {pid} does not see {path}: it has a root directory of its own; {what} must lie there under this name"
    )]
    NotSeen {
        /// The process.
        pid: i32,
        /// The file.
        path: PathBuf,
        /// What it is.
        what: &'static str,
    },
    /// A path that the process's C library cannot be told.
    #[error("{0} cannot be passed to another process: give a shorter path without odd bytes")]
    Path(PathBuf),
    /// Its first thread was never seen to wait in ppoll(2).
    #[error(
        "process {pid} was not seen to wait for events in {seconds} s: its first thread must come to ppoll(2), as QEMU's \
         main loop does. Nothing was changed; try again, or give a longer --timeout"
    )]
    NoSafePoint {
        /// The process.
        pid: i32,
        /// How long it was watched.
        seconds: u64,
    },
    /// A call did not return in time. It goes on, and ends by itself.
    #[error(
        "{what} in process {pid} did not return in {seconds} s: it waits for a lock of the program, and ends by itself. \
         Try again later"
    )]
    Waits {
        /// The process.
        pid: i32,
        /// Which call.
        what: &'static str,
        /// How long it was waited for.
        seconds: u64,
    },
    /// dlopen(3) has failed.
    #[error("process {pid} could not load the agent: {reason}. A security profile must let it map {library} (mr)")]
    Load {
        /// The process.
        pid: i32,
        /// The loader's words.
        reason: String,
        /// The file.
        library: PathBuf,
    },
    /// The library in the process is older than attaching.
    #[error("process {0} has an older agent, which cannot be attached; start the program again")]
    OldAgent(i32),
    /// The agent in the process refuses.
    #[error("process {pid} is not attached: {reason}")]
    Refused {
        /// The process.
        pid: i32,
        /// The agent's words.
        reason: String,
    },
    /// The same, and it would not if the guest stood still ([`Request::stands`](crate::Request)).
    #[error("process {pid} is not attached: {reason}")]
    MustStand {
        /// The process.
        pid: i32,
        /// The agent's words.
        reason: String,
    },
    /// What its memory holds is no program that the loader made.
    #[error("the memory of process {pid} is not understood: {what}; start the program with `pageone run` instead")]
    Strange {
        /// The process.
        pid: i32,
        /// What is missing.
        what: &'static str,
    },
    /// It ended meanwhile.
    #[error("process {0} ended meanwhile")]
    Ended(i32),
    /// There is no guard.
    #[error(transparent)]
    Guard(#[from] guard::GuardError),
    /// Another error of the kernel.
    #[error("process {pid}: {what}: {error}")]
    Kernel {
        /// The process.
        pid: i32,
        /// What was done.
        what: &'static str,
        /// The kernel's answer.
        error: io::Error,
    },
}
