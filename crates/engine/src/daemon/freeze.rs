//! Freezing a client: until it thaws, nothing of it is scanned or merged.
//!
//! The kernel clears its notes of written pages for each reader. A checkpoint reads them in the
//! daemon's place, so it freezes the client first. Batches under way are finished (in a stopped
//! process: no window is left open), and no other begins. Afterwards the daemon looks which merged
//! pages were copied, and every other page is compared before it is merged.
//!
//! After the memory was stored, that moment may be marked. The next freeze tells what has changed
//! since ([`crate::client::changes`]).
//!
//! A freeze is of a process, not of its number: when the process ends it freezes nothing any more,
//! though another may get the number while the connection that asked for it stays open.

use std::sync::Arc;
use std::time::{Duration, Instant};

use control::ChangeLog;
use kmem::PAGE_SIZE;
use kmem::range::Range;
use wire::{PageNo, Run};

use crate::client::Client;
use crate::client::changes::Log;
use crate::client::link::Tracking;
use crate::world::queue::Pass;
use crate::world::shared::Shared;

/// How long an agent may take to finish what it was told.
pub(crate) const PATIENCE: Duration = Duration::from_secs(10);

#[derive(Debug, thiserror::Error)]
pub(crate) enum FreezeError {
    #[error("process {0} is no client of this daemon; `pageone status` lists them")]
    NotAClient(i32),
    #[error("another checkpoint of process {0} is being taken; wait for its end")]
    Frozen(i32),
    #[error(
        "process {0} is being detached; a checkpoint of it needs no daemon afterwards; if one is wanted, \
             wait until `pageone detach` has ended"
    )]
    Detaching(i32),
    #[error("the agent in process {pid} has not finished its work within {} s; if the process is stopped, let it go on for a moment", PATIENCE.as_secs())]
    Busy { pid: i32 },
}

/// A client is frozen until this is dropped.
pub struct Freeze {
    shared: Arc<Shared>,
    pid: i32,
    /// The client that was frozen. Its process may have another connection by now.
    of: Arc<Client>,
    changes: Option<ChangeLog>,
}

impl Freeze {
    /// Freezes the process of a client. Returns its connections, of which most have one.
    fn begin(shared: &Arc<Shared>, of: Arc<Client>) -> Result<(Self, Vec<Arc<Client>>), FreezeError> {
        let pid = of.pid;
        // Under the lock, so that a new connection sees it or is told. While the process lives its
        // number is no other's.
        let mut frozen = shared.frozen.lock();
        if of.pidfd.has_exited() {
            return Err(FreezeError::NotAClient(pid));
        }
        if frozen.get(&pid).is_some_and(|other| !other.pidfd.has_exited()) {
            return Err(FreezeError::Frozen(pid));
        }
        frozen.insert(pid, of.clone());
        let clients = shared.set_tracking(pid, Tracking::Frozen);
        drop(frozen);
        Ok((Self { shared: shared.clone(), pid, of, changes: None }, clients))
    }
}

impl control::Freeze for Freeze {
    /// Only the first call gives it, and only the first freeze since the mark. What no scan has
    /// found yet is still in the kernel's notes.
    fn changes(&mut self) -> Option<ChangeLog> {
        self.changes.take()
    }

    /// `written` counts as changed, as all that was written recently does.
    fn mark(&self, label: &str, written: Option<&[(u64, u64)]>) {
        let clients: Vec<_> = self.shared.clients().into_iter().filter(|client| client.pid == self.pid).collect();
        // With an old connection and a new one, the outcome of the old one's batches is not known.
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
                region.ages.note_recent(Run::new(page, part.pages() as u32));
            }
            region.ages.recent().for_each(|page| log.add(Range::new(region.address(page), PAGE_SIZE)));
        }
        state.observers.changes = (!log.is_too_long()).then_some(log);
    }
}

