//! What an operator can set: one table, from which come the keys of the configuration file, the
//! options of `pageone daemon`, the defaults, the check of ranges, and the reference page.
//!
//! The table stands in the engine, not in `control`: only the engine uses the values, and the types
//! of some are its own. A program that asks a daemon needs none of them.

pub(crate) mod bounds;
mod settings;
mod tenants;

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::time::Duration;

use governor::Mode;
use serde::{Deserialize, Serialize};
use settings::{Number, settings};
use wire::HugePages;

pub use settings::{Changes, ConfigError, Effect, Range};
pub use tenants::{ManagedBy, TenantBy, TenantRule};

/// One setting of [`Config`].
pub type Setting = settings::Setting<Config>;

/// A setting's option of `pageone daemon`.
pub type CommandOption = settings::CommandOption<Config>;

/// The shortest period, in seconds.
pub(crate) const SHORTEST_PERIOD: f64 = 0.05;
/// The longest period, in seconds: a day.
pub(crate) const LONGEST_PERIOD: f64 = 86_400.0;
/// The highest CPU limit, in percent of one CPU: 1024 CPUs.
const MOST_CPU: f64 = 102_400.0;
/// The most worker threads.
const MOST_THREADS: f64 = 1024.0;
/// The most clients: as many as the index can tell apart.
const MOST_CLIENTS: f64 = 65_535.0;

settings! {
    /// Time between two scans of a client's memory. A page that did not change for two merge
    /// periods is merged.
    merge_period: f64 = 20.0, "seconds", Between(SHORTEST_PERIOD, LONGEST_PERIOD), option "S";
    /// Time within which a page that a guest frees is back, where the guest marks free pages (`run
    /// --ppr`).
    reclaim_period: f64 = 2.0, "seconds", Between(SHORTEST_PERIOD, LONGEST_PERIOD), option "S", effect NewClients;
    /// Time over which the work of a scan is spread, at most the merge period; 0: as long as the
    /// merge period.
    target_scan_time: f64 = 0.0, "seconds", MergePeriod, option "S";
    /// How the target scan time is held: `target`; `scan-time`, with the arithmetic of the kernel's
    /// KSM advisor; `none`, as fast as the CPU limit allows.
    #[serde(with = "mode_name")]
    mode: Mode = Mode::Target, "", OneOf(mode_name::all), option "MODE";
    /// Worker threads; 0: one for each CPU.
    threads: usize = 0, "", AtMost(MOST_THREADS), option "N", effect Restart;
    /// Most CPU time of daemon and agents over any 10 s, in percent of one CPU; 0: no limit.
    max_cpu: f64 = 0.0, "percent", NoneOr(MOST_CPU), option "P";
    /// The CPU limit while memory is short (`pressure_percent`), used if it is higher than
    /// `max_cpu`.
    max_cpu_under_pressure: f64 = 0.0, "percent", NoneOr(MOST_CPU), option "P";
    /// Memory is short when tasks lost more than this share of the last 10 s waiting for it (PSI,
    /// `some avg10`).
    pressure_percent: f64 = 10.0, "percent", NoneOr(100.0);
    /// Memory that must be left for the store to grow, on the host and under every memory cgroup
    /// limit of the daemon. Where a client pays for its frames, as much must be left under its
    /// limits for new ones.
    reserve_mib: u64 = 64, "MiB", Any;
    /// Least memory that must be available, with free swap space, in percent of what all merged
    /// pages would take if they were written: below, nothing more is merged. 0: merging goes on.
    headroom_percent: f64 = 25.0, "percent", Between(0.0, 1e6);
    /// Shortest time that this memory must last at the rate at which merged pages were written over
    /// the last minute: below, nothing more is merged. 0: merging goes on.
    headroom_seconds: f64 = 60.0, "seconds", Between(0.0, 86_400.0);
    /// Longest time that one direct I/O request into a client's memory may take. A page that was
    /// merged and then copied cannot be checked for such requests. It must stay clean for this
    /// long before it is merged again. So must every page that was written, in a process that does
    /// direct I/O over NFS, Ceph, 9p, CIFS, vhost-scsi, or FUSE before Linux 6.13.
    direct_io_seconds: f64 = 30.0, "seconds", Between(0.0, 86_400.0), effect Restart;
    /// What becomes of clients' huge pages: `split`, pages are merged out of them; `keep`, they are
    /// left alone.
    huge_pages: HugePages = HugePages::Split, "", OneOf(HugePages::names), effect NewClients;
    /// With `split`: a huge page is split only when more than this share of its pages can be
    /// merged; 0: for any page.
    huge_page_share: f64 = 0.0, "percent", Between(0.0, 100.0), effect NewClients;
    /// Whether pages on different NUMA nodes share a frame, as with KSM's setting of that name. If
    /// not, a page shares only with pages of its own node, and their frame lies there.
    merge_across_nodes: bool = true, "", Any, effect Restart;
    /// Domains that span several users: a table `[domains.NAME]` with a list `uids` of the users
    /// that may join. Every other domain belongs to one user.
    domains: BTreeMap<String, DomainConfig> = BTreeMap::new(), "", Any, effect NewClients;
    /// Which tenant a managed guest belongs to: a list of tables `[[tenants]]`, of which the first
    /// that matches counts. `manager`: `libvirt`, `proxmox`, `kubernetes`, `systemd`, `container`;
    /// without it any. `by`: `project`, `slice`, `pool`, `tag`, `namespace`, `guest`, `name`; the
    /// rule matches guests that have this, or one of the values in the list `is`. `domain` names
    /// the domain; without it each value is one. Without a rule that matches, project, slice, pool
    /// and namespace count, and any other guest has a domain of its own.
    tenants: Vec<TenantRule> = Vec::new(), "", Any, effect NewClients;
    /// Domains that one user's clients may make at a time, by names that they choose, by containers
    /// or by processes. Those of tenants and of known guests do not count.
    user_domains: usize = 64, "", AtMost(MOST_CLIENTS), effect NewClients;
    /// Memory that the clients of one user may announce, all together, in multiples of the host's
    /// RAM and swap space. The daemon keeps up to 6 bytes for each 4 KiB of it.
    user_memory: f64 = 8.0, "times", Between(0.001, 1e6);
    /// Clients that one user may have at a time.
    user_clients: usize = 4096, "", AtMost(MOST_CLIENTS);
    /// Time without a client after which the daemon ends; 0: never.
    exit_when_idle: f64 = 0.0, "seconds", Between(0.0, 1e9), option "S";
}

