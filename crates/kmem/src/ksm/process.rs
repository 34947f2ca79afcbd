//! KSM and processes: ksmd itself, what KSM did for a process, and whether it may.

#![allow(unsafe_code)] // prctl.

use std::fs;
use std::io;
use std::time::Duration;

use crate::raw::syscall;

/// The kernel's thread that scans and merges.
#[derive(Copy, Clone, PartialEq, Eq, Debug)]
pub struct Ksmd {
    /// Its process number.
    pub pid: i32,
}

impl Ksmd {
    /// Finds the thread. `None`: the kernel has no KSM, or a container's `/proc` hides the thread.
    pub fn find() -> io::Result<Option<Self>> {
        for entry in fs::read_dir("/proc")? {
            let Some(pid) = entry?.file_name().to_str().and_then(|name| name.parse().ok()) else { continue };
            let read = |file: &str| fs::read_to_string(format!("/proc/{pid}/{file}")).ok();
            // Any program may have this name, but only a kernel thread has no command line.
            if read("comm").is_some_and(|name| name == "ksmd\n") && read("cmdline").is_some_and(|line| line.is_empty())
            {
                return Ok(Some(Self { pid }));
            }
        }
        Ok(None)
    }

    /// CPU time that the thread has used: in nanoseconds where the kernel keeps them (`schedstat`),
    /// otherwise in steps of 10 ms.
    pub fn cpu_time(&self) -> io::Result<Duration> {
        let fine = fs::read_to_string(format!("/proc/{}/schedstat", self.pid)).ok();
        let fine = fine.and_then(|text| text.split_whitespace().next()?.parse().ok());
        fine.map_or_else(|| crate::procfs::cpu_time(self.pid), |ns| Ok(Duration::from_nanos(ns)))
    }
}

/// `/proc/PID/ksm_stat`.
#[derive(Copy, Clone, PartialEq, Eq, Debug, Default)]
pub struct ProcessStat {
    /// Pages that KSM tracks.
    pub rmap_items: Option<u64>,
    /// Zero pages merged.
    pub zero_pages: Option<u64>,
    /// Pages merged.
    pub merging_pages: Option<u64>,
    /// Bytes saved less bytes of metadata.
    pub process_profit: Option<i64>,
    /// Whether all of its memory is mergeable: see [`merge_all_memory`] (Linux 6.16).
    pub merge_any: Option<bool>,
    /// Whether some of its memory is mergeable (Linux 6.16).
    pub mergeable: Option<bool>,
}

/// What KSM has done for a process.
///
/// # Errors
///
/// `NotFound`: the process is gone, or the kernel is older than 6.1; `PermissionDenied`.
pub fn process_stat(pid: i32) -> io::Result<ProcessStat> {
    Ok(parse_process_stat(&fs::read_to_string(format!("/proc/{pid}/ksm_stat"))?))
}

pub(super) fn parse_process_stat(text: &str) -> ProcessStat {
    let mut stat = ProcessStat::default();
    for line in text.lines() {
        let mut words = line.split_whitespace();
        let (Some(name), Some(value)) = (words.next(), words.next()) else {
            continue;
        };
        match name.trim_end_matches(':') {
            "ksm_rmap_items" => stat.rmap_items = value.parse().ok(),
            "ksm_zero_pages" => stat.zero_pages = value.parse().ok(),
            "ksm_merging_pages" => stat.merging_pages = value.parse().ok(),
            "ksm_process_profit" => stat.process_profit = value.parse().ok(),
            "ksm_merge_any" => stat.merge_any = Some(value == "yes"),
            "ksm_mergeable" => stat.mergeable = Some(value == "yes"),
            _ => {}
        }
    }
    stat
}

/// Makes all memory of this process mergeable by KSM (`PR_SET_MEMORY_MERGE`, Linux 6.4). Children
/// inherit this; from Linux 6.10 on it also survives execve(2).
///
/// # Errors
///
/// `EINVAL`: the kernel is older, or has no KSM; `ENOMEM`; `EPERM`: a security module forbids it.
pub fn merge_all_memory() -> io::Result<()> {
    // SAFETY: the argument of PR_SET_MEMORY_MERGE is a number; merging changes no byte of memory.
    unsafe { prctl(libc::PR_SET_MEMORY_MERGE, 1) }.map(drop)
}

/// Whether all memory of this process is mergeable by KSM.
#[cfg(test)]
pub(super) fn merges_all_memory() -> io::Result<bool> {
    // SAFETY: PR_GET_MEMORY_MERGE has no argument, and changes nothing.
    Ok(unsafe { prctl(libc::PR_GET_MEMORY_MERGE, 0) }? != 0)
}

/// # Safety
///
/// `argument` is what prctl(2) demands for the option: if it is a pointer, the memory behind it
/// stays valid during the call.
unsafe fn prctl(option: libc::c_int, argument: usize) -> io::Result<usize> {
    // SAFETY: the contract covers the argument. The others are 0, which the kernel demands where an
    // option does not use them.
    Ok(unsafe { syscall(libc::SYS_prctl, [option as usize, argument, 0, 0, 0]) }?)
}
