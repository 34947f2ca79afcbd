//! `encrypted`: whole mblocks, single pages and commits in an encrypted pool, and in one beside it
//! that is not. Rounds of both take turns, on one thread.

use std::io::IoSlice;
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;
use std::time::{Duration, Instant};

use ::mpool::{AlignedBuf, Allocation, BLOCK, Pool};
use anyhow::Result;
use rustix::time::{ClockId, clock_gettime};

use super::median;
use super::sequential::{MBLOCK, buffer, rate, read, settle, write};
use bench_common::random::Random;
use bench_common::report::{Row, Sheet};

/// Pages that are read one by one, and commits, in a round.
const PAGES: usize = 4000;
const COMMITS: usize = 100;

/// CPU time of the process, s.
fn cpu() -> f64 {
    let now = clock_gettime(ClockId::ProcessCPUTime);
    now.tv_sec as f64 + now.tv_nsec as f64 / 1e9
}

/// What was measured of a pool, round by round.
#[derive(Default)]
struct Figures {
    write: Vec<f64>,
    write_cpu: Vec<f64>,
    read: Vec<f64>,
    read_cpu: Vec<f64>,
    page: Vec<f64>,
    page_p99: Vec<f64>,
    commit: Vec<f64>,
}

impl Figures {
    fn round(&mut self, pool: &Pool, buffer: &AlignedBuf, bytes: usize, random: &mut Random) -> Result<()> {
        let gib = bytes as f64 / f64::from(1 << 30);
        settle();
        let (start, before) = (Instant::now(), cpu());
        let ids = write(pool, buffer, bytes)?;
        self.write.push(rate(bytes, start));
        self.write_cpu.push((cpu() - before) / gib);
        settle();
        let (start, before) = (Instant::now(), cpu());
        read(pool, &ids)?;
        self.read.push(rate(bytes, start));
        self.read_cpu.push((cpu() - before) / gib);
        let mut page = AlignedBuf::zeroed(BLOCK);
        let mut times: Vec<Duration> = (0..PAGES)
            .map(|_| {
                let id = ids[random.below(ids.len())];
                let at = (random.below(MBLOCK / BLOCK) * BLOCK) as u64;
                let start = Instant::now();
                pool.mblock(id)?.read(at, &mut page)?;
                Ok(start.elapsed())
            })
            .collect::<Result<_>>()?;
        times.sort_unstable();
        self.page.push(times[PAGES / 2].as_secs_f64() * 1e6);
        self.page_p99.push(times[PAGES * 99 / 100].as_secs_f64() * 1e6);
        pool.mblock_delete(&ids)?;
        let start = Instant::now();
        let mut small = Vec::new();
        for _ in 0..COMMITS {
            let mut writer = pool.mblock_alloc(Allocation { capacity: BLOCK as u64, ..Allocation::default() })?;
            writer.write(&[IoSlice::new(&page)])?;
            small.push(writer.commit()?);
        }
        self.commit.push(start.elapsed().as_secs_f64() * 1e6 / COMMITS as f64);
        Ok(pool.mblock_delete(&small)?)
    }
}

/// Runs it.
pub(super) fn run(directory: &Path, quick: bool, rounds: usize) -> Result<Vec<Row>> {
    let bytes = if quick { 256 << 20 } else { 1 << 30 };
    let key = directory.join("key");
    let mut file = std::fs::OpenOptions::new();
    let mut file = file.write(true).create_new(true).mode(0o600).open(&key)?;
    std::io::Write::write_all(&mut file, &[7; 32])?;
    let pools = [
        Pool::create(&directory.join("plain-pool"), "plain")?,
        Pool::create_encrypted(&directory.join("encrypted-pool"), "encrypted", key.as_path())?,
    ];
    let (buffer, mut random) = (buffer(), Random::new(5));
    let mut figures = [Figures::default(), Figures::default()];
    for _ in 0..rounds.max(3) {
        for (pool, figures) in pools.iter().zip(&mut figures) {
            figures.round(pool, &buffer, bytes, &mut random)?;
        }
    }
    let case = format!("encrypted, {} MiB in pieces of 4 MiB, then {PAGES} pages and {COMMITS} commits", bytes >> 20);
    let mut sheet = Sheet { bench: "mpool", case, subject: "plain", threads: 1, rows: Vec::new() };
    let mut medians = Vec::new();
    for (subject, of) in ["plain", "encrypted"].into_iter().zip(figures) {
        sheet.subject = subject;
        let all = [
            ("write", of.write, "MiB/s"),
            ("write_cpu", of.write_cpu, "s/GiB"),
            ("read", of.read, "MiB/s"),
            ("read_cpu", of.read_cpu, "s/GiB"),
            ("page_p50", of.page, "us"),
            ("page_p99", of.page_p99, "us"),
            ("commit", of.commit, "us"),
        ];
        for (name, values, unit) in all {
            let value = median(values);
            medians.push(value);
            sheet.add(name, value, unit);
        }
    }
    for (name, at) in [("write_times_plain", 0), ("read_times_plain", 2), ("page_times_plain", 4)] {
        sheet.add(name, medians[at + medians.len() / 2] / medians[at], "x");
    }
    Ok(sheet.rows)
}
