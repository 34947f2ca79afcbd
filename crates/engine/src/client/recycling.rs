//! The recycling part of a client: its guest's marks, the place of the guest's RAM, and the results
//! of sweeps.
//!
//! An agent announces a pool once, with the extents of the guest's RAM or with a QMP socket to find
//! them by. It reports each run of pages that it has taken back, and the end of each sweep. The
//! ledger hears of every page: a recycled page leaves its frame or its place in the index, and
//! counts as recycled until the guest writes to it again. A page that is marked is no candidate for
//! merging ([`FreePages`]).

use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::time::{Duration, Instant};

use control::{RecycleStatus, RecyclerMetrics};
use kmem::PAGE_SIZE;
use wire::recycle::{Extent, Pool, Sweep};

use super::{Client, Next, ProtocolError, State};
use crate::ledger::free_pages::{FreePages, Marks};
use crate::users::log_of;

/// How long a guest may take to boot and to load its module. Then its memory is merged though
/// nothing is marked.
const BOOT_TIME: Duration = Duration::from_secs(60);

/// The daemon's records of a client that has a pool.
pub(crate) struct Recycling {
    marks: Arc<Marks>,
    extents: Vec<Extent>,
    /// Reclaim period.
    pub(crate) period: Duration,
    /// When to look for marks next.
    pub(crate) due: Instant,
    /// When a sweep was requested that has not ended.
    pub(crate) requested: Option<Instant>,
    /// CPU time that the sweeps since the last answer may take.
    pub(crate) granted: Duration,
    /// Why nothing is recycled, for people.
    note: Option<String>,
    /// Nothing will ever be recycled again.
    dropped: bool,
    /// Until when its guest may be booting.
    boots_until: Option<Instant>,
    pub(crate) totals: Totals,
    /// When `rate` was last computed, and the total of pages then.
    window: (Instant, u64),
    /// Pages taken back a second, over a window of at least two seconds.
    rate: f64,
}

/// Sums over a client's life, as far as this daemon knows it.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Totals {
    /// Pages taken back.
    pub(crate) pages: u64,
    /// Runs that they came in.
    pub(crate) runs: u64,
    /// Pages that the guest took back itself between the look and the claim.
    pub(crate) lost: u64,
    pub(crate) sweeps: u64,
    /// CPU time of all sweeps.
    pub(crate) sweep_ns: u64,
    /// The longest time that pages were claimed.
    pub(crate) longest_ns: u64,
}

impl Recycling {
    fn new(marks: Arc<Marks>, period: Duration, boots: bool) -> Self {
        let now = Instant::now();
        Self {
            marks,
            extents: Vec::new(),
            period,
            due: now,
            requested: None,
            granted: Duration::ZERO,
            note: None,
            dropped: false,
            boots_until: boots.then(|| now + BOOT_TIME),
            totals: Totals::default(),
            window: (now, 0),
            rate: 0.0,
        }
    }

    /// Whether it is known where the guest's RAM lies.
    pub(crate) fn is_located(&self) -> bool {
        !self.extents.is_empty()
    }

    /// Whether nothing can be recycled at present.
    pub(crate) fn is_refused(&self) -> bool {
        self.note.is_some()
    }

    /// Whether nothing will ever be recycled again.
    pub(crate) fn is_dropped(&self) -> bool {
        self.dropped
    }

    /// Notes why nothing can be recycled.
    pub(crate) fn refuse(&mut self, why: String) {
        self.note = Some(why);
    }

    /// Whether the guest may have marked something. Reads 4 KiB for 8 GiB of guest.
    pub(crate) fn has_marks(&self) -> bool {
        self.extents.last().is_some_and(|extent| self.marks.any_below(extent.frames().end))
    }

