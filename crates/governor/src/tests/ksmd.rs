//! The kernel's ksmd in simulated time, with the causes of jumps in its work. The cost of a page
//! depends on what ksmd finds. Smart scan skips pages that were unique several times, for longer
//! each time. A new process waits behind the cursor for the next scan.

use std::time::Duration;

use crate::{Governor, Reading, Settings};

/// Pages of a piece, which all have the same history.
const PIECE: u64 = 64;
/// Pieces of a process; every fourth is common to all processes.
const PIECES: usize = 512;
/// The sleep between batches in seconds, and how much longer it may take.
const SLEEP: f64 = 0.02;
const LATE: f64 = 0.002;
/// CPU time in seconds: of a page that is skipped, scanned for the first time, merged already,
/// unique, and merged now; and of a batch.
const SKIP: f64 = 0.12e-6;
const FIRST: f64 = 1.4e-6;
const MERGED: f64 = 1.1e-6;
const UNIQUE: f64 = 6.2e-6;
const MERGE: f64 = 9e-6;
const BATCH: f64 = 150e-6;

#[derive(Copy, Clone, Default)]
struct Piece {
    age: u8,
    skips: u8,
    merged: bool,
}

/// `skip_age()` of mm/ksm.c.
fn skips(age: u8) -> u8 {
    match age {
        0..=3 => 1,
        4..=5 => 2,
        6..=8 => 4,
        _ => 8,
    }
}

pub(crate) struct Ksmd {
    processes: Vec<Vec<Piece>>,
    /// Process and piece.
    cursor: (usize, usize),
    /// The rest of the piece that is being scanned: pages, and the cost of each.
    rest: (u64, f64),
    pages_to_scan: u32,
    at: f64,
    cpu: f64,
    scanned: u64,
    skipped: u64,
    batch: u32,
    wake: f64,
    random: u64,
    /// The times at which scans ended.
    pub(crate) ends: Vec<f64>,
    pub(crate) trace: Vec<(f64, f64)>,
}

impl Ksmd {
    pub(crate) fn new(seed: u64) -> Self {
        Self {
            processes: Vec::new(),
            cursor: (0, 0),
            rest: (0, 0.0),
            pages_to_scan: 100,
            at: 0.0,
            cpu: 0.0,
            scanned: 0,
            skipped: 0,
            batch: 0,
            wake: 0.0,
            random: seed,
            ends: Vec::new(),
            trace: vec![(0.0, 0.0)],
        }
    }

    /// From 0 to 1.
    fn chance(&mut self) -> f64 {
        self.random = self.random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (self.random >> 33) as f64 / (1u64 << 31) as f64
    }

    /// Begins a process, behind the cursor.
    pub(crate) fn start(&mut self) {
        self.processes.insert(self.cursor.0, vec![Piece::default(); PIECES]);
        if self.cursor != (0, 0) || self.rest.0 > 0 {
            self.cursor.0 += 1;
        }
    }

    /// Ends the oldest process. The list is in no order of age; in the kernel's list a process
    /// keeps the place where it began.
    pub(crate) fn end(&mut self, index: usize) {
        self.processes.remove(index);
        if index < self.cursor.0 {
            self.cursor.0 -= 1;
        } else if index == self.cursor.0 {
            (self.cursor.1, self.rest) = (0, (0, 0.0));
        }
    }

    /// Goes to the next piece. Returns `false` at the end of a scan.
    fn enter(&mut self) -> bool {
        let many = self.processes.len() > 1;
        let Some(process) = self.processes.get_mut(self.cursor.0) else {
            self.cursor = (0, 0);
            return false;
        };
        let index = self.cursor.1;
        let piece = &mut process[index];
        let age = piece.age;
        piece.age = age.saturating_add(u8::from(!piece.merged));
        let mut pass = false;
        if !piece.merged && age >= 3 {
            if piece.skips == 0 {
                piece.skips = skips(age);
            } else {
                piece.skips -= 1;
                pass = true;
            }
        }
        let cost = match (piece.merged, age) {
            (true, _) => MERGED,
            (false, 0) => FIRST,
            (false, _) if index.is_multiple_of(4) && many => {
                piece.merged = true;
                MERGE
            }
            _ => UNIQUE,
        };
        self.cursor = if index + 1 < PIECES { (self.cursor.0, index + 1) } else { (self.cursor.0 + 1, 0) };
        if pass {
            self.skipped += PIECE;
            self.run_for(PIECE as f64 * SKIP);
        } else {
            self.rest = (PIECE, cost * (0.9 + 0.2 * self.chance()));
        }
        true
    }

    fn run_for(&mut self, time: f64) {
        self.at += time;
        self.cpu += time;
    }

    fn sleep(&mut self) {
        self.batch = 0;
        self.trace.push((self.at, self.cpu));
        self.wake = self.at + SLEEP + LATE * self.chance();
    }

    pub(crate) fn run(&mut self, to: f64) {
        while self.at < to {
            if self.batch == 0 {
                if self.wake > to {
                    break;
                }
                self.at = self.at.max(self.wake);
                self.batch = self.pages_to_scan;
                self.trace.push((self.at, self.cpu));
                self.run_for(BATCH);
                if self.batch == 0 {
                    self.sleep();
                    continue;
                }
            }
            if self.rest.0 == 0 {
                if !self.enter() {
                    self.ends.push(self.at);
                    self.sleep();
                }
                continue;
            }
            let now = self.rest.0.min(u64::from(self.batch)).min(16);
            self.rest.0 -= now;
            self.batch -= now as u32;
            self.scanned += now;
            self.run_for(now as f64 * self.rest.1);
            if self.batch == 0 {
                self.sleep();
            }
        }
        self.at = self.at.max(to);
    }

