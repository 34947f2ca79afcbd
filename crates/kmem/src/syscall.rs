//! System calls by number, with every argument as wide as a register.
//!
//! `syscall(2)` is variadic: an `int` passed to it may leave the upper half of its register
//! undefined, which the kernel reads where it expects a `long`. Here arguments are `usize` by type.

#![allow(unsafe_code)] // What this module is for.

use rustix::io::Errno;

/// Makes system call `number`. The value is what it returned; the error is from `errno`.
///
/// # Safety
///
/// As the call's manual page says; pointers among the arguments are exposed (`expose_provenance`).
pub(crate) unsafe fn syscall<const N: usize>(number: libc::c_long, args: [usize; N]) -> Result<usize, Errno> {
    const { assert!(N <= 6) };
    let mut all = [0; 6];
    all[..N].copy_from_slice(&args);
    let [a, b, c, d, e, f] = all;
    // SAFETY: as promised by the caller; further arguments are ignored by a call that takes fewer.
    let value = unsafe { libc::syscall(number, a, b, c, d, e, f) };
    if value == -1 {
        // SAFETY: the function returns the address of this thread's errno, valid as long as the thread
        // runs.
        return Err(Errno::from_raw_os_error(unsafe { *libc::__errno_location() }));
    }
    Ok(value as usize)
}
