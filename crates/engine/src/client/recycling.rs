//! The recycling part of a client: its guest's marks, the place of the guest's RAM, and the results
//! of sweeps.
//!
//! An agent announces a pool once, with QEMU's monitor, and with the extents of the guest's RAM if
//! they are known. When the device is unplugged or plugged in, a new pool takes its place.
//!
//! The agent reports each run of pages that it has taken back, and the end of each sweep. The
//! ledger hears of every page: a recycled page leaves its frame or its place in the index, and
//! counts as recycled until the guest writes to it again. A page that is marked is no candidate
//! for merging ([`FreePages`]).

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::time::{Duration, Instant};

use control::{RecycleStatus, RecyclerMetrics, RecyclerState};
use kmem::PAGE_SIZE;
use wire::recycle::{Extent, Pool, Sweep};
use wire::{PageNo, Run};

use super::{Client, Next, ProtocolError, State};
use crate::config::bounds::SLICE;
use crate::core::ledger::free_pages::{FreePages, Marks};
use crate::core::recycle::device::SessionError;
use crate::users::{User, log_of};

/// How long a guest may take to boot and to load its module. Then its memory is merged though
/// nothing is marked.
const BOOT_TIME: Duration = Duration::from_secs(60);

/// QEMU's monitor. It is closed elsewhere: closing what a client sent may take for ever.
pub(crate) struct Monitor {
    fd: Option<OwnedFd>,
    user: Arc<User>,
}

impl Monitor {
    /// The socket.
    pub(crate) fn socket(&self) -> Option<BorrowedFd<'_>> {
        self.fd.as_ref().map(AsFd::as_fd)
    }
}

impl Drop for Monitor {
    fn drop(&mut self) {
        self.user.close(self.fd.take().into_iter().collect());
    }
}

/// A session with a client's monitor; there is one at a time.
pub(crate) struct Session {
    client: Arc<Client>,
    monitor: Arc<Monitor>,
}

impl Session {
    /// The socket.
    pub(crate) fn socket(&self) -> Option<BorrowedFd<'_>> {
        self.monitor.socket()
    }
}

impl Drop for Session {
    fn drop(&mut self) {
        if let Some(recycling) = &mut self.client.state().recycling {
            recycling.in_session = false;
        }
    }
}

