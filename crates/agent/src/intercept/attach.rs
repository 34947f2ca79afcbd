//! The agent comes into a program that runs already: `pageone attach` has loaded the library, and
//! calls [`pageone_agent_attach`] on the program's first thread, which waits for events.
//!
//! ```text
//! may it be?      marked memory that is fit, nothing pinned or locked, a daemon to connect with
//! the tables      the program's calls come to the agent from now on
//! the threads     as when a program marks its memory for the first time
//! the memory      the kernel's mark goes (MADV_UNMERGEABLE), and the agent takes it
//! ```
//!
//! RAM that is a private mapping of a file, as a clone's, is replaced first ([`loading`]). For that
//! QEMU must have stopped its guest.
//!
//! What a preloaded agent learns from watching the program, the kernel is asked for: pins and locks
//! (now, and before each window), other userfaultfds, stacks, memory of malloc, KSM. What it does
//! not tell is assumed: the program may have chosen its tracer.
//!
//! Memory that children inherit is refused: a fork's handlers that are registered late run before
//! those of the program's allocator, so the lock would be taken first ([`crate::service::fork`]).
//!
//! A program can be attached again after a detach.

#![allow(unsafe_code)] // An entry for pageone attach.

use std::ffi::{CStr, OsStr, c_char};
use std::fmt::Write;
use std::fs::read_to_string;
use std::os::unix::ffi::OsStrExt;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::{Path, PathBuf};
use std::sync::atomic::Ordering;
use std::thread::sleep;
use std::time::Duration;

use kmem::peer::{Peer, is_trusted};
use kmem::range::Range;
use kmem::seqpacket::Conn;
use kmem::{PAGE_SIZE, procfs, raw};

use crate::daemon::error::LinkError;
use crate::intercept::loading::{self, ReplaceError};
use crate::intercept::mark::{self, MarkError, SMALLEST};
use crate::intercept::probe::{Ksm, Marked, Unfit, marked, probe, probe_file};
use crate::intercept::tables::{self, TableError};
use crate::runtime::denied::{self, Need};
use crate::runtime::injected::is_injected;
use crate::runtime::lifecycle::{LOADING, Phase, phase, set_phase};
use crate::runtime::lineage;
use crate::runtime::lock::Blocked;
use crate::runtime::log;
use crate::runtime::prctl;
use crate::runtime::state::STATE;
use crate::runtime::state::region::Sticky;
use crate::runtime::waker::WAKE;
use crate::service::{fork, start};

/// The first byte of an answer (crates/attach/src/reply.rs).
const ATTACHED: u8 = 1;
const ALREADY: u8 = 2;
const REFUSED: u8 = 3;
const MUST_STAND: u8 = 4;
/// The first byte of the buffer before the call, if the program stands still.
const STANDS: u8 = 0xff;

/// Memory that must be left after KSM's merges were taken apart, in bytes.
const RESERVE: u64 = 256 << 20;
/// How often the end of the threads of the last time is looked for, and the pause between.
const LOOKS: u32 = 1000;
const PAUSE: Duration = Duration::from_millis(1);

/// Why a program is not attached.
#[derive(Debug, thiserror::Error)]
enum AttachError {
    #[error("it has had the agent since its start (`pageone run`)")]
    Early,
    #[error("it was started with the agent (`pageone run`) and detached; it can be merged again after a restart")]
    EarlyEnded,
    #[error("it is a copy of an attached process, made by fork")]
    Child,
    #[error("its agent has not ended yet; try again in a moment")]
    Ending,
    #[error("{0}")]
    Denied(String),
    #[error("the daemon's socket {0}: {1}; start the daemon with `pageone daemon`")]
    Socket(PathBuf, std::io::Error),
    #[error("{0}")]
    Marks(Unfit),
    #[error("it has marked no memory as mergeable (QEMU: -machine mem-merge=on)")]
    Nothing,
    #[error(
        "it has marked no private memory as mergeable, and {name} ({mib} MiB) is shared with other processes or a file; \
         QEMU needs memory-backend-ram, or share=off"
    )]
    Shared { name: String, mib: usize },
    #[error("this kernel has no KSM, so it does not know which memory the program has marked; use `pageone run`")]
    NoKsm,
    #[error("{0} MiB of its memory are pinned or locked (VFIO, RDMA, io_uring, mlock), which must not be merged")]
    Held(u64),
    #[error("its status cannot be read: {0}")]
    Status(std::io::Error),
    #[error("{mib} MiB at {start:#x}: {error}")]
    Unfit { mib: usize, start: usize, error: Unfit },
    #[error("children inherit its memory (no MADV_DONTFORK), which is safe only from its start on; use `pageone run`")]
    Inherited,
    #[error(
        "KSM has merged {needed} MiB of it, and to take that apart the host has only {available} MiB; free some first"
    )]
    KsmMerged { needed: u64, available: u64 },
    #[error("KSM does not give it back: {0}")]
    KsmKeeps(rustix::io::Errno),
    #[error(transparent)]
    Tables(#[from] TableError),
    #[error("{0}")]
    Start(String),
    #[error(transparent)]
    Take(#[from] MarkError),
    #[error(
        "its RAM ({0} MiB) is a private mapping of a file, in which writers cannot be blocked. It can be replaced by memory of \
         its own while the guest stands still"
    )]
    MustStand(usize),
    #[error("{0} of its memories are private mappings of files, and only one can be replaced; use `pageone run`")]
    Files(usize),
    #[error("it becomes memory of its own, {needed} MiB, and the host has only {available} MiB; free some first")]
    Room { needed: u64, available: u64 },
    #[error(transparent)]
    Replace(#[from] ReplaceError),
}

