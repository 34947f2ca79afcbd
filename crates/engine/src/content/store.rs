//! The store: where a domain's shared frames live.
//!
//! A store is a growing list of *segments*, sealed memfds of 64 MiB each. The daemon writes a frame
//! through the one writable mapping that existed before the seals (`F_SEAL_FUTURE_WRITE`); clients
//! get the file descriptor and can map it, privately, and read it; nobody can open another way to
//! write.
//!
//! Those seals forbid hole punching too (also to us: the kernel refuses `fallocate(PUNCH_HOLE)` and
//! `MADV_REMOVE` with `EPERM`), which is as well: a hole under a mapping that somebody still has
//! would be zeros in a guest. A frame whose last user left is *reused*, after a quarantine, and a
//! segment whose last frame went is closed, which gives its memory back at the very moment that the
//! kernel sees no mapping of it. No count of ours has to be right for that.
//!
//! ```text
//! slot:  free ──reserve──▶ reserved ──publish──▶ refs ≥ 1 ──last user left──▶ quarantine ──time──▶ free
//!                                                  │  ▲
//!                                   fork of a user │  └ more users (try_ref)
//!                                                  ▼
//!                                                pinned: never reused; goes with its segment
//! ```
//!
//! *Placement.* Runs of pages should stay runs of frames, since each run costs the client one
//! mapping. A worker reserves up to 512 consecutive slots, from a place drawn at random (so that an
//! attacker cannot aim at neighbouring frames), and fills them in the order of the pages that ask;
//! what it leaves over, the next one fills. What was used before has memory, which cannot
//! be given back alone: places with it come first, as long as they are not mere crumbs.
//!
//! *Huge pages.* A piece of 512 slots of which none was used becomes a huge page at one stroke
//! where the kernel has one (`MADV_COLLAPSE`; `/sys/kernel/mm/transparent_hugepage/shmem_enabled`
//! set to `deny` forbids it). It is taken, cleared and mapped as a whole: neither the daemon that
//! writes frames nor the agent that compares with them takes a page fault for each, which was most
//! of what a frame cost.
//!
//! *Filling.* Where there is no huge page, and the contents of the next frames can be told, slots
//! get memory and bytes in one call for all of them (`UFFDIO_COPY`): pages are not cleared first,
//! and the daemon takes no faults. They are frames only when somebody asks for just these bytes.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering::*};
use std::time::{Duration, Instant};

use dirty::{DirtyTree, NewError};
use kmem::PAGE_SIZE;
use kmem::memfd::{self, SharedMap};
use kmem::uffd::Uffd;
use parking_lot::{Mutex, RwLock, RwLockReadGuard};
use wire::{SEGMENT_PAGES, SegmentId};

use crate::content::frame::{Frame, NO_HANDLE};

mod free;
#[cfg(test)]
mod tests;

use free::{ALL_FRESH, Free, HUGE, run_length};

