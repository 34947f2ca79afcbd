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
    /// Several lines, with line ends.
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
        self.refused.iter().try_for_each(|refused| refused_text(f, refused))
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
    columns().take(COLUMNS).try_for_each(|metric| write!(f, " {:>1$}", metric.title, metric.width))?;
    writeln!(f, "  state")?;
    domain.clients.iter().try_for_each(|client| client_text(f, client))
}

fn client_text(f: &mut Formatter<'_>, client: &ClientStatus) -> fmt::Result {
    let metrics = &client.metrics;
    write!(f, "  {:>8} {:<20.20}", client.pid, printable(client.called()))?;
    for metric in columns().take(COLUMNS) {
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
        let remedy = "`sysctl vm.max_map_count=1048576` would let more in";
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
mod tests {
    use super::*;
    use crate::{ClientMetrics, HostMetrics, Remarks, Why};

    #[test]
    fn the_text_names_what_keeps_memory_from_merging() {
        let dropped = RecycleStatus {
            state: RecyclerState::Dropped,
            why: Some("overwritten".into()),
            ..RecycleStatus::default()
        };
        let metrics = ClientMetrics { max_map_count_binds: true, pages_kept_huge: 1280, ..ClientMetrics::default() };
        let client = ClientStatus {
            recycling: Some(dropped),
            pid: 42,
            name: "qemu".into(),
            remarks: Remarks {
                refused: Some("its memory is locked".into()),
                unknown: Some("no file".into()),
                outdated: Some("it is older".into()),
                ..Remarks::default()
            },
            manager: Some("libvirt".into()),
            guest: Some("123".into()),
            guest_name: Some("web\n1".into()),
            own_uuid: Some("1-A\u{1b}".into()),
            rule: "default: by slice".into(),
            why: Some(Why { code: crate::Reason::Volatile, text: "it changes".into() }),
            metrics,
            ..ClientStatus::default()
        };
        let domain = DomainStatus { paused: Some("no room".into()), clients: vec![client], ..DomainStatus::default() };
        let refused = RefusedStatus { uid: 7, pid: 43, name: "bad\u{1b}".into(), reason: "it lied".into(), times: 3 };
        let out = Status { domains: vec![domain], refused: vec![refused], ..Status::default() }.to_string();
        for part in [
            "dropped: overwritten",
            "PAUSED: no room",
            "not merged: its memory is locked",
            "vm.max_map_count",
            "5 MiB more could be merged",
            "42 web1  ",
            "program qemu, UUID 1-A\n",
            "libvirt web1 123: default: by slice\n",
            "guest not known: no file",
            "its agent is of another build: it is older",
            "volatile: it changes",
            "43 bad                  uid 7: it lied (3 times)\n",
        ] {
            assert!(out.contains(part), "{part} in {out}");
        }
    }

    #[test]
    fn the_summary_lists_what_the_host_sums_over_its_domains() {
        let metrics = HostMetrics { pages_sharing: 7, general_profit: -(3 << 20), ..HostMetrics::default() };
        let headroom = |left| {
            let metrics =
                HostMetrics { unmerge_headroom_bytes: left, unmerge_bytes: 9 << 20, ..HostMetrics::default() };
            Status { metrics, ..Status::default() }.to_string()
        };
        assert!(
            headroom(Some(5 << 20))
                .contains("headroom 5 MiB: if all that is merged were written, it would take 9 MiB\n")
        );
        let short = HostMetrics {
            unmerge_headroom_seconds: Some(90.0),
            unmerge_bytes_per_second: 3.0 * f64::from(1 << 20),
            ..HostMetrics::default()
        };
        let (paused, no_agents) = (Some("it is short".into()), Some("it is old".into()));
        let paused = Status { metrics: short, paused, no_agents, ..Status::default() }.to_string();
        assert!(
            paused.contains(
                "3 MiB/s, as over the last minute: memory for 90 s\nPAUSED: it is short\nno agents: it is old\n"
            ),
            "{paused}"
        );
        assert!(headroom(Some(-(5 << 20))).contains("headroom SHORT of 5 MiB: "));
        assert!(!headroom(None).contains("headroom"));
        let out = Status { metrics, ..Status::default() }.to_string();
        assert!(
            out.contains(
                "pages_shared 0 · pages_sharing 7 · pages_zero 0 · pages_recycled 0 · pages_unshared 0 · \
                 pages_volatile 0 · general_profit -3 MiB · store_bytes 0 B · frame_bytes 0 B · frames_doubted_total 0\n"
            ),
            "{out}"
        );
    }
}
