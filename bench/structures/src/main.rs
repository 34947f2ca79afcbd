//! `pageone-bench-structures NAME [--json] [--quick]`: the data structures that PageONE is made of,
//! each beside its rivals in one run. `pageone-bench NAME` starts it too.

#![allow(clippy::print_stdout, clippy::print_stderr, reason = "prints for who runs it")]

mod dedup;
mod dirty;
mod mpool;
mod sdtree;

use std::process::ExitCode;

use anyhow::Result;
use bench_common::report;
use clap::{Parser, Subcommand};

/// Measures PageONE's data structures and their rivals.
#[derive(Parser)]
#[command(version)]
struct Cli {
    /// One JSON object a line instead of a table
    #[arg(long, global = true)]
    json: bool,
    /// Less memory and less time: shows that it runs; the figures are rough
    #[arg(long, global = true)]
    quick: bool,
    #[command(subcommand)]
    bench: Bench,
}

#[derive(Subcommand)]
enum Bench {
    /// The index of a pool's pages at scale, by simulated hashes, and removing checkpoints
    Dedup(dedup::Options),
    /// What it costs to note dirty frames and to harvest them; rivals: bitmap, list, the published
    /// tree, other sets
    Dirty,
    /// Object pools and mcache maps; rivals: files mapped one by one, fio, RocksDB
    Mpool(mpool::Options),
    /// A process of the mpool bench, in a memory control group
    #[command(hide = true)]
    MpoolWorker(mpool::Worker),
    /// The SD tree on pages as keys; rivals: ordered maps, KSM's red-black tree, hash maps
    Sdtree(sdtree::Options),
}

fn main() -> ExitCode {
    match run(&Cli::parse()) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("pageone-bench: {error:#}");
            ExitCode::FAILURE
        }
    }
}

fn run(cli: &Cli) -> Result<()> {
    let rows = match cli.bench {
        Bench::Dedup(ref options) => dedup::run(options, cli.quick)?,
        Bench::Dirty => dirty::run(cli.quick)?,
        Bench::Mpool(ref options) => mpool::run(options, cli.quick)?,
        Bench::MpoolWorker(ref worker) => return mpool::work(worker),
        Bench::Sdtree(ref options) => sdtree::run(options, cli.quick)?,
    };
    report::print(&rows, cli.json)
}
