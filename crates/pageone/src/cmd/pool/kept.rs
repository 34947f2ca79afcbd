//! The checkpoints that a pool keeps.

use std::ops::ControlFlow;
use std::time::{Duration, Instant};

use anyhow::Result;
use checkpoint::{Catalog, Checkpoint, OpenError, Repacked, Repacking, Wrong};
use control::units::size;
use mpool::{Access, BLOCK, Depth, Pool};
use output::Progress;
use output::text::printable;
use serde_json::json;

use super::Names;
use crate::cmd::{Json, Quiet};

/// How long `repack` has a pool at least for which others wait.
const TURN: Duration = Duration::from_secs(1);

/// Lists the checkpoints.
pub(super) fn ls(names: &Names, pool: &str, json: Json) -> Result<()> {
    let own = |pool: Pool| -> Result<_> { Ok(Catalog::open(&pool)?.checkpoints().to_vec()) };
    let all = names.read(pool, own, checkpoint::serve::list)?;
    json.print(&all, || {
        let width = width(&all);
        let line = |[name, created, memory, stored, source]: [&str; 5]| {
            format!("{name:<width$} {created:>19} {memory:>8} {stored:>8}  {source}\n")
        };
        let one = |c: &Checkpoint| {
            line([
                &printable(&c.name),
                &date(c.created),
                &size(c.bytes()),
                &size(c.stored_bytes()),
                &printable(&c.source),
            ])
        };
        all.iter().fold(line(["checkpoint", "created", "memory", "stored", "source"]), |text, c| text + &one(c))
    })
}

/// Columns of a list's names.
fn width(all: &[Checkpoint]) -> usize {
    all.iter().map(|c| c.name.len()).max().unwrap_or_default().max("checkpoint".len())
}

/// Seconds since 1970 as date and time on this host.
pub(crate) fn date(seconds: u64) -> String {
    monitor::clock::date(i64::try_from(seconds).unwrap_or(i64::MAX).saturating_mul(1000))
}

/// Shows what the checkpoints hold.
pub(super) fn du(pool: &Pool, json: Json) -> Result<()> {
    let catalog = Catalog::open(pool)?;
    let usage = catalog.usage();
    let logical = catalog.checkpoints().iter().fold(0, |sum: u64, c| sum.saturating_add(c.bytes()));
    let physical: u64 = pool.usage()?.classes.iter().map(|c| c.used_bytes).sum();
    let bytes = |pages: u64| pages.saturating_mul(BLOCK as u64);
    let held = |name: &str| usage.checkpoints.get(name).copied();
    let alone = |c: &Checkpoint| held(&c.name).map(|held| bytes(held.alone));
    let freed = |c: &Checkpoint| held(&c.name).map(|held| bytes(held.freed));
    let one = |c: &Checkpoint| {
        json!({
            "name": c.name, "logical_bytes": c.bytes(), "new_bytes": bytes(c.new_pages),
            "alone_bytes": alone(c), "rm_frees_bytes": freed(c),
        })
    };
    let out = json!({
        "logical_bytes": logical, "physical_bytes": physical, "repack_frees_bytes": bytes(usage.repack),
        "compressed_bytes": bytes(usage.compressed), "compressed_to_bytes": usage.compressed_bytes,
        "checkpoints": catalog.checkpoints().iter().map(one).collect::<Vec<_>>(),
    });
    json.print(&out, || {
        let part = |(what, bytes): &(&str, Option<u64>)| {
            let size = bytes.map_or("unreadable".into(), size);
            format!("  {what} {size:>8}")
        };
        let width = width(catalog.checkpoints());
        let line = |name: &str, parts: &[(&str, Option<u64>)]| {
            format!("{name:<width$}{}\n", parts.iter().map(part).collect::<String>())
        };
        let mut text = String::new();
        for c in catalog.checkpoints() {
            let new = ("new", Some(bytes(c.new_pages)));
            text += &line(&c.name, &[("memory", Some(c.bytes())), new, ("alone", alone(c)), ("rm frees", freed(c))]);
        }
        let frees = ("repack frees", Some(bytes(usage.repack)));
        text += &line("all", &[("memory", Some(logical)), ("on the media", Some(physical)), frees]);
        if usage.compressed > 0 {
            let media = ("on the media", Some(usage.compressed_bytes));
            text += &line("of that compressed", &[("memory", Some(bytes(usage.compressed))), media]);
        }
        text
    })
}

