//! Taking clients back: after a restart of the daemon, and after a lost connection.
//!
//! What a client has merged stands in the kernel's own tables, so the daemon need not trust the
//! agent with it. A mapping of a segment in `/proc/PID/maps` names the segment (by inode number)
//! and the slot (by offset), and `PAGEMAP_SCAN` tells which of its pages were copied since. An
//! agent hands its segments' descriptors back. The daemon takes one only if a daemon of this
//! directory noted that it made it for this domain ([`crate::world::state_file`]). A segment that
//! is taken back cannot be written any more; its frames are shared until their last user leaves.
//!
//! A clone of a snapshot comes with segments that `pageone snapshot run` has made, and that nobody
//! can change any more ([`kmem::memfd::require_written`]). It maps them from its beginning.

use std::sync::Arc;

use kmem::PAGE_SIZE;
use kmem::pagemap::{Categories, PageRun, Pagemap, Query};
use kmem::procfs::Maps;
use kmem::range::Range;
use wire::{PageNo, RegionId};

use crate::client::Client;
use crate::core::content::frame::{Frame, NO_HANDLE};
use crate::core::content::index::{Place, Seen};
use crate::core::ledger::Entry;
use crate::store::Segment;
use crate::store::domain::Domain;
use crate::world::shared::Shared;

/// Fills a new client's ledger from its mappings.
pub(crate) fn rebuild(shared: &Shared, client: &Client, maps: Maps) -> std::io::Result<()> {
    for part in mapped_parts(client, maps)? {
        let copied = copied_pages(&client.memory.pagemap, part.range)?;
        enter_part(shared, client, &part, &copied);
    }
    Ok(())
}

/// A part of a region that maps consecutive frames.
struct Part {
    region: RegionId,
    range: Range,
    first: Frame,
    /// Kept until the frames' users are counted: a segment without counted users would be closed.
    _segment: Arc<Segment>,
}

/// The parts of a client's regions that map segments of its domain. Frames that it maps elsewhere
/// are pinned: the agent's word of it ([`wire::ToDaemon::Retained`]) may be lost.
fn mapped_parts(client: &Client, maps: Maps) -> std::io::Result<Vec<Part>> {
    let mut parts = Vec::new();
    let state = client.state();
    maps.for_each(|line| {
        if !line.path.starts_with("/memfd:pageone:") {
            return;
        }
        let store = &client.domain.store;
        let Some((first, segment)) = store.hold(line.inode) else { return };
        let frame = |at: usize| Frame(first.0 + ((line.offset as usize + at - line.range.start) / PAGE_SIZE) as u32);
        let mut inside = Vec::new();
        for (&id, region) in &state.regions {
            let all = Range::new(region.start as usize, region.pages as usize * PAGE_SIZE);
            if let Some(range) = line.range.intersect(&all) {
                parts.push(Part { region: id, range, first: frame(range.start), _segment: segment.clone() });
                inside.push(range);
            }
        }
        // The agent's own mapping of the segment is a shared one.
        if !line.perms.shared {
            pages_outside(line.range, inside).for_each(|at| store.pin(frame(at)));
        }
    })?;
    Ok(parts)
}

