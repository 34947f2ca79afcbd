//! The frames of a store: their users, their quarantine, and the segments that they lie in.

use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::*};
use std::time::{Duration, Instant};

use kmem::PAGE_SIZE;
use kmem::memfd;
use kmem::uffd::Uffd;
use wire::{SEGMENT_PAGES, SegmentId};

use super::error::GrowError;
use super::free::{Free, HUGE, Piece};
use super::place::{LEN, SegmentFiles};
use super::segment::{MOST_SEGMENTS, Memory, PINNED, Segment};
use crate::core::content::frame::{Frame, NO_HANDLE};
use crate::sync::{Mutex, RwLock};

/// Pieces that are punched at a time: 1 GiB.
const MOST_PUNCHES: usize = 512;

#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Usage {
    pub(crate) segments: usize,
    pub(crate) frames: u64,
    pub(crate) pinned: u64,
    /// Slots without users that still have memory.
    pub(crate) dead: u64,
    /// Of those, frames in quarantine.
    pub(crate) quarantined: u64,
    /// Free slots of pieces that were begun; most have memory.
    pub(crate) free: u64,
    pub(crate) resident_bytes: u64,
}

/// What a reserved slot holds before it becomes a frame.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Holds {
    /// It was not filled.
    Nothing,
    /// Bytes with the key of the frame's.
    TheseBytes,
    /// Other bytes.
    OtherBytes,
}

/// The frames of one domain.
pub(crate) struct Store {
    name: String,
    files: SegmentFiles,
    /// Whether each NUMA node has frames of its own.
    pub(crate) by_node: bool,
    pub(super) segments: RwLock<Vec<Option<Arc<Segment>>>>,
    pub(super) free: Mutex<Free>,
    /// In milliseconds.
    quarantine_time: AtomicU64,
    pub(super) reserve_bytes: AtomicU64,
    /// Frames taken out of use: their memory has failed, or their count was wrong.
    pub(crate) doubted: AtomicU64,
    /// Fills slots, where the kernel has what it takes.
    pub(super) filler: Option<Uffd>,
}

impl Store {
    /// A store without segments. `by_node`: each NUMA node has frames of its own; `quarantine`: how
    /// long a frame without users keeps its memory; `reserve_bytes`: memory that must be left, on
    /// the host and under every cgroup limit, for the store to grow.
    pub(crate) fn new(name: &str, by_node: bool, quarantine_time: Duration, reserve_bytes: u64) -> Self {
        let mut seed = [0u8; 8];
        // Without randomness the store works; only the defence against aimed placement is weaker.
        let _ = rustix::rand::getrandom(&mut seed, rustix::rand::GetRandomFlags::empty());
        let free = Mutex::new(Free::new(u64::from_ne_bytes(seed)));
        let filler =
            memfd::filler().inspect_err(|e| tracing::debug!(store = name, "frames are written one by one: {e}")).ok();
        let files = SegmentFiles::new(name);
        // The kernel takes names of 249 bytes, with its own part and ours.
        let name = name.chars().take(50).collect();
        let store = Self {
            name,
            files,
            by_node,
            segments: RwLock::default(),
            free,
            quarantine_time: AtomicU64::default(),
            reserve_bytes: AtomicU64::default(),
            doubted: AtomicU64::default(),
            filler,
        };
        store.set(quarantine_time, reserve_bytes);
        store
    }

    /// Sets what [`Store::new`] was told last.
    pub(crate) fn set(&self, quarantine_time: Duration, reserve_bytes: u64) {
        self.quarantine_time.store(quarantine_time.as_millis() as u64, Relaxed);
        self.reserve_bytes.store(reserve_bytes, Relaxed);
    }

    pub(crate) fn segment(&self, frame: Frame) -> Option<Arc<Segment>> {
        self.segments.read().get(frame.segment())?.clone()
    }

    pub(super) fn with<R>(&self, frame: Frame, f: impl FnOnce(&Segment, usize) -> R) -> Option<R> {
        let segments = self.segments.read();
        let segment = segments.get(frame.segment())?.as_ref()?;
        Some(f(segment, frame.slot().index()))
    }

    /// A segment, and its first frame. It is not closed as long as the caller keeps it.
    pub(crate) fn hold(&self, id: SegmentId) -> Option<(Frame, Arc<Segment>)> {
        let segments = self.segments.read();
        let (at, segment) =
            segments.iter().enumerate().find_map(|(at, s)| Some((at, s.as_ref().filter(|s| s.id == id)?)))?;
        Some((Frame(at as u32 * SEGMENT_PAGES), segment.clone()))
    }

