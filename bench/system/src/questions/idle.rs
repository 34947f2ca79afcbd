//! `idle`: the cost of a host whose memory is merged and does not change.
//!
//! 1. Clients fill memory, all with the same content ([`crate::harness::hold`]). A daemon with a
//!    short merge period is there already.
//! 2. They mark it. From here to the moment when 99.5 % of all pages are merged is
//!    `seconds_to_merge`.
//! 3. That daemon is stopped, one with the ordinary merge period takes the clients over. Each
//!    client reads every page and compares: nothing was lost, and every page is mapped again, as in
//!    a guest that has run for a while.
//! 4. After three scans the CPU time of the daemon and of the agents is taken over whole merge
//!    periods.
//!
//! The rival goes through the same, without the second daemon: KSM at full pace until all is
//! merged, then at the kernel's default pace, then at the pace that looks at all memory once in a
//! merge period, as PageONE does.

use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use kmem::PAGE_SIZE;
use kmem::procfs;

use crate::harness::content::{self, Case, Content};
use crate::harness::cpu;
use crate::harness::hold::{Client, order_all, pids, start_all};
use crate::subjects::ksm::{Pace, Rival};
use crate::subjects::pageone::{PageOne, Sums, Times};
use bench_common::interrupt::Interrupt;
use bench_common::report::{Row, Sheet};

/// How long merging may take.
const MERGE_LIMIT: Duration = Duration::from_secs(600);
/// Merge period until everything is merged, in seconds.
const FAST_PERIOD: f64 = 1.0;
/// Scans before measuring: pages that were not merged are read after the third.
const SCANS_BEFORE: u64 = 3;
/// Memory to be left to others, in KiB.
const RESERVE_KIB: u64 = 1 << 20;

/// What is done.
struct Plan {
    clients: usize,
    /// Of each client.
    pages: usize,
    /// Merge period, in seconds.
    period: f64,
    /// Merge periods to measure.
    periods: u32,
}

impl Plan {
    fn new(quick: bool) -> Self {
        match quick {
            false => Self { clients: 4, pages: 2 << 30 >> 12, period: 20.0, periods: 3 },
            true => Self { clients: 4, pages: 256 << 20 >> 12, period: 5.0, periods: 5 },
        }
    }

    fn all_pages(&self) -> u64 {
        (self.clients * self.pages) as u64
    }

    fn reach(&self) -> Result<content::Reach> {
        let contents: Vec<_> =
            (0..self.clients).map(|client| Content::new(Case::Idle, client, self.pages)).collect::<Result<_>>()?;
        Ok(content::reach(&contents, false))
    }

    fn window(&self) -> Duration {
        Duration::from_secs_f64(self.period) * self.periods
    }

    /// This many merged pages, zero pages included, count as all: a few may be of use to the client
    /// at the wrong moment.
    fn goal(&self) -> u64 {
        self.all_pages() * 995 / 1000
    }

    fn sheet(&self, subject: &'static str, threads: usize) -> Sheet {
        let case = format!(
            "{} clients of {} MiB, merge period {} s, {:.0} s measured",
            self.clients,
            (self.pages * PAGE_SIZE) >> 20,
            self.period,
            self.window().as_secs_f64()
        );
        Sheet { bench: "idle", case, subject, threads, rows: Vec::new() }
    }

    /// Everything is resident before it is merged, and the store beside it for a while.
    fn check_memory(&self) -> Result<()> {
        let page_kib = (PAGE_SIZE >> 10) as u64;
        let need = (self.all_pages() + self.pages as u64) * page_kib + RESERVE_KIB;
        let there = procfs::meminfo()?.available_kib;
        ensure!(
            there >= need,
            "this bench needs {} MiB of memory, {} are available; --quick needs an eighth",
            need >> 10,
            there >> 10
        );
        Ok(())
    }
}

/// Runs the bench.
pub(crate) fn run(quick: bool) -> Result<Vec<Row>> {
    let plan = Plan::new(quick);
    let interrupt = Interrupt::watch()?;
    let mut rows = ours(&plan, &interrupt).context("pageone")?;
    match Rival::start()? {
        Ok(rival) => rows.extend(theirs(&plan, rival, &interrupt).context("ksm")?),
        Err(why) => eprintln!("SKIPPED ksm: {why}"),
    }
    Ok(rows)
}

/// How merging went.
struct Merging {
    time: Duration,
    cpu_ns: u64,
    pages: u64,
}

impl Merging {
    fn note(&self, sheet: &mut Sheet) {
        sheet.add("merged_pages", self.pages as f64, "pages");
        sheet.add("seconds_to_merge", self.time.as_secs_f64(), "s");
        sheet.add("us_cpu_per_merged_page", self.cpu_ns as f64 / 1e3 / self.pages as f64, "us");
    }
}

/// What idling cost.
struct Idling {
    time: Duration,
    cpu_ns: u64,
    pages_scanned: Option<u64>,
}

impl Idling {
    fn note(&self, plan: &Plan, sheet: &mut Sheet) {
        sheet.add("cpu_percent_of_one", percent(self.cpu_ns, self.time), "%");
        // 0 in a short window, or in a kernel that does not tell.
        let Some(pages) = self.pages_scanned.filter(|&pages| pages > 0) else { return };
        let scans = pages as f64 / plan.all_pages() as f64;
        sheet.add("seconds_per_scan", self.time.as_secs_f64() / scans, "s");
        sheet.add("us_per_scan", self.cpu_ns as f64 / 1e3 / scans, "us");
        sheet.add("scan_ns_per_page", self.cpu_ns as f64 / pages as f64, "ns");
    }
}

fn percent(cpu_ns: u64, time: Duration) -> f64 {
    cpu_ns as f64 / time.as_nanos() as f64 * 100.0
}

