//! `merge`: how fast, at what cost and how gently identical pages are merged.
//!
//! 1. Clients fill their memory ([`crate::harness::content`]). The engine runs already, and has
//!    nothing to do.
//! 2. A thread in the first client begins to time its own accesses ([`crate::harness::probe`]).
//! 3. The clients mark their memory as mergeable: time starts. It ends when 99 % of the pages that
//!    have an equal are merged, zero pages among them. The pages that the timing thread writes to
//!    are not among those 99 %.
//! 4. CPU time is taken: all threads of the daemon and of the agents; ksmd.
//! 5. When merging has come to rest, each client reads all of its pages and checks them, and the
//!    host's memory is compared with that of step 1, so that everything that an engine needs is in
//!    it.
//!
//! PageONE waits until a page did not change for two merge periods, and has the shortest period
//! here; all of the waiting counts. KSM is measured with smart scan and without; ratios are to the
//! better of both.

use std::path::PathBuf;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use kmem::PAGE_SIZE;
use kmem::procfs;

use crate::harness::content::{self, Case, Content, Reach};
use crate::harness::hold::{Client, order_all, pids, start_all};
use crate::harness::host::{self, MapLimit, Others};
use crate::harness::probe::Timing;
use crate::subjects::engine::{self, Engine, Subject};
use bench_common::dump;
use bench_common::guest;
use bench_common::interrupt::Interrupt;
use bench_common::plot;
use bench_common::report::{Row, Sheet, medians, ratios};

/// How long merging may take.
const LIMIT: Duration = Duration::from_secs(300);
/// How often is asked how far it has come.
const STEP: Duration = Duration::from_millis(20);
/// The shortest merge period that the daemon takes, in seconds.
const LEAST_PERIOD: f64 = 0.05;
/// The time of probing before merging starts.
const LEAD: Duration = Duration::from_millis(200);
/// Nothing more was merged for so long: merging has come to rest …
const QUIET: Duration = Duration::from_millis(1500);
/// … or is taken as it is.
const REST_LIMIT: Duration = Duration::from_secs(20);
/// Memory to be left to others, in KiB.
const RESERVE_KIB: u64 = 1 << 20;

/// What a person may choose.
#[derive(Clone, Debug, clap::Args)]
pub(crate) struct Options {
    /// Only this case; all by default
    #[arg(long, value_enum)]
    case: Option<Case>,
    /// Only this engine; may be given more than once; all by default
    #[arg(long, value_enum)]
    engine: Vec<engine::Kind>,
    /// Worker threads of PageONE; one, then all by default
    #[arg(long, value_name = "N")]
    threads: Option<usize>,
    /// PageONE's merge period; the default is the shortest. Pages rest for two of them, and those
    /// that are written within are left alone
    #[arg(long, value_name = "SECONDS", default_value_t = LEAST_PERIOD)]
    merge_period: f64,
    /// Rounds; figures are medians over them
    #[arg(long, value_name = "N", default_value_t = 1)]
    rounds: usize,
    /// Client processes
    #[arg(long, value_name = "N", default_value_t = 4)]
    clients: usize,
    /// Pages of each client [default: 262144; with --quick 65536]
    #[arg(long, value_name = "N")]
    pages: Option<usize>,
    /// Directory for a plot of each case: merged pages over time, in the first round
    #[arg(long, value_name = "DIR")]
    plots: Option<PathBuf>,
}

/// Everything of which one round is made.
struct Plan {
    case: Case,
    clients: usize,
    pages: usize,
    reach: Reach,
}

impl Plan {
    fn new(case: Case, options: &Options, pages: usize) -> Result<Self> {
        let pages = if case == Case::Guest { dump::pages(options.clients)? } else { pages };
        let contents = (0..options.clients).map(|client| Content::new(case, client, pages));
        let reach = content::reach(&contents.collect::<Result<Vec<_>>>()?, true);
        ensure!(reach.mergeable > 0, "no page of {} has an equal", case.name());
        Ok(Self { case, clients: options.clients, pages, reach })
    }

    fn goal(&self) -> u64 {
        self.reach.mergeable * 99 / 100
    }

