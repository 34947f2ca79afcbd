//! The course of the demo: it boots guests that check their own memory, merges them, and measures
//! the memory saved.
//!
//! 1. Read the host's used memory: MemTotal − MemAvailable (proc_meminfo(5)).
//! 2. Start the guests and wait until each has verified all of its files once.
//! 3. Read used memory above the first level: *before*.
//! 4. Start merging. Wait while guests go on verifying. Read used memory again: *after*.
//!
//! Used memory is the host's, so it includes the costs of merging: the daemon and the kernel's
//! bookkeeping. It also includes anything else that the host does meanwhile.
//!
//! A [`Backend`] does the merging. The demo only starts, asks and stops it.

use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use control::HostMetrics;
use control::units::counted;
use testguest::{Accelerator, Guest, PrepareError, Spec, Verdict};

use super::table::{Counters, Summary, To, View};
use crate::{Code, Coded};

/// How long booting and a first round may take. Under emulation with many guests on few CPUs, it
/// takes minutes.
const FIRST_ROUND_LIMIT: Duration = Duration::from_secs(900);
/// Used memory is the median of this many readings, a tick apart, because rounds change it.
const READINGS: usize = 5;
/// Time between two readings.
const TICK: Duration = Duration::from_secs(1);
/// Time between two checks for Ctrl-C.
const NAP: Duration = Duration::from_millis(50);
/// How long the last lines of a guest that has ended may take.
const LAST_WORDS: Duration = Duration::from_secs(2);

/// Options of the demo.
#[derive(Clone, Debug, clap::Args)]
pub(crate) struct Options {
    /// Number of guests
    #[arg(long, value_name = "N", default_value_t = 4)]
    pub(crate) guests: usize,
    /// How long to merge and watch, seconds, from when all guests have checked their files once
    #[arg(long, value_name = "S", default_value_t = 120)]
    pub(crate) seconds: u64,
    /// Only say whether guests run with KVM here (0: they do)
    #[arg(long)]
    pub(crate) probe: bool,
    /// Print the summary as one JSON object on standard output, progress on standard error
    #[arg(long)]
    pub(crate) json: bool,
    /// The guests' own options.
    #[command(flatten)]
    pub(crate) guest: GuestOptions,
}

/// The guests' options, see [`testguest::Options`].
#[derive(Clone, Debug, clap::Args)]
pub(crate) struct GuestOptions {
    /// Memory of each guest, MiB
    #[arg(long, value_name = "MIB", default_value_t = 512)]
    pub(crate) memory: u32,
    /// Kernel image to boot [default: from the cache, see scripts/deps.sh]
    #[arg(long, value_name = "FILE")]
    pub(crate) kernel: Option<PathBuf>,
    /// QEMU's accelerator; auto: KVM if a kernel that is started with it boots, else TCG, which
    /// emulates
    #[arg(long, value_name = "NAME", default_value = "auto", value_parser = ["auto", "kvm", "tcg"])]
    pub(crate) accel: String,
    /// Take back the pages that guests free: they load the recycler's module, which marks them (see
    /// `scripts/deps.sh ppr`)
    #[arg(long)]
    pub(crate) ppr: bool,
    /// Further kernel parameters, such as PAGEONE_ROUNDS=3 (see guest/demo/init)
    #[arg(long, value_name = "WORDS", hide = true)]
    pub(crate) append: Option<String>,
}

impl GuestOptions {
    fn to_spec(&self) -> testguest::Options {
        testguest::Options {
            memory_mib: self.memory,
            kernel: self.kernel.clone(),
            accelerator: if self.accel == "kvm" { Accelerator::Kvm } else { Accelerator::Tcg },
            ppr: self.ppr,
            append: self.append.clone(),
        }
    }
}

/// The program that merges the guests. Its methods are called in this order.
pub(crate) trait Backend {
    /// Called before the first guest starts and after the host's used memory was read. Memory that
    /// the backend takes from here on counts as its cost.
    fn prepare(&self) -> Result<()> {
        Ok(())
    }

    /// The words before QEMU's that start guest number `guest`; may be empty.
    fn launcher(&self, guest: usize) -> Vec<OsString>;

    /// Starts merging. No page may be merged before.
    fn start_merging(&self) -> Result<()>;

    /// Its counters. Called once a second from then on.
    fn status(&self) -> Result<HostMetrics>;

    /// Ends it and restores what it changed on the host. Called once, after the guests have ended,
    /// even if the demo failed.
    fn stop(&self) -> Result<()>;
}

