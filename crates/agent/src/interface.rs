//! Functions for monitors that are linked with this library; see `include/pageone.h`.
//!
//! The program calls `pageone_start` and `pageone_register` where QEMU calls
//! `madvise(MADV_MERGEABLE)`. The guards come with the library: its `munmap`, `madvise` and the
//! like are found before the C library's.
//!
//! Structures begin with their size as the program knows it; members beyond that are absent.

#![allow(unsafe_code)] // Called by C programs, with addresses.

use std::cell::RefCell;
use std::env;
use std::ffi::{CStr, OsStr, c_char, c_int, c_void};
use std::fmt::{Display, Write};
use std::mem::offset_of;
use std::os::unix::ffi::OsStrExt;
use std::path::Path;
use std::thread::sleep;
use std::time::Duration;

use crate::intercept::{guard, mark};
use crate::runtime::lifecycle::{Leaving, Phase, ask_to_leave, leaving, phase};
use crate::runtime::lock::Blocked;
use crate::service::{fork, start};

/// The socket of the system's daemon.
const SOCKET: &str = "/run/pageone/agent.sock";
/// How often [`pageone_stop`] looks whether the agent has left.
const LEFT_EVERY: Duration = Duration::from_millis(1);

#[repr(C)]
pub struct Options {
    size: usize,
    socket: *const c_char,
}

const _: () = assert!(size_of::<Options>() == 16 && offset_of!(Options, socket) == 8);

/// A message that needs no memory, cut where it is too long. It ends with a zero byte.
struct Message {
    bytes: [u8; 512],
    len: usize,
}

impl Write for Message {
    fn write_str(&mut self, text: &str) -> std::fmt::Result {
        let room = self.bytes.len() - 1 - self.len;
        let part = &text.as_bytes()[..text.len().min(room)];
        self.bytes[self.len..][..part.len()].copy_from_slice(part);
        self.len += part.len();
        self.bytes[self.len] = 0;
        Ok(())
    }
}

thread_local! {
    static LAST: RefCell<Message> = const { RefCell::new(Message { bytes: [0; 512], len: 0 }) };
}

/// 0, or -1 and the message of this thread.
fn answer<E: Display>(result: Result<(), E>) -> c_int {
    LAST.with_borrow_mut(|message| {
        (message.len, message.bytes[0]) = (0, 0);
        match result {
            Ok(()) => 0,
            Err(error) => {
                // Cannot fail: it is cut.
                let _ = write!(message, "{error}");
                -1
            }
        }
    })
}

/// See the header.
///
/// # Safety
///
/// `options` is null, or points to a `struct pageone_options` of the size that it says, whose
/// strings end with a zero byte. All of that lives until the call returns.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pageone_start(options: *const Options) -> c_int {
    let mut socket = None;
    if !options.is_null() {
        // SAFETY: by the contract its first member may be read.
        let size = unsafe { (&raw const (*options).size).read() };
        if size < size_of::<usize>() {
            return answer(Err("pageone_start: options->size is not set"));
        }
        if size >= size_of::<Options>() {
            // SAFETY: its size says that this member is there.
            let named = unsafe { (&raw const (*options).socket).read() };
            // SAFETY: by the contract a string with a zero byte at its end, until the return.
            let bytes = (!named.is_null()).then(|| unsafe { CStr::from_ptr(named) }.to_bytes());
            socket = bytes.map(|bytes| Path::new(OsStr::from_bytes(bytes)));
        }
    }
    fork::settle();
    let is_in_environment = env::var_os(wire::ENV_SOCKET).is_some_and(|path| !path.is_empty());
    let socket = socket.or_else(|| (!is_in_environment).then_some(Path::new(SOCKET)));
    // No signal handler may run while this thread holds the agent's locks.
    let signals = Blocked::all();
    let started = start::start(socket);
    drop(signals);
    answer(started)
}

/// See the header.
///
/// # Safety
///
/// From here on the program changes these mappings by the functions of the C library only.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pageone_register(address: *mut c_void, length: usize) -> c_int {
    answer(mark::mark(address as usize, length).and_then(|marked| marked.refused.map_or(Ok(()), Err)))
}

/// See the header.
#[unsafe(no_mangle)]
pub extern "C" fn pageone_unregister(address: *mut c_void, length: usize) -> c_int {
    fork::settle();
    let signals = Blocked::all();
    // SAFETY: this advice discards nothing.
    let done = unsafe { guard::madvise(address as usize, length, libc::MADV_UNMERGEABLE) };
    drop(signals);
    answer(done.map(drop))
}

/// See the header.
#[unsafe(no_mangle)]
pub extern "C" fn pageone_stop() -> c_int {
    fork::settle();
    if phase() != Phase::Running {
        return answer(Err("no agent runs in this process"));
    }
    ask_to_leave();
    loop {
        match leaving() {
            Leaving::Gone => return answer(Ok::<_, &str>(())),
            Leaving::Failed => return answer(Err("memory could not be given back: it stays merged, and guarded")),
            Leaving::No | Leaving::Asked => sleep(LEFT_EVERY),
        }
    }
}

/// See the header.
#[unsafe(no_mangle)]
pub extern "C" fn pageone_error() -> *const c_char {
    // The thread's own until it ends, and changed by its next call only.
    LAST.with_borrow(|message| message.bytes.as_ptr().cast())
}
