//! `ycsb-b` and `ycsb-c`: 95 % or 100 % reads of records of 1 KiB, zipfian 0.99, from tables four
//! times as large as the memory limit.
//!
//! Every run is a process of its own in a memory control group of its own, with a cold page cache;
//! it runs for a while before it is measured. Subjects take turns.

use std::collections::BTreeMap;
use std::fs;
use std::io::IoSlice;
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use ::mpool::{AlignedBuf, Allocation, MblockWriter, Pool};
use anyhow::{Context, Result, ensure};

use super::engine::{self, RECORD, Shape, TABLES, fill_record};
use super::files::drop_page_cache;
use super::worker::Outcome;
use super::{Options, median};
use bench_common::own_program;
use bench_common::report::{Row, Sheet};

/// Which mix.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Workload {
    B,
    C,
}

impl Workload {
    pub(super) const ALL: [Self; 2] = [Self::B, Self::C];

    pub(super) fn name(self) -> &'static str {
        match self {
            Self::B => "ycsb-b",
            Self::C => "ycsb-c",
        }
    }

    /// The subjects that take part when none are named.
    fn subjects(self) -> Vec<&'static str> {
        match self {
            Self::B => SUBJECTS.to_vec(),
            Self::C => SUBJECTS.iter().chain(&TOUCHED).copied().collect(),
        }
    }

    /// Percent.
    fn updates(self) -> u64 {
        match self {
            Self::B => 5,
            Self::C => 0,
        }
    }
}

const SUBJECTS: [&str; 4] = ["pageone", "pageone-no-reaper", "mmap", "mmap-default"];

/// Pages are touched, not asked for.
const TOUCHED: [&str; 2] = ["touched", "touched-no-reaper"];

/// A memory control group, version 1 or 2.
struct Group(PathBuf);

impl Group {
    fn new(limit: usize) -> Result<Self> {
        let name = format!("pageone-bench-{}", std::process::id());
        let v1 = Path::new("/sys/fs/cgroup/memory");
        let (top, file) = if v1.join("memory.limit_in_bytes").exists() {
            (v1, "memory.limit_in_bytes")
        } else {
            // The root of version 2 has to hand the controller on.
            let _ = fs::write("/sys/fs/cgroup/cgroup.subtree_control", "+memory");
            (Path::new("/sys/fs/cgroup"), "memory.max")
        };
        let group = Self(top.join(&name));
        fs::create_dir(&group.0).with_context(|| format!("cannot make {}; are you root?", group.0.display()))?;
        fs::write(group.0.join(file), limit.to_string()).context("cannot set the memory limit")?;
        let _ = fs::write(group.0.join("memory.swap.max"), "0");
        Ok(group)
    }
}

impl Drop for Group {
    fn drop(&mut self) {
        // Pages that are still charged move up when the group goes.
        for _ in 0..20 {
            if fs::remove_dir(&self.0).is_ok() {
                return;
            }
            std::thread::sleep(std::time::Duration::from_millis(50));
        }
    }
}

/// Writes the tables: as mblocks, and as files with the same bytes.
fn prepare(directory: &Path, shape: Shape) -> Result<()> {
    let keys = shape.keys();
    let pool = Pool::create(&directory.join("pool"), "bench")?;
    let files = directory.join("files");
    fs::create_dir_all(&files)?;
    let mut bytes = AlignedBuf::zeroed(shape.block_bytes);
    for (block, keys) in keys.chunks(shape.block_bytes / RECORD).enumerate() {
        for (record, key) in bytes.chunks_exact_mut(RECORD).zip(keys) {
            fill_record(record, *key, 0);
        }
        let mut writer = pool.mblock_alloc(Allocation { capacity: bytes.len() as u64, ..Allocation::default() })?;
        writer.write(&[IoSlice::new(&bytes)])?;
        MblockWriter::commit(writer)?;
        let mut file = fs::OpenOptions::new();
        file.write(true).create(true).truncate(true).custom_flags(libc::O_DIRECT);
        let path = Shape::table_file(&files, block);
        let file = file.open(&path).with_context(|| format!("cannot make {}", path.display()))?;
        std::os::unix::fs::FileExt::write_all_at(&file, &bytes, 0)?;
    }
    ensure!(pool.mblocks().len() == TABLES * shape.blocks, "as many mblocks as blocks");
    Ok(())
}

struct Plan {
    shape: Shape,
    limit: usize,
    warm: f64,
    seconds: f64,
    threads: usize,
}

fn one(directory: &Path, plan: &Plan, workload: Workload, subject: &str) -> Result<Outcome> {
    drop_page_cache();
    let group = Group::new(plan.limit)?;
    let mut command = Command::new(own_program()?);
    command.args(["mpool-worker", "--subject", subject, "--updates", &workload.updates().to_string()]);
    command.arg("--directory").arg(directory).arg("--group").arg(&group.0);
    let numbers = [
        ("--blocks", plan.shape.blocks.to_string()),
        ("--block-bytes", plan.shape.block_bytes.to_string()),
        ("--threads", plan.threads.to_string()),
        ("--warm", plan.warm.to_string()),
        ("--seconds", plan.seconds.to_string()),
    ];
    for (name, value) in &numbers {
        command.arg(name).arg(value);
    }
    let out = command.stderr(Stdio::inherit()).output().context("cannot start the worker")?;
    engine::clean(directory, plan.shape)?;
    ensure!(out.status.success(), "{subject} failed in {}: {}", workload.name(), out.status);
    serde_json::from_slice(&out.stdout).context("the worker's answer")
}

