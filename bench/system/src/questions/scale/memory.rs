//! Much memory: mostly unique, or a few pages far apart in a large region.
//!
//! The daemon's memory is what it has of its own, less what it had without clients, once it has
//! looked at every page and nothing has changed for three periods. Then the clients end, and it is
//! waited until nine tenths of that are back. For KSM its items are counted, 64 bytes each; what
//! holds them in its trees, slabs and slots is not.

use std::process::Stdio;
use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use bench_common::interrupt::Interrupt;
use bench_common::report::Row;
use kmem::{PAGE_SIZE, procfs};

use super::clients::{KSM_ITEM, items};
use super::{Bound, Figures, LIMIT, MIB, PERIOD, gives_back, memory_of, periods, rival};
use crate::harness::content::Case;
use crate::harness::cpu;
use crate::harness::hold::{Client, Holding, order_all, pids, start_each};
use crate::subjects::ksm::Rival;
use crate::subjects::pageone::{Daemon, PageOne, Sums, Times};

/// Pages of a GiB.
const GIB: usize = 1 << 18;
/// Pages that are there in a region, far apart.
const SCATTERED: usize = 65_536;

/// Two clients, of whose pages one in sixteen is equal.
pub(super) fn unique(sizes: &[usize], interrupt: &Interrupt) -> Result<Vec<Row>> {
    let mut figures = Figures::new("GiB of memory, 15 of 16 pages unique".into());
    for &gib in sizes {
        let holdings = [0, 1].map(|client| Holding { pages: gib * GIB / 2, case: Case::Unique, client, spread: 1 });
        let who = format!("pageone {gib}");
        let case = Measured { who: &who, holdings: &holdings, pages: gib * GIB };
        case.ours(&mut figures, interrupt, |figures, more, _, _| {
            figures.bound(&who, "memory_for_each_gib", more / MIB / gib as f64, "MiB", Bound::Most(4.0));
            Ok(())
        })?;
        if let Some(bytes) = case.theirs(interrupt)? {
            figures.add(&format!("ksm {gib}"), "memory_for_each_gib", bytes / MIB / gib as f64, "MiB");
        }
    }
    figures.grow("pageone", sizes);
    Ok(figures.rows)
}

/// One client, whose pages are far apart.
pub(super) fn scattered(sizes: &[usize], interrupt: &Interrupt) -> Result<Vec<Row>> {
    let mut figures = Figures::new(format!("GiB of a region, {SCATTERED} pages of it there"));
    for &gib in sizes {
        let spread = gib * GIB / SCATTERED;
        let holdings = [Holding { pages: SCATTERED, case: Case::Clones, client: 0, spread }];
        let who = format!("pageone {gib}");
        let case = Measured { who: &who, holdings: &holdings, pages: SCATTERED };
        case.ours(&mut figures, interrupt, |figures, more, pageone, daemon| {
            let each = |bytes: f64| bytes / SCATTERED as f64;
            figures.bound(&who, "memory_for_each_page", each(more), "B", Bound::Most(100.0));
            let (daemons, own) = dirty(pageone, daemon)?;
            figures.bound(&who, "more_for_each_page_by_dirty", each(daemons), "B", Bound::Most(100.0));
            figures.add(&who, "memory_of_dirty", own / MIB, "MiB");
            Ok(())
        })?;
        if let Some(bytes) = case.theirs(interrupt)? {
            figures.add(&format!("ksm {gib}"), "memory_for_each_page", bytes / SCATTERED as f64, "B");
        }
    }
    figures.grow("pageone", sizes);
    Ok(figures.rows)
}

/// What `pageone dirty` takes: the most that the daemon has beyond what it had, and the program.
fn dirty(pageone: &PageOne, daemon: &Daemon) -> Result<(f64, f64)> {
    let before = memory_of(daemon)?;
    let mut child = pageone.pageone(&["dirty", "--count", "4"]).stdout(Stdio::null()).spawn()?;
    let (mut most, mut own) = (before, 0);
    while child.try_wait()?.is_none() {
        most = most.max(memory_of(daemon)?);
        own = procfs::status(Some(child.id() as i32)).map_or(own, |status| own.max(status.vm_hwm_kib));
        std::thread::sleep(Duration::from_millis(20));
    }
    Ok((most - before, own as f64 * 1024.0))
}

/// What is held, and how it is called.
struct Measured<'a> {
    who: &'a str,
    holdings: &'a [Holding],
    pages: usize,
}

impl Measured<'_> {
    /// `looked`: what is noted of the memory that the daemon has taken, while the clients live.
    fn ours(
        &self,
        figures: &mut Figures,
        interrupt: &Interrupt,
        looked: impl FnOnce(&mut Figures, f64, &PageOne, &Daemon) -> Result<()>,
    ) -> Result<()> {
        eprintln!("scale: {}, {}", self.who, figures.case);
        let pageone = PageOne::find()?;
        // Far more than there is, as a region with few pages.
        pageone.configure("user_memory = 1000\n")?;
        let daemon = pageone.daemon(PERIOD, interrupt)?;
        let before = memory_of(&daemon)?;
        let mut clients = start_each(self.holdings.iter().copied(), |program| pageone.launch(program))?;
        let began = Instant::now();
        order_all(&mut clients, "mark")?;
        interrupt.until("PageONE has looked at every page", LIMIT, || {
            let status = pageone.any_status()?;
            let seen = status.merged() + status.zero() + status.metrics.pages_unshared;
            Ok((seen >= self.pages as u64 * 97 / 100).then_some(()))
        })?;
        figures.add(self.who, "seconds_to_look_at_all", began.elapsed().as_secs_f64(), "s");
        interrupt.sleep(periods(3.0))?;
        let (idle, began) = (Times::take(&daemon, &pids(&clients))?, Instant::now());
        interrupt.sleep(periods(2.0))?;
        let (daemons, agents) = Times::take(&daemon, &pids(&clients))?.since(&idle);
        let time = began.elapsed().as_nanos() as f64 / 100.0;
        figures.add(self.who, "idle_cpu", (daemons + agents) as f64 / time, "%");
        looked(figures, memory_of(&daemon)? - before, &pageone, &daemon)?;
        let back = gives_back(&daemon, before, clients, interrupt)?;
        figures.bound(self.who, "memory_is_back_after", back, "s", Bound::Most(10.0));
        figures.add(self.who, "memory_afterwards", (memory_of(&daemon)? - before) / MIB, "MiB");
        Ok(())
    }

    /// Bytes of KSM's items, once it has scanned everything three times.
    fn theirs(&self, interrupt: &Interrupt) -> Result<Option<f64>> {
        let Some(rival) = rival()? else { return Ok(None) };
        let mut clients = start_each(self.holdings.iter().copied(), |program| Ok(Rival::launch(program)))?;
        order_all(&mut clients, "mark")?;
        let scans = || rival.stats()?.full_scans.context("KSM counts no scans");
        let (last, cpu) = (scans()? + 3, rival.times()?);
        interrupt.until("KSM has scanned three times", LIMIT, || Ok((scans()? >= last).then_some(())))?;
        let seconds = cpu::spent(&cpu, &rival.times()?) as f64 / 1e9;
        eprintln!("scale: KSM, {} of {} MiB: {seconds:.1} s of CPU time", self.who, (self.pages * PAGE_SIZE) >> 20);
        items(&clients as &[Client]).map(|items| Some(items * KSM_ITEM))
    }
}
