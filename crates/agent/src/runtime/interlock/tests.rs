use std::sync::atomic::AtomicBool;

use super::*;

#[test]
fn nothing_is_adopted_while_events_are_read_or_stashed_nor_the_other_way_round() {
    let interlock = Interlock::new();
    assert!(interlock.begin_reading() && interlock.is_reading() && !interlock.begin_adopting());
    interlock.stash();
    assert!(!interlock.is_reading() && !interlock.begin_adopting());
    assert!(interlock.begin_reading(), "another one");
    interlock.stash();
    interlock.end_stash();
    assert!(interlock.begin_adopting() && !interlock.begin_reading());
    interlock.end_stash();
    assert!(!interlock.begin_reading(), "there was none");
    interlock.end_adopting();
    assert!(interlock.begin_reading());
    interlock.end_reading();
    assert!(interlock.begin_adopting());
}

#[test]
fn two_threads_are_never_in_both_steps() {
    const ROUNDS: u32 = 20_000;
    let (interlock, inside) = (Interlock::new(), AtomicBool::new(false));
    let alone = || {
        assert!(!inside.swap(true, Ordering::SeqCst));
        assert!(inside.swap(false, Ordering::SeqCst));
    };
    let rounds = |begin: fn(&Interlock) -> bool, end: fn(&Interlock)| {
        for _ in 0..ROUNDS {
            while !begin(&interlock) {
                std::thread::yield_now();
            }
            alone();
            end(&interlock);
        }
    };
    std::thread::scope(|scope| {
        scope.spawn(|| rounds(Interlock::begin_reading, Interlock::end_reading));
        scope.spawn(|| rounds(Interlock::begin_adopting, Interlock::end_adopting));
    });
}

#[test]
fn a_copy_of_an_inconsistent_process_is_inconsistent_too() {
    let interlock = Interlock::new();
    interlock.begin_reading();
    assert!(interlock.begin_anew() && interlock.begin_adopting());
    interlock.lose_tables();
    interlock.end_adopting();
    assert!(!interlock.has_tables() && !interlock.begin_anew() && !interlock.begin_reading());
    interlock.end_stash();
    assert!(!interlock.has_tables());
}

#[test]
fn the_thread_that_began_a_fork_ends_it() {
    let interlock = Interlock::new();
    interlock.begin_fork(7);
    assert!(!interlock.end_fork(8) && interlock.end_fork(7) && !interlock.end_fork(7));
    interlock.begin_fork(7);
    assert!(interlock.forget_fork() && !interlock.forget_fork());
}
