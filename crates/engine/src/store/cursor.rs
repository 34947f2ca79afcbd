//! Cursors: how workers make frames. Several reserved slots get memory and bytes in one system call
//! (`UFFDIO_COPY`) where that is possible.
//!
//! In the kernel's store each slot gets memory when it becomes a frame, at the expense of the
//! client whose page it is made from ([`Payer`]). So no slot is filled, or made a huge page,
//! beforehand.

use std::ops::Range;
use std::sync::Arc;

use kmem::PAGE_SIZE;
use kmem::memfd;
use kmem::pageonefs;
use kmem::pidfd::PidFd;
use kmem::uffd::Uffd;
use rustix::io::Errno;

use super::error::GrowError;
use super::frames::{Holds, Store};
use super::reserve::Reserved;
use super::segment::Segment;
use crate::core::content::frame::Frame;

/// Slots that are given memory at once when a cursor comes to them and there is no huge page.
const POPULATE: u32 = 128;

/// Who pays for frames in the kernel's store. The daemon pays for all others.
#[derive(Clone, Copy)]
pub(crate) enum Payer<'s> {
    /// The control group of this process, and its number.
    Process(&'s PidFd, i32),
    /// Who pays for this frame.
    AsFor(Frame),
}

/// A worker's place in the store: makes frames in consecutive slots.
pub(crate) struct Cursor<'s> {
    store: &'s Store,
    node: Option<u32>,
    /// Reserved and not used yet.
    pub(super) slots: Range<u32>,
    /// Slots below this one have memory.
    pub(super) populated: u32,
    /// Slots below this one were filled.
    pub(super) filled: u32,
    /// The keys of what was filled in, up to there.
    keys: Vec<u64>,
    filling: Option<Filling<'s>>,
    last: Option<Frame>,
    pub(super) payer: Option<Payer<'s>>,
    /// The slots are the kernel's store's, and not the daemon's to pay for.
    lends: bool,
    /// The client can pay for no more frames now.
    refused: bool,
}

impl<'s> Cursor<'s> {
    /// `node`: where its frames lie, if the store keeps NUMA nodes apart.
    pub(crate) fn new(store: &'s Store, node: Option<u32>) -> Self {
        Self {
            store,
            node,
            slots: 0..0,
            populated: 0,
            filled: 0,
            keys: Vec::new(),
            filling: None,
            last: None,
            payer: None,
            lends: false,
            refused: false,
        }
    }

    /// Makes frames of this client's pages.
    pub(crate) fn paid_by(mut self, client: &'s PidFd, pid: i32) -> Self {
        self.payer = Some(Payer::Process(client, pid));
        self
    }

    /// Makes a frame with these bytes and `refs` users.
    pub(crate) fn put(&mut self, bytes: &[u8; PAGE_SIZE], refs: u32) -> Result<Frame, GrowError> {
        self.put_as(bytes, None, refs)
    }

    /// Makes a frame with these bytes and `refs` users. Where bytes with this key were
    /// [expected](Cursor::expect), and are there, they are neither read nor written.
    pub(crate) fn put_as(&mut self, bytes: &[u8; PAGE_SIZE], key: Option<u64>, refs: u32) -> Result<Frame, GrowError> {
        if self.refused {
            return Err(GrowError::Payer(Errno::NOMEM));
        }
        loop {
            self.need_slots()?;
            let frame = Frame(self.slots.start);
            if frame.0 >= self.populated {
                self.populate(frame)?;
            }
            self.slots.start += 1;
            let holds = match self.filled.checked_sub(frame.0) {
                None | Some(0) => Holds::Nothing,
                Some(left) if key == Some(self.keys[self.keys.len() - left as usize]) => Holds::TheseBytes,
                Some(_) => Holds::OtherBytes,
            };
            if self.store.publish(frame, bytes, refs, holds) {
                self.last = Some(frame);
                return Ok(frame);
            }
        }
    }

    /// Reserves slots if none are left.
    pub(super) fn need_slots(&mut self) -> Result<(), GrowError> {
        if self.slots.is_empty() {
            self.store.check_memory()?;
            self.reserve()?;
        }
        Ok(())
    }

