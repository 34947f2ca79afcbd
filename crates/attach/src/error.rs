//! Why a process is not attached.

use std::io;
use std::path::PathBuf;

/// Why a process is not attached. It runs on as before.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
#[allow(missing_docs, reason = "the sentences say what the fields are")]
pub enum AttachError {
    #[error("there is no process {0}; `pgrep -a qemu` lists those of QEMU")]
    NoProcess(i32),
    /// A process has one number, each of its threads another.
    #[error("{tid} is a thread of process {pid}; attach the process")]
    Thread { tid: i32, pid: i32 },
    #[error("process {0} is a thread of the kernel, or has ended")]
    NoProgram(i32),
    /// Other threads could not give back the locks that the loader needs.
    #[error("process {0} is stopped; let it go on first (kill -CONT {0})")]
    Stopped(i32),
    /// Only one process may trace another.
    #[error("process {pid} is traced by process {tracer} ({name}); end that first")]
    Traced { pid: i32, tracer: i32, name: String },
    /// The kernel, or a security module, does not let this account trace it.
    #[error("not permitted to trace process {pid}: {remedy}")]
    NoPermission { pid: i32, remedy: String },
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
    NotSeen { pid: i32, path: PathBuf, what: &'static str },
    #[error("{0} cannot be passed to another process: give a shorter path without odd bytes")]
    Path(PathBuf),
    /// Its first thread was never seen to wait in ppoll(2).
    #[error(
        "process {pid} was not seen to wait for events in {seconds} s: its first thread must come to ppoll(2), as QEMU's \
         main loop does. Nothing was changed; try again, or give a longer --timeout"
    )]
    NoSafePoint { pid: i32, seconds: u64 },
    /// A call did not return in time. It goes on, and ends by itself.
    #[error(
        "{what} in process {pid} did not return in {seconds} s: it waits for a lock of the program, and ends by itself. \
         Try again later"
    )]
    Waits { pid: i32, what: &'static str, seconds: u64 },
    #[error("process {pid} could not load the agent: {reason}. A security profile must let it map {library} (mr)")]
    Load { pid: i32, reason: String, library: PathBuf },
    #[error("process {0} has an older agent, which cannot be attached; start the program again")]
    OldAgent(i32),
    #[error("process {pid} is not attached: {reason}")]
    Refused { pid: i32, reason: String },
    /// The same, and it would not if the guest stood still ([`Request::stands`](crate::Request)).
    #[error("process {pid} is not attached: {reason}")]
    MustStand { pid: i32, reason: String },
    /// What its memory holds is no program that the loader made.
    #[error("the memory of process {pid} is not understood: {what}; start the program with `pageone run` instead")]
    Strange { pid: i32, what: &'static str },
    #[error("process {0} ended meanwhile")]
    Ended(i32),
    #[error(transparent)]
    Guard(#[from] guard::GuardError),
    #[error("process {pid}: {what}: {error}")]
    Kernel { pid: i32, what: &'static str, error: io::Error },
}
