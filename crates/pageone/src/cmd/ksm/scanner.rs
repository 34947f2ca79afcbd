//! ksmd for the governor: its counters, and its settings, which are restored at the end.

use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::time::Instant;

use anyhow::{Context, Result, bail};
use governor::Reading;
use kmem::ksm::{Ksm, Ksmd};

use super::kept::{Found, Kept};

use crate::{Code, Coded};

/// Where KSM's settings are kept.
const KEPT: &str = "/run/pageone-ksm.json";
const ADVISOR: &str =
    "the kernel's own advisor sets pages_to_scan; switch it off with `echo none >/sys/kernel/mm/ksm/advisor_mode`";

/// The governed scanner of the kernel. Dropping it restores the settings that are still as set
/// here.
pub(crate) struct Scanner {
    ksm: Ksm,
    ksmd: Ksmd,
    started: Instant,
    /// The settings at the start, or before one that was killed.
    found: Found,
    /// Where they are kept; `None`: nothing is changed.
    kept: Option<Kept>,
    /// `pages_to_scan` as set last.
    set: u64,
    /// `sleep_millisecs` at the start: how long ksmd sleeps after a batch.
    pub(crate) sleep_millisecs: u64,
    effect: Effect,
    /// Whether the candidates are counted with the next reading, which takes more files.
    is_first: bool,
    /// Pages scanned, for kernels that do not count them (before 6.6).
    counted: Counted,
}

/// What becomes of KSM's settings.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Effect {
    Governed,
    /// Nothing is written.
    DryRun,
}

/// A count of scanned pages. Kernels before 6.7 skip no page, so a scan covers every known page
/// once.
#[derive(Default)]
struct Counted {
    pages: u64,
    scans: u64,
}

impl Scanner {
    /// Takes KSM over, or only reads it.
    pub(crate) fn take(ksm: Ksm, effect: Effect) -> Result<Self> {
        let ksmd = Ksmd::find().context("cannot read /proc")?;
        let hidden = || Coded(Code::HostLacks, "ksmd is not in /proc; run this outside of any container".into());
        Self::take_from(ksm, ksmd.ok_or_else(hidden)?, effect, Path::new(KEPT))
    }

    fn take_from(ksm: Ksm, ksmd: Ksmd, effect: Effect, kept: &Path) -> Result<Self> {
        if advisor_is_on(&ksm) {
            return Err(Coded(Code::SecondDaemon, ADVISOR.into()).into());
        }
        let (pages, sleep_millisecs) = (ksm.pages_to_scan()?, ksm.sleep_millisecs()?);
        if sleep_millisecs == 0 {
            bail!("ksmd never sleeps, so no CPU limit can hold: write 20 to /sys/kernel/mm/ksm/sleep_millisecs first");
        }
        let run = ksm.run()?;
        if effect == Effect::DryRun && run != 1 {
            bail!(
                "KSM is stopped (run is {run}), so there is nothing to see; without --dry-run it would be started \
                   (leave --dry-run out, or write 1 to /sys/kernel/mm/ksm/run)"
            );
        }
        let mut scanner = Self {
            found: Found { pages_to_scan: pages, stopped: None, set: [pages; 2] },
            kept: None,
            set: pages,
            sleep_millisecs,
            ksm,
            ksmd,
            started: Instant::now(),
            effect,
            is_first: true,
            counted: Counted::default(),
        };
        if effect == Effect::Governed {
            // Writes the same value, to find out whether this account may.
            scanner.ksm.set_pages_to_scan(pages).map_err(|e| {
                Coded(Code::HostLacks, format!("KSM's settings can't be written: {e}; run this as root"))
            })?;
            let mut kept = Kept::open(kept)?;
            if let Some(before) = kept.read().filter(|before| before.set.contains(&pages)) {
                let found = before.pages_to_scan;
                output::note!("one that was killed has left pages_to_scan at {pages}; {found} is put back at the end");
                // Whoever has stopped KSM since wants it so.
                scanner.found = Found { stopped: before.stopped.filter(|_| run == 1), set: [pages; 2], ..before };
            }
            if run != 1 {
                scanner.found.stopped = Some(run);
            }
            kept.write(Some(&scanner.found))?;
            scanner.kept = Some(kept);
            if run != 1 {
                scanner.ksm.set_run(1).context("cannot start KSM")?;
                output::note!("KSM was stopped (run was {run}); it runs until this ends");
            }
        }
        Ok(scanner)
    }

