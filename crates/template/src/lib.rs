//! The library in a program that is loaded once, and copied for each clone (`LD_PRELOAD`).
//!
//! A program that the dynamic linker has loaded differs from its files where addresses were filled
//! in: 4.6 MiB of QEMU and its libraries. Each process that is started has them for itself. Copies
//! of one process share them, and need no linker:
//!
//! ```text
//! pageone snapshot run          QEMU, the template          a clone
//!   starts it ─────────────────▶ is loaded
//!        ◀───────────── LOADED ─ waits, before its first function
//!   words, descriptors ── COPY ▶ fork(2) ──────────────────▶ takes them
//!        ◀───────────────────────────────────────── RUNS ── main(), as if it had been started so
//! ```
//!
//! The program waits in `__libc_start_main`, which its first instructions call: its libraries have
//! initialised themselves, its own constructors have not run, and it has one thread. So a copy is
//! what a start would have made, but for what libraries read from the kernel in their constructors
//! (unless fork handlers renew it, as random numbers), and for addresses: **all copies have the
//! same**. The template ends when its socket is closed. A file that each copy reads into its heap
//! is there once, too ([`reads`]).
//!
//! Without [`ENV_TEMPLATE`](wire::template::ENV_TEMPLATE) in the environment it does nothing.
//!
//! Sources: the C library's csu/libc-start.c; fork(2); ld.so(8).

mod copies;
mod enter;
mod inherited;
mod reads;
