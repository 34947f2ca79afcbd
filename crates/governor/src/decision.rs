//! A decision, and its reason in words and numbers.

use std::fmt;
use std::time::Duration;

/// Why a batch has this number of pages.
#[derive(Copy, Clone, PartialEq, Debug)]
pub enum Cause {
    /// The governor has begun, and has not seen a scan yet.
    Began {
        /// Pages that are known to be candidates.
        candidates: u64,
    },
    /// A whole scan ended.
    ScanEnded {
        /// How long it took, in seconds.
        took: f64,
    },
    /// The scan under way goes on beyond the expected work, so there is more work than in the last
    /// scan.
    MoreWork {
        /// How long the scan has taken so far, in seconds.
        so_far: f64,
    },
    /// The CPU limit binds.
    CpuLimit,
    /// The CPU limit no longer binds.
    CpuLimitOver,
    /// In the middle of a scan, without a change.
    Unchanged,
}

/// How the scanner is to go on.
#[derive(Copy, Clone, PartialEq, Debug)]
pub struct Decision {
    /// Pages of a batch; 0 stops the scanner.
    pub pages: u32,
    /// Pages of a batch before this decision.
    pub before: u32,
    /// When to look again at the latest.
    pub check_after: Duration,
    /// The reason.
    pub cause: Cause,
    /// Percent of a CPU over the last ten seconds.
    pub cpu_percent: f64,
    /// The CPU limit, in percent of a CPU.
    pub max_cpu: f64,
    /// The target, in seconds.
    pub target: f64,
    /// The bound that the number of pages has reached, if any: the minimum, the maximum, or the CPU
    /// limit.
    pub bound: Option<&'static str>,
}

impl Decision {
    /// Whether the number of pages changes.
    pub fn changes(&self) -> bool {
        self.pages != self.before
    }
}

impl fmt::Display for Decision {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let target = self.target;
        match self.cause {
            Cause::Began { candidates } => {
                write!(f, "began with {candidates} candidates known and a target of {target} s; ")?;
            }
            Cause::ScanEnded { took } => write!(f, "scan took {took:.2} s for a target of {target} s; ")?,
            Cause::MoreWork { so_far } => {
                write!(f, "more work than in the last scan, {so_far:.2} s into a target of {target} s; ")?;
            }
            Cause::CpuLimit => f.write_str("the CPU limit binds; ")?,
            Cause::CpuLimitOver => f.write_str("the CPU limit no longer binds; ")?,
            Cause::Unchanged => {}
        }
        match (self.before, self.pages) {
            (before, 0) if before > 0 => write!(f, "stopped for a moment, from {before} pages")?,
            (before, pages) if before < pages => write!(f, "raised {before} → {pages} pages")?,
            (before, pages) if before > pages => write!(f, "lowered {before} → {pages} pages")?,
            (_, pages) => write!(f, "kept {pages} pages")?,
        }
        if let Some(bound) = self.bound {
            write!(f, " ({bound})")?;
        }
        write!(f, "; CPU {:.1} % of {} %", self.cpu_percent, self.max_cpu)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reasons_have_words_and_figures() {
        let decision = Decision {
            pages: 1580,
            before: 1200,
            check_after: Duration::from_secs(1),
            cause: Cause::ScanEnded { took: 41.0 },
            cpu_percent: 12.04,
            max_cpu: 20.0,
            target: 30.0,
            bound: None,
        };
        assert_eq!(
            decision.to_string(),
            "scan took 41.00 s for a target of 30 s; raised 1200 → 1580 pages; CPU 12.0 % of 20 %"
        );
        let stopped = Decision { pages: 0, cause: Cause::CpuLimit, ..decision };
        assert_eq!(
            stopped.to_string(),
            "the CPU limit binds; stopped for a moment, from 1200 pages; CPU 12.0 % of 20 %"
        );
        let least = Decision { pages: 500, before: 500, bound: Some("the minimum"), ..decision };
        assert!(least.to_string().contains("kept 500 pages (the minimum)"));
    }
}