    /// Reads the counters.
    pub(crate) fn read(&mut self) -> Result<Reading> {
        let first = std::mem::take(&mut self.is_first);
        let at = self.started.elapsed();
        let cpu = self.ksmd.cpu_time().context("cannot read the CPU time of ksmd")?;
        let mut stats =
            if first { self.ksm.stats() } else { self.ksm.progress() }.context("cannot read KSM's statistics")?;
        let scans = stats.full_scans.unwrap_or(0);
        let ended = scans.saturating_sub(std::mem::replace(&mut self.counted.scans, scans));
        if !first && ended > 0 && stats.pages_scanned.is_none() {
            stats = self.ksm.stats().context("cannot read KSM's statistics")?;
            self.counted.pages += stats.candidates() * ended;
        }
        Ok(Reading {
            at,
            cpu,
            pages: stats.pages_scanned.unwrap_or(self.counted.pages),
            skipped: stats.pages_skipped.unwrap_or(0),
            scans,
            candidates: stats.candidates(),
            pages_to_scan: if self.effect == Effect::DryRun { self.ksm.pages_to_scan()? } else { self.set } as u32,
        })
    }

    /// Sets the pages of a batch.
    pub(crate) fn set(&mut self, pages: u32) -> Result<()> {
        if self.effect == Effect::DryRun {
            return Ok(());
        }
        // Other settings are checked twice a second. While the kernel's advisor is on, writing
        // fails.
        if self.ksm.pages_to_scan()? != self.set {
            self.check_writers()?;
        }
        self.found.set = [self.set, pages.into()];
        self.kept.as_mut().map_or(Ok(()), |kept| kept.write(Some(&self.found)))?;
        if let Err(e) = self.ksm.set_pages_to_scan(pages.into()) {
            self.check_writers()?;
            return Err(e).context("cannot set KSM's pages_to_scan");
        }
        self.set = pages.into();
        Ok(())
    }

    /// Fails if another program has changed a governed setting.
    pub(crate) fn check_writers(&self) -> Result<()> {
        if self.effect == Effect::DryRun {
            return Ok(());
        }
        let pages = self.ksm.pages_to_scan()?;
        let changed = if advisor_is_on(&self.ksm) {
            "the kernel's advisor was switched on (advisor_mode)".to_owned()
        } else if pages != self.set {
            format!("another program changed pages_to_scan to {pages}; it was set to {} here", self.set)
        } else if self.ksm.sleep_millisecs()? != self.sleep_millisecs {
            format!("another program changed sleep_millisecs, which was {}", self.sleep_millisecs)
        } else if self.ksm.run()? != 1 {
            "another program stopped KSM (run)".to_owned()
        } else {
            return Ok(());
        };
        let who = other_writer(&self.ksm).map_or(String::new(), |who| format!(": {who}"));
        Err(Coded(
            Code::SecondDaemon,
            format!(
                "{changed}{who}; two governors would fight, so this one ends: stop ksmtuned or the kernel's advisor \
                 first"
            ),
        )
        .into())
    }

    /// Keeps the pages as they are set now, instead of restoring them.
    pub(crate) fn keep(mut self) {
        (self.found.pages_to_scan, self.found.stopped) = (self.set, None);
    }

    /// Restores the settings that are still as set here; values that another program wrote stay.
    fn restore(&mut self) -> Result<()> {
        let Some(kept) = &mut self.kept else { return Ok(()) };
        let found = self.found.pages_to_scan;
        if !advisor_is_on(&self.ksm) && self.set != found && self.ksm.pages_to_scan()? == self.set {
            self.ksm.set_pages_to_scan(found)?;
        }
        if let Some(run) = self.found.stopped
            && self.ksm.run()? == 1
        {
            self.ksm.set_run(0)?;
            if run != 0 {
                output::note!("run is 0 and not {run}, which would unmerge everything at once; write it for that");
            }
        }
        kept.write(None)
    }
}

impl Drop for Scanner {
    fn drop(&mut self) {
        if let Err(e) = self.restore() {
            output::note!("cannot put KSM's settings back (pages_to_scan was {}): {e:#}", self.found.pages_to_scan);
        }
    }
}

fn advisor_is_on(ksm: &Ksm) -> bool {
    ksm.advisor_mode().is_ok_and(|mode| mode != "none")
}

/// Whoever is known to write `pages_to_scan`, and the remedy. A name says who it may have been, and
/// only root's.
fn other_writer(ksm: &Ksm) -> Option<String> {
    if advisor_is_on(ksm) {
        return Some(ADVISOR.into());
    }
    let mut pids =
        std::fs::read_dir("/proc").ok()?.flatten().filter_map(|e| e.file_name().to_str()?.parse::<i32>().ok());
    let is_it = |pid: &i32| {
        let comm = Path::new("/proc").join(pid.to_string()).join("comm");
        std::fs::metadata(&comm).is_ok_and(|of| of.uid() == 0)
            && std::fs::read_to_string(&comm).is_ok_and(|name| name == "ksmtuned\n")
    };
    pids.find(is_it)
        .map(|pid| format!("ksmtuned (process {pid}) sets pages_to_scan; stop it with `systemctl stop ksmtuned`"))
}

#[cfg(test)]
mod tests;
