//! Many clients, all with the same memory.
//!
//! 1. They mark it; all of it merges.
//! 2. CPU time of the daemon and of the agents over whole periods, while nothing changes.
//! 3. `pageone status`, as a person runs it: the median of 15.
//! 4. One more client marks the same memory, and waits until it is merged.
//! 5. The daemon is stopped, and another one started: how soon are all back.
//! 6. All end.
//!
//! KSM is at the pace that looks at all memory once in a period. It has no restart, and no status.

use std::process::Stdio;
use std::time::Instant;

use anyhow::{Result, ensure};
use bench_common::interrupt::Interrupt;
use bench_common::report::Row;
use kmem::ksm::process_stat;

use super::{Bound, Figures, LIMIT, MIB, PERIOD, STEP, gives_back, memory_of, periods, rival};
use crate::harness::content::Case;
use crate::harness::cpu;
use crate::harness::hold::{Client, Holding, order_all, pids, start_all, start_each};
use crate::subjects::ksm::{Pace, Rival};
use crate::subjects::pageone::{Daemon, PageOne, Sums, Times};

/// Of each client: as much as a region needs at least.
const PAGES: usize = 256;
/// Periods over which CPU time is taken.
const PERIODS: f64 = 3.0;
/// A look at all of them is no cheap one.
const STATUS: usize = 15;

/// Bytes of an item of KSM's, which each page has that it looks at (`struct ksm_rmap_item`).
pub(super) const KSM_ITEM: f64 = 64.0;

/// Measures each of these numbers of clients, under both.
pub(super) fn run(sizes: &[usize], interrupt: &Interrupt) -> Result<Vec<Row>> {
    let mut figures = Figures::new(format!("clients of {} MiB, merge period {PERIOD} s", PAGES * 4 / 1024));
    for &size in sizes {
        ours(size, &mut figures, interrupt)?;
    }
    for &size in sizes {
        if let Some(rival) = rival()? {
            theirs(size, rival, &mut figures, interrupt)?;
        }
    }
    figures.grow("pageone", sizes);
    Ok(figures.rows)
}

fn ours(size: usize, figures: &mut Figures, interrupt: &Interrupt) -> Result<()> {
    let who = format!("pageone {size}");
    let pageone = PageOne::find()?;
    let daemon = pageone.daemon(PERIOD, interrupt)?;
    let before = memory_of(&daemon)?;
    eprintln!("scale: {size} clients start");
    let mut clients = start_all(size, PAGES, Case::Clones, |program| pageone.launch(program))?;
    let goal = |clients: usize| (clients * PAGES) as u64 * 99 / 100;
    let began = Instant::now();
    order_all(&mut clients, "mark")?;
    interrupt.until("PageONE has merged the clients' memory", LIMIT, || {
        Ok((pageone.any_status()?.merged() >= goal(size)).then_some(()))
    })?;
    figures.add(&who, "seconds_to_merge", began.elapsed().as_secs_f64(), "s");
    interrupt.sleep(periods(3.0))?;

    let (idle, began) = (Times::take(&daemon, &pids(&clients))?, Instant::now());
    interrupt.sleep(periods(PERIODS))?;
    let time = began.elapsed().as_nanos() as f64 / 100.0;
    let (daemons, agents) = Times::take(&daemon, &pids(&clients))?.since(&idle);
    figures.bound(&who, "idle_cpu", (daemons + agents) as f64 / time, "%", Bound::Most(1.0));
    figures.add(&who, "idle_cpu_of_agents", agents as f64 / time, "%");
    figures.bound(&who, "status", status(&pageone)?, "ms", Bound::Most(40.0));
    figures.add(&who, "memory", (memory_of(&daemon)? - before) / MIB, "MiB");

    let holding = Holding { pages: PAGES, case: Case::Clones, client: size, spread: 1 };
    let mut more = start_each([holding].into_iter(), |program| pageone.launch(program))?;
    let began = Instant::now();
    order_all(&mut more, "mark")?;
    interrupt.until_each(STEP, "one more client is merged", LIMIT, || {
        let status = pageone.any_status()?;
        let merged = status.clients().find(|client| client.pid == more[0].pid()).map(|c| c.metrics.pages_merged);
        Ok((merged >= Some(goal(1))).then_some(()))
    })?;
    let bound = Bound::Most(2.0 * PERIOD + 1.0);
    figures.bound(&who, "one_more_is_merged_after", began.elapsed().as_secs_f64(), "s", bound);
    clients.append(&mut more);

    let daemon = restart(&pageone, daemon, &who, clients.len(), goal(size), figures, interrupt)?;
    let back = gives_back(&daemon, before, clients, interrupt)?;
    figures.bound(&who, "memory_is_back_after", back, "s", Bound::Most(10.0));
    figures.add(&who, "memory_afterwards", (memory_of(&daemon)? - before) / MIB, "MiB");
    Ok(())
}

