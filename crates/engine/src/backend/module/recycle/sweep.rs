//! One sweep over a guest's RAM: claim, punch, tell the ledger, release.

use std::ops::{ControlFlow, Range as Frames};
use std::sync::Arc;
use std::time::{Duration, Instant};

use kmem::cpu::thread_time;
use ppr::{Ended, Recycled, SWEEP_PAGES};
use rustix::io::Errno;
use wire::Run;
use wire::recycle::{Extent, Refusal, Sweep};

use super::pool::Pool;
use super::process::{Ground, Punch};
use crate::backend::module::file::File;
use crate::core::content::index::Content;
use crate::core::ledger::Entry;
use crate::core::recycle::state::Recycling;
use crate::sync::Mutex;

/// How long a sweep may take: the other guests wait for it, and a task that is throttled may hold
/// it up in each batch.
const LONGEST: Duration = Duration::from_millis(500);

pub(super) struct Sweeper {
    host: ppr::Host<Arc<ppr::Pool>>,
    /// Ascending by frame; the region is the number of the file.
    extents: Vec<Extent>,
    pub(super) ground: Box<dyn Ground>,
    /// Dropped last.
    pub(super) pool: Pool,
}

impl Sweeper {
    pub(super) fn new(pool: Pool, extents: Vec<Extent>, ground: Box<dyn Ground>) -> Self {
        let host = ppr::Host::new(pool.pool.clone(), ppr::Ram::new(extents.iter().map(Extent::frames)));
        pool.pool.set_host_state(ppr::HostState::Active);
        Self { host, extents, ground, pool }
    }

    /// Punches marked pages, for at most `budget` of CPU time, and notes what became of it.
    pub(super) fn sweep(
        &mut self,
        files: &[Arc<File>],
        budget: Duration,
        recycling: &Mutex<Recycling>,
        stopping: impl Fn() -> bool,
    ) {
        let (begin, begun) = (thread_time(), Instant::now());
        let mut sum = Sweep::default();
        let over = || thread_time() - begin > budget || begun.elapsed() > LONGEST || stopping();
        let result = self.batches(files, &mut sum, over);
        sum.sweep_ns = (thread_time() - begin).as_nanos() as u64;
        let mut recycling = recycling.lock();
        let before = recycling.why().map(str::to_owned);
        recycling.swept(&sum);
        if let Err(why) = result {
            recycling.refuse(format!("its pages cannot be punched: {why}"));
        }
        if let Some(why) = recycling.why().filter(|&why| before.as_deref() != Some(why)) {
            tracing::warn!(inode = files[0].inode, "not recycled: {why}");
        }
    }

    fn batches(&mut self, files: &[Arc<File>], sum: &mut Sweep, ends: impl Fn() -> bool) -> Result<(), Errno> {
        sum.refused = self.refusal(files);
        if sum.refused.is_some() {
            return Ok(());
        }
        let Self { host, extents, ground, .. } = self;
        let punch = ground.open()?;
        let mut stayed = false;
        let (done, ended) = ppr::sweep(extents.iter().map(Extent::frames), ends, |left| {
            if let Some(held) = ground.held() {
                return ControlFlow::Break(Ok(held));
            }
            let mut punched = 0;
            let take = |runs: &[Frames<u64>]| take(files, extents, runs, &punch).map(|pages| punched += pages);
            // Where the daemon dies in the midst, the guest waits for the next one.
            match host.recycle(left, SWEEP_PAGES, take) {
                Ok(batch) => {
                    // Another process than QEMU has pinned the rest, or a throttled one holds it.
                    stayed |= punched < batch.pages;
                    ControlFlow::Continue(Recycled { pages: punched, ..batch })
                }
                Err(errno) => ControlFlow::Break(Err(errno)),
            }
        });
        (sum.pages, sum.runs, sum.lost) = (done.pages, done.runs, done.lost);
        sum.longest_ns = done.longest.as_nanos() as u64;
        match ended {
            Ended::Done => sum.refused = stayed.then_some(Refusal::Pinned),
            Ended::Over => sum.more = true,
            Ended::Stopped(Ok(held)) => sum.refused = Some(held),
            Ended::Stopped(Err(errno)) => return Err(errno),
        }
        Ok(())
    }

    fn refusal(&self, files: &[Arc<File>]) -> Option<Refusal> {
        if self.pool.pool.validate().is_err() {
            return Some(Refusal::Header);
        }
        // Something has pinned its pages for long, or is about to.
        if files.iter().any(|file| file.state().plain.is_some()) {
            return Some(Refusal::Pinned);
        }
        self.ground.held()
    }
}

/// Punches runs of claimed frames. The ledger hears of them before they are released: so no write
/// of the guest's comes before. Returns how many pages became holes: pinned ones stay.
fn take(files: &[Arc<File>], extents: &[Extent], runs: &[Frames<u64>], punch: &Punch<'_>) -> Result<u64, Errno> {
    let mut of_files: Vec<Vec<Run>> = vec![Vec::new(); files.len()];
    for (number, run) in runs.iter().flat_map(|frames| Extent::pages_of(extents, frames)) {
        if let Some(runs) = of_files.get_mut(number.0 as usize) {
            runs.push(run);
        }
    }
    let mut pages = 0;
    for (number, (file, runs)) in files.iter().zip(&of_files).enumerate().filter(|(_, (_, runs))| !runs.is_empty()) {
        punch(number, runs, &mut |run| {
            let left = |page, entry: Entry<Content>| _ = file.drop_entry(page, entry);
            file.state().region.recycle(run, left);
            pages += u64::from(run.len);
        })?;
    }
    Ok(pages)
}
