use std::sync::mpsc::channel;

use super::*;

#[test]
fn users_take_turns_however_much_work_they_have() {
    let turns = Turns::new(1);
    let order = Mutex::new(Vec::new());
    let wait = |count| {
        while turns.state.lock().waiting.values().sum::<usize>() < count {
            std::thread::yield_now();
        }
    };
    let (begun, has_begun) = channel();
    let (release, held) = channel::<()>();
    std::thread::scope(|scope| {
        let turn = |user: u32| {
            _ = scope.spawn({
                let (turns, order) = (&turns, &order);
                move || turns.take(Owner::numbered(user), || order.lock().push(user))
            })
        };
        let turns = &turns;
        scope.spawn(move || {
            turns.take(Owner::numbered(7), || {
                begun.send(()).unwrap();
                held.recv().unwrap();
            });
        });
        has_begun.recv().unwrap();
        [7, 7, 7, 3, 9].into_iter().for_each(turn);
        wait(5);
        assert!(order.lock().is_empty(), "one at a time");
        release.send(()).unwrap();
    });
    assert_eq!(*order.lock(), [9, 3, 7, 7, 7]);
    assert!(turns.state.lock().waiting.is_empty() && turns.state.lock().free == 1);
}

#[test]
fn a_turn_that_panics_gives_its_place_back() {
    let turns = Turns::new(1);
    let panics = || turns.take(Owner::numbered(7), || panic!("a test's"));
    assert!(std::panic::catch_unwind(std::panic::AssertUnwindSafe(panics)).is_err());
    assert_eq!(turns.take(Owner::numbered(8), || 5), 5);
}
