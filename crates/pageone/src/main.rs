//! `pageone`: the command line.
//!
//! Each subcommand is a module in `cmd`. This one reads the command line, runs the subcommand, and
//! turns an error into a message and an exit code.

mod account;
mod cmd;
mod exit;
mod paths;
mod program;
#[cfg(test)]
mod reference;
mod service;
#[cfg(test)]
mod tests;

use std::borrow::Cow;
use std::ffi::OsString;
use std::io::Write;
use std::path::PathBuf;
use std::process::ExitCode;

use clap::{Parser, Subcommand};
use output::StdoutError;
use signal_hook::consts::SIGPIPE;

use crate::cmd::{
    attach, checkpoint, config, daemon, demo, detach, dirty, doctor, estimate, generate, ksm, metrics, pool, ppr,
    record, replay, report, run, snapshot, status, top,
};
pub(crate) use crate::exit::{Code, Coded};

/// Gives a virtual-machine host its memory back: merges identical pages of running guests, from
/// user space.
#[derive(Parser)]
#[command(version, after_help = exit::help())]
struct Cli {
    /// Directory of the daemon's sockets [environment: PAGEONE_DIR] [default: /run/pageone for
    /// root, else $XDG_RUNTIME_DIR/pageone]
    #[arg(long, global = true, value_name = "DIR")]
    dir: Option<PathBuf>,
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// Say what keeps memory from being merged, on this host and in each guest, and what mends it
    Doctor(doctor::Args),
    /// Run the daemon in the foreground
    Daemon(daemon::Args),
    /// Check the daemon's configuration file, or print a sample
    #[command(subcommand)]
    Config(config::Command),
    /// Start a program whose memory is to be merged
    Run(run::Args),
    /// Merge a program that runs already, and was not started by `run`
    Attach(attach::Args),
    /// Show what is merged and what it costs
    Status(status::Args),
    /// Show the host and its guests, live
    Top(top::Args),
    /// Record what `top` shows into a file
    Record(record::Args),
    /// Show a recording as `top` does, at any of its moments
    Replay(replay::Args),
    /// Make a page, tables or JSON of a recording
    Report(report::Args),
    /// Print the status for Prometheus (OpenMetrics), or answer its scrapes
    Metrics(metrics::Args),
    /// Show which pages clients write, how fast, and whether a migration would converge
    Dirty(dirty::Args),
    /// Unmerge a client and give its memory back to it
    Detach(detach::Args),
    /// Pause the recycling of a guest's free pages, so that the guest can be saved or migrated
    #[command(subcommand)]
    Ppr(ppr::Command),
    /// Govern the kernel's own merging (KSM), or show what it does
    #[command(subcommand)]
    Ksm(ksm::Command),
    /// Say what merging would save, of processes, guests, files and directories; changes nothing
    Estimate(estimate::Args),
    /// Store the memory of a running guest in a pool
    Checkpoint(checkpoint::Args),
    /// Give the memory that a checkpoint holds back, as a file
    Restore(checkpoint::RestoreArgs),
    /// Store running guests with their devices, and start new ones that go on from there
    #[command(subcommand)]
    Snapshot(snapshot::Command),
    /// Lets go on what a command has stopped, when that has ended or hangs
    #[command(hide = true)]
    Guard,
    /// Has free pages of a guest taken back again when a snapshot was taken
    #[command(hide = true)]
    PprGuard { pid: i32 },
    /// Reads a snapshot's memory for the kernel; `snapshot run` starts it
    #[command(hide = true)]
    SnapshotServer {
        pool: PathBuf,
        name: String,
        #[arg(long)]
        record: Option<PathBuf>,
        /// The descriptor of a lease
        #[arg(long)]
        lease: i32,
    },
    /// Object pools: make, show, check, remove
    Pool(pool::Args),
    /// Write man pages and shell completions, for packages
    #[command(hide = true)]
    Generate(generate::Args),
    /// Boot guests, merge them while they work, and show that no byte of theirs changed
    Demo(demo::Args),
}

fn main() -> ExitCode {
    let words: Vec<_> = std::env::args_os().collect();
    let done = match parse(&words) {
        Ok(cli) => check_pages(&cli.command, kmem::page_size()).and_then(|()| mend_and_run(cli)),
        Err(wrong) if wrong.use_stderr() => return say_usage(&wrong),
        Err(help) => help.print().map_err(|error| StdoutError::from(error).into()),
    };
    match done.and_then(|()| Ok(output::print(format_args!(""))?)) {
        Ok(()) => ExitCode::SUCCESS,
        // As `cat` ends, and with what a shell makes of it should the signal be blocked.
        Err(error) if error.chain().any(output::is_closed) => {
            let _ = signal_hook::low_level::emulate_default_handler(SIGPIPE);
            ExitCode::from(128 + SIGPIPE as u8)
        }
        Err(error) => {
            let text = format!("pageone: {error:#}\n");
            let priority = service::logs_to_journal().then_some(3);
            let _ = service::Line(priority).write_all(text.as_bytes());
            ExitCode::from(Code::of(&error) as u8)
        }
    }
}

