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
use testguest::{Accelerator, Guest};

use crate::harness::host;
use crate::subjects::Who;
use crate::subjects::guests::{Host, SCAN};
use crate::subjects::pageone::HugePages;
use bench_common::interrupt::Interrupt;
use bench_common::report::{Row, Sheet, medians, ratios};

/// Where KVM counts (Documentation/virt/kvm/api.rst, KVM_GET_STATS_FD; debugfs sums over guests).
const COUNTERS: &str = "/sys/kernel/debug/kvm";
/// How long after the last phase of work a guest may still be in a round.
const LAST_ROUND: Duration = Duration::from_secs(300);

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
    memory: u32,
    /// Length of each phase, in seconds [default: 60; with --quick 12]
    #[arg(long, value_name = "S")]
    seconds: Option<u64>,
    /// Under PageONE: `split` huge pages, `keep` them, or split those of which more than this
    /// percentage can be merged
    #[arg(long, value_name = "POLICY", default_value = "split")]
    huge_pages: HugePages,
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
        for who in Who::ALL {
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
}

impl Readings {
    fn take() -> Result<Self> {
        Ok(Self { start: Instant::now(), counts: Counts::read()? })
    }

    /// Notes what has happened since.
    fn note(&self, sheet: &mut Sheet) -> Result<()> {
        let Self { start, counts } = Self::take()?;
        let time = (start - self.start).as_secs_f64();
        let mut add = |metric, count: u64| sheet.add(metric, count as f64 / time, "");
        add("stage2_faults_a_second", counts.faults - self.counts.faults);
        add("tlb_flushes_a_second", counts.flushes - self.counts.flushes);
        add("exits_a_second", counts.exits - self.counts.exits);
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
    // Guests that have checked their files early have more of it.
    let work = 2 * seconds + 30;
    let append = format!("PAGEONE_PAUSE=0 PAGEONE_WORK={work}");
    let memory_mib = options.memory;
    let accelerator = Accelerator::Kvm;
    let spec = testguest::Options { memory_mib, accelerator, append: Some(append), ..Default::default() };
    let base = host::used()?;
    let mut host = Host::boot(who, options.guests, &spec, options.huge_pages, interrupt)?;
    let used = || anyhow::Ok((host::used()? as f64 - base as f64) / f64::from(1 << 20));
    let used_before = used()?;
    let huge = counter("pages_2m").ok();
    if !host.merge(interrupt)? {
        return Ok(Vec::new());
    }
    let (threads, pids) = (who.subject().threads(), host.pids());
    let Host { guests, engine, .. } = &mut host;
    let mut rows = Vec::new();
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
        let readings = Readings::take()?;
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
        readings.note(&mut sheet)?;
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
    Ok(rows)
}
