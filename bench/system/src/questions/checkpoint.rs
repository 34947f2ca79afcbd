//! `checkpoint`: the cost of storing guests of the demo in a pool while they run.
//!
//! 1. One guest boots and checks all of its files; it is stored, and once more right after that:
//!    `again`, the second checkpoint of an idle guest.
//! 2. Three more guests of the same image boot, and are stored while the daemon merges them with a
//!    short merge period: `merging`, the slowest and the longest pause of the three. `four guests`
//!    is what the pool takes for all four, in sizes of the first.
//!
//! `--loops`: this many endless loops at the default priority run while checkpoints are taken, as
//! on a host without a processor to spare.
//!
//! The bars that were set are printed beside the figures.

use std::path::{Path, PathBuf};
use std::process::{Child, Command};
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use serde::Deserialize;
use testguest::Guest;

use crate::subjects::pageone::PageOne;
use bench_common::guest;
use bench_common::interrupt::Interrupt;
use bench_common::report::{Row, Sheet, medians};

/// Merge period, in seconds.
const PERIOD: f64 = 2.0;

/// What a person may choose.
#[derive(Clone, Debug, clap::Args)]
pub(crate) struct Options {
    /// Directory for the pool, on the medium to be measured [default: a temporary one]
    #[arg(long)]
    data: Option<PathBuf>,
    /// Rounds; figures are medians over them
    #[arg(long, value_name = "N", default_value_t = 1)]
    rounds: usize,
    /// Endless loops beside the checkpoints
    #[arg(long, value_name = "N", default_value_t = 0)]
    loops: usize,
}

/// Endless loops, until this is dropped.
struct Loops(Vec<Child>);

impl Loops {
    fn start(count: usize) -> Result<Self> {
        let mut loops = Self(Vec::new());
        for _ in 0..count {
            let child = Command::new("sh").args(["-c", "while :; do :; done"]).spawn();
            loops.0.push(child.context("cannot start an endless loop")?);
        }
        if count > 0 {
            // They have their share of the processors by then.
            std::thread::sleep(Duration::from_secs(1));
        }
        Ok(loops)
    }
}

impl Drop for Loops {
    fn drop(&mut self) {
        for child in &mut self.0 {
            let _ = child.kill();
            let _ = child.wait();
        }
    }
}

/// What `pageone checkpoint --json` says.
#[derive(Debug, Deserialize)]
struct Stored {
    memory_bytes: u64,
    stored_bytes: u64,
    seconds: f64,
    pause_ms: f64,
    rounds: u64,
    pages_in_pause: u64,
}

#[derive(Debug, Deserialize)]
struct Usage {
    physical_bytes: u64,
}

struct Store<'a> {
    pageone: &'a PageOne,
    directory: &'a Path,
    /// Endless loops beside.
    loops: usize,
}

impl Store<'_> {
    fn run(&self, args: &[&str]) -> Result<Vec<u8>> {
        let mut command: Command = self.pageone.pageone(args);
        let out = command.env("PAGEONE_POOLS", self.directory.join("names")).output().context("cannot run pageone")?;
        ensure!(
            out.status.success(),
            "pageone {}: {}",
            args.join(" "),
            String::from_utf8_lossy(&out.stderr).trim_end()
        );
        Ok(out.stdout)
    }

    fn take(&self, guest: &Guest, name: &str) -> Result<Stored> {
        let _loops = Loops::start(self.loops)?;
        let pid = guest.pid().to_string();
        let out = self.run(&["checkpoint", &pid, "--to", "store", "--name", name, "--max-pause", "100", "--json"])?;
        eprint!("checkpoint: {}", String::from_utf8_lossy(&out));
        serde_json::from_slice(&out).context("pageone checkpoint is not understood")
    }

    fn physical(&self) -> Result<u64> {
        let usage: Usage = serde_json::from_slice(&self.run(&["pool", "du", "store", "--json"])?)?;
        Ok(usage.physical_bytes)
    }
}

