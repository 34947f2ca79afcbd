//! `scale`: what many clients and much memory cost, and what threads would wait for.
//!
//! | part | |
//! |---|---|
//! | [`clients`] | 10, 100 and 1,000 processes: idle, a `status`, one more, a restart |
//! | [`memory`] | unique memory; pages far apart in a region of up to 1 TiB; what is given back |
//! | [`store`] | a store that may not grow: how soon its frames have all their users |
//! | [`locks`] | the time under each lock that threads share, and Amdahl's law |
//!
//! Sizes stand side by side. `power` is the exponent between the two largest: 0 a figure that does
//! not grow, 1 one that grows as the size does. `bound` is what was asked for; each figure that has
//! one is said to hold or to be missed. KSM goes through the same where it has the like.

mod clients;
mod locks;
mod memory;
mod store;

use std::path::PathBuf;
use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use bench_common::interrupt::Interrupt;
use bench_common::report::Row;
use kmem::procfs;

use crate::harness::hold::Client;
use crate::subjects::ksm::Rival;
use crate::subjects::pageone::Daemon;

/// Merge period, in seconds.
const PERIOD: f64 = 2.0;
/// How long what is waited for may take.
const LIMIT: Duration = Duration::from_secs(240);
/// What is given back later than this is not given back.
const GIVEN_UP: Duration = Duration::from_secs(12);
/// Time between two looks.
const STEP: Duration = Duration::from_millis(100);

#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
enum Part {
    Clients,
    Memory,
    Store,
    Locks,
}

/// Options of the bench.
#[derive(clap::Args)]
pub(crate) struct Options {
    /// Some parts alone
    #[arg(long, value_enum, value_delimiter = ',')]
    only: Vec<Part>,
    /// How many clients, ascending
    #[arg(long, value_delimiter = ',', default_values_t = [10, 100, 1000])]
    clients: Vec<usize>,
    /// GiB of memory that is mostly unique, ascending
    #[arg(long, value_delimiter = ',', default_values_t = [1, 2])]
    unique: Vec<usize>,
    /// GiB of a region with pages far apart, ascending
    #[arg(long, value_delimiter = ',', default_values_t = [1, 1024])]
    region: Vec<usize>,
    /// Where a build with the feature `lock-times` lies [default: ../lock-times/release beside this
    /// build]
    #[arg(long)]
    locks: Option<PathBuf>,
}

/// Runs the bench.
pub(crate) fn run(options: &Options, quick: bool) -> Result<Vec<Row>> {
    let interrupt = Interrupt::watch()?;
    let wanted = |part| options.only.is_empty() || options.only.contains(&part);
    let few = |sizes: &[usize], most| sizes[..if quick { sizes.len().min(most) } else { sizes.len() }].to_vec();
    let mut rows = Vec::new();
    if wanted(Part::Clients) {
        rows.extend(clients::run(&few(&options.clients, 2), &interrupt)?);
    }
    if wanted(Part::Memory) {
        rows.extend(memory::unique(&few(&options.unique, 1), &interrupt)?);
        rows.extend(memory::scattered(&few(&options.region, 1), &interrupt)?);
    }
    if wanted(Part::Store) {
        rows.extend(store::run(&interrupt)?);
    }
    if wanted(Part::Locks) {
        rows.extend(locks::run(options.locks.as_deref(), quick, &interrupt)?);
    }
    Ok(rows)
}

/// What was asked for.
#[derive(Clone, Copy)]
enum Bound {
    Most(f64),
    Least(f64),
}

/// The figures of a part, a column for each size.
struct Figures {
    case: String,
    rows: Vec<Row>,
}

impl Figures {
    fn new(case: String) -> Self {
        Self { case, rows: Vec::new() }
    }

    fn add(&mut self, subject: &str, metric: &'static str, value: f64, unit: &'static str) {
        let (case, subject) = (self.case.clone(), subject.to_owned());
        self.rows.push(Row { bench: "scale", case, subject, threads: 0, metric, value, unit });
    }

    /// Notes a figure that has a bound, and says whether that holds.
    fn bound(&mut self, subject: &str, metric: &'static str, value: f64, unit: &'static str, bound: Bound) {
        self.add(subject, metric, value, unit);
        let (wanted, order, holds) = match bound {
            Bound::Most(most) => (most, "<=", value <= most),
            Bound::Least(least) => (least, ">=", value >= least),
        };
        let verdict = if holds { "holds" } else { "MISSED" };
        eprintln!("scale: {verdict}: {metric} {value:.3} {unit}, {order} {wanted} ({subject}; {})", self.case);
        if !self.rows.iter().any(|row| row.metric == metric && row.subject == "bound") {
            self.add("bound", metric, wanted, unit);
        }
    }

    /// Adds by which power of the size each figure of `who` grows, between the two largest; the
    /// columns are called by who and size.
    fn grow(&mut self, who: &str, sizes: &[usize]) {
        let [.., small, large] = sizes else { return };
        let of = |size: &usize, metric| {
            let subject = format!("{who} {size}");
            let found = self.rows.iter().find(|row| row.subject == subject && row.metric == metric);
            found.map(|row| row.value).filter(|&value| value > 0.0)
        };
        let mut powers = Vec::new();
        for row in self.rows.iter().filter(|row| row.subject == format!("{who} {large}")) {
            if let (Some(before), Some(now)) = (of(small, row.metric), of(large, row.metric)) {
                powers.push((row.metric, row.unit, (now / before).ln() / (*large as f64 / *small as f64).ln()));
            }
        }
        powers.into_iter().for_each(|(metric, unit, power)| self.add("power", metric, power, unit));
    }
}

/// KSM, if it can be measured here.
fn rival() -> Result<Option<Rival>> {
    let rival = Rival::start()?;
    if let Err(why) = &rival {
        eprintln!("SKIPPED ksm: {why}");
    }
    Ok(rival.ok())
}

/// Bytes of memory of its own that the daemon has: its frames, which clients share, are none.
fn memory_of(daemon: &Daemon) -> Result<f64> {
    let rollup = procfs::smaps_rollup(Some(daemon.pid())).context("cannot read the daemon's memory")?;
    Ok(rollup.anonymous as f64 * 1024.0)
}

/// Ends the clients, and waits until the daemon has a tenth of what it took for them at most, or
/// 1 MiB. Gives the seconds, or how long it waited.
fn gives_back(daemon: &Daemon, before: f64, clients: Vec<Client>, interrupt: &Interrupt) -> Result<f64> {
    let left = before + ((memory_of(daemon)? - before) / 10.0).max(MIB);
    drop(clients);
    let began = Instant::now();
    while began.elapsed() < GIVEN_UP && memory_of(daemon)? > left {
        interrupt.sleep(STEP)?;
    }
    Ok(began.elapsed().as_secs_f64())
}

fn periods(number: f64) -> Duration {
    Duration::from_secs_f64(PERIOD * number)
}

const MIB: f64 = 1048576.0;

#[cfg(test)]
mod tests;
