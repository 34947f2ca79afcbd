use std::sync::atomic::AtomicUsize;

use super::*;

#[derive(Default)]
struct Fake {
    user: Owner,
    passes: AtomicU32,
    /// Workers that have it: never two.
    inside: AtomicUsize,
    /// Passes without a scan asked for, and how many of these had been when the last one began.
    asked: AtomicUsize,
    seen: AtomicUsize,
}

impl TakesPasses for Fake {
    fn passes(&self) -> &AtomicU32 {
        &self.passes
    }

    fn user(&self) -> Owner {
        self.user
    }
}

#[test]
fn users_take_turns_however_many_clients_they_have() {
    let queue = Queue::default();
    let ask = |user| queue.ask(&Arc::new(Fake { user: Owner::numbered(user), ..Fake::default() }), Pass::GoOn);
    [7, 7, 7, 7, 3, 9].into_iter().for_each(ask);
    assert!(queue.others_wait(Owner::numbered(7)) && queue.others_wait(Owner::numbered(3)));
    let users: Vec<u32> = (0..6).map(|_| queue.take().unwrap().0.user.number()).collect();
    assert_eq!(users, [3, 7, 9, 7, 7, 7]);
    assert!(!queue.others_wait(Owner::numbered(7)));
}

#[test]
fn a_pass_is_not_lost_to_a_scan() {
    let (queue, client) = (Queue::default(), Arc::new(Fake::default()));
    for order in [[Pass::GoOn, Pass::Scan], [Pass::Scan, Pass::GoOn]] {
        order.iter().for_each(|&pass| queue.ask(&client, pass));
        let mut passes = Vec::new();
        while !queue.is_idle() {
            let (client, pass) = queue.take().unwrap();
            passes.push(pass);
            queue.done(client);
        }
        assert_eq!(passes, [Pass::Scan, Pass::GoOn], "a scan, whose findings the pass sees");
    }
}

#[test]
fn a_claim_of_a_client_that_waits_delays_its_pass() {
    let (queue, client) = (Queue::default(), Arc::new(Fake::default()));
    queue.ask(&client, Pass::GoOn);
    assert!(queue.claim(&client) && !queue.claim(&client));
    queue.done(client.clone());
    assert!(!queue.is_idle());
    let (taken, pass) = queue.take().unwrap();
    assert!(pass == Pass::GoOn && !queue.claim(&client), "a worker has it");
    queue.done(taken);
    assert!(queue.is_idle() && queue.claim(&client));
    queue.done(client);
    assert!(queue.is_idle());
}

#[test]
fn one_worker_at_a_time_and_every_pass_is_had() {
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
                while let Some((client, pass)) = queue.take() {
                    if pass == Pass::GoOn {
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
                            0 => queue.ask(client, Pass::Scan),
                            1 if queue.claim(client) => {
                                enter(client);
                                queue.done(client.clone());
                            }
                            _ => {
                                client.asked.fetch_add(1, AcqRel);
                                queue.ask(client, Pass::GoOn);
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
        let counts = (client.seen.load(Acquire), client.passes.load(Acquire));
        assert_eq!(counts, (client.asked.load(Acquire), 0), "the last pass asked for was had");
    }
}
