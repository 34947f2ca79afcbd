//! Every interleaving of the guest's steps with the host's, with the death of either at any step.
//!
//! A page's content is a loom cell: loom reports an error if guest and host access it at once, or
//! in an order that no synchronisation gives. Besides, the guest's writes to its page must stay as
//! long as it owns the page.

#![allow(unsafe_code)] // Accesses loom's cells, which check for races.

use std::ops::Range;
use std::sync::Arc;

use loom::cell::UnsafeCell;
use loom::sync::atomic::Ordering::SeqCst;
use loom::thread;

use crate::{Guest, Host, Pool, Ram};

/// A pool and its pages. Loom's memory is small, so the pool has 1,024 frames, of which pages 0 to
/// 3 exist.
struct World {
    pool: Pool,
    pages: [UnsafeCell<u64>; 4],
}

// SAFETY: the cells are accessed through loom, which reports every pair of accesses without an
// order.
unsafe impl Sync for World {}

impl World {
    fn new() -> Arc<Self> {
        Arc::new(Self { pool: Pool::private(4).unwrap(), pages: std::array::from_fn(|_| UnsafeCell::new(0)) })
    }

    /// The host's zeroing of a page.
    fn zero(&self, page: u64) {
        // SAFETY: loom reports an error if another thread accesses the cell meanwhile.
        self.pages[page as usize].with_mut(|content| unsafe { *content = 0 });
    }

    /// Uses a page that the guest owns: no other thread accesses it, and the guest's write stays.
    fn use_page(&self, page: u64) {
        let cell = &self.pages[page as usize];
        // SAFETY: loom reports an error if another thread writes to the cell meanwhile.
        cell.with_mut(|content| unsafe { *content = 7 });
        thread::yield_now();
        // SAFETY: loom reports an error if another thread writes to the cell meanwhile.
        cell.with(|content| assert_eq!(unsafe { *content }, 7));
    }

    fn recycle(&self, room: u64) -> u64 {
        let mut host = Host::new(&self.pool, Ram::new(std::iter::once(0..4)));
        let done = host.recycle(&mut (0..self.pool.frames()), room, |runs: &[Range<u64>]| {
            runs.iter().flat_map(Clone::clone).for_each(|page| self.zero(page));
            Ok::<_, ()>(())
        });
        done.unwrap().pages
    }

    /// Frees, takes and uses a page that the guest owns.
    fn turn_over(&self, page: u64) {
        let guest = Guest::new(&self.pool);
        guest.mark(page..page + 1);
        guest.cancel(page..page + 1, patient).unwrap();
        self.use_page(page);
    }
}

fn patient() -> bool {
    thread::yield_now();
    true
}

#[test]
fn loom_a_page_turns_over_twice_while_a_host_sweeps() {
    loom::model(|| {
        let world = World::new();
        let host = world.clone();
        let host = thread::spawn(move || host.recycle(u64::MAX));
        world.turn_over(0);
        world.turn_over(0);
        host.join().unwrap();
    });
}

#[test]
fn loom_a_page_is_marked_and_a_host_sweeps_twice() {
    loom::model(|| {
        let world = World::new();
        let host = world.clone();
        let host = thread::spawn(move || host.recycle(u64::MAX) + host.recycle(u64::MAX));
        world.turn_over(1);
        host.join().unwrap();
    });
}

#[test]
fn loom_a_page_is_marked_anew_while_it_may_be_claimed() {
    loom::model(|| {
        let world = World::new();
        let host = world.clone();
        let host = thread::spawn(move || host.recycle(u64::MAX));
        Guest::new(&world.pool).mark(0..1);
        // As when the allocator moves a free block that is marked already.
        world.turn_over(0);
        host.join().unwrap();
    });
}

#[test]
fn loom_two_pages_of_a_word_with_two_owners() {
    loom::model(|| {
        let world = World::new();
        let (host, other) = (world.clone(), world.clone());
        let host = thread::spawn(move || host.recycle(u64::MAX));
        let other = thread::spawn(move || other.turn_over(1));
        world.turn_over(0);
        other.join().unwrap();
        host.join().unwrap();
    });
}

