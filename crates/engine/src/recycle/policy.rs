//! Recycling: when agents are to take back what their guests have marked as free, and what came of
//! it.
//!
//! The work is the agent's, in the client's own process (see `ppr` on why). Here is the policy:
//! each *reclaim period* the daemon looks at the summary of a client's pool, 4 KiB for 8 GiB of
//! guest; where it says that something is marked, the agent is asked for a sweep, with as much CPU
//! time as the budget that merging and recycling share allows. Recycling goes first, being some
//! hundred times cheaper for a page: what it uses is charged to the budget, and merging waits.
//!
//! The ledger is told of every page: a recycled page leaves its frame or its place in the index,
//! and is counted as recycled until the guest writes to it again. A page that is marked is never
//! looked at for merging ([`FreePages`]).
//!
//! Where the guest's RAM lies is found out once, by QMP ([`crate::recycle::qmp`]), on a thread of its own;
//! then the agent keeps it, also for later daemons.

#![allow(unsafe_code)] // Memory that a guest writes.

use std::collections::BTreeMap;
use std::os::fd::OwnedFd;
use std::ptr::NonNull;
use std::sync::Arc;
use std::time::{Duration, Instant};

use kmem::PAGE_SIZE;
use kmem::memfd::{self, SharedMap};
use rustix::fs::SealFlags;
use wire::recycle::{Extent, Recycled, Sweep};
use wire::{PageNo, RegionId, Run, ToAgent, ToDaemon};

use crate::client::{Client, State};
use crate::daemon::service::Shared;
use crate::ledger::Region;
use crate::recycle::qmp;

/// Why RAM that QEMU has is not recycled.
const UNMANAGED: &str = "none of it is memory that the agent manages. RAM that other processes map (share=on, as vhost-user and virtiofsd \
    need) and RAM that is not to be merged (mem-merge=off, merge=off) cannot be taken back: start QEMU without these, or use \
    virtio-balloon's free-page-reporting=on instead of --ppr";
/// How long a QEMU that starts may take to answer.
const QMP_TIME: Duration = Duration::from_secs(120);
/// An agent that has not answered for so long is asked again.
const PATIENCE: Duration = Duration::from_secs(10);
/// How often a client is looked at whose guest's RAM is not found yet.
const START_STEP: Duration = Duration::from_millis(200);
/// How long a guest may take to boot and to load its module, before its memory is merged though
/// nothing is marked.
const BOOT_TIME: Duration = Duration::from_secs(60);
/// The part of a reclaim period after which marks are looked for: what is left of it is for the
/// work.
const LOOK_AFTER: f64 = 0.8;
/// The part of a reclaim period that one sweep may take where there is no other limit.
const SWEEP_SHARE: f64 = 0.5;

/// Why the marks of a guest cannot be read.
#[derive(Debug, thiserror::Error)]
pub(crate) enum MarksError {
    #[error("its pool is no memfd: {0}")]
    NoMemfd(std::io::Error),
    #[error("its pool can shrink or grow")]
    Unsealed,
    #[error("the length of its pool is not known: {0}")]
    Length(rustix::io::Errno),
    #[error("its pool cannot be mapped: {0}")]
    Map(memfd::MemfdError),
    #[error("its pool is mapped at address 0")]
    Null,
    #[error(transparent)]
    Pool(#[from] ppr::PoolError),
}

/// The marks of one guest, mapped read-only.
pub(crate) struct Marks {
    /// Declared before the map: fields are dropped in this order, and the pool lies in the map.
    host: ppr::Host<Box<ppr::Pool>>,
    _map: SharedMap,
}

impl Marks {
    /// Maps a pool that an agent sent.
    fn open(fd: &OwnedFd) -> Result<Self, MarksError> {
        let seals = memfd::seals(fd).map_err(MarksError::NoMemfd)?;
        if !seals.contains(SealFlags::SHRINK | SealFlags::GROW) {
            return Err(MarksError::Unsealed);
        }
        let len = rustix::fs::fstat(fd).map_err(MarksError::Length)?.st_size;
        let map = memfd::map_readonly(fd, usize::try_from(len).unwrap_or(0)).map_err(MarksError::Map)?;
        let start = NonNull::new(map.as_ptr()).ok_or(MarksError::Null)?;
        // SAFETY: `map.len()` bytes from `start` are mapped for as long as `map` lives. `Marks` owns both and
        // drops the pool first; neither leaves it. The seals keep the file from shrinking, so no access
        // raises SIGBUS. Nothing else in this process uses the mapping. It is read-only, and a store to it
        // would fault: of the pool only `layout` and `read`, of the host only `is_free`, `pending` and
        // `pool` are called, and these load and never store.
        let pool = unsafe { ppr::Pool::from_mapping(start, map.len()) }?;
        Ok(Self { host: ppr::Host::new(Box::new(pool), ppr::Ram::default()), _map: map })
    }

