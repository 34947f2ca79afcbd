//! The rival: the kernel's KSM, under our settings for the time of a bench, under the host's own
//! afterwards.

use std::process::Command;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use kmem::PAGE_SIZE;
use kmem::ksm::{Ksm, Ksmd, Snapshot, Stats, process_stat};

use crate::harness::cpu::{self, Times};
use crate::harness::hold::Client;
use bench_common::interrupt::Interrupt;

/// How long ksmd may take to forget the clients.
const SETTLE: Duration = Duration::from_secs(20);

/// How fast ksmd scans.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Pace {
    /// Pages before it sleeps.
    pub(crate) pages_to_scan: u64,
    /// How long it sleeps then, in milliseconds.
    pub(crate) sleep_millisecs: u64,
}

impl Pace {
    /// The kernel's defaults.
    pub(crate) const DEFAULT: Pace = Pace { pages_to_scan: 100, sleep_millisecs: 20 };
    /// Without sleeping.
    pub(crate) const FULL: Pace = Pace { pages_to_scan: 1_000_000, sleep_millisecs: 0 };

    /// The pace that looks at `pages` once in `seconds`.
    pub(crate) fn of(pages: u64, seconds: f64) -> Pace {
        let sleep_millisecs = Pace::DEFAULT.sleep_millisecs;
        let pages_to_scan = (pages as f64 * sleep_millisecs as f64 / 1000.0 / seconds).ceil() as u64;
        Pace { pages_to_scan, sleep_millisecs }
    }
}

/// KSM and its thread, if they can be measured; or why not.
pub(crate) fn usable() -> Result<Result<(Ksm, Ksmd), String>> {
    let ksm = match Ksm::open() {
        Ok(ksm) => ksm,
        Err(error) => return Ok(Err(format!("the kernel's KSM is not there: {error}"))),
    };
    if !rustix::process::geteuid().is_root() {
        return Ok(Err("the kernel's KSM can be set by root only".into()));
    }
    if ksm.run()? == 1 && ksm.stats()?.pages_shared.unwrap_or(0) > 0 {
        return Ok(Err("the kernel's KSM serves others on this host".into()));
    }
    Ok(Ksmd::find()?.map(|ksmd| (ksm, ksmd)).ok_or_else(|| "there is no ksmd".into()))
}

/// KSM, running for us.
pub(crate) struct Rival {
    ksm: Ksm,
    before: Snapshot,
    ksmd: i32,
    pace: Pace,
}

impl Rival {
    /// Starts KSM at full pace, with zero pages as zero pages and no advisor, which serves it best
    /// here, smart scan as the host has it. `Err` with the reason in the inner result: it can't
    /// be measured on this host.
    pub(crate) fn start() -> Result<Result<Self, String>> {
        let (ksm, ksmd) = match usable()? {
            Ok(found) => found,
            Err(why) => return Ok(Err(why)),
        };
        let before = Snapshot::of(&ksm)?;
        let mut rival = Self { ksm, before, ksmd: ksmd.pid, pace: Pace::FULL };
        // Both are not in every kernel.
        if rival.ksm.advisor_mode().is_ok() {
            rival.ksm.set_advisor_mode("none")?;
        }
        if rival.ksm.use_zero_pages().is_ok() {
            rival.ksm.set_use_zero_pages(1)?;
        }
        rival.set_pace(Pace::FULL)?;
        rival.ksm.set_run(1)?;
        Ok(Ok(rival))
    }

    /// Sets the pace.
    pub(crate) fn set_pace(&mut self, pace: Pace) -> Result<()> {
        self.ksm.set_pages_to_scan(pace.pages_to_scan).context("cannot set KSM's pages_to_scan")?;
        self.ksm.set_sleep_millisecs(pace.sleep_millisecs).context("cannot set KSM's sleep_millisecs")?;
        self.pace = pace;
        Ok(())
    }

    /// Whether to pass over pages that were unique several times, as newer kernels do by default.
    /// `false`: this kernel can't.
    pub(crate) fn set_smart_scan(&mut self, on: bool) -> Result<bool> {
        if self.ksm.smart_scan().is_err() {
            return Ok(false);
        }
        self.ksm.set_smart_scan(on.into()).context("cannot set KSM's smart_scan")?;
        Ok(true)
    }

