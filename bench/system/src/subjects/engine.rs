//! The engines that are compared, behind one face: PageONE, and the kernel's KSM.

use std::process::Command;

use anyhow::{Result, bail};
use clap::ValueEnum;

use crate::harness::hold::Client;
use crate::subjects::ksm::Rival;
use crate::subjects::pageone::{Daemon, PageOne, Sums, Times};
use bench_common::interrupt::Interrupt;

/// Which engine.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum Kind {
    /// The kernel's KSM without smart scan
    Ksm,
    /// The kernel's KSM with smart scan, its default
    KsmSmartScan,
    /// PageONE
    Pageone,
}

/// Who is measured, and how it is set.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Subject {
    /// KSM, with smart scan or without.
    Ksm {
        /// Whether pages that were unique several times are passed over.
        smart_scan: bool,
    },
    /// PageONE.
    PageOne {
        /// Its worker threads.
        threads: usize,
    },
}

impl Subject {
    /// Its name in figures.
    pub(crate) fn name(self) -> &'static str {
        match self {
            Subject::Ksm { smart_scan: false } => "ksm",
            Subject::Ksm { smart_scan: true } => "ksm-smart-scan",
            Subject::PageOne { .. } => "pageone",
        }
    }

    /// Its threads in figures.
    pub(crate) fn threads(self) -> usize {
        match self {
            Subject::Ksm { .. } => 1,
            Subject::PageOne { threads } => threads,
        }
    }

    /// Whether it is PageONE.
    pub(crate) fn is_ours(self) -> bool {
        matches!(self, Subject::PageOne { .. })
    }
}

/// An engine that is ready to merge; it ends with this value, after its clients.
pub(crate) enum Engine {
    /// PageONE, and its daemon once it runs.
    PageOne {
        /// The programs.
        pageone: PageOne,
        /// The daemon.
        daemon: Option<Daemon>,
    },
    /// KSM.
    Ksm(Box<Rival>),
}

impl Engine {
    /// Makes an engine ready. `None`, and a line on standard error: it can't be measured on this
    /// host.
    pub(crate) fn prepare(subject: Subject) -> Result<Option<Self>> {
        let Subject::Ksm { smart_scan } = subject else {
            return Ok(Some(Engine::PageOne { pageone: PageOne::find()?, daemon: None }));
        };
        let mut rival = match Rival::start()? {
            Ok(rival) => rival,
            Err(why) => {
                eprintln!("SKIPPED {}: {why}", subject.name());
                return Ok(None);
            }
        };
        if !rival.set_smart_scan(smart_scan)? && smart_scan {
            eprintln!("SKIPPED {}: this kernel has no smart scan", subject.name());
            return Ok(None);
        }
        Ok(Some(Engine::Ksm(Box::new(rival))))
    }

    /// The command that runs `program` as a client.
    pub(crate) fn launch(&self, program: &Command) -> Result<Command> {
        match self {
            Engine::PageOne { pageone, .. } => pageone.launch(program),
            Engine::Ksm(_) => Ok(Rival::launch(program)),
        }
    }

    /// Starts what PageONE needs beside its clients; KSM is there already.
    pub(crate) fn start(&mut self, period: f64, subject: Subject, interrupt: &Interrupt) -> Result<()> {
        if let Engine::PageOne { pageone, daemon } = self {
            *daemon = Some(pageone.daemon_with(period, subject.threads(), interrupt)?);
        }
        Ok(())
    }

    /// The process that does the work, beside the agents.
    pub(crate) fn pid(&self) -> Option<i32> {
        match self {
            Engine::PageOne { daemon, .. } => daemon.as_ref().map(Daemon::pid),
            Engine::Ksm(rival) => Some(rival.ksmd()),
        }
    }

    /// Pages of the clients that are merged, zero pages too.
    pub(crate) fn merged(&self, clients: &[Client]) -> Result<u64> {
        match self {
            Engine::PageOne { pageone, .. } => {
                let status = pageone.status_of_most()?;
                Ok(status.merged() + status.zero())
            }
            Engine::Ksm(rival) => rival.merged(clients),
        }
    }

    /// Pages saved: those that use others' frames, and zero pages.
    pub(crate) fn saved(&self) -> Result<u64> {
        match self {
            Engine::PageOne { pageone, .. } => {
                let status = pageone.status_of_most()?;
                Ok(status.metrics.pages_sharing + status.zero())
            }
            Engine::Ksm(rival) => {
                let stats = rival.stats()?;
                Ok(stats.pages_sharing.unwrap_or(0) + stats.ksm_zero_pages.unwrap_or(0))
            }
        }
    }

    /// The CPU times so far; `clients`: their processes.
    pub(crate) fn times(&self, clients: &[i32]) -> Result<EngineTimes> {
        match self {
            Engine::PageOne { daemon: Some(daemon), .. } => Ok(EngineTimes::PageOne(Times::take(daemon, clients)?)),
            Engine::PageOne { daemon: None, .. } => bail!("there is no daemon"),
            Engine::Ksm(rival) => Ok(EngineTimes::Ksm(rival.times()?)),
        }
    }
}

/// CPU times at one moment.
pub(crate) enum EngineTimes {
    /// Of the daemon and of the agents.
    PageOne(Times),
    /// Of ksmd.
    Ksm(crate::harness::cpu::Times),
}

impl EngineTimes {
    /// Nanoseconds since: all, and the agents' part.
    pub(crate) fn since(&self, before: &EngineTimes) -> (u64, u64) {
        match (self, before) {
            (EngineTimes::PageOne(now), EngineTimes::PageOne(before)) => {
                let (daemon, agents) = now.since(before);
                (daemon + agents, agents)
            }
            (EngineTimes::Ksm(now), EngineTimes::Ksm(before)) => (crate::harness::cpu::spent(before, now), 0),
            _ => (0, 0),
        }
    }
}

/// The subjects named on the command line; all of them where none is named.
pub(crate) fn subjects(only: &[Kind], threads: Option<usize>) -> Vec<Subject> {
    let cpus = std::thread::available_parallelism().map_or(1, usize::from);
    let mut threads = threads.map_or(vec![1, cpus], |threads| vec![threads]);
    threads.dedup();
    let mut all =
        vec![(Kind::Ksm, Subject::Ksm { smart_scan: false }), (Kind::KsmSmartScan, Subject::Ksm { smart_scan: true })];
    all.extend(threads.into_iter().map(|threads| (Kind::Pageone, Subject::PageOne { threads })));
    all.retain(|(kind, _)| only.is_empty() || only.contains(kind));
    all.into_iter().map(|(_, subject)| subject).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn everyone_is_measured_where_nobody_is_named() {
        let one = [Subject::PageOne { threads: 3 }];
        assert_eq!(subjects(&[Kind::Pageone], Some(3)), one);
        assert_eq!(subjects(&[Kind::KsmSmartScan, Kind::Ksm], None).len(), 2);
        let all = subjects(&[], Some(3));
        assert_eq!((all.len(), all[2]), (3, one[0]));
    }
}