/// Slots that are given memory at once when a cursor comes to them and there is no huge page.
const POPULATE: u32 = 128;
/// How long no huge page is asked for after the kernel had none.
const REFUSED: Duration = Duration::from_secs(10);
/// CPU time that a huge page may cost; 0.2 ms is usual. In a virtual machine whose free memory its
/// host takes back (free page reporting, above all of huge pages), the host has to find it again
/// first: 5 ms were seen. Single pages, used a moment ago by somebody else, come cheaper there.
const HUGE_COST: Duration = Duration::from_millis(1);
/// After one that was dearer none is asked for so many times as long: those that merging gives back
/// come cheap again.
const HUGE_PAUSE: u32 = 20;
/// The longest run of slots that one cursor reserves.
const EXTENT: u32 = 512;
/// So many slots in a row that have memory are better than more of them without.
const CRUMBS: u32 = 32;
/// How long it holds that there is enough memory left: at a gigabyte a second, the most that is
/// written, ten megabytes.
const CHECK_EVERY: Duration = Duration::from_millis(10);
/// Set in a frame's reference count: a child of a user may map it, so its slot is never reused.
const PINNED: u32 = 1 << 31;
/// So many stretches that are begun are remembered; each worker has one.
const BEGUN: usize = 64;
/// Why the store can take no more frames for now.
#[derive(Debug, thiserror::Error)]
pub(crate) enum GrowError {
    #[error(
        "the daemon's memory cgroup leaves {left_mib} MiB; merging waits until there are {reserve_mib} MiB (raise the limit, or give the daemon a cgroup of its own)"
    )]
    Cgroup { left_mib: u64, reserve_mib: u64 },
    #[error("the host has {left_mib} MiB of memory available; merging waits until there are {reserve_mib} MiB")]
    Host { left_mib: u64, reserve_mib: u64 },
    #[error("the store cannot grow: {0}")]
    Memfd(#[from] memfd::MemfdError),
    #[error("the store cannot take memory: {0}")]
    Allocate(std::io::Error),
    #[error(transparent)]
    Slots(#[from] NewError),
    #[error("the store has reached {0} segments")]
    Full(usize),
}

/// One sealed memfd.
pub(crate) struct Segment {
    pub(crate) id: SegmentId,
    fd: OwnedFd,
    map: SharedMap,
    /// The NUMA node that it lies on, where nodes are kept apart.
    node: Option<u32>,
    /// Whether this daemon made it; one that came back from an earlier daemon can only be read.
    writable: bool,
    refs: Box<[AtomicU32]>,
    handles: Box<[AtomicU32]>,
}

impl Segment {
    fn new(id: SegmentId, fd: OwnedFd, map: SharedMap, node: Option<u32>, writable: bool) -> Arc<Self> {
        let atomics = |value| (0..SEGMENT_PAGES).map(|_| AtomicU32::new(value)).collect();
        Arc::new(Self { id, fd, map, node, writable, refs: atomics(0), handles: atomics(NO_HANDLE) })
    }

    /// To pass to clients.
    pub(crate) fn fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }
}

/// Slots of one piece that nobody else has.
struct Reserved {
    slots: std::ops::Range<u32>,
    /// Those before this one have memory.
    populated: u32,
    /// It is a whole piece that can be made a huge page.
    huge: bool,
    /// Slots at its beginning that are filled last: where runs start is drawn at random.
    cut: u32,
}

/// How much of the store is used.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Usage {
    pub(crate) segments: usize,
    pub(crate) frames: u64,
    pub(crate) references: u64,
    pub(crate) pinned: u64,
    pub(crate) resident_bytes: u64,
}

/// The frames of one domain.
pub(crate) struct Store {
    name: String,
    /// Whether each NUMA node has frames of its own.
    pub(crate) by_node: bool,
    segments: RwLock<Vec<Option<Arc<Segment>>>>,
    free: Mutex<Free>,
    quarantine: Duration,
    reserve_bytes: u64,
    /// What slots are filled through, where the system has it.
    filler: Option<Uffd>,
}

impl Store {
    /// A store without segments. `by_node`: each NUMA node has frames of its own; `quarantine`: how
    /// long a slot rests before it is used again; `reserve_bytes`: memory that must be left, on
    /// the host and under every cgroup limit, for the store to grow.
    pub(crate) fn new(name: &str, by_node: bool, quarantine: Duration, reserve_bytes: u64) -> Self {
        let mut seed = [0u8; 8];
        // Without randomness the store works; only the defence against aimed placement is weaker.
        let _ = rustix::rand::getrandom(&mut seed, rustix::rand::GetRandomFlags::empty());
        let free = Free { random: u64::from_ne_bytes(seed) | 1, ..Free::default() };
        let free = Mutex::new(free);
        let filler =
            memfd::filler().inspect_err(|e| tracing::debug!(store = name, "frames are written one by one: {e}")).ok();
        Self { name: name.into(), by_node, segments: RwLock::default(), free, quarantine, reserve_bytes, filler }
    }

