//! What the program does to managed memory itself.
//!
//! Each function gets a call that overlaps managed memory, makes it safe under the lock, makes it,
//! and keeps the tables true. The rule: a call that the agent does not understand fully finds plain
//! anonymous memory, unmerged and given back.
//!
//! Not seen: calls that bypass the C library. The userfaultfd events tell of `munmap` and `mremap`
//! among these, after the fact. (`UFFD_FEATURE_EVENT_REMOVE` is not used: our own `MADV_DONTNEED`,
//! under the lock, would wait for it to be read.) Not kept for parts that become anonymous memory
//! again: a NUMA policy set with `mbind`.

#![allow(unsafe_code)] // Passes the program's system calls on.

use crate::runtime::regions::Pages;
use crate::runtime::sabotage::{self, Sabotage};
use crate::runtime::state::{STATE, State, wake};
use crate::window::Users;
use kmem::PAGE_SIZE;
use kmem::range::Range;
use kmem::raw::{self, Answer};
use rustix::io::Errno;
use std::ffi::c_int;
use wire::{RegionId, ToDaemon};

/// Not in the `libc` crate yet (include/uapi/asm-generic/mman-common.h).
const MADV_GUARD_REMOVE: c_int = 103;

type Pieces = Vec<(RegionId, Pages)>;

/// The pages that a call with these arguments is about; `None` if the kernel will refuse it anyway.
pub fn whole_pages(start: usize, len: usize) -> Option<Range> {
    let len = len.checked_next_multiple_of(PAGE_SIZE)?;
    (start.is_multiple_of(PAGE_SIZE) && len > 0 && start.checked_add(len).is_some()).then_some(Range::new(start, len))
}

/// `madvise` over managed memory, except `MADV_MERGEABLE`.
///
/// # Safety
/// As for the call.
pub unsafe fn madvise(start: usize, len: usize, advice: c_int) -> Answer {
    // SAFETY: the caller's.
    let call = || unsafe { raw::madvise(start, len, advice) };
    let Some(range) = whole_pages(start, len) else { return call() };
    let mut state = STATE.lock();
    let pieces = state.pieces(range);
    let answer = match advice {
        _ if pieces.is_empty() => call(),
        libc::MADV_DONTNEED | libc::MADV_DONTNEED_LOCKED | libc::MADV_FREE => {
            let discarded = discard(&mut state, &pieces);
            discarded.and_then(|()| call())
        }
        // As on anonymous memory.
        libc::MADV_REMOVE => Err(Errno::INVAL),
        libc::MADV_HUGEPAGE if !keeps_huge_pages() => Ok(0),
        libc::MADV_HUGEPAGE | libc::MADV_NOHUGEPAGE => {
            for (id, pages) in pieces {
                if let Some(index) = whole_region(&state, id, pages) {
                    state.regions[index].sticky.huge = Some(advice == libc::MADV_HUGEPAGE);
                }
            }
            call()
        }
        libc::MADV_DONTFORK | libc::MADV_DOFORK | libc::MADV_DONTDUMP | libc::MADV_DODUMP => {
            remember(&mut state, pieces, advice).and_then(|()| call())
        }
        // These change nothing that a mapping of frames would answer differently.
        libc::MADV_NORMAL
        | libc::MADV_RANDOM
        | libc::MADV_SEQUENTIAL
        | libc::MADV_WILLNEED
        | libc::MADV_COLD
        | libc::MADV_PAGEOUT
        | libc::MADV_POPULATE_READ
        | libc::MADV_POPULATE_WRITE
        | libc::MADV_HWPOISON
        | libc::MADV_SOFT_OFFLINE
        | libc::MADV_KEEPONFORK
        | MADV_GUARD_REMOVE => call(),
        // MADV_UNMERGEABLE, MADV_COLLAPSE, MADV_WIPEONFORK, MADV_GUARD_INSTALL and whatever comes.
        _ => give_back(&mut state, pieces, Users::Active).and_then(|()| call()),
    };
    drop(state);
    wake();
    answer
}

/// `munmap` of managed memory.
///
/// # Safety
/// As for the call.
pub unsafe fn munmap(start: usize, len: usize) -> Answer {
    // SAFETY: the caller's.
    let call = || unsafe { raw::munmap(start, len) };
    let Some(range) = whole_pages(start, len) else { return call() };
    replace(range, call)
}

/// `mmap(MAP_FIXED)` over managed memory.
///
/// # Safety
/// As for the call.
pub unsafe fn mmap(start: usize, len: usize, prot: c_int, flags: c_int, fd: c_int, offset: i64) -> Answer {
    // SAFETY: the caller's.
    let call = || unsafe { raw::mmap(start, len, prot, flags, fd, offset) };
    let Some(range) = whole_pages(start, len) else { return call() };
    replace(range, call)
}

/// A call that takes the range's mappings away.
fn replace(range: Range, call: impl FnOnce() -> Answer) -> Answer {
    let mut state = STATE.lock();
    let pieces = state.pieces(range);
    let answer = replace_pieces(&mut state, pieces, call);
    drop(state);
    wake();
    answer
}