/// Runs the bench.
pub(crate) fn run(options: &Options, quick: bool) -> Result<Vec<Row>> {
    let place = options.data.clone().unwrap_or_else(std::env::temp_dir);
    let memory_mib = if quick { 256 } else { 512 };
    let interrupt = Interrupt::watch()?;
    let mut rows = Vec::new();
    for _ in 0..options.rounds.max(1) {
        rows.extend(round(&place, memory_mib, options.loops, &interrupt)?);
    }
    Ok(medians(&rows))
}

fn round(place: &Path, memory_mib: usize, loops: usize, interrupt: &Interrupt) -> Result<Vec<Row>> {
    let directory = tempfile::Builder::new().prefix("pageone-bench-checkpoint-").tempdir_in(place)?;
    let pageone = PageOne::find()?;
    let spec = testguest::Options { memory_mib: u32::try_from(memory_mib)?, ..Default::default() };
    let program = guest::command(&spec)?;
    let store = Store { pageone: &pageone, directory: directory.path(), loops };
    let capacity = directory.path().join("capacity").display().to_string();
    store.run(&["pool", "create", "store", "--capacity", &capacity])?;
    // Before the guests, so that it ends after them.
    let _daemon = pageone.daemon(PERIOD, interrupt)?;
    let boot = |count: usize| -> Result<Vec<Guest>> {
        let mut guests =
            (0..count).map(|_| Ok(Guest::start(pageone.launch(&program)?)?)).collect::<Result<Vec<_>>>()?;
        guest::wait_checked(&mut guests, interrupt)?;
        Ok(guests)
    };

    let one = boot(1)?;
    interrupt.sleep(Duration::from_secs(3))?;
    let first = store.take(&one[0], "first")?;
    let size = store.physical()?;
    let again = store.take(&one[0], "again")?;
    let idle = store.physical()? - size;
    let others = boot(3)?;
    let taken = others.iter().enumerate().map(|(i, guest)| store.take(guest, &format!("guest-{i}")));
    let merging = taken.collect::<Result<Vec<_>>>()?;
    let four = store.physical()? - idle;

    let beside = if loops > 0 { format!(", {loops} endless loops beside") } else { String::new() };
    let case = format!("guests of {memory_mib} MiB, merge period {PERIOD} s{beside}");
    let mut sheet = Sheet { bench: "checkpoint", case, subject: "", threads: 1, rows: Vec::new() };
    let worst = |of: fn(&Stored) -> f64| merging.iter().map(of).fold(0.0, f64::max);
    let worst = Stored {
        seconds: worst(|s| s.seconds),
        pause_ms: worst(|s| s.pause_ms),
        memory_bytes: worst(|s| s.memory_bytes as f64) as u64,
        stored_bytes: worst(|s| s.stored_bytes as f64) as u64,
        rounds: worst(|s| s.rounds as f64) as u64,
        pages_in_pause: worst(|s| s.pages_in_pause as f64) as u64,
    };
    for (subject, stored) in [("first", &first), ("again", &again), ("merging", &worst)] {
        sheet.subject = subject;
        sheet.add("stored_percent", 100.0 * stored.stored_bytes as f64 / stored.memory_bytes as f64, "%");
        sheet.add("seconds", stored.seconds, "s");
        sheet.add("pause_ms", stored.pause_ms, "ms");
        sheet.add("rounds", stored.rounds as f64, "");
        sheet.add("pages_in_pause", stored.pages_in_pause as f64, "pages");
    }
    sheet.subject = "four guests";
    sheet.add("sizes_of_one", four as f64 / size as f64, "");
    sheet.subject = "bar";
    sheet.add("stored_percent", 5.0, "%");
    sheet.add("seconds", 1.0, "s");
    sheet.add("pause_ms", 100.0, "ms");
    sheet.add("sizes_of_one", 1.6, "");
    Ok(sheet.rows)
}
