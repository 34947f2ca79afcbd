//! Figures, and how they are printed.

use std::fmt::Write;

use serde::Serialize;

/// One figure.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub(crate) struct Row {
    /// The bench.
    pub(crate) bench: &'static str,
    /// What was done.
    pub(crate) case: String,
    /// Who was measured: `pageone`, or a rival.
    pub(crate) subject: String,
    /// Threads that did the work.
    pub(crate) threads: usize,
    /// What was measured.
    pub(crate) metric: &'static str,
    /// How much.
    pub(crate) value: f64,
    /// Of what.
    pub(crate) unit: &'static str,
}

/// Where figures are collected: what they have in common is said once.
pub(crate) struct Sheet {
    pub(crate) bench: &'static str,
    pub(crate) case: String,
    pub(crate) subject: &'static str,
    pub(crate) threads: usize,
    pub(crate) rows: Vec<Row>,
}

impl Sheet {
    /// Notes a figure.
    pub(crate) fn add(&mut self, metric: &'static str, value: f64, unit: &'static str) {
        let Sheet { bench, case, subject, threads, .. } = self;
        let (case, subject) = (case.clone(), (*subject).to_owned());
        self.rows.push(Row { bench, case, subject, threads: *threads, metric, value, unit });
    }
}

/// A table for people: a line for each metric, a column for each subject, both in the order of their first figure.
pub(crate) fn table(rows: &[Row]) -> String {
    let mut out = String::new();
    for case in firsts(rows.iter().map(|row| (row.bench, row.case.as_str()))) {
        let rows: Vec<&Row> = rows.iter().filter(|row| (row.bench, row.case.as_str()) == case).collect();
        let subjects = firsts(rows.iter().map(|row| row.subject.as_str()));
        // Writing into a string has no way to fail.
        let _ = write!(out, "{}: {}\n\n{:<34}{:>6}", case.0, case.1, "", "");
        for subject in &subjects {
            let _ = write!(out, "{subject:>16}");
        }
        out.push('\n');
        for (metric, unit) in firsts(rows.iter().map(|row| (row.metric, row.unit))) {
            let _ = write!(out, "{metric:<34}{unit:>6}");
            for subject in &subjects {
                let found = rows.iter().find(|row| row.metric == metric && row.subject == *subject);
                let _ = write!(out, "{:>16}", found.map_or("-".into(), |row| short(row.value)));
            }
            out.push('\n');
        }
        out.push('\n');
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
mod tests {
    use super::*;

    fn row(subject: &str, metric: &'static str, value: f64) -> Row {
        Row { bench: "idle", case: "2 MiB".into(), subject: subject.into(), threads: 2, metric, value, unit: "%" }
    }

    #[test]
    fn a_json_line_has_the_published_keys() {
        let json = serde_json::to_string(&row("ksm", "cpu", 0.5)).unwrap();
        assert_eq!(
            json,
            r#"{"bench":"idle","case":"2 MiB","subject":"ksm","threads":2,"metric":"cpu","value":0.5,"unit":"%"}"#
        );
    }

    #[test]
    fn the_table_sets_subjects_side_by_side() {
        let out = table(&[row("pageone", "cpu", 0.01234), row("pageone", "scans", 3.0), row("ksm", "cpu", 12.34)]);
        let words: Vec<Vec<&str>> = out.lines().map(|line| line.split_whitespace().collect()).collect();
        assert_eq!(words[2], ["pageone", "ksm"]);
        assert_eq!(words[3], ["cpu", "%", "0.0123", "12.3"]);
        assert_eq!(words[4], ["scans", "%", "3", "-"]);
    }

    #[test]
    fn figures_are_short() {
        let cases = [(0.0, "0"), (1234.5, "1234"), (99.44, "99.4"), (1.234, "1.23"), (0.00056789, "0.000568")];
        cases.into_iter().for_each(|(value, text)| assert_eq!(short(value), text));
    }
}
