//! `pageone doctor`: what the kernel and this account must allow, tried for real where that can be
//! done.

mod checks;

use std::path::PathBuf;

use anyhow::Result;
use serde::Serialize;

use crate::{Code, Coded};

/// Options of `pageone doctor`.
#[derive(clap::Args)]
pub(crate) struct Args {
    /// One JSON array of objects: check, verdict, found, remedy
    #[arg(long)]
    json: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
enum Verdict {
    /// As it should be.
    Ok,
    /// Merging runs; something beside it does not.
    Note,
    /// Merging cannot run.
    Missing,
}

#[derive(Debug, Serialize)]
struct Check {
    check: &'static str,
    verdict: Verdict,
    found: String,
    #[serde(skip_serializing_if = "Option::is_none")]
    remedy: Option<String>,
}

/// Prints the checks.
///
/// # Errors
///
/// When a check fails without which merging cannot run.
pub(crate) fn run(args: &Args, dir: Option<PathBuf>) -> Result<()> {
    let checks = checks::all(dir);
    if args.json {
        println!("{}", serde_json::to_string_pretty(&checks)?);
    } else {
        for check in &checks {
            let mark = match check.verdict {
                Verdict::Ok => "ok     ",
                Verdict::Note => "note   ",
                Verdict::Missing => "MISSING",
            };
            print!("{mark}  {:<18} {}", check.check, check.found);
            println!("{}", check.remedy.as_ref().map(|r| format!(" → {r}")).unwrap_or_default());
        }
    }
    let missing = checks.iter().filter(|c| c.verdict == Verdict::Missing).count();
    if missing > 0 {
        let why = format!("{missing} of {} checks failed; merging cannot run here", checks.len());
        return Err(Coded(Code::HostLacks, why).into());
    }
    Ok(())
}
