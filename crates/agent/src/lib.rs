//! The library loaded into a client (`LD_PRELOAD`): announces regions, executes mapping batches.
//!
//! It does nothing until the program marks memory with `madvise(MADV_MERGEABLE)`, as QEMU does with
//! guest RAM. From then on the memory is a *region*, tracked with userfaultfd, and a thread waits
//! for the daemon's batches: pages, and the frames that they should equal. Equal pages are mapped
//! onto the frames, private and copy-on-write, in short *windows* in which writers wait. The daemon
//! is never needed: a window runs to its end, and merged memory stays merged when the daemon dies.
//!
//! All policy is the daemon's, all safety the agent's. Are the bytes equal ([`window::merge`])? May
//! memory be merged at all ([`intercept::probe`], [`window::pins`])? Every call of the program on
//! merged memory does what it would do on anonymous memory ([`intercept::guard`]).
//!
//! A virtual machine monitor may also be linked with it (`include/pageone.h`).
//!
//! Each folder is a floor, and imports from the floors below it only:
//!
//! ```text
//! interface   functions for programs that are linked with the library
//! intercept   the program's calls: which memory is marked, what happens to it
//! service     the two threads, and the fork handlers
//! daemon      the connection, and the daemon's requests: batches, digests, detaching
//! recycle     pages that the guest has marked as free
//! window      merge windows: compare, take away, map; and the way back
//! runtime     the state behind its lock; statics, heap, log
//! ```

mod daemon;
mod intercept;
mod interface;
mod recycle;
mod runtime;
mod service;
mod window;
