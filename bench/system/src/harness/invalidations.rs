//! Who takes guests' memory out of their stage-2 page tables: a histogram of KVM's tracepoint
//! `kvm_unmap_hva_range`, by the name of the thread (Documentation/trace/histogram.rst).

use std::collections::BTreeMap;
use std::fs;
use std::path::PathBuf;

use anyhow::{Context, Result};

/// Where tracing is mounted.
const TRACING: &str = "/sys/kernel/tracing";
const HISTOGRAM: &str = "hist:keys=common_pid.execname:vals=start,end";

/// Calls of MMU notifiers that concern a guest, and the pages in their ranges.
#[derive(Clone, Copy, Default, Debug, PartialEq, Eq)]
pub(crate) struct Count {
    pub(crate) calls: u64,
    pub(crate) pages: u64,
}

impl Count {
    /// What was added since an earlier reading.
    pub(crate) fn since(self, before: Self) -> Self {
        Self { calls: self.calls - before.calls, pages: self.pages - before.pages }
    }
}

/// Of the threads with this name, or of all.
pub(crate) fn count(counts: &BTreeMap<String, Count>, name: Option<&str>) -> Count {
    counts.iter().filter(|(thread, _)| name.is_none_or(|name| name == thread.as_str())).fold(
        Count::default(),
        |sum, (_, count)| Count { calls: sum.calls + count.calls, pages: sum.pages + count.pages },
    )
}

/// Counts from its beginning on, in a trace instance of its own.
pub(crate) struct Invalidations {
    instance: PathBuf,
}

impl Invalidations {
    /// Begins to count. `None`: the kernel has no such tracepoint or no histograms, or tracefs is
    /// not mounted.
    pub(crate) fn watch() -> Option<Self> {
        let instance = PathBuf::from(format!("{TRACING}/instances/pageone-bench-{}", std::process::id()));
        fs::create_dir(&instance).ok()?;
        let watch = Self { instance };
        fs::write(watch.event().join("trigger"), HISTOGRAM).ok()?;
        Some(watch)
    }

    fn event(&self) -> PathBuf {
        self.instance.join("events/kvm/kvm_unmap_hva_range")
    }

    /// What was counted until now, by the names of threads, without the numbers at their ends.
    pub(crate) fn read(&self) -> Result<BTreeMap<String, Count>> {
        let path = self.event().join("hist");
        Ok(counts(&fs::read_to_string(&path).with_context(|| format!("cannot read {}", path.display()))?))
    }
}

impl Drop for Invalidations {
    fn drop(&mut self) {
        // What fails here stays until the next boot, and costs next to nothing.
        let _ = fs::write(self.event().join("trigger"), format!("!{HISTOGRAM}"));
        let _ = fs::remove_dir(&self.instance);
    }
}

/// Lines are `{ common_pid: merge-0         [    123] } hitcount: 5  start: 8192  end: 28672`; `start`
/// and `end` are sums, which wrap around.
fn counts(histogram: &str) -> BTreeMap<String, Count> {
    let mut counts = BTreeMap::<String, Count>::new();
    for line in histogram.lines() {
        let Some((key, values)) = line.split_once("} hitcount:") else { continue };
        let Some((name, _)) = key.split_once("common_pid:").and_then(|(_, name)| name.rsplit_once('[')) else {
            continue;
        };
        let mut numbers = values.split_whitespace().filter_map(|word| word.parse::<u64>().ok());
        let (Some(calls), Some(start), Some(end)) = (numbers.next(), numbers.next(), numbers.next()) else { continue };
        let name = name.trim().trim_end_matches(|c: char| c.is_ascii_digit() || c == '-');
        let count = counts.entry(name.to_owned()).or_default();
        count.calls += calls;
        count.pages += end.wrapping_sub(start) / kmem::PAGE_SIZE as u64;
    }
    counts
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_histogram_is_added_up_by_the_names_of_threads() {
        let histogram = "# event histogram\n#\n\n\
            { common_pid: merge-0         [       239] } hitcount:          2  start:       8192  end:      28672\n\
            { common_pid: merge-1         [       240] } hitcount:          1  start: 18446744073709547520  end:       4096\n\
            { common_pid: pageone-agent   [       250] } hitcount:         10  start:          0  end:      40960\n\n\
            Totals:\n    Hits: 13\n";
        let count = |calls, pages| Count { calls, pages };
        let expected = [("merge", count(3, 7)), ("pageone-agent", count(10, 10))];
        assert_eq!(counts(histogram), expected.map(|(name, count)| (name.to_owned(), count)).into());
    }
}