/// Called by `pageone attach` (crates/attach). The answer in `reply`: what became of it, and a
/// sentence that ends with a zero. Before, its first byte may be [`STANDS`].
///
/// # Safety
///
/// `socket` is a C string, and `reply` has `len` bytes that nobody else uses. With [`STANDS`]
/// nothing uses the memory that the program has marked until this returns.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pageone_agent_attach(socket: *const c_char, reply: *mut u8, len: usize) {
    let _signals = Blocked::all();
    // SAFETY: by the contract.
    let (socket, reply) = unsafe { (CStr::from_ptr(socket), std::slice::from_raw_parts_mut(reply, len)) };
    let socket = PathBuf::from(OsStr::from_bytes(socket.to_bytes()));
    let program = if reply.first() == Some(&STANDS) { Program::Stands } else { Program::Runs };
    let done = catch_unwind(AssertUnwindSafe(|| attach(&socket, program)));
    let (code, text) = match done {
        Ok(Ok(Some(text))) => (ATTACHED, text),
        Ok(Ok(None)) => (ALREADY, String::new()),
        Ok(Err(error @ AttachError::MustStand(_))) => (MUST_STAND, error.to_string()),
        Ok(Err(error)) => (REFUSED, error.to_string()),
        Err(_) => (REFUSED, "the agent has failed".into()),
    };
    log::line(format_args!("attach: {text}"));
    if let Some((first, rest)) = reply.split_first_mut() {
        let count = text.len().min(rest.len().saturating_sub(1));
        rest[..count].copy_from_slice(&text.as_bytes()[..count]);
        rest[count..].fill(0);
        *first = code;
    }
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Program {
    Runs,
    /// Nothing uses the memory that it has marked.
    Stands,
}

/// Attaches; says what was taken. `None`: the program is attached already.
fn attach(socket: &Path, program: Program) -> Result<Option<String>, AttachError> {
    fork::settle();
    match (phase(), is_injected()) {
        (Phase::Running, true) => return Ok(None),
        (Phase::Ended, false) => return Err(AttachError::EarlyEnded),
        (_, false) => return Err(AttachError::Early),
        (Phase::Idle | Phase::Starting | Phase::Ended, true) => {}
    }
    if lineage::owner() != 0 && !lineage::is_owner() {
        return Err(AttachError::Child);
    }
    wait_for_threads()?;
    let Fit { ranges, file } = fit()?;
    check_socket(socket)?;
    check_room(&ranges, file)?;
    if let Some((range, _)) = file.filter(|_| program == Program::Runs) {
        return Err(AttachError::MustStand(range.len >> 20));
    }
    tables::bind()?;
    prctl::note_tracer_chosen();
    // The agent connects when all is loaded.
    LOADING.store(file.is_some(), Ordering::Release);
    let started = start::start_attached(socket.into()).map_err(|error| AttachError::Start(error.explain()));
    let taken = started.and_then(|()| take_all(&ranges, file).inspect_err(|_| undo(&ranges)));
    let taken = taken.inspect_err(|_| LOADING.store(false, Ordering::Release));
    WAKE.wake();
    taken.map(Some)
}

fn wait_for_threads() -> Result<(), AttachError> {
    for _ in 0..LOOKS {
        if !start::has_threads() {
            return Ok(());
        }
        sleep(PAUSE);
    }
    Err(AttachError::Ending)
}

/// Memory that may be taken.
struct Fit {
    ranges: Vec<Range>,
    /// A private mapping of a file, and the program's advice.
    file: Option<(Range, Sticky)>,
}

