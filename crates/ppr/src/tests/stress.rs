//! Both sides at full speed, with real threads.

use std::ops::Range;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed};
use std::time::{Duration, Instant};

use crate::{Guest, Host, Pool, Ram};

/// Guests that free and take pages as fast as they can, against a host that holds every claim for a
/// while. The guest loses the race thousands of times, and never a page.
#[test]
fn a_guest_that_loses_the_race_waits_and_loses_no_page() {
    const PAGES: u64 = 256;
    const OWNERS: u64 = 4;
    let pool = Pool::private(PAGES).unwrap();
    let pages: Vec<AtomicU64> = (0..PAGES).map(|_| AtomicU64::new(0)).collect();
    let (stop, waits, rounds) = (AtomicBool::new(false), AtomicU64::new(0), AtomicU64::new(0));
    let recycled = std::thread::scope(|scope| {
        for owner in 0..OWNERS {
            let (pool, pages, stop, waits, rounds) = (&pool, &pages, &stop, &waits, &rounds);
            scope.spawn(move || {
                let guest = Guest::new(pool);
                let mut round = 0;
                while !stop.load(Relaxed) {
                    round += 1;
                    // Each owner has every fourth page, so that the owners share every word.
                    for page in (owner..PAGES).step_by(OWNERS as usize) {
                        guest.mark(page..page + 1);
                    }
                    std::thread::yield_now();
                    for page in (owner..PAGES).step_by(OWNERS as usize) {
                        let seen = guest.cancel(page..page + 1, || {
                            std::thread::yield_now();
                            true
                        });
                        waits.fetch_add(seen.unwrap().waits, Relaxed);
                        pages[page as usize].store(round << 8 | owner, Relaxed);
                    }
                    for page in (owner..PAGES).step_by(OWNERS as usize) {
                        let found = pages[page as usize].load(Relaxed);
                        assert_eq!(found, round << 8 | owner, "page {page} was zeroed while in use");
                    }
                    rounds.fetch_add(1, Relaxed);
                }
            });
        }
        let mut host = Host::new(&pool, Ram::new(std::iter::once(0..PAGES)));
        let start = Instant::now();
        let mut recycled = 0;
        while waits.load(Relaxed) < 5000 && start.elapsed() < Duration::from_secs(600) {
            let zero = |runs: &[Range<u64>]| {
                // Slow, before and between.
                std::thread::sleep(Duration::from_micros(20));
                for page in runs.iter().flat_map(Clone::clone) {
                    pages[page as usize].store(0, Relaxed);
                }
                Ok::<_, ()>(())
            };
            recycled += host.recycle(&mut (0..PAGES), 64, zero).unwrap().pages;
        }
        stop.store(true, Relaxed);
        recycled
    });
    let (waits, rounds) = (waits.into_inner(), rounds.into_inner());
    println!("{recycled} pages recycled, {waits} races lost in {rounds} rounds");
    assert!(waits >= 5000, "{waits} races lost are too few to say anything");
}
