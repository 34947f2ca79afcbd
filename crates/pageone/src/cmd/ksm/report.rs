//! The output of `pageone ksm advise`: a line for each important decision.

use std::time::Duration;

use anyhow::Result;
use governor::{Cause, Decision};
use serde_json::json;

use crate::cmd::Json;

/// Least time between two lines about decisions within a scan, which come many times a second.
const INTERVAL: Duration = Duration::from_secs(1);

/// Prints decisions.
pub(crate) struct Reporter {
    json: Json,
    last: Option<Duration>,
}

impl Reporter {
    pub(crate) fn new(json: Json) -> Self {
        Self { json, last: None }
    }

    /// Prints a decision of this time, measured from the start.
    pub(crate) fn print(&mut self, at: Duration, decision: &Decision) -> Result<()> {
        let due = match decision.cause {
            Cause::Unchanged => return Ok(()),
            Cause::Began { .. } | Cause::ScanEnded { .. } => true,
            _ => self.last.is_none_or(|last| at >= last + INTERVAL),
        };
        if !due {
            return Ok(());
        }
        self.last = Some(at);
        self.json.line(&as_json(at, decision), || format!("{:.1} s: {decision}", at.as_secs_f64()))
    }
}

fn as_json(at: Duration, decision: &Decision) -> serde_json::Value {
    let (cause, seconds) = match decision.cause {
        Cause::Began { .. } => ("began", None),
        Cause::ScanEnded { took } => ("scan_ended", Some(took)),
        Cause::MoreWork { so_far } => ("more_work", Some(so_far)),
        Cause::CpuLimit => ("cpu_limit", None),
        Cause::CpuLimitOver => ("cpu_limit_over", None),
        Cause::Unchanged => ("unchanged", None),
    };
    json!({
        "seconds": at.as_secs_f64(),
        "cause": cause,
        "scan_seconds": seconds,
        "target_seconds": decision.target,
        "pages_before": decision.before,
        "pages_to_scan": decision.pages,
        "bound": decision.bound,
        "cpu_percent": decision.cpu_percent,
        "max_cpu_percent": decision.max_cpu,
        "reason": decision.to_string(),
    })
}
