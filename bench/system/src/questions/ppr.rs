//! `ppr`: guests whose free pages are taken back, against the same guests with nothing, KSM and
//! free page reporting.
//!
//! - *copy*: one guest writes files, checks them and deletes them; what a recycled page costs the
//!   host, and a mark or cancel the guest.
//! - *stretch*, *scatter*: one guest frees 128 MiB at once, or every second page of 128 MiB one by
//!   one; how much of it is back within one reclaim period, and what it costs. Rival: free page
//!   reporting, as the kernel has it, and with `page_reporting_order=0`.
//! - *idle*: one guest of 8 GiB does nothing.
//! - *density*: guests that need most of their memory for a twelfth of the time, one after the
//!   other.
//!
//! Cycles are CPU time, of the agent's threads and of the daemon, times the rate of the time-stamp
//! counter. Guests run under emulation (TCG): code inside them takes several times as
//! long as it would on a processor.

mod floor;
pub(crate) mod guest;

use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};

use crate::harness::cpu;
use crate::subjects::ksm::{Pace, Rival};
use crate::subjects::pageone::{Daemon, PageOne, Times};
use bench_common::interrupt::Interrupt;
use bench_common::report::{Row, Sheet};
use guest::{Archive, Guest, Way};
use testguest::Accelerator;

/// Memory of a guest, in MiB.
const MEMORY: u64 = 256;
/// What is freed in `stretch` and `scatter`, in MiB.
const FREED: u64 = 128;
/// Merge period of subjects that do not merge, in seconds.
const NEVER: f64 = 86_400.0;

/// What a person may choose.
#[derive(Clone, Debug, clap::Args)]
pub(crate) struct Options {
    /// Only this case; may be given more than once; all by default
    #[arg(long, value_enum)]
    case: Vec<Case>,
    /// Only this subject of `stretch`, `scatter` and `density`; may be given more than once; all by
    /// default
    #[arg(long, value_enum)]
    only: Vec<Who>,
    /// Reclaim period, in seconds
    #[arg(long, value_name = "S", default_value_t = 1.0)]
    reclaim_period: f64,
    /// Cycles of `density` before the one that is measured
    #[arg(long, value_name = "N", default_value_t = 2)]
    warm_up: u32,
    /// Guests of `density` [default: 8; with --quick 3]
    #[arg(long, value_name = "N")]
    guests: Option<usize>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
enum Case {
    Copy,
    Stretch,
    Scatter,
    Idle,
    Density,
}

/// Who is measured.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
enum Who {
    Nothing,
    Ksm,
    FreePageReporting,
    FreePageReportingOrder0,
    Ppr,
    PprPageone,
}

impl Who {
    fn name(self) -> &'static str {
        match self {
            Who::Nothing => "nothing",
            Who::Ksm => "ksm",
            Who::FreePageReporting => "free-page-reporting",
            Who::FreePageReportingOrder0 => "reporting-order-0",
            Who::Ppr => "ppr",
            Who::PprPageone => "ppr+pageone",
        }
    }

    fn way(self) -> Way {
        match self {
            Who::Nothing | Who::Ksm => Way::Nothing,
            Who::FreePageReporting => Way::Reporting,
            Who::FreePageReportingOrder0 => Way::ReportingSingly,
            Who::Ppr | Who::PprPageone => Way::Ppr,
        }
    }

    fn is_ours(self) -> bool {
        matches!(self, Who::Ppr | Who::PprPageone)
    }
}

struct Bench<'a> {
    options: &'a Options,
    quick: bool,
    archive: Archive,
    interrupt: Interrupt,
    rows: Vec<Row>,
}

