//! munmap(2), mmap(2), mremap(2), mprotect(2).

use std::ops::Range;

use crate::arena::Meta;
use crate::client::{Client, Pending};
use crate::ops::{idle, mapped, movable};
use crate::{finding, sys};

/// A call that cannot fail did.
fn failed(client: &Client, call: &str, arena: usize, pages: &Range<usize>, errno: i32) {
    // The number of mappings is limited, and the kernel may be out of them for a moment.
    if errno != libc::ENOMEM {
        finding::report(format_args!("{call} fails: errno {errno}"), client.arenas[arena].at(pages.start));
    }
}

pub(crate) fn unmap(client: &mut Client) {
    let Some((arena, pages)) = client.choose(idle) else { return };
    match sys::munmap(client.arenas[arena].at(pages.start), pages.len()) {
        Ok(_) => client.arenas[arena].set(pages, |meta| *meta = Meta { gone: true, ..Meta::default() }),
        Err(errno) => failed(client, "munmap", arena, &pages, errno),
    }
}

pub(crate) fn map(client: &mut Client) {
    let arena = client.random.below(client.arenas.len() as u64) as usize;
    for pages in client.arenas[arena].runs(0..client.arenas[arena].pages, |meta| meta.gone) {
        finding::about(&[arena, pages.start, pages.len()]);
        // Something else may be there by now.
        if sys::map(client.arenas[arena].at(pages.start), pages.len(), libc::MAP_FIXED_NOREPLACE).is_ok() {
            client.arenas[arena].set(pages.clone(), |meta| *meta = Meta::default());
            client.arenas[arena].zeroed(pages.clone());
            client.check(arena, pages, "new memory");
        }
    }
}

pub(crate) fn replace(client: &mut Client) {
    // Guards go with what they were in.
    let holds = |meta: &Meta, now| idle(&Meta { guard: false, ..*meta }, now);
    let Some((arena, pages)) = client.choose(holds) else { return };
    match sys::map(client.arenas[arena].at(pages.start), pages.len(), libc::MAP_FIXED) {
        Ok(_) => {
            let new = |meta: &mut Meta| *meta = Meta::default();
            client.arenas[arena].set(pages.clone(), new);
            client.arenas[arena].zeroed(pages.clone());
            client.check(arena, pages, "memory that was mapped over other");
        }
        Err(errno) => failed(client, "mmap", arena, &pages, errno),
    }
}

/// A place for pages that move: as many as there are idle, in any arena.
fn target(client: &mut Client, from: (usize, &Range<usize>)) -> Option<(usize, Range<usize>)> {
    let arena = client.random.below(client.arenas.len() as u64) as usize;
    let all = client.arenas[arena].pages;
    let start = client.random.below((all - from.1.len()) as u64 + 1) as usize;
    let now = client.now;
    let pages = client.arenas[arena].prefix(start..start + from.1.len(), |meta| idle(meta, now));
    let overlaps = arena == from.0 && pages.start < from.1.end && from.1.start < start + from.1.len();
    (pages.len() == from.1.len() && !overlaps).then_some((arena, pages))
}

/// Whether a page is mapped (mincore(2) fails where it is not).
fn is_mapped(address: usize) -> bool {
    sys::mincore(address).is_ok()
}

/// Notes that a page has moved.
fn moved(client: &mut Client, from: (usize, usize), to: (usize, usize)) {
    let meta = *client.arenas[from.0].meta(from.1);
    let wanted = client.arenas[from.0].wanted(from.1);
    client.arenas[to.0].note(to.1, 0, &wanted);
    client.arenas[to.0].set(to.1..to.1 + 1, |new| *new = meta);
    for (_, pending) in &mut client.pending {
        if let Pending::Pin(pin) = pending {
            pin.moved(from, to);
        }
    }
}

pub(crate) fn relocate(client: &mut Client) {
    relocate_with(client, libc::MREMAP_MAYMOVE | libc::MREMAP_FIXED);
}

pub(crate) fn leave(client: &mut Client) {
    relocate_with(client, libc::MREMAP_MAYMOVE | libc::MREMAP_FIXED | libc::MREMAP_DONTUNMAP);
}

fn relocate_with(client: &mut Client, flags: i32) {
    let Some((arena, pages)) = client.choose_most(64, movable) else { return };
    let Some((onto, place)) = target(client, (arena, &pages)) else { return };
    let (old, new) = (client.arenas[arena].at(pages.start), client.arenas[onto].at(place.start));
    let keeps_old = flags & libc::MREMAP_DONTUNMAP != 0;
    let answer = sys::mremap(old, pages.len(), pages.len(), flags, new);
    finding::about(&[new, answer.err().unwrap_or(0) as usize]);
    for (from, to) in pages.clone().zip(place.clone()) {
        // A call that fails may have moved some, and unmapped the place. After one that succeeds,
        // something else may be mapped where the pages were: the stack of a new thread.
        let left = if answer.is_ok() { keeps_old } else { is_mapped(client.arenas[arena].at(from)) };
        let there = is_mapped(client.arenas[onto].at(to));
        let gone = |meta: &mut Meta| *meta = Meta { gone: true, ..Meta::default() };
        if answer.is_ok() || !left {
            moved(client, (arena, from), (onto, to));
            if left {
                client.arenas[arena].set(from..from + 1, |meta| (meta.pinned, meta.either) = (0, false));
                client.arenas[arena].zeroed(from..from + 1);
            } else {
                client.arenas[arena].set(from..from + 1, gone);
            }
        } else if !there {
            client.arenas[onto].set(to..to + 1, gone);
        }
    }
    client.check(onto, place, "memory that was moved");
    client.check(arena, pages, "memory that was moved from");
}

