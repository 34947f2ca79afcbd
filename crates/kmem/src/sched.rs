//! `sched_setscheduler(2)`: threads that run before all others for a moment.
//!
//! A nice value counts only among the threads of one control group (or session,
//! `CONFIG_SCHED_AUTOGROUP`). A real-time policy counts among all threads of the system. It needs
//! `CAP_SYS_NICE` or `RLIMIT_RTPRIO`.

#![allow(unsafe_code)] // The system call takes a pointer.

use rustix::io::Errno;

use crate::raw::syscall;

pub mod slice;

/// The policy and flag of threads that go first: those that they start meanwhile do not.
pub const FIRST: i32 = libc::SCHED_FIFO | libc::SCHED_RESET_ON_FORK;

/// The scheduling policy (`SCHED_*`) of a thread, with its flag; 0 names the calling thread.
///
/// # Errors
///
/// `ESRCH`: no such thread.
pub fn policy(thread: i32) -> Result<i32, Errno> {
    // SAFETY: the call takes a number, and changes nothing.
    Ok(unsafe { syscall(libc::SYS_sched_getscheduler, [thread as usize]) }? as i32)
}

/// Whether a policy shares time by weight: not real-time, and without parameters of its own.
pub fn is_usual(policy: i32) -> bool {
    matches!(policy & !libc::SCHED_RESET_ON_FORK, libc::SCHED_OTHER | libc::SCHED_BATCH | libc::SCHED_IDLE)
}

/// Makes a thread run before all threads of a usual policy ([`FIRST`], the lowest priority).
///
/// # Errors
///
/// `EPERM`: no privilege; `ESRCH`: no such thread.
pub fn go_first(thread: i32) -> Result<(), Errno> {
    set(thread, FIRST, 1)
}

/// Gives a thread back a usual policy; its nice value stays as it was. The flag goes, unless the
/// policy has it, or the caller lacks `CAP_SYS_NICE`.
///
/// # Errors
///
/// `EPERM`: no privilege; `ESRCH`: no such thread.
pub fn go_back(thread: i32, policy: i32) -> Result<(), Errno> {
    set(thread, policy, 0).or_else(|_| set(thread, policy | libc::SCHED_RESET_ON_FORK, 0))
}

fn set(thread: i32, policy: i32, priority: i32) -> Result<(), Errno> {
    let param = libc::sched_param { sched_priority: priority };
    let args = [thread as usize, policy as usize, (&raw const param).expose_provenance()];
    // SAFETY: the kernel reads one `sched_param`, a local that outlives the call.
    unsafe { syscall(libc::SYS_sched_setscheduler, args) }.map(drop)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_thread_goes_first_and_back() {
        let thread = || {
            let before = policy(0).unwrap();
            assert!(is_usual(before) && !is_usual(FIRST));
            if go_first(0).is_err() {
                return println!("SKIPPED: not permitted");
            }
            assert_eq!(policy(0), Ok(FIRST));
            let born = std::thread::spawn(|| policy(0).unwrap()).join().unwrap();
            assert!(is_usual(born), "a thread that is born meanwhile is none of the first");
            go_back(0, before).unwrap();
            assert_eq!(policy(0), Ok(before));
        };
        std::thread::spawn(thread).join().unwrap();
        assert_eq!(policy(i32::MAX), Err(Errno::SRCH));
    }
}
