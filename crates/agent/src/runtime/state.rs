//! All tables of the agent, behind one lock ([`STATE`]).
//!
//! Each part has its own file. The steps here change several parts, and keep them in agreement.

pub(crate) mod bitmap;
pub(crate) mod control;
pub(crate) mod given_back;
pub(crate) mod maps;
pub(crate) mod outbox;
pub(crate) mod recycler;
pub(crate) mod region;
pub(crate) mod regions;
pub(crate) mod retained;
pub(crate) mod segments;
pub(crate) mod uffds;
pub(crate) mod uplink;
pub(crate) mod window_uffd;

use std::os::fd::RawFd;
use std::time::Duration;

use kmem::range::Range;
use rustix::io::Errno;
use wire::{RegionId, Run, ToDaemon};

use crate::runtime::descriptors::Descriptor;
use crate::runtime::lock::Lock;
use crate::runtime::proc_files::ProcFiles;
use crate::runtime::state::maps::MapBudget;
use crate::runtime::state::recycler::Recycler;
use crate::runtime::state::region::Sticky;
use crate::runtime::state::regions::Regions;
use crate::runtime::state::segments::Segments;
use crate::runtime::state::uffds::Userfaultfds;
use crate::runtime::state::uplink::Uplink;
use crate::runtime::waker::WAKE;
use crate::runtime::watch::{WATCH, Watch};

/// Of this process. Fork handlers and the C library's symbols use it too.
pub(crate) static STATE: Lock<State> = Lock::new(State::new(&WATCH));

pub(crate) struct State {
    pub(crate) regions: Regions,
    /// The descriptors that managed memory is registered with.
    pub(crate) uffds: Userfaultfds,
    pub(crate) files: ProcFiles,
    pub(crate) segments: Segments,
    pub(crate) maps: MapBudget,
    pub(crate) uplink: Uplink,
    /// The pool in which free pages are marked.
    pub(crate) recycler: Option<Recycler>,
    /// Longest time that one direct I/O request may take; `None` before a daemon has said so.
    pub(crate) direct_io: Option<Duration>,
}

/// Why a range is not taken under management.
#[derive(Debug, thiserror::Error)]
pub(crate) enum AdoptError {
    #[error("no userfaultfd")]
    NoUserfaultfd,
    #[error("no memory for its bitmap")]
    NoMemory,
    #[error("it cannot be registered with userfaultfd: {0}")]
    Register(Errno),
}

impl State {
    pub(crate) const fn new(watch: &'static Watch) -> Self {
        Self {
            regions: Regions::new(watch),
            uffds: Userfaultfds::new(),
            files: ProcFiles::new(),
            segments: Segments::new(),
            maps: MapBudget::new(),
            uplink: Uplink::new(),
            recycler: None,
            direct_io: None,
        }
    }

    /// Registers a range and tells the daemon. `merged`: the parts that are mappings of segments.
    pub(crate) fn adopt(&mut self, range: Range, sticky: Sticky, merged: &[Range]) -> Result<RegionId, AdoptError> {
        let mut region = self.regions.prepare(range, sticky).ok_or(AdoptError::NoMemory)?;
        for part in merged.iter().filter_map(|part| part.intersect(&range)) {
            region.mapped.set(Run::new(region.page_at(part.start), part.pages() as u32));
        }
        let registered = self.uffds.register(range).ok_or(AdoptError::NoUserfaultfd)?;
        registered.map_err(AdoptError::Register)?;
        let id = region.id;
        self.regions.insert(region);
        self.regions.forget_retained(range);
        self.count_unseen_forks();
        self.uplink.outbox.push(ToDaemon::RegionAdded { region: id, start: range.start as u64, len: range.len as u64 });
        Ok(id)
    }

    /// Takes pages that map no frame, or are unmapped, out of management, and tells the daemon.
    pub(crate) fn give_up(&mut self, id: RegionId, run: Run) {
        if run.len > 0 && self.regions.get(id).is_some() {
            self.regions.cut(id, run);
            self.uplink.outbox.push(ToDaemon::RegionShrunk { region: id, run });
        }
    }

    /// Takes pages out of management that stay in place, and tells the daemon. Those that lie in
    /// mappings of segments are [retained](Regions::retain), at `moved_to` if they were moved there
    /// (the address of the run's first page).
    pub(crate) fn leave(&mut self, id: RegionId, run: Run, moved_to: Option<usize>) {
        let Some(region) = self.regions.get(id) else { return };
        let sticky = region.sticky;
        let place = |part| {
            let bytes = region.bytes(part);
            let moved = moved_to.map(|to| Range::new(to + (bytes.start - region.bytes(run).start), bytes.len));
            (part, moved.unwrap_or(bytes))
        };
        let merged: Vec<(Run, Range)> = region.mapped.runs(run).map(place).collect();
        let mut at = run.page;
        for (part, bytes) in merged {
            self.give_up(id, Run::between(at, part.page));
            self.regions.cut(id, part);
            self.uplink.outbox.push(ToDaemon::Retained { region: id, run: part });
            self.regions.retain(bytes, sticky);
            at = part.end();
        }
        self.give_up(id, Run::between(at, run.end()));
    }

    /// Tracks again what could not be tracked after a window.
    pub(crate) fn track_again(&mut self) {
        for span in std::mem::take(&mut self.uffds.untracked) {
            for part in self.regions.managed_bytes(span) {
                self.uffds.track(part);
            }
        }
    }

    /// Whether the program has closed or replaced a descriptor of the agent.
    pub(crate) fn has_lost_descriptors(&self) -> bool {
        !(self.uplink.conn.as_ref().is_none_or(Descriptor::is_intact)
            && self.uffds.are_intact()
            && self.segments.are_intact()
            && self.recycler.as_ref().is_none_or(Recycler::is_intact)
            && WAKE.is_intact())
    }

    /// Ends management. Merged pages stay merged, and guarded.
    pub(crate) fn end(&mut self) {
        for part in self.regions.managed_bytes(Range::new(0, usize::MAX)) {
            // The event thread may hold the descriptor a moment longer. Fails only where nothing is
            // mapped.
            let _ = self.uffds.untrack(part);
        }
        self.uplink.disconnect();
        self.uffds.close();
        self.files.close();
        self.segments.clear();
        self.recycler = None;
    }

    /// Forgets what a child inherited. Descriptors stay open: the parent may share them.
    pub(crate) fn forsake(&mut self) {
        std::mem::forget((self.uplink.conn.take(), self.uplink.received.take()));
        self.uplink.outbox.close();
        std::mem::forget(self.recycler.take());
        self.segments.forsake();
        self.files.forsake();
        self.uffds.forsake();
    }

    /// Counts a fork before any happens, where forks past the C library cannot be seen: children
    /// may inherit mappings of frames. Counts those that happened while memory was unmerged.
    pub(crate) fn count_unseen_forks(&mut self) {
        if self.uffds.take_forks() {
            self.uplink.control.count_fork();
        }
        if !self.uffds.sees_forks() && self.uplink.control.forks() == 0 && self.regions.is_inherited() {
            self.uplink.control.count_fork();
        }
    }

    /// Closes what a forked child inherited. Returns the descriptors that the caller has to close
    /// by number: the threads that own them do not exist in the child.
    pub(crate) fn orphan(&mut self) -> Option<RawFd> {
        self.uplink.orphan();
        // The guest and its marks are the parent's.
        self.recycler = None;
        self.segments.orphan();
        self.files.close();
        self.uffds.orphan()
    }
}
