//! The kernel's own samepage merging: statistics and settings under `/sys/kernel/mm/ksm`, and per
//! process.
//!
//! Source: Documentation/admin-guide/mm/ksm.rst. Values that the running kernel does not have are
//! `None`.

#![allow(unsafe_code)] // prctl.

use std::fmt::Display;
use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use crate::raw::syscall;

const SYSFS: &str = "/sys/kernel/mm/ksm";

/// Defines [`Stats`] and how it is read: a field has the name of its file.
macro_rules! stats {
    ($($(#[$doc:meta])* $name:ident: $type:ty,)*) => {
        /// The statistics at one moment (read one file after the other).
        #[derive(Copy, Clone, PartialEq, Eq, Debug, Default)]
        pub struct Stats {
            $($(#[$doc])* pub $name: Option<$type>,)*
        }

        impl Ksm {
            /// Reads all statistics.
            ///
            /// # Errors
            ///
            /// Those of reading a file that is there.
            pub fn stats(&self) -> io::Result<Stats> {
                Ok(Stats { $($name: self.read_if_there(stringify!($name))?,)* })
            }
        }

        impl Stats {
            /// All statistics by the names of their files, those that this kernel has.
            pub fn values(&self) -> impl Iterator<Item = (&'static str, i64)> {
                let all = [$((stringify!($name), self.$name.map(|value| value as i64)),)*];
                all.into_iter().filter_map(|(name, value)| value.map(|value| (name, value)))
            }
        }
    };
}

stats! {
    /// Frames kept once.
    pages_shared: u64,
    /// Further pages that use them: the saving.
    pages_sharing: u64,
    /// Pages looked at, unique so far.
    pages_unshared: u64,
    /// Pages changing too fast.
    pages_volatile: u64,
    /// Pages passed over by smart scan (Linux 6.7).
    pages_skipped: u64,
    /// Pages scanned in all (Linux 6.6).
    pages_scanned: u64,
    /// Zero pages merged with the kernel's (Linux 6.6).
    ksm_zero_pages: u64,
    /// How often all mergeable memory was scanned.
    full_scans: u64,
    /// Bytes saved less bytes of metadata (Linux 6.4).
    general_profit: i64,
    /// Frames that have reached `max_page_sharing`.
    stable_node_chains: u64,
    /// Their duplicates.
    stable_node_dups: u64,
}

/// Defines a getter and a setter for a settings file.
macro_rules! setting {
    ($($(#[$doc:meta])* $name:ident, $set:ident: $type:ty;)*) => {
        impl Ksm {
            $(
                $(#[$doc])*
                ///
                /// # Errors
                ///
                /// Those of reading the file.
                pub fn $name(&self) -> io::Result<$type> {
                    self.read(stringify!($name))
                }

                /// Sets what the getter of this name tells.
                ///
                /// # Errors
                ///
                /// Those of writing the file: `PermissionDenied`; `EINVAL` for a value out of range, and for
                /// `pages_to_scan` while an advisor sets it; `EBUSY` for what cannot change while pages are merged.
                pub fn $set(&self, value: $type) -> io::Result<()> {
                    self.write(stringify!($name), &value)
                }
            )*
        }
    };
}

setting! {
    /// 0 stopped, 1 running, 2 stopped and everything unmerged.
    run, set_run: u32;
    /// Pages to scan before sleeping.
    pages_to_scan, set_pages_to_scan: u64;
    /// How long to sleep then, in milliseconds.
    sleep_millisecs, set_sleep_millisecs: u64;
    /// 1: pages of different NUMA nodes are merged too.
    merge_across_nodes, set_merge_across_nodes: u32;
    /// How many pages may share one frame before another is made.
    max_page_sharing, set_max_page_sharing: u64;
    /// 1: zero pages become the kernel's zero page.
    use_zero_pages, set_use_zero_pages: u32;
    /// 1: pages that were unique several times are passed over (Linux 6.7).
    smart_scan, set_smart_scan: u32;
}

/// The kernel's KSM.
#[derive(Clone, Debug)]
pub struct Ksm {
    root: PathBuf,
}

impl Ksm {
    /// The running kernel's.
    ///
    /// # Errors
    ///
    /// `NotFound` when it was built without (`CONFIG_KSM`), or `/sys` is not mounted.
    pub fn open() -> io::Result<Ksm> {
        Ksm::at(Path::new(SYSFS))
    }

    /// The same interface under another directory.
    ///
    /// # Errors
    ///
    /// `NotFound` when there is none.
    pub fn at(root: &Path) -> io::Result<Ksm> {
        fs::metadata(root.join("run"))?;
        Ok(Ksm { root: root.to_owned() })
    }

    /// Only the statistics that tell how far the scan is, which takes few files: `pages_scanned`,
    /// `pages_skipped` and, read last, `full_scans`.
    ///
    /// # Errors
    ///
    /// Those of reading a file that is there.
    pub fn progress(&self) -> io::Result<Stats> {
        Ok(Stats {
            pages_scanned: self.read_if_there("pages_scanned")?,
            pages_skipped: self.read_if_there("pages_skipped")?,
            full_scans: self.read_if_there("full_scans")?,
            ..Stats::default()
        })
    }

    fn read<T: std::str::FromStr>(&self, name: &str) -> io::Result<T> {
        let text = fs::read_to_string(self.root.join(name))?;
        text.trim().parse().map_err(|_| {
            io::Error::new(io::ErrorKind::InvalidData, format!("{name}: {:?} is not understood", text.trim()))
        })
    }

    fn read_if_there<T: std::str::FromStr>(&self, name: &str) -> io::Result<Option<T>> {
        match self.read(name) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
            result => result.map(Some),
        }
    }

    fn write(&self, name: &str, value: &dyn Display) -> io::Result<()> {
        fs::write(self.root.join(name), value.to_string())
    }

    /// The advisor that sets `pages_to_scan`: `none` or `scan-time` (Linux 6.8).
    ///
    /// # Errors
    ///
    /// Those of reading the file.
    pub fn advisor_mode(&self) -> io::Result<String> {
        let text = fs::read_to_string(self.root.join("advisor_mode"))?;
        Ok(selected(&text).to_owned())
    }

    /// Chooses the advisor.
    ///
    /// # Errors
    ///
    /// Those of writing the file; `EINVAL` for a name that is none.
    pub fn set_advisor_mode(&self, mode: &str) -> io::Result<()> {
        self.write("advisor_mode", &mode)
    }
}

/// The word in brackets: `[none] scan-time`.
fn selected(text: &str) -> &str {
    text.split_whitespace().find_map(|word| word.strip_prefix('[')?.strip_suffix(']')).unwrap_or(text.trim())
}

/// Every setting but the advisor, in the order in which they are put back; `run` starts ksmd, so it
/// is last.
const SETTINGS: [&str; 13] = [
    "merge_across_nodes",
    "max_page_sharing",
    "use_zero_pages",
    "smart_scan",
    "stable_node_chains_prune_millisecs",
    "sleep_millisecs",
    "pages_to_scan",
    "advisor_max_cpu",
    "advisor_max_pages_to_scan",
    "advisor_min_pages_to_scan",
    "advisor_target_scan_time",
    "advisor_mode",
    "run",
];

/// All settings at one moment, to be put back later.
#[derive(Clone, Debug)]
pub struct Snapshot {
    ksm: Ksm,
    /// Those of [`SETTINGS`] that this kernel has.
    values: Vec<(&'static str, String)>,
}

impl Snapshot {
    /// Takes the settings of the running kernel.
    ///
    /// # Errors
    ///
    /// `NotFound` without KSM; those of reading the files.
    pub fn take() -> io::Result<Snapshot> {
        Snapshot::of(&Ksm::open()?)
    }

    /// The settings by the names of their files, those that this kernel has.
    pub fn values(&self) -> impl Iterator<Item = (&'static str, &str)> {
        self.values.iter().map(|(name, value)| (*name, value.as_str()))
    }

    /// Takes the settings of `ksm`.
    ///
    /// # Errors
    ///
    /// Those of reading the files.
    pub fn of(ksm: &Ksm) -> io::Result<Snapshot> {
        let mut values = Vec::with_capacity(SETTINGS.len());
        for name in SETTINGS {
            if let Some(value) = ksm.value(name)? {
                values.push((name, value));
            }
        }
        Ok(Snapshot { ksm: ksm.clone(), values })
    }

    /// Puts back what is different now. All of it is tried, also when something fails.
    ///
    /// # Errors
    ///
    /// The first failure: `EBUSY` when `merge_across_nodes` or `max_page_sharing` changed and pages
    /// have been merged since (set `run` to 2 first); `PermissionDenied`.
    pub fn restore(&self) -> io::Result<()> {
        let mut outcome = Ok(());
        for (name, value) in &self.values {
            let result = self.ksm.put_back(name, value).map_err(|error| {
                io::Error::new(
                    error.kind(),
                    format!("putting {}/{name} back to {value}: {error}", self.ksm.root.display()),
                )
            });
            if outcome.is_ok() {
                outcome = result;
            }
        }
        outcome
    }
}

impl Ksm {
    fn value(&self, name: &str) -> io::Result<Option<String>> {
        Ok(self.read_if_there::<String>(name)?.map(|text| selected(&text).to_owned()))
    }

    fn put_back(&self, name: &str, value: &str) -> io::Result<()> {
        if self.value(name)?.as_deref() == Some(value) {
            return Ok(());
        }
        // While an advisor is on, pages_to_scan is its own; the advisor's turn to be put back comes later.
        if name == "pages_to_scan" && self.value("advisor_mode")?.is_some_and(|mode| mode != "none") {
            self.set_advisor_mode("none")?;
        }
        self.write(name, &value)
    }
}

impl Stats {
    /// Pages that KSM keeps track of: merged, unique and changing ones.
    pub fn candidates(&self) -> u64 {
        [self.pages_shared, self.pages_sharing, self.pages_unshared, self.pages_volatile].into_iter().flatten().sum()
    }

    /// Bytes saved less bytes of metadata: the kernel's figure, or the same sum where it gives none
    /// (before 6.4), where the kernel keeps 64 bytes for each page that it keeps track of.
    pub fn profit(&self) -> i64 {
        self.general_profit.unwrap_or_else(|| {
            let saved = self.pages_sharing.unwrap_or(0) + self.ksm_zero_pages.unwrap_or(0);
            (saved * crate::PAGE_SIZE as u64) as i64 - (self.candidates() * 64) as i64
        })
    }
}

/// The kernel's thread that scans and merges.
#[derive(Copy, Clone, PartialEq, Eq, Debug)]
pub struct Ksmd {
    /// Its process.
    pub pid: i32,
}

impl Ksmd {
    /// Finds it; `None` when there is none (no KSM) or it is hidden (a container's `/proc`).
    ///
    /// # Errors
    ///
    /// Those of reading `/proc`.
    pub fn find() -> io::Result<Option<Ksmd>> {
        for entry in fs::read_dir("/proc")? {
            let Some(pid) = entry?.file_name().to_str().and_then(|name| name.parse().ok()) else { continue };
            let read = |file: &str| fs::read_to_string(format!("/proc/{pid}/{file}")).ok();
            // A program may have any name; only a kernel thread has no command line.
            if read("comm").is_some_and(|name| name == "ksmd\n") && read("cmdline").is_some_and(|line| line.is_empty())
            {
                return Ok(Some(Ksmd { pid }));
            }
        }
        Ok(None)
    }

    /// CPU time that it has used: in nanoseconds where the kernel keeps them (`schedstat`), else in
    /// steps of 10 ms.
    ///
    /// # Errors
    ///
    /// Those of reading its files in `/proc`.
    pub fn cpu_time(&self) -> io::Result<std::time::Duration> {
        let fine = fs::read_to_string(format!("/proc/{}/schedstat", self.pid)).ok();
        let fine = fine.and_then(|text| text.split_whitespace().next()?.parse().ok());
        fine.map_or_else(|| crate::procfs::cpu_time(self.pid), |ns| Ok(std::time::Duration::from_nanos(ns)))
    }
}

/// `/proc/PID/ksm_stat`.
#[derive(Copy, Clone, PartialEq, Eq, Debug, Default)]
pub struct ProcessStat {
    /// Pages that KSM keeps track of.
    pub rmap_items: Option<u64>,
    /// Zero pages merged.
    pub zero_pages: Option<u64>,
    /// Pages merged.
    pub merging_pages: Option<u64>,
    /// Bytes saved less bytes of metadata.
    pub process_profit: Option<i64>,
    /// All of its memory is mergeable: see [`set_memory_merge`] (Linux 6.16).
    pub merge_any: Option<bool>,
    /// Some of its memory is mergeable (Linux 6.16).
    pub mergeable: Option<bool>,
}

/// What KSM has done for a process.
///
/// # Errors
///
/// `NotFound` when the process is gone or the kernel is older than 6.1; `PermissionDenied`.
pub fn process_stat(pid: i32) -> io::Result<ProcessStat> {
    Ok(parse_process_stat(&fs::read_to_string(format!("/proc/{pid}/ksm_stat"))?))
}

fn parse_process_stat(text: &str) -> ProcessStat {
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

/// Makes all memory of this process mergeable by KSM, or none (`PR_SET_MEMORY_MERGE`, Linux 6.4);
/// children inherit it, and from Linux 6.10 on a program that it executes has it too. Switching it
/// off unmerges.
///
/// # Errors
///
/// `EINVAL` on older kernels and without KSM; `ENOMEM`; `EPERM` where a security module forbids it.
pub fn set_memory_merge(on: bool) -> io::Result<()> {
    // SAFETY: this prctl takes integers.
    unsafe { prctl(libc::PR_SET_MEMORY_MERGE, usize::from(on)) }.map(drop)
}

/// Whether all memory of this process is mergeable by KSM.
///
/// # Errors
///
/// `EINVAL` on kernels older than 6.4.
pub fn memory_merge() -> io::Result<bool> {
    // SAFETY: this prctl takes integers.
    Ok(unsafe { prctl(libc::PR_GET_MEMORY_MERGE, 0) }? != 0)
}

/// # Safety
///
/// As this option's argument asks for.
unsafe fn prctl(option: libc::c_int, argument: usize) -> io::Result<usize> {
    // SAFETY: as promised by the caller; the kernel wants the arguments that the option does not use to
    // be 0.
    Ok(unsafe { syscall(libc::SYS_prctl, [option as usize, argument, 0, 0, 0]) }?)
}

#[cfg(test)]
mod tests;
