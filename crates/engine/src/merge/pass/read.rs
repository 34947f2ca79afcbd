//! The reading half of a turn: which candidates come next, by guesses, by digests of the agent's,
//! or from outside.

use kmem::PAGE_SIZE;
use kmem::procmem::ReadError;
use wire::{PageNo, RegionId, Run};

use super::{BATCH, BATCH_RUNS, Found, Stop, Turn};
use crate::client::batch::Target;
use crate::ledger::Region;
use crate::merge::plan::{GUESSES, Plan, Row};

/// Pages read at a time.
const CHUNK: usize = 128;
/// Pages that the agent is asked about at a time, how many times ahead, and how few are read from
/// outside.
const ASK: usize = 512;
const AHEAD: usize = 2;
const FEW: usize = 64;
/// Pages read behind a guess.
const PROBE: usize = 4;
/// So many pages in a row must have matched frames in a row before the next ones are guessed.
const PROVEN: u32 = 8;

/// A worker's buffers.
pub(crate) struct Scratch {
    bytes: Vec<u8>,
    page: Box<[u8; PAGE_SIZE]>,
    pages: Vec<PageNo>,
    addresses: Vec<usize>,
    /// Of the first pages; for the others they are not known yet.
    digests: Vec<u64>,
    handles: Vec<Option<u32>>,
}

impl Scratch {
    pub(crate) fn new() -> Self {
        Self {
            bytes: vec![0; CHUNK * PAGE_SIZE],
            page: Box::new([0; PAGE_SIZE]),
            pages: Vec::new(),
            addresses: Vec::new(),
            digests: Vec::new(),
            handles: Vec::new(),
        }
    }
}

/// Pages whose digests the agent was asked for.
pub(super) struct Ahead {
    request: u64,
    pages: Vec<PageNo>,
}

/// What is to be looked at next; the pages themselves are in [`Scratch`].
struct Chunk {
    going_on: bool,
    /// Pages planned without being read.
    guessed: u32,
    /// The pages were asked about before; which of these they are.
    asked: Option<(Ahead, Vec<usize>)>,
    /// What the agent should be asked about now.
    to_ask: Vec<Vec<PageNo>>,
}

impl Chunk {
    /// The last page that it takes the turn to. `None`: there are no more candidates.
    fn last(&self, scratch: &Scratch) -> Option<PageNo> {
        match &self.asked {
            Some((asked, _)) => asked.pages.last().copied(),
            None => scratch.pages.last().copied(),
        }
    }
}

/// Where the bytes of some pages are.
pub(super) enum Source<'s> {
    Read {
        pages: &'s [[u8; PAGE_SIZE]],
        /// Whose content one other page had shown before these were looked up.
        sighted: Vec<bool>,
    },
    /// Not read yet.
    Client { addresses: &'s [usize], buffer: &'s mut [u8; PAGE_SIZE] },
}

impl Source<'_> {
    /// This page and those behind it that will become frames too, as far as can be told, in pieces
    /// without gaps.
    pub(super) fn sighted(&self, at: usize) -> impl Iterator<Item = &[[u8; PAGE_SIZE]]> {
        let (pages, sighted) = match self {
            Source::Read { pages, sighted } => (*pages, sighted.as_slice()),
            Source::Client { .. } => Default::default(),
        };
        let (mut from, is_one) = (at, move |&page: &usize| page == at || sighted[page]);
        std::iter::from_fn(move || {
            let start = (from..pages.len()).find(is_one)?;
            from = (start..pages.len()).find(|page| !is_one(page)).unwrap_or(pages.len());
            Some(&pages[start..from])
        })
    }
}

