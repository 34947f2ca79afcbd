//! `see`: what looking costs: `pageone top`, `record` and `replay` with many clients.
//!
//! 1. Clients are started, all with the same content, and merged. The daemon's CPU time without
//!    anybody who looks is taken.
//! 2. `pageone top` runs at one look a second on a terminal of script(1). Its CPU time is taken,
//!    and the daemon's with it.
//! 3. The same with `pageone record`. Its file gives the bytes of a real moment.
//! 4. An hour is made of these moments: a moment of every second is one of the recorded ones, with
//!    a new time and with changes to every client's counters and gauges, so that more changes than
//!    in the clients here, which are idle. The recording's size is taken, the time to open it, and
//!    the time to jump to random moments.

use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use kmem::PAGE_SIZE;
use monitor::recording::Writer;
use monitor::{Depth, Moment, Recording};

use crate::harness::content::Case;
use crate::harness::cpu;
use crate::harness::hold::{order_all, start_all};
use crate::subjects::pageone::{PageOne, Sums};
use bench_common::interrupt::Interrupt;
use bench_common::random::Random;
use bench_common::report::{Row, Sheet};

/// How long merging may take.
const MERGE_LIMIT: Duration = Duration::from_secs(300);
/// Seconds of the made recording.
const HOUR: i64 = 3600;
/// Random moments that are jumped to.
const JUMPS: usize = 200;
/// Moments between two looks at who shares with whom, as `record` takes them.
const DEPTH_EVERY: i64 = 60;

/// Options of the bench.
#[derive(clap::Args)]
pub(crate) struct Options {
    /// Clients
    #[arg(long, default_value_t = 64)]
    clients: usize,
}

/// Runs the bench.
pub(crate) fn run(options: &Options, quick: bool) -> Result<Vec<Row>> {
    let (pages, seconds) = if quick { (256, 10) } else { (4096, 60) };
    let interrupt = Interrupt::watch()?;
    let pageone = PageOne::find()?;
    let daemon = pageone.daemon(2.0, &interrupt)?;
    let mut clients = start_all(options.clients, pages, Case::Idle, |program| pageone.launch(program))?;
    order_all(&mut clients, "mark")?;
    let goal = (options.clients * pages * 9 / 10) as u64;
    interrupt.until("PageONE has merged the clients' memory", MERGE_LIMIT, || {
        let status = pageone.status()?;
        Ok((status.merged() + status.zero() >= goal).then_some(()))
    })?;
    let case = format!("{} clients of {} MiB, {seconds} s", options.clients, (pages * PAGE_SIZE) >> 20);
    let mut sheet = Sheet { bench: "see", case, subject: "pageone", threads: 1, rows: Vec::new() };
    let window = Duration::from_secs(seconds);
    let percent = |ns: u64, time: Duration| ns as f64 / time.as_nanos() as f64 * 100.0;

    let (before, began) = (cpu_of(daemon.pid())?, Instant::now());
    interrupt.sleep(window)?;
    let idle = percent(cpu_of(daemon.pid())? - before, began.elapsed());
    sheet.add("daemon_unwatched", idle, "% of a CPU");

    let file = tempfile::Builder::new().prefix("pageone-bench-").tempdir().context("no directory")?;
    let recording = file.path().join("hour.rec");
    let output = recording.to_str().context("a path that is no text")?;
    let top = on_terminal(&pageone.pageone(&["top"]));
    let record = pageone.pageone(&["record", "-o", output]);
    for (label, more, command) in [("top", "daemon_more_for_top", top), ("record", "daemon_more_for_record", record)] {
        let watcher = Watcher::start(command)?;
        interrupt.sleep(Duration::from_secs(3))?;
        let (own, daemons, began) = (watcher.cpu()?, cpu_of(daemon.pid())?, Instant::now());
        interrupt.sleep(window)?;
        let time = began.elapsed();
        let (own, daemons) = (watcher.cpu()? - own, cpu_of(daemon.pid())? - daemons);
        sheet.add(label, percent(own, time), "% of a CPU");
        sheet.add(more, percent(daemons, time) - idle, "% of a CPU");
    }
    made_hour(&recording, &mut sheet)?;
    Ok(sheet.rows)
}

/// CPU time of all threads of a process, in nanoseconds.
fn cpu_of(pid: i32) -> Result<u64> {
    Ok(cpu::thread_times(pid, |_| true)?.values().sum())
}

/// The same command on a terminal of script(1).
fn on_terminal(command: &Command) -> Command {
    let words = std::iter::once(command.get_program()).chain(command.get_args());
    let words: Vec<_> = words.map(|word| format!("'{}'", word.to_string_lossy())).collect();
    let line = format!("stty cols 160 rows 50; exec {}", words.join(" "));
    let mut script = Command::new("script");
    script.args(["-qec", &line, "/dev/null"]).env("TERM", "xterm-256color").stdin(Stdio::piped());
    script
}

/// A program that looks; it ends with this value.
struct Watcher {
    child: Child,
    pid: i32,
}

