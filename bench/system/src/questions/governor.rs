//! `governor`: one workload, governed in turn by each: candidates grow fivefold while programs
//! start, stay, drop by half, and grow again.
//!
//! | subject | |
//! |---|---|
//! | `static` | KSM with `pages_to_scan` sized for the peak: its pages are scanned within the target, their cost included, or as near to it as the CPU limit allows |
//! | `static-unloaded` | the same as if pages cost nothing: all pages of the peak, times the sleep, over the target |
//! | `ksm-advisor` | KSM with the kernel's `advisor_mode` `scan-time` |
//! | `ksmtuned` | KSM with Debian's ksmtuned, told that memory is short; its rates are its defaults |
//! | `governor` | KSM with `pageone ksm advise` |
//! | `pageone` | our engine, with the same target and limit |
//!
//! What a page of the peak costs is measured first: the third scan of it, when what can be merged
//! has been and nothing is passed over yet.
//!
//! Everything else about KSM is as the kernel has it by default. The governing program counts with
//! its own CPU time.
//!
//! A second, short workload triples the candidates at once.

mod engine;
mod ksm;
mod load;
mod trace;

use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use kmem::PAGE_SIZE;

use crate::subjects::ksm::Rival;
use crate::subjects::pageone::PageOne;
use bench_common::interrupt::Interrupt;
use bench_common::own_program;
use bench_common::report::{Row, Sheet};
use engine::GovernedEngine;
use ksm::GovernedKsm;
use load::Load;
use trace::{Look, Trace};

/// Options of the bench.
#[derive(Clone, Debug, clap::Args)]
pub(crate) struct Options {
    /// Only these, separated by commas
    #[arg(long, value_delimiter = ',', value_name = "SUBJECT")]
    only: Vec<String>,
    /// Only this workload: `growth`, or the short one that triples
    #[arg(long, value_name = "NAME", value_parser = ["growth", "tripling"])]
    workload: Option<String>,
    /// Target scan time, in whole seconds [default: 2; quick: 1]
    #[arg(long, value_name = "S")]
    target: Option<u64>,
    /// Memory of a process, in MiB [default: 128; quick: 32]
    #[arg(long, value_name = "MIB")]
    memory: Option<usize>,
}

const SUBJECTS: [&str; 6] = ["static", "static-unloaded", "ksm-advisor", "ksmtuned", "governor", "pageone"];
/// Whose recovery from a tripling is of interest.
const TRIPLED: [&str; 3] = ["ksm-advisor", "governor", "pageone"];

/// How often KSM's counter of scans is read, and how many times as seldom all the rest.
const STEP: Duration = Duration::from_millis(5);
const LOOKS: u32 = 20;

pub(crate) struct Plan {
    /// What it is called.
    name: &'static str,
    /// Of each process.
    pub(crate) pages: usize,
    pub(crate) target: Duration,
    pub(crate) max_cpu: f64,
    /// When there are to be how many processes, in seconds.
    load: Vec<(f64, usize)>,
    /// Which of these end a growth; the second may not be there.
    grown: (usize, usize),
    /// Which of these triples the candidates.
    tripled: Option<usize>,
    end: f64,
}

impl Plan {
    /// Stays as long as each other, 16 target scan times and more: the cost of a rate shows when
    /// the start is over.
    fn new(options: &Options, quick: bool, tripling: bool) -> Self {
        let (memory, target, scale) = if quick { (32, 1, 0.4) } else { (128, 2, 1.0) };
        let pages = options.memory.unwrap_or(memory) << 20 >> 12;
        let target = Duration::from_secs(options.target.unwrap_or(target));
        let plan = if tripling {
            let load = vec![(0.0, 3), (24.0, 9)];
            Self { name: "tripling", pages, target, max_cpu: 60.0, load, grown: (1, 9), tripled: Some(1), end: 50.0 }
        } else {
            let load = vec![(0.0, 2), (2.0, 4), (4.0, 6), (6.0, 8), (8.0, 10), (40.0, 5), (76.0, 10)];
            Self { name: "growth", pages, target, max_cpu: 60.0, load, grown: (4, 6), tripled: None, end: 110.0 }
        };
        let load = plan.load.iter().map(|&(at, count)| (at * scale, count)).collect();
        Self { load, end: plan.end * scale, ..plan }
    }

    fn peak(&self) -> usize {
        self.load.iter().map(|&(_, count)| count).max().unwrap_or(0)
    }

    /// `pages_to_scan` that looks at all of the peak within the target, or comes as near to it as
    /// the CPU limit allows, if a page costs this many
    /// seconds of CPU time.
    pub(crate) fn static_pages(&self, sleep: Duration, cost: f64) -> u64 {
        let (work, sleep, limit) = ((self.peak() * self.pages) as f64, sleep.as_secs_f64(), self.max_cpu / 100.0);
        let left = self.target.as_secs_f64() - work * cost;
        let in_time = if left > 0.0 { work * sleep / left } else { f64::INFINITY };
        // A batch takes `pages · cost` of CPU time and then sleeps.
        in_time.min(sleep * limit / (1.0 - limit) / cost).ceil() as u64
    }