impl Turn<'_> {
    /// Reads every candidate once. Each client begins at another place of its regions: two that
    /// hold the same content in the same order would else be read side by side, be first by
    /// turns, and leave frames of both in a pattern without runs.
    pub(super) fn read_candidates(&mut self, scratch: &mut Scratch) -> Result<(), Stop> {
        let regions: Vec<(RegionId, u32)> = self.client.state().regions.iter().map(|(&id, r)| (id, r.pages)).collect();
        // Multiples of the golden ratio lie far apart.
        let place = self.client.number.0.wrapping_mul(0x9e37_79b9);
        for (id, pages) in regions {
            let begin = PageNo(((u64::from(place) * u64::from(pages)) >> 32) as u32);
            self.read_range(id, Run::between(begin, PageNo(pages)), scratch)?;
            self.read_range(id, Run::between(PageNo(0), begin), scratch)?;
        }
        Ok(())
    }

    fn read_range(&mut self, id: RegionId, pages: Run, scratch: &mut Scratch) -> Result<(), Stop> {
        let mut plan = Plan::default();
        let mut from = pages.page;
        self.row = Row::default();
        self.forget_ahead();
        while !self.shared.stopping() {
            self.shared.pacer.pause(|| self.shared.stopping());
            if plan.runs.is_empty() && self.client.is_full() {
                return Err(Stop::Full);
            }
            let Some(chunk) = self.pick(id, Run::between(from, pages.end()), &mut plan, scratch) else { break };
            self.shared.pacer.took(u64::from(chunk.guessed) + scratch.pages.len() as u64);
            if !chunk.going_on {
                self.undo(id, &plan.runs, false);
                return Err(Stop::Client);
            }
            let Some(last) = chunk.last(scratch) else { break };
            from = last + 1;
            for pages in chunk.to_ask {
                let seed = self.client.domain.seed();
                let Some(request) = self.client.answers.ask(&self.client.conn, id, seed, &pages) else { break };
                self.ahead.push_back(Ahead { request, pages });
            }
            scratch.digests.clear();
            if let Some((asked, wanted)) = chunk.asked {
                match self.client.answers.wait(asked.request) {
                    Some(digests) => scratch.digests.extend(wanted.iter().map_while(|&at| digests.get(at).copied())),
                    None => self.forget_ahead(),
                }
            }
            let result = self.read_chunk(id, scratch, &mut plan);
            self.grant_row();
            if let Err(stop) = result {
                self.send(id, plan)?;
                return Err(stop);
            }
            if plan.pages >= BATCH || plan.runs.len() >= BATCH_RUNS {
                self.send(id, std::mem::take(&mut plan))?;
            }
        }
        self.send(id, plan)
    }

    /// Picks the next candidates of a region in `range`: guesses first, then what the agent was
    /// asked about, or a chunk to read. `None`: the region is gone.
    fn pick(&mut self, id: RegionId, range: Run, plan: &mut Plan, scratch: &mut Scratch) -> Option<Chunk> {
        let mut state = self.client.state();
        let going_on = state.connected && !state.held && state.refused.is_none();
        let is_idle = state.outstanding == 0;
        let region = state.regions.get_mut(&id)?;
        let guessed = if range.page == self.row.page + 1 { self.guess(region, range.end(), plan) } else { 0 };
        if guessed > 0 && !self.ahead.is_empty() {
            self.forget_ahead();
        }
        let asked = self.ahead.pop_front().map(|asked| {
            // Some may have been written, discarded or recycled by now.
            let wanted: Vec<usize> =
                (0..asked.pages.len()).filter(|&at| region.is_candidate(asked.pages[at])).collect();
            (asked, wanted)
        });
        match &asked {
            Some((asked, wanted)) => {
                scratch.pages.clear();
                scratch.pages.extend(wanted.iter().map(|&at| asked.pages[at]));
            }
            None => {
                let most = if guessed > 0 { PROBE } else { CHUNK };
                region.candidates(range.page + guessed, most, &mut scratch.pages);
                scratch.pages.retain(|&page| page < range.end());
            }
        }
        scratch.addresses.clear();
        scratch.addresses.extend(scratch.pages.iter().map(|&page| region.address(page)));
        let mut chunk = Chunk { going_on, guessed, asked, to_ask: Vec::new() };
        if is_idle
            && self.digests_do
            && guessed == 0
            && let Some(last) = chunk.last(scratch)
        {
            chunk.to_ask = self.to_ask(region, Run::between(last + 1, range.end()));
        }
        Some(chunk)
    }

    /// What the agent should be asked about: candidates of the range, or what follows those that it
    /// was asked about last.
    fn to_ask(&self, region: &mut Region, range: Run) -> Vec<Vec<PageNo>> {
        let mut from = self.ahead.back().and_then(|last| last.pages.last()).map_or(range.page, |&last| last + 1);
        let mut to_ask = Vec::new();
        while self.ahead.len() + to_ask.len() < AHEAD {
            let mut pages = Vec::new();
            region.candidates(from, ASK, &mut pages);
            pages.retain(|&page| page < range.end());
            let Some(&last) = pages.last().filter(|_| pages.len() >= FEW) else { break };
            from = last + 1;
            to_ask.push(pages);
        }
        to_ask
    }

    fn forget_ahead(&mut self) {
        self.ahead.clear();
        self.client.answers.forget();
    }

    /// Plans pages behind the row without reading them; returns how many.
    fn guess(&mut self, region: &mut Region, end: PageNo, plan: &mut Plan) -> u32 {
        if self.row.len < PROVEN {
            return 0;
        }
        let store = &self.client.domain.store;
        // A page of another node is none of the run, whatever it holds; one of which nothing is known may
        // be anywhere.
        let nodes = store.by_node.then(|| {
            let next = self.row.page + 1;
            let pages = Run::between(next, (next + self.row.ahead).min(end));
            // Unknown, they are read next, which tells why.
            self.nodes_of(&pages.pages().map(|page| region.address(page)).collect::<Vec<_>>()).unwrap_or_default()
        });
        let row = &mut self.row;
        let mut guessed = 0;
        while guessed < row.ahead && row.page + 1 < end && plan.pages < BATCH {
            let (page, target) = (row.page + 1, row.target.next());
            if let Target::Frame(frame) = target {
                let near = nodes.as_ref().is_none_or(|nodes| nodes.get(guessed as usize) == Some(&store.node(frame)));
                if !near || !store.try_ref(frame) {
                    break;
                }
            }
            if !region.guess(page) {
                if let Target::Frame(frame) = target {
                    self.client.domain.release(frame, false);
                }
                break;
            }
            plan.push(page, target);
            (row.page, row.target) = (page, target);
            guessed += 1;
        }
        row.ahead = (row.ahead * 2).min(*GUESSES.end());
        guessed
    }

    /// Looks a chunk up: pages with digests at once, the others when they are read.
    fn read_chunk(&mut self, id: RegionId, scratch: &mut Scratch, plan: &mut Plan) -> Result<(), Stop> {
        let Scratch { bytes, page: buffer, pages, addresses, digests, handles } = scratch;
        self.firsts = 0;
        let mut done = digests.len();
        if done > 0 {
            let source = Source::Client { addresses, buffer };
            self.look_up_all(id, (&pages[..done], &addresses[..done]), source, digests, handles, plan)?;
        }
        while done < pages.len() {
            let chunk = &addresses[done..(done + CHUNK).min(pages.len())];
            let read = match kmem::procmem::read_pages(self.client.pid, chunk, bytes) {
                Ok(read) => read,
                Err(ReadError::Gone { .. }) => return Err(Stop::Client),
                Err(e @ ReadError::NoPermission { .. }) => return Err(Stop::Fatal(e.to_string())),
                Err(_) => 0,
            };
            let (read_pages, _) = bytes[..read * PAGE_SIZE].as_chunks::<PAGE_SIZE>();
            digests.clear();
            digests.extend(read_pages.iter().map(|bytes| self.client.domain.digest(bytes)));
            let chunk = (&pages[done..done + read], &chunk[..read]);
            let source = Source::Read { pages: read_pages, sighted: Vec::with_capacity(read) };
            self.look_up_all(id, chunk, source, digests, handles, plan)?;
            done += read;
            if done < pages.len() && read == 0 {
                // This page can't be read: it was unmapped just now. The next scan will tell.
                self.record(id, &[(pages[done], Found::Nothing)], plan);
                done += 1;
            }
        }
        self.digests_do = self.firsts * 4 > pages.len() * 3;
        Ok(())
    }

    /// The bytes of one page of a source. `None`: it can't be read, or is not what its agent said.
    pub(super) fn bytes<'s>(&self, source: &'s mut Source<'_>, at: usize, key: u64) -> Option<&'s [u8; PAGE_SIZE]> {
        match source {
            Source::Read { pages, .. } => pages.get(at),
            Source::Client { addresses, buffer } => {
                let read = kmem::procmem::read_pages(self.client.pid, &addresses[at..at + 1], &mut buffer[..]);
                let domain = &self.client.domain;
                // A frame under a wrong key would keep others from merging that content.
                (read == Ok(1) && domain.key_of(domain.digest(&buffer[..]), self.node) == Some(key))
                    .then_some(&**buffer)
            }
        }
    }
}
