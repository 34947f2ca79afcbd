//! `pageone estimate`: what merging would save, of processes, guests, files and directories.

mod text;

use anyhow::Result;
use estimate::{LeftOut, Options};

use crate::cmd::table::Tabular;
use crate::{Code, Coded};

/// Options of `pageone estimate`.
#[derive(clap::Args)]
pub(crate) struct Args {
    /// Number of a process, or path of a file or directory (write ./123 for a file of that name).
    /// Where there is no such file, the name or UUID of a guest
    #[arg(value_name = "TARGET", required_unless_present = "qemu")]
    targets: Vec<String>,
    /// All QEMU guests of this host: their guest memory
    #[arg(long)]
    qemu: bool,
    #[command(flatten)]
    answer: Tabular,
    /// Size of the objects that are compared: a power of two from 512 to 16777216
    #[arg(long, value_name = "BYTES", default_value_t = kmem::PAGE_SIZE, value_parser = chunk_size)]
    chunk: usize,
    /// Memory for the index; when it is full, a sample is counted instead
    #[arg(long, value_name = "MIB", default_value_t = 1024, value_parser = clap::value_parser!(u64).range(1..=1 << 20))]
    limit_memory: u64,
    /// Threads [default: one for each CPU]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u64).range(1..=1024))]
    threads: Option<u64>,
}

fn chunk_size(word: &str) -> Result<usize, String> {
    let size: usize = word.parse().map_err(|_| "not a number".to_string())?;
    match size {
        512..=16_777_216 if size.is_power_of_two() => Ok(size),
        _ => Err("not a power of two from 512 to 16777216".into()),
    }
}

/// Scans the targets and prints the report. An error if anything was left out.
pub(crate) fn run(args: &Args) -> Result<()> {
    let cpus = || std::thread::available_parallelism().map_or(1, usize::from);
    let options = Options {
        targets: args.targets.clone(),
        qemu: args.qemu,
        chunk: args.chunk,
        limit_bytes: args.limit_memory << 20,
        threads: args.threads.map_or_else(cpus, |threads| threads as usize),
    };
    let report = estimate::estimate(&options, &output::Progress::new(output::Shown::OnTerminal))?;
    let none = report.targets.is_empty();
    args.answer.print(&report, |width| if none { String::new() } else { text::text(&report, width) })?;
    let left_out = report.left_out.len();
    for LeftOut { target, reason } in report.left_out {
        output::note!("left out: {target}: {reason}");
    }
    match left_out {
        0 => Ok(()),
        _ if none => Err(Coded(Code::LeftOut, "nothing could be looked at".into()).into()),
        _ => Err(Coded(Code::LeftOut, "the figures are without what was left out".into()).into()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn chunks_are_powers_of_two() {
        assert_eq!(chunk_size("4096"), Ok(4096));
        for wrong in ["0", "256", "4097", "33554432", "x", "-1"] {
            assert!(chunk_size(wrong).is_err(), "{wrong}");
        }
    }
}