    fn sheet(&self, subject: Subject) -> Sheet {
        let mib = (self.pages * PAGE_SIZE) >> 20;
        let case = format!("{}, {} clients of {mib} MiB", self.case.name(), self.clients);
        Sheet { bench: "merge", case, subject: subject.name(), threads: subject.threads(), rows: Vec::new() }
    }

    fn check_memory(&self) -> Result<()> {
        let pages = self.reach.resident + self.reach.frames;
        let (need, there) = (pages * (PAGE_SIZE as u64 >> 10) + RESERVE_KIB, procfs::meminfo()?.available_kib);
        ensure!(there >= need, "this needs {} MiB of memory, {} are available", need >> 10, there >> 10);
        Ok(())
    }
}

/// Runs the bench.
pub(crate) fn run(options: &Options, quick: bool) -> Result<Vec<Row>> {
    ensure!(options.clients > 0 && options.rounds > 0, "--clients and --rounds are at least 1");
    ensure!(options.merge_period >= LEAST_PERIOD, "--merge-period is at least {LEAST_PERIOD} s");
    let interrupt = Interrupt::watch()?;
    let all = [Case::Random, Case::ZeroPrefix, Case::Clones, Case::Zero, Case::Guest];
    let cases = options.case.map_or(all.to_vec(), |case| vec![case]);
    let pages = options.pages.unwrap_or(if quick { 1 << 16 } else { 1 << 18 });
    let mut rows = Vec::new();
    for case in cases {
        if case == Case::Guest {
            guest::make_dumps(options.clients, &interrupt)?;
        }
        let plan = Plan::new(case, options, pages)?;
        // Every page may become a mapping of its own, and an agent takes two thirds of the limit.
        let _limit = MapLimit::raise(2 * plan.pages + (1 << 16))?;
        let (mut rounds, mut series) = (Vec::new(), Vec::new());
        for round in 0..options.rounds {
            for subject in engine::subjects(&options.engine, options.threads) {
                say(&format!(
                    "{}, {}, {} threads, round {}",
                    case.name(),
                    subject.name(),
                    subject.threads(),
                    round + 1
                ));
                if let Some(outcome) =
                    measure(&plan, options.merge_period, subject, &interrupt).context(subject.name())?
                {
                    let mut sheet = plan.sheet(subject);
                    outcome.note(&plan, subject, &mut sheet);
                    rounds.extend(sheet.rows);
                    if round == 0 {
                        series.push((format!("{} x{}", subject.name(), subject.threads()), outcome.progress));
                    }
                }
            }
        }
        if let Some(directory) = &options.plots {
            let path = directory.join(format!("merge-{}.svg", case.name()));
            let series: Vec<_> = series.iter().map(|(name, points)| (name.as_str(), points.clone())).collect();
            let title = format!("Merging: {}", case.name());
            plot::lines(&path, &title, "seconds", "% of what can be merged", &series)?;
        }
        let figures = medians(&rounds);
        let ratios = ratios(&figures, &RATIOS);
        rows.extend(figures.into_iter().chain(ratios));
    }
    Ok(rows)
}

/// What one engine did in one round.
struct Outcome {
    time: Duration,
    /// All, and the agents' part.
    cpu_ns: (u64, u64),
    /// Pages merged when the time ended, zero pages too.
    merged: u64,
    /// Loads and stores.
    accesses: [Timing; 2],
    merged_at_rest: u64,
    /// Pages saved at rest.
    saved_pages: u64,
    /// Seconds, and percent of what can be merged.
    progress: Vec<(f64, f64)>,
    /// Bytes of the host in use: before the clients came, when they had filled their memory, at
    /// rest.
    used: [u64; 3],
}

