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
mod tests;
