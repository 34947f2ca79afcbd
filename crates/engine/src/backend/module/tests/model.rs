//! A model of the kernel.

use std::collections::{BTreeMap, BTreeSet};

use kmem::pageonefs::{Ask, Bits, Entry as Pairing, Harvest, digest_of};
use rustix::io::Errno;
use wire::{PageNo, Run};

use crate::backend::module::kernel::Kernel;
use crate::sync::Mutex;

/// A page of the model: what it holds (0: a hole), and the frame that it uses.
#[derive(Clone, Copy, Default)]
pub(in crate::backend) struct Page {
    pub(in crate::backend) content: u64,
    pub(in crate::backend) frame: Option<u64>,
    pub(in crate::backend) dirty: bool,
    /// Somebody holds it: it is not merged.
    pub(in crate::backend) held: bool,
    /// A device has it: it is not punched.
    pub(in crate::backend) pinned: bool,
    pub(in crate::backend) away: bool,
    /// Of a store: the frame as which it is lent.
    pub(in crate::backend) lent: Option<u64>,
}

#[derive(Default)]
pub(in crate::backend) struct Frame {
    pub(in crate::backend) content: u64,
    pub(in crate::backend) users: u32,
    /// It is a page of a store's file.
    lent: bool,
}

/// How often it was called, and for how many words of bits.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(in crate::backend) struct Calls {
    pub(in crate::backend) harvests: u64,
    pub(in crate::backend) words: u64,
    pub(in crate::backend) digests: u64,
    pub(in crate::backend) merges: u64,
}

/// The kernel as uapi.h has it.
#[derive(Default)]
pub(in crate::backend) struct Model {
    pub(in crate::backend) files: BTreeMap<u64, Vec<Page>>,
    /// Which of them are stores'.
    pub(in crate::backend) stores: BTreeSet<u64>,
    pub(in crate::backend) frames: BTreeMap<u64, Frame>,
    pub(in crate::backend) last: u64,
    pub(in crate::backend) max_users: u32,
    pub(in crate::backend) digested: u64,
    pub(in crate::backend) calls: Calls,
    /// The next call ends by a signal after so many entries.
    pub(in crate::backend) ends_after: Option<u32>,
}

impl Model {
    fn leave(&mut self, id: u64, page: usize) {
        if let Some(frame) = self.files.get_mut(&id).and_then(|file| file[page].frame.take()) {
            self.frames.entry(frame).and_modify(|frame| frame.users -= 1);
            self.free_unused(frame);
        }
        // The frame is an ordinary one from now on.
        if let Some(frame) = self.files.get_mut(&id).and_then(|file| file[page].lent.take()) {
            self.frames.entry(frame).and_modify(|frame| frame.lent = false);
            self.free_unused(frame);
        }
    }

    fn free_unused(&mut self, frame: u64) {
        if self.frames.get(&frame).is_some_and(|frame| frame.users == 0 && !frame.lent) {
            self.frames.remove(&frame);
        }
    }

    fn lend(&mut self, id: u64, pairing: &mut Pairing) -> Result<u64, Errno> {
        assert_eq!(pairing.frame, 0, "a store's page is merged with no frame");
        let page = &mut self.files.get_mut(&id).unwrap()[pairing.index as usize];
        if let Some(frame) = page.lent {
            pairing.frame = frame;
            return Err(Errno::EXIST);
        }
        if page.held {
            return Err(Errno::BUSY);
        }
        self.last += 1;
        page.lent = Some(self.last);
        self.frames.insert(self.last, Frame { content: page.content, users: 0, lent: true });
        Ok(self.last)
    }

    /// A file of pages that hold something.
    pub(in crate::backend) fn fill(&mut self, id: u64, pages: usize) {
        self.files.insert(id, vec![Page { content: 1, ..Page::default() }; pages]);
    }

    pub(in crate::backend) fn write(&mut self, id: u64, page: usize, content: u64) {
        self.leave(id, page);
        let page = &mut self.files.get_mut(&id).unwrap()[page];
        (page.content, page.dirty) = (content, true);
    }

