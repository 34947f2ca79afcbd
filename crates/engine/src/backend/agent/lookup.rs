//! Looking pages up: a verdict on each candidate of a chunk.
//!
//! 1. A page of zeros is given back.
//! 2. A page in a *duplicate run*, neighbours of one content, takes the next replica of its frame,
//!    so that the run costs one mapping and not one a page.
//! 3. Content that is a frame: merge with it.
//! 4. Content that one other page was sighted with: it becomes a frame now (*promotion*), and the
//!    other page's client gets a merge request.
//! 5. Content that is new here, and that files of the domain have ([`crate::backend::module`]): it
//!    becomes a frame, which will be lent to the files. So does a page that maps a segment which
//!    nobody took back: else all of that would stay.
//! 6. New content: this page's sighting enters the index.
//!
//! A page of a huge page that is not to be split yet is only counted, on both sides
//! ([`crate::core::ledger::huge`]).

use std::collections::BTreeMap;
use std::sync::Arc;

use kmem::PAGE_SIZE;
use kmem::pagemap::{Categories, Query};
use kmem::range::Range;
use wire::{PageNo, RegionId, Run};

use super::plan::Verdict;
use super::read::Chunk;
use super::requests::Outgoing;
use crate::client::Client;
use crate::client::batch::Target;
use crate::core::content::frame::Frame;
use crate::core::content::index::{Place, Sighting};
use crate::core::merge::lookup::{self as merge, Found};
use crate::store::{Cursor, GrowError};
use crate::world::shared::Shared;
use crate::world::stall::touch;

/// From this many neighbours of one content on, replicas are worth their memory.
const REPLICATE: u32 = 16;

#[derive(Clone, Copy)]
pub(super) struct Candidate {
    here: Sighting,
    /// Its place in the chunk, where its bytes are.
    at: usize,
    /// The NUMA node of the page, where nodes are kept apart.
    node: Option<u32>,
    key: u64,
}

/// Neighbouring pages with one content, up to the page looked up last.
#[derive(Default)]
struct DuplicateRun {
    region: RegionId,
    page: PageNo,
    key: u64,
    /// The frame that the last page uses.
    frame: Option<Frame>,
    len: u32,
}

impl DuplicateRun {
    fn add(&mut self, region: RegionId, page: PageNo, key: u64) {
        if (self.region, self.page + 1, self.key) == (region, page, key) {
            self.len += 1;
        } else {
            *self = Self { region, key, frame: None, len: 1, page };
        }
        self.page = page;
    }
}

struct Cursors<'a> {
    client: &'a Client,
    of_nodes: BTreeMap<Option<u32>, Cursor<'a>>,
}

impl<'a> Cursors<'a> {
    fn at(&mut self, node: Option<u32>) -> &mut Cursor<'a> {
        let client = self.client;
        let new = || Cursor::new(&client.domain.store, node).paid_by(&client.pidfd, client.pid);
        self.of_nodes.entry(node).or_insert_with(new)
    }
}

pub(super) struct Lookup<'a> {
    shared: &'a Shared,
    client: &'a Arc<Client>,
    cursors: Cursors<'a>,
    duplicates: DuplicateRun,
    known: merge::Lookup,
    /// Of the chunk in hand, if its bytes were read: whose content one other page was sighted with.
    sighted: Vec<bool>,
    pub(super) verdicts: Vec<(PageNo, Verdict)>,
    /// Contents that were new, of small pages, since this was last set to 0.
    pub(super) firsts: usize,
    /// Pages that may map a segment which their domain did not take.
    earlier: Arc<BTreeMap<RegionId, Vec<Run>>>,
    /// Why the store could not grow for a page of the pass. What needs no new frame is merged.
    pub(super) full: Option<GrowError>,
    /// The store may still grow for this chunk: to ask costs more than to read a page.
    grows: bool,
    pub(super) requests: Outgoing,
}

impl<'a> Lookup<'a> {
    pub(super) fn new(shared: &'a Shared, client: &'a Arc<Client>) -> Self {
        Self {
            shared,
            client,
            cursors: Cursors { client, of_nodes: BTreeMap::new() },
            duplicates: DuplicateRun::default(),
            known: merge::Lookup::default(),
            sighted: Vec::new(),
            verdicts: Vec::new(),
            firsts: 0,
            earlier: client.state().flight.earlier.clone(),
            full: None,
            grows: true,
            requests: Outgoing::default(),
        }
    }

