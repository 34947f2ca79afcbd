//! Forks: the lock is held across one, so that the child gets consistent tables.
//!
//! A child has the parent's mappings (except with `MADV_DONTFORK`), merged pages among them, and
//! none of its threads. It keeps the tables for the guards, closes what it inherited, and takes no
//! memory under management. A fork that copies mappings of frames is counted in the control page
//! before the child exists.
//!
//! ```text
//! fork            handlers of the C library: prepare ─▶ fork ─▶ parent, child
//! _Fork, clone    the same steps, by the interposed symbols
//! raw clone       no step. Counted when its event is read, a moment after the child may begin to
//!                 run; or from the start, where no events can be had. The child's first guarded
//!                 call notices (Lineage), and settles the tables
//! ```
//!
//! The handlers are registered first, and the C library calls `prepare` in reverse order: so the
//! lock is taken last, and released first. An allocator may hold its own lock across a fork, and
//! call `madvise` or `munmap` with it held.
//!
//! In a program that was attached the handlers come last, so the lock would be taken first. It is
//! kept across a fork only if children inherit managed memory (QEMU's do not: `MADV_DONTFORK`).
//! Otherwise the child is one of a raw `clone`.

#![allow(unsafe_code)] // Registers handlers with the C library.

use std::ffi::{c_int, c_void};
use std::mem;
use std::ptr::null_mut;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::Duration;

use crate::runtime::descriptors::NUMBERS;
use crate::runtime::heap::{HEAP, Holder};
use crate::runtime::injected::is_injected;
use crate::runtime::interlock::INTERLOCK;
use crate::runtime::lifecycle::{Phase, STARTING, phase, set_phase};
use crate::runtime::lineage::LINEAGE;
use crate::runtime::lock::Blocked;
use crate::runtime::sharers::SHARERS;
use crate::runtime::state::STATE;
use crate::runtime::waker::{STOP, WAKE};

/// The handlers are registered with the C library; allocators do that before constructors run.
static FORKS_WATCHED: AtomicBool = AtomicBool::new(false);

/// Pause between two looks at whether the event thread has closed what it read.
const READING_PAUSE: Duration = Duration::from_micros(20);

type Handler = Option<unsafe extern "C" fn()>;
type Register = unsafe extern "C" fn(Handler, Handler, Handler, *mut c_void) -> c_int;

/// The C library's function behind pthread_atfork(3). It registers the agent's handlers first. The
/// answer is an error number.
///
/// # Safety
///
/// The contract of pthread_atfork(3).
#[unsafe(no_mangle)]
pub unsafe extern "C" fn __register_atfork(
    prepare: Handler,
    parent: Handler,
    child: Handler,
    library: *mut c_void,
) -> c_int {
    // SAFETY: the name is a C string. The C library's function of that name has this type.
    let real: Option<Register> = unsafe { mem::transmute(libc::dlsym(libc::RTLD_NEXT, c"__register_atfork".as_ptr())) };
    let Some(real) = real else { return libc::ENOSYS };
    // SAFETY: the handlers are functions of this library, which is never unloaded, so it need not
    // be named. This function's contract covers the other handlers.
    unsafe {
        if !FORKS_WATCHED.swap(true, Ordering::AcqRel)
            && real(Some(before_fork), Some(after_in_parent), Some(after_in_child), null_mut()) != 0
        {
            FORKS_WATCHED.store(false, Ordering::Release);
        }
        if prepare.is_none() && parent.is_none() && child.is_none() {
            return 0;
        }
        real(prepare, parent, child, library)
    }
}

pub(super) fn is_watched() -> bool {
    FORKS_WATCHED.load(Ordering::Acquire)
}

/// Registers the handlers before the constructors of libraries that are initialised later.
#[used]
#[unsafe(link_section = ".init_array")]
static AT_LOAD: extern "C" fn() = at_load;

extern "C" fn at_load() {
    is_injected();
    // SAFETY: no handler is given.
    unsafe { __register_atfork(None, None, None, null_mut()) };
}

