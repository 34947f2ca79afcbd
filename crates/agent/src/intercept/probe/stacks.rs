//! Memory that is a thread's stack. The kernel clears the thread's number there at its end, and
//! cannot while the page is in a window: a thread that joins it would never return.

#![allow(unsafe_code)] // pthread_self(3).

use std::fs;

use kmem::range::Range;

/// Whether a thread of this process is known to have its stack in the range. The kernel does not
/// tell the stacks of other threads that are on a CPU.
pub(super) fn overlaps(range: Range) -> bool {
    let is_inside = |address: usize| (range.start..range.end()).contains(&address);
    // SAFETY: takes nothing. The C library keeps what it points to at the end of the stack.
    if is_inside(unsafe { libc::pthread_self() } as usize) {
        return true;
    }
    let Ok(threads) = fs::read_dir("/proc/self/task") else { return false };
    threads.flatten().any(|thread| {
        let call = fs::read_to_string(thread.path().join("syscall")).unwrap_or_default();
        stack_pointer(&call).is_some_and(is_inside)
    })
}

/// The stack pointer in `/proc/PID/syscall`: the last word but one. A thread that runs has none.
fn stack_pointer(call: &str) -> Option<usize> {
    usize::from_str_radix(call.split_ascii_whitespace().rev().nth(1)?.strip_prefix("0x")?, 16).ok()
}