impl Watcher {
    fn start(mut command: Command) -> Result<Self> {
        let child = command.stdout(Stdio::null()).stderr(Stdio::null()).spawn();
        let child = child.with_context(|| format!("cannot start {}", command.get_program().display()))?;
        let mut watcher = Self { pid: child.id() as i32, child };
        // The program is a child of script, or it is the child itself.
        std::thread::sleep(Duration::from_secs(1));
        let path = format!("/proc/{0}/task/{0}/children", watcher.pid);
        if let Some(pid) =
            std::fs::read_to_string(path).ok().and_then(|text| text.split_whitespace().next()?.parse().ok())
        {
            watcher.pid = pid;
        }
        Ok(watcher)
    }

    fn cpu(&self) -> Result<u64> {
        cpu_of(self.pid).context("the program that looks has ended")
    }
}

impl Drop for Watcher {
    fn drop(&mut self) {
        if let Some(pid) = rustix::process::Pid::from_raw(self.pid) {
            let _ = rustix::process::kill_process(pid, rustix::process::Signal::TERM);
        }
        let _ = self.child.wait();
    }
}

/// An hour of moments like the recorded ones, its size and how soon moments of it are found.
fn made_hour(recorded: &Path, sheet: &mut Sheet) -> Result<()> {
    let mut real = Recording::open(std::fs::File::open(recorded)?)?;
    let moments = (0..real.len()).map(|at| real.moment(at)).collect::<Result<Vec<Moment>, _>>()?;
    let depth = real.depth(i64::MAX)?.unwrap_or_default();
    sheet.add("moments_recorded", moments.len() as f64, "moments");
    sheet.add("recorded", recorded.metadata()?.len() as f64 / moments.len() as f64, "B a moment");
    let path = recorded.with_extension("made");
    let mut writer = Writer::new(std::fs::File::create(&path)?)?;
    let mut numbers = Random::new(1);
    let first = moments.first().map_or(0, |moment| moment.time);
    for second in 0..HOUR {
        let time = first + 1000 * second;
        let moment = Moment { time, ..changed(&moments[second as usize % moments.len()], second, &mut numbers) };
        writer.append(&moment)?;
        if second % DEPTH_EVERY == 0 {
            writer.append_depth(&Depth { time, ..depth.clone() })?;
        }
    }
    sheet.add("made_hour", path.metadata()?.len() as f64 / 1e6, "MB");
    let began = Instant::now();
    let mut made = Recording::open(std::fs::File::open(&path)?)?;
    sheet.add("open_made_hour", began.elapsed().as_secs_f64() * 1e3, "ms");
    ensure!(made.len() == HOUR as usize && made.damage.is_empty(), "the made hour is damaged");
    let mut times = Vec::new();
    for _ in 0..JUMPS {
        let at = numbers.below(HOUR as usize);
        let began = Instant::now();
        let moment = made.moment(at)?;
        times.push(began.elapsed().as_secs_f64() * 1e3);
        ensure!(moment.time == first + 1000 * at as i64, "another moment was found");
    }
    times.sort_by(f64::total_cmp);
    sheet.add("jump_median", times[times.len() / 2], "ms");
    sheet.add("jump_longest", times[times.len() - 1], "ms");
    Ok(())
}

/// A moment with changes to what changes in a guest that works.
fn changed(moment: &Moment, second: i64, numbers: &mut Random) -> Moment {
    let mut below = |limit: usize| numbers.below(limit) as u64;
    let mut moment = moment.clone();
    let Some(status) = &mut moment.status else { return moment };
    let metrics = &mut status.metrics;
    metrics.uptime_seconds += second as f64;
    metrics.memory_available_bytes = metrics.memory_available_bytes.map(|bytes| bytes + below(1 << 16) * 4096);
    metrics.general_profit += below(1 << 20) as i64;
    metrics.memory_pressure_ratio = Some(below(100) as f64 / 100.0);
    for client in status.domains.iter_mut().flat_map(|domain| &mut domain.clients) {
        let metrics = &mut client.metrics;
        let moved = below(200);
        metrics.agent_cpu_seconds += second as f64 / 500.0 + below(1000) as f64 / 1e6;
        metrics.pages_merged -= moved.min(metrics.pages_merged);
        metrics.pages_volatile += moved / 2;
        metrics.pages_unshared += moved - moved / 2;
        metrics.pages_pending = below(20);
        metrics.pages_copied_total += second as u64 * 20 + moved;
        metrics.pages_differed_total += second as u64;
        metrics.full_scans += second as u64 / 2;
        metrics.mappings += below(50) as u32;
        metrics.faults_total += second as u64 * 1000 + below(2000);
        metrics.dirty_pages_per_second = below(100_000) as f64 / 10.0;
        metrics.general_profit -= (moved * 4096) as i64;
        let stalls = &mut client.writer_stall;
        stalls.sum_seconds += second as f64 / 100.0;
        (0..3).for_each(|at| stalls.counts[at] += second as u64 * (3 - at as u64));
    }
    moment
}
