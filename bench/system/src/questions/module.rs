//! `module`: a guest whose RAM lies in the file system of the host's module, beside a guest that
//! nothing merges; and the same under KSM.
//!
//! ```text
//!   boot, fill memory ─▶ before ─────────▶ merging ──────────────────▶ at rest
//!                        nobody merges     from the engine's start on  scans go on
//! ```
//!
//! All guests do the same work (`load work`): they check pages of which four are equal each, and
//! check and rewrite others, in any order. A guest and its control run at the same time, each on a
//! CPU of its own, and all else, the engine too, on the third. They exchange CPUs again and again.
//! So whatever else the machine does concerns both, and a slower CPU cancels. Both engines look at
//! all memory once in a period.
//!
//! Guests that differ in nothing differ by some percent from boot to boot: in an emulated host
//! (`scripts/lib/kvm-host.sh`) code and memory lie better or worse. `nothing` shows by how much. So
//! a guest is compared with what it did before, too.

mod measure;

use std::fs;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use bench_common::interrupt::Interrupt;
use bench_common::report::Row;
use kmem::PAGE_SIZE;
use rustix::process::Pid;
use rustix::thread::{CpuSet, sched_setaffinity};
use testguest::{Accelerator, Guest};

use self::measure::{Done, Reading, Windows};
use crate::harness::cpu;
use crate::questions::ppr::guest::Archive;
use crate::subjects::ksm::{Pace, Rival};
use crate::subjects::pageone::{Daemon, PageOne, Sums};

/// How long a guest keeps its CPU, and how often they are exchanged in a second.
const SEAT: Duration = Duration::from_millis(50);
const SEATS: u32 = 20;
/// Guests are merged when this part of their equal pages is.
const MERGED: f64 = 0.95;
/// Periods from there until an engine is at rest: both learn which pages are written all the time.
const SETTLE: u64 = 8;
/// How long booting, filling memory or merging may take.
const LIMIT: Duration = Duration::from_secs(600);
/// The CPU of all that is no guest's.
const ENGINES_CPU: usize = 2;

/// What a person may choose.
#[derive(Clone, Debug, clap::Args)]
pub(crate) struct Options {
    /// Boots of each subject; figures are medians over all of their windows
    #[arg(long, value_name = "N", default_value_t = 4)]
    rounds: usize,
    /// Windows before merging, and again at rest, in each boot
    #[arg(long, value_name = "N", default_value_t = 2)]
    windows: usize,
    /// Memory of each guest, in MiB: half of it can be merged, an eighth is rewritten all the time
    #[arg(long, value_name = "MIB", default_value_t = 384)]
    memory: u64,
    /// Merge period, time of a scan of KSM's, and length of a window, in seconds; that of merging
    /// is four times as long
    #[arg(long, value_name = "S", default_value_t = 20)]
    period: u64,
    /// Only this subject; may be given more than once; all by default
    #[arg(long, value_enum)]
    only: Vec<Who>,
}

/// What merges the guest beside the control.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
enum Who {
    /// Nothing: two guests that differ in nothing.
    Nothing,
    Ksm,
    Pageonefs,
}

impl Who {
    const ALL: [Self; 3] = [Who::Nothing, Who::Ksm, Who::Pageonefs];

    fn name(self) -> &'static str {
        match self {
            Who::Nothing => "nothing",
            Who::Ksm => "ksm",
            Who::Pageonefs => "pageonefs",
        }
    }
}

/// Runs the bench.
pub(crate) fn run(options: &Options, quick: bool) -> Result<Vec<Row>> {
    let cpus = std::thread::available_parallelism().map_or(1, usize::from);
    ensure!(cpus > ENGINES_CPU, "{cpus} CPUs are too few: two guests and the engine need one each");
    let archive = match Archive::find(Accelerator::Kvm)? {
        Ok(archive) => archive,
        Err(why) => {
            eprintln!("SKIPPED module: {why}");
            return Ok(Vec::new());
        }
    };
    // What is started inherits it.
    pin(std::process::id() as i32, ENGINES_CPU)?;
    let options = if quick { &Options { rounds: 1, windows: 1, period: 4, ..options.clone() } } else { options };
    let mut bench = Bench { options, archive, interrupt: Interrupt::watch()?, windows: Windows::default() };
    for round in 0..options.rounds {
        for who in Who::ALL {
            if options.only.is_empty() || options.only.contains(&who) {
                eprintln!("module: {}, round {}", who.name(), round + 1);
                bench.round(who).context(who.name())?;
            }
        }
    }
    Ok(bench.windows.figures(options.memory))
}

/// What merges, once it has begun.
enum Engine<'a> {
    Nothing,
    Ksm(Box<Rival>),
    Pageonefs(&'a PageOne, Daemon),
}

impl Engine<'_> {
    /// Pages that are merged.
    fn merged(&self) -> Result<u64> {
        match self {
            Engine::Nothing => Ok(0),
            Engine::Ksm(rival) => {
                let stats = rival.stats()?;
                Ok(stats.pages_shared.unwrap_or(0) + stats.pages_sharing.unwrap_or(0))
            }
            Engine::Pageonefs(pageone, _) => Ok(pageone.status()?.merged()),
        }
    }

    /// The CPU time of its threads so far.
    fn times(&self) -> Result<cpu::Times> {
        match self {
            Engine::Nothing => Ok(cpu::Times::new()),
            Engine::Ksm(rival) => rival.times(),
            Engine::Pageonefs(_, daemon) => {
                cpu::thread_times(daemon.pid(), |_| true).context("cannot read the CPU time of the daemon")
            }
        }
    }
}