/// Freezes a client; returns when its agent has nothing left to do, which may take so much time. A
/// client can be frozen once at a time.
pub(crate) fn freeze(shared: &Arc<Shared>, pid: i32, patience: Duration) -> Result<Freeze, FreezeError> {
    let of = shared.client_of(pid).ok_or(FreezeError::NotAClient(pid))?;
    if of.state().tracking == Tracking::Detaching {
        return Err(FreezeError::Detaching(pid));
    }
    let (mut freeze, clients) = Freeze::begin(shared, of)?;
    let mut changes: Vec<_> = clients.iter().filter_map(|client| client.settled().observers.changes.take()).collect();
    let deadline = Instant::now() + patience;
    loop {
        let client = shared.client_of(pid).filter(|_| !freeze.of.pidfd.has_exited());
        let client = client.ok_or(FreezeError::NotAClient(pid))?;
        // In a stopped process nothing happens either, but no page must be taken away.
        if client.state().flight.is_empty() || kmem::procfs::is_stopped(pid).unwrap_or(false) && !client.is_in_window()
        {
            // With an old connection beside the new one, neither knows all changes.
            let single = matches!(&clients[..], [only] if Arc::ptr_eq(only, &client));
            freeze.changes = changes.pop().filter(|_| single && client.state().flight.is_empty()).map(Log::end);
            return Ok(freeze);
        }
        if Instant::now() > deadline {
            return Err(FreezeError::Busy { pid });
        }
        std::thread::sleep(Duration::from_millis(1));
    }
}

impl Shared {
    /// Sets the tracking of a process's clients, and returns them.
    fn set_tracking(&self, pid: i32, tracking: Tracking) -> Vec<Arc<Client>> {
        let clients: Vec<_> = self.clients().into_iter().filter(|client| client.pid == pid).collect();
        for client in &clients {
            let mut state = client.state();
            if state.tracking != Tracking::Detaching {
                state.tracking = tracking;
            }
        }
        clients
    }
}

impl Drop for Freeze {
    fn drop(&mut self) {
        // Under the lock, so that a new connection sees it or is told.
        let mut frozen = self.shared.frozen.lock();
        // A later process with this number may be frozen by now.
        if !frozen.get(&self.pid).is_some_and(|of| Arc::ptr_eq(of, &self.of)) {
            return;
        }
        frozen.remove(&self.pid);
        if self.of.pidfd.has_exited() {
            return;
        }
        let clients = self.shared.set_tracking(self.pid, Tracking::Interrupted);
        drop(frozen);
        for client in clients {
            self.shared.queue.ask(&client, Pass::Scan);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::client::scanning::tests::client_of;
    use kmem::pidfd::PidFd;

    #[test]
    fn a_freeze_ends_with_its_process_and_not_with_its_number() {
        let shared = Arc::new(crate::world::shared::tests::shared());
        let own = std::process::id() as i32;
        let mut process = std::process::Command::new("sleep").arg("100").spawn().unwrap();
        // Clients of two processes that have one number, one after the other.
        let (first, _agent) = client_of(own, PidFd::open(process.id() as i32).unwrap());
        let (second, _other_agent) = client_of(own, PidFd::open(own).unwrap());
        let (first, second) = (Arc::new(first), Arc::new(second));
        shared.add_client(&first);
        let (freeze, frozen) = Freeze::begin(&shared, first.clone()).unwrap();
        assert!(frozen.len() == 1 && first.state().tracking.is_frozen());
        assert!(matches!(Freeze::begin(&shared, first.clone()), Err(FreezeError::Frozen(_))));
        process.kill().unwrap();
        process.wait().unwrap();
        shared.remove_client(first.number);
        shared.add_client(&second);
        assert!(!second.state().tracking.is_frozen(), "the freeze was of another process");
        let (later, _) = Freeze::begin(&shared, second.clone()).unwrap();
        drop(freeze);
        assert!(second.state().tracking.is_frozen(), "the end of that freeze thaws nothing of this one");
        drop(later);
        assert!(!second.state().tracking.is_frozen());
    }
}
