//! A process that nothing ends but its work, and SIGKILL.

#![allow(unsafe_code)] // Signals are ignored, and descriptors closed, by number.

use std::os::unix::process::CommandExt;
use std::process::Command;

/// What a terminal, a service manager (to all of a control group) and a closed pipe send.
const IGNORED: [i32; 8] = [
    libc::SIGTERM,
    libc::SIGINT,
    libc::SIGHUP,
    libc::SIGQUIT,
    libc::SIGTSTP,
    libc::SIGTTIN,
    libc::SIGTTOU,
    libc::SIGPIPE,
];

/// Its process will have a session of its own, and of the caller's descriptors the standard ones
/// alone.
pub fn apart(command: &mut Command) -> &mut Command {
    let leave = || {
        let _ = rustix::process::setsid();
        // SAFETY: the call takes numbers. The descriptors stay until the program is executed.
        let done = unsafe { libc::syscall(libc::SYS_close_range, 3_u32, u32::MAX, libc::CLOSE_RANGE_CLOEXEC) };
        if done == 0 { Ok(()) } else { Err(std::io::Error::last_os_error()) }
    };
    // SAFETY: it makes two system calls, which neither allocate nor lock.
    unsafe { command.pre_exec(leave) }
}

/// Leaves the caller's session, ignores the signals that end or stop programs, and closes all
/// descriptors but the standard ones. To be called first of all: nothing else has descriptors yet.
pub fn stand_alone() {
    for signal in IGNORED {
        // SAFETY: no handler is set, so nothing runs when the signal comes.
        unsafe { libc::signal(signal, libc::SIG_IGN) };
    }
    // Whatever is killed for want of memory, it is not what lets a guest go on. Only root may.
    let _ = std::fs::write("/proc/self/oom_score_adj", "-1000");
    // Fails for the leader of a group, which has a session of its own where it matters.
    let _ = rustix::process::setsid();
    // SAFETY: the call takes numbers. Whoever calls this has opened nothing yet; what is closed was
    // inherited, and nobody in this process knows its number.
    unsafe { libc::syscall(libc::SYS_close_range, 3_u32, u32::MAX, 0_u32) };
}
