//! Work that is done once for all threads that wait for it: a sync, above all.
//!
//! The first thread that comes does its own item. Items of threads that come meanwhile wait, and
//! are done together by one of these threads when it has ended. So a thread waits for at most two
//! rounds, however many there are. The end of a round wakes those that it was for, and one of the
//! next round, which does that.

use std::collections::HashMap;

use parking_lot::{Condvar, Mutex};

/// Items `T` of threads, and their results `R`.
pub(crate) struct Group<T, R> {
    state: Mutex<State<T, R>>,
    /// Where threads of even and of odd rounds wait: the end of a round wakes those that it was
    /// for, and one of the next round, which does that.
    ended: [Condvar; 2],
}

struct State<T, R> {
    /// For the next round.
    waiting: Vec<(u64, T)>,
    results: HashMap<u64, R>,
    next: u64,
    /// The number of the round that is under way, or of the next one.
    round: usize,
    busy: bool,
}

impl<T, R> Default for Group<T, R> {
    fn default() -> Self {
        let state = State { waiting: Vec::new(), results: HashMap::new(), next: 0, round: 0, busy: false };
        Self { state: Mutex::new(state), ended: Default::default() }
    }
}

/// Lets others go on, also when the work panics.
struct Round<'a, T, R>(&'a Group<T, R>);

impl<T, R> Drop for Round<'_, T, R> {
    fn drop(&mut self) {
        let mut state = self.0.state.lock();
        state.busy = false;
        let this = state.round;
        state.round += 1;
        drop(state);
        self.0.ended[this % 2].notify_all();
        self.0.ended[(this + 1) % 2].notify_one();
    }
}

impl<T, R> Group<T, R> {
    /// Does the item, perhaps with those of other threads; gives its result. `work` gives as many
    /// results as it gets items, in the same order.
    pub(crate) fn run(&self, item: T, work: impl Fn(Vec<T>) -> Vec<R>) -> R {
        let mut state = self.state.lock();
        let mine = state.next;
        state.next += 1;
        state.waiting.push((mine, item));
        let round = state.round + usize::from(state.busy);
        loop {
            if let Some(result) = state.results.remove(&mine) {
                return result;
            }
            if state.busy {
                self.ended[round % 2].wait(&mut state);
                continue;
            }
            state.busy = true;
            let (numbers, items): (Vec<u64>, Vec<T>) = std::mem::take(&mut state.waiting).into_iter().unzip();
            drop(state);
            let round = Round(self);
            let results = work(items);
            self.state.lock().results.extend(numbers.into_iter().zip(results));
            drop(round);
            state = self.state.lock();
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicU64, Ordering::*};
    use std::time::Duration;

    use super::*;

    #[test]
    fn many_threads_share_rounds_and_each_gets_its_own_result() {
        let (group, rounds) = (Group::default(), AtomicU64::new(0));
        std::thread::scope(|scope| {
            for thread in 0..16u64 {
                let (group, rounds) = (&group, &rounds);
                scope.spawn(move || {
                    for i in 0..20 {
                        let double = group.run(thread * 100 + i, |items: Vec<u64>| {
                            rounds.fetch_add(1, Relaxed);
                            std::thread::sleep(Duration::from_millis(1));
                            items.into_iter().map(|item| item * 2).collect()
                        });
                        assert_eq!(double, (thread * 100 + i) * 2);
                    }
                });
            }
        });
        assert!(rounds.load(Relaxed) < 16 * 20 / 4, "{rounds:?}");
    }
}
