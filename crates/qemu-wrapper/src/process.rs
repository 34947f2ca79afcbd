//! This process as the kernel started it, and how it becomes another program.

#![allow(unsafe_code)] // The entry's pointers, and execve(2) with them.

use std::ffi::{CStr, CString, OsString, c_char, c_int};
use std::fmt::Arguments;
use std::io::{self, Write};
use std::os::unix::ffi::OsStrExt;
use std::path::Path;

unsafe extern "C" {
    /// environ(7).
    static environ: *const *const c_char;
}

/// The arguments that this process got, with the first.
pub(crate) struct Process {
    /// As they came, with a null pointer at the end.
    raw: *const *const c_char,
    arguments: Vec<&'static [u8]>,
}

impl Process {
    /// Of the arguments of `main`.
    ///
    /// # Safety
    ///
    /// `raw` has `count` pointers to strings and a null pointer behind them. Nobody changes them,
    /// and they stay as long as the process lives.
    pub(crate) unsafe fn new(count: c_int, raw: *const *const c_char) -> Self {
        let count = usize::try_from(count).unwrap_or(0);
        // SAFETY: by the contract there are as many strings.
        let arguments = (0..count).map(|at| unsafe { CStr::from_ptr(*raw.add(at)) }.to_bytes()).collect();
        Self { raw, arguments }
    }

    pub(crate) fn arguments(&self) -> &[&[u8]] {
        self.arguments.get(1..).unwrap_or_default()
    }

    /// Runs a program in place of this one, with these arguments, and with the environment in which
    /// some variables are changed. Returns why it could not.
    pub(crate) fn become_program(&self, program: &Path, changes: &[(&str, OsString)]) -> io::Error {
        let assign =
            |(name, value): &(&str, OsString)| CString::new([name.as_bytes(), b"=", value.as_bytes()].concat());
        let (Ok(path), Ok(assigned)) =
            (CString::new(program.as_os_str().as_bytes()), changes.iter().map(assign).collect::<Result<Vec<_>, _>>())
        else {
            return io::ErrorKind::InvalidInput.into();
        };
        let is_changed = |entry: &CStr| {
            changes.iter().any(|(name, _)| {
                entry.to_bytes().strip_prefix(name.as_bytes()).is_some_and(|rest| rest.starts_with(b"="))
            })
        };
        let mut environment: Vec<*const c_char> = Vec::new();
        // SAFETY: `environ` is null, or a list of pointers to strings with a null pointer at its
        // end. This process has one thread, which does not change it.
        unsafe {
            let mut at = environ;
            while !at.is_null() && !(*at).is_null() {
                if !is_changed(CStr::from_ptr(*at)) {
                    environment.push(*at);
                }
                at = at.add(1);
            }
        }
        environment.extend(assigned.iter().map(|entry| entry.as_ptr()));
        environment.push(std::ptr::null());
        // SAFETY: the path is a string, and both lists end with a null pointer. All live until the
        // call returns.
        unsafe { libc::execve(path.as_ptr(), self.raw, environment.as_ptr()) };
        io::Error::last_os_error()
    }
}

/// The user that this process runs as.
pub(crate) fn user() -> u32 {
    // SAFETY: takes nothing.
    unsafe { libc::geteuid() }
}

/// Writes one line to standard error, which is QEMU's log. Nobody may be there to read it.
pub(crate) fn say(text: Arguments<'_>) {
    let line = format!("pageone: {text}\n");
    // SAFETY: sets how a signal is handled, and sets that back. After execve(2) no signal has a
    // handler that could have further attributes.
    unsafe {
        let before = libc::signal(libc::SIGPIPE, libc::SIG_IGN);
        let _ = io::stderr().write_all(line.as_bytes());
        libc::signal(libc::SIGPIPE, before);
    }
}
