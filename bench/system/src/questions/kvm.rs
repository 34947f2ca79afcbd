//! `kvm`: guests on hardware virtualisation under nothing, under KSM and under PageONE.
//!
//! With KVM a guest's memory is mapped a second time, in the stage-2 page tables. Whatever changes
//! a mapping of QEMU's, be it to protect a page or to merge it, takes it out of these tables too
//! and kicks the virtual CPUs; the guest's next access is a fault that it would not have had. So
//! the figures are what the guests get done, and what KVM counts:
//!
//! ```text
//!   boot, one round of checks ─▶ merging ─▶ merged ─▶ at rest
//!   nobody merges                guests work          they do nothing
//! ```
//!
//! Each phase has the same length; the engine goes on through all of them. CPU a page saved counts
//! from the beginning of merging on, not of the phase. In an emulated host
//! (`scripts/lib/kvm-host.sh`) times are distorted: compare the subjects with each other.

use std::path::PathBuf;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use kmem::PAGE_SIZE;
use testguest::{Accelerator, Guest};

use crate::harness::host;
use crate::harness::tracing::{Counted, Tracing};
use crate::subjects::Who;
use crate::subjects::engine::{Engine, Subject};
use crate::subjects::ksm::{Pace, Rival};
use crate::subjects::pageone::{HugePages, PageOne};
use bench_common::guest;
use bench_common::interrupt::Interrupt;
use bench_common::report::{Row, Sheet, medians, ratios};

/// Merge period, in seconds.
const PERIOD: f64 = 2.0;
/// How long KSM's scans are to take, in seconds.
const SCAN: f64 = 3.0;
/// Where KVM counts (Documentation/virt/kvm/api.rst, KVM_GET_STATS_FD; debugfs sums over guests).
const COUNTERS: &str = "/sys/kernel/debug/kvm";
/// How long after the last phase of work a guest may still be in a round.
const LAST_ROUND: Duration = Duration::from_secs(300);

/// Threads that invalidate guests' memory, with what is counted of each: calls and pages.
const CAUSES: [(Option<&str>, &str, &str); 4] = [
    (Some("merge"), "invalidations_a_second, scans", "invalidated_pages_a_second, scans"),
    (Some("pageone-agent"), "invalidations_a_second, windows", "invalidated_pages_a_second, windows"),
    (Some("ksmd"), "invalidations_a_second, ksmd", "invalidated_pages_a_second, ksmd"),
    (None, "invalidations_a_second, all", "invalidated_pages_a_second, all"),
];

/// What a person may choose.
#[derive(Clone, Debug, clap::Args)]
pub(crate) struct Options {
    /// Rounds; figures are medians over them
    #[arg(long, value_name = "N", default_value_t = 1)]
    rounds: usize,
    /// Guests
    #[arg(long, value_name = "N", default_value_t = 2)]
    guests: usize,
    /// Memory of each guest, in MiB
    #[arg(long, value_name = "MIB", default_value_t = 384)]
    memory: usize,
    /// Length of each phase, in seconds [default: 60; with --quick 12]
    #[arg(long, value_name = "S")]
    seconds: Option<u64>,
    /// Under PageONE: `split` huge pages, `keep` them, or split those of which more than this
    /// percentage can be merged
    #[arg(long, value_name = "POLICY", default_value = "split")]
    huge_pages: HugePages,
    /// Also trace who invalidates guests' memory, and how long faults take: that costs guests some
    /// time
    #[arg(long)]
    trace: bool,
    /// Under PageONE also: `pageone dirty`, and two checkpoints of each guest
    #[arg(long)]
    others: bool,
    /// Only under this; may be given more than once; all by default
    #[arg(long, value_enum)]
    only: Vec<Who>,
}

