//! The output of the demo: on a terminal a table that is redrawn in place, elsewhere a line from
//! time to time. Its summary.

use std::fmt::Write as _;
use std::io::{IsTerminal, Write as _};
use std::time::{Duration, Instant};

use anyhow::{Result, ensure};
use control::HostMetrics;
use control::units::{counted, size};
use output::text::shown;
use testguest::Guest;

/// Time between two lines if the output is no terminal.
const LINE_EVERY: Duration = Duration::from_secs(5);

/// The result of the demo.
#[derive(Clone, Debug, serde::Serialize)]
pub(crate) struct Summary {
    /// Whether every guest lives and every byte was right. Otherwise the memory figures mean
    /// nothing.
    pub(crate) passed: bool,
    /// Guests started.
    pub(crate) guests: usize,
    /// Guests that were dead at the end.
    pub(crate) guests_dead: usize,
    /// Seconds from the first guest's start to the last guest's first full round.
    pub(crate) first_round_seconds: f64,
    /// Seconds of merging.
    pub(crate) merge_seconds: f64,
    /// Used memory above the host's level before merging, MiB.
    pub(crate) used_before_mib: f64,
    /// The same at the end.
    pub(crate) used_after_mib: f64,
    /// 1 − after / before.
    pub(crate) saved_fraction: f64,
    /// CPU time that merging has taken, seconds.
    pub(crate) cpu_seconds: f64,
    /// CPU time for each merged page, µs. It includes the later scans, so it grows with the time of
    /// the demo.
    pub(crate) us_per_merged_page: f64,
    /// Files verified by the guests.
    pub(crate) integrity_checks: u64,
    /// Files found wrong.
    pub(crate) integrity_failures: u64,
    /// The daemon's counters at the end.
    #[serde(flatten)]
    pub(crate) counters: Counters,
}

/// As in [`HostMetrics`].
#[derive(Clone, Debug, serde::Serialize)]
pub(crate) struct Counters {
    pages_shared: u64,
    pages_sharing: u64,
    pages_zero: u64,
    pages_recycled: u64,
    pages_recycled_total: u64,
    /// Bytes.
    general_profit: i64,
}

impl From<&HostMetrics> for Counters {
    fn from(metrics: &HostMetrics) -> Self {
        let &HostMetrics { pages_shared, pages_sharing, pages_zero, pages_recycled, .. } = metrics;
        let &HostMetrics { pages_recycled_total, general_profit, .. } = metrics;
        Self { pages_shared, pages_sharing, pages_zero, pages_recycled, pages_recycled_total, general_profit }
    }
}

impl Summary {
    /// Fails if the figures mean nothing.
    pub(crate) fn verdict(&self) -> Result<()> {
        ensure!(self.passed, "a guest died or found a wrong byte: the figures mean nothing");
        Ok(())
    }

    /// Prints it as text, of guests with so many MiB.
    pub(crate) fn print(&self, memory_mib: u32) -> Result<()> {
        let (before, after, counters) = (self.used_before_mib, self.used_after_mib, &self.counters);
        output::line!(
            "\n{} of {memory_mib} MiB, booted and verified after {:.0} s, merged for {:.0} s",
            counted(self.guests, "guest"),
            self.first_round_seconds,
            self.merge_seconds
        )?;
        output::line!(
            "  used memory  {before:.0} MiB before, {after:.0} MiB after: {:.1} % saved",
            100.0 * self.saved_fraction
        )?;
        output::line!(
            "  pages        {} shared, {} sharing, {} zero, {} recycled ({} in all); general profit {}",
            counters.pages_shared,
            counters.pages_sharing,
            counters.pages_zero,
            counters.pages_recycled,
            counters.pages_recycled_total,
            size(counters.general_profit)
        )?;
        output::line!(
            "  CPU          {:.1} s, {:.1} µs for each page merged",
            self.cpu_seconds,
            self.us_per_merged_page
        )?;
        output::line!(
            "  integrity    {} files checked, {} wrong, {} guests dead: {}",
            self.integrity_checks,
            self.integrity_failures,
            self.guests_dead,
            if self.passed { "PASS" } else { "FAIL" }
        )?;
        Ok(())
    }
}

/// Where the live view goes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum To {
    Stdout,
    /// Standard output is left to the summary in JSON.
    Stderr,
}

