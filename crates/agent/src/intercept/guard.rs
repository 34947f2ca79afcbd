//! What the program itself does to managed memory.
//!
//! Each function gets a call that overlaps managed memory. Under the lock it makes the call safe,
//! makes it, and keeps the tables true. A call that the agent does not understand fully finds plain
//! anonymous memory, unmerged and given back. What may not be taken away ([`crate::window::gate`])
//! is retained: it leaves management in place, and the guards go on knowing it.
//!
//! Calls past the C library are not seen; the events of the tracking userfaultfd report `munmap`
//! and `mremap` afterwards. `UFFD_FEATURE_EVENT_REMOVE` is not used: the agent's own
//! `MADV_DONTNEED`, under the lock, would wait for its event. A NUMA policy (`mbind`) is lost on
//! parts that become anonymous memory again.

#![allow(unsafe_code)] // Passes the program's system calls on.

use std::env;
use std::ffi::c_int;
use std::sync::OnceLock;

use kmem::range::Range;
use kmem::raw::{self, Answer};
use kmem::{PAGE_SIZE, mm, procfs};
use rustix::io::Errno;
use wire::{ENV_HUGE_PAGES, HugePages, RegionId, Run, ToDaemon};

use crate::runtime::log;
use crate::runtime::sabotage::{self, Sabotage};
use crate::runtime::state::STATE;
use crate::runtime::state::State;
use crate::runtime::state::region::{Region, Sticky};
use crate::runtime::waker::WAKE;
use crate::window::unmerge::{self, Users, unmerge};

/// Not in the `libc` crate yet (include/uapi/asm-generic/mman-common.h).
const MADV_GUARD_INSTALL: c_int = 102;
const MADV_GUARD_REMOVE: c_int = 103;

type Pieces = Vec<(RegionId, Run)>;

/// The pages that a call with these arguments is about; `None` if the kernel refuses it anyway.
pub(crate) fn whole_pages(start: usize, len: usize) -> Option<Range> {
    let len = len.checked_next_multiple_of(PAGE_SIZE)?;
    (start.is_multiple_of(PAGE_SIZE) && len > 0 && start.checked_add(len).is_some()).then_some(Range::new(start, len))
}

/// Does something with the managed parts of a range, under the lock, and wakes the agent.
fn with_pieces(range: Range, guard: impl FnOnce(&mut State, Pieces) -> Answer) -> Answer {
    let mut state = STATE.lock();
    let pieces = state.regions.pieces(range);
    let answer = guard(&mut state, pieces);
    // With signals blocked: a handler that jumps away would leave the agent asleep.
    WAKE.wake();
    answer
}

/// `madvise` over managed memory, except `MADV_MERGEABLE`.
///
/// # Safety
///
/// The program makes this call, and has met its contract (madvise(2)): where the advice discards
/// memory, no code of the program relies on what the range holds.
pub(crate) unsafe fn madvise(start: usize, len: usize, advice: c_int) -> Answer {
    // SAFETY: this function's contract is that of the call.
    let call = || unsafe { raw::madvise(start, len, advice) };
    let Some(range) = whole_pages(start, len) else { return call() };
    with_pieces(range, |state, pieces| {
        // SAFETY: this function's contract is that of the call.
        let answer = unsafe { guard_advice(state, pieces, range, advice, call) };
        // With ENOMEM the kernel has advised on what is mapped.
        if matches!(answer, Ok(_) | Err(Errno::NOMEM)) {
            state.regions.advise_retained(range, |sticky| note_advice(sticky, advice));
        }
        answer
    })
}

