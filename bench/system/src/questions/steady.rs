//! `steady`: the cost of keeping memory merged while guests work, and how soon something new is
//! found.
//!
//! 1. Clients hold the same pages in the same order, behind some that are unique. They are merged.
//! 2. A share of all pages gets new, unique content each second, at random places. After a while
//!    CPU time is taken for a window.
//! 3. At a moment in the first half of the window two clients give 10,000 pages of theirs, until
//!    then unique, content that both have. `seconds_to_find` counts from there until 99 % of these
//!    pages are shared, by the clients' page tables, not by the engines' own counts.
//! 4. The next share.
//!
//! PageONE finds a duplicate two to three merge periods after it was written, KSM one to two scans
//! after. KSM's pace is set so that one of its scans takes one and a half merge periods, by trying,
//! with the rewriting under way: then both find new pages within the same time.

use std::fs::File;
use std::os::unix::fs::FileExt;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use kmem::PAGE_SIZE;

use crate::harness::content::{self, Case, Content};
use crate::harness::hold::{Client, order_all, pids, start_all};
use crate::harness::host::Others;
use crate::subjects::engine::{self, Engine, Kind, Subject};
use crate::subjects::ksm::{Pace, Rival};
use bench_common::interrupt::Interrupt;
use bench_common::report::{Row, Sheet, medians, ratios};

/// How long merging everything at first may take.
const LIMIT: Duration = Duration::from_secs(300);
/// How often is asked whether the duplicates are shared.
const STEP: Duration = Duration::from_millis(100);
/// Fresh duplicates, in each of two clients.
const DUPLICATES: usize = 10_000;

/// What a person may choose.
#[derive(Clone, Debug, clap::Args)]
pub(crate) struct Options {
    /// Only this engine; may be given more than once; all by default
    #[arg(long, value_enum)]
    engine: Vec<Kind>,
    /// Only this share of all pages is rewritten each second, in percent [default: 0, then 0.1,
    /// then 1]
    #[arg(long, value_name = "PERCENT")]
    share: Option<f64>,
    /// Rounds; figures are medians over them
    #[arg(long, value_name = "N", default_value_t = 1)]
    rounds: usize,
}

struct Plan {
    clients: usize,
    pages: usize,
    /// Seconds.
    period: f64,
    /// Seconds that CPU time is taken for.
    window: f64,
    /// Percent of all pages that are rewritten each second.
    shares: Vec<f64>,
}

impl Plan {
    fn new(options: &Options, quick: bool) -> Self {
        let shares = |all: &[f64]| options.share.map_or(all.to_vec(), |share| vec![share]);
        match quick {
            false => Self { clients: 4, pages: 1 << 18, period: 2.0, window: 60.0, shares: shares(&[0.0, 0.1, 1.0]) },
            true => Self { clients: 4, pages: 1 << 16, period: 0.5, window: 10.0, shares: shares(&[0.0, 1.0]) },
        }
    }

    fn case(&self, share: f64) -> String {
        let mib = (self.pages * PAGE_SIZE) >> 20;
        format!("{} clients of {mib} MiB, {share} % of pages rewritten each second, {} s", self.clients, self.window)
    }

    /// How long one of KSM's scans is to take.
    fn scan(&self) -> Duration {
        Duration::from_secs_f64(self.period * 1.5)
    }

    /// Before a window; KSM's pace is set meanwhile.
    fn lead(&self) -> Duration {
        self.scan() * 6
    }

    fn rewrites(&self, share: f64) -> u64 {
        (self.pages as f64 * share / 100.0) as u64
    }
}

/// Runs the bench.
pub(crate) fn run(options: &Options, quick: bool) -> Result<Vec<Row>> {
    let plan = Plan::new(options, quick);
    ensure!(plan.shares.len() * DUPLICATES <= content::UNIQUE && content::UNIQUE < plan.pages, "too many shares");
    let interrupt = Interrupt::watch()?;
    let threads = std::thread::available_parallelism().map_or(1, usize::from);
    let mut subjects = engine::subjects(&options.engine, Some(threads));
    // Few minutes: with the kernel's default only.
    subjects.retain(|&subject| !quick || subject != Subject::Ksm { smart_scan: false });
    let mut rows = Vec::new();
    for round in 0..options.rounds {
        for &subject in &subjects {
            eprintln!("steady: {}, round {}", subject.name(), round + 1);
            rows.extend(measure(&plan, subject, &interrupt).context(subject.name())?);
        }
    }
    let figures = medians(&rows);
    let ratios =
        ratios(&figures, &[("cpu_seconds", "cpu_seconds / ksm"), ("seconds_to_find", "seconds_to_find / ksm")]);
    Ok(figures.into_iter().chain(ratios).collect())
}

