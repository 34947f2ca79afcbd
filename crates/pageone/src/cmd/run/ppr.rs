//! `pageone run --ppr`: what a QEMU needs so that its guest's free pages can be recycled.
//!
//! A pool, which is a memfd that cannot change its length, becomes the memory of an `ivshmem-plain`
//! device. The guest's driver marks its free pages there. One end of a socket pair becomes a QMP
//! monitor. The daemon asks it where the guest's RAM lies, and has the device unplugged and
//! plugged in. QEMU inherits both descriptors, and the agent finds them by their numbers in the
//! environment; so does the daemon, of a QEMU whose RAM lies in `pageonefs`. Neither has a name
//! that another process could open, and neither is left behind.
//!
//! While the device is there QEMU cannot save the guest, and must not load it: marks belong to the
//! memory in which they were made. A disk that can hold no snapshots makes QEMU refuse `loadvm`. A
//! QEMU that starts with the state of another gets neither; the daemon plugs the device in later.
//! The words come behind the user's, so that devices have the same addresses with and without.
//!
//! The marks belong to the guest kernel that set them. After a reset another kernel runs, and by
//! the old marks its pages would be zeroed. So a reset ends QEMU (`-action reboot=shutdown`), as a
//! shutdown does.

#![allow(unsafe_code)] // Hands a mapping to the pool's code.

use std::ffi::{OsStr, OsString};
use std::os::fd::{AsRawFd, OwnedFd};
use std::path::Path;
use std::process::Command;
use std::ptr::NonNull;

use anyhow::{Context, Result, ensure};
use guests::is_qemu;
use guests::words::{DEFAULT_MEMORY, parse_size, parts};
use kmem::memfd;
use rustix::io::FdFlags;
use rustix::net::{AddressFamily, SocketFlags, SocketType};
use wire::recycle::{
    ENV_FILE_POOL, ENV_FILE_QMP, ENV_POOL, ENV_QMP, QEMU_DEVICE, QEMU_GUARD, QEMU_POOL, QEMU_PORT, QEMU_QMP,
};

use super::qemu;

/// The descriptors that the started program inherits. They are closed with this value, so it must
/// live until the program is started.
pub(crate) struct Inherited {
    _fds: [OwnedFd; 3],
}

/// Who takes the pages back.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Worker {
    /// The agent in the program.
    Agent,
    /// The daemon: the program's memory is a file of `pageonefs`.
    Daemon,
}

/// Adds the options and the environment to `command`, which starts `program` with `arguments`.
/// `period`: the reclaim period in seconds, if it is not the daemon's.
///
/// # Errors
///
/// When the program is not QEMU, its arguments keep a reset from ending it, or the pool cannot be
/// made.
pub(crate) fn prepare(
    command: &mut Command,
    program: &OsStr,
    arguments: &[OsString],
    worker: Worker,
    period: Option<f64>,
) -> Result<Inherited> {
    let name = Path::new(program).file_name().unwrap_or(program).to_string_lossy();
    ensure!(
        is_qemu(program),
        "--ppr is for QEMU's x86-64 guests, and {name} is not QEMU (a script that starts QEMU cannot be given arguments); \
         start QEMU itself with --ppr, or leave --ppr out"
    );
    check(arguments)?;
    let memory = memory_of(arguments);
    let layout = ppr::Layout::for_frames(ppr::guest_frames(memory))?;
    let pool = make_pool(layout.pool_bytes()).context("cannot make the pool")?;
    let (ours, qemus) = rustix::net::socketpair(AddressFamily::UNIX, SocketType::STREAM, SocketFlags::CLOEXEC, None)
        .context("cannot make a socket for QMP")?;
    for fd in [&pool, &ours, &qemus] {
        rustix::io::fcntl_setfd(fd, FdFlags::empty())?;
    }
    let (number, bytes) = (pool.as_raw_fd(), layout.pool_bytes());
    let mut bus = String::new();
    if has_port(arguments) {
        bus = format!(",bus={QEMU_PORT}");
    } else if qemu::needs_port(arguments) {
        // The smallest window that firmware makes is of 2 MiB. The number of the chassis is one
        // that nobody else takes.
        let window = bytes.max(2 << 20).next_power_of_two();
        command.args(["-device", &format!("pcie-root-port,id={QEMU_PORT},chassis=239,pref64-reserve={window}")]);
        bus = format!(",bus={QEMU_PORT}");
    }
    if !qemu::loads_state(arguments) {
        let object = format!(
            "memory-backend-file,id={QEMU_POOL}0,mem-path=/proc/self/fd/{number},share=on,merge=off,dump=off,size={bytes}"
        );
        let device = format!("ivshmem-plain,id={QEMU_DEVICE},memdev={QEMU_POOL}0{bus}");
        let guard = format!("driver=null-co,node-name={QEMU_GUARD},read-only=off");
        command.args(["-object", &object, "-device", &device, "-blockdev", &guard]);
    }
    let words = [
        "-chardev",
        &format!("socket,id={QEMU_QMP},fd={}", qemus.as_raw_fd()),
        "-mon",
        &format!("chardev={QEMU_QMP},mode=control"),
        "-action",
        "reboot=shutdown",
    ];
    command.args(words);
    let of_agent = [ENV_POOL, ENV_QMP];
    let of_daemon = [ENV_FILE_POOL, ENV_FILE_QMP];
    let (names, others) = if worker == Worker::Agent { (of_agent, of_daemon) } else { (of_daemon, of_agent) };
    command.env(names[0], number.to_string()).env(names[1], ours.as_raw_fd().to_string());
    for name in others {
        command.env_remove(name);
    }
    match period {
        Some(seconds) => command.env(wire::recycle::ENV_PERIOD, format!("{:.0}", seconds * 1000.0)),
        None => command.env_remove(wire::recycle::ENV_PERIOD),
    };
    Ok(Inherited { _fds: [pool, ours, qemus] })
}