    fn bytes(&self) -> u64 {
        self.host.pool().layout().bytes as u64
    }

    /// How often the guest says that its driver has started.
    fn guest_starts(&self) -> u64 {
        self.host.pool().read(ppr::Field::GuestStarts)
    }
}

/// The free pages of one region.
#[derive(Clone)]
pub(crate) struct FreePages {
    marks: Arc<Marks>,
    /// Of this region, ascending by page.
    extents: Vec<Extent>,
}

impl FreePages {
    /// Whether the guest has marked the page as free.
    pub(crate) fn contains(&self, page: PageNo) -> bool {
        let at = self.extents.partition_point(|extent| extent.run.end() <= page);
        let found = self.extents.get(at).filter(|extent| extent.run.page <= page);
        found.is_some_and(|extent| self.marks.host.is_free(extent.frame + u64::from(page - extent.run.page)))
    }
}

/// What the daemon keeps of a client that has a pool.
pub(crate) struct Recycling {
    marks: Arc<Marks>,
    extents: Vec<Extent>,
    period: Duration,
    /// When to look next.
    due: Instant,
    /// A sweep was asked for then, and has not ended.
    asked: Option<Instant>,
    /// Why nothing is recycled, for people.
    note: Option<String>,
    /// For good.
    dropped: bool,
    /// Until when its guest may be booting.
    boots_until: Option<Instant>,
    pub(crate) totals: Totals,
    /// Pages and time at the last two looks, for the rate.
    window: (Instant, u64),
    rate: f64,
}

/// Sums over a client's life, as far as this daemon knows it.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Totals {
    pub(crate) pages: u64,
    pub(crate) runs: u64,
    pub(crate) lost: u64,
    pub(crate) sweeps: u64,
    pub(crate) sweep_ns: u64,
    pub(crate) longest_ns: u64,
}

/// What `status` says of recycling in one client.
#[derive(Clone, Debug, Default, PartialEq, serde::Serialize, serde::Deserialize)]
pub struct RecycleStatus {
    /// `recycling`, `starting`, `refused` or `dropped`.
    pub state: String,
    /// Why it does not recycle.
    pub why: Option<String>,
    /// Guest memory that can be recycled, in bytes.
    pub managed_bytes: u64,
    /// Bytes of the pool.
    pub pool_bytes: u64,
    /// Reclaim period, in seconds.
    pub reclaim_period_seconds: f64,
    /// Pages taken back so far.
    pub pages_recycled_total: u64,
    /// Pages taken back a second, over the last seconds.
    pub pages_recycled_per_second: f64,
    /// Runs that they came in.
    pub runs_total: u64,
    /// Pages that the guest took back itself between the look and the claim.
    pub pages_lost_total: u64,
    /// Sweeps so far.
    pub sweeps_total: u64,
    /// CPU time of all sweeps, in seconds.
    pub sweep_seconds: f64,
    /// The longest that pages were claimed, in microseconds.
    pub claim_max_us: u64,
}

impl Recycling {
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
        }
    }

    /// Whether the guest will soon tell which of its pages are free. Until then most of what could
    /// be merged is what booting has left behind: frames that nobody would map any more a
    /// moment later, and whose memory the store would keep.
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
        self.asked = None;
        self.note = sweep.refused.map(|why| why.to_string());
        self.dropped |= sweep.refused.is_some_and(wire::recycle::Refusal::is_final);
        // A sweep passes each page once. Whatever a client says, sums stay far from overflow.
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

/// What a message of an agent leads to.
pub(crate) enum Reply {
    /// It was about recycling, and is done.
    Done {
        /// [`tick`] has something to do.
        due: bool,
    },
    /// It has nothing to do with recycling.
    Other(ToDaemon),
}