/// Runs the bench.
pub(crate) fn run(options: &Options, quick: bool) -> Result<Vec<Row>> {
    let counters = PathBuf::from(COUNTERS).join("pf_taken");
    ensure!(
        counters.exists(),
        "{} is missing, where KVM counts: load kvm-amd or kvm-intel, and mount debugfs on /sys/kernel/debug",
        counters.display()
    );
    let interrupt = Interrupt::watch()?;
    let seconds = options.seconds.unwrap_or(if quick { 12 } else { 60 });
    let mut rows = Vec::new();
    for round in 0..options.rounds {
        for who in [Who::Nothing, Who::Ksm, Who::Pageone] {
            if !options.only.is_empty() && !options.only.contains(&who) {
                continue;
            }
            eprintln!("kvm: {}, round {}", who.name(), round + 1);
            rows.extend(measure(options, seconds, who, &interrupt).context(who.name())?);
        }
    }
    let figures = medians(&rows);
    let ratios = ratios(
        &figures,
        &[
            ("rounds_a_minute", "rounds_a_minute / ksm"),
            ("rounds_a_minute_so_far", "rounds_a_minute_so_far / ksm"),
            ("us_per_page_saved", "us_per_page_saved / ksm"),
        ],
    );
    Ok(figures.into_iter().chain(ratios).collect())
}

/// What was counted at a moment, as the beginning of a phase.
struct Readings {
    start: Instant,
    counts: Counts,
    traced: Option<Counted>,
}

impl Readings {
    fn take(tracing: Option<&Tracing>) -> Result<Self> {
        let traced = tracing.map(Tracing::read).transpose()?;
        Ok(Self { start: Instant::now(), counts: Counts::read()?, traced })
    }

    /// Notes what has happened since.
    fn note(&self, tracing: Option<&Tracing>, sheet: &mut Sheet) -> Result<()> {
        let Self { start, counts, traced } = Self::take(tracing)?;
        let time = (start - self.start).as_secs_f64();
        let mut add = |metric, count: u64| sheet.add(metric, count as f64 / time, "");
        add("stage2_faults_a_second", counts.faults - self.counts.faults);
        add("tlb_flushes_a_second", counts.flushes - self.counts.flushes);
        add("exits_a_second", counts.exits - self.counts.exits);
        let (Some(traced), Some(before)) = (traced, &self.traced) else { return Ok(()) };
        let traced = traced.since(before);
        for &(name, calls, pages) in &CAUSES {
            let count = traced.invalidations(name);
            add(calls, count.calls);
            add(pages, count.pages);
        }
        for (part, metric) in [(0.5, "stage2_fault_us_p50"), (0.9999, "stage2_fault_us_p99.99")] {
            traced.fault_time(part).into_iter().for_each(|us| sheet.add(metric, us as f64, "us"));
        }
        Ok(())
    }
}

/// What KVM has counted, for all guests.
#[derive(Clone, Copy)]
struct Counts {
    /// Faults of guests in the stage-2 tables.
    faults: u64,
    /// Flushes of virtual CPUs' TLBs.
    flushes: u64,
    /// Exits of virtual CPUs.
    exits: u64,
}

impl Counts {
    fn read() -> Result<Self> {
        Ok(Self { faults: counter("pf_taken")?, flushes: counter("remote_tlb_flush")?, exits: counter("exits")? })
    }
}

fn counter(name: &str) -> Result<u64> {
    let path = PathBuf::from(COUNTERS).join(name);
    let text = std::fs::read_to_string(&path).with_context(|| format!("cannot read {}", path.display()))?;
    text.trim().parse().with_context(|| format!("{}: {text:?} is no number", path.display()))
}

/// Sums since merging began.
#[derive(Default)]
struct Whole {
    /// Rounds a minute in each phase; phases have the same length.
    rounds: Vec<f64>,
    cpu_us: f64,
}

