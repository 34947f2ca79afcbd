//! Taking clients back: after a restart of the daemon, and after a lost connection.
//!
//! What a client has merged stands in the kernel's own tables, so the daemon need not trust the
//! agent with it. A mapping of a segment in `/proc/PID/maps` names the segment (by inode number)
//! and the slot (by offset), and `PAGEMAP_SCAN` tells which of its pages were copied since. An
//! agent hands its segments' descriptors back. The daemon takes one only if a daemon of this
//! directory noted that it made it for this domain ([`crate::world::state_file`]). A segment that
//! is taken back cannot be written any more; its frames are shared until their last user leaves.
//!
//! A segment that is not taken stays as long as pages map it. These are noted, and merge anew, even
//! those whose content no other page has.
//!
//! A clone of a snapshot comes with segments that `pageone snapshot run` has made, and that nobody
//! can change any more ([`kmem::memfd::require_written`]). It maps them from its beginning.

use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;

use kmem::PAGE_SIZE;
use kmem::pagemap::{Categories, PageRun, Pagemap, Query};
use kmem::procfs::{MapLine, Maps};
use kmem::range::Range;
use wire::{PageNo, RegionId, Run, SEGMENT_PAGES, SegmentId};

use crate::client::Client;
use crate::config::bounds::SLICE;
use crate::core::content::frame::{Frame, NO_HANDLE};
use crate::core::content::index::{Place, Seen};
use crate::core::ledger::{Entry, Region};
use crate::store::domain::Domain;
use crate::store::{Segment, Store};
use crate::world::shared::Shared;

/// Mappings that are looked at in a turn.
const LINES: usize = 256;

/// Fills a new client's ledger from its mappings.
///
/// It can have very many. What that costs the daemon is bounded by the pages that it announced, the
/// frames of its domain and its mappings, and done in turns.
pub(crate) fn rebuild(shared: &Shared, client: &Client, maps: Maps) -> std::io::Result<()> {
    let lines = shared.pacer.apart(|| of_segments(maps))?;
    let mut mapped = Mapped::new(client);
    lines.chunks(LINES).for_each(|lines| turn(shared, client, || lines.iter().for_each(|line| mapped.add(line))));
    for (&first, &end) in &mapped.outside.0 {
        let slices = (first..end).step_by(SLICE as usize);
        let pin = |from: u32| (from..end.min(from + SLICE)).for_each(|frame| client.domain.store.pin(Frame(frame)));
        slices.for_each(|from| turn(shared, client, || pin(from)));
    }
    let earlier = std::mem::take(&mut mapped.earlier);
    let mut state = client.state();
    for (id, runs) in &earlier {
        // A scan does not find those in swap. They are read in their turn, which brings them back.
        let region = state.regions.get_mut(id);
        region.into_iter().for_each(|region| runs.iter().for_each(|&run| region.ages.found_written(run)));
    }
    state.flight.earlier = Arc::new(earlier);
    drop(state);
    let mut left = &mapped.parts[..];
    while !left.is_empty() {
        // The pages of a turn: a segment's at most.
        let mut pages = 0;
        let fits = |part: &&Part| {
            pages += part.range.pages();
            pages <= SLICE as usize
        };
        let count = left.iter().take(LINES).take_while(fits).count().max(1);
        let (now, later) = left.split_at(count);
        let copied = || now.iter().map(|part| copied_pages(&client.memory.pagemap, part.range)).collect();
        let copied: Vec<_> = shared.pacer.apart::<std::io::Result<_>>(copied)?;
        let enter = |(part, copied): (&Part, &Vec<bool>)| enter_part(shared, client, part, copied);
        turn(shared, client, || now.iter().zip(&copied).for_each(enter));
        left = later;
    }
    Ok(())
}

/// Does a short piece of the work for a client when it is its user's turn. Merging does not wait.
fn turn(shared: &Shared, client: &Client, work: impl FnOnce()) {
    shared.users.adoptions.take(client.user.owner, || shared.pacer.apart(work));
}

