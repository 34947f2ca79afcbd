//! What the kernel's tracepoints tell of KVM guests, as histograms that the kernel itself keeps
//! (Documentation/trace/histogram.rst):
//!
//! - who takes guests' memory out of their stage-2 page tables (`kvm_unmap_hva_range`);
//! - how long virtual CPUs wait for it to come back: from `kvm_page_fault` to `kvm_entry`.

use std::collections::BTreeMap;
use std::fs;
use std::io::Write;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result};

/// Where tracing is mounted.
const TRACING: &str = "/sys/kernel/tracing";
/// A synthetic event, for the time of a fault.
const FAULT_TIME: &str = "pageone_fault_time";
const TRIGGERS: [(&str, &str); 4] = [
    ("kvm/kvm_unmap_hva_range", "hist:keys=common_pid.execname:vals=start,end"),
    ("kvm/kvm_page_fault", "hist:keys=common_pid:begin=common_timestamp.usecs"),
    (
        "kvm/kvm_entry",
        "hist:keys=common_pid:time=common_timestamp.usecs-$begin:onmatch(kvm.kvm_page_fault).pageone_fault_time($time)",
    ),
    ("synthetic/pageone_fault_time", "hist:keys=time:size=65536"),
];
/// The first and the last of them are read.
const INVALIDATED: &str = TRIGGERS[0].0;
const TIMES: &str = TRIGGERS[3].0;

/// Calls of MMU notifiers that concern a guest, and the pages in their ranges.
#[derive(Clone, Copy, Default, Debug, PartialEq, Eq)]
pub(crate) struct Invalidations {
    pub(crate) calls: u64,
    pub(crate) pages: u64,
}

/// What was counted from the beginning on.
#[derive(Clone, Default)]
pub(crate) struct Counted {
    /// By the names of threads, without the numbers at their ends.
    invalidations: BTreeMap<String, Invalidations>,
    /// Faults in stage-2 page tables by their time, in microseconds.
    fault_times: BTreeMap<u64, u64>,
}

impl Counted {
    /// What was added since an earlier reading.
    pub(crate) fn since(&self, before: &Self) -> Self {
        let mut since = self.clone();
        for (name, before) in &before.invalidations {
            if let Some(now) = since.invalidations.get_mut(name) {
                now.calls -= before.calls;
                now.pages -= before.pages;
            }
        }
        for (time, before) in &before.fault_times {
            if let Some(now) = since.fault_times.get_mut(time) {
                *now -= before;
            }
        }
        since
    }

    /// Invalidations by the threads with this name, or by all.
    pub(crate) fn invalidations(&self, name: Option<&str>) -> Invalidations {
        let wanted = self.invalidations.iter().filter(|(thread, _)| name.is_none_or(|name| name == thread.as_str()));
        wanted.fold(Invalidations::default(), |sum, (_, count)| Invalidations {
            calls: sum.calls + count.calls,
            pages: sum.pages + count.pages,
        })
    }

    /// The time within which this part of the faults was served, in microseconds. `None`: there
    /// were no faults.
    pub(crate) fn fault_time(&self, part: f64) -> Option<u64> {
        let all: u64 = self.fault_times.values().sum();
        let mut left = (all as f64 * part).ceil() as u64;
        let reaches = |&(_, &faults): &(&u64, &u64)| {
            let enough = left <= faults;
            left = left.saturating_sub(faults);
            enough
        };
        self.fault_times.iter().filter(|(_, faults)| **faults > 0).find(reaches).map(|(&time, _)| time)
    }
}

/// Counts while it lives, in a trace instance of its own.
pub(crate) struct Tracing {
    instance: PathBuf,
}

impl Tracing {
    /// Begins to count.
    ///
    /// # Errors
    ///
    /// Tracefs is not mounted, or the kernel lacks a tracepoint or histograms.
    pub(crate) fn begin() -> Result<Self> {
        let events = Path::new(TRACING).join("synthetic_events");
        let write = |path: &Path, text: &str| {
            let file = fs::OpenOptions::new().append(true).open(path);
            file.and_then(|mut file| file.write_all(text.as_bytes()))
                .with_context(|| format!("cannot write {text:?} to {}", path.display()))
        };
        write(&events, &format!("{FAULT_TIME} u64 time\n"))?;
        let instance = PathBuf::from(format!("{TRACING}/instances/pageone-bench-{}", std::process::id()));
        fs::create_dir(&instance).with_context(|| format!("cannot create {}", instance.display()))?;
        let tracing = Self { instance };
        TRIGGERS.iter().try_for_each(|(event, trigger)| write(&tracing.event(event).join("trigger"), trigger))?;
        Ok(tracing)
    }

