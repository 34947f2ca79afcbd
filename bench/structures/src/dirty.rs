//! `dirty`: the cost of inserting dirty frames and of harvesting them.
//!
//! 10,000,000 frames, the published counts of dirty ones, in random places or in a row. Each round,
//! each subject in turn: the frames are inserted (`insert_ns`, for one), inserted again while they
//! are there (`insert_again_ns`), harvested (`harvest_ns`, for all) and harvested with clearing
//! (`harvest_clear_ns`), ours also with exclusive access (`drain_ns`). Few frames are done
//! many times over. Medians of the rounds.
//!
//! Then, for ours and the bitmap: inserting frames that are dirty already and whose words are in
//! the first-level cache; the fastest of many short runs.

mod rivals;

use std::hint::black_box;
use std::time::{Duration, Instant};

use anyhow::{Result, ensure};
use dirty::{Bitmap, DirtySet, DirtyTree};

use bench_common::random::Random;
use bench_common::report::{Row, Sheet, medians};
use rivals::Subject;

const FRAMES: u64 = 10_000_000;
const COUNTS: [usize; 6] = [100, 1_000, 10_000, 100_000, 1_000_000, 10_000_000];

/// Runs it.
pub(crate) fn run(quick: bool) -> Result<Vec<Row>> {
    let rounds = if quick { 3 } else { 7 };
    let mut subjects = rivals::all(FRAMES)?;
    // Touched before the measurement; a little longer than needed, so that no subject fills it.
    let mut out = vec![1; FRAMES as usize + 64];
    let mut rows = Vec::new();
    for order in ["random", "sequential"] {
        let all = places(order);
        for count in COUNTS {
            eprintln!("dirty: {order}, {count}");
            let mut found = Vec::new();
            for round in 0..rounds {
                // Other places in each round.
                let first = if count == all.len() { 0 } else { (round * 1_234_567) % (all.len() - count) };
                let frames = &all[first..first + count];
                // The order changes from round to round, so that each subject meets the others'
                // caches.
                subjects.rotate_left(1);
                for subject in &mut subjects {
                    found.extend(measure(subject.as_mut(), order, frames, &mut out)?);
                }
            }
            let mut found = medians(&found);
            // In one order, however they were measured.
            found.sort_by_key(|row| rivals::NAMES.iter().position(|name| *name == row.subject));
            rows.extend(against(&found, &subjects));
            rows.extend(found);
        }
    }
    drop(subjects);
    rows.extend(hot(rounds)?);
    Ok(rows)
}

/// All frames, each once.
fn places(order: &str) -> Vec<u64> {
    let mut all: Vec<u64> = (0..FRAMES).collect();
    if order == "random" {
        let mut random = Random::new(0);
        (1..all.len()).rev().for_each(|i| all.swap(i, random.below(i + 1)));
    }
    all
}

fn time(work: impl FnOnce()) -> Duration {
    let start = Instant::now();
    work();
    start.elapsed()
}

/// What asking for the time twice costs.
fn clock() -> f64 {
    let mut times: Vec<Duration> = (0..1001).map(|_| time(|| ())).collect();
    times.sort_unstable();
    times[500].as_nanos() as f64
}

/// One round of one subject, as rows.
fn measure(subject: &mut dyn Subject, order: &str, frames: &[u64], out: &mut [u64]) -> Result<Vec<Row>> {
    let count = frames.len();
    let repeats = (100_000 / count).clamp(1, 301);
    let mut times: [Vec<f64>; 5] = Default::default();
    for _ in 0..repeats {
        let mut n = [0; 2];
        times[0].push(time(|| subject.insert(black_box(frames))).as_nanos() as f64);
        times[1].push(time(|| n[0] = subject.look(black_box(out))).as_nanos() as f64);
        times[2].push(time(|| n[1] = subject.take(black_box(out))).as_nanos() as f64);
        ensure!(n == [count; 2], "{} reported {n:?} of {count} frames", subject.name());
    }
    for _ in 0..repeats {
        subject.insert(frames);
        let mut n = None;
        let spent = time(|| n = subject.drain(black_box(out)));
        if n.is_none() {
            subject.take(out);
            break;
        }
        times[4].push(spent.as_nanos() as f64);
        ensure!(n == Some(count), "{} drained {n:?} of {count} frames", subject.name());
    }
    // A list would hold them twice.
    subject.insert(frames);
    let bytes = subject.bytes();
    if subject.is_peer() {
        for _ in 0..repeats {
            times[3].push(time(|| subject.insert(black_box(frames))).as_nanos() as f64);
        }
    }
    subject.take(out);
    let clock = clock();
    let mut median = |which: usize| {
        times[which].sort_by(f64::total_cmp);
        times[which].get(times[which].len() / 2).map(|t| (t - clock).max(0.0))
    };
    let case = format!("{order}, {count} of {FRAMES} frames");
    let mut sheet = Sheet { bench: "dirty", case, subject: subject.name(), threads: 1, rows: Vec::new() };
    let per_frame = |t: f64| t / count as f64;
    for (metric, value) in [
        ("harvest_ns", median(1)),
        ("harvest_clear_ns", median(2)),
        ("drain_ns", median(4)),
        ("insert_ns", median(0).map(per_frame)),
        ("insert_again_ns", median(3).map(per_frame)),
    ] {
        if let Some(value) = value {
            sheet.add(metric, value, "ns");
        }
    }
    sheet.add("bytes", bytes as f64, "B");
    Ok(sheet.rows)
}

