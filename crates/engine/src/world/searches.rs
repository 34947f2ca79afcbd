//! Searches for guests' RAM: each is a thread that asks a QEMU, which may take minutes.

use std::sync::Arc;

use super::shared::Shared;

/// Searches of one user's domains at a time, a thread each: guests that start together.
pub(crate) const SEARCHES: u32 = 128;

/// A search under way; it counts until it is dropped.
pub(crate) struct Search {
    shared: Arc<Shared>,
    uid: Option<u32>,
}

impl Search {
    /// `None`: there are too many of this user.
    pub(crate) fn begin(shared: &Arc<Shared>, uid: Option<u32>) -> Option<Self> {
        let mut searches = shared.searches.lock();
        let count = searches.entry(uid).or_insert(0);
        if *count >= SEARCHES {
            return None;
        }
        *count += 1;
        Some(Self { shared: shared.clone(), uid })
    }

    /// Whether the daemon waits for its end.
    pub(crate) fn goes_on(&self) -> bool {
        !self.shared.stopping()
    }
}

impl Drop for Search {
    fn drop(&mut self) {
        let mut searches = self.shared.searches.lock();
        let left = searches.remove(&self.uid).unwrap_or(0).saturating_sub(1);
        if left > 0 {
            searches.insert(self.uid, left);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn searches_of_one_user_are_counted_and_given_back() {
        let shared = Arc::new(crate::world::shared::tests::shared());
        let begin = || Search::begin(&shared, Some(7));
        let mut searches: Vec<_> = (0..SEARCHES).map_while(|_| begin()).collect();
        assert_eq!(searches.len(), SEARCHES as usize);
        assert!(begin().is_none(), "one too many");
        assert!(Search::begin(&shared, Some(8)).is_some(), "of another user");
        searches.pop();
        assert!(begin().is_some() && searches[0].goes_on());
        shared.stop();
        assert!(!searches[0].goes_on(), "nobody waits for it");
        drop(searches);
        assert!(shared.searches.lock().is_empty());
    }
}