/// Makes `madvise` over managed or retained memory safe, and calls it.
///
/// # Safety
///
/// The contract of [`madvise`] holds for the range and the advice.
unsafe fn guard_advice(
    state: &mut State,
    pieces: Pieces,
    range: Range,
    advice: c_int,
    call: impl Fn() -> Answer,
) -> Answer {
    match advice {
        libc::MADV_DONTNEED | libc::MADV_DONTNEED_LOCKED | libc::MADV_FREE => {
            if advice != libc::MADV_DONTNEED_LOCKED && (has_merged(state, &pieces) || is_retained(state, range)) {
                ask_whether_discarded(range)?;
            }
            // SAFETY: by the contract the program discards the range.
            let discarded = unsafe { discard(state, &pieces).and_then(|()| discard_retained(state, range)) };
            discarded.and_then(|()| call())
        }
        // As on anonymous memory.
        libc::MADV_REMOVE if !pieces.is_empty() || is_retained(state, range) => Err(Errno::INVAL),
        // What had guards reads as zeros afterwards, and not as a frame.
        MADV_GUARD_INSTALL => {
            // Kernels before 6.13 do not know the advice: then nothing may be discarded.
            // SAFETY: advice on no bytes changes nothing; madvise(2) answers whether it is known.
            unsafe { raw::madvise(0, 0, advice) }?;
            ask_whether_discarded(range)?;
            give_back(state, pieces, Users::Active)?;
            // SAFETY: by the contract the program discards the range.
            unsafe { discard_retained(state, range) }.and_then(|()| call())
        }
        _ if pieces.is_empty() => call(),
        libc::MADV_HUGEPAGE if !keeps_huge_pages() => Ok(0),
        libc::MADV_HUGEPAGE | libc::MADV_NOHUGEPAGE => {
            for (id, run) in pieces {
                if let Some(region) = whole_region(state, id, run) {
                    region.sticky.huge = Some(advice == libc::MADV_HUGEPAGE);
                }
            }
            call()
        }
        libc::MADV_DONTFORK | libc::MADV_DOFORK | libc::MADV_DONTDUMP | libc::MADV_DODUMP => {
            remember(state, pieces, advice).and_then(|()| call())
        }
        // On a mapping of frames these do what they do on anonymous memory.
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
        // MADV_UNMERGEABLE, MADV_COLLAPSE, MADV_WIPEONFORK, and all that is not known.
        _ => give_back(state, pieces, Users::Active).and_then(|()| call()),
    }
}

fn note_advice(sticky: &mut Sticky, advice: c_int) {
    match advice {
        libc::MADV_DONTFORK => sticky.dont_fork = true,
        libc::MADV_DOFORK => sticky.dont_fork = false,
        libc::MADV_DONTDUMP => sticky.dont_dump = true,
        libc::MADV_DODUMP => sticky.dont_dump = false,
        libc::MADV_HUGEPAGE if keeps_huge_pages() => sticky.huge = Some(true),
        libc::MADV_NOHUGEPAGE => sticky.huge = Some(false),
        _ => {}
    }
}

/// `munmap` of managed memory.
///
/// # Safety
///
/// The program makes this call: no code of the program uses the range afterwards.
pub(crate) unsafe fn munmap(start: usize, len: usize) -> Answer {
    // SAFETY: this function's contract is that of the call.
    let call = || unsafe { raw::munmap(start, len) };
    let Some(range) = whole_pages(start, len) else { return call() };
    with_pieces(range, |state, pieces| replace(state, pieces, range, call))
}

/// `mmap(MAP_FIXED)` over managed memory.
///
/// # Safety
///
/// The program makes this call: no code of the program uses what was mapped in the range.
pub(crate) unsafe fn mmap(start: usize, len: usize, prot: c_int, flags: c_int, fd: c_int, offset: i64) -> Answer {
    // SAFETY: this function's contract is that of the call.
    let call = || unsafe { raw::mmap(start, len, prot, flags, fd, offset) };
    let Some(range) = whole_pages(start, len) else { return call() };
    with_pieces(range, |state, pieces| replace(state, pieces, range, call))
}

