//! ksmd for the governor: its counters, and its settings, which are restored at the end.

use std::time::Instant;

use anyhow::{Context, Result, bail};
use governor::Reading;
use kmem::ksm::{Ksm, Ksmd};

use crate::{Code, Coded};

/// The governed scanner of the kernel. Dropping it restores the settings that are still as set
/// here.
pub(crate) struct Scanner {
    ksm: Ksm,
    ksmd: Ksmd,
    started: Instant,
    /// `pages_to_scan` at the start.
    found: u64,
    /// `pages_to_scan` as set last.
    set: u64,
    /// `sleep_millisecs` at the start: how long ksmd sleeps after a batch.
    pub(crate) sleep_millisecs: u64,
    /// `run` at the start, if KSM was stopped.
    stopped: Option<u32>,
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
        Self::take_from(ksm, ksmd.ok_or_else(hidden)?, effect)
    }

    fn take_from(ksm: Ksm, ksmd: Ksmd, effect: Effect) -> Result<Self> {
        if let Some(other) = other_writer(&ksm) {
            return Err(other.into());
        }
        let found = ksm.pages_to_scan()?;
        let run = ksm.run()?;
        if effect == Effect::DryRun && run != 1 {
            bail!(
                "KSM is stopped (run is {run}), so there is nothing to see; without --dry-run it would be started \
                   (leave --dry-run out, or write 1 to /sys/kernel/mm/ksm/run)"
            );
        }
        let mut scanner = Self {
            found,
            set: found,
            sleep_millisecs: ksm.sleep_millisecs()?,
            ksm,
            ksmd,
            started: Instant::now(),
            stopped: None,
            effect,
            is_first: true,
            counted: Counted::default(),
        };
        if effect == Effect::Governed {
            // Writes the same value, to find out whether this account may.
            scanner.ksm.set_pages_to_scan(found).map_err(|e| {
                Coded(Code::HostLacks, format!("KSM's settings can't be written: {e}; run this as root"))
            })?;
            if run != 1 {
                scanner.ksm.set_run(1).context("cannot start KSM")?;
                scanner.stopped = Some(run);
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
        let changed = if self.ksm.advisor_mode().is_ok_and(|mode| mode != "none") {
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
        self.found = self.set;
        self.stopped = None;
    }

    /// Restores the settings that are still as set here; values that another program wrote stay.
    fn restore(&self) -> std::io::Result<()> {
        if self.effect == Effect::DryRun {
            return Ok(());
        }
        let advisor = self.ksm.advisor_mode().is_ok_and(|mode| mode != "none");
        if !advisor && self.set != self.found && self.ksm.pages_to_scan()? == self.set {
            self.ksm.set_pages_to_scan(self.found)?;
        }
        match self.stopped {
            Some(run) if self.ksm.run()? == 1 => self.ksm.set_run(run),
            _ => Ok(()),
        }
    }
}

impl Drop for Scanner {
    fn drop(&mut self) {
        if let Err(e) = self.restore() {
            output::note!("cannot put KSM's settings back (pages_to_scan was {}): {e}", self.found);
        }
    }
}

/// Another program that is known to write `pages_to_scan`, and the remedy.
fn other_writer(ksm: &Ksm) -> Option<Coded> {
    if ksm.advisor_mode().is_ok_and(|mode| mode != "none") {
        return Some(Coded(
            Code::SecondDaemon,
            "the kernel's own advisor sets pages_to_scan; switch it off with `echo none >/sys/kernel/mm/ksm/advisor_mode`"
                .into(),
        ));
    }
    let pids = std::fs::read_dir("/proc").ok()?.flatten().filter_map(|e| e.file_name().to_str()?.parse::<i32>().ok());
    let mut pids =
        pids.filter(|pid| std::fs::read_to_string(format!("/proc/{pid}/comm")).is_ok_and(|c| c == "ksmtuned\n"));
    pids.next().map(|pid| {
        Coded(
            Code::SecondDaemon,
            format!("ksmtuned (process {pid}) sets pages_to_scan; stop it with `systemctl stop ksmtuned`"),
        )
    })
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::symlink;
    use std::path::Path;

    use super::*;

    /// A number that the kernel lets nobody change.
    const FIXED: &str = "/proc/sys/kernel/ngroups_max";

    /// Each test looks whether another program sets what it sets, and one starts such a program.
    static ALONE: parking_lot::Mutex<()> = parking_lot::Mutex::new(());

    /// Is killed at the end, also if the test fails.
    struct Killed(std::process::Child);

    impl Drop for Killed {
        fn drop(&mut self) {
            let _ = self.0.kill();
            let _ = self.0.wait();
        }
    }

    /// KSM's files, with what is in them.
    fn files(run: &str) -> tempfile::TempDir {
        let dir = tempfile::tempdir().unwrap();
        let fixed = std::fs::read_to_string(FIXED).unwrap();
        for (name, text) in [("run", run), ("pages_to_scan", &fixed), ("sleep_millisecs", "20"), ("full_scans", "0")] {
            std::fs::write(dir.path().join(name), text).unwrap();
        }
        dir
    }

    fn put(dir: &Path, name: &str, text: &str) {
        std::fs::write(dir.join(name), text).unwrap();
    }

    /// KSM's scanner is this process.
    fn take(dir: &Path, effect: Effect) -> Result<Scanner> {
        Scanner::take_from(Ksm::at(dir).unwrap(), Ksmd { pid: std::process::id() as i32 }, effect)
    }

    #[test]
    fn a_scanner_that_is_stopped_or_cannot_be_read_or_set_says_so() {
        let _alone = ALONE.lock();
        let text = |error: anyhow::Error| error.to_string();
        let dir = files("0");
        let error = text(take(dir.path(), Effect::DryRun).err().unwrap());
        assert!(error.starts_with("KSM is stopped (run is 0), so there is nothing to see"), "{error}");
        assert_eq!(std::fs::read_to_string(dir.path().join("run")).unwrap(), "0");
        std::fs::remove_file(dir.path().join("run")).unwrap();
        symlink(FIXED, dir.path().join("run")).unwrap();
        assert_eq!(text(take(dir.path(), Effect::Governed).err().unwrap()), "cannot start KSM");
        std::fs::remove_file(dir.path().join("pages_to_scan")).unwrap();
        symlink(FIXED, dir.path().join("pages_to_scan")).unwrap();
        let error = take(dir.path(), Effect::Governed).err().unwrap();
        assert_eq!(Code::of(&error), Code::HostLacks);
        assert!(text(error).starts_with("KSM's settings can't be written: "));

        let dir = files("1");
        let mut scanner = take(dir.path(), Effect::Governed).unwrap();
        scanner.read().unwrap();
        put(dir.path(), "full_scans", "many");
        assert_eq!(text(scanner.read().unwrap_err()), "cannot read KSM's statistics");
        put(dir.path(), "full_scans", "1");
        let ksmd = std::mem::replace(&mut scanner.ksmd, Ksmd { pid: i32::MAX });
        assert_eq!(text(scanner.read().unwrap_err()), "cannot read the CPU time of ksmd");
        scanner.ksmd = ksmd;
        std::fs::remove_file(dir.path().join("pages_to_scan")).unwrap();
        symlink(FIXED, dir.path().join("pages_to_scan")).unwrap();
        assert_eq!(text(scanner.set(7).unwrap_err()), "cannot set KSM's pages_to_scan");
    }

    #[test]
    fn a_setting_that_another_program_changed_ends_it() {
        let _alone = ALONE.lock();
        let dir = files("1");
        let scanner = take(dir.path(), Effect::Governed).unwrap();
        scanner.check_writers().unwrap();
        let error = || {
            let error = scanner.check_writers().unwrap_err();
            assert_eq!(Code::of(&error), Code::SecondDaemon);
            error.to_string()
        };
        put(dir.path(), "run", "0");
        assert!(error().starts_with("another program stopped KSM (run); two governors would fight"), "{}", error());
        put(dir.path(), "pages_to_scan", "7");
        assert!(error().starts_with("another program changed pages_to_scan to 7"), "{}", error());
        put(dir.path(), "advisor_mode", "none [scan-time]");
        assert!(error().contains("advisor was switched on"), "{}", error());
        let other = || {
            let error = take(dir.path(), Effect::DryRun).err().unwrap();
            assert_eq!(Code::of(&error), Code::SecondDaemon);
            error.to_string()
        };
        assert!(other().starts_with("the kernel's own advisor sets pages_to_scan; switch it off"), "{}", other());
        put(dir.path(), "advisor_mode", "[none] scan-time");
        let program = dir.path().join("ksmtuned");
        std::fs::copy("/bin/sleep", &program).unwrap();
        let tuned = Killed(std::process::Command::new(program).arg("60").spawn().unwrap());
        // It has its name a moment after the parent goes on.
        let name = format!("/proc/{}/comm", tuned.0.id());
        while std::fs::read_to_string(&name).unwrap() != "ksmtuned\n" {
            std::thread::yield_now();
        }
        let found = other();
        assert!(found.contains(" sets pages_to_scan; stop it with `systemctl stop ksmtuned`"), "{found}");
    }
}
