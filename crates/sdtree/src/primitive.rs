//! The atomics: the standard library's, or loom's where `--cfg loom` asks for a model-checked
//! build.

#[cfg(loom)]
pub(crate) use loom::sync::atomic::{AtomicPtr, AtomicU64, Ordering};
#[cfg(not(loom))]
pub(crate) use std::sync::atomic::{AtomicPtr, AtomicU64, Ordering};

/// Counters that nothing depends on. Under loom too these are the standard library's: they need not
/// be modelled.
pub(crate) use std::sync::atomic::AtomicU64 as Counter;

/// A number for this thread; threads that start one after the other get different ones.
#[cfg(not(loom))]
pub(crate) fn thread_number() -> usize {
    use std::cell::Cell;
    use std::sync::atomic::AtomicUsize;

    static NEXT: AtomicUsize = AtomicUsize::new(0);
    thread_local!(static NUMBER: Cell<usize> = const { Cell::new(usize::MAX) });
    NUMBER.with(|number| {
        if number.get() == usize::MAX {
            number.set(NEXT.fetch_add(1, Ordering::Relaxed));
        }
        number.get()
    })
}

/// Loom runs all model threads on one system thread, and must see the same numbers in each run.
#[cfg(loom)]
pub(crate) fn thread_number() -> usize {
    0
}

/// The number of shards of a tree: enough that threads seldom share one.
pub(crate) fn shard_count() -> usize {
    if cfg!(loom) {
        return 1;
    }
    std::thread::available_parallelism().map_or(8, |n| n.get().next_power_of_two().clamp(2, 64))
}

/// A number that differs from tree to tree.
pub(crate) fn random_seed() -> u64 {
    use std::hash::{BuildHasher, Hasher, RandomState};
    if cfg!(any(loom, test, fuzzing)) {
        return 0; // the same run every time
    }
    RandomState::new().build_hasher().finish()
}

/// A function from numbers to random numbers, another one for each tree.
pub(crate) fn random_numbers() -> impl Fn(u64) -> u64 {
    use std::hash::{BuildHasher, RandomState};
    let state = RandomState::new();
    // SipHash with a key of 128 bits; in tests the same numbers every time.
    move |n| {
        let fixed = (n + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15);
        if cfg!(any(loom, test, fuzzing)) { fixed ^ fixed >> 29 } else { state.hash_one(n) }
    }
}
