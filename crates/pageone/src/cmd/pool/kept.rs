//! The checkpoints that a pool keeps.

use std::ops::ControlFlow;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use anyhow::{Result, ensure};
use checkpoint::{Catalog, Checkpoint, OpenError, Repacked, Repacking, Wrong};
use control::units::{counted, size};
use mpool::{Access, BLOCK, Depth, Pool};
use output::Progress;
use serde_json::json;
use signal_hook::consts::{SIGINT, SIGTERM};
use signal_hook::flag;

use super::names::{Found, Names};
use super::turns::{Keeper, TURN, Turns, keepers, kept};
use super::with_error;
use crate::cmd::table::Column::{Number, Text};
use crate::cmd::table::{Table, Tabular};
use crate::cmd::{Json, Quiet};

/// Lists the checkpoints.
pub(super) fn ls(names: &Names, pool: &str, answer: Tabular) -> Result<()> {
    let own = |pool: Pool| -> Result<_> { Ok(Catalog::open(&pool)?.checkpoints().to_vec()) };
    let all = names.read(pool, own, checkpoint::serve::list)?;
    answer.print(&all, |width| {
        let mut table =
            Table::new([Text("checkpoint"), Number("created"), Number("memory"), Number("stored"), Text("source")]);
        for c in &all {
            table.row([c.name.clone(), date(c.created), size(c.bytes()), size(c.stored_bytes()), c.source.clone()]);
        }
        table.within(width)
    })
}

/// Seconds since 1970 as date and time on this host.
pub(crate) fn date(seconds: u64) -> String {
    monitor::clock::date(i64::try_from(seconds).unwrap_or(i64::MAX).saturating_mul(1000))
}

/// Shows what the checkpoints hold.
pub(super) fn du(pool: &Pool, answer: Tabular) -> Result<()> {
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
    answer.print(&out, |width| {
        let columns = [Text("checkpoint"), Number("memory"), Number("new"), Number("alone"), Number("rm frees")];
        let (mut table, known) = (Table::new(columns), |bytes: Option<u64>| bytes.map_or("unreadable".into(), size));
        for c in catalog.checkpoints() {
            let (memory, new) = (size(c.bytes()), size(bytes(c.new_pages)));
            table.row([c.name.clone(), memory, new, known(alone(c)), known(freed(c))]);
        }
        let mut text = table.within(width);
        let [memory, media, frees] = [logical, physical, bytes(usage.repack)].map(size);
        text += &format!("all: memory {memory} · on the media {media} · repack frees {frees}\n");
        if usage.compressed > 0 {
            let [memory, media] = [bytes(usage.compressed), usage.compressed_bytes].map(size);
            text += &format!("of that compressed: memory {memory} · on the media {media}\n");
        }
        text
    })
}

/// Removes a checkpoint, and says who keeps its space.
pub(super) fn remove(pool: &Pool, name: &str, json: Json) -> Result<()> {
    Catalog::open(pool)?.remove(name)?;
    let (value, text) = removed(name, &keepers(pool));
    if json.is_asked() || text.is_some() {
        json.line(&value, || text.unwrap_or_default())?;
    }
    Ok(())
}

/// What removing did, in JSON, and what is to be said of it.
fn removed(name: &str, keepers: &[Keeper]) -> (serde_json::Value, Option<String>) {
    (json!({ "removed": name, "kept_by": keepers }), kept(keepers))
}

/// Repacks the data mblocks, and says what that did, also if it fails or a signal ends it.
pub(super) fn repack(found: Found<'_>, compress: Option<usize>, quiet: Quiet, json: Json) -> Result<()> {
    let progress = quiet.progress();
    progress.begin(&format!("repacking {}", found.name), Some(0));
    let (turns, pool) = Turns::begin(found)?;
    let (signal, second) = (Arc::new(AtomicUsize::new(0)), Arc::new(AtomicBool::new(false)));
    for number in [SIGINT, SIGTERM] {
        flag::register_conditional_default(number, second.clone())?;
        flag::register(number, second.clone())?;
        flag::register_usize(number, signal.clone(), number as usize)?;
    }
    let tell = &|used: &str| {
        if !quiet.is_asked() {
            output::note!("{used}: repacking goes on when that has closed it");
        }
    };
    let least = &|planning, recording| (planning + recording) * 3 + TURN;
    let how = How { progress: &progress, least, tell, signal: &signal };
    let (mut all, mut keepers) = (Repacking::new(compress), Vec::new());
    let ended = how.run(turns, pool, &mut all, &mut keepers);
    drop(progress);
    if ended.is_ok() || all.done != Repacked::default() {
        let (value, text) = report(all.done, compress, &keepers, &ended);
        json.line(&value, || text)?;
    }
    if all.done.left > 0 {
        output::note!(
            "{} cannot be repacked: what is in it, or a map that names it, cannot be read; `pageone pool check` lists \
             all damage",
            counted(all.done.left as usize, "data mblock")
        );
    }
    match signal.load(Ordering::Relaxed) as i32 {
        0 => ended,
        signal => Ok(signal_hook::low_level::emulate_default_handler(signal)?),
    }
}