fn replace_pieces(state: &mut State, pieces: Pieces, call: impl FnOnce() -> Answer) -> Answer {
    for &(id, pages) in &pieces {
        if let Some(bytes) = state.bytes(id, pages) {
            state.untrack(bytes);
        }
    }
    let answer = call();
    for (id, pages) in pieces {
        if answer.is_ok() {
            if !sabotage::is_on(Sabotage::NoUnmapGuard) {
                state.give_up(id, pages);
            }
        } else if let Some(bytes) = state.bytes(id, pages) {
            state.track(bytes);
        }
    }
    answer
}

/// `mremap` from, or with `MREMAP_FIXED` onto, managed memory.
///
/// The kernel wants one mapping to grow (and before Linux 6.17 to move), so the memory is unmerged
/// in place. While it moves nobody may use it; where it may not move, others may, and growing is
/// refused as the kernel does for want of room.
///
/// # Safety
/// As for the call.
pub unsafe fn mremap(old: usize, old_len: usize, new_len: usize, flags: c_int, new: usize) -> Answer {
    // SAFETY: the caller's.
    let call = || unsafe { raw::mremap(old, old_len, new_len, flags, new) };
    let (Some(from), Some(new_len)) = (whole_pages(old, old_len), new_len.checked_next_multiple_of(PAGE_SIZE)) else {
        return call();
    };
    let is_fixed = flags & libc::MREMAP_FIXED != 0;
    if new_len < from.len && !is_fixed {
        // Unmaps the tail.
        return replace(Range::new(from.start + new_len, from.len - new_len), call);
    }
    let mut state = STATE.lock();
    let moved = state.pieces(from);
    let merged = |state: &State| {
        moved.iter().any(|&(id, pages)| state.position(id).is_some_and(|index| state.regions[index].mapped.any(pages)))
    };
    let ready = if sabotage::is_on(Sabotage::NoMremapUnmerge) {
        for &(id, pages) in &moved {
            if let Some(bytes) = state.bytes(id, pages) {
                state.untrack(bytes);
            }
            state.give_up(id, pages);
        }
        Ok(())
    } else if flags & libc::MREMAP_MAYMOVE == 0 && merged(&state) {
        Err(Errno::NOMEM)
    } else {
        give_back(&mut state, moved, Users::None)
    };
    let answer = ready.and_then(|()| {
        let target = if is_fixed { whole_pages(new, new_len) } else { None };
        let replaced = target.map_or(Vec::new(), |target| state.pieces(target));
        replace_pieces(&mut state, replaced, call)
    });
    drop(state);
    wake();
    answer
}

/// `mprotect` or `pkey_mprotect` of managed memory.
pub fn mprotect(start: usize, len: usize, prot: c_int, call: impl FnOnce() -> Answer) -> Answer {
    let range = whole_pages(start, len).filter(|_| prot != libc::PROT_READ | libc::PROT_WRITE);
    let Some(range) = range else { return call() };
    let mut state = STATE.lock();
    let pieces = state.pieces(range);
    let answer = give_back(&mut state, pieces, Users::Active).and_then(|()| call());
    drop(state);
    wake();
    answer
}

/// Unmerges parts and takes them out of management.
fn give_back(state: &mut State, pieces: Pieces, users: Users) -> Result<(), Errno> {
    for (id, pages) in pieces {
        state.unmerge(id, pages, users)?;
        if let Some(bytes) = state.bytes(id, pages) {
            state.untrack(bytes);
        }
        state.give_up(id, pages);
    }
    Ok(())
}

fn discard(state: &mut State, pieces: &Pieces) -> Result<(), Errno> {
    if sabotage::is_on(Sabotage::NoDontneedGuard) {
        return Ok(());
    }
    for &(id, pages) in pieces {
        state.discard(id, pages)?;
        state.outbox.push(ToDaemon::Discarded { region: id, run: pages.into() });
    }
    Ok(())
}

/// The region's index if these pages are all of it that is managed.
fn whole_region(state: &State, id: RegionId, pages: Pages) -> Option<usize> {
    state.position(id).filter(|&index| state.regions[index].managed() == [pages])
}

/// Advice that sticks to mappings is remembered for whole regions; a part that differs is given
/// back.
fn remember(state: &mut State, pieces: Pieces, advice: c_int) -> Result<(), Errno> {
    for (id, pages) in pieces {
        match whole_region(state, id, pages) {
            Some(index) => {
                let sticky = &mut state.regions[index].sticky;
                match advice {
                    libc::MADV_DONTFORK => sticky.dont_fork = true,
                    libc::MADV_DOFORK => sticky.dont_fork = false,
                    libc::MADV_DONTDUMP => sticky.dont_dump = true,
                    _ => sticky.dont_dump = false,
                }
            }
            None => give_back(state, vec![(id, pages)], Users::Active)?,
        }
    }
    Ok(())
}

fn keeps_huge_pages() -> bool {
    static KEEP: std::sync::OnceLock<bool> = std::sync::OnceLock::new();
    *KEEP.get_or_init(|| std::env::var_os(wire::ENV_HUGE_PAGES).is_some_and(|value| value == "keep"))
}
