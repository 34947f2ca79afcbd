//! The store: where a domain's shared frames live.
//!
//! A store is a growing list of *segments*, sealed memfds of 64 MiB each. The daemon writes a frame
//! through the one writable mapping that existed before the seals (`F_SEAL_FUTURE_WRITE`); clients
//! get the file descriptor and can map it, privately, and read it. No other writable mapping can be
//! made.
//!
//! Those seals forbid hole punching too (also to us: the kernel refuses `fallocate(PUNCH_HOLE)` and
//! `MADV_REMOVE` with `EPERM`). That is safer: a hole under a mapping that is still in use would be
//! zeros in a guest. A frame whose last user left is *reused*, after a quarantine. A
//! segment without frames is closed; the kernel frees its memory when no mapping of it is left. No
//! count of ours has to be right for that.
//!
//! ```text
//! slot:  free ──reserve──▶ reserved ──publish──▶ refs ≥ 1 ──last user──▶ quarantine ──time──▶ free
//!                                                  │  ▲
//!                                   fork of a user │  └ more users (try_ref)
//!                                                  ▼
//!                                                pinned: never reused; goes with its segment
//! ```
//!
//! *Placement.* Runs of pages should stay runs of frames, since each run costs the client one
//! mapping. A worker reserves up to 512 consecutive slots, from a place drawn at random (so that an
//! attacker cannot aim at neighbouring frames), and fills them in the order of the pages that ask;
//! what it leaves over, the next one fills. Slots that were used before have memory, which
//! cannot be given back alone: runs of such slots come first, unless they are very short.
//!
//! *Huge pages.* A piece of 512 slots of which none was used becomes a huge page at one stroke
//! where the kernel has one (`MADV_COLLAPSE`; `/sys/kernel/mm/transparent_hugepage/shmem_enabled`
//! set to `deny` forbids it). It is taken, cleared and mapped as a whole: neither the daemon that
//! writes frames nor the agent that compares with them takes a page fault for each, which was most
//! of what a frame cost.
//!
//! *Filling.* Where there is no huge page, and the contents of the next frames are likely, slots
//! get memory and bytes in one call for all of them (`UFFDIO_COPY`): pages are not cleared first,
//! and the daemon takes no faults. They become frames only when a page with just these bytes needs
//! one.

use std::collections::HashSet;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::Ordering::*;
use std::time::{Duration, Instant};

use dirty::DirtyTree;
use kmem::PAGE_SIZE;
use kmem::memfd;
use kmem::uffd::Uffd;
use parking_lot::{Mutex, RwLock, RwLockReadGuard};
use wire::{SEGMENT_PAGES, SegmentId};

pub(crate) use self::cursor::Cursor;
pub(crate) use self::error::GrowError;
use self::free::{ALL_FRESH, Free};
use self::segment::Segment;
use crate::content::frame::{Frame, NO_HANDLE};

mod cursor;
mod error;
mod fill;
mod free;
mod reserve;
mod segment;
#[cfg(test)]
mod tests;

/// Set in a frame's reference count: a child of a user may map it, so its slot is never reused.
const PINNED: u32 = 1 << 31;

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
    quarantine_time: Duration,
    reserve_bytes: u64,
    /// Fills slots, where the kernel has what it takes.
    filler: Option<Uffd>,
}

impl Store {
    /// A store without segments. `by_node`: each NUMA node has frames of its own; `quarantine`: how
    /// long a freed slot is not used again; `reserve_bytes`: memory that must be left, on
    /// the host and under every cgroup limit, for the store to grow.
    pub(crate) fn new(name: &str, by_node: bool, quarantine_time: Duration, reserve_bytes: u64) -> Self {
        let mut seed = [0u8; 8];
        // Without randomness the store works; only the defence against aimed placement is weaker.
        let _ = rustix::rand::getrandom(&mut seed, rustix::rand::GetRandomFlags::empty());
        let free = Free { random: u64::from_ne_bytes(seed) | 1, ..Free::default() };
        let free = Mutex::new(free);
        let filler =
            memfd::filler().inspect_err(|e| tracing::debug!(store = name, "frames are written one by one: {e}")).ok();
        Self { name: name.into(), by_node, segments: RwLock::default(), free, quarantine_time, reserve_bytes, filler }
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

    /// Takes back a segment of an earlier daemon, to read and to share, never to write. The caller
    /// has checked where it comes from.
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

    /// The NUMA node that a frame lies on, where nodes are kept apart.
    pub(crate) fn node(&self, frame: Frame) -> Option<u32> {
        self.with(frame, |segment, _| segment.node)?
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

    /// Notes that a process without an agent may map this frame: its slot is never used again.
    pub(crate) fn pin(&self, frame: Frame) {
        self.with(frame, |s, slot| s.refs[slot].fetch_or(PINNED, AcqRel));
    }

    /// One user less. With the last one, returns the handle that stands for the frame in the index;
    /// the caller takes it out there and then calls [`Store::quarantine`].
    pub(crate) fn unref(&self, frame: Frame) -> Option<u32> {
        self.with(frame, |s, slot| {
            let less = |refs: u32| (refs & !PINNED != 0).then(|| refs - 1);
            match s.refs[slot].fetch_update(AcqRel, Acquire, less) {
                Ok(before) => (before & !PINNED == 1).then(|| s.handles[slot].swap(NO_HANDLE, AcqRel)),
                Err(_) => {
                    // A count was wrong: nothing is certain about this slot any more.
                    s.refs[slot].fetch_or(PINNED, AcqRel);
                    tracing::error!(?frame, "a frame lost a user that it did not have; its slot is not used again");
                    None
                }
            }
        })?
    }

    /// Quarantines a frame without users. A pinned one, or one of a segment that cannot be written,
    /// stays as it is until its segment is closed.
    pub(crate) fn quarantine(&self, frame: Frame) {
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
        free.end_quarantine(now, self.quarantine_time);
        let quarantined: HashSet<usize> = free.quarantine.iter().map(|(_, frame)| frame.segment()).collect();
        let mut segments = self.segments.write();
        let mut closed = Vec::new();
        for at in 0..segments.len() {
            let Some(segment) = &segments[at] else { continue };
            let unused = segment.refs.iter().all(|refs| refs.load(Acquire) & !PINNED == 0);
            let taken = segment.refs.iter().filter(|refs| refs.load(Relaxed) != 0).count() as u32;
            // A reserved slot is neither free nor counted: such a segment is in use.
            let whole = !segment.writable || free.slots[at].count() as u32 + taken == SEGMENT_PAGES;
            if unused && whole && !quarantined.contains(&at) {
                closed.push(segment.id);
                free.close(at);
                segments[at] = None;
            }
        }
        closed
    }

    /// The filler, where the kernel has what it takes.
    fn filler(&self) -> Option<&Uffd> {
        self.filler.as_ref()
    }

    /// The segments there are.
    pub(crate) fn segment_ids(&self) -> Vec<SegmentId> {
        self.segments().iter().flatten().map(|s| s.id).collect()
    }

    /// How much of the store is used now.
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
