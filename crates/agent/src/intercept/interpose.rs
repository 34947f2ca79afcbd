//! The symbols that the program calls instead of the C library's.
//!
//! Most calls are about memory that the agent does not manage: then one look at a small table is
//! all, and the system call is made as the C library would. No `dlsym`, no lock, no allocation:
//! these functions run before constructors and inside allocators. Those that fork are exceptions.
//!
//! Parameters that are variadic in C are passed as fixed ones are, on the supported architectures.

#![allow(unsafe_code)] // Defines symbols of the C library.
#![allow(clippy::missing_safety_doc)] // The manual pages of the same names.

use std::ffi::{c_int, c_ulong, c_void};
use std::ptr::null_mut;

use kmem::PAGE_SIZE;
use kmem::range::Range;
use kmem::raw::{self, Answer};

use crate::intercept::next::{Next, fails};
use crate::intercept::{guard, mark, private, snapshot, without_tables};
use crate::runtime::interlock::INTERLOCK;
use crate::runtime::log;
use crate::runtime::prctl;
use crate::runtime::watch::WATCH;
use crate::service::fork;

/// Answers as the C library does: -1 and `errno`, or the value with `errno` as it was.
pub(super) fn answer(before: c_int, answer: Answer) -> isize {
    match answer {
        Ok(value) => {
            raw::set_errno(before);
            value as isize
        }
        Err(error) => fails(error.raw_os_error()) as isize,
    }
}

type Fork = unsafe extern "C" fn() -> libc::pid_t;
type Clone = unsafe extern "C" fn(
    extern "C" fn(*mut c_void) -> c_int,
    *mut c_void,
    c_int,
    *mut c_void,
    *mut c_void,
    *mut c_void,
    *mut c_void,
) -> c_int;
type Create = unsafe extern "C" fn(
    *mut libc::pthread_t,
    *const libc::pthread_attr_t,
    extern "C" fn(*mut c_void) -> *mut c_void,
    *mut c_void,
) -> c_int;
type Prctl = unsafe extern "C" fn(c_int, c_ulong, c_ulong, c_ulong, c_ulong) -> c_int;

// SAFETY: the type is that of `_Fork` (fork(2)).
static FORK: Next<Fork> = unsafe { Next::new(c"_Fork") };
// SAFETY: the type is that of clone(2), whose last three parameters are there if the flags ask.
static CLONE: Next<Clone> = unsafe { Next::new(c"clone") };
// SAFETY: the type is that of pthread_create(3).
static CREATE: Next<Create> = unsafe { Next::new(c"pthread_create") };
// SAFETY: the type is that of prctl(2), whose parameters the option asks for.
static PRCTL: Next<Prctl> = unsafe { Next::new(c"prctl") };

/// Looks them up when the library is loaded.
#[used]
#[unsafe(link_section = ".init_array")]
static AT_LOAD: extern "C" fn() = at_load;

extern "C" fn at_load() {
    let _ = [FORK.address(), CLONE.address(), CREATE.address(), PRCTL.address()];
    private::at_load();
    snapshot::at_load();
}

