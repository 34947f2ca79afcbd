//! `pageone pool rebuild`: says what it will do, does it, and says what was lost.

use std::path::Path;

use anyhow::Result;
use control::units::{counted, size};
use mpool::{Pool, Rebuild};

/// What it would do.
pub(super) fn warning(path: &Path, how: &Rebuild) -> String {
    let space = match how.free_lost {
        true => "frees the space that may belong to lost mblocks, for good",
        false => "keeps the space that may belong to lost mblocks",
    };
    format!(
        "this writes the superblocks and the metadata of {} anew, from what can be read of them, and {space}; copy the \
         directory first if you can, look at what is left with `pageone pool check --salvage`, then say --yes",
        path.display()
    )
}

/// Rebuilds a pool.
pub(super) fn run(path: &Path, how: Rebuild) -> Result<()> {
    let rebuilt = Pool::rebuild(path, how)?;
    for damage in &rebuilt.damage {
        output::line!("{damage}")?;
    }
    for class in &rebuilt.superblocks {
        output::line!("class {class} had no superblock; it has one again")?;
    }
    if rebuilt.records_lost > 0 {
        output::line!("{} metadata records or more are gone: objects that they named are lost", rebuilt.records_lost)?;
    }
    for object in &rebuilt.dropped {
        output::line!("{object} has no contents of its own any more: deleted, or lost")?;
    }
    for object in &rebuilt.found {
        output::line!("{object} had no record, and is in the pool again; it may have been deleted before")?;
    }
    for (class, bytes) in &rebuilt.kept {
        output::line!("class {class} keeps {} that may belong to lost mblocks; --free-lost frees them", size(*bytes))?;
    }
    output::line!("the pool has {}; `pageone pool check` reads all", counted(rebuilt.mblocks, "mblock"))?;
    Ok(())
}
