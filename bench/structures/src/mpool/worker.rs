//! The process that is measured: inside of a memory limit, with one subject and one workload.

use std::path::PathBuf;
use std::sync::atomic::{AtomicU8, Ordering};
use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use bench_common::random::{Random, mix};
use hdrhistogram::Histogram;
use serde::{Deserialize, Serialize};

use super::engine::{self, Shape, Store};
use super::files::vma_bytes;
use super::zipf::Zipf;

/// What the worker is to do.
#[derive(clap::Args)]
pub(crate) struct Worker {
    /// Who is measured
    #[arg(long)]
    subject: String,
    /// Directory of the data
    #[arg(long)]
    directory: PathBuf,
    /// Blocks of each table
    #[arg(long)]
    blocks: usize,
    /// Bytes of a block
    #[arg(long)]
    block_bytes: usize,
    /// Percent of updates
    #[arg(long)]
    updates: u64,
    /// Threads
    #[arg(long)]
    threads: usize,
    /// Seconds before measuring
    #[arg(long)]
    warm: f64,
    /// Seconds of measuring
    #[arg(long)]
    seconds: f64,
    /// The control group to enter
    #[arg(long)]
    group: PathBuf,
}

/// What came out.
#[derive(Debug, Serialize, Deserialize)]
pub(super) struct Outcome {
    pub(super) operations: u64,
    pub(super) seconds: f64,
    pub(super) read_p50_us: f64,
    pub(super) read_p99_us: f64,
    pub(super) read_p9999_us: f64,
    pub(super) update_p9999_us: f64,
    pub(super) vmas: usize,
    pub(super) vma_bytes: f64,
    pub(super) cpu_seconds: f64,
    /// Pages read from the medium, or major faults.
    pub(super) loads: u64,
    pub(super) note: String,
}

/// `(CPU seconds, major faults)` of this process so far.
fn used() -> (f64, i64) {
    let text = std::fs::read_to_string("/proc/self/stat").unwrap_or_default();
    let fields: Vec<i64> =
        text.rsplit(')').next().unwrap_or("").split_whitespace().map(|f| f.parse().unwrap_or(0)).collect();
    let field = |number: usize| fields.get(number - 3).copied().unwrap_or(0);
    ((field(14) + field(15)) as f64 / 100.0, field(12))
}

/// Times in nanoseconds, to 1 %.
type Latencies = Histogram<u64>;

fn latencies() -> Result<Latencies> {
    Ok(Histogram::new_with_bounds(1, 100_000_000_000, 2)?)
}

fn one_thread(
    store: &dyn Store,
    keys: &Zipf,
    seed: u64,
    updates: u64,
    phase: &AtomicU8,
) -> Result<(Latencies, Latencies, u64)> {
    let (mut reads, mut writes, mut sum) = (latencies()?, latencies()?, 0u64);
    let mut random = Random::new(seed);
    let mut measuring = false;
    loop {
        match phase.load(Ordering::Relaxed) {
            1 if !measuring => {
                (reads, writes, measuring) = (latencies()?, latencies()?, true);
            }
            2 => return Ok((reads, writes, sum)),
            _ => {}
        }
        let key = mix(keys.item(&mut random));
        let update = random.next() >> 32;
        let start = Instant::now();
        if update % 100 < updates {
            store.update(key, update)?;
            writes.saturating_record(start.elapsed().as_nanos() as u64);
        } else {
            sum = sum.wrapping_add(store.read(key)?);
            reads.saturating_record(start.elapsed().as_nanos() as u64);
        }
    }
}

/// Does it, and prints the outcome as JSON.
pub(crate) fn run(worker: &Worker) -> Result<()> {
    let procs = worker.group.join("cgroup.procs");
    std::fs::write(&procs, std::process::id().to_string())
        .with_context(|| format!("cannot enter {}", procs.display()))?;
    let shape = Shape { blocks: worker.blocks, block_bytes: worker.block_bytes };
    let store = engine::open(&worker.subject, &worker.directory, shape)?;
    let vmas = store.vmas();
    let keys = Zipf::new(shape.records() as u64, 0.99);
    let phase = AtomicU8::new(0);
    let (results, seconds, cpu, loads) = std::thread::scope(|scope| {
        let threads: Vec<_> = (0..worker.threads)
            .map(|i| {
                let (store, keys, phase) = (&*store, &keys, &phase);
                let updates = worker.updates;
                scope.spawn(move || one_thread(store, keys, i as u64 + 1, updates, phase))
            })
            .collect();
        std::thread::sleep(Duration::from_secs_f64(worker.warm));
        let loads = |faults: i64| store.loaded().unwrap_or(faults as u64);
        let (start, (cpu, faults)) = (Instant::now(), used());
        let before = loads(faults);
        phase.store(1, Ordering::Relaxed);
        std::thread::sleep(Duration::from_secs_f64(worker.seconds));
        phase.store(2, Ordering::Relaxed);
        let (seconds, now) = (start.elapsed().as_secs_f64(), used());
        let after = loads(now.1);
        let results: Vec<_> = threads.into_iter().map(|thread| thread.join()).collect();
        (results, seconds, now.0 - cpu, after - before)
    });
    let (mut reads, mut writes) = (latencies()?, latencies()?);
    for result in results {
        let (r, w, sum) = result.map_err(|_| anyhow::anyhow!("a thread panicked"))??;
        reads.add(r)?;
        writes.add(w)?;
        std::hint::black_box(sum);
    }
    let us = |of: &Latencies, part| of.value_at_quantile(part) as f64 / 1e3;
    let outcome = Outcome {
        operations: reads.len() + writes.len(),
        seconds,
        read_p50_us: us(&reads, 0.5),
        read_p99_us: us(&reads, 0.99),
        read_p9999_us: us(&reads, 0.9999),
        update_p9999_us: us(&writes, 0.9999),
        vmas,
        vma_bytes: vmas as f64 * vma_bytes(),
        cpu_seconds: cpu,
        loads,
        note: store.note(),
    };
    println!("{}", serde_json::to_string(&outcome)?);
    Ok(())
}
