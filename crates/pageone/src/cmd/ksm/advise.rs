//! `pageone ksm advise`: governs KSM until a signal ends it.
//!
//! The kernel's advisor is part of the kernel for three reasons. This program meets them from
//! outside. *The advisor needs ksmd's CPU time*: `/proc/PID/schedstat` gives it in nanoseconds. *It
//! must act at the end of a scan*: this program reads `full_scans` often enough to notice the end
//! within a thousandth of the target. *Other writers must be excluded*: this program detects and
//! names them, and ends.

use std::io::Read;
use std::os::unix::net::UnixStream;
use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use governor::{Cause, Governor, Mode, Settings};
use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM};

use super::report::Reporter;
use super::scanner::{Effect, Scanner};
use crate::cmd::Json;
use crate::{Code, Coded};

/// Options of `pageone ksm advise`.
#[derive(clap::Args)]
pub(crate) struct Args {
    /// Seconds within which everything is to be scanned
    #[arg(long, value_name = "S", default_value_t = 200.0)]
    target: f64,
    /// Most CPU time that ksmd may use, in percent of one CPU, over any 10 s
    #[arg(long, value_name = "P", default_value_t = 70.0)]
    max_cpu: f64,
    /// Fewest pages of a batch; only the CPU limit goes below
    #[arg(long, value_name = "N", default_value_t = 500)]
    min_pages: u32,
    /// Most pages of a batch
    #[arg(long, value_name = "N", default_value_t = 30_000)]
    max_pages: u32,
    /// `target`, or `scan-time`: the arithmetic of the kernel's advisor
    #[arg(long, value_name = "MODE", default_value = "target", value_parser = ["target", "scan-time"])]
    mode: String,
    /// Set it once, after one whole scan, leave it so, and end
    #[arg(long, conflicts_with = "dry_run")]
    once: bool,
    /// Say what would be done, and change nothing
    #[arg(long)]
    dry_run: bool,
    #[command(flatten)]
    json: Json,
}

impl Args {
    fn settings(&self) -> Result<Settings> {
        let wrong = |e: governor::SettingsError| Coded(Code::Configuration, e.to_string());
        let target = Duration::try_from_secs_f64(self.target)
            .map_err(|_| wrong(governor::SettingsError::Target(self.target)))?;
        let settings = Settings {
            mode: self.mode.parse::<Mode>().map_err(wrong)?,
            target,
            max_cpu: self.max_cpu,
            min_pages: self.min_pages,
            max_pages: self.max_pages,
        };
        settings.check().map_err(wrong)?;
        Ok(settings)
    }
}

/// Time between two checks for other writers. Before every change `pages_to_scan` is checked too.
const WATCH: Duration = Duration::from_millis(500);

/// Governs until SIGTERM, SIGINT or SIGHUP, or until another program does.
pub(crate) fn run(args: &Args) -> Result<()> {
    let settings = args.settings()?;
    let mut ended = Ended::watch()?;
    let effect = if args.dry_run { Effect::DryRun } else { Effect::Governed };
    let mut scanner = Scanner::take(super::open()?, effect)?;
    let mut governor = Governor::new(settings, Duration::from_millis(scanner.sleep_millisecs))?;
    let mut reporter = Reporter::new(args.json);
    let mut watched = Instant::now();
    loop {
        let reading = scanner.read()?;
        let decision = governor.observe(&reading);
        if decision.changes() {
            scanner.set(decision.pages)?;
        }
        if watched.elapsed() >= WATCH {
            scanner.check_writers()?;
            watched = Instant::now();
        }
        reporter.print(reading.at, &decision)?;
        if args.once && matches!(decision.cause, Cause::ScanEnded { .. }) {
            scanner.keep();
            return Ok(());
        }
        if ended.within(decision.check_after)? {
            output::note!("ends; KSM's settings are put back");
            return Ok(());
        }
    }
}

/// Notices signals: each writes a byte to a socket.
struct Ended(UnixStream);

impl Ended {
    /// Catches the signals from here on.
    fn watch() -> Result<Self> {
        let (read, write) = UnixStream::pair().context("cannot catch signals")?;
        for signal in [SIGTERM, SIGINT, SIGHUP] {
            signal_hook::low_level::pipe::register(signal, write.try_clone()?).context("cannot catch signals")?;
        }
        Ok(Self(read))
    }

    /// Waits for this time. Returns `true` at once when a signal comes.
    fn within(&mut self, wait: Duration) -> Result<bool> {
        self.0.set_read_timeout(Some(wait.max(Duration::from_micros(100))))?;
        match self.0.read(&mut [0]) {
            Ok(_) => Ok(true),
            Err(e) if matches!(e.kind(), std::io::ErrorKind::WouldBlock | std::io::ErrorKind::Interrupted) => Ok(false),
            Err(e) => Err(e).context("cannot wait"),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::io::Write;

    use super::*;

    #[test]
    fn waiting_ends_with_time_with_a_signal_or_with_an_error() {
        let (read, mut write) = UnixStream::pair().unwrap();
        let mut ended = Ended(read);
        assert!(!ended.within(Duration::from_millis(1)).unwrap());
        write.write_all(&[0]).unwrap();
        assert!(ended.within(Duration::from_secs(60)).unwrap());
        // The kernel resets a connection whose other end is closed with bytes that nobody read.
        ended.0.write_all(&[0]).unwrap();
        drop(write);
        let error = ended.within(Duration::from_secs(60)).unwrap_err();
        assert_eq!(error.to_string(), "cannot wait");
    }
}
