//! Every interleaving of the guest's steps with the host's, with the death of either at any step.
//!
//! A page's content is a loom cell: that guest and host touch it at once, or in an order that no
//! synchronisation gives, is an error by itself. Besides, what the guest wrote to its page has to
//! be there as long as it has it.

#![allow(unsafe_code)] // Cells are what two threads must not touch at once: whether they do is the question.

use std::ops::Range;
use std::sync::Arc;

use loom::cell::UnsafeCell;
use loom::sync::atomic::Ordering::SeqCst;
use loom::thread;

use crate::{Guest, Host, Pool, Ram};

/// A pool, and pages that it stands for. Loom's memory is small: so is the pool (1,024 frames), and
/// pages 0 to 3 exist.
struct World {
    pool: Pool,
    pages: [UnsafeCell<u64>; 4],
}

// SAFETY: loom finds every access to a cell that another one is not ordered with.
unsafe impl Sync for World {}

impl World {
    fn new() -> Arc<Self> {
        Arc::new(Self { pool: Pool::private(4).unwrap(), pages: std::array::from_fn(|_| UnsafeCell::new(0)) })
    }

    /// The host's zeroing of a page.
    fn zero(&self, page: u64) {
        // SAFETY: loom reports it if anybody else touches the cell meanwhile.
        self.pages[page as usize].with_mut(|content| unsafe { *content = 0 });
    }

    /// The guest has the page: nobody else does, and what it writes stays.
    fn use_page(&self, page: u64) {
        let cell = &self.pages[page as usize];
        // SAFETY: as above.
        cell.with_mut(|content| unsafe { *content = 7 });
        thread::yield_now();
        // SAFETY: as above.
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

    /// Frees, takes and uses a page of which the guest is the owner.
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

/// What is marked when all is quiet is found by the next sweep: S hides nothing.
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

/// The host's steps one by one, of which the first `steps` are done, before it dies. What a dead
/// host's process had under way is over when its successor has the lock.
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
                // The successor.
                Host::new(&host.pool, Ram::new(std::iter::once(0..4))).recover();
                host.recycle(u64::MAX);
            });
            world.turn_over(0);
            host.join().unwrap();
            world.turn_over(0);
        });
    }
}

/// Without a successor, a guest whose patience ends keeps its hands off the page, and finds it
/// released if it ever is.
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
            // Not marked any more and seen released: nobody comes for it.
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
            // A mark's two steps, and a cancel's first.
            if steps > 0 {
                world.pool.free()[0].fetch_or(1, SeqCst);
            }
            if steps > 1 {
                world.pool.raise(0);
            }
            if steps > 2 {
                world.pool.free()[0].fetch_and(!1, SeqCst);
            }
            // The successor takes everything before it uses anything.
            Guest::new(&world.pool).cancel(0..4, patient).unwrap();
            world.use_page(0);
            world.turn_over(0);
            host.join().unwrap();
        });
    }
}

/// A host that stops in the middle, because its closure fails or its time is over, has released
/// what it claimed, and hides nothing.
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
