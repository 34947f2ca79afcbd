//! `sequential`: writing and reading whole mblocks, against `fio` with direct I/O in the same
//! directory.
//!
//! An mblock is written to space that was free. So `fio`'s `write` is to a new file; `overwrite` is
//! to the same one once more, which mblocks cannot do.

use std::io::IoSlice;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};

use ::mpool::{AlignedBuf, Allocation, MblockWriter, Pool};
use anyhow::{Context, Result, ensure};

use super::median;
use bench_common::random::Random;
use bench_common::report::{Row, Sheet};

pub(super) const MBLOCK: usize = 32 << 20;
/// As much memory as `fio` has in flight with four requests.
const BUFFER: usize = 4 << 20;

/// MiB a second.
pub(super) fn rate(bytes: usize, start: Instant) -> f64 {
    (bytes >> 20) as f64 / start.elapsed().as_secs_f64()
}

/// A file for `fio`, which writes to a new one as the pool does, reads it, and writes over it.
struct Target<'a> {
    directory: &'a Path,
    bytes: usize,
}

impl Target<'_> {
    fn path(&self) -> PathBuf {
        self.directory.join("fio")
    }
}

impl Drop for Target<'_> {
    fn drop(&mut self) {
        let _ = std::fs::remove_file(self.path());
    }
}

/// Waits until the medium has nothing to do: what was deleted before is given back to it later.
pub(super) fn settle() {
    rustix::fs::sync();
    std::thread::sleep(Duration::from_millis(300));
}

/// The rate of one `fio` job, in MiB/s; `None` without `fio`.
fn fio(target: &Target<'_>, engine: &[&str], read: bool) -> Result<Option<f64>> {
    let mut command = Command::new("fio");
    command.args(["--name=sequential", "--bs=1M", "--direct=1", "--output-format=json", "--end_fsync=1"]);
    command.arg(format!("--filename={}", target.path().display())).arg(format!("--size={}", target.bytes));
    command.arg(if read { "--rw=read" } else { "--rw=write" }).args(engine);
    let out = match command.output() {
        Err(e) if e.kind() == std::io::ErrorKind::NotFound => return Ok(None),
        out => out.context("cannot run fio")?,
    };
    ensure!(out.status.success(), "fio failed: {}", String::from_utf8_lossy(&out.stderr));
    let json: serde_json::Value = serde_json::from_slice(&out.stdout)?;
    let job = &json["jobs"][0][if read { "read" } else { "write" }];
    Ok(job["bw_bytes"].as_f64().map(|bytes| bytes / f64::from(1 << 20)))
}

/// What is written.
pub(super) fn buffer() -> AlignedBuf {
    let mut buffer = AlignedBuf::zeroed(BUFFER);
    let mut random = Random::new(3);
    buffer.chunks_exact_mut(8).for_each(|word| word.copy_from_slice(&random.next().to_ne_bytes()));
    buffer
}

/// Writes and commits this many bytes.
pub(super) fn write(pool: &Pool, buffer: &AlignedBuf, bytes: usize) -> Result<Vec<u64>> {
    let mut writers = Vec::new();
    for _ in 0..bytes / MBLOCK {
        let mut writer = pool.mblock_alloc(Allocation { capacity: MBLOCK as u64, ..Allocation::default() })?;
        // The same bytes several times, as `fio` writes the same few buffers.
        writer.write(&[IoSlice::new(buffer); MBLOCK / BUFFER])?;
        writers.push(writer);
    }
    Ok(MblockWriter::commit_all(writers)?)
}

/// Reads all of them.
pub(super) fn read(pool: &Pool, ids: &[u64]) -> Result<()> {
    let mut into = AlignedBuf::zeroed(BUFFER);
    for &id in ids {
        let mblock = pool.mblock(id)?;
        (0..MBLOCK).step_by(into.len()).try_for_each(|at| mblock.read(at as u64, &mut into))?;
    }
    Ok(())
}

/// Runs it.
pub(super) fn run(directory: &Path, quick: bool, rounds: usize) -> Result<Vec<Row>> {
    let bytes = if quick { 256 << 20 } else { 1 << 30 };
    let buffer = buffer();
    let pool = Pool::create(&directory.join("sequential-pool"), "bench")?;
    let mut ours = [const { Vec::new() }; 3];
    const ENGINES: [(&str, &[&str]); 2] =
        [("fio", &["--ioengine=psync"]), ("fio-io_uring-4", &["--ioengine=io_uring", "--iodepth=4"])];
    let mut theirs = [const { [const { Vec::new() }; 3] }; ENGINES.len()];
    for _ in 0..rounds.max(3) {
        settle();
        let start = Instant::now();
        let ids = write(&pool, &buffer, bytes)?;
        ours[0].push(rate(bytes, start));
        settle();
        let start = Instant::now();
        read(&pool, &ids)?;
        ours[1].push(rate(bytes, start));
        pool.mblock_delete(&ids)?;
        for (engine, times) in ENGINES.iter().zip(&mut theirs) {
            let target = Target { directory, bytes };
            for (read, times) in [false, true, false].into_iter().zip(times) {
                settle();
                times.extend(fio(&target, engine.1, read)?);
            }
        }
    }
    let case = format!("sequential, {} MiB in pieces of 1 MiB, direct I/O", bytes >> 20);
    let mut sheet = Sheet { bench: "mpool", case, subject: "pageone", threads: 1, rows: Vec::new() };
    let mut note = |subject, [write, read, overwrite]: [Vec<f64>; 3]| {
        if write.is_empty() {
            eprintln!("SKIPPED {subject}: fio is not there; Debian's package is called fio");
            return;
        }
        sheet.subject = subject;
        sheet.add("write", median(write), "MiB/s");
        sheet.add("read", median(read), "MiB/s");
        if !overwrite.is_empty() {
            sheet.add("overwrite", median(overwrite), "MiB/s");
        }
    };
    note("pageone", ours);
    for ((subject, _), rates) in ENGINES.into_iter().zip(theirs) {
        note(subject, rates);
    }
    sheet.subject = "pageone";
    for (name, metric) in [("write_times_fio", "write"), ("read_times_fio", "read")] {
        let of = |ours| sheet.rows.iter().filter(move |row| (row.subject == "pageone") == ours && row.metric == metric);
        // The faster of `fio`'s two ways.
        let fio = of(false).map(|row| row.value).max_by(f64::total_cmp);
        if let (Some(ours), Some(fio)) = (of(true).next().map(|row| row.value), fio) {
            sheet.add(name, ours / fio, "x");
        }
    }
    Ok(sheet.rows)
}
