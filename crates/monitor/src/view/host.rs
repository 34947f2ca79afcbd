//! The host's block: figures, and graphs over time.

use std::time::Duration;

use control::units::{counted, length, size};
use control::{Status, Unit};
use output::text::printable;

use crate::Recording;
use crate::moment::{Summary, bytes_of, could_be_saved, total, used};

/// The host.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Host {
    /// Bytes of its memory.
    pub total: Option<u64>,
    /// What graphs show, in their order: memory in use, saved less every cost, could be saved.
    pub memory: [String; 3],
    /// CPU time over the last seconds, and its limit.
    pub cpu: String,
    /// The part of the limit that is used, if there is one.
    pub cpu_part: Option<f64>,
    /// Pressure, headroom.
    pub pressure: String,
    /// Bytes of the stores: all, free, quarantined, pinned.
    pub store: String,
    /// The governor's last decision.
    pub governor: String,
    /// What is wrong, in sentences.
    pub warnings: Vec<String>,
    /// Guests and domains.
    pub guests: String,
}

impl Host {
    /// Of a status.
    pub fn new(status: &Status) -> Self {
        let metrics = &status.metrics;
        let governor = &status.governor;
        let used = used(status).zip(metrics.memory_total_bytes);
        let used = used.map_or_else(|| "?".into(), |(used, total)| format!("{} of {}", size(used), size(total)));
        let (cpu, limit) = (governor.metrics.cpu_percent, governor.metrics.max_cpu_percent);
        let percent = |value| Unit::Percent.short(value);
        let bound = if limit > 0.0 { format!(" of {} %", percent(limit)) } else { ", no limit".into() };
        let slots = |of: fn(&control::DomainMetrics) -> u64| {
            size(bytes_of(total(status.domains.iter().map(|domain| of(&domain.metrics)))))
        };
        let clients = status.clients().count();
        Host {
            total: metrics.memory_total_bytes,
            memory: [used, size(metrics.general_profit), size(could_be_saved(status))],
            cpu: format!("{} %{bound}", percent(cpu)),
            cpu_part: (limit > 0.0).then(|| cpu / limit),
            pressure: pressure(status),
            store: format!(
                "{}: {} free, {} quarantined, {} pinned",
                size(total(status.domains.iter().map(|domain| domain.metrics.store_bytes))),
                slots(|domain| domain.slots_free),
                slots(|domain| domain.slots_quarantined),
                slots(|domain| domain.pages_pinned)
            ),
            governor: format!("{}: {}", governor.mode, printable(&governor.reason)),
            warnings: warnings(status),
            guests: format!("{}, {}", counted(clients, "guest"), counted(status.domains.len(), "domain")),
        }
    }
}

fn pressure(status: &Status) -> String {
    let metrics = &status.metrics;
    let ratio =
        |ratio: Option<f64>| ratio.map_or_else(|| "?".into(), |ratio| format!("{} %", Unit::Ratio.short(ratio)));
    let mut text =
        format!("memory {}, CPU {}", ratio(metrics.memory_pressure_ratio), ratio(metrics.cpu_pressure_ratio));
    if let Some(left) = metrics.unmerge_headroom_bytes {
        text.push_str(&format!("   Headroom {}", size(left)));
    }
    if let Some(seconds) = metrics.unmerge_headroom_seconds {
        let rate = size(metrics.unmerge_bytes_per_second as u64);
        text.push_str(&format!(
            ", {} at {rate}/s",
            length(Duration::try_from_secs_f64(seconds).unwrap_or(Duration::MAX))
        ));
    }
    text
}

fn warnings(status: &Status) -> Vec<String> {
    let mut warnings: Vec<String> = status.paused.iter().map(|why| format!("paused: {why}")).collect();
    let paused =
        |domain: &control::DomainStatus| Some(format!("domain {} paused: {}", domain.name, domain.paused.as_ref()?));
    warnings.extend(status.domains.iter().filter_map(paused));
    if status.paused.is_none() && status.metrics.unmerge_headroom_bytes.is_some_and(|left| left < 0) {
        warnings.push("headroom is short: not enough memory if all shared pages were written; add swap space".into());
    }
    let refused =
        |refused: &control::RefusedStatus| format!("refused {} {}: {}", refused.name, refused.pid, refused.reason);
    warnings.extend(status.refused.iter().map(refused));
    warnings.iter().map(|text| printable(text)).collect()
}

/// Over how long a graph goes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Span(usize);

impl Default for Span {
    fn default() -> Self {
        Span(1)
    }
}

impl Span {
    const MINUTES: [u64; 6] = [1, 5, 15, 60, 360, 1440];

    /// How long that is.
    pub fn length(self) -> Duration {
        Duration::from_secs(60 * Self::MINUTES[self.0])
    }

    /// A longer (1) or shorter (-1) one, if there is one.
    pub fn change(self, step: isize) -> Span {
        Span(self.0.saturating_add_signed(step).min(Self::MINUTES.len() - 1))
    }
}

/// A graph of `width` columns that ends at `end`: the mean of each column's moments. `None`: there
/// is nothing to show, as while the daemon was away.
pub fn graph(recording: &Recording, end: i64, span: Span, width: usize, of: fn(&Summary) -> f64) -> Vec<Option<f64>> {
    let span = span.length().as_millis() as i64;
    let start = end - span;
    let width = width.max(1);
    let mut sums = vec![(0.0, 0u32); width];
    let mut away = vec![false; width];
    let first = recording.find(start);
    for at in first..recording.len() {
        let (Some(time), Some(summary)) = (recording.time(at), recording.summary(at)) else { break };
        if time > end {
            break;
        }
        let column = ((time - start).max(0) as usize * width / (span as usize + 1)).min(width - 1);
        let value = of(summary);
        if time >= start && value.is_finite() {
            sums[column].0 += value;
            sums[column].1 += 1;
        } else if time >= start {
            away[column] = true;
        }
    }
    // Between two moments that are further apart than a column is wide, the earlier one holds.
    let mut last = None;
    let begins = recording.time(0).unwrap_or(end);
    let mut out = Vec::with_capacity(width);
    for (column, (sum, count)) in sums.into_iter().enumerate() {
        if count > 0 {
            last = Some(sum / f64::from(count));
        } else if away[column] {
            last = None;
        }
        let over = start + span * (column as i64 + 1) / width as i64;
        out.push(last.filter(|_| over >= begins));
    }
    out
}
