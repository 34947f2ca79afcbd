//! What threads that merge wait for: the time under each lock that they share, for a page.
//!
//! A build with the feature `lock-times` reads the clock whenever a lock of the engine is taken and
//! let go, and logs the sums by the place in the sources ([`parse`]). It merges with one thread,
//! so that nobody waits. All that is *held* counts as serial, by whichever thread, but for times of
//! 0.2 ms and more, which are told apart: threads that wait for a CPU. Of a lock that is only
//! *read*, it is what two threads need here to read one in turns ([`reading`]). Locks of one client
//! do not count: a client has one thread at a time. The thread `service`, which hears all agents,
//! is serial as a whole: its CPU time bounds the rate, whatever the threads do.
//!
//! The locks of the kernel and of malloc are in no such figure. Where this host has more CPUs than
//! one, the ordinary build merges with one thread and with as many, which shows them too; with 16
//! CPUs the two figures stand side by side.

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::RwLock;
use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use bench_common::interrupt::Interrupt;
use bench_common::own_program;
use bench_common::report::Row;

use super::{Bound, Figures, LIMIT, PERIOD};
use crate::harness::content::{Case, Content, reach};
use crate::harness::cpu;
use crate::harness::hold::{order_all, start_all};
use crate::subjects::pageone::{PageOne, Sums};

/// Threads that are asked for.
const THREADS: f64 = 16.0;
/// Clients, so that each thread has one.
const CLIENTS: usize = 16;

/// The sums over a file of the engine's sources.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(super) struct Lock {
    pub(super) taken: f64,
    pub(super) held_ns: f64,
    pub(super) read: f64,
    pub(super) long_ns: f64,
}

/// The locks in a daemon's log, by the file that takes them.
pub(super) fn parse(log: &str) -> BTreeMap<String, Lock> {
    let mut locks = BTreeMap::<String, Lock>::new();
    for line in log.lines() {
        let Some((_, told)) = line.split_once("lock ") else { continue };
        let Some((place, sums)) = told.split_once(' ') else { continue };
        let sums: Vec<f64> = sums.split(' ').flat_map(str::parse).collect();
        let (Some((file, _)), &[taken, held_ns, read, long_ns]) = (place.split_once(':'), &sums[..]) else { continue };
        let lock = locks.entry(file.rsplit("engine/src/").next().unwrap_or(file).to_owned()).or_default();
        lock.taken += taken;
        lock.held_ns += held_ns;
        lock.read += read;
        lock.long_ns += long_ns;
    }
    locks
}

/// Whether only the threads that have to do with one client take these.
pub(super) fn is_of_one_client(file: &str) -> bool {
    file == "client.rs" || file.starts_with("client/")
}

/// How much more `threads` do, of whose work this share is serial.
pub(super) fn amdahl(serial: f64, threads: f64) -> f64 {
    1.0 / (serial + (1.0 - serial) / threads)
}

/// Nanoseconds in which one of two threads reads a lock that both read without a pause.
fn reading() -> f64 {
    const TIMES: u32 = 1_000_000;
    let lock = RwLock::new(0u64);
    let read = || (0..TIMES).for_each(|_| _ = std::hint::black_box(lock.read().map(|value| *value)));
    let began = Instant::now();
    std::thread::scope(|scope| {
        scope.spawn(read);
        scope.spawn(read);
    });
    began.elapsed().as_nanos() as f64 / f64::from(2 * TIMES)
}

/// Measures merging, and memory of which most is unique.
pub(super) fn run(build: Option<&Path>, quick: bool, interrupt: &Interrupt) -> Result<Vec<Row>> {
    let beside = own_program()?;
    let beside = beside.parent().and_then(Path::parent).context("this program lies nowhere")?;
    let build = build.map_or_else(|| beside.join("lock-times/release"), Path::to_path_buf);
    let pages = if quick { 2048 } else { 4096 };
    let mut figures = Figures::new(format!("{CLIENTS} clients of {} MiB, for each page", pages * 4 / 1024));
    let reading = reading();
    for (who, case) in [("merged", Case::Random), ("unique", Case::Unique)] {
        eprintln!("scale: locks, {who}");
        match PageOne::find_in(&build) {
            Ok(pageone) => times(&Run { pageone, pages, case, threads: 1 }, who, reading, &mut figures, interrupt)?,
            Err(why) => eprintln!("SKIPPED locks, a build with lock-times (`make bench-scale`): {why:#}"),
        }
        let threads = std::thread::available_parallelism().map_or(1, usize::from).min(THREADS as usize);
        let seconds = |threads| -> Result<f64> {
            Ok(Run { pageone: PageOne::find()?, pages, case, threads }.merge(interrupt)?.seconds)
        };
        if threads > 1 {
            let speedup = seconds(1)? / seconds(threads)?;
            figures.add(who, "threads_measured", threads as f64, "");
            figures.add(who, "speedup_measured", speedup, "");
        }
    }
    Ok(figures.rows)
}