/// The next sweep finds all pages that are marked when both sides are at rest: S hides none.
#[test]
fn loom_no_mark_is_hidden() {
    loom::model(|| {
        let world = World::new();
        Guest::new(&world.pool).mark(0..1);
        let (host, other) = (world.clone(), world.clone());
        let host = thread::spawn(move || host.recycle(u64::MAX));
        let other = thread::spawn(move || Guest::new(&other.pool).mark(1..2));
        Guest::new(&world.pool).mark(2..3);
        other.join().unwrap();
        let first = host.join().unwrap();
        assert_eq!(first + world.recycle(u64::MAX), 3);
    });
}

/// The first `steps` steps of a host, which dies then. The system calls of its process have ended
/// when another host has the lock.
fn dying_host(world: &World, steps: usize) {
    let (free, claims) = (&world.pool.free()[0], &world.pool.claims()[0]);
    let wanted = free.load(SeqCst) & 1;
    if wanted == 0 || steps == 0 {
        return;
    }
    claims.fetch_or(wanted, SeqCst);
    if steps == 1 {
        return;
    }
    let got = free.fetch_and(!wanted, SeqCst) & wanted;
    if steps == 2 {
        return;
    }
    if got != 0 {
        world.zero(0);
    }
    if steps == 3 {
        return;
    }
    claims.fetch_and(!wanted, SeqCst);
}

#[test]
fn loom_a_host_dies_at_any_step_and_has_a_successor() {
    for steps in 0..=4 {
        loom::model(move || {
            let world = World::new();
            let host = world.clone();
            let host = thread::spawn(move || {
                dying_host(&host, steps);
                // The next host.
                Host::new(&host.pool, Ram::new(std::iter::once(0..4))).recover();
                host.recycle(u64::MAX);
            });
            world.turn_over(0);
            host.join().unwrap();
            world.turn_over(0);
        });
    }
}

/// Without another host, a guest whose patience ends does not use the page, and sees if it is
/// released later.
#[test]
fn loom_a_host_dies_and_patience_ends() {
    for steps in 0..=4 {
        loom::model(move || {
            let world = World::new();
            let host = world.clone();
            let host = thread::spawn(move || dying_host(&host, steps));
            let guest = Guest::new(&world.pool);
            guest.mark(0..1);
            let mut looks = 0;
            let cancelled = guest.cancel(0..1, || {
                thread::yield_now();
                looks += 1;
                looks < 2
            });
            // Not marked any more and seen released: no host takes it.
            if cancelled.is_ok() || !guest.claimed(0..1) {
                world.use_page(0);
            }
            host.join().unwrap();
        });
    }
}

#[test]
fn loom_a_guest_dies_at_any_step_and_has_a_successor() {
    for steps in 0..=3 {
        loom::model(move || {
            let world = World::new();
            let host = world.clone();
            let host = thread::spawn(move || host.recycle(u64::MAX));
            // The two steps of a mark, and the first step of a cancel.
            if steps > 0 {
                world.pool.free()[0].fetch_or(1, SeqCst);
            }
            if steps > 1 {
                world.pool.raise(0);
            }
            if steps > 2 {
                world.pool.free()[0].fetch_and(!1, SeqCst);
            }
            // The next guest cancels all marks before it uses a page.
            Guest::new(&world.pool).cancel(0..4, patient).unwrap();
            world.use_page(0);
            world.turn_over(0);
            host.join().unwrap();
        });
    }
}

/// A host that stops in the middle, because its closure fails or its time is over, has released its
/// claims, and hides no page.
#[test]
fn loom_a_host_gives_up_in_the_middle() {
    loom::model(|| {
        let world = World::new();
        let host = world.clone();
        let host = thread::spawn(move || {
            let mut host = Host::new(&host.pool, Ram::new(std::iter::once(0..4)));
            let failed = host.recycle(&mut (0..4), u64::MAX, |_| Err(()));
            let _ = failed;
        });
        world.turn_over(0);
        world.turn_over(1);
        host.join().unwrap();
    });
}