fn measure(options: &Options, seconds: u64, who: Who, interrupt: &Interrupt) -> Result<Vec<Row>> {
    let threads = std::thread::available_parallelism().map_or(1, usize::from);
    // Guests that have checked their files early have more of it.
    let work = 2 * seconds + 30;
    let append = format!("PAGEONE_PAUSE=0 PAGEONE_WORK={work}");
    let memory_mib = u32::try_from(options.memory)?;
    let accelerator = Accelerator::Kvm;
    let spec = testguest::Options { memory_mib, accelerator, append: Some(append), ..Default::default() };
    let program = guest::command(&spec)?;
    let ours = Subject::PageOne { threads };
    let base = host::used()?;
    // Declared before the guests, so that it ends after them. KSM comes later: it would begin while
    // they boot.
    let mut engine = if who == Who::Pageone { Engine::prepare(ours)? } else { None };
    if let Some(Engine::PageOne { pageone, .. }) = &mut engine {
        pageone.set_huge_pages(options.huge_pages)?;
    }
    let command = || engine.as_ref().map_or_else(|| Ok(Rival::launch(&program)), |engine| engine.launch(&program));
    let mut guests = (0..options.guests).map(|_| Ok(Guest::start(command()?)?)).collect::<Result<Vec<_>>>()?;
    guest::wait_checked(&mut guests, interrupt)?;
    let used = || anyhow::Ok((host::used()? as f64 - base as f64) / f64::from(1 << 20));
    let used_before = used()?;
    let huge = counter("pages_2m").ok();
    match (who, &mut engine) {
        (Who::Ksm, _) => {
            engine = Engine::prepare(Subject::Ksm { smart_scan: true })?;
            let Some(Engine::Ksm(rival)) = &mut engine else { return Ok(Vec::new()) };
            rival.set_pace(Pace::of((options.guests * (options.memory << 20) / PAGE_SIZE) as u64, SCAN))?;
        }
        (_, Some(engine)) => engine.start(PERIOD, ours, interrupt)?,
        (_, None) => {}
    }
    let threads = if who == Who::Pageone { threads } else { 1 };
    let pids: Vec<i32> = guests.iter().map(Guest::pid).collect();
    let mut rows = Vec::new();
    let tracing = if options.trace { Some(Tracing::begin()?) } else { None };
    // What has happened since merging began, so that engines can be compared that take different
    // times to save the same.
    let mut whole = Whole::default();
    for phase in ["merging", "merged", "at rest"] {
        if phase == "at rest" {
            interrupt.until("every guest rests", Duration::from_secs(work) + LAST_ROUND, || {
                guests.iter_mut().try_for_each(Guest::check)?;
                Ok(guests.iter().all(Guest::rests).then_some(()))
            })?;
            // What they wrote at last is merged too.
            interrupt.sleep(Duration::from_secs_f64(2.0 * SCAN))?;
        }
        let times = engine.as_ref().map(|engine| engine.times(&pids)).transpose()?;
        let readings = Readings::take(tracing.as_ref())?;
        let start = readings.start;
        for second in 1..=seconds {
            interrupt.sleep((start + Duration::from_secs(second)).saturating_duration_since(Instant::now()))?;
            guests.iter_mut().try_for_each(Guest::check)?;
        }
        let end = Instant::now();
        let case = format!("{phase}: {} guests of {} MiB, {seconds} s", options.guests, options.memory);
        let mut sheet = Sheet { bench: "kvm", case, subject: who.name(), threads, rows: Vec::new() };
        if phase != "at rest" {
            let rounds = guests.iter().map(|guest| guest.rounds_a_second(start..end)).sum::<f64>();
            sheet.add("rounds_a_minute", rounds * 60.0, "");
            whole.rounds.push(rounds * 60.0);
        }
        readings.note(tracing.as_ref(), &mut sheet)?;
        if phase == "merging" {
            sheet.add("used_mib_before", used_before, "MiB");
        }
        sheet.add("used_mib_at_end", used()?, "MiB");
        if let (Some(_), Ok(pages)) = (huge, counter("pages_2m")) {
            sheet.add("stage2_huge_mib_at_end", pages as f64 * 2.0, "MiB");
        }
        if let (Some(engine), Some(times)) = (&engine, &times) {
            let cpu = engine.times(&pids)?.since(times).0 as f64;
            sheet.add("cpu_seconds", cpu / 1e9, "s");
            whole.cpu_us += cpu / 1e3;
            let saved = engine.saved()?;
            if phase != "at rest" && saved > 0 {
                sheet.add("us_per_page_saved", whole.cpu_us / saved as f64, "us");
            }
        }
        if phase == "merged" {
            sheet.add("rounds_a_minute_so_far", whole.rounds.iter().sum::<f64>() / whole.rounds.len() as f64, "");
        }
        rows.extend(sheet.rows);
    }
    if let (true, Some(Engine::PageOne { pageone, .. })) = (options.others, &engine) {
        rows.extend(others(pageone, &pids, seconds, tracing.as_ref())?);
    }
    Ok(rows)
}