/// One round. `None`: that engine can't be measured here.
fn measure(plan: &Plan, merge_period: f64, subject: Subject, interrupt: &Interrupt) -> Result<Option<Outcome>> {
    plan.check_memory()?;
    let Some(mut engine) = Engine::prepare(subject)? else { return Ok(None) };
    let base = host::used()?;
    // Declared after the engine, so that they end before it.
    let mut clients = start_all(plan.clients, plan.pages, plan.case, |program| engine.launch(program))?;
    let before = host::used()?;
    engine.start(merge_period, subject, interrupt)?;
    ensure!(clients[0].ask("probe")? == "ok", "the first client does not probe");
    interrupt.sleep(LEAD)?;

    let others = Others::watch(pids(&clients).into_iter().chain(engine.pid()).collect())?;
    let (times, start) = (engine.times(&pids(&clients))?, Instant::now());
    order_all(&mut clients, "mark")?;
    let mut progress = Vec::new();
    let merged = interrupt.until_each(STEP, "99 % of what is reachable is merged", LIMIT, || {
        let merged = engine.merged(&clients)?;
        progress.push((start.elapsed().as_secs_f64(), merged as f64 * 100.0 / plan.reach.mergeable as f64));
        Ok((merged >= plan.goal()).then_some(merged))
    })?;
    let time = start.elapsed();
    let cpu_ns = engine.times(&pids(&clients))?.since(&times);
    others.report()?;
    let accesses = Timing::hear(&clients[0].ask("end-probe")?)?;

    rest(&engine, &clients, interrupt)?;
    order_all(&mut clients, "check")?;
    let (merged_at_rest, saved_pages) = (engine.merged(&clients)?, engine.saved()?);
    let used = [base, before, host::used()?];
    Ok(Some(Outcome { time, cpu_ns, merged, accesses, merged_at_rest, saved_pages, progress, used }))
}

/// Waits until nothing more is merged.
fn rest(engine: &Engine, clients: &[Client], interrupt: &Interrupt) -> Result<()> {
    let (start, mut last) = (Instant::now(), (engine.merged(clients)?, Instant::now()));
    while last.1.elapsed() < QUIET && start.elapsed() < REST_LIMIT {
        interrupt.sleep(STEP * 5)?;
        let merged = engine.merged(clients)?;
        if merged > last.0 {
            last = (merged, Instant::now());
        }
    }
    Ok(())
}

impl Outcome {
    fn note(&self, plan: &Plan, subject: Subject, sheet: &mut Sheet) {
        let us = |ns: u64| ns as f64 / 1e3;
        let [base, before, after] = self.used.map(|bytes| bytes as f64);
        let (saved, held) = (before - after, before - base);
        let bytes = |pages: u64| (pages * PAGE_SIZE as u64) as f64;
        sheet.add("seconds_to_99", self.time.as_secs_f64(), "s");
        sheet.add("cpu_seconds", self.cpu_ns.0 as f64 / 1e9, "s");
        if subject.is_ours() {
            sheet.add("cpu_seconds_agents", self.cpu_ns.1 as f64 / 1e9, "s");
        }
        sheet.add("us_per_merged_page", us(self.cpu_ns.0) / self.merged as f64, "us");
        sheet.add("merged_pages", self.merged as f64, "");
        sheet.add("net_saved_fraction", saved / held, "");
        sheet.add("reachable_fraction", bytes(plan.reach.mergeable - plan.reach.frames) / held, "");
        sheet.add(
            "overhead_bytes_per_merged_page",
            (bytes(self.saved_pages) - saved) / self.merged_at_rest as f64,
            "B",
        );
        let [loads, stores] = &self.accesses;
        sheet.add("reader_p9999_us", us(loads.p9999), "us");
        sheet.add("reader_max_us", us(loads.max), "us");
        sheet.add("writer_p9999_us", us(stores.p9999), "us");
        sheet.add("writer_max_us", us(stores.max), "us");
        sheet.add("writer_p9999_unqueued_us", us(stores.unqueued_p9999), "us");
        sheet.add("writer_max_unqueued_us", us(stores.unqueued_max), "us");
        sheet.add("writer_samples", stores.count as f64, "");
    }
}

/// Ours to the better of KSM's.
const RATIOS: [(&str, &str); 3] = [
    ("seconds_to_99", "seconds_to_99 / ksm"),
    ("cpu_seconds", "cpu_seconds / ksm"),
    ("us_per_merged_page", "us_per_merged_page / ksm"),
];

/// Prints progress.
fn say(what: &str) {
    eprintln!("merge: {what}");
}