    fn event(&self, name: &str) -> PathBuf {
        self.instance.join("events").join(name)
    }

    /// What was counted until now.
    pub(crate) fn read(&self) -> Result<Counted> {
        let histogram = |event| {
            let path = self.event(event).join("hist");
            fs::read_to_string(&path).with_context(|| format!("cannot read {}", path.display()))
        };
        Ok(Counted {
            invalidations: invalidations(&histogram(INVALIDATED)?),
            fault_times: fault_times(&histogram(TIMES)?),
        })
    }
}

impl Drop for Tracing {
    fn drop(&mut self) {
        // What fails here stays until the next boot, and costs next to nothing.
        for (event, trigger) in TRIGGERS.iter().rev() {
            let _ = fs::write(self.event(event).join("trigger"), format!("!{trigger}"));
        }
        let _ = fs::remove_dir(&self.instance);
        let events = fs::OpenOptions::new().append(true).open(Path::new(TRACING).join("synthetic_events"));
        let _ = events.and_then(|mut events| events.write_all(format!("!{FAULT_TIME}\n").as_bytes()));
    }
}

/// The lines of a histogram, `{ KEY } hitcount: 5  VALUE: 8192  VALUE: 28672`: key and numbers.
fn lines(histogram: &str) -> impl Iterator<Item = (&str, Vec<u64>)> {
    histogram.lines().filter_map(|line| {
        let (key, values) = line.trim().strip_prefix('{')?.split_once("} hitcount:")?;
        Some((key.trim(), values.split_whitespace().filter_map(|word| word.parse().ok()).collect()))
    })
}

/// Keys are `common_pid: merge-0         [    123]`. Both values are sums, which wrap around.
fn invalidations(histogram: &str) -> BTreeMap<String, Invalidations> {
    let mut counts = BTreeMap::<String, Invalidations>::new();
    for (key, values) in lines(histogram) {
        let name = key.strip_prefix("common_pid:").and_then(|name| name.rsplit_once('['));
        let (Some((name, _)), &[calls, start, end]) = (name, values.as_slice()) else { continue };
        let name = name.trim().trim_end_matches(|c: char| c.is_ascii_digit() || c == '-');
        let count = counts.entry(name.to_owned()).or_default();
        count.calls += calls;
        count.pages += end.wrapping_sub(start) / kmem::PAGE_SIZE as u64;
    }
    counts
}

/// Keys are `time:         12`.
fn fault_times(histogram: &str) -> BTreeMap<u64, u64> {
    let time = |key: &str| key.strip_prefix("time:")?.trim().parse().ok();
    lines(histogram).filter_map(|(key, values)| Some((time(key)?, *values.first()?))).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn invalidations_are_added_up_by_the_names_of_threads() {
        let histogram = "# event histogram\n#\n\n\
            { common_pid: merge-0         [       239] } hitcount:          2  start:       8192  end:      28672\n\
            { common_pid: merge-1         [       240] } hitcount:          1  start: 18446744073709547520  end:       4096\n\
            { common_pid: pageone-agent   [       250] } hitcount:         10  start:          0  end:      40960\n\n\
            Totals:\n    Hits: 13\n";
        let counted = Counted { invalidations: invalidations(histogram), ..Counted::default() };
        let count = |calls, pages| Invalidations { calls, pages };
        let of = |name| counted.invalidations(name);
        assert_eq!(
            [of(Some("merge")), of(Some("pageone-agent")), of(None)],
            [count(3, 7), count(10, 10), count(13, 17)]
        );
        assert_eq!(counted.since(&counted).invalidations(None), count(0, 0));
    }

    #[test]
    fn times_of_faults_have_percentiles() {
        let histogram = "{ time:          9 } hitcount:          1\n{ time:         20 } hitcount:         98\n\
            { time:       1000 } hitcount:          1\n";
        let counted = Counted { fault_times: fault_times(histogram), ..Counted::default() };
        let times = [0.0, 0.01, 0.02, 0.99, 0.999].map(|part| counted.fault_time(part));
        assert_eq!(times, [9, 9, 20, 20, 1000].map(Some));
        assert_eq!(counted.since(&counted).fault_time(0.5), None);
    }
}
