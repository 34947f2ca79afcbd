//! The memory of a clone is its snapshot's from the beginning.
//!
//! `pageone snapshot run --merge` has read the snapshot's RAM into sealed memfds, as long as a
//! segment of the store each. QEMU inherits them, with a list of which pages lie where ([`Part`]),
//! beside the empty file that it maps for its RAM ([`private`](crate::intercept::private)).
//! Mappings of the segments are put into the untouched memory in that file's place: each page that
//! is not zeros is merged from the beginning, and is copied when the guest writes to it. What
//! cannot be mapped is copied.
//!
//! Until QEMU marks the memory, it is [retained](crate::runtime::state::retained): what QEMU
//! discards reads as zeros. Only then it is a region whose pages are merged, and the agent
//! connects: nobody sees half a guest. The daemon takes the segments into its store, and finds in
//! the kernel's tables which frames the region maps, as after its restart.
//!
//! What cannot be mapped is copied.

#![allow(unsafe_code)] // Maps over the program's memory, and takes descriptors by their numbers.

use std::fs::File;
use std::io::{self, Write};
use std::os::fd::{AsFd, BorrowedFd, FromRawFd, OwnedFd, RawFd};
use std::os::unix::fs::FileExt;
use std::sync::atomic::Ordering;
use std::sync::{Mutex, PoisonError};

use kmem::range::Range;
use kmem::{PAGE_SIZE, memfd, procfs};
use rustix::io::{Errno, FdFlags, fcntl_setfd};
use wire::{Part, SEGMENT_PAGES};

use crate::runtime::lifecycle::LOADING;
use crate::runtime::lock::Blocked;
use crate::runtime::log;
use crate::runtime::state::STATE;
use crate::runtime::state::State;
use crate::runtime::state::region::Sticky;
use crate::runtime::state::segments::Accepted;
use crate::service::start;
use crate::window::gate;

/// Mappings that are made at most are this part of those that the program may have. The others are
/// left to the program, and to merging.
const SHARE: usize = 4;

/// What the memory is made of, once.
static SOURCE: Mutex<Option<Source>> = Mutex::new(None);

/// The snapshot's RAM, and a pipe that gets a byte when it is in place.
struct Source {
    parts: File,
    segments: Vec<OwnedFd>,
    tell: File,
}

/// Reads the descriptors' numbers from the environment.
pub(super) fn at_load() {
    let named = std::env::var(wire::ENV_SNAPSHOT_LOAD).ok();
    let numbers =
        named.as_deref().and_then(|text| text.split(',').map(|number| number.parse::<RawFd>().ok()).collect());
    let Some(numbers) = numbers.filter(|numbers: &Vec<RawFd>| numbers.iter().all(|&number| number > 2)) else { return };
    // In a program that this one starts the numbers are other files.
    //
    // SAFETY: libraries are loaded by one thread, before the program runs.
    unsafe { std::env::remove_var(wire::ENV_SNAPSHOT_LOAD) };
    // SAFETY: the program that started this one has opened them for the agent alone. If one is not
    // open, each use of it fails.
    let mut all: Vec<OwnedFd> = numbers.into_iter().map(|number| unsafe { OwnedFd::from_raw_fd(number) }).collect();
    if all.len() >= 2 && all.iter().all(|fd| fcntl_setfd(fd, FdFlags::CLOEXEC).is_ok()) {
        let segments = all.split_off(2);
        let [parts, tell] = [1, 0].map(|at| File::from(all.remove(at)));
        *SOURCE.lock().unwrap_or_else(PoisonError::into_inner) = Some(Source { parts, segments, tell });
    } else {
        std::mem::forget(all);
    }
}

/// Gives memory the bytes of the snapshot, once.
///
/// # Safety
///
/// The range is private, anonymous memory that was mapped just now, and that nobody knows but the
/// caller. It was mapped with these flags.
pub(super) unsafe fn begin(range: Range, flags: i32) {
    let source = SOURCE.lock().unwrap_or_else(PoisonError::into_inner).take();
    let Some(Source { parts, segments, mut tell }) = source else { return };
    let _signals = Blocked::all();
    // The agent connects when the memory is marked.
    LOADING.store(true, Ordering::Release);
    let bytes = if start::start(None).is_ok() { Bytes::Mapped } else { Bytes::Copied };
    let sticky = Sticky { no_reserve: flags & libc::MAP_NORESERVE != 0, ..Sticky::default() };
    let placed = read_parts(&parts, range, segments.len()).and_then(|parts| {
        // SAFETY: the contract is the same.
        unsafe { place(&mut STATE.lock(), range, sticky, &parts, segments, bytes) }
    });
    match placed {
        Ok(mapped) => log::line(format_args!("{mapped} of {} pages are a snapshot's", range.pages())),
        Err(why) => end(&why),
    }
    // The program that started this one must know that this library does it.
    let _ = tell.write_all(b"L");
}

