//! `guests`: the guests of `pageone demo` under nothing, under KSM and under PageONE.
//!
//! Guests boot and check all of their files once; then merging starts, and time. Until its end, the
//! memory in use on the host is read each second, above what it was before the first guest; guests
//! go on checking, and their rounds are counted. Guests that find a wrong byte, or end, end the
//! bench.
//!
//! PageONE has a merge period of 2 s, KSM is set to look at all memory once in 3 s, as far as it
//! gets CPU time: ksmd runs at nice 5.
//!
//! These guests do not sleep between rounds, as those of the demo do, so that their rounds tell
//! the CPU time that the engines leave. `--pause 3` has them as in the demo; then there are idle
//! CPUs, which ksmd needs to get anywhere.

use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use kmem::procfs::smaps_rollup;
use testguest::Guest;

use crate::harness::host::{self, Others};
use crate::subjects::Who;
use crate::subjects::engine::Engine;
use crate::subjects::guests::Host;
use crate::subjects::pageone::HugePages;
use bench_common::interrupt::Interrupt;
use bench_common::report::{Row, Sheet, medians, ratios};

/// Memory in use is the median of this many readings, a second apart: rounds make it rise and fall.
const READINGS: usize = 5;

/// Merging has converged when it has saved this part of what it saves at the end.
const CONVERGED: f64 = 0.95;

/// What a person may choose.
#[derive(Clone, Debug, clap::Args)]
pub(crate) struct Options {
    /// Rounds; figures are medians over them
    #[arg(long, value_name = "N", default_value_t = 1)]
    rounds: usize,
    /// Guests [default: 4; with --quick 2]
    #[arg(long, value_name = "N")]
    guests: Option<usize>,
    /// How long to merge and watch, in seconds [default: 120; with --quick 12]
    #[arg(long, value_name = "S")]
    seconds: Option<usize>,
    /// How long guests sleep between rounds, in seconds; 3 in the demo
    #[arg(long, value_name = "S", default_value_t = 0)]
    pause: u32,
    /// Under PageONE: `split` huge pages, `keep` them, or split those of which more than this
    /// percentage can be merged
    #[arg(long, value_name = "POLICY", default_value = "split")]
    huge_pages: HugePages,
    /// Only under this; may be given more than once; all by default
    #[arg(long, value_enum)]
    only: Vec<Who>,
}

struct Plan {
    guests: usize,
    memory_mib: u32,
    seconds: usize,
    pause: u32,
    huge_pages: HugePages,
}

/// Runs the bench.
pub(crate) fn run(options: &Options, quick: bool) -> Result<Vec<Row>> {
    let (guests, seconds, memory_mib) = if quick { (2, 12, 256) } else { (4, 120, 512) };
    let plan = Plan {
        guests: options.guests.unwrap_or(guests),
        seconds: options.seconds.unwrap_or(seconds),
        memory_mib,
        pause: options.pause,
        huge_pages: options.huge_pages,
    };
    let interrupt = Interrupt::watch()?;
    let mut rows = Vec::new();
    for round in 0..options.rounds {
        for who in Who::ALL {
            if !options.only.is_empty() && !options.only.contains(&who) {
                continue;
            }
            eprintln!("guests: {}, round {}", who.name(), round + 1);
            let Some(outcome) = measure(&plan, who, &interrupt).context(who.name())? else { continue };
            let threads = who.subject().threads();
            let mut case = format!("{} guests of {} MiB, {} s", plan.guests, plan.memory_mib, plan.seconds);
            if plan.pause > 0 {
                case += &format!(", pauses of {} s", plan.pause);
            }
            match plan.huge_pages {
                HugePages::Split(0) => {}
                HugePages::Split(percent) => case += &format!(", huge pages split above {percent} %"),
                HugePages::Keep => case += ", huge pages kept",
            }
            let mut sheet = Sheet { bench: "guests", case, subject: who.name(), threads, rows: Vec::new() };
            outcome.note(&mut sheet);
            rows.extend(sheet.rows);
        }
    }
    let figures = medians(&rows);
    let ratios =
        ratios(&figures, &[("cpu_seconds", "cpu_seconds / ksm"), ("rounds_a_minute", "rounds_a_minute / ksm")]);
    Ok(figures.into_iter().chain(ratios).collect())
}