    /// Looks the pages of a chunk up and fills [`Lookup::verdicts`]. A page that the store cannot
    /// grow for has none.
    pub(super) fn look_up(&mut self, chunk: &mut Chunk<'_>) {
        self.verdicts.clear();
        self.grows = true;
        let nowhere = self.find_all(chunk);
        let in_huge = self.in_huge_pages(chunk);
        for (at, &page) in chunk.pages.iter().enumerate() {
            let key = chunk.keys.get(at).copied().filter(|_| nowhere.binary_search(&at).is_err());
            let Some(key) = key else {
                // It cannot be read, or the kernel is moving it and its node is not known. As
                // content without a node it would never meet its duplicates.
                self.verdicts.push((page, Verdict::Nothing));
                continue;
            };
            let here = Sighting { client: self.client.number, region: chunk.region, page };
            let candidate = Candidate { here, at, node: chunk.node(at), key };
            let verdict = if in_huge.binary_search(&page).is_ok() {
                self.look_up_huge(candidate)
            } else {
                let verdict = self.look_up_page(candidate, chunk).unwrap_or_else(|why| {
                    if !matches!(why, GrowError::Payer(_)) {
                        (self.full, self.grows) = (Some(why), false);
                    }
                    // Later pages may have frames already.
                    Verdict::Nothing
                });
                self.firsts += usize::from(matches!(verdict, Verdict::First(_)));
                verdict
            };
            self.verdicts.push((page, verdict));
        }
    }

    /// Makes keys of a chunk's digests, and finds the handles that they stand under. Returns which
    /// pages have no key, since their node is not known.
    fn find_all(&mut self, chunk: &mut Chunk<'_>) -> Vec<usize> {
        let domain = &self.client.domain;
        let mut nowhere = Vec::new();
        for at in 0..chunk.keys.len() {
            match domain.key_of(chunk.keys[at], chunk.node(at)) {
                Some(key) => chunk.keys[at] = key,
                None => nowhere.push(at),
            }
        }
        self.known.begin(&domain.index, chunk.keys);
        self.sighted.clear();
        if !chunk.read_bytes().is_empty() {
            let place = |(at, &key): (usize, &u64)| self.known.place(&domain.index, at, key);
            let is_sighted = |page| matches!(place(page), Some(Place::Sighted(_)));
            self.sighted.extend(chunk.keys.iter().enumerate().map(is_sighted));
        }
        nowhere
    }

    /// Pages of a chunk in huge pages that are not to be split yet, ascending.
    fn in_huge_pages(&self, chunk: &Chunk<'_>) -> Vec<PageNo> {
        if self.client.huge_pages.share > 0.0
            && let Some(region) = self.client.state().regions.get(&chunk.region)
        {
            return chunk.pages.iter().copied().filter(|&page| region.keeps_huge(page)).collect();
        }
        Vec::new()
    }

    fn look_up_page(&mut self, candidate: Candidate, chunk: &mut Chunk<'_>) -> Result<Verdict, GrowError> {
        let Candidate { here, at, node, key } = candidate;
        let domain = &self.client.domain;
        if key == domain.zero_digest {
            return Ok(Verdict::Merge(Target::Zero));
        }
        self.duplicates.add(here.region, here.page, key);
        if self.grows
            && self.duplicates.len >= REPLICATE
            && let Some(before) = self.duplicates.frame
            && let Some(bytes) = chunk.bytes(self.client, at)
            && let Some(frame) = domain.next_replica(key, before, bytes, self.cursors.at(node))?
        {
            self.duplicates.frame = Some(frame);
            return Ok(Verdict::Merge(Target::Frame(frame)));
        }
        let verdict = self.find(candidate, chunk)?;
        if let Verdict::Merge(Target::Frame(frame)) = verdict {
            self.duplicates.frame = Some(frame);
        }
        Ok(verdict)
    }

