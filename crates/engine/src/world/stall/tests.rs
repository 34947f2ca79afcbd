use std::sync::mpsc;

use super::*;

const SEVEN: Owner = Owner::numbered(7);
const EIGHT: Owner = Owner::numbered(8);

#[test]
fn a_worker_that_sleeps_in_a_clients_memory_is_replaced_and_its_user_left_alone() {
    let stalls = Stalls::default();
    let (release, held) = mpsc::channel::<()>();
    let ours = &stalls;
    std::thread::scope(|scope| {
        let worker = scope.spawn(move || {
            let slot = ours.enter();
            assert_eq!(touch(SEVEN, || 1), Some(1));
            assert_eq!(touch(SEVEN, || held.recv().is_ok()), None, "too late");
            assert_eq!(touch(EIGHT, || 2), None, "it touches no other memory either");
            ours.leave(&slot);
        });
        let mut replaced = Vec::new();
        while replaced.is_empty() {
            std::thread::sleep(TICK);
            stalls.look(|user, _| replaced.push(user));
        }
        stalls.look(|user, _| replaced.push(user));
        assert_eq!(replaced, [SEVEN], "once");
        assert!(stalls.why(SEVEN).is_some() && stalls.why(EIGHT).is_none());
        release.send(()).unwrap();
        worker.join().unwrap();
    });
    assert!(stalls.why(SEVEN).is_some(), "for a while");
    stalls.blocked.lock().values_mut().for_each(|blocked| blocked.rest = Duration::ZERO);
    assert!(stalls.why(SEVEN).is_none());
    assert_eq!(touch(SEVEN, || 3), Some(3), "this thread is no worker");
}

#[test]
fn a_lock_is_told_from_memory_that_does_not_come() {
    let lock = "[<0>] rwsem_down_read_slowpath+0x1a5/0x4d0\n[<0>] down_read_killable+0x6e/0xa0\n";
    let file = "[<0>] folio_wait_bit_common+0x133/0x310\n[<0>] filemap_fault+0x2cb/0xbf0\n";
    let own = "[<0>] handle_userfault+0x3a8/0x6f0\n[<0>] process_vm_rw_core+0x22d/0x4a0\n";
    assert_eq!([lock, file, own].map(is_in_lock), [true, false, false]);
    assert!(!waits_for_lock(0), "no such thread");
}

#[test]
fn a_worker_that_computes_is_not_replaced() {
    let stalls = Stalls::default();
    let stop = AtomicBool::new(false);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            let slot = stalls.enter();
            touch(SEVEN, || {
                while !stop.load(Relaxed) {
                    std::hint::spin_loop();
                }
            });
            stalls.leave(&slot);
        });
        std::thread::sleep(3 * LIMIT);
        stalls.look(|_, _| panic!("it runs"));
        stop.store(true, Relaxed);
    });
}

#[test]
fn a_worker_that_is_slow_and_sleeps_little_is_not_replaced() {
    let (stalls, done) = (Stalls::default(), AtomicBool::new(false));
    let (mut replaced, mut came, mut slept) = (None, None, Duration::ZERO);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            let slot = stalls.enter();
            came = touch(SEVEN, || {
                for _ in 0..4 {
                    let start = Instant::now();
                    while start.elapsed() < LIMIT {
                        std::hint::spin_loop();
                    }
                    let asleep = Instant::now();
                    std::thread::sleep(LIMIT / 6);
                    slept += asleep.elapsed();
                }
            });
            stalls.leave(&slot);
            done.store(true, Relaxed);
        });
        while !done.load(Relaxed) {
            stalls.look(|_, time| replaced = Some(time));
            std::thread::sleep(Duration::from_millis(1));
        }
    });
    // On a busy machine short sleeps may end late.
    assert!(replaced.is_none() && came.is_some() || slept > LIMIT, "it slept for {slept:?}, and {replaced:?} was seen");
}
