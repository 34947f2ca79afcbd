//! `pageone-bench NAME [--json] [--quick]`: every figure that the project publishes, and its
//! rivals, in one run.
//!
//! The real `pageone` program is measured from outside, as an operator could: nothing of the engine
//! is linked. Each bench is a module of `questions` that returns [`report::Row`]s. The benches of
//! data structures (`dirty`, `mpool`, `sdtree`) are a program of their own with many rivals, so
//! that these here build without them; this program starts that one. `docs/benchmarks.md` has the
//! figures and how to read them.

#![allow(clippy::print_stdout, clippy::print_stderr, reason = "prints for who runs it")]

mod harness;
mod questions;
mod subjects;

use std::ffi::OsString;
use std::os::unix::process::CommandExt;
use std::process::{Command, ExitCode};

use anyhow::{Context, Result};
use bench_common::{own_program, report};
use clap::{Parser, Subcommand};

use crate::harness::hold;
use crate::questions::{
    checkpoint, estimate, governor, guests, idle, kvm, merge, module, ppr, scale, scrape, see, steady,
};

/// Measures PageONE and its rivals.
#[derive(Parser)]
#[command(
    version,
    after_help = "Data structures, each beside its rivals: dirty, mpool, sdtree; the index of pools: dedup"
)]
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
    /// Guests on KVM under nothing, KSM and PageONE: their work, and what KVM counts
    Kvm(kvm::Options),
    /// A guest in a file of the module's beside one under nothing, and the same under KSM: their
    /// work while they are merged, and afterwards
    Module(module::Options),
    /// How fast `pageone estimate` looks at a file; rivals: a hash table, sha256sum
    Estimate,
    /// Guests whose free pages are taken back; rivals: nothing, KSM, free page reporting
    Ppr(ppr::Options),
    /// What 1,000 clients and 1 TiB cost, what is given back, and what threads share; rival: the
    /// kernel's KSM
    Scale(scale::Options),
    /// What a scrape of the metrics costs, and a status, with 64 clients
    Scrape,
    /// What `pageone top` and `record` cost with 64 clients; an hour's recording, and jumps in it
    See(see::Options),
    /// Guests stored in a pool while they run
    Checkpoint(checkpoint::Options),
    /// What governing KSM costs and holds; rivals: static settings, the kernel's advisor, ksmtuned
    Governor(governor::Options),
    /// The client of the benches: fills memory and holds it
    #[command(hide = true)]
    HoldMemory(hold::Holding),
    #[command(external_subcommand)]
    Structure(Vec<OsString>),
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
        Bench::Kvm(ref options) => kvm::run(options, cli.quick)?,
        Bench::Module(ref options) => module::run(options, cli.quick)?,
        Bench::Estimate => estimate::run(cli.quick)?,
        Bench::Ppr(ref options) => ppr::run(options, cli.quick)?,
        Bench::Scale(ref options) => scale::run(options, cli.quick)?,
        Bench::See(ref options) => see::run(options, cli.quick)?,
        Bench::Scrape => scrape::run(cli.quick)?,
        Bench::Checkpoint(ref options) => checkpoint::run(options, cli.quick)?,
        Bench::Governor(ref options) => governor::run(options, cli.quick)?,
        Bench::HoldMemory(ref holding) => return hold::run(holding),
        Bench::Structure(ref words) => return structures(words, cli),
    };
    report::print(&rows, cli.json)
}

/// Becomes the program with the benches of data structures, which lies beside this one.
///
/// # Errors
///
/// When it is not there.
fn structures(words: &[OsString], cli: &Cli) -> Result<()> {
    let program = own_program()?.with_file_name("pageone-bench-structures");
    let options = [(cli.json, "--json"), (cli.quick, "--quick")];
    let options = options.into_iter().filter_map(|(set, name)| set.then_some(name));
    let error = Command::new(&program).args(words).args(options).exec();
    Err(error).with_context(|| format!("cannot start {}; build it with `make build`", program.display()))
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
