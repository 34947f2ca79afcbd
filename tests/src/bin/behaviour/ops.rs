//! The operations, and how often each is done.

use crate::arena::{ALPHABET, Meta, PAGE, content, copy};
use crate::client::Client;
use crate::{advice, device, mapping, process};

/// An operation.
pub(crate) struct Op {
    pub(crate) name: &'static str,
    /// What it does, for `--ops`.
    pub(crate) help: &'static str,
    /// How often it is done, against the sum of all.
    pub(crate) weight: u64,
    pub(crate) run: fn(&mut Client),
}

const fn op(name: &'static str, weight: u64, run: fn(&mut Client), help: &'static str) -> Op {
    Op { name, help, weight, run }
}

/// All operations.
pub(crate) static OPS: [Op; 48] = [
    op("fill", 160, fill, "writes whole pages, from few contents"),
    op("poke", 60, poke, "writes some bytes"),
    op("same", 20, same, "writes what is there already"),
    op("check", 60, check, "compares a range"),
    op("read", 20, device::read_file, "read(2), also with O_DIRECT"),
    op("write", 15, device::write_file, "write(2) with O_DIRECT"),
    op("dontneed", 40, advice::dontneed, "MADV_DONTNEED: zeros"),
    op("dontneed-locked", 5, advice::dontneed_locked, "MADV_DONTNEED_LOCKED: zeros"),
    op("dontneed-many", 10, advice::dontneed_many, "process_madvise(2) of two ranges with MADV_DONTNEED: zeros"),
    op("free", 20, advice::free, "MADV_FREE: zeros or what was there"),
    op("remove", 3, advice::remove, "MADV_REMOVE, which anonymous memory refuses"),
    op("dontfork", 10, advice::dontfork, "MADV_DONTFORK, of a part or of all"),
    op("dofork", 10, advice::dofork, "MADV_DOFORK"),
    op("wipe", 8, advice::wipe, "MADV_WIPEONFORK"),
    op("keep", 8, advice::keep, "MADV_KEEPONFORK"),
    op("unmergeable", 6, advice::unmergeable, "MADV_UNMERGEABLE"),
    op("mergeable", 12, advice::mergeable, "MADV_MERGEABLE of all of an arena"),
    op("populate", 10, advice::populate, "MADV_POPULATE_READ and MADV_POPULATE_WRITE"),
    op("collapse", 8, advice::collapse, "MADV_COLLAPSE"),
    op("huge", 6, advice::huge, "MADV_HUGEPAGE and MADV_NOHUGEPAGE"),
    op("hint", 20, advice::hint, "COLD, PAGEOUT, WILLNEED, RANDOM, SEQUENTIAL, NORMAL, DONTDUMP, DODUMP"),
    op("guard", 6, advice::guard, "MADV_GUARD_INSTALL"),
    op("unguard", 10, advice::unguard, "MADV_GUARD_REMOVE: zeros"),
    op("lock", 2, advice::lock, "mlock(2) for a while"),
    op("unmap", 15, mapping::unmap, "munmap(2)"),
    op("map", 20, mapping::map, "mmap(2) where nothing is"),
    op("replace", 10, mapping::replace, "mmap(2) with MAP_FIXED over what is there: zeros"),
    op("move", 12, mapping::relocate, "mremap(2) onto another place"),
    op("leave", 6, mapping::leave, "mremap(2) with MREMAP_DONTUNMAP"),
    op("grow", 8, mapping::grow, "mremap(2) to a larger size elsewhere, and back"),
    op("shrink", 6, mapping::shrink, "mremap(2) to a smaller size"),
    op("protect", 15, mapping::protect, "mprotect(2)"),
    op("renew", 3, mapping::renew, "gives an arena back and maps another"),
    op("mark", 20, mark, "marks pages as free in a pool: zeros or what was there"),
    op("cancel", 20, cancel, "takes marked pages back"),
    op("pin", 3, device::pin, "registers a buffer with io_uring for a while"),
    op("pin-io", 25, device::pin_io, "reads and writes by a registered buffer"),
    op("splice", 6, device::splice, "vmsplice(2); the pipe is read much later"),
    op("slow-read", 8, device::slow_read, "direct input that takes a while"),
    op("slow-write", 6, device::slow_write, "direct output that takes a while"),
    op("process-vm", 20, process::process_vm, "process_vm_readv(2) and process_vm_writev(2), also by a child"),
    op("proc-mem", 20, process::proc_mem, "reads and writes /proc/self/mem"),
    op("fork", 4, process::fork, "fork(2); the child checks, writes, and lives on for a while"),
    op("fork-bare", 2, process::fork_bare, "_Fork(3)"),
    op("fork-raw", 2, process::fork_raw, "clone(2) without the C library"),
    op("vfork", 2, process::vfork, "vfork(2)"),
    op("spawn", 2, process::spawn, "starts a program"),
    op("clone-vm", 3, process::clone_vm, "a process that shares the memory; the last one outlives the client"),
];

