//! `mpool`: object pools and mcache maps against plain files and `mmap` of each mblock on its own.
//!
//! - `map`: making and removing a map of 1,000 mblocks, against 1,000 mappings of files;
//! - `sequential`: writing and reading one mblock after the other, against `fio` in the same
//!   directory;
//! - `encrypted`: the same, and pages one by one, in an encrypted pool beside one that is not;
//! - `commits`: committing objects, one thread and 64;
//! - `ycsb-b`, `ycsb-c`: point reads and updates on sorted tables four times as large as the memory
//!   limit ([`ycsb`]).

mod commits;
mod encrypted;
mod engine;
mod files;
mod maps;
mod sequential;
mod worker;
mod ycsb;
mod zipf;

use std::path::PathBuf;

use anyhow::{Context, Result};

use bench_common::report::Row;

pub(crate) use worker::{Worker, run as work};

/// What to measure, and where.
#[derive(clap::Args)]
pub(crate) struct Options {
    /// Only this: map, sequential, encrypted, commits, ycsb-b or ycsb-c
    #[arg(long)]
    only: Option<String>,
    /// Only these of ycsb's subjects: pageone, pageone-no-reaper, mmap, mmap-default,
    /// touched, touched-no-reaper (pages are touched, not asked for, with read-ahead)
    #[arg(long, value_delimiter = ',')]
    subjects: Vec<String>,
    /// Directory for the data, on the medium to be measured [default: a temporary one]
    #[arg(long)]
    data: Option<PathBuf>,
    /// Rounds; medians are printed
    #[arg(long)]
    rounds: Option<usize>,
    /// Threads of ycsb
    #[arg(long, value_name = "N", default_value_t = 8)]
    threads: usize,
    /// Seconds of ycsb before measuring; a slow medium takes long to fill the memory [default: 10;
    /// with --quick 5]
    #[arg(long, value_name = "S")]
    warm: Option<f64>,
}

/// Runs the bench.
pub(crate) fn run(options: &Options, quick: bool) -> Result<Vec<Row>> {
    let place = options.data.clone().unwrap_or_else(std::env::temp_dir);
    std::fs::create_dir_all(&place)?;
    let directory = tempfile::Builder::new().prefix("pageone-bench-mpool-").tempdir_in(place);
    let directory = directory.context("cannot make a directory for the data")?;
    let wanted = |name: &str| options.only.as_deref().is_none_or(|only| name == only);
    let rounds = options.rounds.unwrap_or(if quick { 1 } else { 3 }).max(1);
    let mut rows = Vec::new();
    if wanted("map") {
        rows.extend(maps::run(directory.path(), quick).context("map")?);
    }
    if wanted("sequential") {
        rows.extend(sequential::run(directory.path(), quick, rounds).context("sequential")?);
    }
    if wanted("encrypted") {
        rows.extend(encrypted::run(directory.path(), quick, rounds).context("encrypted")?);
    }
    if wanted("commits") {
        rows.extend(commits::run(directory.path(), quick, rounds).context("commits")?);
    }
    let workloads: Vec<ycsb::Workload> =
        ycsb::Workload::ALL.into_iter().filter(|workload| wanted(workload.name())).collect();
    if !workloads.is_empty() {
        rows.extend(ycsb::run(directory.path(), quick, rounds, &workloads, options).context("ycsb")?);
    }
    Ok(rows)
}

/// The middle one.
fn median(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    values.get(values.len() / 2).copied().unwrap_or(0.0)
}
