//! Taking clients back: after a restart of the daemon, and after a lost connection.
//!
//! What a client has merged stands in the kernel's own tables, so nothing about it is asked of the
//! agent: a mapping of a segment in `/proc/PID/maps` names the segment (by inode number) and the
//! slot (by offset), and `PAGEMAP_SCAN` says which of its pages were copied since. An agent hands
//! its segments' descriptors back; the daemon takes one only if a daemon of this directory wrote
//! down that it made it for this domain ([`StateFile`]). A segment taken back can't be written any
//! more, by anyone; its frames are shared until their last user goes.

use std::collections::{BTreeMap, BTreeSet};
use std::io::Write;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use kmem::PAGE_SIZE;
use kmem::pagemap::{Categories, PageRun, Pagemap, Query};
use kmem::range::Range;
use wire::{PageNo, RegionId, SegmentId};

use crate::client::Client;
use crate::content::domain::Domain;
use crate::content::index::{Place, Seen};
use crate::content::store::Frame;
use crate::daemon::service::Shared;
use crate::ledger::Entry;

/// Name of the state file in the daemon's directory.
pub(crate) const STATE_FILE: &str = "segments";

/// The segments that daemons of this directory have made: one `INODE DOMAIN` a line.
pub(crate) struct StateFile {
    path: PathBuf,
    known: BTreeMap<SegmentId, String>,
    written: BTreeMap<SegmentId, String>,
    /// Made by earlier daemons.
    earlier: BTreeSet<SegmentId>,
}

impl StateFile {
    pub(crate) fn load(directory: &Path) -> std::io::Result<Self> {
        let path = directory.join(STATE_FILE);
        let text = match std::fs::read_to_string(&path) {
            Err(e) if e.kind() == std::io::ErrorKind::NotFound => String::new(),
            other => other?,
        };
        // A line that is no segment is dropped: at worst a segment is not taken back.
        let known: BTreeMap<_, _> = text
            .lines()
            .filter_map(|line| line.split_once(' '))
            .filter_map(|(inode, domain)| Some((inode.parse().ok()?, domain.to_string())))
            .collect();
        Ok(Self { path, written: known.clone(), earlier: known.keys().copied().collect(), known })
    }

    pub(crate) fn knows(&self, segment: SegmentId, domain: &str) -> bool {
        self.known.get(&segment).is_some_and(|d| d == domain)
    }

    /// Writes down the segments there are now, without those that this daemon made and closed:
    /// nobody has anything to hand back of them, and their numbers may come again. Those that
    /// earlier daemons made stay known: their holders may come yet.
    pub(crate) fn record(&mut self, now: BTreeMap<SegmentId, String>, closed: &[SegmentId]) -> std::io::Result<()> {
        let Self { known, earlier, .. } = self;
        known.retain(|segment, _| earlier.contains(segment) || !closed.contains(segment));
        self.known.extend(now);
        if self.known == self.written {
            return Ok(());
        }
        let mut text = String::new();
        for (segment, domain) in &self.known {
            text += &format!("{segment} {domain}\n");
        }
        let new = self.path.with_extension("new");
        use std::os::unix::fs::OpenOptionsExt;
        let mut file = std::fs::OpenOptions::new().write(true).create(true).truncate(true).mode(0o600).open(&new)?;
        file.write_all(text.as_bytes())?;
        std::fs::rename(&new, &self.path)?;
        self.written = self.known.clone();
        Ok(())
    }
}

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
                shared.wish(domain, there, handle, frame);
            } else {
                domain.release(frame, false);
            }
        }
        None => {}
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_state_file_remembers_what_daemons_made() {
        let directory = tempfile::tempdir().unwrap();
        let mut first = StateFile::load(directory.path()).unwrap();
        first.record(BTreeMap::from([(7, "a b".to_string())]), &[]).unwrap();
        let mut second = StateFile::load(directory.path()).unwrap();
        assert!(second.knows(7, "a b"));
        assert!(!second.knows(7, "a"), "another domain");
        assert!(!second.knows(8, "a b"));
        second.record(BTreeMap::from([(9, "c".to_string())]), &[]).unwrap();
        let mut third = StateFile::load(directory.path()).unwrap();
        assert!(third.knows(7, "a b") && third.knows(9, "c"));
        third.record(BTreeMap::from([(11, "d".to_string())]), &[]).unwrap();
        third.record(BTreeMap::new(), &[7, 11]).unwrap();
        let fourth = StateFile::load(directory.path()).unwrap();
        assert!(fourth.knows(7, "a b") && fourth.knows(9, "c"), "made by earlier daemons");
        assert!(!fourth.knows(11, "d"), "made and closed");
    }

    #[test]
    fn a_damaged_state_file_loses_only_the_damaged_lines() {
        let directory = tempfile::tempdir().unwrap();
        std::fs::write(directory.path().join(STATE_FILE), "7 a\nnonsense\n-1 b\n8 c\n").unwrap();
        let state = StateFile::load(directory.path()).unwrap();
        assert!(state.knows(7, "a") && state.knows(8, "c"));
        assert_eq!(state.known.len(), 2);
    }
}