    pub(super) fn add(&self, segment: Arc<Segment>) -> Result<Arc<Segment>, GrowError> {
        let mut free = self.free.lock();
        let mut segments = self.segments.write();
        let at = segments.iter().position(Option::is_none).unwrap_or(segments.len());
        if at >= MOST_SEGMENTS {
            return Err(GrowError::Full(MOST_SEGMENTS));
        }
        if at == segments.len() {
            segments.push(None);
        }
        free.open(at, &segment);
        segments[at] = Some(segment.clone());
        Ok(segment)
    }

    /// Takes back a segment of an earlier daemon, to read and to share, never to write. The caller
    /// has checked where it comes from. It is not closed as long as the caller keeps it.
    pub(crate) fn adopt(&self, id: SegmentId, fd: OwnedFd) -> Result<Arc<Segment>, GrowError> {
        memfd::require_kept(fd.as_fd())?;
        let map = memfd::map_readonly(fd.as_fd(), LEN)?;
        let node = map.preferred_node().filter(|_| self.by_node);
        self.add(Segment::new(id, Memory::Adopted(fd, map), node, None))
    }

    /// Takes a part of a snapshot's RAM that a client maps, wherever it comes from: nobody can
    /// change it any more. It is not closed as long as the caller keeps it.
    pub(crate) fn adopt_snapshot(&self, id: SegmentId, fd: OwnedFd) -> Result<Arc<Segment>, GrowError> {
        memfd::require_written(fd.as_fd())?;
        let map = memfd::map_readonly(fd.as_fd(), LEN)?;
        self.add(Segment::new(id, Memory::Snapshot(fd, map), None, None))
    }

    pub(super) fn grow(&self, node: Option<u32>) -> Result<(), GrowError> {
        let (id, file, lending) = self.files.make(&format!("pageone:{}", self.name))?;
        if let Some(Err(e)) = node.map(|node| file.map.prefer_node(node)) {
            tracing::warn!(store = self.name, "its frames may lie on any NUMA node: {e}");
        }
        self.add(Segment::new(id, Memory::Own(file), node, lending)).map(drop)
    }

    /// The NUMA node that a frame lies on, where nodes are kept apart.
    pub(crate) fn node(&self, frame: Frame) -> Option<u32> {
        self.with(frame, |segment, _| segment.node)?
    }

    /// Makes a reserved slot a frame with `refs` users. `false`: it is pinned, and stays.
    pub(super) fn publish(&self, frame: Frame, bytes: &[u8; PAGE_SIZE], refs: u32, holds: Holds) -> bool {
        let publish = |segment: &Segment, slot: usize| {
            let before = segment.refs[slot].load(Acquire);
            debug_assert_eq!(before & !PINNED, 0, "{frame:?} is in use");
            if before == 0 {
                if holds == Holds::OtherBytes && !segment.read(slot, &mut [0; PAGE_SIZE]) {
                    // The memory has failed. Nothing touches it from now on.
                    segment.refs[slot].store(PINNED, Release);
                    self.doubted.fetch_add(1, Relaxed);
                    return false;
                }
                if holds != Holds::TheseBytes {
                    segment.map().write_page(slot, bytes);
                }
                segment.handles[slot].store(NO_HANDLE, Relaxed);
                segment.refs[slot].store(refs, Release);
                segment.changes(slot);
            }
            before == 0
        };
        self.with(frame, publish).unwrap_or(false)
    }

    /// One more user, unless the last one has left; snapshots' frames stay.
    pub(crate) fn try_ref(&self, frame: Frame) -> bool {
        let has_users = |refs: u32| refs & !PINNED != 0;
        self.with(frame, |s, slot| {
            let more = |refs: u32| (has_users(refs) || s.is_snapshot()).then_some(refs + 1);
            s.refs[slot].fetch_update(AcqRel, Acquire, more).is_ok()
        })
        .unwrap_or(false)
    }

    pub(crate) fn users(&self, frame: Frame) -> u32 {
        self.with(frame, |s, slot| s.refs[slot].load(Acquire) & !PINNED).unwrap_or(0)
    }

    /// A user of an earlier daemon's frame, whose segment the caller [holds](Store::hold).
    pub(crate) fn adopt_ref(&self, frame: Frame) -> bool {
        self.with(frame, |s, slot| s.refs[slot].fetch_add(1, AcqRel) & !PINNED == 0).unwrap_or(false)
    }

