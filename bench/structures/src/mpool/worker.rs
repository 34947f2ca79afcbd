//! The process that is measured: inside of a memory limit, with one subject and one workload.

use std::path::PathBuf;
use std::sync::atomic::{AtomicU8, Ordering};
use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use serde::{Deserialize, Serialize};

use super::engine::{self, Choice, Shape, Store};
use super::files::vma_bytes;
use super::histogram::Histogram;
use super::trace::{self, Sample, device_counters};
use super::zipf::Random;

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
    /// Most reads go to a few pages that fit into memory, instead of a zipfian choice
    #[arg(long)]
    hot: bool,
    /// Threads
    #[arg(long)]
    threads: usize,
    /// Seconds before measuring
    #[arg(long)]
    warm: f64,
    /// Seconds of measuring
    #[arg(long)]
    seconds: f64,
    /// A control group to enter; may be given more than once
    #[arg(long)]
    group: Vec<PathBuf>,
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
    /// See [`trace`].
    pub(super) trace: Vec<f64>,
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

fn one_thread(
    store: &dyn Store,
    choice: &Choice,
    seed: u64,
    updates: u64,
    phase: &AtomicU8,
) -> Result<(Histogram, Histogram, u64)> {
    let (mut reads, mut writes, mut sum) = (Histogram::new(), Histogram::new(), 0u64);
    let mut random = Random::new(seed);
    let mut measuring = false;
    loop {
        match phase.load(Ordering::Relaxed) {
            1 if !measuring => {
                (reads, writes, measuring) = (Histogram::new(), Histogram::new(), true);
            }
            2 => return Ok((reads, writes, sum)),
            _ => {}
        }
        let key = choice.key(&mut random);
        let update = random.next() >> 32;
        let start = Instant::now();
        if update % 100 < updates {
            store.update(key, update)?;
            writes.add(start.elapsed().as_nanos() as u64);
        } else {
            sum = sum.wrapping_add(store.read(key)?);
            reads.add(start.elapsed().as_nanos() as u64);
        }
    }
}

/// Does it, and prints the outcome as JSON.
pub(crate) fn run(worker: &Worker) -> Result<()> {
    for group in &worker.group {
        let procs = group.join("cgroup.procs");
        std::fs::write(&procs, std::process::id().to_string())
            .with_context(|| format!("cannot enter {}", procs.display()))?;
    }
    let shape = Shape { blocks: worker.blocks, block_bytes: worker.block_bytes };
    let store = engine::open(&worker.subject, &worker.directory, shape)?;
    let vmas = store.vmas();
    let choice = Choice::new(shape, worker.hot);
    let phase = AtomicU8::new(0);
    let counters = device_counters(&worker.directory);
    let (results, seconds, cpu, loads, (first, last)) = std::thread::scope(|scope| {
        let threads: Vec<_> = (0..worker.threads)
            .map(|i| {
                let (store, choice, phase) = (&*store, &choice, &phase);
                let updates = worker.updates;
                scope.spawn(move || one_thread(store, choice, i as u64 + 1, updates, phase))
            })
            .collect();
        std::thread::sleep(Duration::from_secs_f64(worker.warm));
        let loads = |faults: i64| store.loaded().unwrap_or(faults as u64);
        let (start, (cpu, faults)) = (Instant::now(), used());
        let before = loads(faults);
        let sample = || Sample::take(counters.as_deref(), store.trace());
        let first = sample();
        phase.store(1, Ordering::Relaxed);
        std::thread::sleep(Duration::from_secs_f64(worker.seconds));
        let last = sample();
        phase.store(2, Ordering::Relaxed);
        let (seconds, now) = (start.elapsed().as_secs_f64(), used());
        let after = loads(now.1);
        let results: Vec<_> = threads.into_iter().map(|thread| thread.join()).collect();
        (results, seconds, now.0 - cpu, after - before, (first, last))
    });
    let (mut reads, mut writes) = (Histogram::new(), Histogram::new());
    for result in results {
        let (r, w, sum) = result.map_err(|_| anyhow::anyhow!("a thread panicked"))??;
        reads.merge(&r);
        writes.merge(&w);
        std::hint::black_box(sum);
    }
    let outcome = Outcome {
        operations: reads.count() + writes.count(),
        seconds,
        read_p50_us: reads.quantile_us(0.5),
        read_p99_us: reads.quantile_us(0.99),
        read_p9999_us: reads.quantile_us(0.9999),
        update_p9999_us: writes.quantile_us(0.9999),
        vmas,
        vma_bytes: vmas as f64 * vma_bytes(),
        cpu_seconds: cpu,
        loads,
        trace: trace::between(&first, &last, reads.count() + writes.count()),
        note: store.note(),
    };
    println!("{}", serde_json::to_string(&outcome)?);
    Ok(())
}
