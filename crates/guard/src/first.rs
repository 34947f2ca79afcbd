//! Threads that run before all others for a moment, and get their policy back.

use kmem::{procfs, sched};

/// Threads that have real-time priority until this is dropped: thread and former policy.
pub struct First(Vec<(i32, i32)>);

impl First {
    /// Raises the threads of a process, or the calling thread. Without permission nothing changes.
    pub fn begin(pid: Option<i32>) -> Self {
        let all = pid.map_or_else(|| vec![(0, sched::policy(0).unwrap_or(-1))], usual_policies);
        let usual = |(thread, policy): &(i32, i32)| sched::is_usual(*policy) && sched::go_first(*thread).is_ok();
        Self(all.into_iter().filter(usual).collect())
    }
}

impl Drop for First {
    fn drop(&mut self) {
        for (thread, policy) in self.0.drain(..) {
            let _ = sched::go_back(thread, policy);
        }
    }
}

/// The threads of a process that have usual policies, each with its policy.
pub(crate) fn usual_policies(pid: i32) -> Vec<(i32, i32)> {
    let threads = procfs::threads(pid).unwrap_or_default().into_iter();
    threads
        .filter_map(|thread| Some((thread, sched::policy(thread).ok()?)))
        .filter(|(_, policy)| sched::is_usual(*policy))
        .collect()
}

/// Takes back the real-time priority of threads that had these policies.
pub(crate) fn take_back(pid: i32, before: &[(i32, i32)]) {
    let threads = procfs::threads(pid).unwrap_or_default();
    for (thread, policy) in before.iter().filter(|(thread, _)| threads.contains(thread)) {
        if sched::policy(*thread) == Ok(sched::FIRST) {
            let _ = sched::go_back(*thread, *policy);
        }
    }
}