    /// Somebody whom the ledger does not know may map it: its memory stays with its segment.
    pub(crate) fn pin(&self, frame: Frame) {
        self.with(frame, |s, slot| s.refs[slot].fetch_or(PINNED, AcqRel));
    }

    /// Takes a frame out of use: its memory has failed.
    pub(crate) fn give_up(&self, frame: Frame) {
        self.pin(frame);
        self.doubted.fetch_add(1, Relaxed);
    }

    /// One user less. With the last one, returns the frame's handle, if it is no snapshot's; the
    /// caller takes it out of the index and then calls [`Store::quarantine`].
    pub(crate) fn unref(&self, frame: Frame) -> Option<u32> {
        self.with(frame, |s, slot| {
            let less = |refs: u32| (refs & !PINNED != 0).then(|| refs - 1);
            match s.refs[slot].fetch_update(AcqRel, Acquire, less) {
                Ok(before) => {
                    let is_over = before & !PINNED == 1 && !s.is_snapshot();
                    is_over.then(|| {
                        s.changes(slot);
                        s.handles[slot].swap(NO_HANDLE, AcqRel)
                    })
                }
                Err(_) => {
                    // A count was wrong: nothing is certain about this slot any more.
                    s.refs[slot].fetch_or(PINNED, AcqRel);
                    self.doubted.fetch_add(1, Relaxed);
                    tracing::error!(?frame, "a frame lost a user that it did not have; its memory stays");
                    None
                }
            }
        })?
    }

    /// Quarantines a frame without users. A pinned one, or one of a segment that cannot be written,
    /// stays as it is until its segment is closed.
    pub(crate) fn quarantine(&self, frame: Frame) {
        let dies = self.with(frame, |s, slot| s.own().is_some() && s.refs[slot].load(Acquire) == 0).unwrap_or(false);
        if dies {
            self.free.lock().quarantine.push_back((Instant::now(), frame));
        }
    }

    /// Which handle stands for the frame in the index.
    pub(crate) fn set_handle(&self, frame: Frame, handle: u32) {
        self.with(frame, |s, slot| s.handles[slot].store(handle, Release));
    }

    /// Which handle stood for the frame in the index; none does from now on.
    pub(crate) fn take_handle(&self, frame: Frame) -> u32 {
        self.with(frame, |s, slot| s.handles[slot].swap(NO_HANDLE, AcqRel)).unwrap_or(NO_HANDLE)
    }

    /// Copies a frame's bytes. `false`: its memory has failed.
    pub(crate) fn read(&self, frame: Frame, into: &mut [u8; PAGE_SIZE]) -> bool {
        self.with(frame, |s, slot| s.read(slot, into)).unwrap_or(false)
    }

    /// Ends the quarantine of frames, closes segments without users, and gives the memory of spent
    /// pieces back. Returns the segments that were closed.
    pub(crate) fn tidy(&self, now: Instant) -> Vec<SegmentId> {
        let (closed, spent) = {
            let mut free = self.free.lock();
            let pinned = |frame| self.with(frame, |s, slot| s.refs[slot].load(Acquire) != 0).unwrap_or(true);
            let quarantine = Duration::from_millis(self.quarantine_time.load(Relaxed));
            free.end_quarantine(now, quarantine, pinned);
            let closed = self.close_unused(&mut free);
            (closed, free.take_spent(MOST_PUNCHES))
        };
        for piece in spent {
            let punched = self.punch(piece);
            let mut free = self.free.lock();
            match punched {
                Ok(()) => free.renew(piece),
                Err(e) => {
                    tracing::warn!(store = self.name, "the memory of {HUGE} frames cannot be given back: {e}");
                    free.kill(piece);
                }
            }
        }
        closed
    }

    /// The frames of snapshots that no page maps any more, and the handles that stood for them in
    /// the index. None does from now on, and the segments can be closed.
    pub(crate) fn take_unused_snapshots(&self) -> Vec<(Frame, u32)> {
        let segments = self.segments.read();
        let mut unused = Vec::new();
        for (at, segment) in segments.iter().enumerate() {
            let Some(segment) = segment.as_ref().filter(|s| s.is_snapshot() && Arc::strong_count(s) == 1) else {
                continue;
            };
            if segment.refs.iter().all(|refs| refs.load(Acquire) & !PINNED == 0) {
                let first = at as u32 * SEGMENT_PAGES;
                let taken =
                    segment.handles.iter().zip(first..).map(|(h, frame)| (Frame(frame), h.swap(NO_HANDLE, AcqRel)));
                unused.extend(taken.filter(|(_, handle)| *handle != NO_HANDLE));
            }
        }
        unused
    }