/// What repacking did until it ended so, and who keeps what it would free, in JSON and as text.
fn report(
    done: Repacked,
    compress: Option<usize>,
    keepers: &[Keeper],
    ended: &Result<()>,
) -> (serde_json::Value, String) {
    let bytes = |pages: u64| pages * BLOCK as u64;
    let value = json!({
        "freed_bytes": bytes(done.freed), "moved_bytes": bytes(done.moved), "mblocks": done.mblocks,
        "compressed_bytes": bytes(done.compressed), "compressed_to_bytes": done.compressed_bytes, "left": done.left,
        "kept_by": keepers,
    });
    let (freed, moved) = (size(bytes(done.freed)), size(bytes(done.moved)));
    let mut text = format!("{freed} freed, {moved} moved, {} removed", counted(done.mblocks as usize, "data mblock"));
    if compress.is_some() || done.compressed > 0 {
        text += &format!("\n{} compressed to {}", size(bytes(done.compressed)), size(done.compressed_bytes));
    }
    kept(keepers).iter().for_each(|kept| text += &format!("\n{kept}"));
    (with_error(value, ended), text)
}

/// How a pool is repacked in turns.
struct How<'a> {
    progress: &'a Progress,
    /// The least time of a turn, by what planning it and recording the last one took.
    least: &'a dyn Fn(Duration, Duration) -> Duration,
    /// Told who has the pool, when that takes long.
    tell: &'a dyn Fn(&str),
    /// The signal that ends it; 0: none has come.
    signal: &'a AtomicUsize,
}

impl How<'_> {
    /// Repacks. Closes the pool for those who wait for it, and goes on behind them. Gives those who
    /// kept mblocks that it would free.
    fn run(&self, mut turns: Turns<'_>, mut pool: Pool, all: &mut Repacking, kept: &mut Vec<Keeper>) -> Result<()> {
        let mut recording = Duration::ZERO;
        loop {
            let (begin, mut until, mut end) = (Instant::now(), None, Instant::now());
            let each = &mut |moved, left| {
                self.progress.inc(moved);
                self.progress.set_length(self.progress.position() + left);
                end = Instant::now();
                let until = *until.get_or_insert_with(|| end + (self.least)(begin.elapsed(), recording));
                if self.has_ended() || end >= until && turns.is_asked(&pool) {
                    ControlFlow::Break(())
                } else {
                    ControlFlow::Continue(())
                }
            };
            // What it moved would take space, and free none.
            *kept = keepers(&pool);
            let more = kept.is_empty() && all.turn(&mut Catalog::open(&pool)?, each)?;
            if !more {
                return Ok(());
            }
            drop(pool);
            recording = end.elapsed();
            turns.leave();
            let goes_on = || {
                ensure!(!self.has_ended(), "interrupted");
                Ok(())
            };
            goes_on()?;
            pool = turns.open_again(self.tell, &goes_on)?;
        }
    }

    fn has_ended(&self) -> bool {
        self.signal.load(Ordering::Relaxed) != 0
    }
}

/// Checks the records of checkpoints against their maps, in a pool of checkpoints; says what is
/// wrong, and whether it could be put right. With the data compressed pages are decoded.
pub(super) fn check(pool: &Pool, depth: Depth) -> (Vec<String>, Result<()>) {
    if pool.mblocks().is_empty() {
        return (Vec::new(), Ok(()));
    }
    let mut catalog = match Catalog::open(pool) {
        Ok(catalog) => catalog,
        // A pool of another program has a root MDC of its own.
        Err(OpenError::Foreign | OpenError::Format) => return (Vec::new(), Ok(())),
        Err(e) => return (vec![format!("{:#}", anyhow::Error::from(e))], Ok(())),
    };
    let checked = catalog.check(match pool.props().access {
        Access::Exclusive => Wrong::Repair,
        Access::Shared => Wrong::Report,
    });
    let (mut findings, written) = match checked {
        Ok(findings) => (findings, Ok(())),
        Err(mut unrepaired) => (std::mem::take(&mut unrepaired.findings), Err(unrepaired.into())),
    };
    if depth == Depth::Data {
        findings.extend(catalog.check_compressed());
    }
    (findings.iter().map(ToString::to_string).collect(), written)
}

#[cfg(test)]
mod tests;