    /// Announces what the next frames will probably hold: consecutive pieces, with their keys.
    pub(crate) fn expect<'b>(
        &mut self,
        pieces: impl IntoIterator<Item = (&'b [[u8; PAGE_SIZE]], &'b [u64])>,
    ) -> Result<(), GrowError> {
        self.need_slots()?;
        let mut pieces = pieces.into_iter().peekable();
        if self.lends || self.slots.start < self.populated || pieces.peek().is_none() {
            return Ok(());
        }
        if self.filling.is_none() {
            self.filling = Filling::new(self.store, self.slots.clone());
        }
        let Some(filling) = &self.filling else { return Ok(()) };
        let mut filled = self.slots.start;
        self.keys.clear();
        for (pages, keys) in pieces {
            let most = pages.len().min((self.slots.end - filled) as usize);
            let done = filling.fill(Frame(filled), &pages[..most]);
            filled += done as u32;
            self.keys.extend(&keys[..done]);
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
        let first = Frame(slots.start);
        self.lends = self.payer.is_some() && self.store.with(first, |segment, _| segment.is_lent()) == Some(true);
        if huge && !self.lends && self.store.make_huge(first) {
            populated = slots.end;
        }
        let begin = slots.start..slots.start + cut;
        (self.slots, self.populated, self.filled) = (begin.end..slots.end, populated, 0);
        self.store.give_slots_back(begin);
        match self.payer {
            Some(Payer::Process(_, pid)) if self.lends && self.store.is_short(pid) => Err(self.refuse(Errno::NOMEM)),
            _ => Ok(()),
        }
    }

    /// Takes back a frame that [`Cursor::put`] made and that has no handle.
    pub(crate) fn undo(&mut self, frame: Frame, refs: u32) {
        // A prediction may have made another page its user all the same: the last user quarantines
        // it.
        if (0..refs).any(|_| self.store.unref(frame).is_some()) {
            self.store.quarantine(frame);
        }
    }

    /// Allocates memory before it is written, so that a lack of it is an error here and no SIGBUS.
    fn populate(&mut self, frame: Frame) -> Result<(), GrowError> {
        let Some(segment) = self.store.segment(frame) else { return Ok(()) };
        let (slot, mut len) = (frame.slot().index(), 1);
        if !self.lends || !self.make(&segment, slot)? {
            let (page, Some(file)) = (PAGE_SIZE as u64, segment.own()) else { return Ok(()) };
            len = if self.lends { 1 } else { POPULATE.min(self.slots.end - frame.0) };
            let allocated = memfd::allocate(&file.writer, slot as u64 * page, u64::from(len) * page);
            allocated.map_err(GrowError::Allocate)?;
        }
        self.populated = frame.0 + len;
        Ok(())
    }

    /// Allocates a slot of the kernel's store. `false`: the daemon is to pay for it.
    fn make(&mut self, segment: &Segment, slot: usize) -> Result<bool, GrowError> {
        let (Some(lending), Some(payer)) = (&segment.lending, self.payer) else { return Ok(false) };
        let page = |of: &Segment, slot: usize| {
            let lending = of.lending.as_ref()?;
            Some(pageonefs::Payer::Page { id: lending.file, index: slot as u64 })
        };
        let named = match payer {
            Payer::Process(_, pid) => Some(pageonefs::Payer::Process(pid)),
            Payer::AsFor(frame) => self.store.with(frame, page).flatten(),
        };
        let Some(named) = named else { return Ok(false) };
        let made = lending.make(slot, named);
        match (payer, made) {
            // Its number may be another's, who is not to pay.
            (Payer::Process(client, _), _) if client.has_exited() => {
                let given_back = segment.own().map_or(Ok(()), |file| file.punch_unused(slot));
                given_back.map_err(GrowError::Allocate)?;
                Err(self.refuse(Errno::SRCH))
            }
            (Payer::Process(..), Err(GrowError::Payer(why))) => Err(self.refuse(why)),
            (_, made) => made.map(|()| true),
        }
    }

    /// The client gets no more frames in this pass: its group is not searched for memory again and
    /// again.
    fn refuse(&mut self, why: Errno) -> GrowError {
        if let Some(Payer::Process(_, pid)) = self.payer {
            tracing::debug!(pid, "its control group gets no more frames now: {why}");
        }
        self.refused = true;
        GrowError::Payer(why)
    }
}

impl Drop for Cursor<'_> {
    fn drop(&mut self) {
        // Before another cursor can reserve the slots and register them.
        self.filling = None;
        self.store.give_slots_back(self.slots.clone());
    }
}

/// Slots registered for filling while this lives: then the segment is one mapping again.
struct Filling<'s> {
    filler: &'s Uffd,
    segment: Arc<Segment>,
    part: Range<usize>,
}

impl<'s> Filling<'s> {
    /// `None`: the kernel does not offer it, or refuses now.
    fn new(store: &'s Store, slots: Range<u32>) -> Option<Self> {
        let (filler, segment) = (store.filler.as_ref()?, store.segment(Frame(slots.start))?);
        let start = Frame(slots.start).slot().index() * PAGE_SIZE;
        let part = start..start + (slots.end - slots.start) as usize * PAGE_SIZE;
        segment.map().register(filler, part.clone()).ok()?;
        Some(Self { filler, segment, part })
    }

    /// Gives slots without memory these bytes; returns how many.
    fn fill(&self, first: Frame, pages: &[[u8; PAGE_SIZE]]) -> usize {
        self.segment.map().fill(self.filler, first.slot().index(), pages)
    }
}

impl Drop for Filling<'_> {
    fn drop(&mut self) {
        self.segment.map().unregister(self.filler, self.part.clone());
    }
}
