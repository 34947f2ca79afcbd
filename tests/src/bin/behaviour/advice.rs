//! madvise(2) of every kind, mlock(2).

use std::ops::Range;

use crate::client::{Client, Pending};
use crate::ops::{idle, mapped, movable, readable, writable};
use crate::{finding, sys};

/// Not in the `libc` crate yet (include/uapi/asm-generic/mman-common.h).
const MADV_GUARD_INSTALL: i32 = 102;
const MADV_GUARD_REMOVE: i32 = 103;

fn advise(client: &Client, arena: usize, pages: &Range<usize>, advice: i32) -> sys::Answer {
    let answer = sys::madvise(client.arenas[arena].at(pages.start), pages.len(), advice);
    finding::about(&[advice as usize, answer.err().unwrap_or(0) as usize]);
    answer
}

/// Advice that makes pages zeros. Where it fails some of them may be.
fn discard(client: &mut Client, advice: i32) {
    let Some((arena, pages)) = client.choose(idle) else { return };
    let done = advise(client, arena, &pages, advice).is_ok();
    match done {
        true => client.arenas[arena].zeroed(pages.clone()),
        false => client.arenas[arena].set(pages.clone(), |meta| meta.either = true),
    }
    if client.random.once_in(2) {
        client.check(arena, pages, "discarded memory");
    }
}

pub(crate) fn dontneed(client: &mut Client) {
    discard(client, libc::MADV_DONTNEED);
}

pub(crate) fn dontneed_locked(client: &mut Client) {
    discard(client, libc::MADV_DONTNEED_LOCKED);
}

pub(crate) fn dontneed_many(client: &mut Client) {
    let Some((arena, pages)) = client.choose(idle) else { return };
    let ranges = [pages.start..pages.start + pages.len() / 2, pages.start + pages.len() / 2..pages.end];
    let places = ranges.clone().map(|part| (client.arenas[arena].at(part.start), part.len()));
    let answer = sys::madvise_process(&places, libc::MADV_DONTNEED);
    finding::about(&[answer.err().unwrap_or(0) as usize]);
    match answer {
        Ok(done) if done == crate::client::bytes(&pages) => client.arenas[arena].zeroed(pages.clone()),
        // Kernels before 6.13 refuse before they begin.
        Err(libc::EINVAL | libc::EBADF) if !has_locked() => {}
        _ => client.arenas[arena].set(pages.clone(), |meta| meta.either = true),
    }
    client.check(arena, pages, "memory discarded by process_madvise");
}

/// Whether some memory is locked: advice on it is refused in the middle. Locked memory that was
/// moved stays locked, so the kernel is asked.
fn has_locked() -> bool {
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let locked = status.lines().find_map(|line| line.strip_prefix("VmLck:"));
    locked.is_none_or(|size| size.trim() != "0 kB")
}

pub(crate) fn free(client: &mut Client) {
    let Some((arena, pages)) = client.choose(idle) else { return };
    let _ = advise(client, arena, &pages, libc::MADV_FREE);
    client.arenas[arena].set(pages, |meta| meta.either = true);
}

pub(crate) fn remove(client: &mut Client) {
    let Some((arena, pages)) = client.choose(idle) else { return };
    if advise(client, arena, &pages, libc::MADV_REMOVE).is_ok() {
        finding::report(format_args!("MADV_REMOVE succeeds"), client.arenas[arena].at(pages.start));
    }
    client.check(arena, pages, "memory that cannot be removed");
}

/// All of an arena in half of the calls: the agent knows such advice of whole regions only.
fn whole_or_part(client: &mut Client) -> Option<(usize, Range<usize>)> {
    let (arena, pages) = client.choose(mapped)?;
    if client.random.once_in(2) {
        return Some((arena, pages));
    }
    let all = client.arenas[arena].prefix(0..client.arenas[arena].pages, |meta| mapped(meta, 0));
    (!all.is_empty()).then_some((arena, all))
}

pub(crate) fn dontfork(client: &mut Client) {
    let Some((arena, pages)) = whole_or_part(client) else { return };
    let done = advise(client, arena, &pages, libc::MADV_DONTFORK).is_ok();
    // Where it fails some may be advised: children leave all of them alone.
    client.arenas[arena].set(pages, |meta| (meta.no_fork, meta.surely_no_fork) = (true, done));
}

pub(crate) fn dofork(client: &mut Client) {
    let Some((arena, pages)) = whole_or_part(client) else { return };
    client.arenas[arena].set(pages.clone(), |meta| meta.surely_no_fork = false);
    if advise(client, arena, &pages, libc::MADV_DOFORK).is_ok() {
        client.arenas[arena].set(pages, |meta| meta.no_fork = false);
    }
}

pub(crate) fn wipe(client: &mut Client) {
    let Some((arena, pages)) = client.choose(movable) else { return };
    match advise(client, arena, &pages, libc::MADV_WIPEONFORK) {
        Ok(_) => client.arenas[arena].set(pages, |meta| meta.wiped = true),
        // Copies that a device may write to stay in mappings of a file, which refuse this. Some
        // pages before these may have taken it.
        Err(_) => {
            let undone = advise(client, arena, &pages, libc::MADV_KEEPONFORK).is_ok();
            client.arenas[arena].set(pages, |meta| (meta.wiped, meta.no_fork) = (false, meta.no_fork || !undone));
        }
    }
}

