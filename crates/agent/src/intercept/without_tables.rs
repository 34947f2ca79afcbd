//! Calls on managed memory in a child whose tables cannot be used.
//!
//! A raw `clone` copies a process at any moment. Where a thread of the parent was changing the
//! tables, the child asks the kernel which mappings are of the store's files. Its memory is
//! registered with no userfaultfd, and no window is open in it.

#![allow(unsafe_code)] // Passes the program's system calls on.

use std::ffi::c_int;

use kmem::range::Range;
use kmem::raw::{self, Answer};
use kmem::{mm, procfs};
use rustix::io::Errno;

use crate::intercept::guard::{ask_whether_discarded, whole_pages};
use crate::runtime::lock::Blocked;

/// How the path of a store's file begins in `/proc/self/maps`.
const STORE: &str = "/memfd:pageone";

/// `madvise` over memory that may map frames.
///
/// # Safety
///
/// The program makes this call, and has met its contract (madvise(2)).
pub(crate) unsafe fn madvise(start: usize, len: usize, advice: c_int) -> Answer {
    if let (libc::MADV_DONTNEED | libc::MADV_DONTNEED_LOCKED | libc::MADV_FREE | libc::MADV_REMOVE, Some(range)) =
        (advice, whole_pages(start, len))
    {
        // A handler that forks would wait for the agent's heap.
        let _signals = Blocked::all();
        if advice != libc::MADV_DONTNEED_LOCKED {
            ask_whether_discarded(range)?;
        }
        for part in frames(range)? {
            // SAFETY: by the contract the program discards the range, of which this is a part. The
            // new memory allows the same access as the agent's mappings of frames.
            unsafe { mm::map_fixed_anonymous(part) }?;
        }
    }
    // SAFETY: this function's contract is that of the call.
    unsafe { raw::madvise(start, len, advice) }
}

/// The parts of a range in which frames are mapped, or were before they were copied.
fn frames(range: Range) -> Result<Vec<Range>, Errno> {
    let mut parts = Vec::new();
    let listed = procfs::for_each_map(None, |line| {
        if line.path.starts_with(STORE) && !line.perms.shared {
            parts.extend(line.range.intersect(&range));
        }
    });
    // Where the kernel does not say, the call must not bring a frame's bytes back.
    listed.map_err(|_| Errno::NOMEM)?;
    Ok(parts)
}