/// Says what is wrong with the command line. Its words may be another's: a terminal obeys none.
fn say_usage(wrong: &clap::Error) -> ExitCode {
    let text = wrong.render().to_string();
    let _ = match output::text::shown(&text) {
        Cow::Borrowed(_) => wrong.print(),
        Cow::Owned(shown) => service::Line(None).write_all(shown.as_bytes()),
    };
    ExitCode::from(wrong.exit_code() as u8)
}

/// Reads the command line. `pageone help COMMAND --help` is `pageone help COMMAND`: clap takes the
/// last word for a command.
fn parse(words: &[OsString]) -> Result<Cli, clap::Error> {
    use clap::error::{ContextKind, ContextValue};
    let asks = |word: &OsString| word == "--help" || word == "-h";
    Cli::try_parse_from(words).or_else(|wrong| match wrong.get(ContextKind::InvalidSubcommand) {
        Some(ContextValue::String(word)) if asks(&word.into()) => {
            Cli::try_parse_from(words.iter().filter(|word| !asks(word)))
        }
        _ => Err(wrong),
    })
}

/// Breaks text into lines of at most `width` characters; `first` stands before the first line,
/// `rest` before the others.
fn reflow(text: &str, first: &str, rest: &str, width: usize) -> String {
    let mut lines = vec![first.to_owned()];
    for word in text.split_whitespace() {
        let Some(line) = lines.last_mut() else { continue };
        let is_empty = line.as_str() == first || line.as_str() == rest;
        if is_empty || line.chars().count() + 1 + word.chars().count() <= width {
            line.push_str(if is_empty { "" } else { " " });
            line.push_str(word);
        } else {
            lines.push(format!("{rest}{word}"));
        }
    }
    lines.join("\n")
}

/// Refuses kernels whose pages have another size, in bytes, than the one that all counts here are
/// in. `doctor` reports it among the rest; `run` starts its program all the same.
fn check_pages(command: &Command, found: usize) -> anyhow::Result<()> {
    if matches!(command, Command::Doctor(_) | Command::Run(_)) {
        return Ok(());
    }
    Ok(kmem::check_page_size(found).map_err(|e| Coded(Code::HostLacks, e.to_string()))?)
}

/// Runs a command. What an earlier one has left is put back first, and what this one leaves after
/// it.
fn mend_and_run(mut cli: Cli) -> anyhow::Result<()> {
    cli.dir = paths::named(cli.dir.as_deref(), "PAGEONE_DIR");
    use Command::{Generate, Guard, PprGuard, Run, SnapshotServer};
    if matches!(cli.command, Guard | PprGuard { .. } | SnapshotServer { .. } | Run(_) | Generate(_)) {
        return run_command(cli);
    }
    let dir = cli.dir.clone();
    paths::mend(dir.as_deref());
    run_command(cli).inspect_err(|_| paths::mend(dir.as_deref()))
}

fn run_command(cli: Cli) -> anyhow::Result<()> {
    let dir = cli.dir;
    match cli.command {
        Command::Doctor(args) => doctor::run(&args, dir),
        Command::Daemon(args) => daemon::run(args, dir),
        Command::Config(command) => config::run(&command),
        Command::Run(args) => run::run(&args, dir),
        Command::Attach(args) => attach::run(&args, dir),
        Command::Status(args) => status::run(&args, dir),
        Command::Top(args) => top::run(&args, dir),
        Command::Record(args) => record::run(&args, dir),
        Command::Replay(args) => replay::run(&args),
        Command::Report(args) => report::run(&args),
        Command::Metrics(args) => metrics::run(&args, dir),
        Command::Dirty(args) => dirty::run(&args, dir),
        Command::Detach(args) => detach::run(&args, dir),
        Command::Ppr(command) => ppr::run(&command, dir),
        Command::Ksm(command) => ksm::run(&command),
        Command::Estimate(args) => estimate::run(&args),
        Command::Checkpoint(args) => checkpoint::run(&args, dir),
        Command::Restore(args) => checkpoint::restore(&args),
        Command::Snapshot(command) => snapshot::run(&command, dir),
        Command::Guard => snapshot::guard(),
        Command::PprGuard { pid } => snapshot::recycling::guard(pid, dir),
        Command::SnapshotServer { record, lease, .. } => snapshot::clones::serve(lease, record.as_deref()),
        Command::Pool(args) => pool::run(&args),
        Command::Generate(args) => generate::run(&args),
        Command::Demo(args) => demo::run(&args),
    }
}
