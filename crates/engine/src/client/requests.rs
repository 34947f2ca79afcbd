//! Merge requests to a client: what other clients' passes have made frames of, or have seen.
//!
//! They have a lock of their own: a pass of another client adds to them while this client's state
//! may be locked.

use wire::{PageNo, RegionId};

use crate::core::content::frame::Frame;
use crate::core::content::index::Sighting;
use crate::sync::Mutex;

/// Another pass made a frame of what was sighted here, and counts this page as its user.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Request {
    pub(crate) region: RegionId,
    pub(crate) page: PageNo,
    pub(crate) handle: u32,
    pub(crate) frame: Frame,
}

#[derive(Default)]
struct Waiting {
    closed: bool,
    list: Vec<Request>,
    /// Sightings here that others share, in huge pages; see [`crate::core::ledger::huge`].
    seen_elsewhere: Vec<(Sighting, u32)>,
}

/// What other clients' passes ask of a client.
#[derive(Default)]
pub(crate) struct Requests(Mutex<Waiting>);

impl Requests {
    /// Adds a request; gives it back if the client is gone.
    pub(crate) fn add(&self, request: Request) -> Result<(), Request> {
        let mut waiting = self.0.lock();
        if waiting.closed {
            return Err(request);
        }
        waiting.list.push(request);
        Ok(())
    }

    pub(crate) fn take(&self) -> Vec<Request> {
        std::mem::take(&mut self.0.lock().list)
    }

    /// All that wait; none is taken any more.
    pub(super) fn close(&self) -> Vec<Request> {
        let mut waiting = self.0.lock();
        waiting.closed = true;
        std::mem::take(&mut waiting.list)
    }

    /// Another client has the content of a sighting, too, in a huge page that is not split yet.
    pub(crate) fn add_seen_elsewhere(&self, here: Sighting, handle: u32) {
        self.0.lock().seen_elsewhere.push((here, handle));
    }

    pub(crate) fn take_seen_elsewhere(&self) -> Vec<(Sighting, u32)> {
        std::mem::take(&mut self.0.lock().seen_elsewhere)
    }
}
