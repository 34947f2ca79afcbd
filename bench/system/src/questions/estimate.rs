//! `estimate`: how fast `pageone estimate` looks at a file.
//!
//! The file lies in memory (tmpfs), so that no disk is measured. Two contents: all pages distinct,
//! which is the most work for an index; and every page twice, as two guests that were booted alike.
//! Rivals read the same file in blocks of 256 KiB and hash each page with the same function, on one
//! thread, into a hash table of digests, the fastest there is for this; and `sha256sum`, which only
//! reads and hashes. A core's time is the CPU time of the process, or of the rival's thread.

use std::collections::HashMap;
use std::fs::File;
use std::hash::{BuildHasherDefault, Hasher};
use std::io::{BufWriter, Write};
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use kmem::PAGE_SIZE;
use kmem::cpu::thread_time;
use serde::Deserialize;
use xxhash_rust::xxh3::xxh3_64;

use crate::subjects::pageone::PageOne;
use bench_common::random::Random;
use bench_common::report::{Row, medians};

const BLOCK: usize = 256 << 10;

/// What the file holds.
#[derive(Clone, Copy)]
enum Content {
    Distinct,
    Twice,
}

/// One measurement.
struct Run {
    wall: Duration,
    cpu: Duration,
    /// Memory of the index, where it is known.
    index_bytes: Option<u64>,
}

/// What is needed of the report.
#[derive(Deserialize)]
struct Report {
    seconds: f64,
    cpu_seconds: f64,
    index_bytes: u64,
    total: Total,
}

#[derive(Deserialize)]
struct Total {
    chunks: u64,
    pages_shared: u64,
    pages_unshared: u64,
}

/// Runs the bench.
pub(crate) fn run(quick: bool) -> Result<Vec<Row>> {
    let (pages, rounds) = if quick { (1 << 17, 3) } else { (1 << 20, 5) };
    let pageone = PageOne::program()?;
    let cores = std::thread::available_parallelism().map_or(1, usize::from);
    let dir = tempfile::Builder::new().prefix("pageone-bench-").tempdir_in("/dev/shm");
    let dir = dir.context("this bench keeps its file in /dev/shm")?;
    let path = dir.path().join("file");
    let mut rows = Vec::new();
    for content in [Content::Distinct, Content::Twice] {
        let (name, distinct) = match content {
            Content::Distinct => ("all distinct", pages),
            Content::Twice => ("each twice", pages / 2),
        };
        eprintln!("estimate: {name}");
        fill(&path, pages, distinct).context("the file cannot be written; is there enough memory?")?;
        let case = format!("{} MiB in tmpfs, pages {name}", (pages * PAGE_SIZE) >> 20);
        let mut threads = vec![1];
        threads.extend((cores > 1).then_some(cores));
        for round in 0..rounds {
            let mut measured = Vec::new();
            for &threads in &threads {
                measured.push(("pageone", threads, ours(&pageone, &path, threads, pages, distinct)?));
            }
            measured.push(("hash-table", 1, hash_table(&path, distinct)?));
            // Ten times as slow as the others: three rounds do.
            if round < 3 {
                measured.extend(sha256sum(&path)?.map(|run| ("sha256sum", 1, run)));
            }
            for (subject, threads, run) in measured {
                let mut add = |metric, value, unit| {
                    let (case, subject) = (case.clone(), subject.to_owned());
                    rows.push(Row { bench: "estimate", case, subject, threads, metric, value, unit });
                };
                let gigabytes = (pages * PAGE_SIZE) as f64 / 1e9;
                add("gb_per_s", gigabytes / run.wall.as_secs_f64(), "GB/s");
                add("gb_per_s_core", gigabytes / run.cpu.as_secs_f64(), "GB/s");
                if let Some(index) = run.index_bytes {
                    add("index_bytes_per_content", index as f64 / distinct as f64, "bytes");
                }
            }
        }
    }
    Ok(medians(&rows))
}

/// Writes a file of random pages, of which `distinct` are different.
fn fill(path: &Path, pages: usize, distinct: usize) -> Result<()> {
    let mut out = BufWriter::with_capacity(1 << 20, File::create(path)?);
    for page in 0..pages {
        let mut random = Random::new((page % distinct) as u64);
        for _ in 0..PAGE_SIZE / 8 {
            out.write_all(&random.next().to_le_bytes())?;
        }
    }
    out.flush()?;
    Ok(())
}

fn ours(pageone: &Path, path: &Path, threads: usize, pages: usize, distinct: usize) -> Result<Run> {
    let path = path.to_str().context("a path that is no text")?;
    let out = Command::new(pageone).args(["estimate", path, "--json", "--threads", &threads.to_string()]).output()?;
    ensure!(out.status.success(), "pageone estimate: {}", String::from_utf8_lossy(&out.stderr).trim_end());
    let report: Report = serde_json::from_slice(&out.stdout).context("the report")?;
    let contents = report.total.pages_shared + report.total.pages_unshared;
    ensure!(
        report.total.chunks == pages as u64 && contents == distinct as u64,
        "{contents} contents found where there are {distinct}"
    );
    Ok(Run {
        wall: Duration::from_secs_f64(report.seconds),
        cpu: Duration::from_secs_f64(report.cpu_seconds),
        index_bytes: Some(report.index_bytes),
    })
}

/// A hash table whose hash is the digest itself.
type Digests = HashMap<u64, u32, BuildHasherDefault<AsItIs>>;

#[derive(Default)]
struct AsItIs(u64);

impl Hasher for AsItIs {
    fn finish(&self) -> u64 {
        self.0
    }

    fn write(&mut self, _: &[u8]) {
        unreachable!("only digests are keys");
    }

    fn write_u64(&mut self, digest: u64) {
        self.0 = digest;
    }
}

fn hash_table(path: &Path, distinct: usize) -> Result<Run> {
    let file = File::open(path)?;
    let (start, before) = (Instant::now(), thread_time());
    let mut counts = Digests::default();
    let mut block = vec![0; BLOCK];
    let mut at = 0;
    loop {
        let read = file.read_at(&mut block, at)?;
        if read == 0 {
            break;
        }
        block[..read].chunks(PAGE_SIZE).for_each(|page| *counts.entry(xxh3_64(page)).or_default() += 1);
        at += read as u64;
    }
    ensure!(counts.len() == distinct, "{} contents found where there are {distinct}", counts.len());
    // As for the program, its memory has to be given back too.
    drop(counts);
    Ok(Run { wall: start.elapsed(), cpu: thread_time() - before, index_bytes: None })
}

/// `None` if there is no such program. It has one thread, which is always on a CPU.
fn sha256sum(path: &Path) -> Result<Option<Run>> {
    let start = Instant::now();
    match Command::new("sha256sum").arg(path).stdout(Stdio::null()).status() {
        Ok(status) => {
            ensure!(status.success(), "sha256sum failed");
            let wall = start.elapsed();
            Ok(Some(Run { wall, cpu: wall, index_bytes: None }))
        }
        Err(_) => Ok(None),
    }
}