/// Runs the bench.
pub(crate) fn run(options: &Options, quick: bool) -> Result<Vec<Row>> {
    let archive = match Archive::find(Accelerator::Tcg)? {
        Ok(archive) => archive,
        Err(why) => {
            eprintln!("SKIPPED ppr: {why}");
            return Ok(Vec::new());
        }
    };
    let mut bench = Bench { options, quick, archive, interrupt: Interrupt::watch()?, rows: Vec::new() };
    for case in [Case::Copy, Case::Stretch, Case::Scatter, Case::Idle, Case::Density] {
        if options.case.is_empty() || options.case.contains(&case) {
            match case {
                Case::Copy => bench.copy(),
                Case::Stretch => bench.freed(false),
                Case::Scatter => bench.freed(true),
                Case::Idle => bench.idle(),
                Case::Density => bench.density(),
            }?;
        }
    }
    Ok(bench.rows)
}

/// What a recycler has done by some moment.
struct Snapshot {
    times: Times,
    pages: u64,
    runs: u64,
    at: Instant,
}

impl Snapshot {
    fn take(pageone: &PageOne, daemon: &Daemon, guest: &Guest) -> Result<Self> {
        let times = Times::take(daemon, &[guest.pid()])?;
        let status = pageone.any_status()?;
        let recycling: Vec<_> = status.clients().filter_map(|client| client.recycling.as_ref()).collect();
        let pages = recycling.iter().map(|recycling| recycling.metrics.pages_recycled_total).sum();
        let runs = recycling.iter().map(|recycling| recycling.metrics.runs_total).sum();
        Ok(Self { times, pages, runs, at: Instant::now() })
    }
}

