//! What merging would save, of processes, guests, files and directories. Nothing is changed.
//!
//! ```text
//! words ── target ──▶ scan ──▶ files, process ──▶ counter ──▶ index ──▶ report ◀── cost
//! ```
//!
//! [`estimate`] scans one target after the other, each with all threads (`scan`). Every chunk that
//! is not zero is hashed (64-bit XXH3 with a random seed) and counted in the `index`. The figures
//! come from the index ([`Report`]), and so does what KSM and PageONE would each save and cost
//! ([`Merging`]).
//!
//! Chunks with equal digests count as equal. With 2²⁸ distinct chunks (1 TiB of pages), the
//! probability that two different chunks have one digest is 1 in 500; the error would be one page
//! in 268 million. Where memory is merged, and in `one`, bytes are compared.

mod cost;
mod counter;
mod files;
mod index;
mod process;
mod report;
mod scan;
mod target;

use std::time::Instant;

use output::Progress;

pub use cost::Merging;
pub use files::FileError;
pub use index::MAX_TARGETS;
pub use process::ProcessError;
pub use report::{Pair, Report, TargetReport, Took, Total};
pub use target::{LeftOut, Note, Reason};

use index::Index;
use report::Scanned;
use scan::{Context, Source};
use target::{Kind, Target, Targets};

/// What is estimated, and with which means.
#[derive(Clone, Debug)]
pub struct Options {
    /// Numbers of processes, paths of files and directories (`./123` for a file of that name),
    /// names and UUIDs of guests.
    pub targets: Vec<String>,
    /// Whether the guest RAM of all QEMU processes is scanned too.
    pub qemu: bool,
    /// Size of the chunks that are compared, bytes: a power of two from 512 to 16 MiB.
    pub chunk: usize,
    /// Memory for the index, bytes. When it is full, a sample of the contents is counted.
    pub limit_bytes: u64,
    /// Number of threads, at least 1.
    pub threads: usize,
}

/// Why there is no estimate at all.
#[derive(Debug, thiserror::Error)]
pub enum EstimateError {
    /// There are more targets than the index can tell apart.
    #[error("{0} targets; at most {MAX_TARGETS} at a time: name a directory instead of its files")]
    TooManyTargets(usize),
}

/// Scans the targets. What cannot be scanned is in [`Report::left_out`].
///
/// # Errors
/// If there are more than [`MAX_TARGETS`] targets.
pub fn estimate(options: &Options, progress: &Progress) -> Result<Report, EstimateError> {
    let start = Instant::now();
    let mut targets = Targets::resolve(options);
    if targets.targets.len() > MAX_TARGETS {
        return Err(EstimateError::TooManyTargets(targets.targets.len()));
    }
    let index = Index::new(options.limit_bytes);
    let seed = std::hash::BuildHasher::hash_one(&std::hash::RandomState::new(), 0);
    let context = Context { index: &index, seed, chunk: options.chunk, threads: options.threads, progress };
    let mut scanned: Vec<Scanned> = Vec::new();
    for target in std::mem::take(&mut targets.targets) {
        progress.name(&target.name);
        match scan_target(target, scanned.len() as u16, context, &mut targets) {
            Ok(one) => scanned.push(one),
            Err(left_out) => targets.left_out.push(left_out),
        }
    }
    let mut report = Report::new(scanned, &index, options.chunk);
    report.notes = targets.notes;
    report.notes.extend(mapping_note(&report));
    report.left_out = targets.left_out;
    report.took = Took {
        seconds: start.elapsed().as_secs_f64(),
        cpu_seconds: kmem::cpu::process_time().as_secs_f64(),
        threads: options.threads,
        peak_bytes: peak_memory(),
        ..report.took
    };
    Ok(report)
}

/// Scans one target. An error if nothing of it can be counted.
fn scan_target(target: Target, number: u16, context: Context<'_>, all: &mut Targets) -> Result<Scanned, LeftOut> {
    let Target { name, kind } = target;
    let word = kind.word();
    let (mut program, mut called) = (None, None);
    let source = match kind {
        Kind::File(file) => Ok(Source::File(file)),
        Kind::Directory(path) => files::Walk::new(&path, &all.own).map(Source::Directory).map_err(Reason::from),
        Kind::Process { pid, part, guest, found } => process::Process::open(pid, part, context.chunk)
            // Another may have its number by now.
            .and_then(|process| match found.map(|found| found.pid()) {
                Some(Err(_)) => Err(ProcessError::Ended(pid)),
                _ => Ok(process),
            })
            .map(|process| {
                (program, called) = (Some(process.name.clone()), guest);
                if process.merged_by_ksm > 0 {
                    all.notes.push(Note::MergedByKsm { pid, pages: process.merged_by_ksm });
                }
                Source::Process(process)
            })
            .map_err(Reason::from),
    };
    let source = source.map_err(|reason| LeftOut { target: name.clone(), reason })?;
    let (tally, left_out) = scan::scan(&name, number, source, context);
    all.left_out.extend(left_out);
    Ok(Scanned { name, kind: word, program, guest: called, tally })
}

/// The note for targets of which PageONE could not map everything.
fn mapping_note(report: &Report) -> Option<Note> {
    // PageONE uses at most two thirds of a process's mappings.
    let limit = kmem::procfs::max_map_count().ok()? as u64 / 3 * 2;
    let targets = report.targets.iter().filter(|target| target.mappings > limit).count();
    (report.pageone.is_some() && targets > 0).then_some(Note::Mappings { targets })
}

/// The most memory that this process had resident, bytes (`VmHWM`, proc_pid_status(5)); 0 if the
/// kernel does not say.
fn peak_memory() -> u64 {
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let line = status.lines().find_map(|line| line.strip_prefix("VmHWM:"));
    line.and_then(|kib| kib.trim().strip_suffix(" kB")?.parse().ok()).map_or(0, |kib: u64| kib << 10)
}

#[cfg(test)]
mod tests {
    use output::Shown;

    use super::*;

    fn options(targets: Vec<String>) -> Options {
        Options { targets, qemu: false, chunk: 4096, limit_bytes: 1 << 24, threads: 1 }
    }

    #[test]
    fn too_many_targets_are_refused_before_one_is_read() {
        let numbers = |count: usize| (1..=count).map(|pid| pid.to_string()).collect();
        let error = estimate(&options(numbers(MAX_TARGETS + 1)), &Progress::new(Shown::Never)).unwrap_err();
        let expected = format!("{} targets; at most {MAX_TARGETS} at a time", MAX_TARGETS + 1);
        assert!(error.to_string().starts_with(&expected), "{error}");
    }

    #[test]
    fn problems_beyond_the_first_are_counted() {
        let dir = tempfile::tempdir().unwrap();
        let sockets: Vec<_> = (0..25)
            .map(|number| std::os::unix::net::UnixListener::bind(dir.path().join(number.to_string())).unwrap())
            .collect();
        let report = estimate(&options(vec![dir.path().display().to_string()]), &Progress::new(Shown::Never)).unwrap();
        let reasons: Vec<_> = report.left_out.iter().map(|left_out| left_out.reason.to_string()).collect();
        assert_eq!((sockets.len(), reasons.len()), (25, 21), "{reasons:?}");
        assert_eq!(reasons[20], "5 more could not be read");
    }
}