/// A domain that spans several users.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct DomainConfig {
    /// The users that may join.
    pub uids: Vec<u32>,
}

/// A [`Mode`] by its name.
mod mode_name {
    use super::Mode;
    use serde::{Deserialize, Deserializer, Serializer, de::Error};

    pub(super) fn all() -> Vec<&'static str> {
        Mode::NAMES.iter().map(|&(name, _)| name).collect()
    }

    pub(super) fn serialize<S: Serializer>(mode: &Mode, to: S) -> Result<S::Ok, S::Error> {
        to.collect_str(mode)
    }

    pub(super) fn deserialize<'de, D: Deserializer<'de>>(from: D) -> Result<Mode, D::Error> {
        String::deserialize(from)?.parse().map_err(D::Error::custom)
    }
}

impl Config {
    /// Checks what types alone do not: ranges, and settings that exclude each other.
    ///
    /// # Errors
    ///
    /// The first setting that is wrong.
    pub fn check(&self) -> Result<(), ConfigError> {
        self.check_ranges()?;
        let wrong = |key, problem| Err(ConfigError { key, problem });
        let (target, period) = (self.target_scan_time, self.merge_period);
        if !(0.0..=period).contains(&target) {
            let problem = format!("{target} s is not between 0, for as long, and the merge period of {period} s");
            return wrong("target_scan_time", problem);
        }
        if self.mode == Mode::ScanTime && self.target().fract() != 0.0 {
            let problem = format!(
                "mode scan-time counts in whole seconds, as the kernel does: {} s is not 1, 2, 3 …",
                self.target()
            );
            return wrong("target_scan_time", problem);
        }
        if self.huge_page_share > 0.0 && self.huge_pages == HugePages::Keep {
            let problem = "with huge_pages = \"keep\" no huge page is split; leave one of the two out".into();
            return wrong("huge_page_share", problem);
        }
        if let Some(name) = self.domains.keys().find(|name| name.starts_with("uid-")) {
            return wrong("domains", format!("{name:?} is the name of a user's own domain; take another"));
        }
        for (rule, number) in self.tenants.iter().zip(1..) {
            rule.check()
                .map_err(|problem| ConfigError { key: "tenants", problem: format!("rule {number}: {problem}") })?;
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

    /// Memory that must be left for the store to grow, in bytes.
    pub(crate) fn reserve(&self) -> u64 {
        self.reserve_mib.saturating_mul(1 << 20)
    }

    /// How long a freed slot of the store stays in quarantine before it is used again.
    pub(crate) fn quarantine(&self) -> Duration {
        self.period() * 2
    }
}

#[cfg(test)]
mod tests;
