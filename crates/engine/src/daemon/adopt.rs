//! Taking clients back: after a restart of the daemon, and after a lost connection.
//!
//! What a client has merged stands in the kernel's own tables, so the daemon need not trust the
//! agent with it. A mapping of a segment in `/proc/PID/maps` names the segment (by inode number)
//! and the slot (by offset), and `PAGEMAP_SCAN` tells which of its pages were copied since. An
//! agent hands its segments' descriptors back. The daemon takes one only if a daemon of this
//! directory noted that it made it for this domain ([`crate::world::state_file`]). A segment that
//! is taken back cannot be written any more; its frames are shared until their last user leaves.

use std::sync::Arc;

use kmem::PAGE_SIZE;
use kmem::pagemap::{Categories, PageRun, Pagemap, Query};
use kmem::procfs::Maps;
use kmem::range::Range;
use wire::{PageNo, RegionId};

use crate::client::Client;
use crate::content::domain::Domain;
use crate::content::frame::Frame;
use crate::content::index::{Place, Seen};
use crate::content::store::Segment;
use crate::ledger::Entry;
use crate::world::shared::Shared;

/// Fills a new client's ledger from its mappings.
pub(crate) fn rebuild(shared: &Shared, client: &Client, maps: Maps) -> std::io::Result<()> {
    for part in mapped_parts(client, maps)? {
        let copied = copied_pages(&client.pagemap, part.range)?;
        enter_part(shared, client, &part, &copied);
    }
    Ok(())
}

/// A part of a region that maps consecutive frames.
struct Part {
    region: RegionId,
    range: Range,
    first: Frame,
    /// Kept until the frames' users are counted: a segment that nobody counts would be closed.
    _segment: Arc<Segment>,
}

/// The parts of a client's regions that map segments of its domain.
fn mapped_parts(client: &Client, maps: Maps) -> std::io::Result<Vec<Part>> {
    let mut parts = Vec::new();
    let state = client.state();
    maps.for_each(|line| {
        if !line.path.starts_with("/memfd:pageone:") {
            return;
        }
        let Some((first, segment)) = client.domain.store.hold(line.inode) else { return };
        for (&id, region) in &state.regions {
            let all = Range::new(region.start as usize, region.pages as usize * PAGE_SIZE);
            if let Some(range) = line.range.intersect(&all) {
                let slot = (line.offset as usize + (range.start - line.range.start)) / PAGE_SIZE;
                let first = Frame(first.0 + slot as u32);
                parts.push(Part { region: id, range, first, _segment: segment.clone() });
            }
        }
    })?;
    Ok(parts)
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
        region.copied(first_page + i as u32);
    }
    for (i, _) in copied.iter().enumerate().filter(|(_, copied)| !**copied) {
        let frame = Frame(part.first.0 + i as u32);
        // Its first user since the restart: the index must learn of it.
        if store.adopt_ref(frame) {
            if !store.read(frame, &mut bytes) {
                tracing::warn!(?frame, "the memory of a frame has failed; it is not shared any more");
                client.domain.give_up(frame);
            } else if let Some(key) = client.domain.key_of(client.domain.digest(&bytes), store.node(frame)) {
                index_frame(shared, &client.domain, key, frame);
            }
        }
        region.set(first_page + i as u32, Entry::Merged(frame));
    }
}

/// Makes a frame stand for its content. If a client that came earlier has a page with the same
/// content, that page is to use the frame too.
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
                domain.release(frame, false);
            }
        }
        None => {}
    }
}
