//! `pageone ksm status`: every statistic of KSM, for the host and for each process.

use std::collections::BTreeMap;
use std::fmt::Write;

use anyhow::{Context, Result};
use control::units::size;
use kmem::ksm::{Ksm, Ksmd, ProcessStat, Snapshot, process_stat};
use serde::Serialize;

use crate::cmd::table::Column::{Number, Text};
use crate::cmd::table::{Table, Tabular};

/// Options of `pageone ksm status`.
#[derive(clap::Args)]
pub(crate) struct Args {
    #[command(flatten)]
    answer: Tabular,
}

/// KSM's state. Names are the kernel's; values that this kernel does not have are missing.
#[derive(Debug, Default, Serialize)]
struct Report {
    settings: BTreeMap<&'static str, String>,
    statistics: BTreeMap<&'static str, i64>,
    /// From `/proc/vmstat`, counted since the system started.
    vmstat: BTreeMap<String, u64>,
    /// Bytes saved less bytes of KSM's metadata.
    net_profit_bytes: i64,
    #[serde(skip_serializing_if = "Option::is_none")]
    ksmd: Option<KsmdReport>,
    processes: Vec<Process>,
    /// Number of processes of other users, which cannot be read.
    processes_not_readable: usize,
}

#[derive(Debug, Serialize)]
struct KsmdReport {
    pid: i32,
    cpu_seconds: f64,
}

#[derive(Debug, Default, Serialize)]
struct Process {
    pid: i32,
    name: String,
    rmap_items: u64,
    merging_pages: u64,
    zero_pages: u64,
    profit_bytes: i64,
    #[serde(skip_serializing_if = "Option::is_none")]
    merge_any: Option<bool>,
    #[serde(skip_serializing_if = "Option::is_none")]
    mergeable: Option<bool>,
}

/// Prints KSM's state.
pub(crate) fn run(args: &Args) -> Result<()> {
    let report = Report::take(&super::open()?)?;
    args.answer.print(&report, |width| report.text(width))
}

impl Report {
    fn take(ksm: &Ksm) -> Result<Self> {
        let stats = ksm.stats().context("cannot read KSM's statistics")?;
        let settings = Snapshot::of(ksm).context("cannot read KSM's settings")?;
        let ksmd = Ksmd::find().ok().flatten();
        let ksmd =
            ksmd.and_then(|ksmd| Some(KsmdReport { pid: ksmd.pid, cpu_seconds: ksmd.cpu_time().ok()?.as_secs_f64() }));
        let (processes, processes_not_readable) = processes()?;
        Ok(Self {
            settings: settings.values().map(|(name, value)| (name, value.to_owned())).collect(),
            statistics: stats.values().collect(),
            vmstat: vmstat(&std::fs::read_to_string("/proc/vmstat").unwrap_or_default()),
            net_profit_bytes: stats.profit(),
            ksmd,
            processes,
            processes_not_readable,
        })
    }

    fn text(&self, width: Option<usize>) -> String {
        let mut out = String::new();
        let line = |out: &mut String, title: &str, values: Vec<(String, String)>| {
            let words: Vec<String> = values.into_iter().map(|(name, value)| format!("{name} {value}")).collect();
            // Writing into a string cannot fail.
            let _ = writeln!(out, "{title}: {}", words.join(" · "));
        };
        let pairs = |map: &BTreeMap<&str, i64>| map.iter().map(|(n, v)| (n.to_string(), v.to_string())).collect();
        line(&mut out, "settings", self.settings.iter().map(|(n, v)| (n.to_string(), v.clone())).collect());
        line(&mut out, "statistics", pairs(&self.statistics));
        line(&mut out, "since boot", self.vmstat.iter().map(|(n, v)| (n.clone(), v.to_string())).collect());
        let _ = writeln!(out, "net profit: {}", size(self.net_profit_bytes));
        if let Some(ksmd) = &self.ksmd {
            let _ = writeln!(out, "ksmd: process {}, {:.2} s of CPU time", ksmd.pid, ksmd.cpu_seconds);
        }
        let numbers = ["known", "merged", "zero", "profit"].map(Number);
        let [known, merged, zero, profit] = numbers;
        let mut table = Table::new([Number("PID"), Text("program"), known, merged, zero, profit, Text("mergeable")]);
        for process in &self.processes {
            let how = match (process.merge_any, process.mergeable) {
                (Some(true), _) => "all",
                (_, Some(false)) => "none",
                (_, Some(true)) => "marked",
                (_, None) => "",
            };
            let [known, merged, zero] =
                [process.rmap_items, process.merging_pages, process.zero_pages].map(|pages| pages.to_string());
            let (pid, profit) = (process.pid.to_string(), size(process.profit_bytes));
            table.row([pid, process.name.clone(), known, merged, zero, profit, how.into()]);
        }
        if !self.processes.is_empty() {
            let _ = write!(out, "\n{}", table.within(width));
        }
        if self.processes_not_readable > 0 {
            let _ =
                writeln!(out, "not readable here, but for root: processes of others, {}", self.processes_not_readable);
        }
        out
    }
}

