use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc;
use std::thread::Scope;
use std::time::Instant;

use super::*;

#[test]
fn the_kernels_words_are_understood() {
    assert_eq!(what("232 0x5 0x7ffd 0x1 0x0 0x0 0x0 0x7ffd 0x7f3a\n"), Now::InCall);
    assert_eq!(what("running\n"), Now::InProgram);
    assert_eq!(what("-1 0x7ffd 0x7f3a\n"), Now::InProgram);
    assert_eq!(what(""), Now::InProgram);
}

/// A thread that works until this is dropped, and its id.
struct Worker<'a>(&'a AtomicBool, String);

impl<'a> Worker<'a> {
    fn start<'scope>(scope: &'scope Scope<'scope, '_>, end: &'a AtomicBool) -> Self
    where
        'a: 'scope,
    {
        let (tell, told) = mpsc::channel();
        let works = Arc::new(AtomicBool::new(false));
        let begun = works.clone();
        scope.spawn(move || {
            tell.send(rustix::thread::gettid().as_raw_nonzero().to_string()).unwrap();
            // From here on it calls nothing.
            while !end.load(Ordering::Relaxed) {
                begun.store(true, Ordering::Relaxed);
            }
        });
        let id = told.recv().unwrap();
        while !works.load(Ordering::Relaxed) {
            std::thread::yield_now();
        }
        Self(end, id)
    }
}

impl Drop for Worker<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}

#[test]
fn threads_that_work_sleep_or_end_are_soon_behind_their_calls() {
    let end = AtomicBool::new(false);
    let (tell, told) = mpsc::channel::<()>();
    std::thread::scope(|scope| {
        let _worker = Worker::start(scope, &end);
        scope.spawn(move || {
            let _ = told.recv();
        });
        assert!(wait());
        drop(tell);
    });
}

/// A time that has grown once may be the kernel's late counting of what was before.
#[test]
fn a_thread_that_gets_no_cpu_is_waited_for() {
    let end = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let worker = Worker::start(scope, &end);
        // A time that it comes to only in an hour of work.
        let far = time(&worker.1).unwrap().unwrap() + 3_600_000_000_000;
        let mut thread = Thread { id: worker.1.clone(), before: far, grown: None };
        assert!(thread.is_between().unwrap());
        thread.grown = Some(far);
        assert!(thread.is_between().unwrap());
        // The worker may have had less than `ENOUGH` yet, and the kernel counts at its tick.
        thread.grown = Some(0);
        let limit = Instant::now() + Duration::from_secs(30);
        while thread.is_between().unwrap() {
            assert!(Instant::now() < limit, "it has worked for long");
            std::thread::yield_now();
        }
    });
    let mut thread = Thread { id: "0".into(), before: 0, grown: None };
    assert!(!thread.is_between().unwrap(), "one that has ended");
}