    fn reading(&self) -> Reading {
        Reading {
            at: Duration::from_secs_f64(self.at),
            cpu: Duration::from_secs_f64(self.cpu),
            pages: self.scanned,
            skipped: self.skipped,
            scans: self.ends.len() as u64,
            candidates: 0,
            pages_to_scan: self.pages_to_scan,
        }
    }

    /// Runs the scanner under the governor until `to`.
    pub(crate) fn govern(&mut self, governor: &mut Governor, to: f64) {
        while self.at < to {
            let decision = governor.observe(&self.reading());
            self.pages_to_scan = decision.pages;
            self.run(self.at + decision.check_after.as_secs_f64());
        }
    }
}

fn most_cpu(trace: &[(f64, f64)], length: f64) -> f64 {
    let mut first = 0;
    let mut most = 0.0f64;
    for &(at, cpu) in trace {
        while trace[first].0 < at - length {
            first += 1;
        }
        most = most.max(cpu - trace[first].1);
    }
    most
}

/// The results of a run.
#[derive(Default)]
struct Shown {
    /// The relative distance of each steady scan from the target.
    errors: Vec<f64>,
    /// After each change to 9 processes or more: scans until three in a row are within 3 %.
    recoveries: Vec<usize>,
    /// Most CPU time in 10 s, in seconds.
    most: f64,
}

const TARGET: f64 = 2.0;

/// Runs the scanner under the governor. Each entry says from which second on there are how many
/// processes; the last one is the end. 12 runs, with the changes at different moments.
fn govern(load: &[(f64, usize)]) -> Shown {
    let mut shown = Shown::default();
    for seed in 1..=12u64 {
        let mut ksmd = Ksmd::new(seed * 7919);
        let target = Duration::from_secs_f64(TARGET);
        let settings = Settings { target, max_cpu: 60.0, min_pages: 100, ..Settings::default() };
        let mut governor = Governor::new(settings, Duration::from_secs_f64(SLEEP)).unwrap();
        let moved = |at: f64| if at > 0.0 { at + seed as f64 * 0.17 } else { 0.0 };
        for pair in load.windows(2) {
            let (from, count, until) = (moved(pair[0].0), pair[0].1, moved(pair[1].0));
            while ksmd.processes.len() > count {
                ksmd.end(0);
            }
            while ksmd.processes.len() < count {
                ksmd.start();
                // Processes fill their memory first.
                let at = ksmd.at + if from > 0.0 { 0.15 } else { 0.0 };
                ksmd.govern(&mut governor, at);
            }
            ksmd.govern(&mut governor, until);
            let times = |after: f64| -> Vec<f64> {
                let ends: Vec<f64> = ksmd.ends.iter().copied().filter(|&end| end > after && end < until).collect();
                ends.windows(2).map(|pair| pair[1] - pair[0]).collect()
            };
            // Merged in 5 s, and two scans more, as in the bench.
            shown.errors.extend(times(from + 5.5).iter().skip(2).map(|time| (time / TARGET - 1.0).abs()));
            if from > 0.0 && count >= 9 && until - from > 10.0 {
                let near = |row: &[f64]| row.iter().all(|time| (time / TARGET - 1.0).abs() <= 0.03);
                shown.recoveries.push(times(from).windows(3).position(near).map_or(99, |n| n + 1));
            }
        }
        shown.most = shown.most.max(most_cpu(&ksmd.trace, 10.0));
    }
    shown
}

impl Shown {
    fn check(&self, name: &str, mean: f64, off: usize, recovery: f64) {
        let count = self.errors.len();
        let error = self.errors.iter().sum::<f64>() / count as f64;
        let far = self.errors.iter().filter(|&&error| error > 0.03).count();
        let slow = self.recoveries.iter().sum::<usize>() as f64 / self.recoveries.len() as f64;
        let worst = self.errors.iter().fold(0.0f64, |a, &b| a.max(b));
        println!(
            "{name}: {:.2} % off on average, {:.1} % at worst, {far} of {count} by more than 3 %; recovered after {slow:.1} scans {:?}; {:.2} s in 10 s",
            error * 100.0,
            worst * 100.0,
            self.recoveries,
            self.most
        );
        assert!(count > 80 && error < mean && far <= off, "{:.3?}", self.errors);
        assert!(slow <= recovery, "{:?}", self.recoveries);
        assert!(self.most <= 6.0, "{} s in 10 s", self.most);
    }
}

#[test]
fn processes_come_and_go() {
    let grown = [(0.0, 2), (2.0, 4), (4.0, 6), (6.0, 8), (8.0, 10), (40.0, 5), (76.0, 10), (110.0, 0)];
    govern(&grown).check("growth", 0.01, 28, 4.2);
}

#[test]
fn processes_triple() {
    govern(&[(0.0, 3), (24.0, 9), (50.0, 0)]).check("tripling", 0.006, 3, 3.0);
}