    fn segments(&self) -> RwLockReadGuard<'_, Vec<Option<Arc<Segment>>>> {
        self.segments.read()
    }

    /// The segment that holds a frame.
    pub(crate) fn segment(&self, frame: Frame) -> Option<Arc<Segment>> {
        self.segments().get(frame.segment())?.clone()
    }

    fn with<R>(&self, frame: Frame, f: impl FnOnce(&Segment, usize) -> R) -> Option<R> {
        let segments = self.segments();
        let segment = segments.get(frame.segment())?.as_ref()?;
        Some(f(segment, frame.slot().index()))
    }

    /// First frame of a segment, if the store has it.
    pub(crate) fn find(&self, id: SegmentId) -> Option<Frame> {
        let at = self.segments().iter().position(|s| s.as_ref().is_some_and(|s| s.id == id))?;
        Some(Frame(at as u32 * SEGMENT_PAGES))
    }

    fn add(&self, segment: Arc<Segment>) -> Result<usize, GrowError> {
        const MOST: usize = (1 << 30) / SEGMENT_PAGES as usize;
        let mut free = self.free.lock();
        let mut segments = self.segments.write();
        let at = segments.iter().position(Option::is_none).unwrap_or(segments.len());
        if at >= MOST {
            return Err(GrowError::Full(MOST));
        }
        if at == segments.len() {
            let backed = DirtyTree::new(SEGMENT_PAGES.into())?;
            free.slots.push(DirtyTree::new(SEGMENT_PAGES.into())?);
            free.backed.push(backed);
            free.fresh.push(0);
            free.nodes.push(None);
            segments.push(None);
        }
        free.nodes[at] = segment.node;
        if segment.writable {
            free.slots[at].insert_range(0, SEGMENT_PAGES.into());
            free.fresh[at] = ALL_FRESH;
            *free.count(segment.node) += u64::from(SEGMENT_PAGES);
        }
        segments[at] = Some(segment);
        Ok(at)
    }

    /// Takes a segment of an earlier daemon back, to read and to share, never to write. The caller
    /// has made sure of where it comes from.
    pub(crate) fn adopt(&self, id: SegmentId, fd: OwnedFd) -> Result<(), GrowError> {
        memfd::require_seals(fd.as_fd())?;
        let map = memfd::map_readonly(fd.as_fd(), SEGMENT_PAGES as usize * PAGE_SIZE)?;
        let node = map.preferred_node().filter(|_| self.by_node);
        self.add(Segment::new(id, fd, map, node, false)).map(drop)
    }

    fn grow(&self, node: Option<u32>) -> Result<(), GrowError> {
        let (fd, map) = memfd::create_sealed(&format!("pageone:{}", self.name), SEGMENT_PAGES as usize * PAGE_SIZE)?;
        let id = memfd::identity(fd.as_fd()).map_err(GrowError::Allocate)?.ino;
        if let Some(Err(e)) = node.map(|node| map.prefer_node(node)) {
            tracing::warn!(store = self.name, "its frames may lie on any NUMA node: {e}");
        }
        self.add(Segment::new(id, fd, map, node, true)).map(drop)
    }

    fn check_memory(&self) -> Result<(), GrowError> {
        if self.free.lock().checked.is_some_and(|checked| checked.elapsed() < CHECK_EVERY) {
            return Ok(());
        }
        let (reserve, mib) = (self.reserve_bytes, 1 << 20);
        if let Ok(Some(left)) = kmem::cgroup::memory_headroom()
            && left < reserve
        {
            return Err(GrowError::Cgroup { left_mib: left / mib, reserve_mib: reserve / mib });
        }
        let available = kmem::procfs::meminfo().map_or(u64::MAX, |m| m.available_kib << 10);
        if available < reserve {
            return Err(GrowError::Host { left_mib: available / mib, reserve_mib: reserve / mib });
        }
        self.free.lock().checked = Some(Instant::now());
        Ok(())
    }

    /// The NUMA node that a frame lies on, where nodes are kept apart.
    pub(crate) fn node(&self, frame: Frame) -> Option<u32> {
        self.with(frame, |segment, _| segment.node)?
    }

    /// Reserves a run of free slots of a node, all in one piece: those behind `after` if they are
    /// free, else what is left of a stretch that was begun, else from a place drawn at random.
    fn reserve(&self, after: Option<Frame>, node: Option<u32>) -> Result<Reserved, GrowError> {
        let mut free = self.free.lock();
        // Again if what was made was closed at once, since nobody used it yet.
        while *free.count(node) < u64::from(EXTENT) {
            drop(free);
            self.grow(node)?;
            free = self.free.lock();
        }
        let follows = after.map(|f| f.0 + 1).filter(|f| f % SEGMENT_PAGES != 0);
        let follows = follows.filter(|&f| free.slots[Frame(f).segment()].contains(Frame(f).slot().into()));
        let begun = if follows.is_none() { free.take_begun(node) } else { None };
        let most = begun.as_ref().map_or(EXTENT, |rest| rest.end - rest.start);
        let mut known = follows.or(begun.map(|rest| rest.start));
        let mut best = (0, 0);
        if known.is_none() {
            best = free.longest(node, |free| &free.backed, CRUMBS);
            if best.1 < CRUMBS {
                known = free.fresh_piece(node);
            }
            if best.1 < CRUMBS && known.is_none() {
                best = free.longest(node, |free| &free.slots, EXTENT);
            }
        }
        if known.is_none() && best.1 == 0 {
            // The free slots are few and far: look through all.
            let mut segments = free.segments(node);
            let first = segments.find_map(|at| Some(at as u32 * SEGMENT_PAGES + free.slots[at].next(0)? as u32));
            best.0 = first.ok_or(GrowError::Full(free.slots.len()))?;
        }
        let first = known.unwrap_or(best.0);
        let (at, slot) = (Frame(first).segment(), Frame(first).slot().0);
        let bits = &mut free.slots[at];
        let len = run_length(bits, slot).min(most).min(HUGE - slot % HUGE);
        bits.remove_range(slot.into(), len.into());
        let backed = &mut free.backed[at];
        let populated = first + run_length(backed, slot);
        backed.remove_range(slot.into(), len.into());
        let piece = 1 << (slot / HUGE);
        let fresh = free.fresh[at] & piece != 0 && len == HUGE;
        free.fresh[at] &= !piece;
        let huge = fresh && free.no_huge_until.is_none_or(|until| Instant::now() > until);
        let cut = if fresh && follows.is_none() { (free.random() % u64::from(HUGE)) as u32 } else { 0 };
        *free.count(node) -= u64::from(len);
        Ok(Reserved { slots: first..first + len, populated, huge, cut })
    }

    /// Makes a huge page of a fresh piece, which begins with this frame. `false`: there is none to
    /// be had.
    fn make_huge(&self, first: Frame) -> bool {
        let began = kmem::cpu::thread_time();
        let done = self.segment(first).map(|segment| {
            let offset = first.slot().index() * PAGE_SIZE;
            memfd::allocate(segment.fd(), offset as u64, PAGE_SIZE as u64).and_then(|()| segment.map.make_huge(offset))
        });
        let took = kmem::cpu::thread_time() - began;
        if let Some(Err(e)) = &done {
            tracing::debug!("no huge page for the store: {e}");
        }
        let made = matches!(done, Some(Ok(())));
        if !made || took > HUGE_COST {
            let pause = if made { took * HUGE_PAUSE } else { REFUSED };
            self.free.lock().no_huge_until = Some(Instant::now() + pause);
        }
        made
    }

    /// Slots that were reserved and not used are free again; those below `populated` have memory.
    /// The next who needs slots goes on here: a few with memory at the beginning of a stretch
    /// would else be left over each time.
    fn give_slots_back(&self, slots: std::ops::Range<u32>, populated: u32) {
        if slots.is_empty() {
            return;
        }
        let mut free = self.free.lock();
        let (at, slot, len) = (Frame(slots.start).segment(), Frame(slots.start).slot().0, slots.end - slots.start);
        if at < free.slots.len() {
            free.slots[at].insert_range(slot.into(), len.into());
            free.backed[at].insert_range(slot.into(), populated.saturating_sub(slots.start).min(len).into());
            let node = free.nodes[at];
            *free.count(node) += u64::from(len);
            if free.begun.len() < BEGUN {
                free.begun.push(slots);
            }
        }
    }

    /// Makes a reserved slot a frame with these bytes and `refs` users; `filled`: it may have them.
    /// `false`: it is pinned, and stays as it is.
    fn publish(&self, frame: Frame, bytes: &[u8; PAGE_SIZE], refs: u32, filled: bool) -> bool {
        let publish = |segment: &Segment, slot: usize| {
            let before = segment.refs[slot].load(Acquire);
            debug_assert_eq!(before & !PINNED, 0, "{frame:?} is in use");
            if before == 0 {
                if !filled || !segment.map.page_equals(slot, bytes) {
                    segment.map.write_page(slot, bytes);
                }
                segment.handles[slot].store(NO_HANDLE, Relaxed);
                segment.refs[slot].store(refs, Release);
            }
            before == 0
        };
        self.with(frame, publish).unwrap_or(false)
    }

    /// One more user, unless the frame has none left and is on its way out.
    pub(crate) fn try_ref(&self, frame: Frame) -> bool {
        let more = |refs: u32| (refs & !PINNED != 0).then_some(refs + 1);
        self.with(frame, |s, slot| s.refs[slot].fetch_update(AcqRel, Acquire, more).is_ok()).unwrap_or(false)
    }

    /// How many users a frame has.
    pub(crate) fn users(&self, frame: Frame) -> u32 {
        self.with(frame, |s, slot| s.refs[slot].load(Acquire) & !PINNED).unwrap_or(0)
    }

    /// One more user of a frame that an earlier daemon made and that may have none yet.
    pub(crate) fn adopt_ref(&self, frame: Frame) -> bool {
        self.with(frame, |s, slot| s.refs[slot].fetch_add(1, AcqRel) & !PINNED == 0).unwrap_or(false)
    }

    /// Remembers that a process that nobody reports on may map this frame: its slot is never used
    /// again.
    pub(crate) fn pin(&self, frame: Frame) {
        self.with(frame, |s, slot| s.refs[slot].fetch_or(PINNED, AcqRel));
    }

    /// One user less. With the last one, returns the handle that stands for the frame in the index;
    /// the caller takes it out there and then calls [`Store::rest`].
    pub(crate) fn unref(&self, frame: Frame) -> Option<u32> {
        self.with(frame, |s, slot| {
            let less = |refs: u32| (refs & !PINNED != 0).then(|| refs - 1);
            match s.refs[slot].fetch_update(AcqRel, Acquire, less) {
                Ok(before) => (before & !PINNED == 1).then(|| s.handles[slot].swap(NO_HANDLE, AcqRel)),
                Err(_) => {
                    // Somebody counted wrong: nothing is certain about this slot any more.
                    s.refs[slot].fetch_or(PINNED, AcqRel);
                    tracing::error!(?frame, "a frame lost a user that it did not have; its slot is not used again");
                    None
                }
            }
        })?
    }

    /// A frame without users goes into quarantine; a pinned one, or one of a segment that cannot be
    /// written, stays as it is until its segment goes.
    pub(crate) fn rest(&self, frame: Frame) {
        let reusable = self.with(frame, |s, slot| s.writable && s.refs[slot].load(Acquire) == 0).unwrap_or(false);
        if reusable {
            self.free.lock().quarantine.push_back((Instant::now(), frame));
        }
    }

    /// Which handle stands for the frame in the index.
    pub(crate) fn set_handle(&self, frame: Frame, handle: u32) {
        self.with(frame, |s, slot| s.handles[slot].store(handle, Release));
    }

    /// Copies a frame's bytes.
    pub(crate) fn read(&self, frame: Frame, into: &mut [u8; PAGE_SIZE]) -> bool {
        self.with(frame, |s, slot| s.map.read_page(slot, into)).is_some()
    }

    /// Frees slots whose quarantine is over and closes segments without users. Returns those that
    /// were closed.
    pub(crate) fn tidy(&self, now: Instant) -> Vec<SegmentId> {
        let mut free = self.free.lock();
        while let Some(&(since, frame)) = free.quarantine.front() {
            if now.duration_since(since) < self.quarantine {
                break;
            }
            free.quarantine.pop_front();
            let (at, slot) = (frame.segment(), frame.slot());
            debug_assert!(!free.slots[at].contains(slot.into()), "{frame:?} is free already");
            free.slots[at].insert(slot.into());
            free.backed[at].insert(slot.into());
            let node = free.nodes[at];
            *free.count(node) += 1;
        }
        let resting: std::collections::HashSet<usize> = free.quarantine.iter().map(|(_, f)| f.segment()).collect();
        let mut segments = self.segments.write();
        let mut closed = Vec::new();
        for at in 0..segments.len() {
            let Some(segment) = &segments[at] else { continue };
            let unused = segment.refs.iter().all(|refs| refs.load(Acquire) & !PINNED == 0);
            let taken = segment.refs.iter().filter(|refs| refs.load(Relaxed) != 0).count() as u32;
            // A reserved slot is neither free nor counted by anyone: such a segment is in use.
            let whole = !segment.writable || free.slots[at].count() as u32 + taken == SEGMENT_PAGES;
            if unused && whole && !resting.contains(&at) {
                closed.push(segment.id);
                let count = free.slots[at].count();
                *free.count(segment.node) -= count;
                free.slots[at].clear();
                free.backed[at].clear();
                free.fresh[at] = 0;
                free.begun.retain(|rest| Frame(rest.start).segment() != at);
                segments[at] = None;
            }
        }
        closed
    }

    /// The segments there are.
    pub(crate) fn segment_ids(&self) -> Vec<SegmentId> {
        self.segments().iter().flatten().map(|s| s.id).collect()
    }

    pub(crate) fn usage(&self) -> Usage {
        let mut usage = Usage::default();
        for segment in self.segments().iter().flatten() {
            usage.segments += 1;
            usage.resident_bytes += memfd::resident_bytes(segment.fd.as_fd()).unwrap_or(0);
            for refs in &segment.refs {
                let refs = refs.load(Relaxed);
                usage.frames += u64::from(refs & !PINNED != 0);
                usage.references += u64::from(refs & !PINNED);
                usage.pinned += u64::from(refs & PINNED != 0);
            }
        }
        usage
    }
}