/// May be written by the program.
pub(crate) fn writable(meta: &Meta, now: u64) -> bool {
    readable(meta, now) && !meta.no_write && !meta.marked && meta.held.max(meta.kept) <= now
}

/// May be read by the program.
pub(crate) fn readable(meta: &Meta, now: u64) -> bool {
    !meta.gone && !meta.no_read && !meta.guard && meta.busy <= now
}

/// May be replaced or discarded.
pub(crate) fn idle(meta: &Meta, now: u64) -> bool {
    movable(meta, now) && meta.pinned <= now
}

/// May move, or be protected.
pub(crate) fn movable(meta: &Meta, now: u64) -> bool {
    !meta.gone && !meta.guard && !meta.marked && meta.busy.max(meta.held) <= now
}

/// May be advised about in ways that keep the bytes.
pub(crate) fn mapped(meta: &Meta, _: u64) -> bool {
    !meta.gone && !meta.guard
}

fn fill(client: &mut Client) {
    let Some((arena, pages)) = client.choose(writable) else { return };
    // Long runs of contents that follow each other, as files in guests are, and single ones.
    let (kind, first) = (client.random.below(8), client.random.below(ALPHABET));
    for (n, page) in pages.enumerate() {
        let number = match kind {
            0 => 0,
            1 => client.random.below(ALPHABET),
            2 | 3 => first,
            _ => first + n as u64,
        };
        client.arenas[arena].write(page, 0, content(number));
    }
}

fn poke(client: &mut Client) {
    let Some((arena, pages)) = client.choose_most(16, writable) else { return };
    for page in pages {
        let len = [1, 8, 100][client.random.below(3) as usize];
        let offset = client.random.below((PAGE - len) as u64 + 1) as usize;
        let value = [client.random.below(3) as u8; 100];
        client.arenas[arena].write(page, offset, &value[..len]);
    }
}

fn same(client: &mut Client) {
    let Some((arena, pages)) = client.choose(writable) else { return };
    for page in pages {
        let arena = &mut client.arenas[arena];
        arena.settle(page);
        copy(arena.shadow_at(page), arena.at(page), PAGE);
    }
}

fn check(client: &mut Client) {
    let Some((arena, pages)) = client.choose(mapped) else { return };
    client.check(arena, pages, "memory");
    client.writers.check("the writers' memory");
}

fn mark(client: &mut Client) {
    let Some((0, pages)) = client.choose(writable) else { return };
    let Some(pool) = &client.pool else { return };
    pages.clone().for_each(|page| pool.mark(page));
    client.arenas[0].set(pages, |meta| (meta.marked, meta.either) = (true, true));
}

fn cancel(client: &mut Client) {
    let Some((0, pages)) = client.choose(|meta, _| !meta.gone) else { return };
    let Some(pool) = &client.pool else { return };
    for run in client.arenas[0].runs(pages, |meta| meta.marked) {
        run.clone().for_each(|page| pool.cancel(page));
        client.arenas[0].set(run.clone(), |meta| meta.marked = false);
        // Most are used at once.
        if !client.random.once_in(4) {
            let first = client.random.below(ALPHABET);
            for page in client.arenas[0].runs(run, |meta| !meta.no_write && !meta.no_read).into_iter().flatten() {
                client.arenas[0].write(page, 0, content(first + page as u64));
            }
        }
    }
}