    fn sheet(&self, subject: &'static str) -> Sheet {
        let case = format!(
            "{}: {} to {} processes of {} MiB, target {} s, at most {} % of a CPU, {:.0} s",
            self.name,
            self.load[0].1,
            self.peak(),
            (self.pages * PAGE_SIZE) >> 20,
            self.target.as_secs(),
            self.max_cpu,
            self.end
        );
        Sheet { bench: "governor", case, subject, threads: 1, rows: Vec::new() }
    }
}

/// Runs the bench.
pub(crate) fn run(options: &Options, quick: bool) -> Result<Vec<Row>> {
    let known = |name: &&String| !SUBJECTS.contains(&name.as_str());
    if let Some(name) = options.only.iter().find(known) {
        bail!("there is no subject {name:?}; there are {}", SUBJECTS.join(", "));
    }
    let interrupt = Interrupt::watch()?;
    let mut rows = Vec::new();
    for tripling in [false, true] {
        let plan = Plan::new(options, quick, tripling);
        if options.workload.as_deref().is_some_and(|name| name != plan.name) {
            continue;
        }
        for subject in SUBJECTS {
            let wanted = options.only.is_empty() || options.only.iter().any(|name| name == subject);
            if !wanted || (tripling && !TRIPLED.contains(&subject)) {
                continue;
            }
            eprintln!("governor: {subject}, {}", plan.name);
            match one(&plan, subject, &interrupt).with_context(|| subject.to_owned())? {
                Ok(trace) => {
                    let mut sheet = plan.sheet(subject);
                    trace.note(&mut sheet, plan.target, plan.max_cpu, plan.grown, plan.tripled);
                    rows.extend(sheet.rows);
                }
                Err(why) => eprintln!("SKIPPED {subject}: {why}"),
            }
        }
    }
    Ok(rows)
}

/// A subject, under way.
pub(crate) trait Governed {
    /// Called every few milliseconds: notes what must not be missed.
    fn step(&mut self, at: f64, trace: &mut Trace) -> Result<()>;

    /// CPU time that is governed, in seconds since the start.
    fn cpu(&mut self, load: &Load<'_>) -> Result<f64>;

    /// Pages merged.
    fn merged(&mut self, load: &Load<'_>) -> Result<u64>;

    /// CPU time of the governing program, in seconds, if that is not governed itself.
    fn governing(&self) -> f64;
}

fn one(plan: &Plan, subject: &'static str, interrupt: &Interrupt) -> Result<Result<Trace, String>> {
    let program = own_program()?;
    if subject == "pageone" {
        let pageone = PageOne::find()?;
        let launch = |program: &std::process::Command| pageone.launch(program);
        let mut load = Load::new(&program, &launch, plan.pages);
        let mut governed = GovernedEngine::start(plan, &pageone, interrupt)?;
        load.become_so_many(plan.load[0].1)?;
        return watch(plan, &mut governed, &mut load, interrupt).map(Ok);
    }
    let settings = match GovernedKsm::prepare(subject)? {
        Ok(settings) => settings,
        Err(why) => return Ok(Err(why)),
    };
    let launch = |program: &std::process::Command| Ok(Rival::launch(program));
    let mut load = Load::new(&program, &launch, plan.pages);
    let cost = if subject == "static" {
        load.become_so_many(plan.peak())?;
        let cost = GovernedKsm::cost(plan, interrupt)?;
        load.become_so_many(0)?;
        eprintln!("governor: a page of the peak costs {:.2} µs", cost * 1e6);
        cost
    } else {
        0.0
    };
    load.become_so_many(plan.load[0].1)?;
    let trace = match GovernedKsm::start(plan, subject, cost)? {
        Ok(mut governed) => Ok(watch(plan, &mut governed, &mut load, interrupt)?),
        Err(why) => Err(why),
    };
    drop(load);
    drop(settings);
    Ok(trace)
}

/// Lets the load come and go, and looks on.
fn watch(plan: &Plan, governed: &mut dyn Governed, load: &mut Load<'_>, interrupt: &Interrupt) -> Result<Trace> {
    let mut trace = Trace::default();
    let begin = Instant::now();
    let (mut next, mut step) = (1, 0u32);
    trace.changes.push(0.0);
    loop {
        let at = begin.elapsed().as_secs_f64();
        governed.step(at, &mut trace)?;
        if step.is_multiple_of(LOOKS) {
            trace.looks.push(Look {
                at,
                cpu: governed.cpu(load)?,
                merged: governed.merged(load)?,
                mergeable: load.mergeable(),
            });
        }
        if at >= plan.end {
            break;
        }
        if let Some(&(when, count)) = plan.load.get(next)
            && at >= when
        {
            load.become_so_many(count)?;
            trace.changes.push(begin.elapsed().as_secs_f64());
            next += 1;
        }
        step += 1;
        interrupt.sleep(STEP)?;
    }
    trace.governing = governed.governing();
    Ok(trace)
}

#[cfg(test)]
mod tests;