/// Makes a call that takes the mappings of a range away, with some pieces in it.
///
/// One that fails may have taken them away: `mremap` unmaps the place that it moves to before it
/// knows whether it can (mremap(2), "BUGS").
fn replace(state: &mut State, pieces: Pieces, range: Range, call: impl FnOnce() -> Answer) -> Answer {
    untrack(state, &pieces);
    let answer = call();
    for gone in if answer.is_ok() { vec![range] } else { mm::holes(range) } {
        state.regions.forget_retained(gone);
        if !sabotage::is_on(Sabotage::NoUnmapGuard) {
            state.regions.pieces(gone).into_iter().for_each(|(id, run)| state.give_up(id, run));
        }
    }
    if answer.is_err() {
        for bytes in state.regions.managed_bytes(range) {
            state.uffds.track(bytes);
        }
    }
    answer
}

/// `mremap` from managed memory, or with `MREMAP_FIXED` onto it.
///
/// The kernel wants one mapping to grow (and before Linux 6.17 to move), so the memory is unmerged
/// in place, while no thread may use it. Where it may not move, growing is refused with `ENOMEM`,
/// and so is a call on copies to which a device may be writing: they cannot be unmerged.
///
/// # Safety
///
/// The program makes this call: no code of the program uses the old range where the call moves or
/// shortens it, nor what was mapped in the new one.
pub(crate) unsafe fn mremap(old: usize, old_len: usize, new_len: usize, flags: c_int, new: usize) -> Answer {
    // SAFETY: this function's contract is that of the call.
    let call = || unsafe { raw::mremap(old, old_len, new_len, flags, new) };
    let (Some(from), Some(new_len)) = (whole_pages(old, old_len), new_len.checked_next_multiple_of(PAGE_SIZE)) else {
        return call();
    };
    let is_fixed = flags & libc::MREMAP_FIXED != 0;
    if new_len < from.len && !is_fixed {
        // The call unmaps the tail.
        let tail = Range::new(from.start + new_len, from.len - new_len);
        return with_pieces(tail, |state, pieces| replace(state, pieces, tail, call));
    }
    with_pieces(from, |state, moved| {
        if new_len > from.len && is_retained(state, from) {
            // The mapping of a segment would grow: by other frames.
            return Err(Errno::NOMEM);
        }
        prepare_move(state, moved, flags)?;
        let target = if is_fixed { whole_pages(new, new_len) } else { None };
        let retained = state.regions.retained().within(from);
        let target = target.unwrap_or(Range::new(0, 0));
        let replaced = state.regions.pieces(target);
        let answer = replace(state, replaced, target, call);
        if let Ok(place) = answer {
            // What was retained there before has moved, and stays retained. Where its old place
            // stays mapped, that reads as zeros.
            if flags & libc::MREMAP_DONTUNMAP != 0 {
                // SAFETY: by the contract no code of the program uses the old range.
                unsafe { discard_retained(state, from) }?;
            }
            state.regions.forget_retained(from);
            for (part, sticky) in retained {
                let moved = Range::new(place + (part.start - from.start), part.len);
                state.regions.retain(moved, sticky);
            }
        }
        answer
    })
}

/// Makes pieces that may be about to move plain memory, and gives them back.
fn prepare_move(state: &mut State, moved: Pieces, flags: c_int) -> Result<(), Errno> {
    if sabotage::is_on(Sabotage::NoMremapUnmerge) {
        untrack(state, &moved);
        moved.into_iter().for_each(|(id, run)| state.give_up(id, run));
        return Ok(());
    }
    if flags & libc::MREMAP_MAYMOVE == 0 && has_merged(state, &moved) {
        return Err(Errno::NOMEM);
    }
    give_back(state, moved, Users::None)
}

/// `mprotect` or `pkey_mprotect` of managed memory.
pub(crate) fn mprotect(start: usize, len: usize, prot: c_int, call: impl FnOnce() -> Answer) -> Answer {
    let range = whole_pages(start, len).filter(|_| prot != libc::PROT_READ | libc::PROT_WRITE);
    let Some(range) = range else { return call() };
    with_pieces(range, |state, pieces| give_back(state, pieces, Users::Active).and_then(|()| call()))
}

