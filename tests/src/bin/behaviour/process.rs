//! Children of every kind, and memory that is read and written from outside.

use std::sync::atomic::{AtomicUsize, Ordering::*};

use crate::arena::{ALPHABET, PAGE, content};
use crate::client::{Client, Pending};
use crate::ops::{movable, readable, writable};
use crate::random::Random;
use crate::{finding, sys};

/// Children at a time.
const CHILDREN: usize = 3;
/// How often an access that may not wait is tried again: it may have met a window.
const TRIES: usize = 20;

pub(crate) fn fork(client: &mut Client) {
    make_child(client, "fork");
}

pub(crate) fn fork_bare(client: &mut Client) {
    make_child(client, "fork-bare");
}

pub(crate) fn fork_raw(client: &mut Client) {
    make_child(client, "fork-raw");
}

fn make_child(client: &mut Client, kind: &str) {
    let random = Random::new(client.random.next());
    let children = client.pending.iter().filter(|(_, pending)| matches!(pending, Pending::Child(_))).count();
    if children >= CHILDREN {
        return;
    }
    match sys::fork(kind) {
        Ok(0) => child(client, random),
        Ok(pid) => {
            let due = client.later(20, 400);
            client.add(due, Pending::Child(pid));
        }
        Err(errno) => finding::about(&[errno as usize]),
    }
}

/// What a child does. Its heap may be locked for ever: it allocates nothing.
fn child(client: &mut Client, mut random: Random) -> ! {
    finding::in_child();
    let now = client.now;
    for turn in 0..3 {
        for arena in &client.arenas {
            arena.check_child(now, ["the child's copy", "the child's copy, later", "the child's copy at last"][turn]);
        }
        client.writers.check("the child's copy of the writers' memory");
        for _ in 0..40 {
            let arena = &mut client.arenas[random.below(3) as usize];
            let page = random.below(arena.pages as u64) as usize;
            let (number, kind) = (random.below(ALPHABET), random.below(4));
            let meta = *arena.meta(page);
            if meta.no_fork || meta.wiped || !movable(&meta, now) || !readable(&meta, now) {
                continue;
            }
            if kind == 0 && sys::madvise(arena.at(page), 1, libc::MADV_DONTNEED).is_ok() {
                arena.zeroed(page..page + 1);
            } else if kind > 0 && !meta.no_write {
                arena.write(page, 0, content(number));
            }
        }
        sys::sleep_ms(random.below(700));
    }
    sys::exit_now(0)
}

/// Waits for a child, which must have found nothing.
pub(crate) fn reap(pid: usize) {
    match sys::wait(pid) {
        Ok(0) => {}
        // It has said what it found.
        Ok(1) => sys::exit_now(1),
        other => finding::report(format_args!("child {pid} ended with {other:?}"), 0),
    }
}

pub(crate) fn vfork(_: &mut Client) {
    if let Ok(pid) = sys::vfork() {
        reap(pid);
    }
}

pub(crate) fn spawn(_: &mut Client) {
    let status = std::process::Command::new("/bin/true").status();
    if !status.as_ref().is_ok_and(std::process::ExitStatus::success) {
        finding::report(format_args!("a program that was started ended with {status:?}"), 0);
    }
}

/// The client, for a process that shares its memory.
static SHARED: AtomicUsize = AtomicUsize::new(0);
const STACK: usize = 64;

extern "C" fn sibling(_: *mut libc::c_void) -> i32 {
    // SAFETY: the client that started this process waits for it.
    #[allow(unsafe_code, reason = "the processes share memory, and only one of them runs")]
    let client = unsafe { &mut *(SHARED.load(Acquire) as *mut Client) };
    for arena in &client.arenas {
        arena.check(0..arena.pages, client.now, "memory as a sibling sees it");
    }
    let now = client.now;
    for _ in 0..20 {
        let arena = &mut client.arenas[client.random.below(3) as usize];
        let page = client.random.below(arena.pages as u64) as usize;
        if writable(arena.meta(page), now) {
            arena.write(page, 0, content(client.random.below(ALPHABET)));
        }
    }
    0
}

