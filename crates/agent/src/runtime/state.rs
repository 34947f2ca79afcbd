//! Everything the agent knows, behind one lock.

use crate::daemon::batch::Maps;
use crate::daemon::outbox::Outbox;
use crate::intercept::watch::Watch;
use crate::recycle::Recycler;
use crate::runtime::lock::Lock;
use crate::runtime::regions::{Pages, Region, Sticky};
use crate::runtime::sabotage::{self, Sabotage};
use crate::window::pins::Waiting;
use kmem::memfd::SharedMap;
use kmem::range::Range;
use kmem::seqpacket::Conn;
use kmem::uffd::Uffd;
use std::os::fd::{AsRawFd, OwnedFd, RawFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicI32, AtomicU8, Ordering};
use wire::{RegionId, SegmentId, ToDaemon, control};

/// The state; see [`Lock`].
pub static STATE: Lock<State> = Lock::new(State::new());
/// The managed memory, for questions without the lock.
pub static WATCH: Watch = Watch::new();

/// Nothing was marked yet.
pub const IDLE: u8 = 0;
/// The threads run, and memory that the program marks is taken.
pub const RUNNING: u8 = 1;
/// No memory is taken any more: not possible here, given back, or this is a forked child. The
/// guards go on.
pub const ENDED: u8 = 2;
/// One of the three.
pub static PHASE: AtomicU8 = AtomicU8::new(IDLE);

/// A segment of a store, held to map frames of it.
pub struct Segment {
    /// Its name on the wire.
    pub id: SegmentId,
    /// Its memfd, sealed.
    pub fd: OwnedFd,
    /// All of it, to compare with.
    pub map: SharedMap,
}

/// See the module.
pub struct State {
    /// What is managed.
    pub regions: Vec<Region>,
    next_region: RegionId,
    /// The userfaultfd with `WP_ASYNC`: managed memory is registered with it whenever no window is
    /// open over it.
    pub tracking: Option<Arc<Uffd>>,
    /// The userfaultfd of the windows: who writes to what it protects, waits.
    pub waiting: Option<Waiting>,
    /// Parts that could not be registered again after a window; tried again later.
    pub untracked: Vec<Range>,
    /// What the daemon sent.
    pub segments: Vec<Segment>,
    /// What waits to be sent.
    pub outbox: Outbox,
    /// The connection, kept here so that a forked child can close it.
    pub conn: Option<Conn>,
    /// The page shared with the daemon.
    pub control: Option<SharedMap>,
    /// Forks that may have copied mappings of frames.
    pub forks: u64,
    /// How many mappings the process has, and may have.
    pub maps: Maps,
    /// The pool that free pages are marked in.
    pub recycler: Option<Recycler>,
}

impl State {
    const fn new() -> State {
        State {
            regions: Vec::new(),
            next_region: RegionId(1),
            tracking: None,
            waiting: None,
            untracked: Vec::new(),
            segments: Vec::new(),
            outbox: Outbox::new(),
            conn: None,
            control: None,
            forks: 0,
            maps: Maps::new(),
            recycler: None,
        }
    }

    /// Where a region is in the table.
    pub fn position(&self, id: RegionId) -> Option<usize> {
        self.regions.iter().position(|region| region.id == id)
    }

    /// The managed parts of a range.
    pub fn pieces(&self, range: Range) -> Vec<(RegionId, Pages)> {
        let parts = |region: &Region| region.managed_in(range).map(|part| (region.id, part)).collect::<Vec<_>>();
        self.regions.iter().flat_map(parts).collect()
    }

    /// The addresses of a part of a region.
    pub fn bytes(&self, id: RegionId, pages: Pages) -> Option<Range> {
        self.position(id).map(|index| self.regions[index].bytes(pages))
    }

