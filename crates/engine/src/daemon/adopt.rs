//! Taking clients back: after a restart of the daemon, and after a lost connection.
//!
//! What a client has merged stands in the kernel's own tables, so nothing about it is asked of the
//! agent: a mapping of a segment in `/proc/PID/maps` names the segment (by inode number) and the
//! slot (by offset), and `PAGEMAP_SCAN` says which of its pages were copied since. An agent hands
//! its segments' descriptors back; the daemon takes one only if a daemon of this directory wrote
//! down that it made it for this domain ([`crate::world::state_file`]). A segment taken back can't be written any
//! more, by anyone; its frames are shared until their last user goes.

use std::sync::Arc;

use kmem::PAGE_SIZE;
use kmem::pagemap::{Categories, PageRun, Pagemap, Query};
use kmem::range::Range;
use wire::{PageNo, RegionId};

use crate::client::Client;
use crate::content::domain::Domain;
use crate::content::frame::Frame;
use crate::content::index::{Place, Seen};
use crate::ledger::Entry;
use crate::world::shared::Shared;

/// Fills a new client's ledger with what its mappings say.
pub(crate) fn rebuild(shared: &Shared, client: &Client) -> std::io::Result<()> {
    let store = &client.domain.store;
    let mut found: Vec<(RegionId, Range, Frame)> = Vec::new();
    {
        let state = client.state();
        kmem::procfs::for_each_map(Some(client.pid), |line| {
            if !line.path.starts_with("/memfd:pageone:") {
                return;
            }
            let Some(first) = store.find(line.inode) else { return };
            for (&id, region) in &state.regions {
                let all = Range::new(region.start as usize, region.pages as usize * PAGE_SIZE);
                if let Some(part) = line.range.intersect(&all) {
                    let slot = (line.offset as usize + (part.start - line.range.start)) / PAGE_SIZE;
                    found.push((id, part, Frame(first.0 + slot as u32)));
                }
            }
        })?;
    }
    let pagemap = Pagemap::open(client.pid)?;
    let query = Query {
        any_of: Categories::PRESENT | Categories::SWAPPED,
        returned: Categories::PRESENT | Categories::SWAPPED | Categories::FILE,
        ..Query::default()
    };
    let mut bytes = [0; PAGE_SIZE];
    for (id, range, first) in found {
        let mut copied = vec![false; range.pages()];
        pagemap.scan(range, &query, &mut |run: PageRun| {
            // Present and not of a file: copied. What is neither here nor swapped was not touched since it was
            // merged.
            if !run.categories.contains(Categories::FILE) && run.categories.contains(Categories::PRESENT) {
                copied[(run.start - range.start) / PAGE_SIZE..(run.end - range.start) / PAGE_SIZE].fill(true);
            }
        })?;
        let mut state = client.state();
        let Some(region) = state.regions.get_mut(&id) else { continue };
        let first_page = PageNo(((range.start - region.start as usize) / PAGE_SIZE) as u32);
        for (i, _) in copied.iter().enumerate().filter(|(_, copied)| **copied) {
            region.copied(first_page + i as u32);
        }
        for (i, _) in copied.iter().enumerate().filter(|(_, copied)| !**copied) {
            let frame = Frame(first.0 + i as u32);
            if store.adopt_ref(frame) && store.read(frame, &mut bytes) {
                // Its first user since the restart: the index must learn of it.
                if let Some(key) = client.domain.key_of(client.domain.digest(&bytes), store.node(frame)) {
                    enter(shared, &client.domain, key, frame);
                }
            }
            region.set(first_page + i as u32, Entry::Merged(frame));
        }
    }
    Ok(())
}

/// Makes a frame stand for its content, also where a client that was quicker to come has shown the
/// same: that one's page is to use it too.
fn enter(shared: &Shared, domain: &Arc<Domain>, key: u64, frame: Frame) {
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
