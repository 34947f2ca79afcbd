//! `process_madvise(2)` of a program on itself. From Linux 6.13 it takes all advice that madvise(2)
//! takes, and allocators discard memory with it.

#![allow(unsafe_code)] // Defines a symbol of the C library.
#![allow(clippy::missing_safety_doc)] // The manual page of the same name.

use std::ffi::{c_int, c_uint};
use std::slice;

use kmem::raw;
use libc::iovec;

use crate::intercept::interpose;
use crate::runtime::watch::WATCH;

/// `PIDFD_SELF_THREAD` and `PIDFD_SELF_THREAD_GROUP` (include/uapi/linux/pidfd.h).
const SELF: [c_int; 2] = [-10_000, -10_001];

/// process_madvise(2). Advice on managed memory of this process is given range by range.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn process_madvise(
    pidfd: c_int,
    ranges: *const iovec,
    count: usize,
    advice: c_int,
    flags: c_uint,
) -> isize {
    let before = raw::errno();
    // SAFETY: the program makes this very call, so it has met the system call's contract.
    let call = |count| unsafe { raw::process_madvise(pidfd, ranges.expose_provenance(), count, advice, flags) };
    let list: &[iovec] = match ranges.is_null() || count > libc::UIO_MAXIOV as usize {
        true => &[],
        // SAFETY: by the call's contract `count` entries can be read.
        false => unsafe { slice::from_raw_parts(ranges, count) },
    };
    let is_watched = list.iter().any(|range| WATCH.overlaps(range.iov_base as usize, range.iov_len));
    if !is_watched || !is_self(pidfd) {
        return interpose::answer(before, call(count));
    }
    // On no ranges the kernel only says whether it takes this advice.
    if let Err(error) = call(0) {
        return interpose::answer(before, Err(error));
    }
    let mut done = 0;
    for range in list {
        // SAFETY: the program makes this very call, so it has met the contract for each range.
        if unsafe { interpose::madvise(range.iov_base, range.iov_len, advice) } != 0 {
            return if done > 0 { interpose::answer(before, Ok(done)) } else { -1 };
        }
        done += range.iov_len;
    }
    interpose::answer(before, Ok(done))
}

/// Whether a pidfd is this process's.
fn is_self(pidfd: c_int) -> bool {
    let own = || {
        let text = std::fs::read_to_string(format!("/proc/self/fdinfo/{pidfd}")).ok()?;
        let pid = text.lines().find_map(|line| line.strip_prefix("Pid:"))?.trim().parse::<u32>().ok()?;
        Some(pid == std::process::id())
    };
    SELF.contains(&pidfd) || own().unwrap_or(false)
}