/// A mapping of a segment.
struct Line {
    range: Range,
    offset: u64,
    segment: SegmentId,
    shared: bool,
    snapshot: bool,
}

fn of_segments(maps: Maps) -> std::io::Result<Vec<Line>> {
    let mut lines = Vec::new();
    maps.for_each(|line| {
        if let Some(name) = line.path.strip_prefix("/memfd:pageone:") {
            let MapLine { range, offset, inode, perms, .. } = *line;
            let snapshot = name.starts_with("snapshot");
            lines.push(Line { range, offset, segment: inode, shared: perms.shared, snapshot });
        }
    })?;
    Ok(lines)
}

/// A part of a region that maps consecutive frames.
struct Part {
    region: RegionId,
    range: Range,
    first: Frame,
}

/// Numbers of frames, as ranges that do not touch: the first of each, and the end.
#[derive(Default)]
struct Spans(BTreeMap<u32, u32>);

impl Spans {
    fn add(&mut self, mut first: u32, mut end: u32) {
        while let Some((&at, &until)) = self.0.range(..=end).next_back().filter(|&(_, &until)| until >= first) {
            self.0.remove(&at);
            (first, end) = (first.min(at), end.max(until));
        }
        self.0.insert(first, end);
    }
}

/// What a client maps of its domain's store.
struct Mapped<'a> {
    store: &'a Store,
    /// Its regions, by address.
    regions: Vec<(Range, RegionId)>,
    /// Segments that were looked up, with their first frames. They are kept until the frames' users
    /// are counted: a segment without counted users would be closed.
    segments: HashMap<SegmentId, Option<(Frame, Arc<Segment>)>>,
    parts: Vec<Part>,
    /// Frames that it maps elsewhere. They are pinned: the agent's word of it
    /// ([`wire::ToDaemon::Retained`]) may be lost.
    outside: Spans,
    /// Pages of its regions that map segments which the store does not have.
    earlier: BTreeMap<RegionId, Vec<Run>>,
}

impl<'a> Mapped<'a> {
    fn new(client: &'a Client) -> Self {
        let range = |region: &Region| Range::new(region.start as usize, region.pages as usize * PAGE_SIZE);
        let state = client.state();
        let mut regions: Vec<_> = state.regions.iter().map(|(&id, region)| (range(region), id)).collect();
        regions.sort_unstable_by_key(|(range, _)| range.start);
        let (segments, parts, outside, earlier) = Default::default();
        Self { store: &client.domain.store, regions, segments, parts, outside, earlier }
    }

    /// The regions that have a part of a range, from the last one on. Of regions that overlap,
    /// which no honest agent announces, some may be missed.
    fn touching(&self, all: Range) -> impl Iterator<Item = (Range, &(Range, RegionId))> {
        let end = self.regions.partition_point(|(region, _)| region.start < all.end());
        let touching = self.regions[..end].iter().rev().take_while(move |(region, _)| region.end() > all.start);
        touching.filter_map(move |region| Some((all.intersect(&region.0)?, region)))
    }

    /// Notes a mapping of a segment that the store does not have.
    fn add_earlier(&mut self, line: &Line) {
        let page = |region: &Range, address| PageNo(((address - region.start) / PAGE_SIZE) as u32);
        let run = |(part, (region, id)): (Range, &(Range, RegionId))| {
            (*id, Run::between(page(region, part.start), page(region, part.end())))
        };
        let runs: Vec<_> = self.touching(line.range).map(run).collect();
        runs.into_iter().for_each(|(region, run)| self.earlier.entry(region).or_default().push(run));
    }

