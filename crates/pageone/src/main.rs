//! `pageone`: the program.
//!
//! Each subcommand is a module; this one reads the command line and turns errors into messages and
//! exit codes.

mod checkpoint;
mod control;
mod daemon;
mod demo;
mod demo_backend;
mod dirty;
mod doctor;
mod estimate;
mod ksm;
mod paths;
mod pool;
mod run;
mod run_ppr;
mod settings;
mod status;

use std::path::PathBuf;
use std::process::ExitCode;

use clap::{Parser, Subcommand};

/// Gives a virtual-machine host its memory back: merges identical pages of running guests, from
/// user space.
#[derive(Parser)]
#[command(version, after_help = EXIT_CODES)]
struct Cli {
    /// Directory of the daemon's sockets [default: /run/pageone for root, else
    /// $XDG_RUNTIME_DIR/pageone]
    #[arg(long, global = true, env = "PAGEONE_DIR", value_name = "DIR")]
    dir: Option<PathBuf>,
    #[command(subcommand)]
    command: Command,
}

const EXIT_CODES: &str = "\
Exit codes: 0 done · 1 failed · 2 wrong usage · 3 no daemon answers · 4 no such client · 5 the configuration is wrong ·
6 another daemon is running, or another writer of KSM's settings · 7 this host or account lacks something · 8 `estimate` left something out.
`run` has the exit code of the started program.";

#[derive(Subcommand)]
enum Command {
    /// Check everything that the kernel and this account must allow
    Doctor(doctor::Args),
    /// Run the daemon in the foreground
    Daemon(daemon::Args),
    /// Start a program whose memory is to be merged
    Run(run::Args),
    /// Show what is merged and what it costs
    Status(status::Args),
    /// Show which pages clients write, how fast, and whether a migration would converge
    Dirty(dirty::Args),
    /// Unmerge a client and give its memory back to it
    Detach(status::DetachArgs),
    /// Govern the kernel's own merging (KSM), or show what it does
    #[command(subcommand)]
    Ksm(ksm::Command),
    /// Say what merging would save, of processes, guests, files and directories; changes nothing
    Estimate(estimate::Args),
    /// Store the memory of a running guest in a pool
    Checkpoint(checkpoint::Args),
    /// Lets processes that a checkpoint has stopped go on
    #[command(hide = true)]
    CheckpointGuard(checkpoint::GuardArgs),
    /// Give the memory that a checkpoint holds back, as a file
    Restore(checkpoint::RestoreArgs),
    /// Object pools: make, show, check, remove
    Pool(pool::Args),
    /// Boot guests, merge them while they work, and show that no byte of theirs changed
    Demo(demo_backend::Args),
}

/// What a failure means for the exit code.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Code {
    NoDaemon = 3,
    NoClient = 4,
    Configuration = 5,
    SecondDaemon = 6,
    HostLacks = 7,
    LeftOut = 8,
}

/// An error with an exit code of its own.
#[derive(Debug)]
pub(crate) struct Coded(pub(crate) Code, pub(crate) String);

impl std::fmt::Display for Coded {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(&self.1)
    }
}

impl std::error::Error for Coded {}

fn main() -> ExitCode {
    let cli = Cli::parse();
    let dir = cli.dir;
    let result = match cli.command {
        Command::Doctor(args) => doctor::run(&args, dir),
        Command::Daemon(args) => daemon::run(args, dir),
        Command::Run(args) => run::run(&args, dir),
        Command::Status(args) => status::run(&args, dir),
        Command::Dirty(args) => dirty::run(&args, dir),
        Command::Detach(args) => status::detach(&args, dir),
        Command::Ksm(command) => ksm::run(&command),
        Command::Estimate(args) => estimate::run(&args),
        Command::Checkpoint(args) => checkpoint::run(&args, dir),
        Command::CheckpointGuard(args) => checkpoint::guard(&args),
        Command::Restore(args) => checkpoint::restore(&args),
        Command::Pool(args) => pool::run(&args),
        Command::Demo(args) => demo_backend::run(&args),
    };
    match result {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("pageone: {error:#}");
            let code = error.chain().find_map(|e| e.downcast_ref::<Coded>()).map_or(1, |coded| coded.0 as u8);
            ExitCode::from(code)
        }
    }
}
