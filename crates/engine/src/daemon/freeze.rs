//! Holding a client: for a while nothing of it is scanned or merged.
//!
//! The kernel notes which pages were written, and clears its notes for whoever reads them. Who
//! wants to read them in the daemon's place, for a checkpoint, holds the client: batches under way
//! are finished (in a process that is stopped: not in the midst of a window), and no other begins.
//! Nothing is lost with the notes: afterwards the daemon looks which merged pages were copied, and
//! every other page is compared before it is merged.
//!
//! Who has stored the client's memory may [mark](Hold::mark) that moment. The next one that holds
//! it learns what has changed since ([`crate::client::changes`]).

use std::sync::Arc;
use std::time::{Duration, Instant};

use control::ChangeLog;
use kmem::PAGE_SIZE;
use kmem::range::Range;
use wire::{PageNo, Run};

use crate::client::Client;
use crate::client::changes::Log;
use crate::client::link::Tracking;
use crate::daemon::service::Engine;
use crate::world::shared::Shared;

/// How long an agent may take to finish what it was told.
const PATIENCE: Duration = Duration::from_secs(10);

/// Why a client could not be held.
#[derive(Debug, thiserror::Error)]
pub enum HoldError {
    /// No such client.
    #[error("process {0} is no client of this daemon; `pageone status` lists them")]
    NotAClient(i32),
    /// Somebody else holds it.
    #[error("another checkpoint of process {0} is being taken; wait for its end")]
    Held(i32),
    /// Its agent does not report.
    #[error("the agent in process {pid} has not finished its work within {} s; if the process is stopped, let it go on for a moment", PATIENCE.as_secs())]
    Busy {
        /// The process.
        pid: i32,
    },
}

/// A client is held until this is dropped.
pub struct Hold {
    shared: Arc<Shared>,
    pid: i32,
    since: Option<ChangeLog>,
}

impl Hold {
    /// What the client has changed since the last mark, if that is known. What no scan has found
    /// yet is in the kernel's notes still. Gives it once; whoever holds a client takes it away
    /// from all others.
    pub fn since(&mut self) -> Option<ChangeLog> {
        self.since.take()
    }

    /// Marks this moment: the memory was stored, as it was after the caller last cleared the
    /// kernel's notes, or later.
    ///
    /// `written`, for a process that may do direct I/O: what the caller found written, address and
    /// length in bytes of each part. It counts as changed, like everything else that was
    /// written lately.
    pub fn mark(&self, label: &str, written: Option<&[(u64, u64)]>) {
        let clients: Vec<_> = self.shared.clients().into_iter().filter(|client| client.pid == self.pid).collect();
        // An old connection and a new one: what happens to the old one's batches is not known.
        let [client] = &clients[..] else { return };
        let mut state = client.state();
        // A stopped process may still have something to merge.
        if !state.flight.is_empty() {
            return;
        }
        let mut log = Log::new(label.into());
        for region in state.regions.values_mut().filter(|_| written.is_some()) {
            let all = Range::new(region.start as usize, region.pages as usize * PAGE_SIZE);
            let parts =
                written.unwrap_or_default().iter().map(|&(start, len)| Range::new(start as usize, len as usize));
            for part in parts.filter_map(|part| all.intersect(&part)) {
                let page = PageNo(((part.start - all.start) / PAGE_SIZE) as u32);
                region.note_recent(Run::new(page, part.pages() as u32));
            }
            region.recent().for_each(|page| log.add(Range::new(region.address(page), PAGE_SIZE)));
        }
        state.changes = (!log.is_too_long()).then_some(log);
    }
}

impl Engine {
    /// Holds a client; returns when its agent has nothing left to do. Only one may hold a client at
    /// a time.
    pub fn hold(&self, pid: i32) -> Result<Hold, HoldError> {
        let find = || self.shared.clients().into_iter().find(|client| client.pid == pid);
        find().ok_or(HoldError::NotAClient(pid))?;
        // Under the lock, so that a new connection learns of it or is told.
        let mut holds = self.shared.holds.lock();
        if !holds.insert(pid) {
            return Err(HoldError::Held(pid));
        }
        let held = self.shared.set_tracking(pid, Tracking::Frozen);
        drop(holds);
        let mut hold = Hold { shared: self.shared.clone(), pid, since: None };
        let mut since: Vec<_> = held.iter().filter_map(|client| client.settled().changes.take()).collect();
        let deadline = Instant::now() + PATIENCE;
        loop {
            let client = find().ok_or(HoldError::NotAClient(pid))?;
            // In a stopped process nothing goes on either, but pages must be in their places.
            if client.state().flight.is_empty()
                || kmem::procfs::is_stopped(pid).unwrap_or(false) && !client.is_in_window()
            {
                // With an old connection beside the new one neither knows everything.
                let single = matches!(&held[..], [only] if Arc::ptr_eq(only, &client));
                hold.since = since.pop().filter(|_| single && client.state().flight.is_empty()).map(Log::end);
                return Ok(hold);
            }
            if Instant::now() > deadline {
                return Err(HoldError::Busy { pid });
            }
            std::thread::sleep(Duration::from_millis(1));
        }
    }
}

impl Shared {
    /// Tells the connections of a process, and gives them.
    fn set_tracking(&self, pid: i32, tracking: Tracking) -> Vec<Arc<Client>> {
        let clients: Vec<_> = self.clients().into_iter().filter(|client| client.pid == pid).collect();
        for client in &clients {
            client.state().tracking = tracking;
        }
        clients
    }
}

impl Drop for Hold {
    fn drop(&mut self) {
        // Under the lock, so that a new connection learns of it or is told.
        let mut holds = self.shared.holds.lock();
        holds.remove(&self.pid);
        let clients = self.shared.set_tracking(self.pid, Tracking::Interrupted);
        drop(holds);
        for client in clients {
            self.shared.queue.ask(&client, true);
        }
    }
}
