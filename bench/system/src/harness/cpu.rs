//! CPU time of threads in nanoseconds, from `/proc/PID/task/TID/schedstat`
//! (Documentation/scheduler/sched-stats.rst).
//!
//! `/proc/PID/stat` counts in steps of 10 ms, which is longer than everything that an idle daemon
//! does in a minute.

use std::collections::BTreeMap;
use std::fs;
use std::io;

/// Threads and the time that each has run.
pub(crate) type Times = BTreeMap<i32, u64>;

/// The threads of a process whose name is `wanted`.
///
/// # Errors
///
/// `NotFound` when the process is gone, or the kernel keeps no such times (`CONFIG_SCHED_INFO`).
pub(crate) fn thread_times(pid: i32, wanted: impl Fn(&str) -> bool) -> io::Result<Times> {
    let mut times = Times::new();
    for task in fs::read_dir(format!("/proc/{pid}/task"))? {
        let path = task?.path();
        let Some(tid) = path.file_name().and_then(|name| name.to_str()?.parse().ok()) else { continue };
        let read = || -> io::Result<Option<u64>> {
            if !wanted(fs::read_to_string(path.join("comm"))?.trim_end()) {
                return Ok(None);
            }
            parse(&fs::read_to_string(path.join("schedstat"))?).map(Some)
        };
        match read() {
            Ok(Some(time)) => drop(times.insert(tid, time)),
            Ok(None) => {}
            // A thread that ended meanwhile; the process as a whole is still there.
            Err(error) if ended(&error) && path.parent().is_some_and(|p| p.exists()) && !path.exists() => {}
            Err(error) => return Err(error),
        }
    }
    Ok(times)
}

fn ended(error: &io::Error) -> bool {
    error.kind() == io::ErrorKind::NotFound || error.raw_os_error() == Some(libc::ESRCH)
}

/// The first number is the time on a CPU.
fn parse(schedstat: &str) -> io::Result<u64> {
    let first = schedstat.split_whitespace().next().and_then(|word| word.parse().ok());
    first.ok_or_else(|| io::Error::new(io::ErrorKind::InvalidData, format!("schedstat: {schedstat:?}")))
}

/// What the threads that are there now have run since, in nanoseconds.
pub(crate) fn spent(before: &Times, now: &Times) -> u64 {
    now.iter().map(|(tid, time)| time.saturating_sub(before.get(tid).copied().unwrap_or(0))).sum()
}

#[cfg(test)]
mod tests {
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
}