    pub(crate) fn status(&self) -> RecycleStatus {
        let state = match (self.dropped, self.extents.is_empty(), &self.note) {
            (true, ..) => "dropped",
            (_, _, Some(_)) => "refused",
            (_, true, _) => "starting",
            _ => "recycling",
        };
        let totals = &self.totals;
        let idle = self.window.0.elapsed() > 5 * self.period;
        RecycleStatus {
            state: state.into(),
            why: self.note.clone(),
            metrics: RecyclerMetrics {
                managed_bytes: self.extents.iter().map(|extent| u64::from(extent.run.len) * PAGE_SIZE as u64).sum(),
                pool_bytes: self.marks.bytes(),
                reclaim_period_seconds: self.period.as_secs_f64(),
                pages_recycled_total: totals.pages,
                pages_recycled_per_second: if idle { 0.0 } else { self.rate },
                runs_total: totals.runs,
                pages_lost_total: totals.lost,
                sweeps_total: totals.sweeps,
                sweep_seconds: totals.sweep_ns as f64 / 1e9,
                claim_max_us: totals.longest_ns / 1000,
            },
        }
    }

    /// Whether the guest will soon tell which of its pages are free. Until then most pages that
    /// could be merged are left over from booting. Their frames would lose their users a moment
    /// later, and the store would keep the memory.
    pub(crate) fn is_awaited(&mut self) -> bool {
        let awaited = self.boots_until.is_some_and(|until| Instant::now() < until)
            && self.note.is_none()
            && self.totals.sweeps == 0
            && self.marks.guest_starts() == 0;
        if !awaited {
            self.boots_until = None;
        }
        awaited
    }

    fn swept(&mut self, sweep: &Sweep) {
        self.requested = None;
        self.note = sweep.refused.map(|why| why.to_string());
        self.dropped |= sweep.refused.is_some_and(wire::recycle::Refusal::is_final);
        // A sweep passes each page once. With this limit a hostile client cannot make the sums
        // overflow.
        let most: u64 = self.extents.iter().map(|extent| u64::from(extent.run.len)).sum();
        let totals = &mut self.totals;
        totals.sweeps += 1;
        totals.pages += sweep.pages.min(most);
        totals.runs += sweep.runs.min(most);
        totals.lost += sweep.lost.min(most);
        totals.sweep_ns = totals.sweep_ns.saturating_add(sweep.sweep_ns);
        totals.longest_ns = totals.longest_ns.max(sweep.longest_ns);
        let elapsed = self.window.0.elapsed().as_secs_f64();
        if elapsed >= 2.0 {
            self.rate = (totals.pages - self.window.1) as f64 / elapsed;
            self.window = (Instant::now(), totals.pages);
        }
        if sweep.more {
            self.due = Instant::now();
        }
    }
}

impl State {
    /// The guest's RAM lies there: from now on it is recycled, and what it marks is not merged.
    pub(crate) fn set_extents(&mut self, extents: Vec<Extent>) {
        let Some(recycling) = &mut self.recycling else { return };
        recycling.due = Instant::now();
        let marks = recycling.marks.clone();
        recycling.extents = extents.clone();
        for (&id, region) in &mut self.regions {
            let own: Vec<Extent> = extents.iter().filter(|extent| extent.region == id).copied().collect();
            if !own.is_empty() {
                region.free = Some(FreePages::new(marks.clone(), own));
            }
        }
    }
}

impl Client {
    /// Its agent announced a pool.
    pub(super) fn add_pool(
        &self,
        state: &mut State,
        pool: Pool,
        fds: &mut Vec<OwnedFd>,
    ) -> Result<Next, ProtocolError> {
        let fd = fds.first().ok_or(ProtocolError::PoolWithoutDescriptor)?;
        if state.recycling.is_some() {
            return Err(ProtocolError::PoolTwice);
        }
        check_extents(state, &pool.extents)?;
        let period = match pool.period_ms {
            0 => self.reclaim_period,
            own => (f64::from(own) / 1000.0).clamp(crate::config::SHORTEST_PERIOD, 86_400.0),
        };
        let marks = match Marks::open(fd) {
            Ok(marks) => Arc::new(marks),
            Err(why) => {
                log_of!(self.user, warn, pid = self.pid, "not recycled: {why}");
                return Ok(Next::Reclaim);
            }
        };
        // An agent that knows where the RAM lies has served an earlier daemon, or a program that
        // marks pages of its own.
        let boots = pool.extents.is_empty();
        state.recycling = Some(Recycling::new(marks, Duration::from_secs_f64(period), boots));
        if !boots {
            state.set_extents(pool.extents);
            return Ok(Next::Reclaim);
        }
        if fds.len() < 2 {
            return Err(ProtocolError::PoolWithoutPlace);
        }
        Ok(Next::FindRam(fds.swap_remove(1)))
    }

