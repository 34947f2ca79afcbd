//! `pageone snapshot prune`: removes snapshots that no rule keeps.

use std::collections::BTreeMap;

use anyhow::{Result, ensure};
use checkpoint::Catalog;
use mpool::Access;
use serde_json::json;
use snapshot::keep::Rule;

use crate::cmd::Json;
use crate::cmd::pool::{Names, keepers, kept};
use crate::exit::{Code, Coded};

/// Options of `pageone snapshot prune`.
#[derive(clap::Args)]
pub(crate) struct Args {
    #[command(flatten)]
    names: Names,
    /// Pool: name, or path of its capacity class
    pool: String,
    /// Keep the last N snapshots of each guest
    #[arg(long, value_name = "N", default_value_t = 0)]
    keep_last: usize,
    /// Keep the last snapshot of each of the last N hours that have one
    #[arg(long, value_name = "N", default_value_t = 0)]
    keep_hourly: usize,
    /// The same with days
    #[arg(long, value_name = "N", default_value_t = 0)]
    keep_daily: usize,
    /// The same with weeks, which begin on Monday
    #[arg(long, value_name = "N", default_value_t = 0)]
    keep_weekly: usize,
    /// The same with months
    #[arg(long, value_name = "N", default_value_t = 0)]
    keep_monthly: usize,
    /// Say what would be removed, and remove nothing
    #[arg(long)]
    dry_run: bool,
    #[command(flatten)]
    json: Json,
}

/// Removes what is not kept. Snapshots of one guest are those with the same `-name` and `-uuid`;
/// without both, those of the same process.
pub(super) fn run(args: &Args) -> Result<()> {
    let rule = Rule {
        last: args.keep_last,
        hourly: args.keep_hourly,
        daily: args.keep_daily,
        weekly: args.keep_weekly,
        monthly: args.keep_monthly,
    };
    let says = "say what to keep, with --keep-last, --keep-hourly, --keep-daily, --keep-weekly or --keep-monthly";
    ensure!(rule != Rule::default(), Coded(Code::Usage, says.into()));
    let access = if args.dry_run { Access::Shared } else { Access::Exclusive };
    let pool = args.names.open_soon(&args.pool, access)?;
    let mut catalog = Catalog::open(&pool)?;
    let mut guests: BTreeMap<String, Vec<(String, u64)>> = BTreeMap::new();
    let (mut stay, mut removed) = (Vec::new(), Vec::new());
    for (checkpoint, record) in super::all(&catalog) {
        let name = checkpoint.name.clone();
        // Nobody knows of which guest a damaged one is: it stays.
        let Ok(record) = record else {
            stay.push(name);
            continue;
        };
        let guest = record.description.guest().unwrap_or_else(|| checkpoint.source.clone());
        guests.entry(guest).or_default().push((name, checkpoint.created));
    }
    for all in guests.into_values() {
        let created: Vec<u64> = all.iter().map(|(_, created)| *created).collect();
        let keeps = rule.keeps(&created);
        for (at, (name, _)) in all.into_iter().enumerate() {
            if keeps.contains(&at) { stay.push(name) } else { removed.push(name) }
        }
    }
    let mut failed = None;
    if !args.dry_run {
        let done = removed.iter().take_while(|name| catalog.remove(name).map_err(|error| failed = Some(error)).is_ok());
        removed.truncate(done.count());
    }
    let keepers = if removed.is_empty() || args.dry_run { Vec::new() } else { keepers(&pool) };
    kept(&keepers).iter().for_each(|kept| output::note!("{kept}"));
    let value = json!({ "kept": stay, "removed": removed, "dry_run": args.dry_run, "kept_by": keepers });
    args.json.line(&value, || {
        let (word, all) = if args.dry_run { ("would remove", "would be removed") } else { ("removed", "removed") };
        let each: String = removed.iter().map(|name| format!("{word} {name}\n")).collect();
        format!("{each}{} kept, {} {all}", stay.len(), removed.len())
    })?;
    // What was removed before is said.
    failed.map_or(Ok(()), |error| Err(error.into()))
}
