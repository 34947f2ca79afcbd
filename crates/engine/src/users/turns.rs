//! Turns for work that clients cause and that merging does not wait for: a few at a time, user
//! after user. So whoever has much of it delays its own clients, and not those of others.
//!
//! A turn is short and waits for nobody: what may wait for a client is done between two turns.

use std::collections::BTreeMap;
use std::ops::Bound::{Excluded, Unbounded};

use claims::Owner;

use crate::sync::{Condvar, Mutex};

pub(crate) struct Turns {
    state: Mutex<State>,
    changed: Condvar,
}

struct State {
    /// Turns that there can be at a time, without those under way.
    free: usize,
    /// The user that had the last turn.
    last: Owner,
    /// Threads that wait, by user; no entry is 0.
    waiting: BTreeMap<Owner, usize>,
}

impl State {
    /// Whose turn it is, if there can be another.
    fn next(&self) -> Option<Owner> {
        let after = self.waiting.range((Excluded(self.last), Unbounded)).next();
        after.or_else(|| self.waiting.first_key_value()).map(|(&user, _)| user).filter(|_| self.free > 0)
    }
}

impl Turns {
    /// `most`: at a time.
    pub(crate) fn new(most: usize) -> Self {
        let state = State { free: most, last: Owner::ROOT, waiting: BTreeMap::new() };
        Self { state: Mutex::new(state), changed: Condvar::new() }
    }

    /// Waits for a turn of this user, and does it.
    pub(crate) fn take<T>(&self, user: Owner, turn: impl FnOnce() -> T) -> T {
        let mut state = self.state.lock();
        *state.waiting.entry(user).or_default() += 1;
        while state.next() != Some(user) {
            self.changed.wait(&mut state);
        }
        state.free -= 1;
        state.last = user;
        let left = state.waiting.remove(&user).unwrap_or(1) - 1;
        if left > 0 {
            state.waiting.insert(user, left);
        }
        drop(state);
        let _end = End(self);
        // Another may have one at the same time.
        self.changed.notify_all();
        turn()
    }
}

/// A turn under way.
struct End<'a>(&'a Turns);

impl Drop for End<'_> {
    fn drop(&mut self) {
        self.0.state.lock().free += 1;
        self.0.changed.notify_all();
    }
}

#[cfg(test)]
mod tests;