/// Whether a call may be about managed memory, and the tables can tell: a child settles them first.
fn is_guarded(start: usize, len: usize) -> bool {
    WATCH.overlaps(start, len) && {
        fork::settle();
        INTERLOCK.has_tables()
    }
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn mmap(
    start: *mut c_void,
    len: usize,
    prot: c_int,
    flags: c_int,
    fd: c_int,
    offset: i64,
) -> *mut c_void {
    let errno = raw::errno();
    let (flags, fd, is_ram) = private::mapping(flags, fd);
    let replaces = flags & (libc::MAP_FIXED | libc::MAP_FIXED_NOREPLACE) == libc::MAP_FIXED;
    // SAFETY: the program makes this very call, and the guard asks for its contract only.
    let result = unsafe {
        if replaces && is_guarded(start as usize, len) {
            guard::mmap(start as usize, len, prot, flags, fd, offset)
        } else {
            raw::mmap(start as usize, len, prot, flags, fd, offset)
        }
    };
    if let Ok(start) = result
        && is_ram
    {
        let range = Range::new(start, len.next_multiple_of(PAGE_SIZE));
        // SAFETY: private, anonymous memory was mapped there just now, and nobody has its address.
        unsafe { snapshot::begin(range, flags) };
    }
    answer(errno, result) as *mut c_void
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn mmap64(
    start: *mut c_void,
    len: usize,
    prot: c_int,
    flags: c_int,
    fd: c_int,
    offset: i64,
) -> *mut c_void {
    // SAFETY: `mmap` has the same contract.
    unsafe { mmap(start, len, prot, flags, fd, offset) }
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn munmap(start: *mut c_void, len: usize) -> c_int {
    let errno = raw::errno();
    // SAFETY: the program makes this very call, and the guard asks for its contract only.
    let result = unsafe {
        if is_guarded(start as usize, len) {
            guard::munmap(start as usize, len)
        } else {
            raw::munmap(start as usize, len)
        }
    };
    answer(errno, result) as c_int
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn mremap(
    old: *mut c_void,
    old_len: usize,
    new_len: usize,
    flags: c_int,
    new: *mut c_void,
) -> *mut c_void {
    let errno = raw::errno();
    // Only with these flags does the caller pass it.
    let has_new = flags & (libc::MREMAP_FIXED | libc::MREMAP_DONTUNMAP) != 0;
    let (old, new) = (old as usize, if has_new { new as usize } else { 0 });
    let onto = flags & libc::MREMAP_FIXED != 0 && is_guarded(new, new_len);
    // SAFETY: the program makes this very call, and the guard asks for its contract only.
    let result = unsafe {
        if onto || is_guarded(old, old_len) {
            guard::mremap(old, old_len, new_len, flags, new)
        } else {
            raw::mremap(old, old_len, new_len, flags, new)
        }
    };
    answer(errno, result) as *mut c_void
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn madvise(start: *mut c_void, len: usize, advice: c_int) -> c_int {
    let errno = raw::errno();
    // SAFETY: the program makes this very call, and the guard asks for its contract only.
    let result = unsafe {
        if advice == libc::MADV_MERGEABLE {
            let is_ours = || is_guarded(start as usize, len) && guard::is_managed(start as usize, len);
            if mark::mergeable(start as usize, len) || is_ours() {
                Ok(0)
            } else {
                raw::madvise(start as usize, len, advice)
            }
        } else if is_guarded(start as usize, len) {
            guard::madvise(start as usize, len, advice)
        } else if !INTERLOCK.has_tables() {
            without_tables::madvise(start as usize, len, advice)
        } else {
            raw::madvise(start as usize, len, advice)
        }
    };
    answer(errno, result) as c_int
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn mprotect(start: *mut c_void, len: usize, prot: c_int) -> c_int {
    let errno = raw::errno();
    // SAFETY: the program makes this very call, and the guard asks for its contract only.
    let call = || unsafe { raw::mprotect(start as usize, len, prot) };
    let watched = is_guarded(start as usize, len);
    answer(errno, if watched { guard::mprotect(start as usize, len, prot, call) } else { call() }) as c_int
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn pkey_mprotect(start: *mut c_void, len: usize, prot: c_int, key: c_int) -> c_int {
    let errno = raw::errno();
    // SAFETY: the program makes this very call, and the guard asks for its contract only.
    let call = || unsafe { raw::pkey_mprotect(start as usize, len, prot, key) };
    // A key can forbid what the protection allows, so memory with one leaves management.
    let effective = if key > 0 { libc::PROT_NONE } else { prot };
    let watched = is_guarded(start as usize, len);
    answer(errno, if watched { guard::mprotect(start as usize, len, effective, call) } else { call() }) as c_int
}

/// `_Fork` (fork(2)): a fork without handlers.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn _Fork() -> libc::pid_t {
    let Some(real) = FORK.get() else { return fails(libc::ENOSYS) };
    // SAFETY: the program makes this very call.
    fork::around(|| unsafe { real() })
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn clone(
    body: extern "C" fn(*mut c_void) -> c_int,
    stack: *mut c_void,
    flags: c_int,
    arg: *mut c_void,
    parent_tid: *mut c_void,
    tls: *mut c_void,
    child_tid: *mut c_void,
) -> c_int {
    let Some(real) = CLONE.get() else { return fails(libc::ENOSYS) };
    // SAFETY: the program makes this very call.
    let call = || unsafe { real(body, stack, flags, arg, parent_tid, tls, child_tid) };
    if flags & libc::CLONE_VM == 0 {
        return fork::around(call);
    }
    let tid = child_tid as usize;
    if flags & libc::CLONE_CHILD_CLEARTID != 0
        && is_guarded(tid, size_of::<c_int>())
        && let Err(error) = guard::leave_to_thread(tid, size_of::<c_int>())
    {
        return fails(error.raw_os_error());
    }
    // A thread ends with this process. Another process may outlive it.
    if flags & libc::CLONE_THREAD == 0 { fork::beside(call) } else { call() }
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn pthread_create(
    thread: *mut libc::pthread_t,
    attributes: *const libc::pthread_attr_t,
    body: extern "C" fn(*mut c_void) -> *mut c_void,
    arg: *mut c_void,
) -> c_int {
    let Some(real) = CREATE.get() else { return libc::EAGAIN };
    let (mut stack, mut len) = (null_mut(), 0);
    // SAFETY: the program passes null or initialised attributes. Without a stack in them the answer
    // is no memory of a process.
    let has_stack =
        !attributes.is_null() && unsafe { libc::pthread_attr_getstack(attributes, &mut stack, &mut len) } == 0;
    if has_stack && is_guarded(stack as usize, len) && guard::leave_to_thread(stack as usize, len).is_err() {
        return libc::EAGAIN;
    }
    // SAFETY: the program makes this very call.
    unsafe { real(thread, attributes, body, arg) }
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn ioctl(fd: c_int, request: c_ulong, argument: *mut c_void) -> c_int {
    let errno = raw::errno();
    // SAFETY: the program makes this very call, so it has met the system call's contract.
    let call = || unsafe { raw::ioctl(fd, request as usize, argument as usize) };
    let result = if !WATCH.overlaps(0, usize::MAX) {
        call()
    } else if guard::maps_for_device(request as usize) {
        guard::without_window(call)
    } else if guard::registers(request as usize) {
        // SAFETY: the argument is that of this request.
        unsafe { guard::register(argument.cast(), call) }
    } else {
        call()
    };
    answer(errno, result) as c_int
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn prctl(option: c_int, a: c_ulong, b: c_ulong, c: c_ulong, d: c_ulong) -> c_int {
    if option == libc::PR_SET_MEMORY_MERGE && a != 0 && WATCH.overlaps(0, usize::MAX) {
        // What the program has marked is merged already. Its other memory stays as it is.
        log::line(format_args!("the kernel's KSM is kept out of this process (PR_SET_MEMORY_MERGE)"));
        return 0;
    }
    if option == libc::PR_SET_PTRACER {
        prctl::note_tracer_chosen();
    }
    let Some(real) = PRCTL.get() else { return fails(libc::ENOSYS) };
    // SAFETY: the program makes this very call.
    unsafe { real(option, a, b, c, d) }
}