/// KSM's counters in `/proc/vmstat`: copies of merged pages, copies at swap-in.
fn vmstat(text: &str) -> BTreeMap<String, u64> {
    let pairs = text.lines().filter_map(|line| line.split_once(' '));
    let ours = pairs.filter(|(name, _)| name.split('_').any(|word| word == "ksm"));
    ours.filter_map(|(name, value)| Some((name.to_owned(), value.trim().parse().ok()?))).collect()
}

/// The processes with KSM, those with most profit first, and the number of unreadable processes.
fn processes() -> Result<(Vec<Process>, usize)> {
    let mut all = Vec::new();
    let mut not_readable = 0;
    for entry in std::fs::read_dir("/proc").context("cannot read /proc")?.flatten() {
        let Some(pid) = entry.file_name().to_str().and_then(|name| name.parse().ok()) else { continue };
        match process_stat(pid) {
            Ok(stat) => all.extend(Process::of(pid, &stat)),
            Err(e) if e.kind() == std::io::ErrorKind::PermissionDenied => not_readable += 1,
            // The process has ended, or this kernel has no such file.
            Err(_) => {}
        }
    }
    all.sort_by_key(|process| std::cmp::Reverse(process.profit_bytes));
    Ok((all, not_readable))
}

impl Process {
    /// A process; `None` if it has nothing to do with KSM.
    fn of(pid: i32, stat: &ProcessStat) -> Option<Self> {
        let known = stat.rmap_items.unwrap_or(0);
        if known == 0 && stat.merging_pages.unwrap_or(0) == 0 && stat.mergeable != Some(true) {
            return None;
        }
        let name = std::fs::read_to_string(format!("/proc/{pid}/comm")).unwrap_or_default();
        Some(Self {
            pid,
            name: name.trim_end().to_owned(),
            rmap_items: known,
            merging_pages: stat.merging_pages.unwrap_or(0),
            zero_pages: stat.zero_pages.unwrap_or(0),
            profit_bytes: stat.process_profit.unwrap_or(0),
            merge_any: stat.merge_any,
            mergeable: stat.mergeable,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_the_events_of_ksm_are_taken() {
        let events = vmstat("nr_free_pages 5\nksm_swpin_copy 1\ncow_ksm 23\nnot_ksmall 7\n");
        assert_eq!(
            events.into_iter().collect::<Vec<_>>(),
            [("cow_ksm".to_owned(), 23), ("ksm_swpin_copy".to_owned(), 1)]
        );
    }

    #[test]
    fn files_of_ksm_that_cannot_be_read_are_an_error() {
        let dir = tempfile::tempdir().unwrap();
        let put = |name: &str, text: &str| std::fs::write(dir.path().join(name), text).unwrap();
        put("run", "1");
        let take = || Report::take(&Ksm::at(dir.path()).unwrap());
        assert_eq!(take().unwrap().settings["run"], "1");
        std::fs::create_dir(dir.path().join("max_page_sharing")).unwrap();
        assert_eq!(take().unwrap_err().to_string(), "cannot read KSM's settings");
        put("pages_shared", "many");
        assert_eq!(take().unwrap_err().to_string(), "cannot read KSM's statistics");
    }

    #[test]
    fn a_process_without_ksm_is_left_out_and_one_with_is_shown() {
        assert!(Process::of(1, &ProcessStat { rmap_items: Some(0), ..ProcessStat::default() }).is_none());
        let stat = ProcessStat {
            rmap_items: Some(10),
            merging_pages: Some(6),
            process_profit: Some(3 << 20),
            merge_any: Some(true),
            ..ProcessStat::default()
        };
        let process = Process { name: "qemu".into(), ..Process::of(42, &stat).unwrap() };
        let report = Report {
            processes: vec![process],
            statistics: BTreeMap::from([("pages_shared", 3)]),
            net_profit_bytes: -(1 << 20),
            processes_not_readable: 2,
            ..Report::default()
        };
        let text = report.text(None);
        for part in ["pages_shared 3", "net profit: -1 MiB", "42  qemu", "3 MiB  all", "processes of others, 2"] {
            assert!(text.contains(part), "{part} in {text}");
        }
    }
}
