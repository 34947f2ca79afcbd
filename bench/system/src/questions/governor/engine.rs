//! A subject of the `governor` bench: our engine, which governs itself.

use std::collections::BTreeMap;

use anyhow::{Context, Result};
use control::Status;

use crate::harness::cpu;
use crate::questions::governor::load::Load;
use crate::questions::governor::trace::Trace;
use crate::questions::governor::{Governed, Plan};
use crate::subjects::pageone::{Daemon, PageOne, Sums};
use bench_common::interrupt::Interrupt;

/// A scan with fewer pages has nothing to spread.
const LEAST: u64 = 10_000;
/// Steps between two requests for its status.
const STEPS: u32 = 10;

/// The engine under way.
pub(crate) struct GovernedEngine<'a> {
    pageone: &'a PageOne,
    daemon: Daemon,
    steps: u32,
    status: Status,
    /// CPU time of each process's agent, when it was last seen, in nanoseconds.
    agents: BTreeMap<i32, u64>,
    /// The scan noted last.
    scan: (u64, f64),
}

impl<'a> GovernedEngine<'a> {
    /// Starts the daemon.
    pub(crate) fn start(plan: &Plan, pageone: &'a PageOne, interrupt: &Interrupt) -> Result<Self> {
        let (target, max_cpu) = (plan.target.as_secs_f64().to_string(), plan.max_cpu.to_string());
        let daemon = pageone.daemon_as(&["--target-scan-time", &target, "--max-cpu", &max_cpu], interrupt)?;
        let status = pageone.status()?;
        Ok(Self { pageone, daemon, steps: 0, status, agents: BTreeMap::new(), scan: (0, 0.0) })
    }
}

impl Governed for GovernedEngine<'_> {
    fn step(&mut self, _: f64, trace: &mut Trace) -> Result<()> {
        self.steps += 1;
        if self.steps.is_multiple_of(STEPS) {
            self.status = self.pageone.status()?;
            let governor = &self.status.governor.metrics;
            let scan = (governor.scan_pages, governor.scan_time_seconds.unwrap_or(0.0));
            if scan != self.scan && scan.0 >= LEAST {
                trace.scans.push(scan.1);
            }
            self.scan = scan;
        }
        Ok(())
    }

    /// All threads of the daemon since it was started, and those of the agents.
    fn cpu(&mut self, load: &Load<'_>) -> Result<f64> {
        for client in &load.clients {
            let times = cpu::thread_times(client.pid(), |name| name.starts_with("pageone-") && name != "pageone-bench");
            let time = times.context("cannot read the CPU time of a client")?.values().sum();
            self.agents.insert(client.pid(), time);
        }
        let daemon =
            cpu::thread_times(self.daemon.pid(), |_| true).context("cannot read the CPU time of the daemon")?;
        Ok(daemon.values().chain(self.agents.values()).sum::<u64>() as f64 / 1e9)
    }

    fn merged(&mut self, _: &Load<'_>) -> Result<u64> {
        Ok(self.status.merged())
    }

    fn governing(&self) -> f64 {
        0.0
    }
}
