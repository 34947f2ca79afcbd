//! `--trace`: where the time of a run went, from the kernel's counters and the cache's own.
//!
//! The medium's figures are the whole device's, those of the processors the whole machine's: others
//! count too.

use std::fs;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use anyhow::{Context, Result};
/// Where a store's reads from the medium spent their time, all threads together.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Loads {
    /// Reads that missed.
    pub(super) misses: u64,
    pub(super) delayed: Duration,
    pub(super) waited: Duration,
    pub(super) reading: Duration,
    pub(super) placing: Duration,
}

/// The device that a directory lies on, as `major:minor`; of a partition the whole disk.
pub(super) fn device_of(directory: &Path) -> Result<String> {
    use std::os::unix::fs::MetadataExt;
    let device = fs::metadata(directory)?.dev();
    let number = format!("{}:{}", rustix::fs::major(device), rustix::fs::minor(device));
    let sys = Path::new("/sys/dev/block").join(&number);
    let sys = sys.canonicalize().with_context(|| format!("{} lies on no block device", directory.display()))?;
    match sys.parent() {
        Some(disk) if sys.join("partition").exists() => Ok(fs::read_to_string(disk.join("dev"))?.trim().to_owned()),
        _ => Ok(number),
    }
}

/// The numbers in a file, or on its first line that starts with `line`.
fn numbers(path: impl AsRef<Path>, line: &str) -> Vec<u64> {
    let text = fs::read_to_string(path).unwrap_or_default();
    let line = text.lines().find(|text| text.starts_with(line)).unwrap_or_default();
    line.split_whitespace().filter_map(|word| word.parse().ok()).collect()
}

/// Where the device's counters are (Documentation/block/stat.rst).
pub(super) fn device_counters(directory: &Path) -> Option<PathBuf> {
    Some(Path::new("/sys/dev/block").join(device_of(directory).ok()?).join("stat"))
}

/// Counters at a moment.
pub(super) struct Sample {
    at: Instant,
    /// Minor and major faults, user and system time in ticks, of the process.
    process: [u64; 4],
    /// Bytes that the process had read from block devices.
    bytes: u64,
    /// Nanoseconds that its threads were ready to run and did not.
    ready: u64,
    /// Reads, and milliseconds of all of them together; milliseconds with anything to do.
    device: [u64; 3],
    /// Ticks of all processors: all, idle, waiting for I/O, stolen.
    machine: [u64; 4],
    loads: Option<Loads>,
}

impl Sample {
    pub(super) fn take(counters: Option<&Path>, loads: Option<Loads>) -> Self {
        let stat = fs::read_to_string("/proc/self/stat").unwrap_or_default();
        let stat: Vec<u64> =
            stat.rsplit(')').next().unwrap_or("").split_whitespace().map(|f| f.parse().unwrap_or(0)).collect();
        let process = [10, 12, 14, 15].map(|field: usize| stat.get(field - 3).copied().unwrap_or(0));
        let tasks = fs::read_dir("/proc/self/task").into_iter().flatten().flatten();
        let ready = tasks.map(|task| numbers(task.path().join("schedstat"), "").get(1).copied().unwrap_or(0)).sum();
        let device = counters.map(|path| numbers(path, "")).unwrap_or_default();
        let machine = numbers("/proc/stat", "cpu ");
        let of = |from: &[u64], at: usize| from.get(at).copied().unwrap_or(0);
        Self {
            at: Instant::now(),
            process,
            bytes: numbers("/proc/self/io", "read_bytes").first().copied().unwrap_or(0),
            ready,
            device: [0, 3, 9].map(|at| of(&device, at)),
            machine: [machine.iter().take(8).sum(), of(&machine, 3), of(&machine, 4), of(&machine, 7)],
            loads,
        }
    }
}

/// Names and units, in the order of the figures.
const FIGURES: [(&str, &str); 17] = [
    ("trace_misses_per_operation", ""),
    ("trace_pages_read_per_miss", ""),
    ("trace_minor_faults_per_operation", ""),
    ("trace_medium_mib_per_second", "MiB/s"),
    ("trace_medium_reads_per_second", "1/s"),
    ("trace_medium_us_per_read", "us"),
    ("trace_medium_reads_at_a_time", ""),
    ("trace_medium_busy", "%"),
    ("trace_user_us_per_operation", "us"),
    ("trace_system_us_per_operation", "us"),
    ("trace_ready_us_per_operation", "us"),
    ("trace_processors_idle", "%"),
    ("trace_processors_stolen", "%"),
    ("trace_miss_delayed_us", "us"),
    ("trace_miss_waited_for_memory_us", "us"),
    ("trace_miss_read_us", "us"),
    ("trace_miss_placed_us", "us"),
];

/// The figures between two samples, as [`rows`] names them.
pub(super) fn between(before: &Sample, after: &Sample, operations: u64) -> Vec<f64> {
    let (seconds, operations) = ((after.at - before.at).as_secs_f64(), operations.max(1) as f64);
    let [minor, major, user, system] = [0, 1, 2, 3].map(|i| after.process[i].saturating_sub(before.process[i]) as f64);
    let [reads, read_ms, busy_ms] = [0, 1, 2].map(|i| after.device[i].saturating_sub(before.device[i]) as f64);
    let [all, idle, io, stolen] = [0, 1, 2, 3].map(|i| after.machine[i].saturating_sub(before.machine[i]) as f64);
    let bytes = after.bytes.saturating_sub(before.bytes) as f64;
    let (loads, earlier) = (after.loads.unwrap_or_default(), before.loads.unwrap_or_default());
    let misses = if after.loads.is_some() { loads.misses.saturating_sub(earlier.misses) as f64 } else { major };
    let us = |time: fn(&Loads) -> Duration| (time(&loads) - time(&earlier)).as_nanos() as f64 / 1e3 / misses.max(1.0);
    let share = |part: f64, whole: f64| 100.0 * part / whole.max(1e-9);
    vec![
        misses / operations,
        bytes / 4096.0 / misses.max(1.0),
        minor / operations,
        bytes / f64::from(1 << 20) / seconds,
        reads / seconds,
        read_ms * 1e3 / reads.max(1.0),
        read_ms / 1e3 / seconds,
        share(busy_ms / 1e3, seconds),
        user * 1e4 / operations,
        system * 1e4 / operations,
        after.ready.saturating_sub(before.ready) as f64 / 1e3 / operations,
        share(idle + io, all),
        share(stolen, all),
        us(|loads| loads.delayed),
        us(|loads| loads.waited),
        us(|loads| loads.reading),
        us(|loads| loads.placing),
    ]
}

/// Names, values and units.
pub(super) fn rows(figures: &[f64]) -> impl Iterator<Item = (&'static str, f64, &'static str)> {
    FIGURES.into_iter().zip(figures).map(|((name, unit), value)| (name, *value, unit))
}
