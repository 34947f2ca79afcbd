//! Tables as CSV, and everything as JSON.

use std::io::{self, Write};

use control::{METRICS, Metric, Scope, Source, Value};
use output::text::printable;

use crate::clock;
use crate::moment::Moment;
use crate::recording::{Error, Recording};

/// A CSV file: its name, the scope of its metrics, and its first columns.
const TABLES: [(&str, Scope, &str); 4] = [
    ("host.csv", Scope::Host, "time"),
    ("governor.csv", Scope::Governor, "time"),
    ("domains.csv", Scope::Domain, "time,domain"),
    ("guests.csv", Scope::Client, "time,domain,pid,guest,why"),
];

/// The names of the files that [`csv`] fills, in their order.
pub fn names() -> [&'static str; TABLES.len()] {
    TABLES.map(|(name, ..)| name)
}

/// Writes the tables into files, one for each of [`names`]: a line for each moment, and for each
/// domain or guest. A metric that has no value leaves its field empty.
///
/// # Errors
///
/// When a moment cannot be read, or a file not be written.
pub fn csv(recording: &mut Recording, files: &mut [impl Write]) -> Result<(), Error> {
    let head = |file: &mut dyn Write, scope: Scope, first: &str| {
        write!(file, "{first}")?;
        metrics(scope).try_for_each(|metric| write!(file, ",{}", metric.name))?;
        writeln!(file)
    };
    for ((_, scope, first), file) in TABLES.iter().zip(&mut *files) {
        head(file, *scope, first).map_err(Error::Write)?;
    }
    for at in 0..recording.len() {
        let moment = recording.moment(at)?;
        for ((_, scope, _), file) in TABLES.iter().zip(&mut *files) {
            lines(&moment, *scope, file).map_err(Error::Write)?;
        }
    }
    files.iter_mut().try_for_each(Write::flush).map_err(Error::Write)
}

fn metrics(scope: Scope) -> impl Iterator<Item = &'static Metric> {
    METRICS.iter().filter(move |metric| metric.is_in(scope))
}

/// Writes the lines of one moment.
fn lines(moment: &Moment, scope: Scope, out: &mut dyn Write) -> io::Result<()> {
    let Some(status) = &moment.status else { return Ok(()) };
    let time = clock::iso(moment.time);
    // One after the other, in the order of the table: a new line begins with a new owner.
    let mut line: Option<(String, Vec<(&'static str, Value)>)> = None;
    let mut outcome = Ok(());
    let mut end = |line: Option<(String, Vec<(&'static str, Value)>)>| {
        let Some((first, values)) = line else { return Ok(()) };
        write!(out, "{time}{first}")?;
        let mut values = values.into_iter().peekable();
        for metric in metrics(scope) {
            match values.next_if(|(name, _)| *name == metric.name) {
                Some((_, value)) => write!(out, ",{value}")?,
                None => write!(out, ",")?,
            }
        }
        writeln!(out)
    };
    status.for_each_metric(&mut |source, metric, value| {
        let (is_in, first) = match source {
            Source::Host => (scope == Scope::Host, String::new()),
            Source::Governor => (scope == Scope::Governor, String::new()),
            Source::Domain(domain) => (scope == Scope::Domain, format!(",{}", field(&domain.name))),
            Source::Client(domain, client) => {
                let why = client.why.as_ref().map_or("", |why| why.code.text());
                let first = format!(",{},{},{},{}", field(&domain.name), client.pid, field(client.called()), why);
                (scope == Scope::Client, first)
            }
            Source::Recycler(..) => (false, String::new()),
        };
        if !is_in || outcome.is_err() {
            return;
        }
        match &mut line {
            Some((begun, values)) if *begun == first => values.push((metric.name, value)),
            _ => outcome = end(line.replace((first, vec![(metric.name, value)]))),
        }
    });
    outcome?;
    end(line)
}

/// Text as a field. A spreadsheet must not take what a tenant named for a formula.
fn field(text: &str) -> String {
    let text = printable(text);
    let text = if text.starts_with(['=', '+', '-', '@']) { format!("'{text}") } else { text };
    if text.contains([',', '"']) { format!("\"{}\"", text.replace('"', "\"\"")) } else { text }
}

/// Writes one JSON object: `moments`, each as `pageone status --json` has it, with its time; and
/// `depth`, the last look at who shares with whom.
///
/// # Errors
///
/// When a moment cannot be read, or `out` not be written.
pub fn json(recording: &mut Recording, out: &mut dyn Write) -> Result<(), Error> {
    let text = |value: serde_json::Result<String>| value.map_err(|e| Error::Write(e.into()));
    let depth = text(serde_json::to_string(&recording.depth(i64::MAX)?))?;
    write!(out, "{{\"format\":1,\"depth\":{depth},\n\"moments\":[").map_err(Error::Write)?;
    for at in 0..recording.len() {
        let moment = text(serde_json::to_string(&recording.moment(at)?))?;
        write!(out, "{}\n{moment}", if at == 0 { "" } else { "," }).map_err(Error::Write)?;
    }
    writeln!(out, "\n]}}").map_err(Error::Write)
}
