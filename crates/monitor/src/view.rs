//! What a screen shows of a moment, computed without a terminal.

mod columns;
mod host;
mod text;
mod units;

use std::cmp::Ordering;

use control::ClientStatus;

use crate::moment::{Moment, PAGE, bytes_of, possible_of};

pub use columns::{Column, Place, layout};
pub use host::{Host, Span, graph};
pub use text::text;
pub use units::{count, percent, rate, size, size_signed, stall};

/// A guest, as a row.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Row {
    /// Its process.
    pub pid: i32,
    /// The name that its manager gives, else its program's.
    pub name: String,
    /// The domain within which it shares.
    pub domain: String,
    /// Bytes under management.
    pub memory: u64,
    /// Bytes that map frames.
    pub shared: u64,
    /// Bytes that were given back as zero pages.
    pub zero: u64,
    /// Bytes that its guest has freed and that were taken back.
    pub recycled: u64,
    /// Bytes that change too fast.
    pub volatile: u64,
    /// Bytes that are unique so far.
    pub unshared: u64,
    /// Bytes that could be merged and are not yet.
    pub possible: u64,
    /// Bytes written a second.
    pub dirty: f64,
    /// Bytes saved less every cost.
    pub profit: i64,
    /// Mappings of the process.
    pub mappings: u32,
    /// Mappings that it may have; 0: not known.
    pub mappings_limit: u32,
    /// Page faults a second; `None`: there is no moment before.
    pub faults: Option<f64>,
    /// The longest stall of a writer, in seconds.
    pub stall: f64,
    /// CPU time of its agent, in percent; `None`: there is no moment before.
    pub cpu: Option<f64>,
    /// Why not more of it is merged, in one word.
    pub why: String,
    /// The same in a sentence.
    pub sentence: String,
}

impl Row {
    fn new(client: &ClientStatus, domain: &str, before: Option<(&ClientStatus, f64)>) -> Self {
        let metrics = &client.metrics;
        let name = client.guest_name.as_ref().filter(|name| !name.is_empty()).unwrap_or(&client.name);
        let a_second = |now: f64, then: f64, seconds: f64| (now >= then).then(|| (now - then) / seconds);
        let faults = before.and_then(|(client, seconds)| {
            a_second(metrics.faults_total as f64, client.metrics.faults_total as f64, seconds)
        });
        let cpu = before.and_then(|(client, seconds)| {
            Some(100.0 * a_second(metrics.agent_cpu_seconds, client.metrics.agent_cpu_seconds, seconds)?)
        });
        let (why, sentence) = client.why.as_ref().map_or_else(
            || ("-".into(), "Nothing keeps memory of it from being merged.".into()),
            |why| (why.code.to_string(), printable(&why.text)),
        );
        Row {
            pid: client.pid,
            name: printable(name),
            domain: printable(domain),
            memory: metrics.region_bytes,
            shared: bytes_of(metrics.pages_merged),
            zero: bytes_of(metrics.pages_zero),
            recycled: bytes_of(metrics.pages_recycled),
            volatile: bytes_of(metrics.pages_volatile),
            unshared: bytes_of(metrics.pages_unshared),
            possible: possible_of(client),
            dirty: metrics.dirty_pages_per_second * PAGE as f64,
            profit: metrics.general_profit,
            mappings: metrics.mappings,
            mappings_limit: metrics.mappings_limit,
            faults,
            stall: metrics.window_max_us as f64 / 1e6,
            cpu,
            why,
            sentence,
        }
    }

    /// Mappings in use, as a part of the limit.
    pub fn mappings_used(&self) -> f64 {
        f64::from(self.mappings) / f64::from(self.mappings_limit.max(1))
    }

    /// Whether a filter's words are all in its name, process, domain or reason.
    pub fn matches(&self, filter: &str) -> bool {
        let text = format!("{} {} {} {}", self.name, self.pid, self.domain, self.why).to_lowercase();
        filter.to_lowercase().split_whitespace().all(|word| text.contains(word))
    }
}

/// Names and reasons hold what a guest or a tenant said: control characters are left out.
pub fn printable(text: &str) -> String {
    text.chars().filter(|c| !c.is_control()).collect()
}

/// A row for each guest; `before`: an earlier moment, for rates.
pub fn rows(moment: &Moment, before: Option<&Moment>) -> Vec<Row> {
    let Some(status) = &moment.status else { return Vec::new() };
    let seconds = before.map_or(0.0, |before| moment.time.saturating_sub(before.time) as f64 / 1000.0);
    let earlier: std::collections::HashMap<i32, &ClientStatus> = before
        .filter(|_| seconds > 0.0)
        .and_then(|before| before.status.as_ref())
        .map(|status| status.clients().map(|client| (client.pid, client)).collect())
        .unwrap_or_default();
    let row = |domain: &str, client: &ClientStatus| {
        Row::new(client, domain, earlier.get(&client.pid).map(|&client| (client, seconds)))
    };
    status.domains.iter().flat_map(|domain| domain.clients.iter().map(|client| row(&domain.name, client))).collect()
}

/// Sorts rows by a column, the largest first; names and words from A to Z. `reversed`: the other
/// way.
pub fn sort(rows: &mut [Row], by: Column, reversed: bool) {
    rows.sort_by(|a, b| {
        let order = by.compare(a, b).then_with(|| a.name.cmp(&b.name)).then(a.pid.cmp(&b.pid));
        if reversed { order.reverse() } else { order }
    });
}

/// The larger first; what is not known last.
fn descending(a: f64, b: f64) -> Ordering {
    b.partial_cmp(&a).unwrap_or_else(|| a.is_nan().cmp(&b.is_nan()))
}

#[cfg(test)]
mod tests;
