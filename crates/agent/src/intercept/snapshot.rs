//! The memory of a clone is its snapshot's from the beginning.
//!
//! `pageone snapshot run --merge` has read the snapshot's RAM into memfds that nobody can change
//! any more, as long as a segment of the store each. QEMU inherits them, beside the empty file that
//! it maps for its RAM ([`private`](crate::intercept::private)). The private memory in that file's
//! place is untouched, and nobody knows it yet. Mappings of the segments are put there: each page
//! that is not zeros is merged from the beginning, and is copied when the guest writes to it.
//!
//! Until QEMU marks the memory, it is [retained](crate::runtime::state::retained): what QEMU
//! discards reads as zeros. Then it is a region whose pages are merged. The agent connects to the
//! daemon only now: nobody sees half a guest. The daemon takes the segments into its store, and
//! finds in the kernel's tables which frames the region maps, as after its restart.
//!
//! What cannot be mapped is copied.

#![allow(unsafe_code)] // Maps over the program's memory, and takes descriptors by their numbers.

use std::fs::File;
use std::io::{self, Write};
use std::ops::Range as Span;
use std::os::fd::{AsFd, BorrowedFd, FromRawFd, OwnedFd, RawFd};
use std::sync::atomic::Ordering;
use std::sync::{Mutex, PoisonError};

use kmem::range::Range;
use kmem::{PAGE_SIZE, memfd, procfs};
use rustix::io::{Errno, FdFlags, fcntl_setfd};
use wire::SEGMENT_PAGES;

use crate::runtime::globals::{LOADING, STATE};
use crate::runtime::lock::Blocked;
use crate::runtime::log;
use crate::runtime::state::State;
use crate::runtime::state::region::Sticky;
use crate::runtime::state::segments::Accepted;
use crate::service::start;
use crate::window::gate;

/// Bytes of a segment.
const SEGMENT_LEN: usize = SEGMENT_PAGES as usize * PAGE_SIZE;
/// Pages of zeros that are mapped with what is around them: two mappings less for at most so many
/// pages, of which each takes memory only when it is read.
const GAP: u64 = 8;
/// Mappings that are made at most are this part of those that the program may have. The others are
/// left to the program, and to merging.
const SHARE: usize = 4;

/// What the memory is made of, once.
static SOURCE: Mutex<Option<Source>> = Mutex::new(None);

/// The snapshot's RAM, and a pipe that gets a byte when it is in place.
struct Source {
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
    if all.iter().all(|fd| fcntl_setfd(fd, FdFlags::CLOEXEC).is_ok()) {
        let tell = all.remove(0).into();
        *SOURCE.lock().unwrap_or_else(PoisonError::into_inner) = Some(Source { segments: all, tell });
    } else {
        std::mem::forget(all);
    }
}

/// Gives memory the bytes of the snapshot, once.
///
/// # Safety
///
/// The range is private, anonymous memory that was mapped just now, and that nobody knows but the
/// caller.
pub(super) unsafe fn begin(range: Range, no_reserve: bool) {
    let source = SOURCE.lock().unwrap_or_else(PoisonError::into_inner).take();
    let Some(Source { segments, mut tell }) = source else { return };
    let _signals = Blocked::all();
    // The agent connects when the memory is marked.
    LOADING.store(true, Ordering::Release);
    let runs = start::start(None).is_ok();
    let sticky = Sticky { no_reserve, ..Sticky::default() };
    // SAFETY: the contract is the same.
    let placed = unsafe { place(&mut STATE.lock(), range, sticky, segments, runs) };
    match placed {
        Ok(mapped) => log::line(format_args!("{} of {} pages are a snapshot's", mapped, range.pages())),
        Err(why) => end(&why),
    }
    // The program that started this one must know that this library does it.
    let _ = tell.write_all(b"L");
}

/// Ends the program: it would see zeros where its memory was.
fn end(why: &io::Error) -> ! {
    let _ = writeln!(io::stderr(), "pageone-agent: the snapshot's memory cannot be had, and the guest ends: {why}");
    std::process::abort();
}

/// Maps the segments over the range one behind the other, or copies them if `maps` is false.
/// Returns how many pages are mapped.
///
/// # Safety
///
/// The range is private, anonymous memory that nobody has touched, and that nobody knows but the
/// caller.
unsafe fn place(
    state: &mut State,
    range: Range,
    sticky: Sticky,
    segments: Vec<OwnedFd>,
    maps: bool,
) -> io::Result<usize> {
    let mut room = if maps { procfs::max_map_count().unwrap_or_default() / SHARE } else { 0 };
    if maps {
        state.regions.retain(range, sticky);
    }
    let mut mapped = 0;
    for (at, fd) in (0..).zip(segments) {
        let start = range.start + at * SEGMENT_LEN;
        let len = range.end().saturating_sub(start).min(SEGMENT_LEN);
        let parts = joined(memfd::written_parts(&fd, len as u64)?);
        let id = memfd::identity(&fd)?.ino;
        let is_held = maps && matches!(state.segments.accept(id, fd.try_clone()?), Ok(Accepted::Kept));
        for part in parts {
            let to = Range::new(start + part.start as usize, (part.end - part.start) as usize);
            // SAFETY: by the contract nobody relies on the zeros that are there. The file cannot
            // shrink.
            let is_there = is_held && room > 0 && unsafe { gate::map_frames(fd.as_fd(), to, part.start) }.is_ok();
            if is_there {
                room -= 1;
                mapped += to.pages();
            } else {
                copy(fd.as_fd(), to, part.start)?;
            }
        }
    }
    Ok(mapped)
}

/// Parts with few pages of zeros between them are one.
fn joined(parts: Vec<Span<u64>>) -> Vec<Span<u64>> {
    let mut all: Vec<Span<u64>> = Vec::new();
    for part in parts {
        match all.last_mut() {
            Some(last) if part.start - last.end <= GAP * PAGE_SIZE as u64 => last.end = part.end,
            _ => all.push(part),
        }
    }
    all
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