    fn close_unused(&self, free: &mut Free) -> Vec<SegmentId> {
        let mut segments = self.segments.write();
        let mut closed = Vec::new();
        for at in 0..segments.len() {
            let Some(segment) = &segments[at] else { continue };
            // A holder may be about to count users. No new holder can come: the lock is held.
            if Arc::strong_count(segment) > 1 {
                continue;
            }
            let unused = segment.refs.iter().all(|refs| refs.load(Acquire) & !PINNED == 0);
            let pinned = segment.refs.iter().filter(|refs| refs.load(Relaxed) != 0).count() as u32;
            // A slot that is reserved or in quarantine is not counted: such a segment is in use.
            let whole = segment.own().is_none() || free.idle(at) + pinned >= SEGMENT_PAGES;
            if unused && whole {
                closed.push(segment.id);
                free.close(at);
                segments[at] = None;
            }
        }
        closed
    }

    /// Gives the memory of a spent piece back.
    fn punch(&self, piece: Piece) -> std::io::Result<()> {
        let first = Frame(piece.slots().start);
        let segment = self.segment(first).ok_or(std::io::ErrorKind::NotFound)?;
        let file = segment.own().ok_or(std::io::ErrorKind::PermissionDenied)?;
        let at = first.slot().index();
        // No user of them can be counted any more. The check is cheap, and frames in use would lose
        // their bytes.
        if segment.refs[at..at + HUGE as usize].iter().any(|refs| refs.load(Acquire) != 0) {
            return Err(std::io::ErrorKind::ResourceBusy.into());
        }
        file.punch((at * PAGE_SIZE) as u64, u64::from(HUGE) * PAGE_SIZE as u64)
    }

    /// The frames with the most users, the most used first, at most this many.
    pub(crate) fn most_used(&self, most: usize) -> Vec<(Frame, u32)> {
        // The least of those kept is on top.
        let mut kept = std::collections::BinaryHeap::with_capacity(most + 1);
        for (at, segment) in self.segments.read().iter().enumerate() {
            for (refs, slot) in segment.iter().flat_map(|segment| segment.refs.iter().zip(0..)) {
                let users = refs.load(Relaxed) & !PINNED;
                if users > 0 {
                    kept.push(std::cmp::Reverse((users, Frame(at as u32 * SEGMENT_PAGES + slot))));
                    if kept.len() > most {
                        kept.pop();
                    }
                }
            }
        }
        kept.into_sorted_vec().into_iter().map(|std::cmp::Reverse((users, frame))| (frame, users)).collect()
    }

    /// The segments whose frames can be lent to files, each with its first frame.
    pub(crate) fn lendable(&self) -> Vec<(Frame, Arc<Segment>)> {
        let segments = self.segments.read();
        let all = segments.iter().zip(0..).filter_map(|(segment, at)| Some((at, segment.as_ref()?)));
        let lendable = all.filter(|(_, segment)| segment.lending.is_some());
        lendable.map(|(at, segment)| (Frame(at * SEGMENT_PAGES), segment.clone())).collect()
    }

    /// Whether there is a segment whose frames can be lent to files.
    pub(crate) fn can_lend(&self) -> bool {
        self.segments.read().iter().flatten().any(|segment| segment.lending.is_some())
    }

    pub(crate) fn segment_ids(&self) -> Vec<SegmentId> {
        self.segments.read().iter().flatten().map(|s| s.id).collect()
    }

    pub(crate) fn usage(&self) -> Usage {
        let (free, dead, quarantined) = self.free.lock().waste();
        let mut usage = Usage { free, dead, quarantined, ..Usage::default() };
        for segment in self.segments.read().iter().flatten() {
            usage.segments += 1;
            usage.resident_bytes += memfd::resident_bytes(segment.fd()).unwrap_or(0);
            for refs in &segment.refs {
                let refs = refs.load(Relaxed);
                usage.frames += u64::from(refs & !PINNED != 0);
                usage.pinned += u64::from(refs & PINNED != 0);
            }
        }
        usage
    }
}

#[cfg(test)]
impl Store {
    /// A segment that can be lent to files, of a memfd; `file`: the id of its file.
    pub(crate) fn grow_lendable(&self, file: u64) {
        use super::place::{Lending, id};
        let store = memfd::create_store("pageone:test", LEN).unwrap();
        let lending = Some(Lending::new(None, file));
        self.add(Segment::new(id(&store).unwrap(), Memory::Own(store), None, lending)).unwrap();
    }
}
