//! `pageone snapshot prune`: removes snapshots that no rule keeps.

use std::collections::BTreeMap;

use anyhow::{Result, ensure};
use checkpoint::Catalog;
use mpool::Access;
use serde_json::json;
use snapshot::keep::Rule;
use snapshot::record::Guest;

use crate::cmd::Json;
use crate::cmd::pool::{Names, keepers, kept};
use crate::exit::{Code, Coded};

/// Options of `pageone snapshot prune`.
#[derive(clap::Args)]
#[command(
    after_help = "JSON: `kept`, `removed`, `guests`; `images` that are left, with `needed_by` (null: no snapshot of the \
                  pool); `kept_by`: programs that keep the space."
)]
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

/// Removes what is not kept. Each guest is counted for itself ([`Guest`]).
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
    let mut guests: BTreeMap<Guest, Vec<(String, u64)>> = BTreeMap::new();
    let (mut stay, mut removed) = (Vec::new(), Vec::new());
    let all = super::owned(super::all(&catalog));
    for (checkpoint, description) in &all {
        let name = checkpoint.name.clone();
        // Nobody knows of which guest a damaged one is: it stays.
        let Some(description) = description else {
            stay.push(name);
            continue;
        };
        guests.entry(description.guest(&checkpoint.source)).or_default().push((name, checkpoint.created));
    }
    let mut groups = Vec::new();
    for (guest, own) in guests {
        let created: Vec<u64> = own.iter().map(|(_, created)| *created).collect();
        let keeps = rule.keeps(&created);
        for (at, (name, _)) in own.iter().enumerate() {
            if keeps.contains(&at) { stay.push(name.clone()) } else { removed.push((name.clone(), guest.to_string())) }
        }
        let names: Vec<&String> = own.iter().map(|(name, _)| name).collect();
        groups.push(json!({ "guest": guest, "snapshots": names }));
    }
    let mut failed = None;
    if !args.dry_run {
        let mut remove = |name: &str| catalog.remove(name).map_err(|error| failed = Some(error)).is_ok();
        let done = removed.iter().take_while(|(name, _)| remove(name)).count();
        removed.truncate(done);
    }
    let keepers = if removed.is_empty() || args.dry_run { Vec::new() } else { keepers(&pool) };
    kept(&keepers).iter().for_each(|kept| output::note!("{kept}"));
    let names: Vec<&String> = removed.iter().map(|(name, _)| name).collect();
    let left = super::images(&pool, &all, |name| names.iter().any(|removed| *removed == name));
    let value = json!({
        "kept": stay, "removed": names, "guests": groups, "images": left, "dry_run": args.dry_run, "kept_by": keepers,
    });
    args.json.line(&value, || {
        let (word, all) = if args.dry_run { ("would remove", "would be removed") } else { ("removed", "removed") };
        let each = removed.iter().map(|(name, guest)| format!("{word} {name} ({guest})\n"));
        let left = left.iter().map(|left| format!("{}\n", super::stays(left)));
        let lines: String = each.chain(left).collect();
        format!("{lines}{} kept, {} {all}", stay.len(), removed.len())
    })?;
    // What was removed before is said.
    failed.map_or(Ok(()), |error| Err(error.into()))
}