    /// The frame of a content; makes one where the content was sighted elsewhere.
    fn find(&mut self, candidate: Candidate, chunk: &mut Chunk<'_>) -> Result<Verdict, GrowError> {
        let Candidate { here, at, node, key } = candidate;
        let domain = &self.client.domain;
        let (handle, place) = match self.known.see(&domain.index, at, key, here) {
            Found::New(handle) | Found::Own(handle) => return self.first(candidate, handle, chunk),
            Found::At(handle, place) => (handle, place),
            Found::Leaving | Found::Full => return Ok(Verdict::Nothing),
        };
        // A second try settles the case that another pass promoted the sighting meanwhile.
        let mut place = Some(place);
        for _ in 0..2 {
            match place {
                Some(Place::Frame(frame)) if domain.store.try_ref(frame) => {
                    return Ok(Verdict::Merge(Target::Frame(frame)));
                }
                Some(Place::Sighted(there)) if there == here => return self.first(candidate, handle, chunk),
                Some(Place::Sighted(there)) if self.grows => {
                    let cursor = self.cursors.at(node);
                    cursor.expect(pieces(chunk.read_bytes(), chunk.keys, &self.sighted, at))?;
                    let Some(bytes) = chunk.bytes(self.client, at) else { return Ok(Verdict::Nothing) };
                    // One user is this page, the other the page that was sighted.
                    let frame = cursor.put_as(bytes, Some(key), 2)?;
                    if domain.promote(handle, there, frame) {
                        self.requests.request(self.shared, domain, there, handle, frame);
                        return Ok(Verdict::Merge(Target::Frame(frame)));
                    }
                    cursor.undo(frame, 2);
                }
                _ => return Ok(Verdict::Nothing),
            }
            place = domain.index.place(handle, key);
        }
        Ok(Verdict::Nothing)
    }

    /// A content that no other page of a client has. Where a file's page has it, it becomes a
    /// frame, which will be lent to the files; this page is its user.
    fn first(&mut self, candidate: Candidate, handle: u32, chunk: &mut Chunk<'_>) -> Result<Verdict, GrowError> {
        let Candidate { here, at, node, key } = candidate;
        let domain = &self.client.domain;
        let leaves = self.maps_earlier(here);
        if !self.grows || !(leaves || domain.is_in_files(key)) {
            return Ok(Verdict::First(handle));
        }
        let Some(bytes) = chunk.bytes(self.client, at) else { return Ok(Verdict::First(handle)) };
        let cursor = self.cursors.at(node);
        let frame = cursor.put_as(bytes, Some(key), 1).inspect_err(|_| {
            // Without a verdict the page is no sighting.
            domain.index.forget(handle, Place::Sighted(here));
        })?;
        if domain.promote(handle, here, frame) {
            return Ok(Verdict::Merge(Target::Frame(frame)));
        }
        // Another page came first and made a frame: this one is requested for it.
        cursor.undo(frame, 1);
        Ok(Verdict::First(handle))
    }

    /// Whether a page maps a segment that its domain did not take: all of that stays as long as one
    /// page does.
    fn maps_earlier(&self, here: Sighting) -> bool {
        let runs = self.earlier.get(&here.region).map_or(&[][..], |runs| runs);
        let at = runs.partition_point(|run| run.end() <= here.page);
        if runs.get(at).is_none_or(|run| run.page > here.page) {
            return false;
        }
        let Some(start) = self.client.state().regions.get(&here.region).map(|region| region.address(here.page)) else {
            return false;
        };
        // It may have been written since: then it is a copy.
        let query = Query { required: Categories::FILE, returned: Categories::FILE, ..Query::default() };
        let (page, mut maps) = (Range::new(start, PAGE_SIZE), false);
        let scan = || self.client.memory.pagemap.scan(page, &query, &mut |_| maps = true).is_ok();
        touch(self.client.user.owner, scan) == Some(true) && maps
    }

    /// Whether a page could be merged that is in a huge page which is not to be split yet.
    fn look_up_huge(&mut self, Candidate { here, at, key, .. }: Candidate) -> Verdict {
        let domain = &self.client.domain;
        if key == domain.zero_digest {
            return Verdict::Kept;
        }
        match self.known.see(&domain.index, at, key, here) {
            Found::New(handle) | Found::Own(handle) => Verdict::First(handle),
            Found::At(handle, Place::Sighted(there)) => {
                self.requests.seen_elsewhere(self.shared, domain, there, handle);
                Verdict::Kept
            }
            Found::At(_, Place::Frame(_)) => Verdict::Kept,
            Found::At(_, Place::Below(_)) | Found::Leaving | Found::Full => Verdict::Nothing,
        }
    }
}

/// The page at `at` and later ones that were sighted, in pieces without gaps, with their keys.
fn pieces<'b>(
    pages: &'b [[u8; PAGE_SIZE]],
    keys: &'b [u64],
    sighted: &'b [bool],
    at: usize,
) -> impl Iterator<Item = (&'b [[u8; PAGE_SIZE]], &'b [u64])> {
    let (mut from, is_one) = (at, move |&page: &usize| page == at || sighted[page]);
    std::iter::from_fn(move || {
        let start = (from..pages.len()).find(is_one)?;
        from = (start..pages.len()).find(|page| !is_one(page)).unwrap_or(pages.len());
        Some((&pages[start..from], &keys[start..from]))
    })
}

#[cfg(test)]
mod tests;