    /// Takes a range under management: registers it and tells the daemon.
    pub fn adopt(&mut self, range: Range, sticky: Sticky) -> Result<RegionId, &'static str> {
        let tracking = self.tracking.as_ref().ok_or("no userfaultfd")?;
        let id = self.next_region;
        let region = Region::new(id, range, sticky).ok_or("no memory for its bitmap")?;
        tracking.register_wp(range).map_err(|_| "it cannot be registered with userfaultfd")?;
        self.next_region.0 += 1;
        self.regions.push(region);
        self.outbox.push(ToDaemon::RegionAdded { region: id, start: range.start as u64, len: range.len as u64 });
        self.rewatch();
        Ok(id)
    }

    /// Takes a part out of management; it must map no frame any more, or not be there.
    pub fn give_up(&mut self, id: RegionId, pages: Pages) {
        let Some(index) = self.position(id) else { return };
        self.regions[index].drop_pages(pages);
        self.outbox.push(ToDaemon::RegionShrunk { region: id, run: pages.into() });
        if self.regions[index].managed().is_empty() {
            self.regions.swap_remove(index);
        }
        self.rewatch();
    }

    fn rewatch(&self) {
        let parts = |region| Region::managed(region).iter().map(|&part| region.bytes(part));
        WATCH.set(self.regions.iter().flat_map(parts));
    }

    /// Whether a fork copies mappings of managed memory.
    pub fn is_inherited(&self) -> bool {
        self.regions.iter().any(Region::is_inherited)
    }

    /// Counts a fork that copied, or is about to copy, mappings of managed memory.
    pub fn count_fork(&mut self) {
        if sabotage::is_on(Sabotage::NoForkCount) {
            return;
        }
        self.forks += 1;
        if let Some(page) = &self.control {
            // Not stored: a forked child counts its own children in the same page.
            page.atomic_u64(control::FORKS).fetch_add(1, Ordering::SeqCst);
        }
    }

    /// Ends the connection and forgets what waited for it.
    pub fn disconnect(&mut self) {
        self.conn = None;
        self.outbox.close();
        self.control = None;
    }
}

/// A fork is between its handlers: the forking thread holds the lock and waits for the event
/// thread.
pub static FORKING: AtomicBool = AtomicBool::new(false);
/// The event thread holds events that it has not acted upon yet.
pub static STASHED: AtomicBool = AtomicBool::new(false);

/// Eventfds, as numbers, so that they can be signalled without the lock and closed in a forked
/// child; -1 without one.
static WAKE: AtomicI32 = AtomicI32::new(-1);
static STOP: AtomicI32 = AtomicI32::new(-1);
static SPARE: AtomicI32 = AtomicI32::new(-1);
static WOKEN: AtomicBool = AtomicBool::new(false);

/// Sets the eventfds that wake the agent thread and stop the event thread.
pub fn set_eventfds(wake: RawFd, stop: RawFd) {
    WAKE.store(wake, Ordering::Release);
    STOP.store(stop, Ordering::Release);
}

/// Sets the descriptor that the event thread keeps to make room with; -1 for none.
pub fn set_spare(fd: RawFd) {
    SPARE.store(fd, Ordering::Release);
}

/// Takes the eventfds away; returns those that were there.
pub fn take_eventfds() -> impl Iterator<Item = RawFd> {
    [&WAKE, &STOP, &SPARE].map(|fd| fd.swap(-1, Ordering::AcqRel)).into_iter().filter(|&fd| fd >= 0)
}

/// Tells the agent thread that messages wait.
pub fn wake() {
    let fd = WAKE.load(Ordering::Acquire);
    if fd >= 0 && !WOKEN.swap(true, Ordering::AcqRel) {
        signal(fd);
    }
}

/// The agent thread looks for messages now; later ones wake it again.
pub fn woken() {
    WOKEN.store(false, Ordering::Release);
}

/// Tells the event thread to end.
pub fn stop() {
    signal(STOP.load(Ordering::Acquire));
}

/// Makes an eventfd readable.
#[allow(unsafe_code)] // See `WAKE`.
fn signal(fd: RawFd) {
    let one = 1u64;
    // SAFETY: the buffer is eight readable bytes; a descriptor that is closed answers EBADF.
    unsafe { libc::write(fd, (&raw const one).cast(), 8) };
}

/// The number of a descriptor, for polling.
pub fn number(fd: &impl AsRawFd) -> RawFd {
    fd.as_raw_fd()
}