/// One daemon that looks at everything once.
struct Run {
    pageone: PageOne,
    pages: usize,
    case: Case,
    threads: usize,
}

struct Took {
    seconds: f64,
    /// CPU time of the threads that merge, and of the one that hears agents, in ns.
    workers: f64,
    service: f64,
}

impl Run {
    fn merge(&self, interrupt: &Interrupt) -> Result<Took> {
        let contents = (0..CLIENTS).map(|client| Content::new(self.case, client, self.pages));
        let mergeable = reach(&contents.collect::<Result<Vec<_>>>()?, false).mergeable;
        let unique = (CLIENTS * self.pages) as u64 - mergeable;
        let daemon = self.pageone.daemon_with(PERIOD / 4.0, self.threads, interrupt)?;
        let mut clients = start_all(CLIENTS, self.pages, self.case, |program| self.pageone.launch(program))?;
        let time = |name: &str| -> Result<f64> {
            Ok(cpu::thread_times(daemon.pid(), |thread| thread.starts_with(name))?.values().sum::<u64>() as f64)
        };
        let (workers, service, began) = (time("merge-")?, time("service")?, Instant::now());
        order_all(&mut clients, "mark")?;
        interrupt.until_each(Duration::from_millis(50), "every page was looked at", LIMIT, || {
            let status = self.pageone.any_status()?;
            let merged = status.merged() + status.zero();
            let done = merged * 100 >= mergeable * 99 && status.metrics.pages_unshared * 100 >= unique * 97;
            Ok(done.then_some(()))
        })?;
        let seconds = began.elapsed().as_secs_f64();
        let (workers, service) = (time("merge-")? - workers, time("service")? - service);
        drop(clients);
        daemon.stop()?;
        Ok(Took { seconds, workers, service })
    }
}

fn times(run: &Run, who: &str, reading: f64, figures: &mut Figures, interrupt: &Interrupt) -> Result<()> {
    let took = run.merge(interrupt)?;
    let pages = (CLIENTS * run.pages) as f64;
    let log = std::fs::read_to_string(run.pageone.log()).context("the daemon has no log")?;
    let (mut held, mut reads, mut of_clients, mut long) = (0.0, 0.0, 0.0, 0.0);
    for (file, lock) in parse(&log) {
        if is_of_one_client(&file) {
            of_clients += lock.held_ns;
            continue;
        }
        if lock.held_ns + lock.long_ns + lock.read * reading >= pages {
            let [taken, ns, read, long] = [lock.taken, lock.held_ns, lock.read, lock.long_ns].map(|sum| sum / pages);
            eprintln!("scale: {who}: {file}: {ns:.1} ns ({long:.0} long), taken {taken:.3}, read {read:.2} times");
        }
        held += lock.held_ns;
        long += lock.long_ns;
        reads += lock.read;
    }
    let serial = (held + reads * reading) / (took.workers + took.service);
    figures.add(who, "cpu_of_threads_that_merge", took.workers / pages, "ns");
    figures.add(who, "cpu_of_service_thread", took.service / pages, "ns");
    figures.add(who, "shared_locks_held", held / pages, "ns");
    figures.add(who, "held_for_long", long / pages, "ns");
    figures.add(who, "shared_locks_read", reads / pages, "times");
    figures.add(who, "reading_one", reading, "ns");
    figures.add(who, "locks_of_one_client_held", of_clients / pages, "ns");
    let by_service = took.workers / took.service;
    figures.add(who, "speedup_by_locks_16_threads", amdahl(serial, THREADS), "");
    figures.add(who, "speedup_by_service_thread", by_service, "");
    let speedup = amdahl(serial, THREADS).min(by_service);
    figures.bound(who, "speedup_16_threads", speedup, "", Bound::Least(12.0));
    Ok(())
}
