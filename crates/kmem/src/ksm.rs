//! KSM, the kernel's own samepage merging: statistics and settings under `/sys/kernel/mm/ksm`, and
//! per process.
//!
//! Source: Documentation/admin-guide/mm/ksm.rst. Values that the running kernel does not have are
//! `None`; what is there may fail to be read as any file.

use std::fmt::Display;
use std::fs;
use std::io;
use std::path::{Path, PathBuf};

mod process;
mod snapshot;

pub use process::{Ksmd, ProcessStat, merge_all_memory, process_stat};
pub use snapshot::Snapshot;

const SYSFS: &str = "/sys/kernel/mm/ksm";

/// Defines [`Stats`] and how it is read: a field has the name of its file.
macro_rules! stats {
    ($($(#[$doc:meta])* $name:ident: $type:ty,)*) => {
        /// KSM's statistics. The files are read one after the other, not at one moment.
        #[derive(Copy, Clone, PartialEq, Eq, Debug, Default)]
        pub struct Stats {
            $($(#[$doc])* pub $name: Option<$type>,)*
        }

        impl Ksm {
            /// Reads all statistics.
            pub fn stats(&self) -> io::Result<Stats> {
                Ok(Stats { $($name: self.read_if_there(stringify!($name))?,)* })
            }
        }

        impl Stats {
            /// The statistics that this kernel has, by the names of their files.
            pub fn values(&self) -> impl Iterator<Item = (&'static str, i64)> {
                let all = [$((stringify!($name), self.$name.map(|value| value as i64)),)*];
                all.into_iter().filter_map(|(name, value)| value.map(|value| (name, value)))
            }
        }
    };
}

stats! {
    /// Merged pages: frames that several pages share.
    pages_shared: u64,
    /// Further pages that map these frames: the saving.
    pages_sharing: u64,
    /// Scanned pages that were unique so far.
    pages_unshared: u64,
    /// Pages that changed between two scans.
    pages_volatile: u64,
    /// Pages that smart scan skipped (Linux 6.7).
    pages_skipped: u64,
    /// Pages scanned since the start (Linux 6.6).
    pages_scanned: u64,
    /// Zero pages merged with the kernel's zero page (Linux 6.6).
    ksm_zero_pages: u64,
    /// How often all mergeable memory was scanned.
    full_scans: u64,
    /// Bytes saved less bytes of metadata (Linux 6.4).
    general_profit: i64,
    /// Contents whose frame has reached `max_page_sharing`, and that have several frames now.
    stable_node_chains: u64,
    /// The frames of these contents.
    stable_node_dups: u64,
}

/// Defines a getter and a setter for a settings file.
macro_rules! setting {
    ($($(#[$doc:meta])* $name:ident, $set:ident: $type:ty;)*) => {
        impl Ksm {
            $(
                $(#[$doc])*
                pub fn $name(&self) -> io::Result<$type> {
                    self.read(stringify!($name))
                }

                /// Sets the value of the getter of this name.
                ///
                /// # Errors
                ///
                /// Those of writing the file: `PermissionDenied`; `EINVAL`: the value is out of
                /// range, or an advisor sets `pages_to_scan`; `EBUSY`: this cannot change while
                /// pages are merged.
                pub fn $set(&self, value: $type) -> io::Result<()> {
                    self.write(stringify!($name), &value)
                }
            )*
        }
    };
}

setting! {
    /// 0: stopped; 1: running; 2: stopped, and all pages unmerged.
    run, set_run: u32;
    /// Pages that ksmd scans before it sleeps.
    pages_to_scan, set_pages_to_scan: u64;
    /// How long ksmd sleeps then, in milliseconds.
    sleep_millisecs, set_sleep_millisecs: u64;
    /// 1: pages of different NUMA nodes are merged too.
    merge_across_nodes, set_merge_across_nodes: u32;
    /// How many pages may share one frame before KSM makes another.
    max_page_sharing, set_max_page_sharing: u64;
    /// 1: zero pages become the kernel's zero page.
    use_zero_pages, set_use_zero_pages: u32;
    /// 1: pages that were unique in several scans are skipped for some scans (Linux 6.7).
    smart_scan, set_smart_scan: u32;
}

/// The directory of KSM's files.
#[derive(Clone, Debug)]
pub struct Ksm {
    root: PathBuf,
}

impl Ksm {
    /// The running kernel's KSM.
    ///
    /// # Errors
    ///
    /// `NotFound`: the kernel was built without `CONFIG_KSM`, or `/sys` is not mounted.
    pub fn open() -> io::Result<Self> {
        Self::at(Path::new(SYSFS))
    }

    /// The same interface under another directory.
    ///
    /// # Errors
    ///
    /// `NotFound`: there are no such files.
    pub fn at(root: &Path) -> io::Result<Self> {
        fs::metadata(root.join("run"))?;
        Ok(Self { root: root.to_owned() })
    }

    /// Only the statistics about the scan's progress, which are in few files: `pages_scanned`,
    /// `pages_skipped` and, read last, `full_scans`.
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
    pub fn advisor_mode(&self) -> io::Result<String> {
        let text = fs::read_to_string(self.root.join("advisor_mode"))?;
        Ok(selected(&text).to_owned())
    }

    /// Chooses the advisor.
    ///
    /// # Errors
    ///
    /// Those of writing the file; `EINVAL`: there is no such advisor.
    pub fn set_advisor_mode(&self, mode: &str) -> io::Result<()> {
        self.write("advisor_mode", &mode)
    }
}

/// The word in brackets: `[none] scan-time`.
fn selected(text: &str) -> &str {
    text.split_whitespace().find_map(|word| word.strip_prefix('[')?.strip_suffix(']')).unwrap_or(text.trim())
}

impl Stats {
    /// Pages that KSM tracks: merged, unique and changing ones.
    pub fn candidates(&self) -> u64 {
        [self.pages_shared, self.pages_sharing, self.pages_unshared, self.pages_volatile].into_iter().flatten().sum()
    }

    /// Bytes saved less bytes of metadata. Before Linux 6.4, which has no such figure, it is
    /// computed as the kernel does: with 64 bytes of metadata for each page that KSM tracks.
    pub fn profit(&self) -> i64 {
        self.general_profit.unwrap_or_else(|| {
            let saved = self.pages_sharing.unwrap_or(0) + self.ksm_zero_pages.unwrap_or(0);
            (saved * crate::PAGE_SIZE as u64) as i64 - (self.candidates() * 64) as i64
        })
    }
}

#[cfg(test)]
mod tests;