/// The daemon's records of a client that has a pool.
pub(crate) struct Recycling {
    /// QEMU's monitor, if the agent of a QEMU has sent it.
    monitor: Option<Arc<Monitor>>,
    in_session: bool,
    /// The device is not plugged in.
    paused: bool,
    /// The number of the new pool's descriptor in the agent's process, once it has answered.
    pub(crate) renewed: Option<u32>,
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
    /// Of a guest that marks its free pages there. `boots`: it may be booting.
    pub(crate) fn new(marks: Arc<Marks>, period: Duration, boots: bool) -> Self {
        let now = Instant::now();
        Self {
            monitor: None,
            in_session: false,
            paused: false,
            renewed: None,
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

    /// The reclaim period of a guest: its own, in milliseconds, or, where that is 0, the daemon's,
    /// `usual`.
    pub(crate) fn period_of(own_ms: u32, usual: f64) -> Duration {
        Duration::from_secs_f64(match own_ms {
            0 => usual,
            own => (f64::from(own) / 1000.0).clamp(crate::config::SHORTEST_PERIOD, 86_400.0),
        })
    }

    /// The guest's RAM lies there.
    pub(crate) fn locate(&mut self, extents: Vec<Extent>) {
        self.due = Instant::now();
        self.extents = extents;
    }

    /// Whether it is known where the guest's RAM lies.
    pub(crate) fn is_located(&self) -> bool {
        !self.extents.is_empty()
    }

    /// Whether nothing can be recycled at present.
    pub(crate) fn is_refused(&self) -> bool {
        self.note.is_some()
    }

    /// Whether the device is not plugged in.
    pub(crate) fn is_paused(&self) -> bool {
        self.paused
    }

    /// Whether nothing will ever be recycled again.
    pub(crate) fn is_dropped(&self) -> bool {
        self.dropped
    }

    /// The length of the pool's file in bytes.
    pub(crate) fn pool_len(&self) -> u64 {
        self.marks.len()
    }

    /// The monitor, while no session needs what QEMU says.
    pub(crate) fn idle_monitor(&self) -> Option<BorrowedFd<'_>> {
        self.monitor.as_ref().filter(|_| !self.in_session).and_then(|monitor| monitor.socket())
    }

    /// Notes whether the device is out.
    pub(crate) fn set_paused(&mut self, paused: bool) {
        self.paused = paused;
        if !paused {
            self.due = Instant::now();
        }
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
            (true, ..) => RecyclerState::Dropped,
            (_, _, Some(_)) => RecyclerState::Refused,
            (_, true, _) => RecyclerState::Starting,
            _ if self.paused => RecyclerState::Paused,
            _ => RecyclerState::Recycling,
        };
        let totals = &self.totals;
        let idle = self.window.0.elapsed() > 5 * self.period;
        RecycleStatus {
            state,
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
            && !self.paused
            && self.totals.sweeps == 0
            && self.marks.guest_starts() == 0;
        if !awaited {
            self.boots_until = None;
        }
        awaited
    }

    /// A sweep has ended.
    pub(crate) fn swept(&mut self, sweep: &Sweep) {
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
        let marks = recycling.marks.clone();
        recycling.locate(extents.clone());
        for (&id, region) in &mut self.regions {
            let own: Vec<Extent> = extents.iter().filter(|extent| extent.region == id).copied().collect();
            if !own.is_empty() {
                region.free = Some(FreePages::new(marks.clone(), own));
            }
        }
    }
}

impl Client {
    /// Begins a session with its QEMU's monitor.
    pub(crate) fn session(self: &Arc<Self>) -> Result<Session, SessionError> {
        let mut state = self.state();
        let found = state.recycling.as_mut().and_then(|recycling| Some((recycling.monitor.clone()?, recycling)));
        let (monitor, recycling) = found.ok_or(SessionError::NoMonitor(self.pid))?;
        if std::mem::replace(&mut recycling.in_session, true) {
            return Err(SessionError::Busy(self.pid));
        }
        drop(state);
        Ok(Session { client: self.clone(), monitor })
    }

    /// The client has a new, empty pool.
    pub(super) fn renew_pool(
        &self,
        state: &mut State,
        descriptor: u32,
        fds: &[OwnedFd],
    ) -> Result<Next, ProtocolError> {
        let fd = fds.first().ok_or(ProtocolError::PoolWithoutDescriptor)?;
        let recycling = state.recycling.as_mut().ok_or(ProtocolError::RenewedWithoutPool)?;
        match Marks::open(fd) {
            Ok(marks) => recycling.marks = Arc::new(marks),
            Err(why) => {
                log_of!(self.user, warn, pid = self.pid, "not recycled: {why}");
                return Ok(Next::Nothing);
            }
        }
        recycling.renewed = Some(descriptor);
        let extents = std::mem::take(&mut recycling.extents);
        state.set_extents(extents);
        Ok(Next::Reclaim)
    }

    /// Pages that count as recycled are ordinary ones again.
    pub(crate) fn forget_recycled(&self) {
        let regions: Vec<_> = self.state().regions.iter().map(|(&id, region)| (id, region.pages)).collect();
        for (id, pages) in regions {
            for first in (0..pages).step_by(SLICE as usize) {
                let mut state = self.state();
                let Some(region) = state.regions.get_mut(&id) else { break };
                region.forget_recycled(Run::new(PageNo(first), SLICE.min(pages - first)));
            }
        }
    }

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
        let period = Recycling::period_of(pool.period_ms, self.reclaim_period);
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
        if boots && fds.len() < 2 {
            return Err(ProtocolError::PoolWithoutPlace);
        }
        let mut recycling = Recycling::new(marks, period, boots);
        let fd = (fds.len() > 1).then(|| fds.swap_remove(1));
        recycling.monitor = fd.map(|fd| Arc::new(Monitor { fd: Some(fd), user: self.user.clone() }));
        let has_monitor = recycling.monitor.is_some();
        state.recycling = Some(recycling);
        state.set_extents(pool.extents);
        Ok(if has_monitor { Next::AskMonitor } else { Next::Reclaim })
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
    use crate::core::ledger::free_pages::tests::{guest_side, pool};
    use rustix::fs::SealFlags;
    use wire::RegionId;

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