/// The addresses of the pages of a range that lie in none of `parts`.
fn pages_outside(range: Range, mut parts: Vec<Range>) -> impl Iterator<Item = usize> {
    parts.sort_unstable_by_key(|part| part.start);
    let starts = std::iter::once(range.start).chain(parts.clone().into_iter().map(|part| part.end()));
    let ends = parts.into_iter().map(|part| part.start).chain(std::iter::once(range.end()));
    starts.zip(ends).flat_map(|(start, end)| (start..end).step_by(PAGE_SIZE))
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
mod tests {
    #![allow(unsafe_code)] // Maps frames as an agent does.

    use std::os::fd::AsFd;
    use std::time::{Duration, Instant};

    use kmem::memfd::{self, MemfdError};
    use kmem::mm;
    use wire::SEGMENT_PAGES;

    use super::*;
    use crate::client::scanning::tests::client;
    use crate::store::Cursor;
    use crate::world::shared::tests::shared;

    #[test]
    fn frames_that_a_client_maps_outside_of_its_regions_are_kept_when_it_comes_back() {
        let (client, _agent) = client();
        let store = &client.domain.store;
        let mut cursor = Cursor::new(store, None);
        let frames: Vec<_> = (1..=6).map(|byte| cursor.put(&[byte; PAGE_SIZE], 1).unwrap()).collect();
        assert!(frames.is_sorted_by_key(|frame| frame.0) && frames[5].0 - frames[0].0 == 5, "one run");
        let place = mm::map_anonymous(6 * PAGE_SIZE).unwrap();
        let all = Range::new(place, 6 * PAGE_SIZE);
        let offset = (frames[0].slot().index() * PAGE_SIZE) as u64;
        let segment = store.segment(frames[0]).unwrap();
        // SAFETY: only this test knows the memory, and nothing refers to it.
        unsafe { mm::map_fixed_private(segment.fd(), all, offset) }.unwrap();
        // Two pages are a region: the message that the others left in place is lost.
        client
            .state()
            .regions
            .insert(RegionId(1), crate::core::ledger::Region::new((place + 2 * PAGE_SIZE) as u64, 2).unwrap());
        let parts = mapped_parts(&client, Maps::open(None).unwrap()).unwrap();
        assert_eq!(
            parts.iter().map(|part| (part.range.start, part.first)).collect::<Vec<_>>(),
            [(place + 2 * PAGE_SIZE, frames[2])]
        );
        assert_eq!(store.usage().pinned, 4);
        // SAFETY: the memory is this test's alone, and nothing refers to it.
        unsafe { mm::unmap(all) }.unwrap();
    }

    #[test]
    fn frames_of_a_snapshot_are_merged_with_as_long_as_a_page_maps_one() {
        let shared = shared();
        let (client, _agent) = client();
        let (domain, len) = (&client.domain, SEGMENT_PAGES as usize * PAGE_SIZE);
        let fd = memfd::create_written("pageone:snapshot", len, |fd| {
            for page in [4, 5] {
                let written = rustix::io::pwrite(fd, &[page as u8; PAGE_SIZE], page * PAGE_SIZE as u64);
                written.map_err(MemfdError::Seal)?;
            }
            Ok::<(), MemfdError>(())
        })
        .unwrap();
        let held = domain.store.adopt_snapshot(memfd::identity(&fd).unwrap().ino, fd.try_clone().unwrap()).unwrap();
        let (first, _) = domain.store.hold(held.id).unwrap();
        let range = Range::new(mm::map_anonymous(3 * PAGE_SIZE).unwrap(), 3 * PAGE_SIZE);
        // SAFETY: only this test knows the memory, and nothing refers to it.
        unsafe { mm::map_fixed_private(fd.as_fd(), range, 4 * PAGE_SIZE as u64) }.unwrap();
        client.state().regions.insert(RegionId(1), crate::core::ledger::Region::new(range.start as u64, 3).unwrap());
        rebuild(&shared, &client, Maps::open(None).unwrap()).unwrap();
        let frames = [4, 5, 6].map(|slot| Frame(first.0 + slot));
        let entry = |page| client.state().regions[&RegionId(1)].entry(PageNo(page));
        assert_eq!([0, 1, 2].map(entry), frames.map(Entry::Merged));
        let known = |byte: u8| {
            let digest = domain.digest(&[byte; PAGE_SIZE]);
            domain.index.see(digest, Place::Below(1))
        };
        // The client writes to the first page. A page with its content finds the frame again.
        domain.release(frames[0]);
        let Some(Seen::Known(handle)) = known(4) else { panic!("it was forgotten") };
        let digest = domain.digest(&[4; PAGE_SIZE]);
        assert_eq!(domain.index.place(handle, digest), Some(Place::Frame(frames[0])));
        assert!(domain.store.try_ref(frames[0]));
        assert_eq!(known(0), Some(Seen::First(2)), "no frame is zeros");
        // Nobody maps a frame any more: the segment goes, and nothing names its frames.
        drop(held);
        let tidy = || domain.tidy(Instant::now(), Duration::from_secs(1));
        frames.into_iter().for_each(|frame| domain.release(frame));
        assert_eq!(tidy().len(), 1);
        assert!(matches!(known(4), Some(Seen::First(_))) && domain.store.segment_ids().is_empty());
        // SAFETY: the memory is this test's alone, and nothing refers to it.
        unsafe { mm::unmap(range) }.unwrap();
    }
}
