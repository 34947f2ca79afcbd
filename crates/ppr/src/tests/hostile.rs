//! A guest that writes arbitrary words into the pool, with its header, while the host works.

use std::ops::Range;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::time::{Duration, Instant};

use crate::{Host, HostState, Pool, Ram};

/// Writes arbitrary words into the pool until `stop`.
fn scribble(pool: &Pool, seed: u64, stop: impl Fn() -> bool) {
    let words = pool.words_for_tests();
    let mut state = seed;
    while !stop() {
        state = state.wrapping_mul(0x5851_f42d_4c95_7f2d).wrapping_add(0x1405_7b7e_f767_814f);
        // Words of each part of the pool: the header, F, C, S.
        let at = match state >> 61 {
            0 => state >> 32 & 15,
            1 => (pool.layout().summary / 8) as u64 + (state >> 32) % 32,
            _ => (state >> 32) % words.len() as u64,
        } as usize;
        let value = match state >> 59 & 3 {
            0 => u64::MAX,
            1 => 0,
            2 => state,
            _ => 1 << (state >> 40 & 63),
        };
        words[at].store(value, Relaxed);
    }
}

#[test]
fn whatever_a_guest_writes_only_its_own_ram_is_named() {
    let pool = Pool::private(100_000).unwrap();
    let ram = Ram::new([3..160, 256..70_001, 80_000..90_000]);
    let stop = AtomicBool::new(false);
    let (pages, sweeps) = std::thread::scope(|scope| {
        for seed in 1..3u64 {
            let (pool, stop) = (&pool, &stop);
            scope.spawn(move || {
                scribble(pool, seed, || stop.load(Relaxed));
            });
        }
        let mut host = Host::new(&pool, ram.clone());
        let (mut pages, mut sweeps) = (0, 0);
        let start = Instant::now();
        while start.elapsed() < Duration::from_secs(2) {
            pool.set_host_state(HostState::Active);
            let mut within = 0..u64::MAX;
            while !within.is_empty() {
                let mut in_batch = 0;
                let done = host.recycle(&mut within, 5000, |runs: &[Range<u64>]| {
                    let mut last = 0;
                    for run in runs {
                        assert!(run.start < run.end && run.start >= last, "{run:?} after {last}");
                        last = run.end;
                        assert!(
                            run.clone().all(|page| ram.ranges().iter().any(|range| range.contains(&page))),
                            "{run:?}"
                        );
                        in_batch += run.end - run.start;
                    }
                    Ok::<_, ()>(())
                });
                assert_eq!(done.unwrap().pages, in_batch);
                pages += in_batch;
            }
            let _ =
                (host.pending(u64::MAX), host.marked(), host.is_free(sweeps), host.is_free(u64::MAX), pool.validate());
            sweeps += 1;
            if sweeps % 16 == 0 {
                host.recover();
                host.forget();
            }
        }
        stop.store(true, Relaxed);
        (pages, sweeps)
    });
    println!("{pages} pages in {sweeps} sweeps, none outside the guest's RAM");
    assert!(pages > 0);
}
