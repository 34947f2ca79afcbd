//! Guests as rows.

use std::collections::HashMap;

use control::{ClientStatus, Kind, Metric, columns};
use output::text::printable;

use crate::moment::Moment;

/// A guest, as a row.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Row {
    /// Its process.
    pub pid: i32,
    /// What it is called.
    pub name: String,
    /// By what else it can be chosen: its program and UUID.
    pub alias: String,
    /// The domain within which it shares.
    pub domain: String,
    /// Its metrics in the order of [`control::columns`], as the columns show them: counters by
    /// their growth in a second. `None`: not known, as growth without a moment before.
    pub values: Vec<Option<f64>>,
    /// Why not more of it is merged, in one word.
    pub why: String,
    /// The same in a sentence.
    pub sentence: String,
}

impl Row {
    fn new(client: &ClientStatus, domain: &str, before: Option<(&ClientStatus, f64)>) -> Self {
        let value = |of: &ClientStatus, metric: &Metric| Some(of.metrics.value(metric)?.real());
        let shown = |metric: &'static Metric| {
            let now = value(client, metric)?;
            if metric.kind == Kind::Gauge {
                return Some(now);
            }
            // A process number may be used again.
            let (earlier, seconds) = before?;
            let then = value(earlier, metric)?;
            (now >= then).then(|| (now - then) / seconds)
        };
        let (why, sentence) = client.why.as_ref().map_or_else(
            || ("-".into(), "Nothing keeps memory of it from being merged.".into()),
            |why| (why.code.to_string(), printable(&why.text)),
        );
        Row {
            pid: client.pid,
            name: printable(client.called()),
            alias: format!("{} {}", client.name, client.identity().unwrap_or_default()),
            domain: printable(domain),
            values: columns().map(shown).collect(),
            why,
            sentence,
        }
    }

    /// What the column of this metric shows.
    pub fn value(&self, name: &str) -> Option<f64> {
        *self.values.get(columns().position(|metric| metric.name == name)?)?
    }

    /// Whether a filter's words are all in its name, program, UUID, process, domain or reason.
    pub fn matches(&self, filter: &str) -> bool {
        let text = format!("{} {} {} {} {}", self.name, self.alias, self.pid, self.domain, self.why).to_lowercase();
        filter.to_lowercase().split_whitespace().all(|word| text.contains(word))
    }
}

/// A row for each guest; `before`: an earlier moment, for growth.
pub fn rows(moment: &Moment, before: Option<&Moment>) -> Vec<Row> {
    let Some(status) = &moment.status else { return Vec::new() };
    let seconds = before.map_or(0.0, |before| moment.time.saturating_sub(before.time) as f64 / 1000.0);
    let earlier: HashMap<i32, &ClientStatus> = before
        .filter(|_| seconds > 0.0)
        .and_then(|before| before.status.as_ref())
        .map(|status| status.clients().map(|client| (client.pid, client)).collect())
        .unwrap_or_default();
    let row = |domain: &str, client: &ClientStatus| {
        Row::new(client, domain, earlier.get(&client.pid).map(|&client| (client, seconds)))
    };
    status.domains.iter().flat_map(|domain| domain.clients.iter().map(|client| row(&domain.name, client))).collect()
}
