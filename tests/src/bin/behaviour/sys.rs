//! System calls on the program's memory, through the C library's symbols, so that the agent sees
//! them.
//!
//! Addresses are numbers. They lie in arenas: memory that nothing but the fuzzer's own calls uses,
//! and only through raw pointers. That is the invariant of every block below.

#![allow(unsafe_code)] // It stands for programs that map and write raw memory.

use std::ffi::c_int;

use crate::arena::PAGE;

/// A result as the C library gives it, or the errno.
pub(crate) type Answer = Result<usize, i32>;

fn answer(result: isize) -> Answer {
    if result == -1 { Err(std::io::Error::last_os_error().raw_os_error().unwrap_or(0)) } else { Ok(result as usize) }
}

/// Calls of which the kernel reads and writes no memory but what the arguments name.
macro_rules! call {
    ($call:expr) => {
        // SAFETY: the arguments are numbers, or ranges of arenas. Arenas are only used by raw
        // pointers, so the call may change, move or discard what they hold.
        answer(unsafe { $call } as isize)
    };
}

pub(crate) fn madvise(start: usize, pages: usize, advice: c_int) -> Answer {
    call!(libc::madvise(start as *mut _, pages * PAGE, advice))
}

/// process_madvise(2) on this process; ranges are addresses and numbers of pages.
pub(crate) fn madvise_process(ranges: &[(usize, usize)], advice: c_int) -> Answer {
    unsafe extern "C" {
        /// Not in the `libc` crate (process_madvise(2), glibc 2.36).
        fn process_madvise(pidfd: c_int, ranges: *const libc::iovec, n: usize, advice: c_int, flags: u32) -> isize;
    }
    /// Not in the `libc` crate yet (include/uapi/linux/pidfd.h, Linux 6.14).
    const PIDFD_SELF: c_int = -10_000;
    let entry = |&(start, pages): &(usize, usize)| libc::iovec { iov_base: start as *mut _, iov_len: pages * PAGE };
    let ranges: Vec<libc::iovec> = ranges.iter().map(entry).collect();
    call!(process_madvise(PIDFD_SELF, ranges.as_ptr(), ranges.len(), advice, 0))
}

pub(crate) fn munmap(start: usize, pages: usize) -> Answer {
    call!(libc::munmap(start as *mut _, pages * PAGE))
}

/// Anonymous private memory; `flags` are added.
pub(crate) fn map(start: usize, pages: usize, flags: c_int) -> Answer {
    let (prot, flags) = (libc::PROT_READ | libc::PROT_WRITE, libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | flags);
    call!(libc::mmap(start as *mut _, pages * PAGE, prot, flags, -1, 0))
}

pub(crate) fn mremap(old: usize, pages: usize, new_pages: usize, flags: c_int, new: usize) -> Answer {
    call!(libc::mremap(old as *mut _, pages * PAGE, new_pages * PAGE, flags, new as *mut libc::c_void))
}

pub(crate) fn mprotect(start: usize, pages: usize, prot: c_int) -> Answer {
    call!(libc::mprotect(start as *mut _, pages * PAGE, prot))
}

/// Fails where the page is not mapped.
pub(crate) fn mincore(start: usize) -> Answer {
    let mut resident = 0u8;
    call!(libc::mincore(start as *mut _, PAGE, &mut resident))
}

pub(crate) fn mlock(start: usize, pages: usize) -> Answer {
    call!(libc::mlock(start as *const _, pages * PAGE))
}

pub(crate) fn munlock(start: usize, pages: usize) -> Answer {
    call!(libc::munlock(start as *const _, pages * PAGE))
}

/// `process_vm_readv(2)` into a buffer, or with `write` `process_vm_writev(2)` from it.
pub(crate) fn process_vm(pid: c_int, address: usize, buffer: &mut [u8], write: bool) -> Answer {
    let local = libc::iovec { iov_base: buffer.as_mut_ptr().cast(), iov_len: buffer.len() };
    let remote = libc::iovec { iov_base: address as *mut _, iov_len: buffer.len() };
    if write {
        call!(libc::process_vm_writev(pid, &local, 1, &remote, 1, 0))
    } else {
        call!(libc::process_vm_readv(pid, &local, 1, &remote, 1, 0))
    }
}

