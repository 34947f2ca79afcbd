//! What a guest and its control did at the same time, and the figures that come of it.

use std::fs;
use std::time::Instant;

use anyhow::{Context, Result, ensure};
use bench_common::report::{Row, Sheet};
use testguest::Guest;

use super::Who;

/// Where KVM counts, a directory for each guest.
const COUNTERS: &str = "/sys/kernel/debug/kvm";

/// What a guest has done, and the time that each part took, in ticks of the processor.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Done {
    rounds: f64,
    reading: f64,
    rewriting: f64,
}

impl Done {
    /// As the guest has said last.
    pub(super) fn of(guest: &Guest) -> Result<Self> {
        let found = guest.console().iter().rev().find_map(|line| Self::parse(line));
        found.with_context(|| format!("guest {} has not said what it did", guest.pid()))
    }

    fn parse(line: &str) -> Option<Self> {
        let words = line.strip_prefix("LOAD work ")?.split_whitespace();
        let numbers: Vec<f64> = words.map(str::parse).collect::<Result<_, _>>().ok()?;
        let &[rounds, reading, rewriting] = numbers.as_slice() else { return None };
        Some(Self { rounds, reading, rewriting })
    }

    fn since(self, before: Self) -> Self {
        Self {
            rounds: self.rounds - before.rounds,
            reading: self.reading - before.reading,
            rewriting: self.rewriting - before.rewriting,
        }
    }

    /// How fast that was, the control's speed being 1.
    fn beside(self, control: Self) -> Ratios {
        let ratio = |time: fn(Self) -> f64| (self.rounds / time(self)) / (control.rounds / time(control));
        Ratios {
            work: ratio(|done| done.reading + done.rewriting),
            reading: ratio(|done| done.reading),
            rewriting: ratio(|done| done.rewriting),
        }
    }
}

/// Speeds of a guest, the control's being 1.
#[derive(Clone, Copy, Debug)]
pub(super) struct Ratios {
    work: f64,
    /// Checking what can be merged.
    reading: f64,
    /// Checking and rewriting what cannot.
    rewriting: f64,
}

/// What a guest has done, and what KVM has counted, at a moment.
pub(super) struct Reading {
    at: Instant,
    done: Done,
    /// Faults in the stage-2 tables.
    faults: u64,
    exits: u64,
}

impl Reading {
    pub(super) fn take(guest: &Guest) -> Result<Self> {
        let prefix = format!("{}-", guest.pid());
        let is_guests = |entry: &fs::DirEntry| entry.file_name().to_str().is_some_and(|name| name.starts_with(&prefix));
        let directory = fs::read_dir(COUNTERS).ok().and_then(|all| all.flatten().find(is_guests));
        let directory = directory.with_context(|| format!("{COUNTERS} has no {prefix}*: is debugfs mounted?"))?.path();
        let count = |name| {
            let path = directory.join(name);
            let text = fs::read_to_string(&path).with_context(|| format!("cannot read {}", path.display()))?;
            text.trim().parse().with_context(|| format!("{}: {text:?} is no number", path.display()))
        };
        Ok(Self { at: Instant::now(), done: Done::of(guest)?, faults: count("pf_taken")?, exits: count("exits")? })
    }

    pub(super) fn since(&self, before: &Self) -> Part {
        let time = (self.at - before.at).as_secs_f64();
        Part {
            done: self.done.since(before.done),
            faults: (self.faults - before.faults) as f64 / time,
            exits: (self.exits - before.exits) as f64 / time,
        }
    }
}

/// What one guest did in a window; faults and exits a second.
pub(super) struct Part {
    done: Done,
    faults: f64,
    exits: f64,
}

/// A guest beside its control.
pub(super) struct Window {
    who: Who,
    phase: &'static str,
    round: usize,
    pub(super) ratios: Ratios,
    /// The guest's, and the control's.
    parts: [Part; 2],
    /// CPU time of the engine.
    cpu_seconds: f64,
    /// Pages that were merged at the end, and when the equal ones were, in seconds: of `merging`.
    merged: Option<(u64, f64)>,
}

/// All of them.
#[derive(Default)]
pub(super) struct Windows {
    round: usize,
    all: Vec<Window>,
}

impl Windows {
    pub(super) fn begin_round(&mut self) {
        self.round += 1;
    }

    /// Adds one.
    ///
    /// # Errors
    ///
    /// A guest did nothing.
    pub(super) fn note(
        &mut self,
        who: Who,
        phase: &'static str,
        parts: [Part; 2],
        cpu_seconds: f64,
    ) -> Result<&Window> {
        ensure!(parts.iter().all(|part| part.done.rounds > 0.0), "a guest did nothing");
        let ratios = parts[0].done.beside(parts[1].done);
        self.all.push(Window { who, phase, round: self.round, ratios, parts, cpu_seconds, merged: None });
        Ok(&self.all[self.all.len() - 1])
    }

    /// What was merged at the end of the last window, and the time until the equal pages were.
    pub(super) fn note_merging(&mut self, pages: u64, seconds: f64) {
        if let Some(last) = self.all.last_mut() {
            last.merged = Some((pages, seconds));
        }
    }

    fn of(&self, who: Who, phase: &str) -> Vec<&Window> {
        self.all.iter().filter(|window| window.who == who && window.phase == phase).collect()
    }

