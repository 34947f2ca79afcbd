//! The workers' queue: clients that want a turn.
//!
//! A client has one worker at a time. Asking for a turn while one is under way makes another follow it.

use std::collections::VecDeque;
use std::sync::atomic::Ordering::*;
use std::sync::{Arc, Condvar, Mutex, PoisonError};

use crate::client::Client;

/// A turn was asked for.
const ASKED: u32 = 1;
/// The turn should begin with a scan.
const SCAN: u32 = 2;
/// The client is in the queue, or with a worker.
const BUSY: u32 = 4;

#[derive(Default)]
struct Waiting {
    clients: VecDeque<Arc<Client>>,
    /// Turns under way.
    turns: usize,
    closed: bool,
}

/// Clients that want a turn.
#[derive(Default)]
pub(crate) struct Queue {
    waiting: Mutex<Waiting>,
    more: Condvar,
}

impl Queue {
    /// Asks for a turn of `client`. `scan`: a merge period has passed.
    pub(crate) fn ask(&self, client: &Arc<Client>, scan: bool) {
        let wanted = ASKED | BUSY | if scan { SCAN } else { 0 };
        if client.turns.fetch_or(wanted, AcqRel) & BUSY == 0 {
            self.push(client.clone());
        }
    }

    fn push(&self, client: Arc<Client>) {
        self.waiting.lock().unwrap_or_else(PoisonError::into_inner).clients.push_back(client);
        self.more.notify_one();
    }

    /// Ends the workers.
    pub(crate) fn close(&self) {
        self.waiting.lock().unwrap_or_else(PoisonError::into_inner).closed = true;
        self.more.notify_all();
    }

    /// The next client and whether to scan it; waits. `None`: the queue is closed.
    pub(crate) fn take(&self) -> Option<(Arc<Client>, bool)> {
        let mut waiting = self.waiting.lock().unwrap_or_else(PoisonError::into_inner);
        loop {
            if waiting.closed {
                return None;
            }
            if let Some(client) = waiting.clients.pop_front() {
                waiting.turns += 1;
                let asked = client.turns.fetch_and(BUSY, AcqRel);
                return Some((client, asked & SCAN != 0));
            }
            waiting = self.more.wait(waiting).unwrap_or_else(PoisonError::into_inner);
        }
    }

    /// Gives the caller a turn of `client` at once, also if it waits for one, which it still gets afterwards. `false`: another worker has it.
    pub(crate) fn claim(&self, client: &Arc<Client>) -> bool {
        let mut waiting = self.waiting.lock().unwrap_or_else(PoisonError::into_inner);
        if client.turns.fetch_or(BUSY, AcqRel) & BUSY != 0 {
            let Some(at) = waiting.clients.iter().position(|other| Arc::ptr_eq(other, client)) else { return false };
            waiting.clients.remove(at);
        }
        waiting.turns += 1;
        true
    }

    /// The turn is over.
    pub(crate) fn done(&self, client: Arc<Client>) {
        if client.turns.compare_exchange(BUSY, 0, AcqRel, Acquire).is_err() {
            self.push(client);
        }
        self.waiting.lock().unwrap_or_else(PoisonError::into_inner).turns -= 1;
    }

    /// Whether no client waits for a turn or has one.
    pub(crate) fn is_idle(&self) -> bool {
        let waiting = self.waiting.lock().unwrap_or_else(PoisonError::into_inner);
        waiting.clients.is_empty() && waiting.turns == 0
    }
}
