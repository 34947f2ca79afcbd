//! Searches for guests' RAM: each is a thread that asks a QEMU, which may take minutes.

use std::sync::Arc;

use claims::Owner;

use super::shared::Shared;

/// Searches of one user's domains at a time, a thread each: guests that start together.
pub(crate) const SEARCHES: u32 = 128;

/// A search under way; it counts until it is dropped.
pub(crate) struct Search {
    shared: Arc<Shared>,
    user: Option<Owner>,
}

impl Search {
    /// `None`: there are too many of this user.
    pub(crate) fn begin(shared: &Arc<Shared>, user: Option<Owner>) -> Option<Self> {
        let mut searches = shared.searches.lock();
        let count = searches.entry(user).or_insert(0);
        if *count >= SEARCHES {
            return None;
        }
        *count += 1;
        Some(Self { shared: shared.clone(), user })
    }

    /// Whether the daemon waits for its end.
    pub(crate) fn goes_on(&self) -> bool {
        !self.shared.stopping()
    }
}

impl Drop for Search {
    fn drop(&mut self) {
        let mut searches = self.shared.searches.lock();
        let left = searches.remove(&self.user).unwrap_or(0).saturating_sub(1);
        if left > 0 {
            searches.insert(self.user, left);
        }
    }
}

#[cfg(test)]
mod tests;