/// Ours divided by others.
fn against(rows: &[Row], subjects: &[Box<dyn Subject>]) -> Vec<Row> {
    let value = |subject: &str, metric: &str| {
        rows.iter().find(|row| row.subject == subject && row.metric == metric).map(|row| row.value)
    };
    let mut out = Vec::new();
    for (metric, rivals, to_list, to_bitmap, to_tree, to_best) in [
        (
            "harvest_clear_ns",
            "harvest_clear_ns",
            "clear_to_list",
            "clear_to_bitmap",
            "clear_to_radix8",
            "clear_to_best_peer",
        ),
        ("drain_ns", "harvest_clear_ns", "drain_to_list", "drain_to_bitmap", "drain_to_radix8", "drain_to_best_peer"),
        (
            "harvest_ns",
            "harvest_ns",
            "harvest_to_list",
            "harvest_to_bitmap",
            "harvest_to_radix8",
            "harvest_to_best_peer",
        ),
    ] {
        let Some(ours) = value("pageone", metric) else { continue };
        let peers = subjects.iter().filter(|s| s.is_peer() && s.name() != "pageone");
        let best = peers.filter_map(|s| value(s.name(), rivals)).reduce(f64::min);
        let list = value("list", rivals);
        let all = [
            (to_list, list),
            (to_bitmap, value("bitmap", rivals)),
            (to_tree, value("radix-8", rivals)),
            (to_best, best),
        ];
        for (name, theirs) in all {
            let row = rows.iter().find(|row| row.subject == "pageone").zip(theirs);
            out.extend(row.map(|(row, theirs)| Row { metric: name, value: ours / theirs, unit: "", ..row.clone() }));
        }
    }
    out
}

/// The least of several times: other work on the machine can only add to it.
fn least(times: usize, mut work: impl FnMut() -> Duration) -> Duration {
    (0..times).map(|_| work()).min().unwrap_or_default()
}

/// Frames that are dirty already, in the first-level cache.
fn hot(rounds: usize) -> Result<Vec<Row>> {
    let (tree, bitmap) = (DirtyTree::new(FRAMES)?, Bitmap::new(FRAMES)?);
    let frames: Vec<u64> = (0..256).map(|i| i * 39_007 % FRAMES).collect();
    let mut rows = Vec::new();
    for subject in ["pageone", "bitmap"] {
        const TIMES: u32 = 400;
        let again = || if subject == "pageone" { again(&tree, &frames, TIMES) } else { again(&bitmap, &frames, TIMES) };
        let spent = least(rounds * 200, again);
        let case = "frames that are dirty already, in cache".to_owned();
        let mut sheet = Sheet { bench: "dirty", case, subject, threads: 1, rows: Vec::new() };
        sheet.add("insert_ns", spent.as_nanos() as f64 / f64::from(TIMES) / frames.len() as f64, "ns");
        rows.extend(sheet.rows);
    }
    Ok(rows)
}

fn again(set: &impl DirtySet, frames: &[u64], times: u32) -> Duration {
    assert!(frames.iter().all(|&frame| set.insert(frame)));
    time(|| {
        for _ in 0..times {
            for &frame in black_box(frames) {
                set.insert(frame);
            }
        }
    })
}