impl Bench<'_> {
    fn seconds(&self, full: f64, quick: f64) -> Duration {
        Duration::from_secs_f64(if self.quick { quick } else { full })
    }

    fn sheet(&self, case: String, who: Who) -> Sheet {
        Sheet { bench: "ppr", case, subject: who.name(), threads: 1, rows: Vec::new() }
    }

    fn daemon(&self, pageone: &PageOne, merge_period: f64) -> Result<Daemon> {
        pageone.daemon_with_options(
            merge_period,
            0,
            &["--reclaim-period", &self.options.reclaim_period.to_string()],
            &self.interrupt,
        )
    }

    /// Notes what recycling cost between two moments.
    fn note_cost(sheet: &mut Sheet, before: &Snapshot, after: &Snapshot) -> Result<()> {
        let (daemon, agents) = after.times.since(&before.times);
        let pages = (after.pages - before.pages).max(1) as f64;
        let ghz = tsc_ghz()?;
        sheet.add("pages_recycled", after.pages as f64 - before.pages as f64, "");
        sheet.add("pages_per_run", pages / (after.runs - before.runs).max(1) as f64, "");
        sheet.add("host_cycles_per_page", (daemon + agents) as f64 * ghz / pages, "");
        sheet.add("host_cycles_per_page_agent", agents as f64 * ghz / pages, "");
        Ok(())
    }

    fn copy(&mut self) -> Result<()> {
        for (case, way) in [("copy and delete", Way::Ppr), ("copy and delete, huge pages", Way::PprHuge)] {
            self.copy_with(case, way)?;
        }
        let case = self.rows.first().map(|row| row.case.clone()).unwrap_or_default();
        self.note_floor(&case, 512, false)?;
        Ok(())
    }

    fn copy_with(&mut self, case: &str, way: Way) -> Result<()> {
        let pageone = PageOne::find()?;
        let daemon = self.daemon(&pageone, NEVER)?;
        let seconds = self.seconds(40.0, 15.0).as_secs();
        eprintln!("ppr: {case}, {seconds} s");
        // Counting cycles in the guest costs cycles itself; the host does not feel it.
        let parameters = format!("PPR_ARGS=cycles=1 WORK=copy_{seconds}");
        let mut guest = Guest::start(&pageone, &self.archive, way, MEMORY, &parameters)?;
        // Pages that were never touched come first, and cost next to nothing.
        guest.wait("PAGEONE-ROUND 0", &self.interrupt)?;
        let before = Snapshot::take(&pageone, &daemon, &guest)?;
        guest.wait("LOAD copy done", &self.interrupt)?;
        self.interrupt.sleep(Duration::from_secs(2))?;
        let after = Snapshot::take(&pageone, &daemon, &guest)?;
        guest.wait("LOAD all done", &self.interrupt)?;
        guest.check()?;
        let mut sheet = self.sheet(format!("{case}, guest of {MEMORY} MiB"), Who::Ppr);
        Self::note_cost(&mut sheet, &before, &after)?;
        sheet.add("seconds", (after.at - before.at).as_secs_f64(), "s");
        sheet.add("rounds", guest.rounds() as f64, "");
        let stat = |name: &str| guest.stat(name).with_context(|| format!("the module's {name} is missing"));
        let per = |cycles: &str, of: &str| Ok::<_, anyhow::Error>(stat(cycles)? as f64 / stat(of)?.max(1) as f64);
        sheet.add("guest_cycles_per_page_marked", per("mark_cycles", "marked")?, "");
        sheet.add("guest_cycles_per_page_cancelled", per("cancel_cycles", "leaves")?, "");
        sheet.add("guest_cycles_per_mark", per("mark_cycles", "marks")?, "");
        sheet.add("guest_cycles_per_cancel", per("cancel_cycles", "cancels")?, "");
        sheet.add("guest_waits", stat("waits")? as f64, "");
        sheet.add("guest_wait_longest", stat("wait_longest_ns")? as f64 / 1000.0, "us");
        self.rows.extend(sheet.rows);
        Ok(())
    }

    /// What the kernel alone takes: `run` pages in one call.
    fn note_floor(&mut self, case: &str, run: usize, kept: bool) -> Result<()> {
        let mut sheet = Sheet { subject: "madvise", ..self.sheet(case.into(), Who::Nothing) };
        sheet.add("host_cycles_per_page", floor::ns_per_page(run, kept)? * tsc_ghz()?, "");
        self.rows.extend(sheet.rows);
        Ok(())
    }

    /// Memory that is freed, all at once or in single pages.
    fn freed(&mut self, scattered: bool) -> Result<()> {
        let word = if scattered { "scatter" } else { "stretch" };
        for who in [Who::FreePageReporting, Who::FreePageReportingOrder0, Who::Ppr] {
            if !self.options.only.is_empty() && !self.options.only.contains(&who) {
                continue;
            }
            eprintln!("ppr: {word}, {}", who.name());
            let pageone = PageOne::find()?;
            let daemon = if who.is_ours() { Some(self.daemon(&pageone, NEVER)?) } else { None };
            let parameters = format!("WORK={word}_{FREED}");
            let mut guest = Guest::start(&pageone, &self.archive, who.way(), MEMORY, &parameters)?;
            guest.wait("LOAD filled", &self.interrupt)?;
            self.interrupt.sleep(Duration::from_secs(4))?;
            let taken = guest.resident()?;
            let before = daemon.as_ref().map(|daemon| Snapshot::take(&pageone, daemon, &guest)).transpose()?;
            let (at, line) = guest.wait("LOAD freed", &self.interrupt)?;
            let freed: u64 = line.rsplit_once('=').and_then(|(_, pages)| pages.parse().ok()).context("LOAD freed")?;
            let mut sheet = self.sheet(format!("{word}: {} MiB freed", freed >> 8), who);
            // The guest says so when all is freed; the first page was free earlier.
            for (metric, seconds) in [("back_after_1_period", self.options.reclaim_period), ("back_after_10_s", 10.0)] {
                self.interrupt
                    .sleep((at + Duration::from_secs_f64(seconds)).saturating_duration_since(Instant::now()))?;
                let back = taken.saturating_sub(guest.resident()?) / kmem::PAGE_SIZE as u64;
                sheet.add(metric, 100.0 * back as f64 / freed as f64, "%");
            }
            if let (Some(daemon), Some(before)) = (&daemon, &before) {
                let after = Snapshot::take(&pageone, daemon, &guest)?;
                Self::note_cost(&mut sheet, before, &after)?;
            }
            guest.wait("LOAD unmapped", &self.interrupt)?;
            guest.check()?;
            let case = sheet.case.clone();
            self.rows.extend(sheet.rows);
            if who == Who::Ppr {
                let run = if scattered { 1 } else { 1024 };
                self.note_floor(&case, run, scattered)?;
            }
        }
        Ok(())
    }

    fn idle(&mut self) -> Result<()> {
        let memory = if self.quick { 1024 } else { 8192 };
        eprintln!("ppr: idle, {memory} MiB");
        let pageone = PageOne::find()?;
        let daemon = self.daemon(&pageone, NEVER)?;
        let mut guest = Guest::start(&pageone, &self.archive, Way::Ppr, memory, "WORK=none")?;
        guest.wait("PAGEONE-BOOTED", &self.interrupt)?;
        // What is free from the beginning is taken first.
        self.interrupt.sleep(Duration::from_secs(8))?;
        let before = Snapshot::take(&pageone, &daemon, &guest)?;
        self.interrupt.sleep(self.seconds(30.0, 10.0))?;
        let after = Snapshot::take(&pageone, &daemon, &guest)?;
        let (daemon, agents) = after.times.since(&before.times);
        let mut sheet =
            self.sheet(format!("idle, guest of {memory} MiB, period {} s", self.options.reclaim_period), Who::Ppr);
        let share = |ns: u64| 100.0 * ns as f64 / (after.at - before.at).as_nanos() as f64;
        sheet.add("cpu_percent_of_one", share(daemon + agents), "%");
        sheet.add("cpu_percent_of_one_daemon", share(daemon), "%");
        sheet.add("cpu_percent_of_one_agents", share(agents), "%");
        sheet.add("pages_recycled", (after.pages - before.pages) as f64, "");
        self.rows.extend(sheet.rows);
        Ok(())
    }

    fn density(&mut self) -> Result<()> {
        let guests = self.options.guests.unwrap_or(if self.quick { 3 } else { 8 });
        // Each guest's turn lasts a twelfth of it.
        let cycle = self.seconds(36.0, 24.0);
        for who in [Who::Nothing, Who::Ksm, Who::FreePageReporting, Who::Ppr, Who::PprPageone] {
            if self.options.only.is_empty() || self.options.only.contains(&who) {
                eprintln!("ppr: density, {guests} guests, {}", who.name());
                self.density_of(who, guests, cycle).context(who.name())?;
            }
        }
        Ok(())
    }

    /// Starts guests that fill and free memory in a cycle, each at another phase.
    fn start_cycling(&self, pageone: &PageOne, who: Who, count: usize, cycle: Duration) -> Result<Vec<Guest>> {
        let mut guests = Vec::new();
        for number in 0..count {
            let phase = cycle.as_secs_f64() * number as f64 / count as f64;
            let work = format!("WORK=cycle_{}_{phase:.2}", cycle.as_secs_f64());
            guests.push(Guest::start(pageone, &self.archive, who.way(), MEMORY, &work)?);
        }
        for guest in &mut guests {
            guest.wait("PAGEONE-BOOTED", &self.interrupt)?;
        }
        Ok(guests)
    }

    /// Reads for one cycle how much of the host's memory a guest takes, MiB, the engine's own
    /// included.
    fn mib_per_guest(
        &self,
        pageone: &PageOne,
        daemon: Option<&Daemon>,
        guests: &mut [Guest],
        cycle: Duration,
    ) -> Result<Vec<f64>> {
        let (start, mut readings) = (Instant::now(), Vec::new());
        while start.elapsed() < cycle {
            let mut bytes = 0;
            for guest in guests.iter_mut() {
                guest.check()?;
                bytes += guest.resident()?;
            }
            if let Some(daemon) = daemon {
                let status = pageone.any_status()?;
                bytes += status.domains.iter().map(|domain| domain.metrics.store_bytes).sum::<u64>();
                // The guests pay for the engine's own memory, too.
                bytes += kmem::procfs::smaps_rollup(Some(daemon.pid()))?.anonymous << 10;
            }
            readings.push(bytes as f64 / guests.len() as f64 / f64::from(1 << 20));
            self.interrupt.sleep(Duration::from_millis(900))?;
        }
        ensure!(!readings.is_empty(), "no reading");
        Ok(readings)
    }

    fn density_of(&mut self, who: Who, count: usize, cycle: Duration) -> Result<()> {
        let pageone = PageOne::find()?;
        let daemon = match who {
            Who::Ppr => Some(self.daemon(&pageone, NEVER)?),
            Who::PprPageone => Some(self.daemon(&pageone, 1.0)?),
            _ => None,
        };
        let mut guests = self.start_cycling(&pageone, who, count, cycle)?;
        let ksm = match who {
            Who::Ksm => match Rival::start()? {
                Ok(mut rival) => {
                    rival.set_pace(Pace::of(count as u64 * (MEMORY << 8), 3.0))?;
                    Some(rival)
                }
                Err(why) => {
                    eprintln!("SKIPPED ksm: {why}");
                    return Ok(());
                }
            },
            _ => None,
        };
        // For getting to a steady state; the cycle after is measured.
        self.interrupt.sleep(cycle * self.options.warm_up)?;
        let pids: Vec<i32> = guests.iter().map(Guest::pid).collect();
        let qemu = || pids.iter().map(|&pid| cpu::thread_times(pid, |_| true)).collect::<std::io::Result<Vec<_>>>();
        let before = qemu()?;
        let rounds: usize = guests.iter().map(Guest::rounds).sum();
        let own = daemon.as_ref().map(|daemon| Times::take(daemon, &pids)).transpose()?;
        let ksmd = ksm.as_ref().map(Rival::times).transpose()?;
        let start = Instant::now();
        let readings = self.mib_per_guest(&pageone, daemon.as_ref(), &mut guests, cycle)?;
        let seconds = start.elapsed().as_secs_f64();
        let cpu_of = |ns: u64| 100.0 * ns as f64 / 1e9 / seconds;
        let total: u64 = before.iter().zip(&qemu()?).map(|(before, now)| cpu::spent(before, now)).sum();
        let engine = match (&daemon, own, &ksm, ksmd) {
            (Some(daemon), Some(own), ..) => {
                let (daemon, agents) = Times::take(daemon, &pids)?.since(&own);
                daemon + agents
            }
            (_, _, Some(rival), Some(ksmd)) => cpu::spent(&ksmd, &rival.times()?),
            _ => 0,
        };
        let mut sheet = self.sheet(format!("density, {count} guests of {MEMORY} MiB, cycle {cycle:?}"), who);
        sheet.add("mib_per_guest", readings.iter().sum::<f64>() / readings.len() as f64, "MiB");
        sheet.add("mib_per_guest_most", readings.iter().copied().fold(0.0, f64::max), "MiB");
        sheet.add("engine_cpu", cpu_of(engine), "%");
        sheet.add("qemu_cpu", cpu_of(total), "%");
        sheet.add("peaks", guests.iter().map(Guest::rounds).sum::<usize>() as f64 - rounds as f64, "");
        self.rows.extend(sheet.rows);
        Ok(())
    }
}

/// Rate of the time-stamp counter, in GHz, measured against the clock.
#[cfg(target_arch = "x86_64")]
fn tsc_ghz() -> Result<f64> {
    // SAFETY: reads a counter that every x86-64 processor has.
    #[allow(unsafe_code)]
    let read = || unsafe { std::arch::x86_64::_rdtsc() };
    let (start, ticks) = (Instant::now(), read());
    std::thread::sleep(Duration::from_millis(50));
    let ticks = read() - ticks;
    Ok(ticks as f64 / start.elapsed().as_nanos() as f64)
}

#[cfg(not(target_arch = "x86_64"))]
fn tsc_ghz() -> Result<f64> {
    anyhow::bail!("this question counts cycles of a time-stamp counter, which only x86-64 has")
}
