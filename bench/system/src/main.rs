//! `pageone-bench NAME [--json] [--quick]`: every figure that the project publishes, and its
//! rivals, in one run.
//!
//! The real `pageone` program is measured from outside, as an operator could: nothing of the engine
//! is linked. Each bench is a module that returns [`report::Row`]s. `docs/benchmarks.md` has the
//! figures and how to read them.

mod harness;
mod questions;
mod structures;
mod subjects;

use std::process::ExitCode;

use anyhow::Result;
use clap::{Parser, Subcommand};

use crate::harness::{hold, report};
use crate::questions::{checkpoint, estimate, governor, guests, idle, merge, ppr, steady};
use crate::structures::{dirty, mpool, sdtree};

/// Measures PageONE and its rivals.
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
    /// What an idle host costs whose memory is merged; rival: the kernel's KSM
    Idle,
    /// How fast and how gently identical pages are merged; rival: the kernel's KSM
    Merge(merge::Options),
    /// What it costs to keep working guests merged, and how soon something new is found; rival: the
    /// kernel's KSM
    Steady(steady::Options),
    /// Guests of the demo under nothing, KSM and PageONE
    Guests(guests::Options),
    /// What it costs to note dirty frames and to harvest them; rivals: bitmap, list, the published
    /// tree, other sets
    Dirty,
    /// How fast `pageone estimate` looks at a file; rivals: a BTreeMap, a hash table, sha256sum
    Estimate,
    /// Object pools and mcache maps; rivals: files mapped one by one, fio, RocksDB
    Mpool(mpool::Options),
    /// Guests whose free pages are taken back; rivals: nothing, KSM, free page reporting
    Ppr(ppr::Options),
    /// A process of the mpool bench, in a memory control group
    #[command(hide = true)]
    MpoolWorker(mpool::Worker),
    /// Guests stored in a pool while they run
    Checkpoint(checkpoint::Options),
    /// What governing KSM costs and holds; rivals: static settings, the kernel's advisor, ksmtuned
    Governor(governor::Options),
    /// The load of `governor`: fills memory and holds it
    #[command(hide = true)]
    GovernorLoad {
        /// Pages to fill
        pages: usize,
        /// Number of the process
        number: usize,
    },
    /// The SD tree on pages as keys; rivals: ordered maps, KSM's red-black tree, hash maps
    Sdtree(sdtree::Options),
    /// The client of the benches: fills memory and holds it
    #[command(hide = true)]
    HoldMemory(hold::Holding),
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
        Bench::Idle => idle::run(cli.quick)?,
        Bench::Merge(ref options) => merge::run(options, cli.quick)?,
        Bench::Steady(ref options) => steady::run(options, cli.quick)?,
        Bench::Guests(ref options) => guests::run(options, cli.quick)?,
        Bench::Dirty => dirty::run(cli.quick)?,
        Bench::Estimate => estimate::run(cli.quick)?,
        Bench::Mpool(ref options) => mpool::run(options, cli.quick)?,
        Bench::Ppr(ref options) => ppr::run(options, cli.quick)?,
        Bench::MpoolWorker(ref worker) => return mpool::work(worker),
        Bench::Checkpoint(ref options) => checkpoint::run(options, cli.quick)?,
        Bench::Governor(ref options) => governor::run(options, cli.quick)?,
        Bench::GovernorLoad { pages, number } => return governor::load::run(pages, number),
        Bench::Sdtree(ref options) => sdtree::run(options, cli.quick)?,
        Bench::HoldMemory(ref holding) => return hold::run(holding),
    };
    if cli.json {
        for row in &rows {
            println!("{}", serde_json::to_string(row)?);
        }
    } else {
        print!("{}", report::table(&rows));
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn options_may_stand_behind_the_name() {
        let cli = Cli::try_parse_from(["pageone-bench", "idle", "--json", "--quick"]).unwrap();
        assert!(cli.json && cli.quick && matches!(cli.bench, Bench::Idle));
        assert!(Cli::try_parse_from(["pageone-bench"]).is_err());
    }
}