    /// The work in windows at rest, that of the same guest before being 1: for each round.
    fn beside_before(&self, who: Who) -> Vec<f64> {
        let mean = |phase, round| {
            let windows = self.of(who, phase).into_iter().filter(|window| window.round == round);
            let logs: Vec<f64> = windows.map(|window| window.ratios.work.ln()).collect();
            (!logs.is_empty()).then(|| (logs.iter().sum::<f64>() / logs.len() as f64).exp())
        };
        (1..=self.round).filter_map(|round| Some(mean("at rest", round)? / mean("before", round)?)).collect()
    }

    /// The medians. `memory`: of a guest, in MiB.
    pub(super) fn figures(&self, memory: u64) -> Vec<Row> {
        let mut rows = Vec::new();
        for phase in ["before", "merging", "at rest"] {
            let case = format!("{phase}: a guest of {memory} MiB beside one under nothing");
            for who in Who::ALL {
                let windows = self.of(who, phase);
                if windows.is_empty() {
                    continue;
                }
                let mut sheet =
                    Sheet { bench: "module", case: case.clone(), subject: who.name(), threads: 1, rows: vec![] };
                note(&mut sheet, &windows);
                if phase == "at rest" {
                    sheet.add("work_of_its_own_before", median(self.beside_before(who)), "");
                }
                rows.extend(sheet.rows);
            }
            let work = |who| median(self.of(who, phase).iter().map(|window| window.ratios.work).collect());
            let ratio = work(Who::Pageonefs) / work(Who::Ksm);
            if phase == "merging" && ratio.is_finite() {
                let mut sheet = Sheet { bench: "module", case, subject: "pageonefs", threads: 1, rows: vec![] };
                sheet.add("work / ksm", ratio, "");
                rows.extend(sheet.rows);
            }
        }
        rows
    }
}

/// A figure of a window.
type Figure = fn(&Window) -> f64;

/// The medians of these windows.
fn note(sheet: &mut Sheet, windows: &[&Window]) {
    let all = |part: Figure| windows.iter().map(|window| part(window)).collect::<Vec<f64>>();
    let work = all(|window| window.ratios.work);
    sheet.add("windows", windows.len() as f64, "");
    sheet.add("work_of_nothings", median(work.clone()), "");
    sheet.add("lowest", work.iter().copied().fold(f64::INFINITY, f64::min), "");
    sheet.add("highest", work.iter().copied().fold(0.0, f64::max), "");
    let figures: [(&'static str, Figure); 6] = [
        ("reading_of_nothings", |window| window.ratios.reading),
        ("rewriting_of_nothings", |window| window.ratios.rewriting),
        ("stage2_faults_a_second", |window| window.parts[0].faults),
        ("stage2_faults_a_second, nothing", |window| window.parts[1].faults),
        ("exits_a_second", |window| window.parts[0].exits),
        ("exits_a_second, nothing", |window| window.parts[1].exits),
    ];
    figures.into_iter().for_each(|(metric, part)| sheet.add(metric, median(all(part)), ""));
    sheet.add("engines_cpu_seconds", median(all(|window| window.cpu_seconds)), "s");
    let merged = || windows.iter().filter_map(|window| window.merged);
    if merged().next().is_some() {
        sheet.add("merged_pages_at_end", median(merged().map(|(pages, _)| pages as f64).collect()), "");
        sheet.add("seconds_to_merge", median(merged().map(|(_, seconds)| seconds).collect()), "s");
    }
}

/// Not a number, if there are none.
fn median(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    match values.len() {
        0 => f64::NAN,
        len => (values[(len - 1) / 2] + values[len / 2]) / 2.0,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_guest_is_compared_with_one_that_worked_meanwhile_and_with_itself() {
        let done = Done::parse("LOAD work 300 8000 4000").unwrap();
        let before = Done::parse("LOAD work 100 2000 0").unwrap();
        assert_eq!((Done::parse("LOAD work 1 2"), Done::parse("LOAD filled pages=3")), (None, None));
        let part = |done| Part { done, faults: 2.0, exits: 3.0 };
        let control = |reading| part(Done { rounds: 50.0, reading, rewriting: 2000.0 });
        let mut windows = Windows::default();
        windows.begin_round();
        for (phase, reading) in [("before", 3000.0), ("at rest", 500.0), ("at rest", 500.0)] {
            windows.note(Who::Ksm, phase, [part(done.since(before)), control(reading)], 1.0).unwrap();
        }
        let ratios = windows.all[0].ratios;
        assert_eq!((ratios.work, ratios.reading, ratios.rewriting), (2.0, 2.0, 2.0));
        assert!((windows.beside_before(Who::Ksm)[0] - 0.5).abs() < 1e-9);
        let rows = windows.figures(384);
        let value =
            |metric| rows.iter().find(|row| row.metric == metric && row.case.starts_with("at rest")).unwrap().value;
        assert_eq!((value("windows"), value("work_of_nothings"), value("stage2_faults_a_second")), (2.0, 1.0, 2.0));
        let idle = Done { rounds: 0.0, ..done };
        assert!(windows.note(Who::Ksm, "before", [part(idle), part(done)], 0.0).is_err());
        assert!(median(vec![]).is_nan());
    }
}