pub(crate) fn clone_vm(client: &mut Client) {
    let Ok(stack) = sys::map(0, STACK, 0) else { return };
    SHARED.store(std::ptr::from_mut(client) as usize, Release);
    if let Ok(pid) = sys::clone_vm(stack, STACK, sibling) {
        reap(pid);
    }
    let _ = sys::munmap(stack, STACK);
    (0..client.arenas.len()).for_each(|arena| client.check(arena, 0..client.arenas[arena].pages, "after a sibling"));
}

extern "C" fn survivor(_: *mut libc::c_void) -> i32 {
    // SAFETY: the client's other threads have ended, or wait for nothing but their end.
    #[allow(unsafe_code, reason = "the processes share memory, and only one of them runs")]
    let client = unsafe { &mut *(SHARED.load(Acquire) as *mut Client) };
    for _ in 0..4 {
        sys::sleep_ms(1000);
        for arena in &client.arenas {
            arena.check(0..arena.pages, client.now, "memory of a sibling that outlives the client");
        }
    }
    0
}

/// Leaves the memory to a sibling that outlives this process.
pub(crate) fn leave_sibling(client: &mut Client) {
    let Ok(stack) = sys::map(0, STACK, 0) else { return };
    SHARED.store(std::ptr::from_mut(client) as usize, Release);
    let _ = sys::clone_vm(stack, STACK, survivor);
}

/// Tries an access again that may have met a window.
fn tried(client: &mut Client, wanted: usize, mut access: impl FnMut() -> sys::Answer) -> sys::Answer {
    let mut done = access();
    for _ in 0..TRIES {
        if done == Ok(wanted) {
            break;
        }
        client.refused += 1;
        sys::sleep_ms(1);
        done = access();
    }
    done
}

/// Reads pages in some way, and compares; or writes contents.
fn from_outside(client: &mut Client, what: &str, access: impl Fn(usize, &mut [u8], bool) -> sys::Answer) {
    let write = client.random.once_in(2);
    let Some((arena, pages)) = client.choose_most(8, if write { writable } else { readable }) else { return };
    let first = client.random.below(ALPHABET);
    let mut buffer = [0u8; PAGE];
    for (n, page) in pages.enumerate() {
        let address = client.arenas[arena].at(page);
        if write {
            buffer.copy_from_slice(content(first + n as u64));
        }
        let done = tried(client, PAGE, || access(address, &mut buffer, write));
        if done != Ok(PAGE) {
            finding::report(format_args!("{what}: access to {address:#x} gives {done:?}"), address);
        }
        if write {
            client.arenas[arena].note(page, 0, &buffer);
            client.check(arena, page..page + 1, what);
        } else {
            client.arenas[arena].compare(page, buffer.as_ptr() as usize, what);
        }
    }
}

pub(crate) fn process_vm(client: &mut Client) {
    if !client.random.once_in(8) {
        let own = sys::getpid();
        return from_outside(client, "process_vm", |at, buffer, write| sys::process_vm(own, at, buffer, write));
    }
    // A child does it to its parent, which waits.
    let parent = sys::getpid();
    let Some((arena, pages)) = client.choose_most(8, writable) else { return };
    let first = client.random.below(ALPHABET);
    match sys::fork("fork") {
        Ok(0) => {
            finding::in_child();
            let mut buffer = [0u8; PAGE];
            for (n, page) in pages.enumerate() {
                buffer.copy_from_slice(content(first + n as u64));
                let at = client.arenas[arena].at(page);
                let done = tried(client, PAGE, || sys::process_vm(parent, at, &mut buffer, true));
                if done != Ok(PAGE) {
                    finding::report(format_args!("a child's process_vm_writev gives {done:?}"), at);
                }
            }
            sys::exit_now(0)
        }
        Ok(pid) => {
            reap(pid);
            for (n, page) in pages.clone().enumerate() {
                client.arenas[arena].note(page, 0, content(first + n as u64));
            }
            client.check(arena, pages, "what a child wrote to its parent");
        }
        Err(_) => {}
    }
}

pub(crate) fn proc_mem(client: &mut Client) {
    let fd = client.own_memory();
    from_outside(client, "/proc/self/mem", |at, buffer, write| {
        let (buffer, len) = (buffer.as_mut_ptr() as usize, buffer.len());
        if write { sys::pwrite(fd, buffer, len, at) } else { sys::pread(fd, buffer, len, at) }
    });
}