/// Takes memory out of management that a new thread has its stack or its number in.
///
/// The kernel clears the number when the thread ends, and does not wait for userfaultfd any more.
/// In a window that would fail, and a thread that joins this one would never return.
pub(crate) fn leave_to_thread(start: usize, len: usize) -> Answer {
    let from = start / PAGE_SIZE * PAGE_SIZE;
    let Some(range) = whole_pages(from, len + (start - from)) else { return Ok(0) };
    with_pieces(range, |state, pieces| give_back(state, pieces, Users::Active).map(|()| 0))
}

/// Whether a request of ioctl(2) maps memory for a device. The kernel pins it without waiting for
/// userfaultfd (`pin_user_pages_remote`): it would fail on pages of an open window.
pub(crate) fn maps_for_device(request: usize) -> bool {
    /// `_IO(';', 100 + 13)` (include/uapi/linux/vfio.h).
    const VFIO_IOMMU_MAP_DMA: usize = 0x3b71;
    /// `_IO(';', 0x85)` (include/uapi/linux/iommufd.h).
    const IOMMU_IOAS_MAP: usize = 0x3b85;
    request == VFIO_IOMMU_MAP_DMA || request == IOMMU_IOAS_MAP
}

/// Makes a call while no window is open, and none opens.
pub(crate) fn without_window(call: impl FnOnce() -> Answer) -> Answer {
    let _state = STATE.lock();
    call()
}

/// Whether a request of ioctl(2) registers memory with a userfaultfd (`UFFDIO_REGISTER`).
pub(crate) fn registers(request: usize) -> bool {
    /// `_IOWR(0xaa, 0, struct uffdio_register)` (include/uapi/linux/userfaultfd.h).
    const UFFDIO_REGISTER: usize = 0xc020_aa00;
    request == UFFDIO_REGISTER
}

/// Registers memory with a userfaultfd of the program's: QEMU does so where a guest arrives by
/// postcopy, and for background snapshots. Memory has one userfaultfd at a time (`EBUSY`), so the
/// managed parts leave management for good. QEMU would end otherwise, and the guest with it.
///
/// # Safety
///
/// The program makes this call: `argument` is the request's, a `struct uffdio_register`.
pub(crate) unsafe fn register(argument: *const [u64; 2], call: impl Fn() -> Answer) -> Answer {
    let answer = call();
    if answer != Err(Errno::BUSY) {
        return answer;
    }
    // SAFETY: the kernel has read the argument, which begins with a start and a length, before it
    // looked at the memory. The program's structure is aligned for its 64-bit fields.
    let [start, len] = unsafe { argument.read() };
    let Some(range) = whole_pages(start as usize, len as usize) else { return answer };
    with_pieces(range, |state, pieces| {
        if pieces.is_empty() {
            return answer;
        }
        log::line(format_args!(
            "the program registers memory with a userfaultfd of its own: it is not merged any more"
        ));
        give_back(state, pieces, Users::Active)?;
        call()
    })
}

/// Takes pieces away from tracking. That fails only where nothing is mapped.
fn untrack(state: &State, pieces: &[(RegionId, Run)]) {
    for &(id, run) in pieces {
        if let Some(bytes) = state.regions.bytes(id, run) {
            let _ = state.uffds.untrack(bytes);
        }
    }
}

/// Unmerges pieces and takes them out of management, or retains what a device may be writing to.
fn give_back(state: &mut State, pieces: Pieces, users: Users) -> Result<(), Errno> {
    for (id, run) in pieces {
        unmerge(state, id, run, users)?;
        untrack(state, &[(id, run)]);
        state.leave(id, run, None);
    }
    Ok(())
}