struct Outcome {
    /// Seconds and MiB.
    used: Vec<(f64, f64)>,
    /// Memory of the guests in huge pages at the end.
    huge_mib: f64,
    cpu_ns: u64,
    rounds_a_minute: f64,
}

impl Outcome {
    fn note(&self, sheet: &mut Sheet) {
        let median = |mut readings: Vec<f64>| {
            readings.sort_by(f64::total_cmp);
            readings[readings.len() / 2]
        };
        let used = |from: usize| median(self.used[from..].iter().take(READINGS).map(|&(_, mib)| mib).collect());
        let last = self.used.len().saturating_sub(READINGS);
        sheet.add("used_mib_before", self.used[0].1, "MiB");
        for (metric, second) in [("used_mib_after_10_s", 10), ("used_mib_after_30_s", 30)] {
            if second < last {
                sheet.add(metric, used(second), "MiB");
            }
        }
        sheet.add("used_mib_at_end", used(last), "MiB");
        if let Some(seconds) = self.converged(used(last)) {
            sheet.add("seconds_to_converge", seconds, "s");
        }
        sheet.add("huge_mib_at_end", self.huge_mib, "MiB");
        sheet.add("cpu_seconds", self.cpu_ns as f64 / 1e9, "s");
        sheet.add("rounds_a_minute", self.rounds_a_minute, "");
    }
}

impl Outcome {
    /// When so much of what is saved at the end was saved for the first time ([`CONVERGED`]), in
    /// seconds; `None` where nothing is.
    fn converged(&self, end: f64) -> Option<f64> {
        let before = self.used.first()?.1;
        let bar = before - CONVERGED * (before - end);
        self.used.iter().find(|&&(_, mib)| mib <= bar && end < before).map(|&(second, _)| second)
    }
}

fn measure(plan: &Plan, who: Who, interrupt: &Interrupt) -> Result<Option<Outcome>> {
    let append = Some(format!("PAGEONE_PAUSE={}", plan.pause));
    let spec = testguest::Options { memory_mib: plan.memory_mib, append, ..Default::default() };
    let base = host::used()?;
    let mut host = Host::boot(who, plan.guests, &spec, plan.huge_pages, interrupt)?;
    let used = || anyhow::Ok((host::used()? as f64 - base as f64) / f64::from(1 << 20));
    let mut readings = Vec::new();
    for _ in 0..READINGS {
        interrupt.sleep(Duration::from_secs(1))?;
        readings.push(used()?);
    }
    readings.sort_by(f64::total_cmp);

    let start = Instant::now();
    if !host.merge(interrupt)? {
        return Ok(None);
    }
    let pids = host.pids();
    let Host { guests, engine, .. } = &mut host;
    let times = engine.as_ref().map(|engine| engine.times(&pids)).transpose()?;
    let others = Others::watch(pids.iter().copied().chain(engine.as_ref().and_then(Engine::pid)).collect())?;
    let mut outcome =
        Outcome { used: vec![(0.0, readings[READINGS / 2])], huge_mib: 0.0, cpu_ns: 0, rounds_a_minute: 0.0 };
    for second in 1..=plan.seconds as u64 {
        interrupt.sleep((start + Duration::from_secs(second)).saturating_duration_since(Instant::now()))?;
        outcome.used.push((start.elapsed().as_secs_f64(), used()?));
        guests.iter_mut().try_for_each(Guest::check)?;
    }
    if let (Some(engine), Some(times)) = (engine, &times) {
        outcome.cpu_ns = engine.times(&pids)?.since(times).0;
    }
    others.report()?;
    for &pid in &pids {
        let memory = smaps_rollup(Some(pid)).with_context(|| format!("the memory of guest {pid} can't be read"))?;
        outcome.huge_mib += memory.anon_huge_pages as f64 / 1024.0;
    }
    outcome.rounds_a_minute =
        guests.iter().map(|guest| guest.rounds_a_second(start..Instant::now())).sum::<f64>() * 60.0;
    Ok(Some(outcome))
}
