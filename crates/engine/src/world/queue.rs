//! The workers' queue: clients that want a turn.
//!
//! A client has one worker at a time. Asking for a turn while one is under way makes another follow
//! it. A turn that scans and one that goes on where the last ended are two things: who asks for one
//! gets that one, whatever was asked besides.

use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering::*};

use parking_lot::{Condvar, Mutex};

/// A turn was asked for.
const ASKED: u32 = 1;
/// A scan was asked for.
const SCAN: u32 = 2;
/// The client is in the queue, or with a worker.
const BUSY: u32 = 4;

/// Who can have turns.
pub(crate) trait TakesTurns {
    /// What was asked, zero to begin with; the queue's.
    fn turns(&self) -> &AtomicU32;
}

struct Waiting<C> {
    clients: VecDeque<Arc<C>>,
    /// Turns under way.
    turns: usize,
    closed: bool,
}

/// Clients that want a turn.
pub(crate) struct Queue<C> {
    waiting: Mutex<Waiting<C>>,
    more: Condvar,
}

impl<C> Default for Queue<C> {
    fn default() -> Self {
        let waiting = Waiting { clients: VecDeque::new(), turns: 0, closed: false };
        Self { waiting: Mutex::new(waiting), more: Condvar::new() }
    }
}

impl<C: TakesTurns> Queue<C> {
    /// Asks for a turn of `client`. `scan`: a merge period has passed.
    pub(crate) fn ask(&self, client: &Arc<C>, scan: bool) {
        let wanted = BUSY | if scan { SCAN } else { ASKED };
        if client.turns().fetch_or(wanted, AcqRel) & BUSY == 0 {
            self.push(client.clone());
        }
    }

    fn push(&self, client: Arc<C>) {
        self.waiting.lock().clients.push_back(client);
        self.more.notify_one();
    }

    /// Ends the workers.
    pub(crate) fn close(&self) {
        self.waiting.lock().closed = true;
        self.more.notify_all();
    }

    /// The next client and whether to scan it; waits. `None`: the queue is closed.
    pub(crate) fn take(&self) -> Option<(Arc<C>, bool)> {
        let mut waiting = self.waiting.lock();
        loop {
            if waiting.closed {
                return None;
            }
            if let Some(client) = waiting.clients.pop_front() {
                waiting.turns += 1;
                let scan = client.turns().fetch_and(!SCAN, AcqRel) & SCAN != 0;
                if !scan {
                    client.turns().fetch_and(!ASKED, AcqRel);
                }
                return Some((client, scan));
            }
            self.more.wait(&mut waiting);
        }
    }

    /// Gives the caller a turn of `client` at once, also if it waits for one, which it still gets
    /// afterwards. `false`: another worker has it.
    pub(crate) fn claim(&self, client: &Arc<C>) -> bool {
        let mut waiting = self.waiting.lock();
        if client.turns().fetch_or(BUSY, AcqRel) & BUSY != 0 {
            let Some(at) = waiting.clients.iter().position(|other| Arc::ptr_eq(other, client)) else { return false };
            waiting.clients.remove(at);
        }
        waiting.turns += 1;
        true
    }

    /// The turn is over.
    pub(crate) fn done(&self, client: Arc<C>) {
        if client.turns().compare_exchange(BUSY, 0, AcqRel, Acquire).is_err() {
            self.push(client);
        }
        self.waiting.lock().turns -= 1;
    }

    /// Whether no client waits for a turn or has one.
    pub(crate) fn is_idle(&self) -> bool {
        let waiting = self.waiting.lock();
        waiting.clients.is_empty() && waiting.turns == 0
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::AtomicUsize;

    use super::*;

    #[derive(Default)]
    struct Fake {
        turns: AtomicU32,
        /// Workers that have it: never two.
        inside: AtomicUsize,
        /// Plain turns asked for, and how many of these had been when the last one began.
        asked: AtomicUsize,
        seen: AtomicUsize,
    }

    impl TakesTurns for Fake {
        fn turns(&self) -> &AtomicU32 {
            &self.turns
        }
    }

    #[test]
    fn a_turn_is_not_lost_to_a_scan() {
        let (queue, client) = (Queue::default(), Arc::new(Fake::default()));
        for order in [[false, true], [true, false]] {
            order.iter().for_each(|&scan| queue.ask(&client, scan));
            let mut turns = Vec::new();
            while !queue.is_idle() {
                let (client, scan) = queue.take().unwrap();
                turns.push(scan);
                queue.done(client);
            }
            assert_eq!(turns, [true, false], "a scan, whose findings the turn sees");
        }
    }

    #[test]
    fn who_claims_a_client_that_waits_delays_its_turn() {
        let (queue, client) = (Queue::default(), Arc::new(Fake::default()));
        queue.ask(&client, false);
        assert!(queue.claim(&client) && !queue.claim(&client));
        queue.done(client.clone());
        assert!(!queue.is_idle());
        let (taken, scan) = queue.take().unwrap();
        assert!(!scan && !queue.claim(&client), "a worker has it");
        queue.done(taken);
        assert!(queue.is_idle() && queue.claim(&client));
        queue.done(client);
        assert!(queue.is_idle());
    }

    #[test]
    fn one_worker_at_a_time_and_every_turn_is_had() {
        let queue: Queue<Fake> = Queue::default();
        let clients: Vec<Arc<Fake>> = (0..3).map(|_| Arc::default()).collect();
        let enter = |client: &Fake| {
            assert_eq!(client.inside.fetch_add(1, AcqRel), 0, "two workers have it");
            std::hint::spin_loop();
            client.inside.fetch_sub(1, AcqRel);
        };
        std::thread::scope(|scope| {
            for _ in 0..3 {
                scope.spawn(|| {
                    while let Some((client, scan)) = queue.take() {
                        if !scan {
                            client.seen.store(client.asked.load(Acquire), Release);
                        }
                        enter(&client);
                        queue.done(client);
                    }
                });
            }
            let askers: Vec<_> = (0..3)
                .map(|n| {
                    let (queue, clients) = (&queue, &clients);
                    scope.spawn(move || {
                        for i in 0..30_000 {
                            let client = &clients[(i * 7 + n) % 3];
                            match (i + n) % 4 {
                                0 => queue.ask(client, true),
                                1 if queue.claim(client) => {
                                    enter(client);
                                    queue.done(client.clone());
                                }
                                _ => {
                                    client.asked.fetch_add(1, AcqRel);
                                    queue.ask(client, false);
                                }
                            }
                        }
                    })
                })
                .collect();
            askers.into_iter().for_each(|asker| asker.join().unwrap());
            let deadline = std::time::Instant::now() + std::time::Duration::from_secs(60);
            while !queue.is_idle() && std::time::Instant::now() < deadline {
                std::thread::yield_now();
            }
            queue.close();
        });
        for client in &clients {
            let counts = (client.seen.load(Acquire), client.turns.load(Acquire));
            assert_eq!(counts, (client.asked.load(Acquire), 0), "the last turn asked for was had");
        }
    }
}