fn restart(
    pageone: &PageOne,
    daemon: Daemon,
    who: &str,
    all: usize,
    goal: u64,
    figures: &mut Figures,
    interrupt: &Interrupt,
) -> Result<Daemon> {
    daemon.stop()?;
    let began = Instant::now();
    let daemon = pageone.daemon(PERIOD, interrupt)?;
    let merged = interrupt.until_each(STEP, "all clients are back", LIMIT, || {
        let status = pageone.any_status()?;
        Ok((status.clients().count() >= all).then(|| status.merged()))
    })?;
    figures.bound(who, "all_are_back_after", began.elapsed().as_secs_f64(), "s", Bound::Most(3.0));
    ensure!(merged >= goal, "{merged} pages are merged after a restart, {goal} were before");
    Ok(daemon)
}

/// Milliseconds that `pageone status` takes.
fn status(pageone: &PageOne) -> Result<f64> {
    let mut times = Vec::new();
    for _ in 0..STATUS {
        let began = Instant::now();
        let end = pageone.pageone(&["status"]).stdout(Stdio::null()).status()?;
        times.push(began.elapsed().as_secs_f64() * 1e3);
        ensure!(end.success(), "pageone status: {end}");
    }
    times.sort_by(f64::total_cmp);
    Ok(times[STATUS / 2])
}

fn theirs(size: usize, mut rival: Rival, figures: &mut Figures, interrupt: &Interrupt) -> Result<()> {
    let who = format!("ksm {size}");
    let launch = |program: &_| Ok(Rival::launch(program));
    eprintln!("scale: {size} processes under KSM");
    // Declared after the rival, so that they end before its settings are put back.
    let mut clients = start_all(size, PAGES, Case::Clones, launch)?;
    let goal = |clients: usize| (clients * PAGES) as u64 * 99 / 100;
    let began = Instant::now();
    order_all(&mut clients, "mark")?;
    rival.wait_merged(&clients, goal(size), LIMIT, interrupt)?;
    figures.add(&who, "seconds_to_merge", began.elapsed().as_secs_f64(), "s");
    rival.set_pace(Pace::of((size * PAGES) as u64, PERIOD))?;
    interrupt.sleep(periods(1.0))?;
    let (idle, began) = (rival.times()?, Instant::now());
    interrupt.sleep(periods(PERIODS))?;
    let time = began.elapsed().as_nanos() as f64 / 100.0;
    figures.add(&who, "idle_cpu", cpu::spent(&idle, &rival.times()?) as f64 / time, "%");
    figures.add(&who, "memory", items(&clients)? * KSM_ITEM / MIB, "MiB");
    let holding = Holding { pages: PAGES, case: Case::Clones, client: size, spread: 1 };
    let mut more = start_each([holding].into_iter(), launch)?;
    let began = Instant::now();
    order_all(&mut more, "mark")?;
    interrupt
        .until_each(STEP, "KSM has merged one more", LIMIT, || Ok((rival.merged(&more)? >= goal(1)).then_some(())))?;
    figures.add(&who, "one_more_is_merged_after", began.elapsed().as_secs_f64(), "s");
    Ok(())
}

/// KSM's items for these processes.
pub(super) fn items(clients: &[Client]) -> Result<f64> {
    clients.iter().map(|client| Ok(process_stat(client.pid())?.rmap_items.unwrap_or(0) as f64)).sum()
}