/// Runs the demo and prints its summary. SIGINT and SIGTERM end the guests and the backend in
/// order. Afterwards both signals are ignored, because the program is about to end.
///
/// # Errors
/// If something is missing, the backend fails, a guest dies before its first round, or a signal
/// comes. Wrong bytes and deaths after the first round are no error, but the [`Summary`] has not
/// passed.
pub(crate) fn run(options: &Options, backend: &dyn Backend) -> Result<Summary> {
    let why = "--guests 0: there is nothing to merge; say --guests 2 or more";
    ensure!(options.guests > 0, Coded(Code::Usage, why.into()));
    let spec = prepare(options)?;
    let spec = if options.guest.accel == "auto" { choose_accelerator(&spec) } else { spec };
    let interrupted = Interrupt::catch()?;
    let mut demo = Demo::new(options, backend, interrupted);
    let result = demo.run(&spec);
    // Always, and in this order: a backend relies on its clients having ended.
    demo.view.finish();
    demo.guests.clear();
    let stopped = backend.stop();
    let summary = result?;
    stopped?;
    match options.json {
        true => output::line!("{}", serde_json::to_string(&summary)?)?,
        false => summary.print(options.guest.memory)?,
    }
    Ok(summary)
}

fn prepare(options: &Options) -> Result<Spec> {
    match Spec::prepare(&options.guest.to_spec()) {
        Err(error @ PrepareError::MemoryTooSmall) => {
            Err(error).with_context(|| format!("--memory {}", options.guest.memory))
        }
        prepared => Ok(prepared?),
    }
}

/// Says whether guests run with KVM here.
pub(crate) fn probe(options: &Options) -> Result<()> {
    let lacks = |why: anyhow::Error| Coded(Code::HostLacks, format!("{why:#}"));
    // Before anything is looked for or built that only a guest needs.
    let here = testguest::try_kvm();
    let works = match here {
        Ok(()) => prepare(options).map_err(lacks)?.probe_kvm(),
        Err(why) => Err(why),
    };
    works.map_err(|why| lacks(why.into())).context("KVM does not work here")?;
    output::line!("KVM works: a kernel boots with it")?;
    Ok(())
}

/// KVM where it works, TCG otherwise; says which and why.
fn choose_accelerator(spec: &Spec) -> Spec {
    match spec.probe_kvm() {
        Ok(()) => {
            output::note!("accelerator: KVM, since a kernel boots with it");
            spec.with_accelerator(Accelerator::Kvm)
        }
        Err(why) => {
            output::note!("accelerator: TCG, which emulates (slow), since KVM does not work here: {why}");
            spec.with_accelerator(Accelerator::Tcg)
        }
    }
}

fn passed(guests_dead: usize, checks: u64, failures: u64) -> bool {
    guests_dead == 0 && failures == 0 && checks > 0
}

struct Demo<'a> {
    options: &'a Options,
    backend: &'a dyn Backend,
    guests: Vec<Guest>,
    view: View,
    interrupted: Interrupt,
    /// The host's used memory before anything was started.
    base_mib: f64,
    /// [`TICK`], but in tests.
    tick: Duration,
    /// [`FIRST_ROUND_LIMIT`], but in tests.
    first_round_limit: Duration,
}

impl<'a> Demo<'a> {
    fn new(options: &'a Options, backend: &'a dyn Backend, interrupted: Interrupt) -> Self {
        Self {
            options,
            backend,
            guests: Vec::new(),
            view: View::new(
                if options.json { To::Stderr } else { To::Stdout },
                format!("{} of {} MiB", counted(options.guests, "guest"), options.guest.memory),
            ),
            interrupted,
            base_mib: 0.0,
            tick: TICK,
            first_round_limit: FIRST_ROUND_LIMIT,
        }
    }

    fn run(&mut self, spec: &Spec) -> Result<Summary> {
        self.base_mib = median((0..READINGS).map(|_| used_mib()).collect::<Result<_>>()?);
        self.backend.prepare()?;

        let started = Instant::now();
        for number in 0..self.options.guests {
            self.start(spec.command(&self.backend.launcher(number)))?;
        }
        self.wait_for_first_rounds(started)?;
        self.merge(started.elapsed().as_secs_f64())
    }

    /// Starts the next guest.
    fn start(&mut self, command: Command) -> Result<()> {
        let number = self.guests.len();
        let guest = Guest::start_with_stderr(command);
        self.guests.push(guest.with_context(|| format!("cannot start guest {number}"))?);
        Ok(())
    }

    fn wait_for_first_rounds(&mut self, started: Instant) -> Result<()> {
        let limit = self.first_round_limit;
        self.view.phase("booting", limit);
        while self.guests.iter().any(|guest| guest.rounds() == 0) {
            self.tick(None, None)?;
            self.fail_on_early_death()?;
            ensure!(
                started.elapsed() < limit,
                "not every guest has verified its files once in {} s: fewer --guests?",
                limit.as_secs()
            );
        }
        Ok(())
    }