    /// The statistics.
    ///
    /// # Errors
    ///
    /// When another program has changed the settings meanwhile: the figures would be wrong.
    pub(crate) fn stats(&self) -> Result<Stats> {
        let now = Pace { pages_to_scan: self.ksm.pages_to_scan()?, sleep_millisecs: self.ksm.sleep_millisecs()? };
        ensure!(now == self.pace && self.ksm.run()? == 1, "somebody else has changed KSM's settings meanwhile");
        Ok(self.ksm.stats()?)
    }

    /// The kernel thread.
    pub(crate) fn ksmd(&self) -> i32 {
        self.ksmd
    }

    /// The CPU time of ksmd so far.
    pub(crate) fn times(&self) -> Result<Times> {
        cpu::thread_times(self.ksmd, |_| true).context("cannot read the CPU time of ksmd")
    }

    /// Pages of the clients that are merged, zero pages too.
    pub(crate) fn merged(&self, clients: &[Client]) -> Result<u64> {
        let merged = |client: &Client| {
            let stat = process_stat(client.pid())?;
            Ok(stat.merging_pages.unwrap_or(0) + stat.zero_pages.unwrap_or(0))
        };
        clients.iter().map(merged).sum()
    }

    /// Bytes that the clients' memory saves less KSM's metadata on it, as `general_profit`, but
    /// without other programs' part. `frames`: how many distinct pages, not zero, the clients
    /// have.
    pub(crate) fn profit(clients: &[Client], frames: u64) -> Result<i64> {
        let profit = |client: &Client| Ok(process_stat(client.pid())?.process_profit.unwrap_or(0));
        let all = clients.iter().map(profit).sum::<Result<i64>>()?;
        Ok(all - (frames * PAGE_SIZE as u64) as i64)
    }

    /// A client of KSM is just a program.
    pub(crate) fn launch(program: &Command) -> Command {
        let mut command = Command::new(program.get_program());
        command.args(program.get_args()).env_remove("LD_PRELOAD");
        command
    }

    /// Waits until `goal` pages of the clients are merged.
    pub(crate) fn wait_merged(&self, clients: &[Client], goal: u64, limit: Duration, wait: &Interrupt) -> Result<u64> {
        let merged = wait.until("KSM has merged the clients' memory", limit, || {
            let merged = self.merged(clients)?;
            Ok((merged >= goal).then_some(merged))
        })?;
        let stats = self.stats()?;
        let all = [stats.pages_shared, stats.pages_sharing, stats.pages_unshared].into_iter().flatten().sum::<u64>();
        if all > merged + merged / 100 {
            eprintln!("pageone-bench: KSM scans other programs' memory too; its CPU figures hold their share");
        }
        Ok(merged)
    }

    /// ksmd keeps its records of an ended process until its scan reaches it; stopped before, it
    /// would keep that for ever. What is left after two more scans is in use: other programs,
    /// QEMU for one, mark memory too.
    fn settle(&self) -> Result<()> {
        self.ksm.set_sleep_millisecs(0)?;
        self.ksm.set_pages_to_scan(Pace::FULL.pages_to_scan)?;
        let end = Instant::now() + SETTLE;
        let scans = || anyhow::Ok(self.ksm.stats()?.full_scans.unwrap_or(0));
        let last = scans()? + 2;
        while scans()? < last && self.ksm.stats()?.pages_shared.unwrap_or(0) > 0 {
            if Instant::now() >= end {
                bail!(
                    "KSM may still keep what it knew of the ended clients; `echo 2 >/sys/kernel/mm/ksm/run` makes it forget"
                );
            }
            std::thread::sleep(Duration::from_millis(100));
        }
        Ok(())
    }
}

impl Drop for Rival {
    fn drop(&mut self) {
        let settled = self.settle();
        let restored = self.before.restore().context("KSM's settings");
        for error in [settled.err(), restored.err()].into_iter().flatten() {
            eprintln!("pageone-bench: {error:#}");
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_pace_looks_at_everything_in_time() {
        let pace = Pace::of(2_097_152, 20.0);
        assert_eq!(pace, Pace { pages_to_scan: 2098, sleep_millisecs: 20 });
        assert_eq!(Pace::of(5_000, 1.0), Pace::DEFAULT);
    }
}
