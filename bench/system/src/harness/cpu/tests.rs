use super::*;
use std::time::{Duration, Instant};

#[test]
fn counts_what_a_thread_of_a_name_has_run() {
    let pid = std::process::id() as i32;
    let (work, done) = std::sync::mpsc::channel::<()>();
    let (said, hear) = std::sync::mpsc::channel();
    let body = move || {
        while done.recv().is_ok() {
            let start = Instant::now();
            while start.elapsed() < Duration::from_millis(50) {}
            said.send(()).unwrap();
        }
    };
    let thread = std::thread::Builder::new().name("bench-burner".into()).spawn(body).unwrap();
    let named = |name: &str| name == "bench-burner";
    work.send(()).unwrap();
    hear.recv().unwrap();
    let before = thread_times(pid, named).unwrap();
    assert_eq!(before.len(), 1);
    work.send(()).unwrap();
    hear.recv().unwrap();
    std::thread::sleep(Duration::from_millis(20));
    let now = thread_times(pid, named).unwrap();
    // On a busy machine it may have got less than it spun for, never more.
    let ran = spent(&before, &now);
    assert!(ran > 1_000_000 && ran < 500_000_000, "{ran} ns");
    assert!(thread_times(pid, |name| name == "nobody").unwrap().is_empty());
    drop(work);
    thread.join().unwrap();
    assert!(thread_times(i32::MAX, named).is_err());
}

#[test]
fn threads_that_came_and_went_are_told_apart() {
    let before = Times::from([(1, 10), (2, 20)]);
    assert_eq!(spent(&before, &Times::from([(2, 25), (3, 7)])), 12);
    assert_eq!(parse("123 456 7\n").unwrap(), 123);
    assert!(parse("").is_err());
}
