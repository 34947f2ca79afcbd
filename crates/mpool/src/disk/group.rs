//! Work that is done once for all threads that wait for it: a sync, above all.
//!
//! The first thread that comes does its own item. Items of threads that come meanwhile wait, and
//! are done together by one of these threads when it has ended. So a thread waits for at most two
//! rounds, however many there are.

use std::collections::HashMap;

use parking_lot::{Condvar, Mutex};

/// Items `T` of threads, and their results `R`.
pub(crate) struct Group<T, R> {
    state: Mutex<State<T, R>>,
    ended: Condvar,
}

struct State<T, R> {
    waiting: Vec<(u64, T)>,
    results: HashMap<u64, R>,
    next: u64,
    busy: bool,
}

impl<T, R> Default for Group<T, R> {
    fn default() -> Self {
        let state = State { waiting: Vec::new(), results: HashMap::new(), next: 0, busy: false };
        Self { state: Mutex::new(state), ended: Condvar::new() }
    }
}

/// Lets others go on, also when the work panics.
struct Round<'a, T, R>(&'a Group<T, R>);

impl<T, R> Drop for Round<'_, T, R> {
    fn drop(&mut self) {
        self.0.state.lock().busy = false;
        self.0.ended.notify_all();
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
        loop {
            if let Some(result) = state.results.remove(&mine) {
                return result;
            }
            if state.busy {
                self.ended.wait(&mut state);
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
