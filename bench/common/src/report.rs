//! Figures, and how they are printed.

use std::fmt::Write;

use anyhow::Result;
use serde::Serialize;

/// One figure.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Row {
    /// The bench.
    pub bench: &'static str,
    /// The case.
    pub case: String,
    /// The subject: `pageone`, or a rival.
    pub subject: String,
    /// Threads that did the work.
    pub threads: usize,
    /// The metric.
    pub metric: &'static str,
    /// The value.
    pub value: f64,
    /// The unit of the value.
    pub unit: &'static str,
}

/// A collection of figures with the same bench, case, subject and threads.
pub struct Sheet {
    /// The bench.
    pub bench: &'static str,
    /// The case.
    pub case: String,
    /// Who was measured.
    pub subject: &'static str,
    /// Threads that did the work.
    pub threads: usize,
    /// The figures, in the order of their collection.
    pub rows: Vec<Row>,
}

impl Sheet {
    /// Notes a figure.
    pub fn add(&mut self, metric: &'static str, value: f64, unit: &'static str) {
        let Sheet { bench, case, subject, threads, .. } = self;
        let (case, subject) = (case.clone(), (*subject).to_owned());
        self.rows.push(Row { bench, case, subject, threads: *threads, metric, value, unit });
    }
}

/// Prints figures: a table for people, or one JSON object a line.
///
/// # Errors
///
/// When a figure is no JSON number.
pub fn print(rows: &[Row], json: bool) -> Result<()> {
    if json {
        for row in rows {
            println!("{}", serde_json::to_string(row)?);
        }
    } else {
        print!("{}", table(rows));
    }
    Ok(())
}

/// A table for people: a line for each metric, a column for each subject, both in the order of
/// their first figure.
pub fn table(rows: &[Row]) -> String {
    let mut out = String::new();
    for case in firsts(rows.iter().map(|row| (row.bench, row.case.as_str()))) {
        let rows: Vec<&Row> = rows.iter().filter(|row| (row.bench, row.case.as_str()) == case).collect();
        let subjects = firsts(rows.iter().map(|row| (row.subject.as_str(), row.threads)));
        // Writing into a string has no way to fail.
        let _ = write!(out, "{}: {}\n\n{:<34}{:>6}", case.0, case.1, "", "");
        for &(subject, threads) in &subjects {
            // Where one was measured with several numbers of threads, the number tells the columns
            // apart.
            let several = subjects.iter().filter(|other| other.0 == subject).count() > 1;
            let name = if several { format!("{subject} x{threads}") } else { subject.to_owned() };
            let _ = write!(out, "{name:>16}");
        }
        out.push('\n');
        for (metric, unit) in firsts(rows.iter().map(|row| (row.metric, row.unit))) {
            let _ = write!(out, "{metric:<34}{unit:>6}");
            for subject in &subjects {
                let is_it = |row: &&&Row| row.metric == metric && (row.subject.as_str(), row.threads) == *subject;
                let found = rows.iter().find(is_it);
                let _ = write!(out, "{:>16}", found.map_or("-".into(), |row| short(row.value)));
            }
            out.push('\n');
        }
        out.push('\n');
    }
    out
}

/// The rows of several rounds, each figure once: the median.
pub fn medians(rows: &[Row]) -> Vec<Row> {
    let key = |row: &Row| (row.bench, row.case.clone(), row.subject.clone(), row.threads, row.metric);
    let median = |wanted| {
        let mut values: Vec<&Row> = rows.iter().filter(|row| key(row) == wanted).collect();
        values.sort_by(|a, b| a.value.total_cmp(&b.value));
        let (low, high) = (values[(values.len() - 1) / 2], values[values.len() / 2]);
        Row { value: (low.value + high.value) / 2.0, ..low.clone() }
    };
    firsts(rows.iter().map(key)).into_iter().map(median).collect()
}

/// Figures of PageONE divided by the best, that is the lowest, of the others, except `nothing`: for
/// each pair the metric, and the name of the ratio.
pub fn ratios(rows: &[Row], metrics: &[(&str, &'static str)]) -> Vec<Row> {
    let mut out = Vec::new();
    for &(metric, name) in metrics {
        for ours in rows.iter().filter(|row| row.metric == metric && row.subject == "pageone") {
            let is_rival = |row: &&Row| {
                row.metric == metric && row.case == ours.case && row.subject != "pageone" && row.subject != "nothing"
            };
            let best = rows.iter().filter(is_rival).map(|row| row.value).reduce(f64::min);
            out.extend(best.map(|best| Row { metric: name, value: ours.value / best, unit: "", ..ours.clone() }));
        }
    }
    out
}

fn firsts<T: PartialEq>(all: impl Iterator<Item = T>) -> Vec<T> {
    let mut seen = Vec::new();
    all.for_each(|one| {
        if !seen.contains(&one) {
            seen.push(one);
        }
    });
    seen
}

/// Three digits that say something; whole numbers whole.
fn short(value: f64) -> String {
    let digits = match value.abs() {
        v if v >= 100.0 || v.fract() == 0.0 => 0,
        v if v >= 10.0 => 1,
        v if v >= 1.0 => 2,
        v => (2.0 - v.log10().floor()) as usize,
    };
    format!("{value:.digits$}")
}

#[cfg(test)]
mod tests;