    /// A sweep has ended.
    pub(super) fn swept(&self, state: &mut State, sweep: &Sweep) -> Result<Next, ProtocolError> {
        let recycling = state.recycling.as_mut().ok_or(ProtocolError::SweptWithoutPool)?;
        state.credit.grant(std::mem::take(&mut recycling.granted));
        state.totals.agent_cpu_ns += state.credit.charge(sweep.cpu_ns);
        let before = recycling.note.clone();
        recycling.swept(sweep);
        if let Some(why) = recycling.note.as_ref().filter(|why| before.as_ref() != Some(*why)) {
            log_of!(self.user, warn, pid = self.pid, "not recycled: {why}");
        }
        Ok(if sweep.more { Next::Reclaim } else { Next::Nothing })
    }
}

fn check_extents(state: &State, extents: &[Extent]) -> Result<(), ProtocolError> {
    let inside = |extent: &Extent| {
        let region = state.regions.get(&extent.region);
        region.is_some_and(|region| extent.run.end().0 <= region.pages)
    };
    // A region may have been given back since the agent learnt of it.
    match extents.iter().filter(|extent| state.regions.contains_key(&extent.region)).find(|extent| !inside(extent)) {
        Some(extent) => Err(ProtocolError::RamLeavesRegion(extent.region)),
        None => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ledger::free_pages::tests::{guest_side, pool};
    use rustix::fs::SealFlags;
    use wire::{PageNo, RegionId, Run};

    fn recycling(fd: &OwnedFd, extents: Vec<Extent>, booting: bool) -> Recycling {
        let marks = Arc::new(Marks::open(fd).unwrap());
        Recycling { extents, ..Recycling::new(marks, Duration::from_secs(1), booting) }
    }

    #[test]
    fn a_client_that_lies_about_its_sweeps_overflows_nothing() {
        let (fd, _map) = pool(SealFlags::SHRINK | SealFlags::GROW);
        let mut recycling =
            recycling(&fd, vec![Extent { frame: 256, region: RegionId(1), run: Run::new(PageNo(0), 50) }], false);
        recycling.window.0 = Instant::now() - Duration::from_secs(5);
        let lie = Sweep {
            pages: u64::MAX,
            runs: u64::MAX,
            lost: u64::MAX,
            sweep_ns: u64::MAX,
            longest_ns: u64::MAX,
            ..Sweep::default()
        };
        (0..3).for_each(|_| recycling.swept(&lie));
        assert_eq!(recycling.status().metrics.pages_recycled_total, 150);
        assert_eq!(recycling.totals.lost, 150);
    }

    #[test]
    fn a_guest_that_boots_is_awaited_until_it_marks_or_time_is_up() {
        let (fd, map) = pool(SealFlags::SHRINK | SealFlags::GROW);
        assert!(!recycling(&fd, Vec::new(), false).is_awaited(), "a program, or a second daemon");
        let mut late = recycling(&fd, Vec::new(), true);
        assert!(late.is_awaited());
        late.boots_until = Some(Instant::now());
        assert!(!late.is_awaited(), "time is up");
        let mut refused = recycling(&fd, Vec::new(), true);
        refused.note = Some("no RAM".into());
        assert!(!refused.is_awaited(), "it will never mark");
        let mut guest = recycling(&fd, Vec::new(), true);
        assert!(guest.is_awaited());
        guest_side(&map).set_guest_state(ppr::GuestState::Active);
        assert!(!guest.is_awaited(), "its module is there");
    }
}