/// Nothing, if that engine can't be measured here.
fn measure(plan: &Plan, subject: Subject, interrupt: &Interrupt) -> Result<Vec<Row>> {
    let Some(mut engine) = Engine::prepare(subject)? else { return Ok(Vec::new()) };
    let mut clients = start_all(plan.clients, plan.pages, Case::Steady, |program| engine.launch(program))?;
    engine.start(plan.period, subject, interrupt)?;
    order_all(&mut clients, "mark")?;
    let contents = (0..plan.clients).map(|client| Content::new(Case::Steady, client, plan.pages));
    let goal = content::reach(&contents.collect::<Result<Vec<_>>>()?, false).mergeable * 995 / 1000;
    interrupt.until("the clients' memory is merged", LIMIT, || Ok((engine.merged(&clients)? >= goal).then_some(())))?;
    // A scan more, at least, so that all has been seen that is unique.
    interrupt.sleep(plan.scan() * 2)?;

    let mut rows = Vec::new();
    for (number, &share) in plan.shares.iter().enumerate() {
        eprintln!("steady: {}, {share} %", subject.name());
        order_all(&mut clients, &format!("rewrite {}", plan.rewrites(share)))?;
        match &mut engine {
            Engine::Ksm(rival) => set_pace(rival, plan, interrupt)?,
            Engine::PageOne { .. } => interrupt.sleep(plan.lead())?,
        }
        let window = window(plan, &engine, &mut clients, number, interrupt)?;
        order_all(&mut clients, "end-rewrite")?;
        let (name, threads) = (subject.name(), subject.threads());
        let mut sheet = Sheet { bench: "steady", case: plan.case(share), subject: name, threads, rows: Vec::new() };
        sheet.add("cpu_seconds", window.cpu_ns as f64 / 1e9, "s");
        sheet.add("cpu_percent_of_one", window.cpu_ns as f64 / 1e7 / plan.window, "%");
        sheet.add("seconds_to_find", window.found.as_secs_f64(), "s");
        rows.extend(sheet.rows);
    }
    order_all(&mut clients, "check")?;
    Ok(rows)
}

/// Sets the pace at which a scan takes the time that it should, by trying.
fn set_pace(rival: &mut Rival, plan: &Plan, interrupt: &Interrupt) -> Result<()> {
    let mut pace = Pace::of((plan.clients * plan.pages) as u64, plan.scan().as_secs_f64());
    for _ in 0..3 {
        rival.set_pace(pace)?;
        let at_end = |rival: &Rival| {
            let full_scans = || anyhow::Ok(rival.stats()?.full_scans.unwrap_or(0));
            let before = full_scans()?;
            interrupt.until_each(STEP / 10, "KSM has scanned all memory", LIMIT, || {
                Ok((full_scans()? > before).then(Instant::now))
            })
        };
        let (start, end) = (at_end(rival)?, at_end(rival)?);
        let slow = (end - start).as_secs_f64() / plan.scan().as_secs_f64();
        pace.pages_to_scan = (pace.pages_to_scan as f64 * slow).ceil() as u64;
    }
    rival.set_pace(pace)
}

struct Window {
    cpu_ns: u64,
    found: Duration,
}

/// One window; `number`: how many there were before.
fn window(
    plan: &Plan,
    engine: &Engine,
    clients: &mut [Client],
    number: usize,
    interrupt: &Interrupt,
) -> Result<Window> {
    // The same moments for every engine; at random to their scans.
    let moment = plan.window * (0.2 + 0.3 * (0.618 * (number + 1) as f64).fract());
    let first = number * DUPLICATES;
    let mut watch = [PageTable::of(&mut clients[0], first)?, PageTable::of(&mut clients[1], first)?];
    let others = Others::watch(pids(clients).into_iter().chain(engine.pid()).collect())?;
    let (times, start) = (engine.times(&pids(clients))?, Instant::now());
    let (mut written, mut found, mut cpu_ns) = (None, None, None);
    while cpu_ns.is_none() || found.is_none() {
        interrupt.sleep(STEP)?;
        let now = start.elapsed().as_secs_f64();
        if cpu_ns.is_none() && now >= plan.window {
            cpu_ns = Some(engine.times(&pids(clients))?.since(&times).0);
        }
        if written.is_none() && now >= moment {
            let order = format!("duplicate {first} {DUPLICATES} {}", number + 1);
            clients[..2].iter_mut().try_for_each(|client| client.obey(&order))?;
            written = Some(Instant::now());
        }
        let Some(since) = written else { continue };
        if found.is_none() && shared(&mut watch)? >= DUPLICATES * 99 / 100 {
            found = Some(since.elapsed());
        }
        ensure!(since.elapsed() < LIMIT, "the fresh duplicates were not found within {LIMIT:?}");
    }
    others.report()?;
    Ok(Window { cpu_ns: cpu_ns.unwrap_or(0), found: found.unwrap_or_default() })
}

/// The page table of a client, where its duplicates are.
struct PageTable {
    file: File,
    offset: u64,
    entries: Vec<u8>,
}

impl PageTable {
    fn of(client: &mut Client, first: usize) -> Result<Self> {
        let address: u64 = client.ask(&format!("where {first}"))?.parse().context("a client does not say where")?;
        let file = File::open(format!("/proc/{}/pagemap", client.pid())).context("cannot read a page table")?;
        Ok(Self { file, offset: address / PAGE_SIZE as u64 * 8, entries: vec![0; DUPLICATES * 8] })
    }

    fn read(&mut self) -> Result<impl Iterator<Item = u64> + '_> {
        self.file.read_exact_at(&mut self.entries, self.offset).context("cannot read a page table")?;
        Ok(self.entries.chunks_exact(8).map(|bytes| u64::from_le_bytes(bytes.try_into().unwrap_or_default())))
    }
}

/// How many pages are shared, going by both page tables.
fn shared([one, other]: &mut [PageTable; 2]) -> Result<usize> {
    Ok(one.read()?.zip(other.read()?).filter(|&(one, other)| is_shared(one, other)).count())
}

/// Whether a page is shared: it has the same frame in both, or was replaced and was not looked at
/// at it since.
fn is_shared(one: u64, other: u64) -> bool {
    // Bit 63: present; bits 0 to 54: the frame (Documentation/admin-guide/mm/pagemap.rst).
    let frame = |entry: u64| (entry >> 63 == 1).then_some(entry & ((1 << 55) - 1));
    match (frame(one), frame(other)) {
        (Some(one), Some(other)) => one == other,
        _ => true,
    }
}

#[cfg(test)]
mod tests;