/// The live view.
pub(crate) struct View {
    terminal: bool,
    to: To,
    heading: String,
    phase: &'static str,
    since: Instant,
    limit: Duration,
    /// Lines on the terminal that the next table overwrites.
    drawn: usize,
    last_line: Option<Instant>,
}

impl View {
    pub(crate) fn new(to: To, heading: String) -> Self {
        let terminal = match to {
            To::Stdout => std::io::stdout().is_terminal(),
            To::Stderr => std::io::stderr().is_terminal(),
        };
        Self {
            terminal,
            to,
            heading,
            phase: "",
            since: Instant::now(),
            limit: Duration::ZERO,
            drawn: 0,
            last_line: None,
        }
    }

    /// A new phase starts now and takes `limit` at most.
    pub(crate) fn phase(&mut self, phase: &'static str, limit: Duration) {
        self.phase = phase;
        self.since = Instant::now();
        self.limit = limit;
        self.last_line = None;
    }

    /// Shows used memory and the level before merging (MiB), and the guests.
    pub(crate) fn show(&mut self, guests: &mut [Guest], used: f64, before: Option<f64>, status: Option<&HostMetrics>) {
        if self.terminal {
            let text = self.table(guests, used, before, status);
            let up = match self.drawn {
                0 => String::new(),
                lines => format!("\x1b[{lines}A"),
            };
            self.drawn = text.lines().count();
            // Each line clears the rest of the line that it overwrites.
            self.write(&format!("{up}{}", shown(&text).replace('\n', "\x1b[K\n")));
        } else if self.last_line.is_none_or(|at| at.elapsed() >= LINE_EVERY) {
            self.last_line = Some(Instant::now());
            let text = self.line(guests, used, before, status);
            self.write(&shown(&text));
        }
    }

    /// Keeps the last table on the screen.
    pub(crate) fn finish(&mut self) {
        self.drawn = 0;
    }

    fn clock(&self) -> String {
        let limit = self.limit.as_secs();
        format!("{} {:.0} s (of at most {limit})", self.phase, self.since.elapsed().as_secs_f64())
    }

    fn table(&self, guests: &mut [Guest], used: f64, before: Option<f64>, status: Option<&HostMetrics>) -> String {
        let mut text = format!("PageONE demo: {}, {}\n\n", self.heading, self.clock());
        let _ = match before {
            Some(before) => writeln!(
                text,
                "  memory used {used:6.0} MiB, before merging {before:.0} MiB: {:.0} % saved",
                percent_saved(used, before)
            ),
            None => writeln!(text, "  memory used {used:6.0} MiB"),
        };
        if let Some(status) = status {
            let _ = writeln!(
                text,
                "  CPU spent {:8.1} s    shared {}  sharing {}  zero {}  recycled {}  profit {}",
                status.cpu_seconds(),
                status.pages_shared,
                status.pages_sharing,
                status.pages_zero,
                status.pages_recycled,
                size(status.general_profit)
            );
        }
        text.push_str("\n  guest  files checked  verdict\n");
        for (number, guest) in guests.iter_mut().enumerate() {
            let verdict = guest.verdict();
            let _ = writeln!(text, "  {number:5}  {:13}  {verdict}", guest.checks().0);
        }
        text
    }

    fn line(&self, guests: &mut [Guest], used: f64, before: Option<f64>, status: Option<&HostMetrics>) -> String {
        let mut text = format!("{}: used {used:.0} MiB", self.clock());
        if let Some(before) = before {
            let _ = write!(text, " of {before:.0}, {:.0} % saved", percent_saved(used, before));
        }
        if let Some(status) = status {
            let _ = write!(text, ", CPU {:.1} s", status.cpu_seconds());
        }
        for (number, guest) in guests.iter_mut().enumerate() {
            let _ = write!(text, "; {number} {}", guest.verdict());
        }
        text.push('\n');
        text
    }

    /// Writes `text`. A closed pipe is no error: the reader may have ended.
    fn write(&self, text: &str) {
        match self.to {
            To::Stderr => drop(std::io::stderr().write_all(text.as_bytes())),
            To::Stdout => drop(output::stdout::control(text)),
        }
    }
}

fn percent_saved(used: f64, before: f64) -> f64 {
    // Adding zero turns -0, which would be printed with its sign, into 0.
    (100.0 * (1.0 - used / before)).round() + 0.0
}
