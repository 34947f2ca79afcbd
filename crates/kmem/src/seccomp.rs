//! A filter by which the kernel gives a fixed answer to a system call, in place of doing it.
//!
//! Source: seccomp(2); the kernel's Documentation/userspace-api/seccomp_filter.rst.

#![allow(unsafe_code)] // The filter is handed over by its address.

use std::io;

/// From now on the kernel answers a system call of this thread, and of the threads and programs
/// that it starts, with an error (0: the call returns 0), and does not do it. `argument`: only
/// calls that have this number, in the lower half, as their argument of this index. Nothing takes
/// this back. Calls of 32-bit programs have other numbers.
///
/// # Errors
/// `EACCES`: neither `CAP_SYS_ADMIN` nor `PR_SET_NO_NEW_PRIVS`; `EINVAL`: no seccomp.
pub fn answer(call: libc::c_long, argument: Option<(usize, u32)>, errno: i32) -> io::Result<()> {
    let step = |code: u32, k: u32, otherwise: u8| libc::sock_filter { code: code as u16, jt: 0, jf: otherwise, k };
    let load = |offset: usize| step(libc::BPF_LD | libc::BPF_W | libc::BPF_ABS, offset as u32, 0);
    let is = |value: u32, otherwise: u8| step(libc::BPF_JMP | libc::BPF_JEQ | libc::BPF_K, value, otherwise);
    let end = |with: u32| step(libc::BPF_RET | libc::BPF_K, with, 0);
    let at = |index: usize| std::mem::offset_of!(libc::seccomp_data, args) + index * size_of::<u64>();
    let and_argument = argument.map(|(index, value)| [load(at(index)), is(value, 1)]);
    let mut program = vec![load(0), is(call as u32, if argument.is_some() { 3 } else { 1 })];
    program.extend(and_argument.into_iter().flatten());
    program.extend([end(libc::SECCOMP_RET_ERRNO | errno as u32), end(libc::SECCOMP_RET_ALLOW)]);
    let filter = libc::sock_fprog { len: program.len() as u16, filter: program.as_mut_ptr() };
    // SAFETY: the call reads the filter and its program, which outlive it.
    let done = unsafe { libc::syscall(libc::SYS_seccomp, libc::SECCOMP_SET_MODE_FILTER, 0_usize, &raw const filter) };
    if done == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}