fn mib(bytes: i64) -> f64 {
    bytes as f64 / f64::from(1 << 20)
}

fn ours(plan: &Plan, interrupt: &Interrupt) -> Result<Vec<Row>> {
    plan.check_memory()?;
    let threads = std::thread::available_parallelism().map_or(1, usize::from);
    let mut sheet = plan.sheet("pageone", threads);
    let pageone = PageOne::find()?;
    say("pageone: clients fill their memory");
    let mut clients = start_all(plan.clients, plan.pages, Case::Idle, |program| pageone.launch(program))?;
    let daemon = pageone.daemon(FAST_PERIOD, interrupt)?;

    say("pageone: merging");
    let (before, start) = (Times::take(&daemon, &pids(&clients))?, Instant::now());
    order_all(&mut clients, "mark")?;
    let merged = interrupt.until("PageONE has merged the clients' memory", MERGE_LIMIT, || {
        let status = pageone.status()?;
        Ok((status.merged() + status.zero() >= plan.goal()).then_some(status))
    })?;
    let time = start.elapsed();
    let (daemons, agents) = Times::take(&daemon, &pids(&clients))?.since(&before);
    Merging { time, cpu_ns: daemons + agents, pages: merged.merged() + merged.zero() }.note(&mut sheet);
    sheet.add("general_profit", mib(merged.metrics.general_profit), "MiB");

    say("pageone: another daemon takes over; clients check their memory");
    daemon.stop()?;
    order_all(&mut clients, "check")?;
    let daemon = pageone.daemon(plan.period, interrupt)?;
    // A daemon taken over counts zero pages as untouched memory, which they are now.
    let limit = Duration::from_secs_f64(plan.period * (SCANS_BEFORE + 2) as f64) + MERGE_LIMIT;
    interrupt.until("the second daemon has taken over", limit, || {
        let status = pageone.status()?;
        let scanned = status.clients().filter(|client| client.metrics.full_scans >= SCANS_BEFORE).count();
        Ok((scanned == plan.clients && status.merged() >= merged.merged()).then_some(()))
    })?;

    say("pageone: measuring");
    // Half way between two scans, so that the window holds whole ones.
    interrupt.sleep(Duration::from_secs_f64(plan.period / 2.0))?;
    let scans = pageone.status()?.scans();
    let (before, start) = (Times::take(&daemon, &pids(&clients))?, Instant::now());
    interrupt.sleep(plan.window())?;
    let time = start.elapsed();
    let (daemons, agents) = Times::take(&daemon, &pids(&clients))?.since(&before);
    let scans = pageone.status()?.scans() - scans;
    Idling { time, cpu_ns: daemons + agents, pages_scanned: Some(scans * plan.pages as u64) }.note(plan, &mut sheet);
    sheet.add("cpu_percent_of_one_daemon", percent(daemons, time), "%");
    sheet.add("cpu_percent_of_one_agents", percent(agents, time), "%");
    let memory = procfs::smaps_rollup(Some(daemon.pid())).context("cannot read the daemon's memory use")?;
    sheet.add("daemon_resident", memory.rss as f64 / 1024.0, "MiB");
    sheet.add("daemon_anonymous", memory.anonymous as f64 / 1024.0, "MiB");
    note_mappings(&clients, &mut sheet)?;
    Ok(sheet.rows)
}

fn note_mappings(clients: &[Client], sheet: &mut Sheet) -> Result<()> {
    let counts: Vec<usize> =
        clients.iter().map(|client| procfs::count_maps(Some(client.pid()))).collect::<std::io::Result<_>>()?;
    sheet.add("mappings_per_client", counts.iter().sum::<usize>() as f64 / counts.len() as f64, "");
    Ok(())
}

fn theirs(plan: &Plan, mut rival: Rival, interrupt: &Interrupt) -> Result<Vec<Row>> {
    plan.check_memory()?;
    let mut sheet = plan.sheet("ksm", 1);
    say("ksm: clients fill their memory");
    // Declared after the rival, so that they end before its settings are put back.
    let mut clients = start_all(plan.clients, plan.pages, Case::Idle, |program| Ok(Rival::launch(program)))?;

    say("ksm: merging");
    let (before, start) = (rival.times()?, Instant::now());
    order_all(&mut clients, "mark")?;
    let pages = rival.wait_merged(&clients, plan.goal(), MERGE_LIMIT, interrupt)?;
    let time = start.elapsed();
    Merging { time, cpu_ns: cpu::spent(&before, &rival.times()?), pages }.note(&mut sheet);
    sheet.add("general_profit", mib(Rival::profit(&clients, plan.reach()?.frames)?), "MiB");
    order_all(&mut clients, "check")?;

    for (subject, pace) in [("ksm", Pace::DEFAULT), ("ksm-same-pace", Pace::of(plan.all_pages(), plan.period))] {
        say(&format!("{subject}: measuring"));
        sheet.subject = subject;
        rival.set_pace(pace)?;
        // What it was at, at the old pace.
        interrupt.sleep(Duration::from_secs(3))?;
        let scanned = rival.stats()?.pages_scanned;
        let (before, start) = (rival.times()?, Instant::now());
        interrupt.sleep(plan.window())?;
        let (time, now) = (start.elapsed(), rival.times()?);
        let pages_scanned = rival.stats()?.pages_scanned.zip(scanned).map(|(now, then)| now - then);
        Idling { time, cpu_ns: cpu::spent(&before, &now), pages_scanned }.note(plan, &mut sheet);
        note_mappings(&clients, &mut sheet)?;
    }
    Ok(sheet.rows)
}

/// Prints progress.
fn say(what: &str) {
    eprintln!("idle: {what}");
}

#[cfg(test)]
mod tests;
