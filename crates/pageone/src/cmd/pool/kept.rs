//! The checkpoints that a pool keeps.

use anyhow::Result;
use checkpoint::{Catalog, OpenError};
use mpool::{Access, BLOCK, Pool};
use serde_json::json;

use super::{Names, size};

/// Lists the checkpoints.
pub(super) fn ls(names: &Names, pool: &str, as_json: bool) -> Result<()> {
    let own = |pool: Pool| -> Result<_> { Ok(Catalog::open(&pool)?.checkpoints().to_vec()) };
    let all = names.read(pool, own, checkpoint::serve::list)?;
    if as_json {
        output::line!("{}", serde_json::to_string_pretty(&all)?)?;
        return Ok(());
    }
    output::line!("{:<24} {:>12} {:>10} {:>10}  source", "checkpoint", "created", "memory", "stored")?;
    for c in &all {
        let stored = size((c.new_pages + c.map_pages) * BLOCK as u64);
        output::line!("{:<24} {:>12} {:>10} {stored:>10}  {}", c.name, c.created, size(c.bytes()), c.source)?;
    }
    Ok(())
}

/// Shows what the checkpoints hold.
pub(super) fn du(pool: &Pool, as_json: bool) -> Result<()> {
    let catalog = Catalog::open(pool)?;
    let usage = catalog.usage();
    let logical: u64 = catalog.checkpoints().iter().map(|c| c.bytes()).sum();
    let physical: u64 = pool.usage()?.classes.iter().map(|c| c.used_bytes).sum();
    let bytes = |pages: u64| pages * BLOCK as u64;
    let held = |name: &str| usage.checkpoints.get(name).copied();
    if as_json {
        let one = |c: &checkpoint::Checkpoint| {
            json!({
                "name": c.name, "logical_bytes": c.bytes(), "new_bytes": bytes(c.new_pages),
                "alone_bytes": held(&c.name).map(|held| bytes(held.alone)),
                "rm_frees_bytes": held(&c.name).map(|held| bytes(held.freed)),
            })
        };
        let all: Vec<_> = catalog.checkpoints().iter().map(one).collect();
        let repack = bytes(usage.repack);
        let out = json!({
            "logical_bytes": logical, "physical_bytes": physical, "repack_frees_bytes": repack,
            "compressed_bytes": bytes(usage.compressed), "compressed_to_bytes": usage.compressed_bytes,
            "checkpoints": all,
        });
        output::line!("{out}")?;
        return Ok(());
    }
    for c in catalog.checkpoints() {
        let of = |pages: Option<u64>| pages.map_or("unreadable".to_owned(), |pages| size(bytes(pages)));
        let (alone, freed) = (held(&c.name).map(|held| held.alone), held(&c.name).map(|held| held.freed));
        output::line!(
            "{:<24} memory {:>10}  new {:>10}  alone {:>10}  rm frees {:>10}",
            c.name,
            size(c.bytes()),
            size(bytes(c.new_pages)),
            of(alone),
            of(freed)
        )?;
    }
    output::line!(
        "{:<24} memory {:>10}  on the media {:>10}  repack frees {:>10}",
        "all",
        size(logical),
        size(physical),
        size(bytes(usage.repack))
    )?;
    if usage.compressed > 0 {
        output::line!(
            "{:<24} memory {:>10}  on the media {:>10}",
            "of that compressed",
            size(bytes(usage.compressed)),
            size(usage.compressed_bytes)
        )?;
    }
    Ok(())
}

/// Removes a checkpoint.
pub(super) fn remove(pool: &Pool, name: &str) -> Result<()> {
    Ok(Catalog::open(pool)?.remove(name)?)
}

/// Repacks the data mblocks.
pub(super) fn repack(pool: &Pool, compress: Option<usize>) -> Result<()> {
    let done = Catalog::open(pool)?.repack(compress)?;
    let bytes = |pages: u64| size(pages * BLOCK as u64);
    output::line!("{} freed, {} moved, {} data mblocks removed", bytes(done.freed), bytes(done.moved), done.mblocks)?;
    if compress.is_some() || done.compressed > 0 {
        output::line!("{} compressed to {}", bytes(done.compressed), size(done.compressed_bytes))?;
    }
    if done.left > 0 {
        output::note!(
            "{} data mblocks stay as they are: they, or maps that name them, cannot be read; `pageone pool check` \
             lists all damage",
            done.left
        );
    }
    Ok(())
}

/// Checks the records of checkpoints against their maps, in a pool of checkpoints; prints what is
/// wrong, and gives the number of findings. With `data` compressed pages are decoded.
pub(super) fn check(pool: &Pool, data: bool) -> Result<usize> {
    if pool.mblocks().is_empty() {
        return Ok(0);
    }
    let mut catalog = match Catalog::open(pool) {
        Ok(catalog) => catalog,
        // A pool of another program has a root MDC of its own.
        Err(OpenError::Foreign | OpenError::Format) => return Ok(0),
        Err(e) => {
            output::line!("{:#}", anyhow::Error::from(e))?;
            return Ok(1);
        }
    };
    let mut findings = catalog.check(pool.props().access == Access::Exclusive)?;
    if data {
        findings.extend(catalog.check_compressed());
    }
    for finding in &findings {
        output::line!("{finding}")?;
    }
    Ok(findings.len())
}