/// Applies a message if it is about recycling. `Err` says what was wrong with it; the connection is
/// then closed.
pub(crate) fn apply(
    shared: &Arc<Shared>,
    client: &Arc<Client>,
    message: ToDaemon,
    fds: Vec<OwnedFd>,
) -> Result<Reply, String> {
    match message {
        ToDaemon::Pool(pool) => {
            take_pool(shared, client, pool, fds)?;
            return Ok(Reply::Done { due: true });
        }
        ToDaemon::Recycled(recycled) => client.recycled(&recycled)?,
        ToDaemon::Swept(sweep) => {
            let mut state = client.state();
            state.totals.agent_cpu_ns = state.totals.agent_cpu_ns.max(sweep.cpu_ns);
            let Some(recycling) = &mut state.recycling else { return Err("it swept without a pool".into()) };
            let before = recycling.note.clone();
            recycling.swept(&sweep);
            if let Some(why) = recycling.note.as_ref().filter(|why| before.as_ref() != Some(*why)) {
                tracing::warn!(pid = client.pid, "not recycled: {why}");
            }
            return Ok(Reply::Done { due: sweep.more });
        }
        other => return Ok(Reply::Other(other)),
    }
    Ok(Reply::Done { due: false })
}

fn take_pool(
    shared: &Arc<Shared>,
    client: &Arc<Client>,
    pool: wire::recycle::Pool,
    fds: Vec<OwnedFd>,
) -> Result<(), String> {
    let mut fds = fds.into_iter();
    let fd = fds.next().ok_or("a pool came without its descriptor")?;
    let mut state = client.state();
    if state.recycling.is_some() {
        return Err("it announced a pool twice".into());
    }
    check_extents(&state, &pool.extents)?;
    let period = match pool.period_ms {
        0 => shared.config.reclaim_period,
        own => (f64::from(own) / 1000.0).clamp(crate::config::SHORTEST_PERIOD, 86_400.0),
    };
    let marks = match Marks::open(&fd) {
        Ok(marks) => Arc::new(marks),
        Err(why) => {
            tracing::warn!(pid = client.pid, "not recycled: {why}");
            return Ok(());
        }
    };
    let now = Instant::now();
    state.recycling = Some(Recycling {
        marks,
        extents: Vec::new(),
        period: Duration::from_secs_f64(period),
        due: now,
        asked: None,
        note: None,
        dropped: false,
        // An agent that knows where the RAM lies has served an earlier daemon, or a program that marks pages of its
        // own.
        boots_until: pool.extents.is_empty().then(|| now + BOOT_TIME),
        totals: Totals::default(),
        window: (now, 0),
        rate: 0.0,
    });
    if !pool.extents.is_empty() {
        set_extents(&mut state, pool.extents);
        return Ok(());
    }
    drop(state);
    let Some(qmp) = fds.next() else { return Err("a pool came without extents and without QMP".into()) };
    let (shared, of) = (shared.clone(), client.clone());
    let ask = move || {
        let found = qmp::find_ram(qmp, QMP_TIME).map_err(|e| e.to_string()).and_then(|ram| {
            // Frames that the pool has no room for are nobody's.
            let extents = extents_of(&of.state().regions, &ram);
            let all = ram.iter().map(|ram| (ram.end - ram.start) / PAGE_SIZE as u64).fold(0, u64::saturating_add);
            let managed: u64 = extents.iter().map(|extent| u64::from(extent.run.len)).sum();
            let unmanaged = all.saturating_sub(managed);
            match extents.is_empty() {
                true => Err(UNMANAGED.into()),
                false => Ok((extents, unmanaged)),
            }
        });
        match found {
            Ok((extents, unmanaged)) => {
                if unmanaged > 0 {
                    let mib = (unmanaged * PAGE_SIZE as u64) >> 20;
                    tracing::warn!(pid = of.pid, "{mib} MiB of its guest's RAM are not recycled: {UNMANAGED}");
                }
                let message = wire::encode(&ToAgent::Ram(extents.clone()));
                let sent = send_patiently(&shared, &of, &message);
                if sent {
                    set_extents(&mut of.state(), extents);
                }
            }
            Err(why) => {
                tracing::warn!(pid = of.pid, "not recycled: {why}");
                if let Some(recycling) = &mut of.state().recycling {
                    recycling.note = Some(why);
                }
            }
        }
    };
    if let Err(e) = std::thread::Builder::new().name("memory-map".into()).spawn(ask) {
        tracing::warn!(pid = client.pid, "not recycled: no thread to ask QEMU with: {e}");
    }
    Ok(())
}

