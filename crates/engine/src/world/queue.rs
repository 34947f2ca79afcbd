//! The workers' queue: clients that are due for a merge pass.
//!
//! A client has one worker at a time. A request for a pass while one is under way makes another
//! follow it. A pass that scans and a pass that goes on where the last ended are two things: a
//! request for one kind is met by that kind, whatever else was requested.
//!
//! Users take turns: a user with many clients does not delay the clients of others.

use std::collections::{BTreeMap, VecDeque};
use std::ops::Bound::{Excluded, Unbounded};
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering::*};

use claims::Owner;

use crate::sync::{Condvar, Mutex};

/// A pass that goes on was requested.
const GO_ON: u32 = 1;
/// A pass that scans was requested.
const SCAN: u32 = 2;
/// The client is in the queue, or with a worker.
const BUSY: u32 = 4;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Pass {
    /// A merge period is over: it only looks which pages were written.
    Scan,
    /// It reads and merges, where the last one ended.
    GoOn,
}

/// What can have merge passes.
pub(crate) trait TakesPasses {
    /// The queue's notes on what was requested; 0 to begin with.
    fn passes(&self) -> &AtomicU32;

    /// Whose it is.
    fn user(&self) -> Owner;
}

struct Waiting<C> {
    /// By user; no entry is empty.
    clients: BTreeMap<Owner, VecDeque<Arc<C>>>,
    /// The user that had the last turn.
    last: Owner,
    /// Passes under way that were not set aside, by user; no entry is 0. Below 0 for the moment in
    /// which a worker was set aside just when its pass had ended.
    under_way: BTreeMap<Owner, isize>,
    closed: bool,
}

impl<C> Waiting<C> {
    /// Counts passes of this user.
    fn count(&mut self, user: Owner, passes: isize) {
        let count = self.under_way.entry(user).or_default();
        *count += passes;
        if *count == 0 {
            self.under_way.remove(&user);
        }
    }
}

impl<C: TakesPasses> Waiting<C> {
    /// The next client of the next user.
    fn pop(&mut self) -> Option<Arc<C>> {
        let after = self.clients.range((Excluded(self.last), Unbounded)).next();
        let user = after.or_else(|| self.clients.iter().next()).map(|(&user, _)| user)?;
        self.last = user;
        let own = self.clients.get_mut(&user)?;
        let client = own.pop_front();
        if own.is_empty() {
            self.clients.remove(&user);
        }
        client
    }

    /// Takes a client out if it waits. Returns whether it did.
    fn remove(&mut self, client: &Arc<C>) -> bool {
        let Some(own) = self.clients.get_mut(&client.user()) else { return false };
        let Some(at) = own.iter().position(|other| Arc::ptr_eq(other, client)) else { return false };
        own.remove(at);
        if own.is_empty() {
            self.clients.remove(&client.user());
        }
        true
    }
}

pub(crate) struct Queue<C> {
    waiting: Mutex<Waiting<C>>,
    more: Condvar,
    /// A pass has begun, or the queue was closed.
    begun: Condvar,
}

impl<C> Default for Queue<C> {
    fn default() -> Self {
        let waiting =
            Waiting { clients: BTreeMap::new(), last: Owner::ROOT, under_way: BTreeMap::new(), closed: false };
        Self { waiting: Mutex::new(waiting), more: Condvar::new(), begun: Condvar::new() }
    }
}

impl<C: TakesPasses> Queue<C> {
    pub(crate) fn ask(&self, client: &Arc<C>, pass: Pass) {
        let wanted = match pass {
            Pass::Scan => BUSY | SCAN,
            Pass::GoOn => BUSY | GO_ON,
        };
        if client.passes().fetch_or(wanted, AcqRel) & BUSY == 0 {
            self.push(client.clone());
        }
    }

    fn push(&self, client: Arc<C>) {
        self.waiting.lock().clients.entry(client.user()).or_default().push_back(client);
        self.more.notify_one();
    }

    pub(crate) fn close(&self) {
        self.waiting.lock().closed = true;
        self.more.notify_all();
        self.begun.notify_all();
    }

    /// The next client, and for which pass; waits. `None`: the queue is closed.
    pub(crate) fn take(&self) -> Option<(Arc<C>, Pass)> {
        let mut waiting = self.waiting.lock();
        loop {
            if waiting.closed {
                return None;
            }
            if let Some(client) = waiting.pop() {
                waiting.count(client.user(), 1);
                self.begun.notify_all();
                if client.passes().fetch_and(!SCAN, AcqRel) & SCAN != 0 {
                    return Some((client, Pass::Scan));
                }
                client.passes().fetch_and(!GO_ON, AcqRel);
                return Some((client, Pass::GoOn));
            }
            self.more.wait(&mut waiting);
        }
    }

    /// Gives a pass of `client` at once; a pass it waits for follows. `false`: a worker has it.
    pub(crate) fn claim(&self, client: &Arc<C>) -> bool {
        let mut waiting = self.waiting.lock();
        if client.passes().fetch_or(BUSY, AcqRel) & BUSY != 0 && !waiting.remove(client) {
            return false;
        }
        waiting.count(client.user(), 1);
        true
    }

    pub(crate) fn done(&self, client: Arc<C>) {
        let user = client.user();
        if client.passes().compare_exchange(BUSY, 0, AcqRel, Acquire).is_err() {
            self.push(client);
        }
        self.waiting.lock().count(user, -1);
    }

    /// Whether a client of another user waits for a pass.
    pub(crate) fn others_wait(&self, user: Owner) -> bool {
        self.waiting.lock().clients.keys().any(|&other| other != user)
    }

    /// A pass of this user is held up, and not counted until it [returns](Queue::returned).
    pub(crate) fn set_aside(&self, user: Owner) {
        self.waiting.lock().count(user, -1);
    }

    /// A pass of this user that was set aside is about to end.
    pub(crate) fn returned(&self, user: Owner) {
        self.waiting.lock().count(user, 1);
    }

    /// Waits until a pass is under way that was not set aside. `false`: the queue is closed.
    pub(crate) fn wait_for_work(&self) -> bool {
        let mut waiting = self.waiting.lock();
        while !waiting.closed && waiting.under_way.values().all(|&passes| passes <= 0) {
            self.begun.wait(&mut waiting);
        }
        !waiting.closed
    }

    /// Whether a client of this user waits for a pass or has one.
    pub(crate) fn is_busy(&self, user: Owner) -> bool {
        let waiting = self.waiting.lock();
        waiting.clients.contains_key(&user) || waiting.under_way.get(&user).is_some_and(|&passes| passes > 0)
    }

    /// Whether no client waits for a pass or has one.
    #[cfg(test)]
    fn is_idle(&self) -> bool {
        let waiting = self.waiting.lock();
        waiting.clients.is_empty() && waiting.under_way.is_empty()
    }
}

#[cfg(test)]
mod tests;
