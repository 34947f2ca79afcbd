use std::cell::Cell;

use super::*;
use crate::cmd::pool::Turns;

thread_local! {
    /// How often it was asked who has a pool open.
    pub(super) static ASKED: Cell<usize> = const { Cell::new(0) };
}

#[test]
fn nobody_looks_for_the_holder_of_a_pool_that_is_served() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("pool");
    let held = Pool::create(&path, "store").unwrap();
    let (names, name) = (Names { pools: Some(dir.path().join("names")) }, path.to_str().unwrap());
    let own = |_| panic!("the pool is open elsewhere");
    assert_eq!(names.read(name, own, |_| Ok(Some(7))).unwrap(), 7);
    assert_eq!(ASKED.get(), 0);
    // Nobody serves it.
    let said = names.read::<i32>(name, own, |_| Ok(None)).unwrap_err().to_string();
    assert!(said.contains(&format!("is used by process {} (", std::process::id())), "{said}");
    assert_eq!(ASKED.get(), 1);
    drop(held);
    assert_eq!(names.read(name, |_| Ok(8), |_| Ok(None)).unwrap(), 8);
}

#[test]
fn the_process_that_has_a_pool_open_is_known() {
    let locks = "1: POSIX  ADVISORY  WRITE 7 fe:00:12 0 EOF\n2: FLOCK  ADVISORY  WRITE 8 fe:00:123 0 EOF\n\
                 2: -> FLOCK  ADVISORY  WRITE 9 fe:00:12 0 EOF\n3: FLOCK  ADVISORY  READ 10 fe:00:12 0 EOF\n4: x";
    assert_eq!(listed(locks, rustix::fs::makedev(0xfe, 0), 12), [10]);
    assert!(listed(locks, rustix::fs::makedev(0xfe, 1), 12).is_empty());
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("pool");
    let pool = Pool::create(&path, "store").unwrap();
    let names = Names { pools: Some(dir.path().join("names")) };
    let said = names.open(path.to_str().unwrap(), Access::Shared).map(drop).unwrap_err();
    assert!(said.to_string().contains(&format!("is used by process {} (", std::process::id())), "{said}");
    drop(pool);
    assert!(names.open(path.to_str().unwrap(), Access::Shared).is_ok());
}

#[test]
fn a_pool_that_was_made_anew_is_not_taken_for_the_one_that_was_found() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("pool");
    drop(Pool::create(&path, "store").unwrap());
    let names = Names { pools: Some(dir.path().join("names")) };
    let mut found = names.find(path.to_str().unwrap()).unwrap();
    for access in [Access::Shared, Access::Exclusive] {
        drop(found.open_soon(access).unwrap());
    }
    Pool::destroy(&path).unwrap();
    drop(Pool::create(&path, "store").unwrap());
    let said = found.open_soon(Access::Exclusive).map(drop).unwrap_err().to_string();
    assert!(said.contains("is another pool now"), "{said}");
}

#[test]
fn who_stores_or_takes_turns_is_waited_for_as_long_as_it_does() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("pool");
    drop(Pool::create(&path, "store").unwrap());
    let names = Names { pools: Some(dir.path().join("names")) };
    let find = || names.find(path.to_str().unwrap()).unwrap();
    let (turns, pool) = Turns::begin(find()).unwrap();
    assert!(works(&path));
    std::thread::scope(|scope| {
        let soon = scope.spawn(|| find().open_soon(Access::Exclusive).map(drop));
        let listed = scope.spawn(|| names.read(path.to_str().unwrap(), |_| Ok(()), |_| Ok(None)));
        // Longer than each has patience with others.
        std::thread::sleep(MOMENT * 2);
        drop(pool);
        soon.join().unwrap().unwrap();
        listed.join().unwrap().unwrap();
    });
    drop(turns);
    let _pool = find().open_soon(Access::Exclusive).unwrap();
    assert!(!works(&path));
    let said = find().open_soon(Access::Exclusive).map(drop).unwrap_err().to_string();
    assert!(said.contains(&format!("is used by process {} (", std::process::id())), "{said}");
}

#[test]
fn a_stopped_process_is_named_with_what_lets_it_go_on() {
    let mut child = std::process::Command::new("sleep").arg("1000").spawn().unwrap();
    let pid = child.id() as i32;
    let stop = |signal| rustix::process::kill_process(rustix::process::Pid::from_child(&child), signal).unwrap();
    while !named(pid).contains("(sleep 1000)") {
        std::thread::yield_now();
    }
    assert!(!named(pid).contains("stopped"));
    stop(rustix::process::Signal::STOP);
    while !is_stopped(pid) {
        std::thread::yield_now();
    }
    let said = named(pid);
    child.kill().unwrap();
    child.wait().unwrap();
    assert!(said.ends_with(&format!("(sleep 1000), which is stopped: `kill -CONT {pid}` lets it go on")), "{said}");
}
