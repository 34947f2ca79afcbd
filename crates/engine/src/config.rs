//! What an operator can set.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::time::Duration;

use governor::Mode;
use serde::{Deserialize, Serialize};

/// The shortest period, in seconds.
pub(crate) const SHORTEST_PERIOD: f64 = 0.05;

/// Settings of the engine. Each has a default; the names are those of the configuration file.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Config {
    /// Merge period in seconds: how often memory is scanned. A page that did not change for two is
    /// merged.
    pub merge_period: f64,
    /// Reclaim period in seconds: a page that a guest frees is back within it, where the guest
    /// marks free pages (`run --ppr`).
    pub reclaim_period: f64,
    /// Target scan time in seconds: how long it may take to look at all pages that are due; the
    /// work is spread over it. At most the merge period; 0: as long.
    pub target_scan_time: f64,
    /// How the target is held: `target`; `scan-time`, with the arithmetic of the kernel's advisor;
    /// `none`, as fast as the CPU limit allows.
    #[serde(with = "mode_name")]
    pub mode: Mode,
    /// Worker threads; 0: one for each CPU.
    pub threads: usize,
    /// Most CPU time of daemon and agents, in percent of one CPU, over any 10 s; 0: no limit.
    pub max_cpu: f64,
    /// The same while memory is short (`pressure_percent`), since merging is what helps then; used
    /// if it is higher.
    pub max_cpu_under_pressure: f64,
    /// Memory is short when tasks lost more than so many percent of the last 10 s waiting for it
    /// (PSI, `some avg10`).
    pub pressure_percent: f64,
    /// Memory that must be left, on the host and under every memory cgroup limit of the daemon, for
    /// the store to grow, in MiB.
    pub reserve_mib: u64,
    /// Longest time, in seconds, that one direct I/O request into clients' memory may take. A page
    /// that was merged and copied since can't be checked for such requests, and rests for this
    /// long before it is merged again.
    pub direct_io_seconds: f64,
    /// Whether guests' huge pages are given up for merging (`split`) or left alone (`keep`).
    pub huge_pages: HugePages,
    /// With `split`: a huge page is split only when more than so many percent of its pages can be
    /// merged; 0: for any.
    pub huge_page_share: f64,
    /// Whether pages on different NUMA nodes share a frame, as KSM's setting of that name. If not,
    /// a page shares with pages of its own node, and their frame lies there.
    pub merge_across_nodes: bool,
    /// Domains that span several uids, by name. A domain that is not listed is its uid's own.
    pub domains: BTreeMap<String, DomainConfig>,
    /// Seconds without a client after which the daemon ends; 0: never.
    pub exit_when_idle: f64,
    /// Directory of the sockets and the state file.
    #[serde(skip)]
    pub directory: PathBuf,
}

/// A domain that spans several uids.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct DomainConfig {
    /// Who may join.
    pub uids: Vec<u32>,
}

/// What to do about huge pages.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum HugePages {
    /// Merge pages out of them: saves most.
    #[default]
    Split,
    /// Leave them alone: keeps the guest's speed.
    Keep,
}

impl Default for Config {
    fn default() -> Self {
        Self {
            merge_period: 20.0,
            reclaim_period: 2.0,
            target_scan_time: 0.0,
            mode: Mode::Target,
            threads: 0,
            max_cpu: 0.0,
            max_cpu_under_pressure: 0.0,
            pressure_percent: 10.0,
            reserve_mib: 64,
            direct_io_seconds: 30.0,
            huge_pages: HugePages::Split,
            huge_page_share: 0.0,
            merge_across_nodes: true,
            domains: BTreeMap::new(),
            exit_when_idle: 0.0,
            directory: PathBuf::new(),
        }
    }
}

/// A [`Mode`] by its name.
mod mode_name {
    use super::Mode;
    use serde::{Deserialize, Deserializer, Serializer, de::Error};

    pub(super) fn serialize<S: Serializer>(mode: &Mode, to: S) -> Result<S::Ok, S::Error> {
        to.collect_str(mode)
    }

    pub(super) fn deserialize<'de, D: Deserializer<'de>>(from: D) -> Result<Mode, D::Error> {
        String::deserialize(from)?.parse().map_err(D::Error::custom)
    }
}

/// A setting that makes no sense.
#[derive(Debug, thiserror::Error, PartialEq)]
#[error("{key}: {problem}")]
pub struct ConfigError {
    /// The setting.
    pub key: &'static str,
    /// What is wrong, and what would be right.
    pub problem: String,
}

impl Config {
    /// Checks the values that types alone don't.
    pub fn check(&self) -> Result<(), ConfigError> {
        let range = |key, value: f64, least: f64, most: f64| {
            if value.is_finite() && (least..=most).contains(&value) {
                return Ok(());
            }
            Err(ConfigError { key, problem: format!("{value} is not between {least} and {most} seconds") })
        };
        let percent = |key, value: f64, most: f64| {
            if value == 0.0 || (0.1..=most).contains(&value) {
                return Ok(());
            }
            Err(ConfigError { key, problem: format!("{value} is not 0, for none, or between 0.1 and {most} percent") })
        };
        percent("max_cpu", self.max_cpu, 102_400.0)?;
        percent("max_cpu_under_pressure", self.max_cpu_under_pressure, 102_400.0)?;
        percent("pressure_percent", self.pressure_percent, 100.0)?;
        range("merge_period", self.merge_period, SHORTEST_PERIOD, 86_400.0)?;
        range("reclaim_period", self.reclaim_period, SHORTEST_PERIOD, 86_400.0)?;
        if !(0.0..=self.merge_period).contains(&self.target_scan_time) {
            let (target, period) = (self.target_scan_time, self.merge_period);
            let problem = format!("{target} s is not between 0, for as long, and the merge period of {period} s");
            return Err(ConfigError { key: "target_scan_time", problem });
        }
        if self.mode == Mode::ScanTime && self.target().fract() != 0.0 {
            let problem = format!(
                "mode scan-time counts in whole seconds, as the kernel does: {} s is not 1, 2, 3 …",
                self.target()
            );
            return Err(ConfigError { key: "target_scan_time", problem });
        }
        range("direct_io_seconds", self.direct_io_seconds, 0.0, 86_400.0)?;
        range("exit_when_idle", self.exit_when_idle, 0.0, 1e9)?;
        if !(0.0..=100.0).contains(&self.huge_page_share) {
            let problem = format!("{} is not between 0 and 100 percent", self.huge_page_share);
            return Err(ConfigError { key: "huge_page_share", problem });
        }
        if self.huge_page_share > 0.0 && self.huge_pages == HugePages::Keep {
            let problem = "with huge_pages = \"keep\" no huge page is split; leave one of the two out".into();
            return Err(ConfigError { key: "huge_page_share", problem });
        }
        if self.threads > 1024 {
            return Err(ConfigError { key: "threads", problem: format!("{} is more than 1024", self.threads) });
        }
        Ok(())
    }

    /// The merge period.
    pub fn period(&self) -> Duration {
        Duration::from_secs_f64(self.merge_period)
    }

    /// The target scan time in seconds, with the default filled in.
    pub fn target(&self) -> f64 {
        if self.target_scan_time == 0.0 { self.merge_period } else { self.target_scan_time }
    }

    /// Worker threads, with the default filled in.
    pub fn workers(&self) -> usize {
        let cpus = || std::thread::available_parallelism().map_or(1, usize::from);
        if self.threads == 0 { cpus() } else { self.threads }
    }

    /// How long a freed slot of the store rests before it is used again.
    pub(crate) fn quarantine(&self) -> Duration {
        self.period() * 2
    }
}