/// Removes a checkpoint.
pub(super) fn remove(pool: &Pool, name: &str) -> Result<()> {
    Ok(Catalog::open(pool)?.remove(name)?)
}

/// Repacks the data mblocks, and says what that did.
pub(super) fn repack((names, name): (&Names, &str), compress: Option<usize>, quiet: Quiet, json: Json) -> Result<()> {
    let progress = quiet.progress();
    let done = in_turns((names, name), Repacking::new(compress), &progress, |planned| planned * 3 + TURN)?;
    drop(progress);
    let bytes = |pages: u64| pages * BLOCK as u64;
    let value = json!({
        "freed_bytes": bytes(done.freed), "moved_bytes": bytes(done.moved), "mblocks": done.mblocks,
        "compressed_bytes": bytes(done.compressed), "compressed_to_bytes": done.compressed_bytes, "left": done.left,
    });
    json.line(&value, || {
        let (freed, moved) = (size(bytes(done.freed)), size(bytes(done.moved)));
        let text = format!("{freed} freed, {moved} moved, {} data mblocks removed", done.mblocks);
        if compress.is_none() && done.compressed == 0 {
            return text;
        }
        format!("{text}\n{} compressed to {}", size(bytes(done.compressed)), size(done.compressed_bytes))
    })?;
    if done.left > 0 {
        output::note!(
            "{} data mblocks stay as they are: they, or maps that name them, cannot be read; `pageone pool check` \
             lists all damage",
            done.left
        );
    }
    Ok(())
}

/// Repacks. Closes the pool for those who wait for it, and goes on behind them. `turn`: the least
/// time until then, by what it took to see what is to be moved.
fn in_turns(
    (names, name): (&Names, &str),
    mut all: Repacking,
    progress: &Progress,
    turn: impl Fn(Duration) -> Duration,
) -> Result<Repacked> {
    progress.begin(&format!("repacking {name}"), Some(0));
    let mut pool = names.open_soon(name, Access::Exclusive)?;
    loop {
        let (begin, mut until) = (Instant::now(), None);
        let each = &mut |moved, left| {
            progress.inc(moved);
            progress.set_length(progress.position() + left);
            let until = *until.get_or_insert_with(|| Instant::now() + turn(begin.elapsed()));
            if Instant::now() >= until && pool.is_awaited() {
                ControlFlow::Break(())
            } else {
                ControlFlow::Continue(())
            }
        };
        if !all.turn(&mut Catalog::open(&pool)?, each)? {
            return Ok(all.done);
        }
        drop(pool);
        pool = names.open_again(name)?;
    }
}

/// Checks the records of checkpoints against their maps, in a pool of checkpoints; says what is
/// wrong. With the data compressed pages are decoded.
pub(super) fn check(pool: &Pool, depth: Depth) -> Result<Vec<String>> {
    if pool.mblocks().is_empty() {
        return Ok(Vec::new());
    }
    let mut catalog = match Catalog::open(pool) {
        Ok(catalog) => catalog,
        // A pool of another program has a root MDC of its own.
        Err(OpenError::Foreign | OpenError::Format) => return Ok(Vec::new()),
        Err(e) => return Ok(vec![format!("{:#}", anyhow::Error::from(e))]),
    };
    let mut findings = catalog.check(match pool.props().access {
        Access::Exclusive => Wrong::Repair,
        Access::Shared => Wrong::Report,
    })?;
    if depth == Depth::Data {
        findings.extend(catalog.check_compressed());
    }
    Ok(findings.iter().map(ToString::to_string).collect())
}

#[cfg(test)]
mod tests;