    /// Merges the guests, all of which have verified their files, after this time.
    fn merge(&mut self, first_round_seconds: f64) -> Result<Summary> {
        let mut readings = Vec::new();
        for _ in 0..READINGS {
            readings.push(self.tick(None, None)?);
        }
        let before = median(readings);

        self.backend.start_merging()?;
        let started = Instant::now();
        let time = Duration::from_secs(self.options.seconds);
        self.view.phase("merging", time);
        let mut readings = Vec::new();
        let status = loop {
            let status = self.backend.status().context("cannot ask how merging does")?;
            readings.push(self.tick(Some(before), Some(&status))?);
            let bad = |verdict| matches!(verdict, Verdict::Corrupt { .. } | Verdict::Dead(_));
            // Ends at once, so that the evidence of a wrong byte is not overwritten.
            if started.elapsed() >= time || self.guests.iter_mut().any(|g| bad(g.verdict())) {
                break status;
            }
        };
        let merge_seconds = started.elapsed().as_secs_f64();
        let after = median(readings.split_off(readings.len().saturating_sub(READINGS)));
        Ok(self.summarize(first_round_seconds, merge_seconds, before, after, &status))
    }

    /// Waits a tick, reads used memory and shows it. MiB above the host's level.
    fn tick(&mut self, before: Option<f64>, status: Option<&HostMetrics>) -> Result<f64> {
        let until = Instant::now() + self.tick;
        while Instant::now() < until {
            if self.interrupted.flag.load(Ordering::Relaxed) {
                bail!("interrupted");
            }
            std::thread::sleep(NAP);
        }
        let used = used_mib()? - self.base_mib;
        self.view.show(&mut self.guests, used, before, status);
        Ok(used)
    }

    fn fail_on_early_death(&mut self) -> Result<()> {
        for (number, guest) in self.guests.iter_mut().enumerate() {
            let verdict = guest.verdict();
            if let Verdict::Dead(_) = verdict {
                // The last lines of its console may still be in the pipe.
                guest.hear_out(LAST_WORDS);
                bail!(
                    "guest {number} (process {}) before its first round: {verdict}; its console:\n{}",
                    guest.pid(),
                    guest.console_tail()
                );
            }
        }
        Ok(())
    }

    fn summarize(
        &mut self,
        first_round_seconds: f64,
        merge_seconds: f64,
        before: f64,
        after: f64,
        status: &HostMetrics,
    ) -> Summary {
        let mut dead = 0;
        for (number, guest) in self.guests.iter_mut().enumerate() {
            let verdict = guest.verdict();
            dead += usize::from(matches!(verdict, Verdict::Dead(_)));
            if !matches!(verdict, Verdict::Pass { .. }) {
                let (pid, tail) = (guest.pid(), guest.console_tail());
                output::note!("guest {number} (process {pid}): {verdict}; its console:\n{tail}");
            }
        }
        let (checks, failures) =
            self.guests.iter().map(Guest::checks).fold((0, 0), |sum, checks| (sum.0 + checks.0, sum.1 + checks.1));
        Summary {
            passed: passed(dead, checks, failures),
            guests: self.guests.len(),
            guests_dead: dead,
            first_round_seconds,
            merge_seconds,
            used_before_mib: before,
            used_after_mib: after,
            saved_fraction: 1.0 - after / before,
            cpu_seconds: status.cpu_seconds(),
            us_per_merged_page: status.cpu_seconds() * 1e6 / status.pages_merged_total.max(1) as f64,
            integrity_checks: checks,
            integrity_failures: failures,
            counters: Counters::from(status),
        }
    }
}

/// Notices SIGINT and SIGTERM while it lives.
struct Interrupt {
    flag: Arc<AtomicBool>,
    handlers: Vec<signal_hook::SigId>,
}

impl Interrupt {
    fn catch() -> Result<Self> {
        Self::at([signal_hook::consts::SIGINT, signal_hook::consts::SIGTERM])
    }

    fn at(signals: [i32; 2]) -> Result<Self> {
        let flag = Arc::new(AtomicBool::new(false));
        let handlers = signals
            .into_iter()
            .map(|signal| signal_hook::flag::register(signal, Arc::clone(&flag)))
            .collect::<std::io::Result<_>>()
            .context("cannot catch SIGINT and SIGTERM")?;
        Ok(Self { flag, handlers })
    }
}

impl Drop for Interrupt {
    fn drop(&mut self) {
        for handler in self.handlers.drain(..) {
            signal_hook::low_level::unregister(handler);
        }
    }
}

/// The host's used memory, MiB.
fn used_mib() -> Result<f64> {
    used_by(Path::new("/proc/meminfo"))
}

fn used_by(meminfo: &Path) -> Result<f64> {
    let text = std::fs::read_to_string(meminfo).context("cannot read /proc/meminfo")?;
    used_in(&text).context(
        "/proc/meminfo has no MemTotal or no MemAvailable (since Linux 3.14); in a container, \
                            show the kernel's own file",
    )
}

fn used_in(meminfo: &str) -> Option<f64> {
    let kib = |key: &str| {
        let line = meminfo.lines().find_map(|line| line.strip_prefix(key))?;
        line.trim().strip_suffix(" kB")?.parse::<f64>().ok()
    };
    Some((kib("MemTotal:")? - kib("MemAvailable:")?) / 1024.0)
}

/// The median of a set that is not empty; the lower one of an even set.
fn median(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    values[(values.len() - 1) / 2]
}

#[cfg(test)]
mod tests;