fn has_merged(state: &State, pieces: &[(RegionId, Run)]) -> bool {
    pieces.iter().any(|&(id, run)| state.regions.get(id).is_some_and(|region| region.mapped.any(run)))
}

/// The kernel's error if it refuses to discard a part of the range, such as locked memory.
pub(super) fn ask_whether_discarded(range: Range) -> Result<(), Errno> {
    // SAFETY: this advice changes no bytes. The kernel refuses it on the same mappings.
    match unsafe { raw::madvise(range.start, range.len, libc::MADV_COLD) } {
        Ok(_) | Err(Errno::NOMEM) => Ok(()),
        Err(error) => Err(error),
    }
}

/// Whether some of the range left management and may still map frames.
fn is_retained(state: &State, range: Range) -> bool {
    !state.regions.retained().within(range).is_empty()
}

/// Makes retained parts of a range untouched memory, with the protection that they have.
///
/// # Safety
///
/// The program discards the range: it relies on nothing that it holds.
unsafe fn discard_retained(state: &mut State, range: Range) -> Result<(), Errno> {
    let parts = state.regions.retained().within(range);
    if parts.is_empty() || sabotage::is_on(Sabotage::NoDontneedGuard) {
        return Ok(());
    }
    let mut mappings = Vec::new();
    // The program may have protected them past the C library.
    let listed = procfs::for_each_map(None, |line| {
        for (part, sticky) in &parts {
            mappings.extend(line.range.intersect(part).map(|place| (place, line.perms, *sticky)));
        }
    });
    listed.map_err(|_| Errno::NOMEM)?;
    for (place, perms, sticky) in mappings {
        // SAFETY: this function's contract is that of the call.
        unsafe { unmerge::discard_retained(place, perms, sticky) }?;
        state.regions.forget_retained(place);
    }
    Ok(())
}

/// Whether some of the range is managed, or may map frames: no `MADV_MERGEABLE` for the kernel.
pub(crate) fn is_managed(start: usize, len: usize) -> bool {
    let Some(range) = whole_pages(start, len) else { return false };
    let state = STATE.lock();
    !state.regions.pieces(range).is_empty() || is_retained(&state, range)
}

/// Makes merged pages among the pieces untouched; the daemon hears that all are discarded.
///
/// # Safety
///
/// The program discards the pieces: it relies on nothing that they hold.
unsafe fn discard(state: &mut State, pieces: &[(RegionId, Run)]) -> Result<(), Errno> {
    if sabotage::is_on(Sabotage::NoDontneedGuard) {
        return Ok(());
    }
    for &(id, run) in pieces {
        // SAFETY: this function's contract is that of the call.
        unsafe { unmerge::discard(state, id, run) }?;
        state.regions.get_mut(id).into_iter().for_each(|region| region.given_back.forget(run));
        state.uplink.outbox.push(ToDaemon::Discarded { region: id, run });
    }
    Ok(())
}

/// The region, if these pages are all of it that is managed.
fn whole_region(state: &mut State, id: RegionId, run: Run) -> Option<&mut Region> {
    state.regions.get_mut(id).filter(|region| region.managed() == [run])
}

/// Remembers advice that belongs to mappings, for whole regions. A part that differs is given back.
fn remember(state: &mut State, pieces: Pieces, advice: c_int) -> Result<(), Errno> {
    for (id, run) in pieces {
        match whole_region(state, id, run) {
            Some(region) => note_advice(&mut region.sticky, advice),
            None => give_back(state, vec![(id, run)], Users::Active)?,
        }
    }
    Ok(())
}

/// Whether the program's `MADV_HUGEPAGE` takes effect.
fn keeps_huge_pages() -> bool {
    static KEEP: OnceLock<bool> = OnceLock::new();
    let is_set = || env::var_os(ENV_HUGE_PAGES).is_some_and(|policy| policy == HugePages::Keep.name());
    *KEEP.get_or_init(is_set)
}
