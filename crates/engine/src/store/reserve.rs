//! Reserving slots: which are next, and whether their piece becomes a huge page.

use std::ops::Range;
use std::time::{Duration, Instant};

use kmem::PAGE_SIZE;
use kmem::memfd;

use super::error::GrowError;
use super::frames::Store;
use super::free::{EXTENT, Free, HUGE, Piece};
use super::segment::MOST_SEGMENTS;
use crate::core::content::frame::Frame;

/// How long no huge page is requested after the kernel had none.
pub(super) const REFUSED: Duration = Duration::from_secs(10);
/// CPU time that a huge page may cost; 0.2 ms is usual. In a virtual machine whose host takes free
/// memory back, it has to be found again first: 5 ms were seen, and single pages cost less.
const HUGE_COST: Duration = Duration::from_millis(1);
/// After a huge page that cost more, none is requested for 20 times as long: those that merging
/// gives back are cheap again.
const HUGE_PAUSE: u32 = 20;
/// How long a check of the memory left is valid: ten megabytes at a gigabyte a second.
const CHECK_EVERY: Duration = Duration::from_millis(10);
/// Unused parts of reservations that are remembered at most; each worker has one.
const BEGUN: usize = 64;

/// Consecutive slots, within one piece, that one cursor has.
pub(super) struct Reserved {
    pub(super) slots: Range<u32>,
    /// Slots below this one have memory.
    pub(super) populated: u32,
    /// It is a whole piece that can be made a huge page.
    pub(super) huge: bool,
    /// Slots at its beginning that are filled last: where runs start is drawn at random.
    pub(super) cut: u32,
}

/// Where a reservation begins.
struct Place {
    /// The first slot, as a frame.
    first: u32,
    /// Slots at most.
    most: u32,
    /// It continues the cursor's run of frames.
    follows: bool,
}

impl Free {
    /// Chooses free slots: behind `after`, else what a reservation left, else at random.
    fn choose(&mut self, after: Option<Frame>, node: Option<u32>) -> Option<Place> {
        let next = after.map(|frame| Frame(frame.0 + 1)).filter(|next| next.slot().0 != 0);
        if let Some(next) = next.filter(|&next| self.is_free(next)) {
            return Some(Place { first: next.0, most: EXTENT, follows: true });
        }
        if let Some(begun) = self.take_begun(node) {
            return Some(Place { first: begun.start, most: begun.end - begun.start, follows: false });
        }
        let (first, most) = self.find(node)?;
        Some(Place { first: first.0, most, follows: false })
    }

    fn take(&mut self, place: &Place) -> Reserved {
        let (first, piece) = (Frame(place.first), Piece::of(Frame(place.first)));
        let slots = self.piece(piece);
        let len = slots.run_length(first.0 % HUGE).min(place.most);
        let fresh = slots.fresh && len == HUGE;
        let populated = if slots.huge { first.0 + len } else { first.0 };
        self.remove(first.0..first.0 + len);
        let huge = fresh && self.no_huge_until.is_none_or(|until| Instant::now() > until);
        let cut = if fresh && !place.follows { (self.random() % u64::from(HUGE)) as u32 } else { 0 };
        Reserved { slots: first.0..first.0 + len, populated, huge, cut }
    }
}

impl Store {
    /// Whether the store may grow: by the host's memory and every cgroup limit.
    pub(super) fn check_memory(&self) -> Result<(), GrowError> {
        if self.free.lock().checked.is_some_and(|checked| checked.elapsed() < CHECK_EVERY) {
            return Ok(());
        }
        let (reserve, mib) = (self.reserve_bytes.load(std::sync::atomic::Ordering::Relaxed), 1 << 20);
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

    /// Whether the control groups of a client leave less than is to be left. A frame is there some
    /// time before its page goes: what the client needs itself meanwhile must not fail.
    pub(super) fn is_short(&self, pid: i32) -> bool {
        let left = kmem::cgroup::MemoryGroups::of(pid).ok().and_then(|groups| groups.headroom());
        left.is_some_and(|left| left < self.reserve_bytes.load(std::sync::atomic::Ordering::Relaxed))
    }

    /// Reserves a run of free slots of a node, all in one piece; grows if too few are left.
    pub(super) fn reserve(&self, after: Option<Frame>, node: Option<u32>) -> Result<Reserved, GrowError> {
        let mut free = self.free.lock();
        // Again if the new segment was closed at once, since no slot of it was used yet.
        while *free.count(node) < u64::from(EXTENT) {
            drop(free);
            self.grow(node)?;
            free = self.free.lock();
        }
        let place = free.choose(after, node).ok_or(GrowError::Full(MOST_SEGMENTS))?;
        Ok(free.take(&place))
    }

    /// Makes a huge page of the fresh piece from this frame. `false`: the kernel has none.
    pub(super) fn make_huge(&self, first: Frame) -> bool {
        let began = kmem::cpu::thread_time();
        let done = self.segment(first).map(|segment| {
            let offset = first.slot().index() * PAGE_SIZE;
            let file = segment.own().ok_or(std::io::ErrorKind::PermissionDenied)?;
            memfd::allocate(&file.writer, offset as u64, PAGE_SIZE as u64).and_then(|()| file.map.make_huge(offset))
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
        if made {
            self.free.lock().piece_mut(Piece::of(first)).huge = true;
        }
        made
    }

    /// Frees slots that were reserved and not used. The next cursor continues here. Otherwise a few
    /// slots with memory would be left over each time.
    pub(super) fn give_slots_back(&self, slots: Range<u32>) {
        if slots.is_empty() {
            return;
        }
        let mut free = self.free.lock();
        free.add(slots.clone());
        if free.begun.len() < BEGUN {
            free.begun.push(slots);
        }
    }
}
