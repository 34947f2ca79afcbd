//! Joining: pages of files go to the frame that a store lends.
//!
//! A store's slot cannot be merged with a frame that the files have, since agents map it where it
//! is. So the files' pages go to the slot: those that use the old frame of its content, and the one
//! in which the content was sighted. The kernel frees the old frame with its last page. This looks
//! at the whole ledger of each file, once a round, and only if there is something to join.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use kmem::pageonefs::Entry as Pairing;
use rustix::io::Errno;
use wire::PageNo;

use super::bridge::Bridge;
use crate::backend::module::USER;
use crate::backend::module::file::{CHUNK, File, State};
use crate::backend::module::merge::ByNumber;
use crate::backend::module::settle::{Wanted, settle};
use crate::core::content::index::{Content, Place};
use crate::core::ledger::{ALL, Entry};
use crate::core::merge::pass::Pace;
use crate::world::shared::Shared;

/// The join of one domain's files in a round.
struct Join<'a> {
    pace: Pace<'a>,
    bridge: &'a Bridge,
    /// The frames to go to, by the handles of their contents. One that is full goes out.
    frames: BTreeMap<u32, u64>,
    /// Contents of pages that could not go.
    later: BTreeSet<u32>,
}

/// Has the pages of a domain's files join the frames that its store lends.
pub(super) fn join(shared: &Shared, bridge: &Bridge, files: &ByNumber) {
    let asked = bridge.loans.take_joins();
    let frame = |&handle: &u32| Some((handle, bridge.loans.frame(handle)?));
    let frames: BTreeMap<u32, u64> = asked.keys().filter_map(frame).collect();
    if frames.is_empty() {
        return;
    }
    let mut join = Join { pace: shared.pace(USER), bridge, frames, later: BTreeSet::new() };
    for file in files.values().filter(|file| Arc::ptr_eq(&file.contents, &bridge.contents)) {
        if let Err(why) = join.file(file) {
            tracing::debug!(inode = file.inode, "its pages do not join those of a store: {why}");
        }
    }
    join.end(&asked);
}

impl Join<'_> {
    fn file(&mut self, file: &File) -> Result<(), Errno> {
        let pages: Vec<(PageNo, Entry<Content>, u32)> = {
            let state = file.state();
            let known = state.region.known(ALL).map(|page| (page, state.region.entry(page)));
            let with_handle = known.filter_map(|(page, entry)| match entry {
                Entry::Merged(Content(handle)) | Entry::Unshared(handle) => Some((page, entry, handle)),
                _ => None,
            });
            with_handle.filter(|(.., handle)| self.frames.contains_key(handle)).collect()
        };
        for chunk in pages.chunks(CHUNK) {
            if !self.pace.wait() {
                self.later.extend(self.frames.keys());
                return Ok(());
            }
            self.pace.took(chunk.len() as u64);
            self.chunk(file, chunk)?;
        }
        Ok(())
    }

    fn chunk(&mut self, file: &File, pages: &[(PageNo, Entry<Content>, u32)]) -> Result<(), Errno> {
        let (mut now, mut pairings) = (Vec::with_capacity(pages.len()), Vec::with_capacity(pages.len()));
        for &(page, entry, handle) in pages {
            let Some(&frame) = self.frames.get(&handle) else { continue };
            // A merged page is a user already.
            if entry == Entry::Merged(Content(handle)) || self.bridge.contents.enter(handle) {
                now.push((page, entry, handle, frame));
                pairings.push(Pairing::new(page.into(), Some(frame)));
            }
        }
        let result = file.kernel.merge(file.id, &mut pairings);
        let mut state = file.state();
        for ((page, entry, handle, frame), pairing) in now.into_iter().zip(pairings) {
            let outcome = match pairing.result() {
                Err(Errno::EXIST) if pairing.frame == frame => Ok(()),
                // It is full, or gone: the pages stay where they are.
                Err(Errno::MLINK | Errno::NOENT) => {
                    self.frames.remove(&handle);
                    Err(Errno::AGAIN)
                }
                Err(Errno::EXIST) => Err(Errno::AGAIN),
                Err(why) => {
                    if why != Errno::STALE {
                        self.later.insert(handle);
                    }
                    Err(why)
                }
                Ok(()) => Ok(()),
            };
            if entry == Entry::Merged(Content(handle)) {
                moved(file, &mut state, page, entry, outcome);
                continue;
            }
            if outcome.is_err() {
                self.bridge.contents.leave(handle);
            }
            let wanted = Wanted { page, handle, place: Place::Below(frame) };
            if state.region.entry(page) == entry || outcome.is_ok() {
                settle(file, &mut state, wanted, outcome);
            }
        }
        result.map(drop)
    }

    /// The contents are where their pages went. `asked`: in how many rounds before.
    fn end(self, asked: &BTreeMap<u32, u8>) {
        let index = &self.bridge.contents.index;
        for (&handle, &frame) in &self.frames {
            if let Some((_, place @ Place::Below(_))) = index.get(handle) {
                index.change(handle, place, Place::Below(frame));
            }
        }
        for handle in self.later.into_iter().filter(|handle| self.frames.contains_key(handle)) {
            self.bridge.loans.join_later(handle, asked.get(&handle).copied().unwrap_or_default());
        }
    }
}

/// What became of a page that used a frame of the content already.
fn moved(file: &File, state: &mut State, page: PageNo, entry: Entry<Content>, outcome: Result<(), Errno>) {
    // Written since: the next scan says so, too.
    if outcome == Err(Errno::STALE) && state.region.entry(page) == entry {
        state.region.set(page, Entry::Fresh);
        state.region.restart(page);
        state.totals.unmerged += u64::from(file.drop_entry(page, entry));
    }
}