struct Bench<'a> {
    options: &'a Options,
    archive: Archive,
    interrupt: Interrupt,
    windows: Windows,
}

/// A guest, and its control.
type Pair = [Guest; 2];

impl Bench<'_> {
    fn round(&mut self, who: Who) -> Result<()> {
        let Options { memory, period, windows, .. } = *self.options;
        let qemu = self.archive.qemu(memory, &format!("WORK=work_{}_{}", memory / 2, memory / 8));
        let mut alone = Rival::launch(&qemu);
        alone.args(["-machine", "mem-merge=off"]);
        let pageone = PageOne::find()?;
        let command = match who {
            Who::Nothing | Who::Ksm => Rival::launch(&qemu),
            Who::Pageonefs => pageone.launch_with(&qemu, &["--backend", "module"])?,
        };
        // The launcher becomes QEMU, whose threads inherit the CPU.
        let mut guests = [Guest::start(command)?, Guest::start(alone)?];
        take_seats(&guests, [0, 1])?;
        self.interrupt.until("guests have filled their memory", LIMIT, || {
            guests.iter_mut().try_for_each(Guest::check)?;
            Ok(guests.iter().all(|guest| Done::of(guest).is_ok()).then_some(()))
        })?;
        self.interrupt.sleep(Duration::from_secs(3))?;
        self.windows.begin_round();
        for _ in 0..windows {
            self.window((who, "before"), &mut guests, period, &Engine::Nothing, &mut || Ok(()))?;
        }
        let pages = memory * (1 << 20) / PAGE_SIZE as u64;
        let begin = Instant::now();
        let engine = match who {
            Who::Nothing => Engine::Nothing,
            Who::Ksm => {
                let mut rival = Rival::start()?.map_err(anyhow::Error::msg)?;
                rival.set_pace(Pace::of(pages, period as f64))?;
                pin(rival.ksmd(), ENGINES_CPU)?;
                Engine::Ksm(Box::new(rival))
            }
            Who::Pageonefs => Engine::Pageonefs(&pageone, pageone.daemon_with(period as f64, 1, &self.interrupt)?),
        };
        if who != Who::Nothing {
            self.merging(who, &mut guests, &engine, ((pages / 2) as f64 * MERGED) as u64, begin)?;
        }
        for _ in 0..windows {
            self.window((who, "at rest"), &mut guests, period, &engine, &mut || Ok(()))?;
        }
        // Guests end before what merges them.
        drop(guests);
        Ok(())
    }

    /// The window of merging; then waits until so many pages are merged, and until the engine is
    /// at rest. `begin`: when the engine began.
    fn merging(&mut self, who: Who, guests: &mut Pair, engine: &Engine<'_>, goal: u64, begin: Instant) -> Result<()> {
        let period = self.options.period;
        let mut reached = None;
        self.window((who, "merging"), guests, 4 * period, engine, &mut || {
            if reached.is_none() && engine.merged()? >= goal {
                reached = Some(begin.elapsed().as_secs_f64());
            }
            Ok(())
        })?;
        let pages = engine.merged()?;
        let seconds = match reached {
            Some(seconds) => seconds,
            None => self.interrupt.until("the equal pages are merged", LIMIT, || {
                guests.iter_mut().try_for_each(Guest::check)?;
                Ok((engine.merged()? >= goal).then(|| begin.elapsed().as_secs_f64()))
            })?,
        };
        self.windows.note_merging(pages, seconds);
        self.interrupt.sleep(Duration::from_secs(SETTLE * period))
    }

    /// Notes what both guests do in these seconds; `each`: done each second meanwhile.
    fn window(
        &mut self,
        (who, phase): (Who, &'static str),
        guests: &mut Pair,
        seconds: u64,
        engine: &Engine<'_>,
        each: &mut dyn FnMut() -> Result<()>,
    ) -> Result<()> {
        let read = |guests: &Pair| {
            let [one, other] = [0, 1].map(|at| Reading::take(&guests[at]));
            anyhow::Ok([one?, other?])
        };
        let mut seats = [0, 1];
        let times = engine.times()?;
        let before = read(guests)?;
        let end = Instant::now() + Duration::from_secs(seconds);
        while Instant::now() < end {
            for _ in 0..SEATS {
                take_seats(guests, seats)?;
                seats.reverse();
                self.interrupt.sleep(SEAT)?;
            }
            guests.iter_mut().try_for_each(Guest::check)?;
            each()?;
        }
        let after = read(guests)?;
        let cpu = cpu::spent(&times, &engine.times()?) as f64 / 1e9;
        let window = self.windows.note(who, phase, [0, 1].map(|at| after[at].since(&before[at])), cpu)?;
        eprintln!("module: {}, {phase}: {:.3?}", who.name(), window.ratios);
        Ok(())
    }
}

/// Gives the guests their CPUs.
fn take_seats(guests: &Pair, seats: [usize; 2]) -> Result<()> {
    guests.iter().zip(seats).try_for_each(|(guest, cpu)| pin(guest.pid(), cpu))
}

/// Has all threads of a process run on one CPU.
fn pin(pid: i32, cpu: usize) -> Result<()> {
    let mut set = CpuSet::new();
    set.set(cpu);
    for task in fs::read_dir(format!("/proc/{pid}/task")).with_context(|| format!("process {pid} has ended"))? {
        let thread = task?.file_name().to_str().and_then(|name| name.parse().ok()).and_then(Pid::from_raw);
        // A thread may have ended since.
        let result = sched_setaffinity(thread, &set);
        ensure!(matches!(result, Ok(()) | Err(rustix::io::Errno::SRCH)), "cannot bind process {pid} to CPU {cpu}");
    }
    Ok(())
}
