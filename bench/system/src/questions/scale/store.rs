//! A store at its limit: two clients hold the same memory, more than the daemon's control group has
//! room for. Each frame that fits could have both pages; it is measured how soon that is so.

use std::time::Instant;

use anyhow::Result;
use bench_common::interrupt::Interrupt;
use bench_common::report::Row;
use kmem::PAGE_SIZE;

use super::{Bound, Figures, LIMIT, MIB, PERIOD, STEP, periods};
use crate::harness::content::Case;
use crate::harness::hold::{order_all, start_all};
use crate::harness::host::MemoryGroup;
use crate::subjects::pageone::{PageOne, Sums};

/// What the daemon may have; it leaves 64 MiB of that.
const ROOM: u64 = 160 << 20;
/// Of each client: more than fits.
const PAGES: usize = 256 << 20 >> 12;
/// This share of the frames has both of its pages: what is written meanwhile may have one.
const ALL: f64 = 0.95;
/// Periods after which it is not waited any longer.
const GIVEN_UP: f64 = 10.0;

/// Measures it.
pub(super) fn run(interrupt: &Interrupt) -> Result<Vec<Row>> {
    let mut figures = Figures::new(format!("a store of at most {} MiB", (ROOM >> 20) - 64));
    let Some(group) = MemoryGroup::new(ROOM) else {
        eprintln!("SKIPPED store: no memory control group can be made here");
        return Ok(Vec::new());
    };
    eprintln!("scale: a store at its limit");
    let pageone = PageOne::find()?;
    let daemon = pageone.daemon(PERIOD, interrupt)?;
    group.add(daemon.pid())?;
    let mut clients = start_all(2, PAGES, Case::Clones, |program| pageone.launch(program))?;
    let began = Instant::now();
    order_all(&mut clients, "mark")?;
    interrupt.until_each(STEP, "the store is at its limit", LIMIT, || {
        Ok(pageone.any_status()?.domains.iter().any(|domain| domain.paused.is_some()).then_some(()))
    })?;
    figures.add("pageone", "at_its_limit_after", began.elapsed().as_secs_f64(), "s");
    let paused = Instant::now();
    let metrics = || Ok::<_, anyhow::Error>(pageone.any_status()?.metrics);
    let share = || metrics().map(|metrics| metrics.pages_sharing as f64 / metrics.pages_shared as f64);
    while paused.elapsed() < periods(GIVEN_UP) && share()? < ALL {
        interrupt.sleep(STEP)?;
    }
    let after = paused.elapsed().as_secs_f64() / PERIOD;
    interrupt.sleep(periods(3.0))?;
    let (share, frames) = (share()?, metrics()?.pages_shared as f64);
    figures.bound("pageone", "frames_have_all_users_after", after, "periods", Bound::Most(3.0));
    figures.add("pageone", "users_besides_the_first", share, "a frame");
    figures.add("pageone", "frames", frames * PAGE_SIZE as f64 / MIB, "MiB");
    let merged = pageone.any_status()?.merged() as f64;
    figures.add("pageone", "pages_merged", merged / (2 * PAGES) as f64 * 100.0, "%");
    Ok(figures.rows)
}
