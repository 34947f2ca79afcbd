//! Nodes that come and go, in every interleaving of two threads.

use loom::sync::Arc;
use loom::thread;

use crate::pool::*;
use crate::primitive::Counter;
use crate::tests::loom::{Count, model};
use Ordering::Release;

const LIVE: u64 = 11;

/// A reader that got a node before it was unlinked must find its words unchanged; yet nodes are
/// used again.
#[test]
fn grace() {
    static REUSED: Count = Count::new();
    static SEEN: Count = Count::new();
    model(3, || {
        let epoch = Arc::new(Epoch::with_shards(2));
        let pool = Arc::new(Pool::new(&epoch));
        let get = |pin: &Pin<'_>, link: u64, side: usize| {
            // SAFETY: a link to a node of this pool, read under this pin, or made from a node
            // allocated under it.
            unsafe { node(link, pin) }.0[side].load(Relaxed)
        };
        let address = {
            let pin = epoch.pin_on(1);
            let address = pool.allocate(&epoch, &pin);
            // SAFETY: allocated just now under this pin.
            unsafe { node(address, &pin) }.0[1].store(LIVE, Relaxed);
            address
        };
        let slot = Arc::new(AtomicU64::new(word::inner(address, 0)));

        let reader = {
            let (epoch, pool, slot) = (epoch.clone(), pool.clone(), slot.clone());
            thread::spawn(move || {
                let pin = epoch.pin_on(0);
                let link = slot.load(Acquire);
                if link != word::VACANT {
                    SEEN.more();
                    assert_eq!(get(&pin, link, 1), LIVE);
                }
                drop(pin);
                drop(pool);
            })
        };
        // Ticks that may pass between a reader's first look at the clock and its count.
        epoch.tick();
        epoch.tick();
        {
            let pin = epoch.pin_on(1);
            slot.store(word::VACANT, Release);
            pool.retire(&pin, address, 0);
        }
        for _ in 0..*RIPE.start() {
            epoch.tick();
        }
        let pin = epoch.pin_on(1);
        let again = pool.allocate(&epoch, &pin);
        // SAFETY: allocated just now under this pin.
        unsafe { node(again, &pin) }.0[1].store(LIVE + 1, Relaxed);
        if again == address {
            REUSED.more();
        }
        drop(pin);
        reader.join().unwrap();
    });
    assert!(REUSED.any() && SEEN.any(), "the model never came to the point");
}

/// No node is handed out twice, while lists are popped, pushed and harvested at the same time.
#[test]
fn owners() {
    model(3, || {
        let epoch = Arc::new(Epoch::with_shards(1));
        let pool = Arc::new(Pool::new(&epoch));
        {
            // Two nodes in the limbo list that is ripe next.
            let pin = epoch.pin();
            let two = [pool.allocate(&epoch, &pin), pool.allocate(&epoch, &pin)];
            for (i, address) in two.into_iter().enumerate() {
                pool.retire(&pin, address, i);
            }
        }
        (0..2).for_each(|_| epoch.tick());
        let owned: Arc<std::sync::Mutex<std::collections::BTreeSet<u64>>> = Arc::default();
        static REUSED: Counter = Counter::new(0);
        let work = |epoch: &Epoch, pool: &Pool, owned: &std::sync::Mutex<std::collections::BTreeSet<u64>>, rounds| {
            for round in 0..rounds {
                let pin = epoch.pin();
                let address = pool.allocate(epoch, &pin);
                assert!(owned.lock().unwrap().insert(address), "node {address:#x} has two owners");
                // SAFETY: allocated just now under this pin.
                unsafe { node(address, &pin) }.0[round].store(0, Relaxed);
                owned.lock().unwrap().remove(&address);
                pool.retire(&pin, address, round);
                REUSED.fetch_add(1, Relaxed);
            }
        };
        let other = {
            let (epoch, pool, owned) = (epoch.clone(), pool.clone(), owned.clone());
            thread::spawn(move || work(&epoch, &pool, &owned, 1))
        };
        work(&epoch, &pool, &owned, 2);
        other.join().unwrap();
    });
}