fn send_patiently(shared: &Shared, client: &Client, message: &[u8]) -> bool {
    let deadline = Instant::now() + PATIENCE;
    while !shared.stopping() && Instant::now() < deadline && client.state().connected {
        match client.conn.send(message, &[]) {
            Ok(()) => return true,
            Err(e) if e.kind() == std::io::ErrorKind::WouldBlock => std::thread::sleep(Duration::from_millis(5)),
            Err(_) => return false,
        }
    }
    false
}

fn check_extents(state: &State, extents: &[Extent]) -> Result<(), String> {
    let inside = |extent: &Extent| {
        let region = state.regions.get(&extent.region);
        region.is_some_and(|region| extent.run.end().0 <= region.pages)
    };
    // A region may have been given back since the agent learnt of it.
    match extents.iter().filter(|extent| state.regions.contains_key(&extent.region)).find(|extent| !inside(extent)) {
        Some(extent) => Err(format!("its guest's RAM leaves region {}", extent.region)),
        None => Ok(()),
    }
}

/// The parts of RAM that lie in regions.
fn extents_of(regions: &BTreeMap<RegionId, Region>, ram: &[qmp::Ram]) -> Vec<Extent> {
    let page = PAGE_SIZE as u64;
    let mut extents = Vec::new();
    for ram in ram {
        for (&id, region) in regions {
            let (first, end) = (
                region.start.max(ram.host),
                // What QEMU says may be anything.
                (region.start + u64::from(region.pages) * page).min(ram.host.saturating_add(ram.end - ram.start)),
            );
            if first < end {
                extents.push(Extent {
                    frame: (ram.start + (first - ram.host)) / page,
                    region: id,
                    run: Run::new(PageNo(((first - region.start) / page) as u32), ((end - first) / page) as u32),
                });
            }
        }
    }
    extents.sort_by_key(|extent| extent.frame);
    extents.truncate(wire::recycle::MAX_EXTENTS);
    extents
}

fn set_extents(state: &mut State, extents: Vec<Extent>) {
    let Some(recycling) = &mut state.recycling else { return };
    recycling.due = Instant::now();
    let marks = recycling.marks.clone();
    recycling.extents = extents.clone();
    for (&id, region) in &mut state.regions {
        let mut own: Vec<Extent> = extents.iter().filter(|extent| extent.region == id).copied().collect();
        own.sort_by_key(|extent| extent.run.page);
        if !own.is_empty() {
            region.free = Some(FreePages { marks: marks.clone(), extents: own });
        }
    }
}

impl Client {
    /// Pages were recycled: whatever they were, they are untouched memory now.
    fn recycled(&self, recycled: &Recycled) -> Result<(), String> {
        let mut state = self.state();
        for &run in &recycled.runs {
            let region = Self::checked(&mut state, recycled.region, run)?;
            region.recycle(run, |page, entry| self.drop_entry(recycled.region, page, entry));
        }
        Ok(())
    }
}

/// Asks for the sweeps that are due. Returns when to come again; `None`: nobody has a pool.
pub(crate) fn tick(shared: &Shared) -> Option<Instant> {
    let now = Instant::now();
    let mut next: Option<Instant> = None;
    for client in shared.clients() {
        let mut state = client.state();
        let connected = state.connected && !state.detached;
        let Some(recycling) = state.recycling.as_mut().filter(|recycling| connected && !recycling.dropped) else {
            continue;
        };
        if recycling.extents.is_empty() {
            // QEMU is being asked, or has been in vain.
            recycling.due = now + START_STEP;
            if recycling.note.is_none() {
                next = Some(next.map_or(recycling.due, |next| next.min(recycling.due)));
            }
            continue;
        }
        let waits = recycling.asked.is_some_and(|asked| now < asked + PATIENCE);
        if now >= recycling.due {
            recycling.due = now + recycling.period.mul_f64(LOOK_AFTER);
            let end = recycling.extents.last().map_or(0, |extent| extent.frames().end);
            let work = !waits && recycling.marks.host.pending(end) > 0;
            if work && let Some(budget) = shared.pacer.allowance(recycling.period.mul_f64(SWEEP_SHARE)) {
                let message = wire::encode(&ToAgent::Recycle { budget_ns: budget.as_nanos() as u64 });
                // A full socket: next time.
                if client.conn.send(&message, &[]).is_ok() {
                    recycling.asked = Some(now);
                }
            }
        }
        next = Some(next.map_or(recycling.due, |next| next.min(recycling.due)));
    }
    shared.charge_agents();
    next
}

#[cfg(test)]
mod tests {
    use super::*;
    use rustix::fs::MemfdFlags;