pub(crate) fn keep(client: &mut Client) {
    let Some((arena, pages)) = client.choose(mapped) else { return };
    if advise(client, arena, &pages, libc::MADV_KEEPONFORK).is_ok() {
        client.arenas[arena].set(pages, |meta| meta.wiped = false);
    }
}

pub(crate) fn unmergeable(client: &mut Client) {
    if client.random.once_in(4) {
        let _ = sys::madvise(client.writers.start, crate::writers::PAGES, libc::MADV_UNMERGEABLE);
    }
    let Some((arena, pages)) = client.choose(mapped) else { return };
    let _ = advise(client, arena, &pages, libc::MADV_UNMERGEABLE);
    client.check(arena, pages, "memory that is mergeable no longer");
}

pub(crate) fn mergeable(client: &mut Client) {
    let _ = sys::madvise(client.writers.start, crate::writers::PAGES, libc::MADV_MERGEABLE);
    let Some((arena, _)) = client.choose(mapped) else { return };
    // Holes make the call fail for the rest, so each run is marked.
    for run in client.arenas[arena].runs(0..client.arenas[arena].pages, |meta| !meta.gone) {
        let _ = sys::madvise(client.arenas[arena].at(run.start), run.len(), libc::MADV_MERGEABLE);
    }
}

pub(crate) fn populate(client: &mut Client) {
    let write = client.random.once_in(2);
    let advice = if write { libc::MADV_POPULATE_WRITE } else { libc::MADV_POPULATE_READ };
    let Some((arena, pages)) = client.choose(if write { writable } else { readable }) else { return };
    if let Err(errno) = advise(client, arena, &pages, advice) {
        let may_fail = errno == libc::ENOMEM || errno == libc::EAGAIN;
        if !may_fail {
            finding::report(format_args!("populating fails: errno {errno}"), client.arenas[arena].at(pages.start));
        }
    }
    client.check(arena, pages, "populated memory");
}

pub(crate) fn collapse(client: &mut Client) {
    let Some((arena, pages)) = whole_or_part(client) else { return };
    let _ = advise(client, arena, &pages, libc::MADV_COLLAPSE);
    client.check(arena, pages, "collapsed memory");
}

pub(crate) fn huge(client: &mut Client) {
    let advice = if client.random.once_in(2) { libc::MADV_HUGEPAGE } else { libc::MADV_NOHUGEPAGE };
    let Some((arena, pages)) = whole_or_part(client) else { return };
    let _ = advise(client, arena, &pages, advice);
}

pub(crate) fn hint(client: &mut Client) {
    const HINTS: [i32; 8] = [
        libc::MADV_COLD,
        libc::MADV_PAGEOUT,
        libc::MADV_WILLNEED,
        libc::MADV_RANDOM,
        libc::MADV_SEQUENTIAL,
        libc::MADV_NORMAL,
        libc::MADV_DONTDUMP,
        libc::MADV_DODUMP,
    ];
    let advice = HINTS[client.random.below(HINTS.len() as u64) as usize];
    if client.random.once_in(4) {
        let _ = sys::madvise(client.writers.start, crate::writers::PAGES, advice);
    }
    let Some((arena, pages)) = whole_or_part(client) else { return };
    let _ = advise(client, arena, &pages, advice);
    client.check(arena, pages, "memory with a hint");
}

pub(crate) fn guard(client: &mut Client) {
    let Some((arena, pages)) = client.choose_most(64, |meta, now| idle(meta, now) && !meta.no_fork) else { return };
    match advise(client, arena, &pages, MADV_GUARD_INSTALL) {
        Ok(_) => client.arenas[arena].set(pages.clone(), |meta| meta.guard = true),
        // The kernel says so before it begins where it does not know the advice. Where some of the
        // pages are locked, those before them have guards.
        Err(libc::EINVAL | libc::EAGAIN) => {
            if advise(client, arena, &pages, MADV_GUARD_REMOVE).is_ok() {
                client.arenas[arena].set(pages.clone(), |meta| meta.either = true);
            }
            client.check(arena, pages, "memory without guards");
        }
        Err(errno) => finding::report(format_args!("no guards: errno {errno}"), client.arenas[arena].at(pages.start)),
    }
}

pub(crate) fn unguard(client: &mut Client) {
    let Some((arena, pages)) = client.choose(|meta, _| !meta.gone) else { return };
    for run in client.arenas[arena].runs(pages, |meta| meta.guard) {
        if advise(client, arena, &run, MADV_GUARD_REMOVE).is_ok() {
            client.arenas[arena].set(run.clone(), |meta| meta.guard = false);
            client.arenas[arena].zeroed(run.clone());
            client.check(arena, run, "memory that had guards");
        }
    }
}

pub(crate) fn lock(client: &mut Client) {
    let Some((arena, pages)) = client.choose(|meta, now| readable(meta, now) && !meta.no_write) else { return };
    let start = client.arenas[arena].at(pages.start);
    if sys::mlock(start, pages.len()).is_ok() {
        let due = client.later(5, 60);
        client.add(due, Pending::Lock { arena, pages: pages.clone() });
    }
    client.check(arena, pages, "locked memory");
}