/// Runs the workloads.
pub(super) fn run(
    directory: &Path,
    quick: bool,
    rounds: usize,
    workloads: &[Workload],
    options: &Options,
) -> Result<Vec<Row>> {
    let shape = match quick {
        true => Shape { blocks: 4, block_bytes: 8 << 20 },
        false => Shape { blocks: 8, block_bytes: 16 << 20 },
    };
    let (warm, seconds) = if quick { (5.0, 5.0) } else { (10.0, 10.0) };
    let warm = options.warm.unwrap_or(warm);
    let (limit, threads) = (shape.bytes() / 4, options.threads.max(1));
    eprintln!("mpool: writing {} MiB, twice", shape.bytes() >> 20);
    let all: Vec<&'static str> = SUBJECTS.iter().chain(&TOUCHED).copied().collect();
    let named: Vec<&'static str> = all.iter().filter(|s| options.subjects.iter().any(|o| o == *s)).copied().collect();
    prepare(directory, shape)?;
    let mut rows = Vec::new();
    for &workload in workloads {
        let subjects = if named.is_empty() { workload.subjects() } else { named.clone() };
        let plan = Plan { shape, limit, warm, seconds, threads };
        let outcomes = measure(directory, &plan, workload, &subjects, rounds);
        rows.extend(figures(&plan, workload, &subjects, &outcomes));
    }
    Ok(rows)
}

/// Runs every subject in each round; a subject that fails is left out of that round.
fn measure<'a>(
    directory: &Path,
    plan: &Plan,
    workload: Workload,
    subjects: &[&'a str],
    rounds: usize,
) -> BTreeMap<&'a str, Vec<Outcome>> {
    let mut outcomes: BTreeMap<&str, Vec<Outcome>> = BTreeMap::new();
    for round in 0..rounds {
        for &subject in subjects {
            let outcome = match one(directory, plan, workload, subject) {
                Ok(outcome) => outcome,
                // Killed in its control group, for example: the others go on.
                Err(error) => {
                    eprintln!("mpool: FAILED {error:#}");
                    continue;
                }
            };
            let (rate, name) = (outcome.operations as f64 / outcome.seconds, workload.name());
            eprintln!("mpool: {name} round {round}: {subject}: {rate:.0} operations/s {}", outcome.note);
            outcomes.entry(subject).or_default().push(outcome);
        }
    }
    outcomes
}

/// The medians of all rounds.
fn figures(
    plan: &Plan,
    workload: Workload,
    subjects: &[&'static str],
    outcomes: &BTreeMap<&str, Vec<Outcome>>,
) -> Vec<Row> {
    let shape = plan.shape;
    let case = format!(
        "{}, {TABLES} tables of {} blocks of {} MiB, {} MiB of memory, {} threads",
        workload.name(),
        shape.blocks,
        shape.block_bytes >> 20,
        plan.limit >> 20,
        plan.threads
    );
    let mut sheet = Sheet { bench: "mpool", case, subject: "", threads: plan.threads, rows: Vec::new() };
    for &subject in subjects {
        let Some(outcomes) = outcomes.get(subject) else { continue };
        sheet.subject = subject;
        let of = |f: fn(&Outcome) -> f64| median(outcomes.iter().map(f).collect());
        sheet.add("ops_per_second", of(|o| o.operations as f64 / o.seconds), "1/s");
        sheet.add("read_p50_us", of(|o| o.read_p50_us), "us");
        sheet.add("read_p99_us", of(|o| o.read_p99_us), "us");
        sheet.add("read_p9999_us", of(|o| o.read_p9999_us), "us");
        if workload.updates() > 0 {
            sheet.add("update_p9999_us", of(|o| o.update_p9999_us), "us");
        }
        sheet.add("loads_per_operation", of(|o| o.loads as f64 / o.operations as f64), "");
        sheet.add("vmas", of(|o| o.vmas as f64), "");
        sheet.add("vma_bytes", of(|o| o.vma_bytes), "B");
        sheet.add("cpu_seconds", of(|o| o.cpu_seconds), "s");
        sheet.add("cpu_us_per_operation", of(|o| o.cpu_seconds * 1e6 / o.operations as f64), "us");
    }
    ratios(&mut sheet);
    sheet.rows
}

/// How each subject compares with itself without a reaper, and with files that are mapped.
fn ratios(sheet: &mut Sheet) {
    let rows = sheet.rows.clone();
    let value = |subject: &str, metric: &str| {
        rows.iter().find(|row| row.subject == subject && row.metric == metric).map(|row| row.value)
    };
    for subject in ["pageone", "pageone-no-reaper", "touched", "touched-no-reaper"] {
        sheet.subject = subject;
        let mut add = |name, metric, rival: &str| {
            if let (Some(ours), Some(theirs)) = (value(subject, metric), value(rival, metric)) {
                sheet.add(name, ours / theirs, "x");
            }
        };
        add("cpu_times_mmap", "cpu_us_per_operation", "mmap");
        add("ops_times_mmap", "ops_per_second", "mmap");
        if !subject.ends_with("no-reaper") {
            let without = format!("{subject}-no-reaper");
            add("ops_times_no_reaper", "ops_per_second", &without);
            add("cpu_times_no_reaper", "cpu_us_per_operation", &without);
            add("p9999_times_no_reaper", "read_p9999_us", &without);
        }
    }
}