    fn add(&mut self, line: &Line) {
        let segment = self.segments.entry(line.segment).or_insert_with(|| self.store.hold(line.segment));
        let Some(&mut (Frame(first), _)) = segment.as_mut() else {
            // A snapshot's is there for others, too.
            if !line.shared && !line.snapshot {
                self.add_earlier(line);
            }
            return;
        };
        // A mapping may be longer than its file.
        let len = (SEGMENT_PAGES as usize * PAGE_SIZE).saturating_sub(line.offset as usize);
        let Some(all) = line.range.intersect(&Range::new(line.range.start, len)) else { return };
        let frame = |at: usize| first + ((line.offset as usize + at - line.range.start) / PAGE_SIZE) as u32;
        let inside: Vec<_> = self.touching(all).map(|(range, &(_, id))| (range, id)).collect();
        let mut after = all.end();
        for (range, region) in inside {
            // The agent's own mapping of the segment is a shared one.
            if !line.shared && range.end() < after {
                self.outside.add(frame(range.end()), frame(after));
            }
            after = after.min(range.start);
            self.parts.push(Part { region, range, first: Frame(frame(range.start)) });
        }
        if !line.shared && all.start < after {
            self.outside.add(frame(all.start), frame(after));
        }
    }
}

/// Which pages of a mapping of a segment were copied, one for one.
fn copied_pages(pagemap: &Pagemap, range: Range) -> std::io::Result<Vec<bool>> {
    let query = Query {
        any_of: Categories::PRESENT | Categories::SWAPPED,
        returned: Categories::PRESENT | Categories::SWAPPED | Categories::FILE,
        ..Query::default()
    };
    let mut copied = vec![false; range.pages()];
    pagemap.scan(range, &query, &mut |run: PageRun| {
        // Present and not of a file: copied. A page that is neither present nor swapped was not
        // touched since it was merged.
        if !run.categories.contains(Categories::FILE) && run.categories.contains(Categories::PRESENT) {
            copied[(run.start - range.start) / PAGE_SIZE..(run.end - range.start) / PAGE_SIZE].fill(true);
        }
    })?;
    Ok(copied)
}

/// Enters a part into the ledger: its copies, and the frames that the others map.
fn enter_part(shared: &Shared, client: &Client, part: &Part, copied: &[bool]) {
    let store = &client.domain.store;
    let mut state = client.state();
    let Some(region) = state.regions.get_mut(&part.region) else { return };
    let first_page = PageNo(((part.range.start - region.start as usize) / PAGE_SIZE) as u32);
    let mut bytes = [0; PAGE_SIZE];
    for (i, _) in copied.iter().enumerate().filter(|(_, copied)| **copied) {
        region.ages.copied(first_page + i as u32);
    }
    for (i, _) in copied.iter().enumerate().filter(|(_, copied)| !**copied) {
        let frame = Frame(part.first.0 + i as u32);
        // Its first user since the restart: the index must learn of it. It may know one of a
        // snapshot that had none for a while.
        if store.adopt_ref(frame) && store.handle(frame) == NO_HANDLE {
            if !store.read(frame, &mut bytes) {
                tracing::warn!(?frame, "the memory of a frame has failed; it is not shared any more");
                client.domain.give_up(frame);
            } else {
                let digest = client.domain.digest(&bytes);
                let key = client.domain.key_of(digest, store.node(frame));
                // Zeros need no frame. A snapshot has some, between other pages.
                key.filter(|_| digest != client.domain.zero_digest)
                    .into_iter()
                    .for_each(|key| index_frame(shared, &client.domain, key, frame));
            }
        }
        region.set(first_page + i as u32, Entry::Merged(frame));
    }
}

/// A frame stands for its content, and an earlier client's page with that is to use it, too.
fn index_frame(shared: &Shared, domain: &Arc<Domain>, key: u64, frame: Frame) {
    let (index, store) = (&domain.index, &domain.store);
    match index.see(key, Place::Frame(frame)) {
        Some(Seen::First(handle)) => store.set_handle(frame, handle),
        Some(Seen::Known(handle)) => {
            let Some(Place::Sighted(there)) = index.place(handle, key) else { return };
            store.adopt_ref(frame);
            if domain.promote(handle, there, frame) {
                shared.request_merge(domain, there, handle, frame);
            } else {
                domain.release(frame);
            }
        }
        None => {}
    }
}

#[cfg(test)]
mod tests;
