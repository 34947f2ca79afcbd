//! `qemu-system-x86_64-pageone`: QEMU with the agent in it, for those who name an emulator and
//! cannot give it an environment, such as libvirt.
//!
//! It looks at the command line and at a few files, and becomes QEMU (`execve(2)`), with the same
//! arguments, descriptors, signals and memory limits. If the guest can be merged the environment
//! has two variables more: `LD_PRELOAD` and `PAGEONE_SOCKET`. If not, QEMU gets the environment as
//! it is, and one line on standard error says why.
//!
//! It starts no program but QEMU, connects to nobody and waits for nobody. When no guest is to run
//! (libvirt asks QEMU what it can do) QEMU runs as it would without this program.
//!
//! Environment: `PAGEONE_QEMU`, the real QEMU; `PAGEONE_AGENT`, the agent's library;
//! `PAGEONE_SOCKET`, the daemon's socket. Exit code, if QEMU cannot be started: 127 if it is not
//! there, 126 otherwise, as a shell's.

#![no_main] // Rust's start-up ignores SIGPIPE, and QEMU would inherit that.

mod arguments;
mod merge;
mod process;

use std::ffi::{OsStr, OsString, c_char, c_int};
use std::path::{Path, PathBuf};

/// The real QEMU.
const QEMU: &str = "/usr/bin/qemu-system-x86_64";
/// Names another one.
const ENV_QEMU: &str = "PAGEONE_QEMU";

/// What the C library's start-up calls.
///
/// # Safety
///
/// Those who call it give it a process's arguments, as `execve(2)` does.
#[allow(unsafe_code)] // It is the program's entry, which has to have this name and signature.
#[unsafe(no_mangle)]
unsafe extern "C" fn main(count: c_int, arguments: *const *const c_char) -> c_int {
    // SAFETY: the contract is the same.
    run(&unsafe { process::Process::new(count, arguments) })
}

/// Becomes QEMU; returns the exit code if that fails.
fn run(process: &process::Process) -> c_int {
    let qemu = variable(ENV_QEMU).map_or_else(|| QEMU.into(), PathBuf::from);
    if is_this_program(&qemu) {
        process::say(format_args!(
            "{} is this program itself: name the real QEMU in the variable {ENV_QEMU}",
            qemu.display()
        ));
        return 127;
    }
    let error = match merge::environment(&qemu, process.arguments()) {
        Ok(changes) => process.become_program(&qemu, &changes),
        Err(why) => {
            if let Some(why) = why {
                process::say(format_args!("this guest is not merged: {why}"));
            }
            process.become_program(&qemu, &[])
        }
    };
    process::say(format_args!("cannot run {}: {error}", qemu.display()));
    if error.kind() == std::io::ErrorKind::NotFound { 127 } else { 126 }
}

/// A variable that is set and not empty.
fn variable(name: impl AsRef<OsStr>) -> Option<OsString> {
    std::env::var_os(name).filter(|value| !value.is_empty())
}

/// Whether a path leads to this program.
fn is_this_program(path: &Path) -> bool {
    use std::os::unix::fs::MetadataExt;
    let identity = |path: &Path| std::fs::metadata(path).map(|meta| (meta.dev(), meta.ino())).ok();
    let own = identity(Path::new("/proc/self/exe"));
    own.is_some() && own == identity(path)
}