pub(crate) fn grow(client: &mut Client) {
    let holds = |meta: &Meta, now| movable(meta, now) && !meta.no_read && !meta.no_write;
    let Some((arena, pages)) = client.choose_most(64, holds) else { return };
    let (old, more) = (client.arenas[arena].at(pages.start), 1 + client.random.below(32) as usize);
    let Ok(new) = sys::mremap(old, pages.len(), pages.len() + more, libc::MREMAP_MAYMOVE, 0) else {
        // Nothing has moved, or a part that cannot be told. Kernels refuse before they begin.
        client.check(arena, pages, "memory that did not grow");
        return;
    };
    finding::about(&[new, more]);
    for (n, page) in pages.clone().enumerate() {
        client.arenas[arena].compare(page, new + n * crate::arena::PAGE, "memory that grew");
    }
    let tail = new + pages.len() * crate::arena::PAGE;
    for n in 0..more * crate::arena::PAGE / 64 {
        if crate::arena::byte(tail + n * 64) != 0 {
            finding::report(format_args!("memory that is new is not zero"), tail + n * 64);
        }
    }
    if new == old {
        // In place, into a hole: that is given back at once.
        let _ = sys::munmap(tail, more);
        return;
    }
    let _ = sys::mremap(new, pages.len() + more, pages.len(), 0, 0);
    // What may have been put into the hole meanwhile is the process's own.
    if sys::map(old, pages.len(), libc::MAP_FIXED_NOREPLACE).is_ok() {
        let flags = libc::MREMAP_MAYMOVE | libc::MREMAP_FIXED;
        if let Err(errno) = sys::mremap(new, pages.len(), pages.len(), flags, old) {
            finding::report(format_args!("mremap back fails: errno {errno}"), old);
        }
        client.check(arena, pages, "memory that came back");
    } else {
        // Pins in it go with it: nobody uses them any more.
        for page in pages.clone() {
            client.pending.iter_mut().for_each(|(_, pending)| {
                if let Pending::Pin(pin) = pending {
                    pin.forget((arena, page));
                }
            });
        }
        let _ = sys::munmap(new, pages.len());
        client.arenas[arena].set(pages, |meta| *meta = Meta { gone: true, ..Meta::default() });
    }
}

pub(crate) fn shrink(client: &mut Client) {
    let Some((arena, pages)) = client.choose_most(64, idle) else { return };
    if pages.len() < 2 {
        return;
    }
    let left = 1 + client.random.below(pages.len() as u64 - 1) as usize;
    let start = client.arenas[arena].at(pages.start);
    if sys::mremap(start, pages.len(), left, 0, 0).is_ok() {
        let gone = |meta: &mut Meta| *meta = Meta { gone: true, ..Meta::default() };
        client.arenas[arena].set(pages.start + left..pages.end, gone);
    } else {
        // Of several mappings the call shortens the first, or none.
        for page in pages.start + left..pages.end {
            if !is_mapped(client.arenas[arena].at(page)) {
                client.arenas[arena].set(page..page + 1, |meta| *meta = Meta { gone: true, ..Meta::default() });
            }
        }
    }
    client.check(arena, pages, "memory that shrank");
}

pub(crate) fn protect(client: &mut Client) {
    let Some((arena, pages)) = client.choose(movable) else { return };
    let kind = client.random.below(4);
    let (no_read, no_write, prot) = match kind {
        0 => (true, true, libc::PROT_NONE),
        1 => (false, true, libc::PROT_READ),
        _ => (false, false, libc::PROT_READ | libc::PROT_WRITE),
    };
    match sys::mprotect(client.arenas[arena].at(pages.start), pages.len(), prot) {
        Ok(_) => {
            client.arenas[arena].set(pages.clone(), |meta| (meta.no_read, meta.no_write) = (no_read, no_write));
            client.check(arena, pages, "protected memory");
        }
        Err(errno) => {
            failed(client, "mprotect", arena, &pages, errno);
            // Some may be protected.
            let _ =
                sys::mprotect(client.arenas[arena].at(pages.start), pages.len(), libc::PROT_READ | libc::PROT_WRITE);
            client.arenas[arena].set(pages, |meta| (meta.no_read, meta.no_write) = (true, true));
        }
    }
}

pub(crate) fn renew(client: &mut Client) {
    // The first one has the pool for good, if there is one.
    let first = u64::from(client.pool.is_some());
    let arena = (first + client.random.below(client.arenas.len() as u64 - first)) as usize;
    finding::about(&[arena]);
    client.finish(true);
    client.arenas[arena].renew();
    let now = client.now;
    let all = client.arenas[arena].prefix(0..client.arenas[arena].pages, |meta| mapped(meta, now));
    client.check(arena, all.clone(), "new memory");
    // As it is at the beginning of a guest: much is the same everywhere.
    let first = client.random.below(crate::arena::ALPHABET);
    all.for_each(|page| client.arenas[arena].write(page, 0, crate::arena::content(first + page as u64)));
}
