//! The status as text, for people.

use std::fmt::{self, Display, Formatter};
use std::time::Duration;

use output::text::printable;

use crate::metrics::{Metric, Scope, Unit, Value};
use crate::states::RecyclerState;
use crate::status::{ClientStatus, DomainStatus, RecycleStatus, RefusedStatus, Status};
use crate::table::columns;
use crate::units::{length, size};

const PAGE: u64 = kmem::PAGE_SIZE as u64;
/// Indents a remark about a client to the column of its program.
const REMARK: &str = "           ";

/// Columns of a client's line: those of memory, mappings and CPU time.
const COLUMNS: usize = 9;
/// Characters of the columns beside them: process, guest and the longest state, with their gaps.
const OTHERS: usize = 2 + 8 + 1 + 20 + 2 + "disconnected".len();

impl Status {
    /// The text on a terminal of this width: without the columns that do not fit, of which the last
    /// of the table go first, as in `top`; longer lines are broken.
    pub fn within(&self, width: usize) -> String {
        output::text::fit(&format!("{self:width$}"), width)
    }
}

/// The metrics that a client's line of this width has room for.
fn shown(width: Option<usize>) -> impl Iterator<Item = &'static Metric> {
    let mut left = width.unwrap_or(usize::MAX).saturating_sub(OTHERS);
    columns().take(COLUMNS).take_while(move |metric| {
        let fits = metric.width < left;
        left = left.saturating_sub(metric.width + 1);
        fits
    })
}

/// Memory of so many pages.
fn pages(pages: u64) -> String {
    size(pages.saturating_mul(PAGE))
}