    /// A pool in a memfd, and the guest's side of it.
    fn pool(seals: SealFlags) -> (OwnedFd, SharedMap) {
        let fd = rustix::fs::memfd_create("pool", MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING).unwrap();
        rustix::fs::ftruncate(&fd, 1 << 20).unwrap();
        rustix::fs::fcntl_add_seals(&fd, seals).unwrap();
        let map = memfd::map_shared(&fd, 1 << 20).unwrap();
        (fd, map)
    }

    fn guest_side(map: &SharedMap) -> ppr::Pool {
        // SAFETY: mapped until the end of the test.
        unsafe { ppr::Pool::from_mapping(NonNull::new(map.as_ptr()).unwrap(), map.len()) }.unwrap()
    }

    #[test]
    fn pages_that_are_marked_are_no_candidates() {
        let (fd, map) = pool(SealFlags::SHRINK | SealFlags::GROW);
        let pool = guest_side(&map);
        let guest = ppr::Guest::new(&pool);
        let extents = vec![
            Extent { frame: 256, region: RegionId(1), run: Run::new(PageNo(0), 50) },
            Extent { frame: 1000, region: RegionId(1), run: Run::new(PageNo(60), 40) },
        ];
        let mut region = Region::new(0, 100).unwrap();
        region.free = Some(FreePages { marks: Arc::new(Marks::open(&fd).unwrap()), extents });
        region.mark_written(Run::new(PageNo(0), 100));
        (0..3).for_each(|_| region.end_scan());
        guest.mark(256 + 10..256 + 20);
        guest.mark(1000..1005);
        guest.mark(1050..1100);
        let mut found = Vec::new();
        region.candidates(PageNo(0), 12, &mut found);
        assert_eq!(found, [0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 20, 21].map(PageNo), "as many as were asked for");
        region.candidates(PageNo(0), 100, &mut found);
        let expected: Vec<PageNo> = (0..10).chain(20..60).chain(65..100).map(PageNo).collect();
        assert_eq!(found, expected);
        assert!(region.guess(PageNo(3)), "in use");
        guest.mark(256 + 5..256 + 6);
        assert!(!region.guess(PageNo(5)), "freed since");
        // What was marked, and is used again, comes back when it is written.
        guest.cancel(256 + 10..256 + 20, || true).unwrap();
        region.mark_written(Run::new(PageNo(12), 1));
        (0..3).for_each(|_| region.end_scan());
        region.candidates(PageNo(8), 4, &mut found);
        assert_eq!(found, [8, 9, 12, 20].map(PageNo));
    }

    fn recycling(fd: &OwnedFd, extents: Vec<Extent>, booting: bool) -> Recycling {
        let now = Instant::now();
        Recycling {
            marks: Arc::new(Marks::open(fd).unwrap()),
            extents,
            period: Duration::from_secs(1),
            due: now,
            asked: None,
            note: None,
            dropped: false,
            boots_until: booting.then(|| now + BOOT_TIME),
            totals: Totals::default(),
            window: (now, 0),
            rate: 0.0,
        }
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
        assert_eq!(recycling.status().pages_recycled_total, 150);
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

    #[test]
    fn a_pool_that_can_shrink_is_refused() {
        let (fd, _map) = pool(SealFlags::GROW);
        assert!(matches!(Marks::open(&fd), Err(MarksError::Unsealed)));
        let file = tempfile::tempfile().unwrap();
        assert!(Marks::open(&file.into()).is_err(), "no memfd");
    }

    #[test]
    fn ram_is_cut_at_regions() {
        let page = PAGE_SIZE as u64;
        let region = |start: u64, pages| Region::new(start * page, pages).unwrap();
        let regions = [(RegionId(1), region(1000, 100)), (RegionId(2), region(1200, 50))].into();
        let ram = [
            qmp::Ram { start: 256 * page, end: 356 * page, host: 1000 * page },
            qmp::Ram { start: 1 << 32, end: (1 << 32) + 300 * page, host: 1050 * page },
        ];
        let extent =
            |frame, region, page, len| Extent { frame, region: RegionId(region), run: Run::new(PageNo(page), len) };
        let above = (1 << 32) / page;
        let absurd = qmp::Ram { start: 0, end: 2 * page, host: u64::MAX - page + 1 };
        assert!(extents_of(&regions, &[absurd]).is_empty());
        assert_eq!(
            extents_of(&regions, &ram),
            [extent(256, 1, 0, 100), extent(above, 1, 50, 50), extent(above + 150, 2, 0, 50)]
        );
    }
}