pub(crate) fn pread(fd: c_int, address: usize, len: usize, offset: usize) -> Answer {
    call!(libc::pread(fd, address as *mut _, len, offset as i64))
}

pub(crate) fn pwrite(fd: c_int, address: usize, len: usize, offset: usize) -> Answer {
    call!(libc::pwrite(fd, address as *const _, len, offset as i64))
}

pub(crate) fn read(fd: c_int, buffer: &mut [u8]) -> Answer {
    call!(libc::read(fd, buffer.as_mut_ptr().cast(), buffer.len()))
}

pub(crate) fn vmsplice(fd: c_int, address: usize, len: usize) -> Answer {
    let part = libc::iovec { iov_base: address as *mut _, iov_len: len };
    call!(libc::vmsplice(fd, &part, 1, 0))
}

/// Gives references in one pipe to another.
pub(crate) fn splice(from: c_int, to: c_int, len: usize) -> Answer {
    call!(libc::splice(from, std::ptr::null_mut(), to, std::ptr::null_mut(), len, 0))
}

/// A pipe with room for at least `pages` pages: its reading and its writing end.
pub(crate) fn pipe(pages: usize) -> Result<(c_int, c_int), i32> {
    let mut ends = [0; 2];
    call!(libc::pipe2(ends.as_mut_ptr(), libc::O_CLOEXEC))?;
    call!(libc::fcntl(ends[1], libc::F_SETPIPE_SZ, (pages.next_power_of_two() * PAGE) as c_int))?;
    Ok((ends[0], ends[1]))
}

pub(crate) fn close(fd: c_int) {
    let _ = call!(libc::close(fd));
}

/// Makes a child in one of several ways; 0 in the child.
pub(crate) fn fork(kind: &str) -> Answer {
    unsafe extern "C" {
        fn _Fork() -> libc::pid_t;
    }
    match kind {
        "fork-bare" => call!(_Fork()),
        "fork-raw" => call!(libc::syscall(libc::SYS_clone, libc::SIGCHLD, 0, 0, 0, 0)),
        _ => call!(libc::fork()),
    }
}

/// Starts a process that shares this one's memory (`CLONE_VM`, no thread) on a stack of its own.
pub(crate) fn clone_vm(stack: usize, pages: usize, entry: extern "C" fn(*mut libc::c_void) -> c_int) -> Answer {
    let top = (stack + pages * PAGE) as *mut libc::c_void;
    call!(libc::clone(entry, top, libc::CLONE_VM | libc::SIGCHLD, std::ptr::null_mut()))
}

/// The exit code of a child, or minus the signal that ended it.
pub(crate) fn wait(pid: usize) -> Result<i32, i32> {
    let mut status = 0;
    loop {
        match call!(libc::waitpid(pid as c_int, &mut status, 0)) {
            Err(libc::EINTR) => {}
            Err(errno) => return Err(errno),
            Ok(_) if libc::WIFEXITED(status) => return Ok(libc::WEXITSTATUS(status)),
            Ok(_) => return Ok(-libc::WTERMSIG(status)),
        }
    }
}

/// Ends the process without destructors or exit handlers.
pub(crate) fn exit_now(code: c_int) -> ! {
    // SAFETY: ends the process.
    unsafe { libc::_exit(code) }
}

/// `vfork(2)` whose child ends at once.
pub(crate) fn vfork() -> Answer {
    // SAFETY: the child runs on this stack while the caller waits, and does nothing but end.
    #[allow(deprecated, reason = "programs do it, so the fuzzer does")]
    let result = unsafe { libc::vfork() };
    if result == 0 {
        exit_now(0);
    }
    answer(result as isize)
}

pub(crate) fn sleep_ms(ms: u64) {
    let time = libc::timespec { tv_sec: (ms / 1000) as i64, tv_nsec: (ms % 1000 * 1_000_000) as i64 };
    let _ = call!(libc::nanosleep(&time, std::ptr::null_mut()));
}

pub(crate) fn getpid() -> c_int {
    std::process::id() as c_int
}
