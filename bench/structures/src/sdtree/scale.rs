//! The tree alone, at a size where everything is a cache miss: `scale`.
//!
//! Keys are 8 bytes and are computed from their handles, so that the memory is the tree's.

use std::time::{Duration, Instant};

use sdtree::{Handle, Insert, KeySource, SdTree};

use super::BENCH;
use bench_common::random::mix;
use bench_common::report::Row;

struct Computed;

fn key(handle: u64) -> [u8; 8] {
    mix(handle).to_be_bytes()
}

impl KeySource for Computed {
    fn with_key<R>(&self, handle: Handle, f: impl FnOnce(Option<&[u8]>) -> R) -> R {
        f(Some(&key(handle.0)))
    }
}

/// Runs `f` on all processors, each with its share of the numbers; returns the time.
fn share(numbers: std::ops::Range<u64>, f: impl Fn(std::ops::Range<u64>) + Sync) -> Duration {
    let threads = threads() as u64;
    let each = (numbers.end - numbers.start).div_ceil(threads);
    let clock = Instant::now();
    std::thread::scope(|scope| {
        for t in 0..threads {
            let (f, start) = (&f, numbers.start + t * each);
            scope.spawn(move || f(start..(start + each).min(numbers.end)));
        }
    });
    clock.elapsed()
}

fn threads() -> usize {
    std::thread::available_parallelism().map_or(1, usize::from)
}

fn row(case: &str, threads: usize, metric: &'static str, value: f64, unit: &'static str) -> Row {
    Row { bench: BENCH, case: case.to_owned(), subject: "sdtree".to_owned(), threads, metric, value, unit }
}

/// Calls shorter than this are not looked into.
const NOTABLE: Duration = Duration::from_micros(20);

/// How often this thread has lost its processor to another: a call in which that happens took
/// longer for no fault of its own.
#[allow(unsafe_code)] // getrusage(2)
fn preemptions() -> i64 {
    // SAFETY: all zeros is a value of the type, and the call writes one.
    let mut usage: libc::rusage = unsafe { std::mem::zeroed() };
    // SAFETY: it fills the structure that it is given.
    unsafe { libc::getrusage(libc::RUSAGE_THREAD, &mut usage) };
    usage.ru_nivcsw
}

fn ns(time: Duration, calls: u64) -> f64 {
    time.as_nanos() as f64 / calls as f64
}

/// Inserts `keys` keys with one thread, timing each call; looks some up; removes 99 %.
pub(super) fn scale(keys: usize) -> Vec<Row> {
    let case = format!("scale, {keys} keys of 8 bytes");
    let keys = keys as u64;
    let tree = SdTree::new(Computed);
    let mut rows = insert_all(&tree, keys, &case);
    rows.extend(query_some(&tree, keys, &case));

    let full = tree.stats().bytes;
    let stay = keys / 100;
    let time = share(stay..keys, |numbers| numbers.for_each(|i| assert!(tree.remove(&key(i), Handle(i)))));
    rows.push(row(&case, threads(), "delete_ns", ns(time, keys - stay) * threads() as f64, "ns"));
    let left = tree.stats().bytes as f64;
    rows.push(row(&case, threads(), "percent_of_bytes_after_deleting_99", left / full as f64 * 100.0, "%"));
    rows.push(row(&case, threads(), "bytes_per_key_after_deleting_99", left / stay as f64, "B"));
    assert_eq!(tree.len(), stay);
    rows
}

fn insert_all(tree: &SdTree<Computed>, keys: u64, case: &str) -> Vec<Row> {
    let mut rows = Vec::new();
    let (mut worst, mut slow, mut most) = (Duration::ZERO, 0u32, 0.0f64);
    let mut switches = preemptions();
    let clock = Instant::now();
    let mut last = clock;
    for i in 0..keys {
        assert_eq!(tree.insert(&key(i), Handle(i)), Insert::Inserted);
        let now = Instant::now();
        let took = now - last;
        last = now;
        if took > NOTABLE {
            let switched = preemptions();
            if switched == switches {
                worst = worst.max(took);
                slow += u32::from(took > Duration::from_millis(1));
            }
            switches = switched;
            last = Instant::now();
        }
        if i % 4096 == 4095 && i > keys / 100 {
            most = most.max(tree.stats().bytes as f64 / (i + 1) as f64);
            last = Instant::now();
        }
    }
    rows.push(row(case, 1, "insert_ns", ns(clock.elapsed(), keys), "ns"));
    rows.push(row(case, 1, "worst_insert_us", worst.as_nanos() as f64 / 1e3, "us"));
    rows.push(row(case, 1, "inserts_above_1_ms", slow.into(), ""));
    rows.push(row(case, 1, "bytes_per_key", tree.stats().bytes as f64 / keys as f64, "B"));
    rows.push(row(case, 1, "bytes_per_key_at_most", most, "B"));
    rows.push(row(case, 1, "resizes", tree.stats().resizes as f64, ""));
    rows
}

fn query_some(tree: &SdTree<Computed>, keys: u64, case: &str) -> Vec<Row> {
    let mut rows = Vec::new();
    let calls = keys.min(1_000_000);
    let asked: Vec<[u8; 8]> = (0..calls).map(|i| key(mix(i) % keys)).collect();
    let clock = Instant::now();
    assert!(asked.iter().all(|key| tree.query(key).is_some()));
    rows.push(row(case, 1, "query_hit_ns", ns(clock.elapsed(), calls), "ns"));
    let mut found = [None; 64];
    let clock = Instant::now();
    for keys in asked.chunks(found.len()) {
        let keys: Vec<&[u8]> = keys.iter().map(|key| &key[..]).collect();
        tree.query_many(&keys, &mut found[..keys.len()]);
        assert!(found[..keys.len()].iter().all(Option::is_some));
    }
    rows.push(row(case, 1, "query_hit_batched_ns", ns(clock.elapsed(), calls), "ns"));
    let clock = Instant::now();
    assert!((keys..keys + calls).all(|i| tree.query(&key(i)).is_none()));
    rows.push(row(case, 1, "query_miss_ns", ns(clock.elapsed(), calls), "ns"));
    rows
}
