//! `pageone estimate`: what merging would save, of processes, guests, files and directories,
//! without changing anything.
//!
//! Targets are looked at one after the other, each by all threads ([`scan`]). Every chunk that is
//! not zero is hashed (64-bit xxh3 with a random seed) and counted in the [`index`]. From the index
//! come the figures ([`report`]) and what KSM and PageONE would each save and cost ([`cost`]).
//!
//! Chunks with one digest count as equal here. With 2²⁸ distinct chunks (1 TiB of pages) the chance
//! that two different ones meet is 1 in 500; and it would be one page in 268 million. Where memory
//! is merged, and in `one`, bytes are compared.

mod cost;
mod counter;
mod files;
mod index;
mod process;
mod report;
mod scan;
mod target;

use std::time::Instant;

use anyhow::{Result, ensure};
use indicatif::{ProgressBar, ProgressStyle};

use crate::{Code, Coded};
use index::Index;
use report::{Looked, Report};
use scan::{How, Source};
use target::{LeftOut, Target, Targets, What};

/// Options of `pageone estimate`.
#[derive(clap::Args)]
pub(crate) struct Args {
    /// Number of a process, or path of a file or directory (write ./123 for a file of that name)
    #[arg(value_name = "TARGET", required_unless_present = "qemu")]
    targets: Vec<String>,
    /// All QEMU guests of this host: their guest memory
    #[arg(long)]
    qemu: bool,
    /// One JSON object
    #[arg(long)]
    json: bool,
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

/// Looks at the targets and prints the report. An error if anything was left out.
pub(crate) fn run(args: &Args) -> Result<()> {
    let start = Instant::now();
    let mut targets = Targets::resolve(&args.targets, args.qemu);
    ensure!(
        targets.targets.len() <= index::MAX_TARGETS,
        "{} targets; at most {} at a time: name a directory instead of its files",
        targets.targets.len(),
        index::MAX_TARGETS
    );
    let threads =
        args.threads.map_or_else(|| std::thread::available_parallelism().map_or(1, usize::from), |n| n as usize);
    let index = Index::new(args.limit_memory << 20);
    let progress = progress();
    let seed = std::hash::BuildHasher::hash_one(&std::hash::RandomState::new(), 0);
    let how = How { index: &index, seed, chunk: args.chunk, threads, progress: &progress };
    let mut looked: Vec<Looked> = Vec::new();
    for target in std::mem::take(&mut targets.targets) {
        progress.set_message(target.name.clone());
        match look(target, looked.len() as u16, how, &mut targets) {
            Ok(one) => looked.push(one),
            Err(left_out) => targets.left_out.push(left_out),
        }
    }
    progress.finish_and_clear();

    let none = looked.is_empty();
    let mut report = Report::new(looked, &index, args.chunk);
    report.notes = targets.notes;
    report.notes.extend(map_count_note(&report));
    report.left_out = targets.left_out;
    report.seconds = start.elapsed().as_secs_f64();
    report.cpu_seconds = kmem::cpu::process_time().as_secs_f64();
    report.threads = threads;
    report.peak_bytes = peak_memory();
    if args.json {
        println!("{}", serde_json::to_string_pretty(&report)?);
    } else if !none {
        print!("{}", report.text());
    }
    for LeftOut { target, reason } in &report.left_out {
        eprintln!("pageone: left out: {target}: {reason}");
    }
    match report.left_out.len() {
        0 => Ok(()),
        _ if none => Err(Coded(Code::LeftOut, "nothing could be looked at".into()).into()),
        _ => Err(Coded(Code::LeftOut, "the figures are without what was left out".into()).into()),
    }
}

/// Looks at one target. An error if there is nothing of it to be counted.
fn look(target: Target, number: u16, how: How<'_>, all: &mut Targets) -> Result<Looked, LeftOut> {
    let Target { name, what } = target;
    let kind = what.kind();
    let mut program = None;
    let source = match what {
        What::File(file) => Ok(Source::File(file)),
        What::Directory(path) => files::Walk::new(&path, &all.own).map(Source::Directory),
        What::Process { pid, guest } => process::Process::open(pid, guest, how.chunk).map(|process| {
            program = Some(process.name.clone());
            if process.merged_by_ksm > 0 {
                all.notes.push(format!(
                    "KSM has merged {} pages of process {pid} already; they count as shared",
                    process.merged_by_ksm
                ));
            }
            Source::Process(process)
        }),
    };
    let source = source.map_err(|reason| LeftOut { target: name.clone(), reason })?;
    let (tally, left_out) = scan::scan(&name, number, source, how);
    all.left_out.extend(left_out);
    Ok(Looked { name, kind, program, tally })
}

/// What to know where PageONE could not map everything.
fn map_count_note(report: &Report) -> Option<String> {
    let room = kmem::procfs::max_map_count().ok()? as u64 / 3 * 2;
    let binds = report.targets.iter().filter(|target| target.mappings > room).count();
    (report.pageone.is_some() && binds > 0).then(|| {
        format!(
            "{binds} of the targets would need more mappings than vm.max_map_count lets PageONE use; \
             the longest runs would be merged, or more after `sysctl vm.max_map_count=1048576`"
        )
    })
}

/// Bytes looked at, on standard error, if that is a terminal.
fn progress() -> ProgressBar {
    let bar = ProgressBar::new(0);
    let style = "{wide_msg} {bar:24} {bytes} of {total_bytes}, {binary_bytes_per_sec}, {eta} left";
    if let Ok(style) = ProgressStyle::with_template(style) {
        bar.set_style(style);
    }
    bar
}

/// The most memory that this process had resident, in bytes (`VmHWM`, proc_pid_status(5)); 0 if the
/// kernel does not tell.
fn peak_memory() -> u64 {
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let line = status.lines().find_map(|line| line.strip_prefix("VmHWM:"));
    line.and_then(|kib| kib.trim().strip_suffix(" kB")?.parse().ok()).map_or(0, |kib: u64| kib << 10)
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