/// Reserved slots that can be filled while this lives. Afterwards the segment is one mapping again:
/// the daemon's mappings are limited too.
struct Filling<'s> {
    filler: &'s Uffd,
    segment: Arc<Segment>,
    part: std::ops::Range<usize>,
}

impl<'s> Filling<'s> {
    /// `None`: the system does not have it, or not now.
    fn new(store: &'s Store, slots: std::ops::Range<u32>) -> Option<Self> {
        let (filler, segment) = (store.filler.as_ref()?, store.segment(Frame(slots.start))?);
        let start = Frame(slots.start).slot().index() * PAGE_SIZE;
        let part = start..start + (slots.end - slots.start) as usize * PAGE_SIZE;
        segment.map.register(filler, part.clone()).ok()?;
        Some(Self { filler, segment, part })
    }

    /// Gives slots without memory these bytes; returns how many.
    fn fill(&self, first: Frame, pages: &[[u8; PAGE_SIZE]]) -> usize {
        self.segment.map.fill(self.filler, first.slot().index(), pages)
    }
}

impl Drop for Filling<'_> {
    fn drop(&mut self) {
        self.segment.map.unregister(self.filler, self.part.clone());
    }
}

/// A worker's place in the store: hands out consecutive slots.
pub(crate) struct Cursor<'s> {
    store: &'s Store,
    node: Option<u32>,
    slots: std::ops::Range<u32>,
    /// Those before this one have memory.
    populated: u32,
    /// Those before this one were filled.
    filled: u32,
    filling: Option<Filling<'s>>,
    last: Option<Frame>,
}

