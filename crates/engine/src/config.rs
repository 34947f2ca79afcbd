//! What an operator can set.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::time::Duration;

use serde::{Deserialize, Serialize};

/// Settings of the engine. Each has a default; the names are those of the configuration file.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Config {
    /// Merge period in seconds: how often memory is scanned. A page that did not change for two is merged.
    pub merge_period: f64,
    /// Worker threads; 0: one for each CPU.
    pub threads: usize,
    /// Memory that must be left, on the host and under every memory cgroup limit of the daemon, for the store to grow, in MiB.
    pub reserve_mib: u64,
    /// Longest time, in seconds, that one direct I/O request into clients' memory may take. A page that was merged and
    /// copied since can't be checked for such requests, and rests for this long before it is merged again.
    pub direct_io_seconds: f64,
    /// Whether guests' huge pages are given up for merging (`split`) or left alone (`keep`).
    pub huge_pages: HugePages,
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
            threads: 0,
            reserve_mib: 64,
            direct_io_seconds: 30.0,
            huge_pages: HugePages::Split,
            domains: BTreeMap::new(),
            exit_when_idle: 0.0,
            directory: PathBuf::new(),
        }
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
        range("merge_period", self.merge_period, 0.05, 86_400.0)?;
        range("direct_io_seconds", self.direct_io_seconds, 0.0, 86_400.0)?;
        range("exit_when_idle", self.exit_when_idle, 0.0, 1e9)?;
        if self.threads > 1024 {
            return Err(ConfigError { key: "threads", problem: format!("{} is more than 1024", self.threads) });
        }
        Ok(())
    }

    /// The merge period.
    pub fn period(&self) -> Duration {
        Duration::from_secs_f64(self.merge_period)
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
