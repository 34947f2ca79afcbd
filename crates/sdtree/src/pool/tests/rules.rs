//! Where nodes lie, and when they are used again.

use crate::pool::*;

#[test]
fn places_are_dense_and_inside_their_regions() {
    let mut expected = (0, 0);
    for number in 0..100_000 {
        assert_eq!(Pool::place(number), expected, "node {number}");
        expected.1 += 1;
        if expected.1 == Pool::region_len(expected.0) {
            expected = (expected.0 + 1, 0);
        }
    }
    let (region, offset) = Pool::place((1 << 40) - 1);
    assert!(region < REGIONS && offset < Pool::region_len(region));
}

/// The lists' rule, one step after the other.
#[test]
fn what_a_pin_holds_back() {
    let epoch = Epoch::with_shards(2);
    let pool = Pool::new(&epoch);
    let first = epoch.pin_on(0);
    let address = pool.allocate(&epoch, &first);
    // SAFETY: allocated just now under this pin.
    unsafe { node(address, &first) }.0[0].store(word::EMPTY, Relaxed);
    epoch.tick();

    // Retired one tick later than `first` was pinned: `first` must not get it from any list.
    let second = epoch.pin_on(1);
    pool.retire(&second, address, 0);
    drop(second);
    for shard in &pool.shards {
        assert_eq!(pool.harvest(shard, &pool.shards[0], &first), None);
    }
    drop(first);

    while epoch.ticks() < 4 {
        let pin = epoch.pin_on(0);
        assert_eq!(pool.shard_lists_ripe(1, &pin), None, "too early");
        drop(pin);
        epoch.tick();
    }
    let pin = epoch.pin_on(0);
    assert_eq!(pool.shard_lists_ripe(1, &pin), Some(address), "three ticks later");
}
