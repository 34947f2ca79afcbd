//! `pageone-bench NAME [--json] [--quick]`: every figure that the project publishes, and its rivals, in one run.
//!
//! The real `pageone` program is measured from outside, as an operator could: nothing of the engine is linked. Each bench is a
//! module that returns [`report::Row`]s. `docs/benchmarks.md` has the figures and how to read them.

mod cpu;
mod hold;
mod idle;
mod interrupt;
mod ksm;
mod pageone;
mod report;

use std::process::ExitCode;

use anyhow::Result;
use clap::{Parser, Subcommand};

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
    /// The client of the benches: fills memory and holds it
    #[command(hide = true)]
    HoldMemory {
        /// Pages to fill
        pages: usize,
    },
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
        Bench::HoldMemory { pages } => return hold::run(pages),
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
