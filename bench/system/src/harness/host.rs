//! The host: its memory in use, its limit of mappings, and whether anything else runs on it.

use std::fs;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use kmem::procfs;

/// Memory that is in use and can't be had without swapping, in bytes: programs' pages, a page of
/// KSM once; shared memory, among it PageONE's store; the kernel's objects, among them mappings and
/// KSM's items; page tables; stacks. The page cache of files is not in it, and neither is what the
/// kernel keeps free on lists of its CPUs, which makes `MemFree` jump.
///
/// # Errors
///
/// Those of reading `/proc/meminfo`.
pub(crate) fn used() -> Result<u64> {
    // Threshold of the counters: the kernel adds up what its CPUs have counted when this is read
    // (Linux 4.7); root only.
    let _ = fs::read("/proc/sys/vm/stat_refresh");
    Ok(sum(&fs::read_to_string("/proc/meminfo").context("cannot read /proc/meminfo")?))
}

fn sum(meminfo: &str) -> u64 {
    let parts = ["AnonPages", "Shmem", "SUnreclaim", "PageTables", "KernelStack"];
    let value = |line: &str| {
        let (name, value) = line.split_once(':')?;
        let kib: u64 = value.split_whitespace().next()?.parse().ok()?;
        parts.contains(&name).then_some(kib << 10)
    };
    meminfo.lines().filter_map(value).sum()
}

/// Watches whether programs that are no part of a measurement use the CPUs: then its figures are
/// rough.
pub(crate) struct Others {
    parts: Vec<i32>,
    start: Instant,
    busy: Duration,
    own: Duration,
}

/// What others may take of one CPU, as a share, before it is said.
const OTHERS: f64 = 0.15;

impl Others {
    /// Begins; `parts`: the processes that are measured. This one is a part too.
    pub(crate) fn watch(mut parts: Vec<i32>) -> Result<Self> {
        parts.push(std::process::id() as i32);
        Ok(Self { start: Instant::now(), busy: busy()?, own: own(&parts), parts })
    }

    /// Ends; says so on standard error where others had more than a small share of a CPU, or the
    /// host of this virtual machine did.
    pub(crate) fn report(self) -> Result<()> {
        let others = (busy()? - self.busy).saturating_sub(own(&self.parts).saturating_sub(self.own));
        let time = self.start.elapsed().as_secs_f64();
        // The counters go in steps of 10 ms for each CPU.
        if others.as_secs_f64() > time * OTHERS + 0.1 {
            eprintln!("pageone-bench: others took {others:.1?} of CPU time within {time:.1} s: the figures are rough");
        }
        Ok(())
    }
}

fn own(parts: &[i32]) -> Duration {
    parts.iter().filter_map(|&pid| procfs::cpu_time(pid).ok()).sum()
}

/// Time that all CPUs were busy, or withheld by a hypervisor.
fn busy() -> Result<Duration> {
    parse_busy(&fs::read_to_string("/proc/stat").context("cannot read /proc/stat")?)
        .context("/proc/stat is not understood")
}

fn parse_busy(stat: &str) -> Option<Duration> {
    let times: Vec<u64> = stat.strip_prefix("cpu ")?.lines().next()?.split_whitespace().flat_map(str::parse).collect();
    // user, nice, system, (idle, iowait,) irq, softirq, steal: proc_stat(5).
    let busy: u64 = times.get(..3)?.iter().chain(times.get(5..8)?).sum();
    Some(Duration::from_secs_f64(busy as f64 / rustix::param::clock_ticks_per_second() as f64))
}

const MAX_MAP_COUNT: &str = "/proc/sys/vm/max_map_count";

/// `vm.max_map_count`, raised; put back with this value.
pub(crate) struct MapLimit {
    before: Option<usize>,
}

impl MapLimit {
    /// Raises it to `wanted`, where it is lower and may be set.
    pub(crate) fn raise(wanted: usize) -> Result<Self> {
        let before = procfs::max_map_count().context("cannot read vm.max_map_count")?;
        if before >= wanted {
            return Ok(Self { before: None });
        }
        match fs::write(MAX_MAP_COUNT, wanted.to_string()) {
            Ok(()) => Ok(Self { before: Some(before) }),
            Err(error) => {
                eprintln!("pageone-bench: vm.max_map_count stays at {before}, which may bind: {error}");
                Ok(Self { before: None })
            }
        }
    }
}

impl Drop for MapLimit {
    fn drop(&mut self) {
        let Some(before) = self.before else { return };
        if let Err(error) = fs::write(MAX_MAP_COUNT, before.to_string()) {
            eprintln!("pageone-bench: set vm.max_map_count back to {before}: {error}");
        }
    }
}

/// A memory control group with a limit, of version 1 or 2; it ends with this value.
pub(crate) struct MemoryGroup {
    path: PathBuf,
}

impl MemoryGroup {
    /// `None`: none can be made here.
    pub(crate) fn new(bytes: u64) -> Option<Self> {
        for (root, limit) in [("/sys/fs/cgroup/memory", "memory.limit_in_bytes"), ("/sys/fs/cgroup", "memory.max")] {
            let path = Path::new(root).join(format!("pageone-bench-{}", std::process::id()));
            if fs::create_dir(&path).is_ok() {
                let group = Self { path };
                if fs::write(group.path.join(limit), bytes.to_string()).is_ok() {
                    return Some(group);
                }
            }
        }
        None
    }

    /// Puts a process in.
    pub(crate) fn add(&self, pid: i32) -> Result<()> {
        fs::write(self.path.join("cgroup.procs"), pid.to_string()).context("a process joins no control group")
    }
}

impl Drop for MemoryGroup {
    fn drop(&mut self) {
        let _ = fs::remove_dir(&self.path);
    }
}

#[cfg(test)]
mod tests;