/// Makes a system call that forks, between the same steps as the C library's `fork`.
///
/// The child may begin elsewhere (clone(2) with a stack). It is settled by its first guarded call.
pub(crate) fn around(fork: impl FnOnce() -> c_int) -> c_int {
    before_fork();
    match fork() {
        0 => {
            after_in_child();
            0
        }
        child => {
            let errno = kmem::raw::errno();
            after_in_parent();
            kmem::raw::set_errno(errno);
            child
        }
    }
}

/// Makes a system call that starts a process which shares this one's memory and is none of its
/// threads. No window is open then, and none is opened for a merge while it lives.
pub(crate) fn beside(clone: impl FnOnce() -> c_int) -> c_int {
    settle();
    SHARERS.making();
    drop(STATE.lock());
    let child = clone();
    SHARERS.made(child);
    child
}

extern "C" fn before_fork() {
    settle();
    let mut state = STATE.lock();
    if is_injected() && !(INTERLOCK.has_tables() && state.regions.is_inherited()) {
        return;
    }
    while INTERLOCK.is_reading() {
        thread::sleep(READING_PAUSE);
    }
    if INTERLOCK.has_tables() && state.regions.is_inherited() {
        state.uplink.control.count_fork();
    }
    HEAP.hold();
    INTERLOCK.begin_fork(this_thread());
    state.keep_across_fork();
}

/// The calling thread, as parent and child name it; never 0.
fn this_thread() -> usize {
    // SAFETY: it only reads.
    unsafe { libc::pthread_self() as usize }
}

extern "C" fn after_in_parent() {
    if !INTERLOCK.end_fork(this_thread()) {
        return;
    }
    HEAP.release();
    // SAFETY: `before_fork` kept the lock on this thread, just before the fork.
    drop(unsafe { STATE.after_fork() });
}

extern "C" fn after_in_child() {
    if !INTERLOCK.end_fork(this_thread()) {
        return;
    }
    HEAP.release();
    end();
    STATE.forget_waiting();
    // SAFETY: `before_fork` kept the lock on the thread that this one is the copy of.
    let mut state = unsafe { STATE.after_fork() };
    if INTERLOCK.begin_anew() {
        let tracking = state.orphan();
        for number in STOP.take_spare().into_iter().chain(tracking) {
            NUMBERS.remove(number);
            // SAFETY: this process's copies of the descriptors belong to the agent's threads, which
            // do not exist here; nothing else uses the numbers.
            unsafe { libc::close(number) };
        }
        WAKE.close();
        STOP.close();
        NUMBERS.clear();
    }
    LINEAGE.settled();
}

/// This process manages no memory of its own. A child of a program that has marked nothing may.
fn end() {
    if phase() != Phase::Idle {
        set_phase(Phase::Ended);
    }
    // The thread that held it does not exist here.
    STARTING.reset();
}

/// Settles the tables of a child that no step of a fork has prepared. Called before each use of the
/// tables on the program's behalf.
///
/// Descriptors are forgotten and stay open: the parent may share the table of descriptors
/// (`CLONE_FILES`). The parent's userfaultfds are never used here.
pub(crate) fn settle() {
    if LINEAGE.is_settled() {
        return;
    }
    // A handler would wait for what this thread has begun.
    let _signals = Blocked::all();
    if !LINEAGE.is_unsettled() {
        return;
    }
    // A thread of the parent may have held the lock, and changed the tables. That thread does not
    // exist here, so what it began stays half done. The thread that cloned by way of `around` held
    // it too, and changed nothing.
    let by_fork = INTERLOCK.forget_fork();
    let was_free = STATE.reset();
    HEAP.reset(if by_fork { Holder::Fork } else { Holder::Unknown });
    end();
    WAKE.forget();
    STOP.forget();
    NUMBERS.clear();
    if (was_free || by_fork) && INTERLOCK.begin_anew() {
        STATE.lock().forsake();
    } else {
        INTERLOCK.lose_tables();
    }
    LINEAGE.settled();
}