impl<'s> Cursor<'s> {
    /// `node`: where its frames lie, if the store keeps NUMA nodes apart.
    pub(crate) fn new(store: &'s Store, node: Option<u32>) -> Self {
        Self { store, node, slots: 0..0, populated: 0, filled: 0, filling: None, last: None }
    }

    /// Makes a frame with these bytes and `refs` users.
    pub(crate) fn put(&mut self, bytes: &[u8; PAGE_SIZE], refs: u32) -> Result<Frame, GrowError> {
        loop {
            self.need_slots()?;
            let frame = Frame(self.slots.start);
            if frame.0 >= self.populated {
                self.populate(frame)?;
            }
            self.slots.start += 1;
            if self.store.publish(frame, bytes, refs, frame.0 < self.filled) {
                self.last = Some(frame);
                return Ok(frame);
            }
        }
    }

    fn need_slots(&mut self) -> Result<(), GrowError> {
        if self.slots.is_empty() {
            self.store.check_memory()?;
            self.reserve()?;
        }
        Ok(())
    }

    /// Says what the next frames will probably hold, in this order, in pieces that lie together in
    /// memory.
    pub(crate) fn expect<'b>(
        &mut self,
        pieces: impl IntoIterator<Item = &'b [[u8; PAGE_SIZE]]>,
    ) -> Result<(), GrowError> {
        self.need_slots()?;
        let mut pieces = pieces.into_iter().peekable();
        if self.slots.start < self.populated || pieces.peek().is_none() {
            return Ok(());
        }
        if self.filling.is_none() {
            self.filling = Filling::new(self.store, self.slots.clone());
        }
        let Some(filling) = &self.filling else { return Ok(()) };
        let mut filled = self.slots.start;
        for pages in pieces {
            let most = pages.len().min((self.slots.end - filled) as usize);
            let done = filling.fill(Frame(filled), &pages[..most]);
            filled += done as u32;
            if done < pages.len() {
                break;
            }
        }
        (self.populated, self.filled) = (filled, filled);
        Ok(())
    }

    fn reserve(&mut self) -> Result<(), GrowError> {
        self.filling = None;
        let Reserved { slots, mut populated, huge, cut } = self.store.reserve(self.last, self.node)?;
        if huge && self.store.make_huge(Frame(slots.start)) {
            populated = slots.end;
        }
        let begin = slots.start..slots.start + cut;
        (self.slots, self.populated, self.filled) = (begin.end..slots.end, populated, 0);
        self.store.give_slots_back(begin, populated);
        Ok(())
    }

    /// Takes back a frame that [`Cursor::put`] made and that has no handle.
    pub(crate) fn undo(&mut self, frame: Frame, refs: u32) {
        // A guess may have made it somebody's frame all the same: who leaves last lets it rest.
        if (0..refs).any(|_| self.store.unref(frame).is_some()) {
            self.store.rest(frame);
        }
    }

    /// Takes the memory before it is written, so that a lack of it is an error here and no signal.
    fn populate(&mut self, frame: Frame) -> Result<(), GrowError> {
        let len = POPULATE.min(self.slots.end - frame.0);
        let page = PAGE_SIZE as u64;
        let allocate = |s: &Segment, slot: usize| memfd::allocate(s.fd(), slot as u64 * page, u64::from(len) * page);
        match self.store.with(frame, allocate) {
            Some(Ok(())) => self.populated = frame.0 + len,
            Some(Err(e)) => return Err(GrowError::Allocate(e)),
            None => {}
        }
        Ok(())
    }
}

impl Drop for Cursor<'_> {
    fn drop(&mut self) {
        // Before somebody else can have the slots, and make them ready to be filled.
        self.filling = None;
        self.store.give_slots_back(self.slots.clone(), self.populated);
    }
}
