//! Holding a client: for a while nothing of it is scanned or merged.
//!
//! The kernel notes which pages were written, and clears its notes for whoever reads them. Who wants to read them in the daemon's
//! place, for a checkpoint, holds the client: batches under way are finished (in a process that is stopped: not in the midst of a window), and no other begins. Nothing is lost with the notes:
//! afterwards the daemon looks which merged pages were copied, and every other page is compared before it is merged.

use std::sync::Arc;
use std::time::{Duration, Instant};

use crate::client::Client;
use crate::service::{Engine, Shared, lock};

/// How long an agent may take to finish what it was told.
const PATIENCE: Duration = Duration::from_secs(10);

/// Why a client could not be held.
#[derive(Debug, thiserror::Error)]
pub enum HoldError {
    /// No such client.
    #[error("process {0} is no client of this daemon; `pageone status` lists them")]
    NotAClient(i32),
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
}

impl Engine {
    /// Holds a client; returns when its agent has nothing left to do. Several may hold one.
    pub fn hold(&self, pid: i32) -> Result<Hold, HoldError> {
        let find = || self.shared.clients().into_iter().find(|client| client.pid == pid);
        find().ok_or(HoldError::NotAClient(pid))?;
        self.shared.count_hold(pid, |holds| holds + 1);
        let hold = Hold { shared: self.shared.clone(), pid };
        let deadline = Instant::now() + PATIENCE;
        loop {
            let client = find().ok_or(HoldError::NotAClient(pid))?;
            // In a stopped process nothing goes on either, but pages must be in their places.
            if client.state().outstanding == 0 || is_stopped(pid) && !client.is_in_window() {
                return Ok(hold);
            }
            if Instant::now() > deadline {
                return Err(HoldError::Busy { pid });
            }
            std::thread::sleep(Duration::from_millis(1));
        }
    }
}

fn is_stopped(pid: i32) -> bool {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
    // The name, in brackets, may hold anything.
    stat.rsplit(") ").next().is_some_and(|rest| rest.starts_with(['T', 't']))
}

impl Shared {
    fn count_hold(&self, pid: i32, change: impl FnOnce(u32) -> u32) -> Vec<Arc<Client>> {
        let mut holds = lock(&self.holds);
        let count = holds.entry(pid).or_default();
        *count = change(*count);
        let count = *count;
        if count == 0 {
            holds.remove(&pid);
        }
        let clients: Vec<_> = self.clients().into_iter().filter(|client| client.pid == pid).collect();
        for client in &clients {
            let mut state = client.state();
            state.holds = count;
            state.unsure = true;
        }
        clients
    }
}

impl Drop for Hold {
    fn drop(&mut self) {
        for client in self.shared.count_hold(self.pid, |holds| holds - 1) {
            self.shared.queue.ask(&client, true);
        }
    }
}
