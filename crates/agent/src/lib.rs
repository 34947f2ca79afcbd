//! The library loaded into a client (`LD_PRELOAD`): announces regions, executes mapping batches.
//!
//! It does nothing until the program marks memory with `madvise(MADV_MERGEABLE)`, as QEMU does with
//! guest RAM: from then on the memory is a *region*, tracked with userfaultfd, and a thread waits
//! for the daemon's batches: pages, and the frames that they are thought to equal. What equals is
//! mapped onto the frames, private and copy-on-write, in short *windows* in which writers wait. The
//! daemon is never needed: a window runs to its end by itself, and merged memory stays what it is
//! when the daemon dies.
//!
//! All policy is the daemon's. What is decided here is safety: whether bytes are equal ([`window::merge`]),
//! whether memory may be merged at all ([`intercept::probe`], [`window::pins`], locked memory), and that every call of
//! the program on merged memory does what it would do on anonymous memory ([`intercept::guard`]).
//!
//! ```text
//! interpose ─▶ watch (is it ours?) ─▶ mark, guard ─▶ window ─▶ regions
//! link ─▶ batch ─▶ merge ─▶ pins (may it be taken?) ─▶ window
//! link ─▶ digest (what the daemon knows pages by)
//! link ─▶ recycle (what the guest has marked as free) ─▶ window
//! threads, fork: around all of these; everything shared lies in state, behind lock
//! ```

mod daemon;
mod intercept;
mod recycle;
mod runtime;
mod window;

#[global_allocator]
static HEAP: runtime::heap::Heap = runtime::heap::Heap::new();