    fn merge_one(&mut self, id: u64, pairing: &mut Pairing) -> Result<u64, Errno> {
        let asked = (pairing.frame != 0).then_some(pairing.frame);
        let at = pairing.index as usize;
        let page = self.files[&id][at];
        if page.content == 0 || page.away {
            return Err(Errno::AGAIN);
        }
        if self.stores.contains(&id) {
            return self.lend(id, pairing);
        }
        if let Some(frame) = page.frame {
            let same = asked.filter(|&other| other != frame && self.frames.contains_key(&other));
            let Some(other) = same.filter(|other| self.frames[other].content == page.content) else {
                pairing.frame = frame;
                return Err(Errno::EXIST);
            };
            if self.frames[&other].users >= self.max_users {
                return Err(Errno::MLINK);
            }
            self.leave(id, at);
            self.frames.get_mut(&other).unwrap().users += 1;
            self.files.get_mut(&id).unwrap()[at].frame = Some(other);
            return Ok(other);
        }
        if page.held {
            return Err(Errno::BUSY);
        }
        let frame = match asked {
            Some(frame) => frame,
            None => {
                self.last += 1;
                self.frames.insert(self.last, Frame { content: page.content, users: 0, lent: false });
                self.last
            }
        };
        let found = self.frames.get_mut(&frame).ok_or(Errno::NOENT)?;
        if found.users >= self.max_users {
            return Err(Errno::MLINK);
        }
        if found.content != page.content {
            return Err(Errno::STALE);
        }
        found.users += 1;
        self.files.get_mut(&id).unwrap()[at].frame = Some(frame);
        Ok(frame)
    }
}

pub(in crate::backend) struct Fake(pub(in crate::backend) Mutex<Model>);

impl Kernel for Fake {
    fn harvest(&self, id: u64, start: u64, of: Bits, bits: &mut [u64]) -> Result<Harvest, Errno> {
        let mut model = self.0.lock();
        model.calls.harvests += 1;
        model.calls.words += bits.len() as u64;
        let file = model.files.get_mut(&id).ok_or(Errno::SRCH)?;
        bits.fill(0);
        let mut dirty = 0;
        let is_there = |page: &Page| of == Bits::All && (page.content != 0 || page.frame.is_some());
        for (at, page) in file.iter_mut().enumerate().skip(start as usize).take(bits.len() * 64) {
            let bit = at - start as usize;
            if std::mem::take(&mut page.dirty) || is_there(page) {
                bits[bit / 64] |= 1 << (bit % 64);
                dirty += 1;
            }
        }
        let mut rest = file.iter().enumerate().skip(start as usize + bits.len() * 64);
        let next = rest.find(|(_, page)| page.dirty || is_there(page)).map_or(u64::MAX, |(at, _)| at as u64 / 64 * 64);
        Ok(Harvest { dirty, next })
    }

    fn digest(&self, ask: &Ask<'_>, out: &mut [u64]) -> Result<u64, Errno> {
        let mut model = self.0.lock();
        model.calls.digests += 1;
        let (only, before) = (ask.only.unwrap(), model.digested);
        assert!(ask.start.is_multiple_of(64) && out.len() == only.len() * 64);
        out.fill(0);
        for (bit, word) in out.iter_mut().enumerate().filter(|(bit, _)| only[bit / 64] >> (bit % 64) & 1 == 1) {
            let page = model.files[&ask.id].get(ask.start as usize + bit).copied().unwrap_or_default();
            *word = match page.frame {
                Some(frame) if !ask.frames => frame * 2 + 1,
                _ if page.content == 0 => 0,
                _ if page.away => 2,
                _ => {
                    model.digested += 1;
                    digest_of(xxhash_rust::xxh3::xxh3_64_with_seed(&page.content.to_ne_bytes(), ask.seed))
                }
            };
        }
        Ok(model.digested - before)
    }

    fn merge(&self, id: u64, pairings: &mut [Pairing]) -> Result<u32, Errno> {
        let mut model = self.0.lock();
        model.calls.merges += 1;
        assert!(pairings.is_sorted_by(|a, b| a.index < b.index), "a batch is in ascending order");
        let mut merged = 0;
        for pairing in pairings {
            if model.ends_after == Some(merged) {
                model.ends_after = None;
                return Err(Errno::INTR);
            }
            let outcome = model.merge_one(id, pairing);
            *pairing = pairing.with(outcome);
            merged += 1;
        }
        Ok(merged)
    }

    /// Each on its own: others come between.
    fn punch(&self, id: u64, runs: &[Run], punched: &mut dyn FnMut(Run)) -> Result<(), Errno> {
        for page in runs.iter().flat_map(|run| run.page.0..run.end().0) {
            let mut model = self.0.lock();
            if model.files.get(&id).ok_or(Errno::SRCH)?[page as usize].pinned {
                continue;
            }
            model.write(id, page as usize, 0);
            drop(model);
            punched(Run::new(PageNo(page), 1));
        }
        Ok(())
    }
}