/// What else looks at guests' memory, which are at rest: `pageone dirty`, and two checkpoints of
/// each guest.
fn others(pageone: &PageOne, pids: &[i32], seconds: u64, tracing: Option<&Tracing>) -> Result<Vec<Row>> {
    let directory = tempfile::Builder::new().prefix("pageone-bench-kvm-").tempdir()?;
    let run = |args: &[&str]| {
        let out = pageone.pageone(args).env("PAGEONE_POOLS", directory.path().join("names")).output()?;
        let error = String::from_utf8_lossy(&out.stderr);
        ensure!(out.status.success(), "pageone {}: {}", args.join(" "), error.trim_end());
        Ok(String::from_utf8(out.stdout)?)
    };
    let capacity = directory.path().join("capacity").display().to_string();
    drop(run(&["pool", "create", "store", "--capacity", &capacity])?);
    let mut rows = Vec::new();
    for (what, name) in
        [("pageone dirty", None), ("first checkpoints", Some("first")), ("second checkpoints", Some("second"))]
    {
        let case = format!("at rest, {what}: {} guests", pids.len());
        let mut sheet = Sheet { bench: "kvm", case, subject: Who::Pageone.name(), threads: 1, rows: Vec::new() };
        let readings = Readings::take(tracing)?;
        match name {
            None => {
                let reports = run(&["dirty", "--json", "--count", &seconds.to_string()])?;
                sheet.add("written_pages_a_second", written(&reports)?, "");
            }
            Some(name) => {
                for (pid, i) in pids.iter().zip(1..) {
                    drop(run(&["checkpoint", &pid.to_string(), "--to", "store", "--name", &format!("{name}-{i}")])?);
                }
            }
        }
        sheet.add("seconds", readings.start.elapsed().as_secs_f64(), "s");
        readings.note(tracing, &mut sheet)?;
        rows.extend(sheet.rows);
    }
    Ok(rows)
}

/// Pages that all clients wrote, a second, as reports of `pageone dirty` say: their mean.
fn written(reports: &str) -> Result<f64> {
    let mut rates = Vec::new();
    for line in reports.lines() {
        let report: serde_json::Value = serde_json::from_str(line)?;
        let clients = report["clients"].as_array().into_iter().flatten();
        let measured =
            clients.filter(|client| client["interval_seconds"].as_f64().is_some_and(|seconds| seconds > 0.0));
        let measured: Vec<f64> = measured.filter_map(|client| client["pages_per_second"].as_f64()).collect();
        rates.extend((!measured.is_empty()).then(|| measured.iter().sum::<f64>()));
    }
    ensure!(!rates.is_empty(), "no report of `pageone dirty` has a rate");
    Ok(rates.iter().sum::<f64>() / rates.len() as f64)
}

#[cfg(test)]
mod tests {
    #[test]
    fn rates_of_all_clients_are_added_and_reports_without_any_do_not_count() {
        let client =
            |interval: f64, rate: f64| serde_json::json!({"interval_seconds": interval, "pages_per_second": rate});
        let reports = [vec![client(0.0, 0.0)], vec![client(1.0, 2.0), client(1.0, 4.0)], vec![client(1.0, 8.0)]];
        let lines = reports.map(|clients| serde_json::json!({"time": 0, "clients": clients}).to_string());
        assert_eq!(super::written(&lines.join("\n")).unwrap(), 7.0);
        assert!(super::written("").is_err());
    }
}
