//! The output of the demo: on a terminal a table that is redrawn in place, elsewhere a line from
//! time to time.

use std::fmt::Write as _;
use std::io::{IsTerminal, Write as _};
use std::time::{Duration, Instant};

use anyhow::Result;
use control::HostMetrics;
use output::text::shown;
use testguest::Guest;

use super::course::{Options, Summary};

/// Time between two lines if the output is no terminal.
const LINE_EVERY: Duration = Duration::from_secs(5);

/// The live view. With `--json` it goes to standard error and leaves standard output to the
/// summary.
pub(crate) struct View {
    terminal: bool,
    to_stderr: bool,
    heading: String,
    phase: &'static str,
    since: Instant,
    limit: Duration,
    /// Lines on the terminal that the next table overwrites.
    drawn: usize,
    last_line: Option<Instant>,
}

impl View {
    pub(crate) fn new(options: &Options) -> Self {
        let terminal = if options.json { std::io::stderr().is_terminal() } else { std::io::stdout().is_terminal() };
        Self {
            terminal,
            to_stderr: options.json,
            heading: format!("{} guests of {} MiB", options.guests, options.guest.memory),
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
                "  CPU spent {:8.1} s    shared {}  sharing {}  zero {}  recycled {}  profit {} MiB",
                status.cpu_seconds(),
                status.pages_shared,
                status.pages_sharing,
                status.pages_zero,
                status.pages_recycled,
                status.general_profit >> 20
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
        match self.to_stderr {
            true => drop(std::io::stderr().write_all(text.as_bytes())),
            false => drop(output::stdout::control(text)),
        }
    }
}

fn percent_saved(used: f64, before: f64) -> f64 {
    // Adding zero turns -0, which would be printed with its sign, into 0.
    (100.0 * (1.0 - used / before)).round() + 0.0
}

/// Prints the summary on standard output: one JSON object, or text.
pub(crate) fn print_summary(summary: &Summary, options: &Options) -> Result<()> {
    if options.json {
        output::line!("{}", serde_json::to_string(summary)?)?;
        return Ok(());
    }
    let Summary { used_before_mib: before, used_after_mib: after, .. } = summary;
    output::line!(
        "\n{} guests of {} MiB, booted and verified after {:.0} s, merged for {:.0} s",
        summary.guests,
        options.guest.memory,
        summary.first_round_seconds,
        summary.merge_seconds
    )?;
    output::line!(
        "  used memory  {before:.0} MiB before, {after:.0} MiB after: {:.1} % saved",
        100.0 * summary.saved_fraction
    )?;
    output::line!(
        "  pages        {} shared, {} sharing, {} zero, {} recycled ({} in all); general profit {} MiB",
        summary.pages_shared,
        summary.pages_sharing,
        summary.pages_zero,
        summary.pages_recycled,
        summary.pages_recycled_total,
        summary.general_profit >> 20
    )?;
    output::line!(
        "  CPU          {:.1} s, {:.1} µs for each page merged",
        summary.cpu_seconds,
        summary.us_per_merged_page
    )?;
    output::line!(
        "  integrity    {} files checked, {} wrong, {} guests dead: {}",
        summary.integrity_checks,
        summary.integrity_failures,
        summary.guests_dead,
        if summary.passed { "PASS" } else { "FAIL" }
    )?;
    Ok(())
}
