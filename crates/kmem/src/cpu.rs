//! CPU time used so far: `clock_gettime(2)`.
//!
//! Nothing here allocates or changes `errno`.

use std::time::Duration;

use rustix::time::{ClockId, clock_gettime};

/// CPU time that the calling thread has used (`CLOCK_THREAD_CPUTIME_ID`).
pub fn thread_time() -> Duration {
    read(ClockId::ThreadCPUTime)
}

/// CPU time that all threads of this process have used (`CLOCK_PROCESS_CPUTIME_ID`).
pub fn process_time() -> Duration {
    read(ClockId::ProcessCPUTime)
}

fn read(clock: ClockId) -> Duration {
    let time = clock_gettime(clock);
    Duration::new(time.tv_sec as u64, time.tv_nsec as u32)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_busy_thread_uses_cpu_time() {
        let (thread, process) = (thread_time(), process_time());
        let end = thread + Duration::from_millis(5);
        while thread_time() < end {
            std::hint::black_box(0);
        }
        assert!(process_time() - process >= Duration::from_millis(4));
    }
}