fn read_parts(file: &File, range: Range, segments: usize) -> io::Result<Vec<Part>> {
    let mut bytes = vec![0; usize::try_from(file.metadata()?.len()).map_err(io::Error::other)?];
    // Other clones have the same open file, and its offset.
    file.read_exact_at(&mut bytes, 0)?;
    let (pages, slots) = (u32::try_from(range.pages()), u32::try_from(segments * SEGMENT_PAGES as usize));
    let parts = pages.ok().zip(slots.ok()).and_then(|(pages, slots)| wire::decode_parts(&bytes, pages, slots));
    parts.ok_or_else(|| io::ErrorKind::InvalidData.into())
}

/// Ends the program: it would see zeros where its memory was.
fn end(why: &io::Error) -> ! {
    let _ = writeln!(io::stderr(), "pageone-agent: the snapshot's memory cannot be had, and the guest ends: {why}");
    std::process::abort();
}

/// How memory gets the bytes of a snapshot.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Bytes {
    /// Segments are mapped, as far as they can be.
    Mapped,
    Copied,
}

/// Gives the range the bytes of the segments' parts. Returns how many pages are mapped.
///
/// # Safety
///
/// The range is private, anonymous memory that nobody has touched, and that nobody knows but the
/// caller.
unsafe fn place(
    state: &mut State,
    range: Range,
    sticky: Sticky,
    parts: &[Part],
    segments: Vec<OwnedFd>,
    bytes: Bytes,
) -> io::Result<usize> {
    let maps = bytes == Bytes::Mapped;
    let mut room = if maps { procfs::max_map_count().unwrap_or_default() / SHARE } else { 0 };
    if maps {
        state.regions.retain(range, sticky);
    }
    let mut held = Vec::with_capacity(segments.len());
    for fd in &segments {
        let id = memfd::identity(fd)?.ino;
        held.push(maps && matches!(state.segments.accept(id, fd.try_clone()?), Ok(Accepted::Held)));
    }
    let mut mapped = 0;
    for &Part { run, slot } in parts {
        let mut done = 0;
        while done < run.len {
            let (at, first) = ((slot + done) / SEGMENT_PAGES, (slot + done) % SEGMENT_PAGES);
            let len = (run.len - done).min(SEGMENT_PAGES - first);
            let fd = segments.get(at as usize).ok_or(io::ErrorKind::InvalidData)?.as_fd();
            let to = Range::new(range.start + (run.page + done).index() * PAGE_SIZE, len as usize * PAGE_SIZE);
            let from = u64::from(first) * PAGE_SIZE as u64;
            // SAFETY: by the contract nobody relies on the zeros that are there, and the part lies
            // in the range. The file cannot shrink.
            let is_there = held[at as usize] && room > 0 && unsafe { gate::map_frames(fd, to, from) }.is_ok();
            if is_there {
                room -= 1;
                mapped += len as usize;
            } else {
                copy(fd, to, from)?;
            }
            done += len;
        }
    }
    Ok(mapped)
}

/// Copies bytes of a file to memory, if all of it is mapped.
fn copy(fd: BorrowedFd<'_>, to: Range, mut from: u64) -> io::Result<()> {
    let mut left = to;
    while left.len > 0 {
        let place = (left.start as *mut std::mem::MaybeUninit<u8>, left.len);
        // SAFETY: by the contract of `place` nobody else knows the memory, so it is this slice's
        // alone. Where it is not mapped the kernel says so (EFAULT).
        let place = unsafe { std::slice::from_raw_parts_mut(place.0, place.1) };
        match rustix::io::pread(fd, place, from) {
            Ok((read, _)) if !read.is_empty() => {
                let read = read.len();
                (left, from) = (Range::new(left.start + read, left.len - read), from + read as u64);
            }
            Ok(_) => return Err(io::ErrorKind::UnexpectedEof.into()),
            Err(Errno::INTR) => {}
            Err(error) => return Err(error.into()),
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests;