/// Whether the device could be plugged into a port only, and there is none for it.
pub(crate) fn lacks_port(arguments: &[OsString]) -> bool {
    qemu::needs_port(arguments) && !has_port(arguments)
}

/// Whether the words of a guest that was stored have the port.
fn has_port(arguments: &[OsString]) -> bool {
    qemu::words(arguments).any(|(option, word)| option == "device" && has(&word, &format!("id={QEMU_PORT}")))
}

/// Refuses arguments that would lose the guest's memory.
fn check(arguments: &[OsString]) -> Result<()> {
    for (option, word) in qemu::words(arguments) {
        ensure!(
            !(option == "action" && has(&word, "reboot=reset")),
            "-action reboot=reset would let the guest go on after a reset, with marks of a kernel that is gone: pages in use would be zeroed. \
             Leave it out: with --ppr a reset ends QEMU, and the program that started it starts it again"
        );
    }
    Ok(())
}

fn has(word: &str, setting: &str) -> bool {
    parts(word).any(|part| part == setting)
}

/// Warns of arguments that keep the guest's memory from being recycled by an agent.
pub(super) fn warn_of(arguments: &[OsString]) {
    for (option, word) in qemu::words(arguments) {
        let shared = option == "object"
            && ["memory-backend-memfd", "memory-backend-shm"].iter().any(|kind| word.starts_with(kind))
            && !has(&word, "share=off");
        let shared = shared || option == "object" && word.starts_with("memory-backend-") && has(&word, "share=on");
        if shared {
            output::note!(
                "{word}: free pages of memory that other processes may map (share=on, the default of memory-backend-memfd) are not \
                 taken back; if it is the guest's RAM, use --backend module, or leave --ppr out and use virtio-balloon's \
                 free-page-reporting=on"
            );
        }
        if option == "machine" && has(&word, "mem-merge=off") {
            output::note!(
                "{word}: with mem-merge=off the guest's memory is not managed, and its free pages are not taken back"
            );
        }
    }
}

/// An initialised pool that can neither shrink nor grow.
fn make_pool(bytes: usize) -> Result<OwnedFd> {
    let (fd, map) = memfd::create_fixed("pageone-ppr", bytes)?;
    let start = NonNull::new(map.as_ptr()).context("mapped at 0")?;
    // SAFETY: `map.len()` bytes from `start` are mapped for reading and writing until `map` is
    // dropped, and the pool is dropped before it, at the end of the statement. The seals keep the
    // file from shrinking, so no access raises SIGBUS. No other process has the file yet.
    unsafe { ppr::Pool::from_mapping(start, map.len()) }?.initialise();
    Ok(fd)
}

/// Bytes of the guest's memory by QEMU's `-m`: `maxmem`, the most that can be plugged in, if given.
fn memory_of(arguments: &[OsString]) -> u64 {
    let mut words = arguments.iter().map(|word| word.to_string_lossy());
    let mut most = None;
    while let Some(word) = words.next() {
        if word == "-m" || word == "--m" {
            let value = words.next().unwrap_or_default();
            let sizes = parts(&value).enumerate().filter_map(|(at, part)| match part.split_once('=') {
                Some(("size" | "maxmem", size)) => parse_size(size),
                None if at == 0 => parse_size(&part),
                _ => None,
            });
            most = sizes.max().max(most);
        }
    }
    most.unwrap_or(DEFAULT_MEMORY)
}

#[cfg(test)]
mod tests;