/// `name value` of the metrics that the host sums up over its domains.
struct Summary(Vec<(&'static Metric, Value)>);

impl Summary {
    fn collect(&mut self, metric: &'static Metric, value: Value) {
        if metric.is_sum_in(Scope::Host) && metric.is_in(Scope::Domain) {
            self.0.push((metric, value));
        }
    }
}

impl Display for Summary {
    fn fmt(&self, f: &mut Formatter<'_>) -> fmt::Result {
        for (at, (metric, value)) in self.0.iter().enumerate() {
            let separator = if at == 0 { "" } else { " · " };
            write!(f, "{separator}{} ", metric.name)?;
            match (metric.unit, *value) {
                (Unit::Bytes, Value::Signed(bytes)) => size(bytes).fmt(f)?,
                (Unit::Bytes, Value::Unsigned(bytes)) => size(bytes).fmt(f)?,
                (_, value) => value.fmt(f)?,
            }
        }
        Ok(())
    }
}

impl Display for Status {
    /// Several lines, with line ends. The format's width bounds the columns, not the other lines.
    fn fmt(&self, f: &mut Formatter<'_>) -> fmt::Result {
        let metrics = &self.metrics;
        writeln!(
            f,
            "up {} · merge period {} s · CPU {:.2} s (daemon) + {:.2} s (agents) · merged so far {} pages",
            seconds(metrics.uptime_seconds),
            metrics.merge_period_seconds,
            metrics.daemon_cpu_seconds,
            metrics.agent_cpu_seconds,
            metrics.pages_merged_total
        )?;
        let short = if self.governor.metrics.memory_is_short { " (memory is short)" } else { "" };
        writeln!(f, "governor, mode {}: {}{short}", self.governor.mode, self.governor.reason)?;
        let mut summary = Summary(Vec::new());
        metrics.for_each_metric(&mut |metric, value| summary.collect(metric, value));
        writeln!(f, "{summary}")?;
        if let Some(left) = metrics.unmerge_headroom_bytes {
            let needed = size(metrics.unmerge_bytes);
            match left {
                0.. => {
                    writeln!(f, "headroom {}: if all that is merged were written, it would take {needed}", size(left))?
                }
                _ => writeln!(
                    f,
                    "headroom SHORT of {}: if all that is merged were written, it would take {needed}; add swap space, or stop \
                     guests",
                    size(left.unsigned_abs())
                )?,
            }
        }
        if let Some(left) = metrics.unmerge_headroom_seconds {
            let (rate, left) = (size(metrics.unmerge_bytes_per_second as u64), seconds(left));
            writeln!(f, "writes to merged pages take {rate}/s, as over the last minute: memory for {left}")?;
        }
        if let Some(why) = &self.paused {
            writeln!(f, "PAUSED: {why}")?;
        }
        if let Some(why) = &self.no_agents {
            writeln!(f, "no agents: {why}")?;
        }
        self.domains.iter().try_for_each(|domain| domain_text(f, domain))?;
        if !self.refused.is_empty() {
            writeln!(f, "\nrefused")?;
        }
        self.refused.iter().try_for_each(|refused| refused_text(f, refused))?;
        match self.refused_left_out {
            0 => Ok(()),
            more => writeln!(f, "  and {more} more"),
        }
    }
}

fn seconds(seconds: f64) -> String {
    length(Duration::try_from_secs_f64(seconds).unwrap_or(Duration::MAX))
}

fn refused_text(f: &mut Formatter<'_>, refused: &RefusedStatus) -> fmt::Result {
    let RefusedStatus { uid, pid, name, reason, times } = refused;
    let times = if *times > 1 { format!(" ({times} times)") } else { String::new() };
    writeln!(f, "  {pid:>8} {:<20.20} uid {uid}: {}{times}", printable(name), printable(reason))
}

fn domain_text(f: &mut Formatter<'_>, domain: &DomainStatus) -> fmt::Result {
    let metrics = &domain.metrics;
    write!(f, "\ndomain {} · store {} in {} segments", domain.name, size(metrics.store_bytes), metrics.segments)?;
    if metrics.frame_bytes > 0 {
        write!(f, " · frames of files {}", size(metrics.frame_bytes))?;
    }
    writeln!(f)?;
    let mut summary = Summary(Vec::new());
    metrics.for_each_metric(&mut |metric, value| summary.collect(metric, value));
    writeln!(f, "  {summary}")?;
    if let Some(why) = &domain.paused {
        writeln!(f, "  PAUSED: {why}")?;
    }
    if domain.clients.is_empty() {
        return Ok(());
    }
    write!(f, "  {:>8} {:<20}", "PID", "guest")?;
    shown(f.width()).try_for_each(|metric| write!(f, " {:>1$}", metric.title, metric.width))?;
    writeln!(f, "  state")?;
    domain.clients.iter().try_for_each(|client| client_text(f, client))
}

fn client_text(f: &mut Formatter<'_>, client: &ClientStatus) -> fmt::Result {
    let metrics = &client.metrics;
    write!(f, "  {:>8} {:<20.20}", client.pid, printable(client.called()))?;
    for metric in shown(f.width()) {
        let text = metrics.value(metric).map(|value| metric.unit.short(value.real())).unwrap_or_default();
        write!(f, " {text:>0$}", metric.width)?;
    }
    writeln!(f, "  {}", client.state)?;
    if client.called() != client.name {
        let uuid = client.own_uuid.as_ref().map_or_else(String::new, |uuid| format!(", UUID {uuid}"));
        writeln!(f, "{REMARK}{}", printable(&format!("program {}{uuid}", client.name)))?;
    }
    if let Some(manager) = &client.manager {
        let words = [Some(manager), client.guest_name.as_ref(), client.guest.as_ref()];
        let words = words.into_iter().flatten().map(|word| printable(word)).collect::<Vec<_>>().join(" ");
        writeln!(f, "{REMARK}{words}: {}", printable(&client.rule))?;
    }
    for (about, text) in client.remarks.told() {
        writeln!(f, "{REMARK}{about}: {}", printable(text))?;
    }
    if let Some(why) = client.why.as_ref().filter(|why| !why.code.has_own_line()) {
        writeln!(f, "{REMARK}{}: {}", why.code, printable(&why.text))?;
    }
    if let Some(recycling) = &client.recycling {
        recycling_text(f, metrics.pages_recycled, recycling)?;
    }
    if metrics.pages_discarded_total > 0 {
        let given = pages(metrics.pages_discarded_total);
        writeln!(f, "{REMARK}{given} given back by the program itself (free page reporting, balloon)")?;
    }
    if metrics.pages_kept_huge > 0 {
        let left = pages(metrics.pages_kept_huge);
        writeln!(f, "{REMARK}{left} more could be merged and are left in huge pages (huge_page_share)")?;
    }
    if metrics.max_map_count_binds {
        let remedy = format!("`sysctl vm.max_map_count={}` would let more in", kmem::procfs::ADVISED_MAP_COUNT);
        writeln!(f, "{REMARK}vm.max_map_count binds: only long runs are merged; {remedy}")?;
    }
    Ok(())
}

/// `now`: pages that are taken back at present.
fn recycling_text(f: &mut Formatter<'_>, now: u64, recycling: &RecycleStatus) -> fmt::Result {
    let metrics = &recycling.metrics;
    match (recycling.state, &recycling.why) {
        (RecyclerState::Starting, _) => writeln!(f, "{REMARK}free pages: asking QEMU where the guest's memory lies"),
        (state, Some(why)) => writeln!(f, "{REMARK}free pages {state}: {why}"),
        (RecyclerState::Paused, _) => {
            writeln!(f, "{REMARK}free pages paused: the device is not plugged in (`pageone ppr resume`)")
        }
        _ => writeln!(
            f,
            "{REMARK}free pages: {} taken back of {} · {}/s · {} in all, {:.2} µs a page · {} runs · period {} s",
            pages(now),
            size(metrics.managed_bytes),
            pages(metrics.pages_recycled_per_second as u64),
            pages(metrics.pages_recycled_total),
            metrics.sweep_seconds * 1e6 / metrics.pages_recycled_total.max(1) as f64,
            metrics.runs_total,
            metrics.reclaim_period_seconds
        ),
    }
}

#[cfg(test)]
mod tests;