/// The memory that the program has marked, if it may all be taken.
fn fit() -> Result<Fit, AttachError> {
    let status = procfs::status(None).map_err(AttachError::Status)?;
    let held = status.vm_pin_kib + status.vm_lck_kib;
    if held > 0 {
        return Err(AttachError::Held(held.div_ceil(1024)));
    }
    let Marked { mut ranges, shared } = marked().map_err(|unfit| match std::fs::File::open("/proc/self/smaps") {
        Err(error) => AttachError::Denied(denied::explain(Need::Smaps, &error)),
        Ok(_) => AttachError::Marks(unfit),
    })?;
    ranges.retain(|range| range.len >= SMALLEST);
    if ranges.is_empty() {
        return Err(match shared {
            _ if !Path::new("/sys/kernel/mm/ksm").exists() => AttachError::NoKsm,
            Some((len, name)) if len >= SMALLEST => AttachError::Shared { name, mib: len >> 20 },
            _ => AttachError::Nothing,
        });
    }
    let mut files = Vec::new();
    ranges.retain(|&range| probe_file(range).map(|sticky| files.push((range, sticky))).is_err());
    if files.len() > 1 {
        return Err(AttachError::Files(files.len()));
    }
    if files.iter().any(|(_, sticky)| !sticky.dont_fork) {
        return Err(AttachError::Inherited);
    }
    for &range in &ranges {
        let unfit = |error| AttachError::Unfit { mib: range.len >> 20, start: range.start, error };
        if !probe(range, Ksm::Marked, &[]).map_err(unfit)?.sticky.dont_fork {
            return Err(AttachError::Inherited);
        }
    }
    Ok(Fit { ranges, file: files.pop() })
}

/// Whether the daemon can be reached from within this process.
fn check_socket(socket: &Path) -> Result<(), AttachError> {
    match Conn::connect(socket).and_then(Peer::of) {
        Ok(peer) if is_trusted(peer.uid) => Ok(()),
        Ok(peer) => Err(AttachError::Socket(socket.into(), std::io::Error::other(LinkError::Peer(peer.uid)))),
        Err(error) if error.kind() == std::io::ErrorKind::PermissionDenied => {
            Err(AttachError::Denied(denied::explain(Need::Socket(socket), &error)))
        }
        Err(error) => Err(AttachError::Socket(socket.into(), error)),
    }
}

/// Whether the host has room for what becomes pages of its own: what KSM has merged of this
/// process, and what is loaded.
fn check_room(ranges: &[Range], file: Option<(Range, Sticky)>) -> Result<(), AttachError> {
    let merged = read_to_string("/proc/self/ksm_merging_pages").ok().and_then(|text| text.trim().parse().ok());
    // Kernels before 5.19 do not say.
    let most = ranges.iter().map(|range| range.len as u64).sum();
    let needed = merged.map_or(most, |pages: u64| pages * PAGE_SIZE as u64);
    let available = procfs::meminfo().map_or(u64::MAX, |memory| memory.available_kib << 10);
    if needed > 0 && needed + RESERVE > available {
        return Err(AttachError::KsmMerged { needed: needed >> 20, available: available >> 20 });
    }
    let loaded = file.map_or(0, |(range, _)| range.len as u64);
    if loaded > 0 && needed + loaded + RESERVE > available {
        return Err(AttachError::Room { needed: (needed + loaded) >> 20, available: available >> 20 });
    }
    Ok(())
}

fn take_all(ranges: &[Range], file: Option<(Range, Sticky)>) -> Result<String, AttachError> {
    let mut text = String::new();
    for &range in ranges {
        advise(range, libc::MADV_UNMERGEABLE).map_err(AttachError::KsmKeeps)?;
        let region = mark::take(range)?;
        let comma = if text.is_empty() { "" } else { ", " };
        let _ = write!(text, "{comma}region {region}: {} MiB at {:#x}", range.len >> 20, range.start);
    }
    if let Some((range, sticky)) = file {
        // SAFETY: [`attach`] comes here only if the program stands still, and [`fit`] has seen one
        // private mapping.
        unsafe { loading::replace(range, sticky) }?;
        let comma = if text.is_empty() { "" } else { ", " };
        let _ = write!(text, "{comma}{} MiB at {:#x} that are being loaded", range.len >> 20, range.start);
    }
    Ok(text)
}

/// Ends the agent, and gives the kernel its marks back. What has merged by now stays guarded.
fn undo(ranges: &[Range]) {
    set_phase(Phase::Ended);
    let mut state = STATE.lock();
    state.end();
    for &range in ranges {
        let pieces = state.regions.pieces(range);
        let has_merged = |(id, run): &(_, _)| state.regions.get(*id).is_some_and(|region| region.mapped.any(*run));
        if !pieces.iter().any(has_merged) {
            pieces.into_iter().for_each(|(id, run)| state.give_up(id, run));
            let _ = advise(range, libc::MADV_MERGEABLE);
        }
    }
}

fn advise(range: Range, advice: i32) -> Result<(), rustix::io::Errno> {
    // SAFETY: the advice changes no bytes and no access. The range was mapped when it was looked
    // at; of a range that is not the kernel refuses it.
    unsafe { raw::madvise(range.start, range.len, advice) }.map(drop)
}
