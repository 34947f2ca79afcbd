//! `pageone snapshot`: guests stored with their devices, and new ones that go on from there.

mod archive;
pub(crate) mod clones;
mod prune;
pub(crate) mod recycling;
mod save;
mod serve;
mod twins;
mod verify;

use std::path::PathBuf;

use anyhow::{Context, Result};
use checkpoint::{Catalog, Checkpoint, View};
use control::units::size;
use mpool::{Access, Pool};
use output::text::printable;
use serde_json::json;
use snapshot::Left;
use snapshot::record::{Description, Record};

use crate::cmd::pool::{Names, date, keepers, kept};
use crate::cmd::table::Column::{Number, Text};
use crate::cmd::table::{Table, Tabular};

/// Subcommands of `pageone snapshot`.
#[derive(clap::Subcommand)]
pub(crate) enum Command {
    /// Store a guest that runs, with its devices and disks; best one that was started by `run
    /// --snapshots`
    Save(save::Args),
    /// Start new guests that go on where a snapshot was taken, and serve their memory until they
    /// have ended
    Run(clones::Args),
    /// Serve the memory of a snapshot or checkpoint to programs that ask for it by userfaultfd, as
    /// Firecracker does
    Serve(serve::Args),
    /// See that a guest goes on from a snapshot: reads all of its memory, and lets a clone run
    Verify(verify::Args),
    /// Remove the snapshots that no rule keeps; the images of their disks stay
    Prune(prune::Args),
    /// Write a snapshot with its disks as a tar archive, for another host
    Export(archive::ExportArgs),
    /// Store a snapshot that `snapshot export` wrote
    Import(archive::ImportArgs),
    /// List the snapshots in a pool
    Ls {
        #[command(flatten)]
        names: Names,
        /// Pool: name, or path of its capacity class
        pool: String,
        #[command(flatten)]
        answer: Tabular,
    },
    /// Remove a snapshot from its pool; the images of its disks stay
    Rm(Which),
}

/// A snapshot in a pool.
#[derive(clap::Args)]
pub(crate) struct Which {
    #[command(flatten)]
    names: Names,
    /// Pool: name, or path of its capacity class
    pool: String,
    /// The snapshot
    name: String,
}

impl Which {
    /// Opens it for reading, as soon as no other program writes to it.
    fn open_soon(&self) -> Result<(Pool, Catalog)> {
        let pool = self.names.open_soon(&self.pool, Access::Shared)?;
        let catalog = Catalog::open(&pool)?;
        Ok((pool, catalog))
    }

    fn find<'a>(&self, catalog: &'a Catalog) -> Result<(&'a Checkpoint, Record)> {
        let checkpoint = catalog.find(&self.name)?;
        Ok((checkpoint, read(catalog, checkpoint)?))
    }
}

/// Runs a subcommand.
pub(crate) fn run(command: &Command, dir: Option<PathBuf>) -> Result<()> {
    match command {
        Command::Save(args) => save::run(args, dir),
        Command::Run(args) => clones::run(args, dir),
        Command::Serve(args) => serve::run(args),
        Command::Verify(args) => verify::run(args),
        Command::Prune(args) => prune::run(args),
        Command::Export(args) => archive::export(args),
        Command::Import(args) => archive::import(args),
        Command::Ls { names, pool, answer } => ls(&names.open_soon(pool, Access::Shared)?, *answer),
        Command::Rm(which) => {
            let pool = which.names.open_soon(&which.pool, Access::Exclusive)?;
            let mut catalog = Catalog::open(&pool)?;
            // Also one that is damaged.
            let checkpoint = catalog.find(&which.name)?;
            if !catalog.has_beside(checkpoint) {
                read(&catalog, checkpoint)?;
            }
            let all = owned(all(&catalog));
            catalog.remove(&which.name)?;
            kept(&keepers(&pool)).iter().for_each(|kept| output::note!("{kept}"));
            images(&pool, &all, |name| name == which.name).iter().for_each(|left| output::note!("{}", stays(left)));
            Ok(())
        }
    }
}

/// The guard of commands that stop guests and processes.
pub(crate) fn guard() -> Result<()> {
    guard::run(snapshot::put_back).context("a guest may still be stopped: `cont` on its monitor lets it go on")
}

/// What lies beside a checkpoint.
fn read(view: &View, checkpoint: &Checkpoint) -> Result<Record> {
    let bytes = view.beside_checkpoint(checkpoint)?.with_context(|| {
        format!(
            "{} is a checkpoint, and no snapshot: it has no devices, and no guest can go on from it; `pageone \
             restore` gives its memory back",
            checkpoint.name
        )
    })?;
    Record::decode(&bytes).with_context(|| format!("cannot read snapshot {}", checkpoint.name))
}

/// What a snapshot is, without its device stream: that may be long, and there may be many. And how
/// many bytes this has.
type Known = (Description, u64);

/// The snapshots of a pool, and what each is; the sentence with which one cannot be read is said.
fn all(catalog: &Catalog) -> Vec<(&Checkpoint, Result<Known, String>)> {
    let known = |c: &Checkpoint| -> Result<Option<Known>> {
        let Some((bytes, len)) = catalog.beginning_beside(c)? else { return Ok(None) };
        let decoded = Description::decode(&bytes).with_context(|| format!("cannot read snapshot {}", c.name))?;
        Ok(Some((decoded.0, len.saturating_sub(decoded.1 as u64))))
    };
    let known = |c| Some((c, known(c).transpose()?.map_err(|error| format!("{error:#}"))));
    let all: Vec<_> = catalog.checkpoints().iter().filter_map(known).collect();
    all.iter().filter_map(|(_, known)| known.as_ref().err()).for_each(|why| output::note!("{why}"));
    all
}

/// A snapshot, and what its record says, if it can be read.
type Described = (Checkpoint, Option<Description>);

/// The same without the catalogue, which changes.
fn owned(all: Vec<(&Checkpoint, Result<Known, String>)>) -> Vec<Described> {
    all.into_iter().map(|(c, known)| (c.clone(), known.ok().map(|known| known.0))).collect()
}

/// The images that those of these snapshots leave that are removed.
fn images(pool: &Pool, all: &[Described], is_removed: impl Fn(&str) -> bool) -> Vec<Left> {
    let (removed, others): (Vec<_>, Vec<_>) = all.iter().partition(|(c, _)| is_removed(&c.name));
    let removed: Vec<&Description> = removed.into_iter().filter_map(|(_, one)| one.as_ref()).collect();
    let others: Vec<_> = others.into_iter().map(|(c, one)| (c.name.as_str(), one.as_ref())).collect();
    snapshot::left(pool.path(), &removed, &others)
}

/// What is said of an image that a removed snapshot has left.
fn stays(left: &Left) -> String {
    let (image, size) = (left.image.display(), size(left.bytes));
    match &left.needed_by {
        Some(by) => format!("{image} stays: snapshot {} needs it", printable(by)),
        None => format!(
            "{image} stays, {size}: no other snapshot of the pool needs it, but a guest, a clone or another pool's may"
        ),
    }
}

fn ls(pool: &Pool, answer: Tabular) -> Result<()> {
    let catalog = Catalog::open(pool)?;
    let all = all(&catalog);
    let one = |(c, known): &(&Checkpoint, Result<Known, String>)| {
        let mut one = json!({
            "name": c.name, "created": c.created, "source": c.source, "memory_bytes": c.bytes(),
            "stored_bytes": c.stored_bytes(),
        });
        match known {
            Ok((description, stream)) => (one["stream_bytes"], one["guest"]) = (json!(stream), json!(description)),
            Err(why) => one["damaged"] = why.as_str().into(),
        }
        one
    };
    answer.print(&all.iter().map(one).collect::<Vec<_>>(), |width| {
        let numbers = ["created", "memory", "stored", "disks"].map(Number);
        let [created, memory, stored, disks] = numbers;
        let mut table = Table::new([Text("snapshot"), Text("guest"), created, memory, stored, disks]);
        for (c, known) in &all {
            let mut row = |guest: String, disks: String| {
                table.row([c.name.clone(), guest, date(c.created), size(c.bytes()), size(c.stored_bytes()), disks]);
            };
            let Ok((description, _)) = known else {
                row("damaged".into(), "?".into());
                continue;
            };
            let facts = &description.facts;
            row(description.guest(&c.source).called().to_owned(), description.disks.len().to_string());
            let (machine, cpu) = (&facts.machine, &facts.cpu);
            let (machine, cpu) = (machine.trim_end_matches("-machine"), cpu.trim_end_matches("-x86_64-cpu"));
            table.remark(&format!("{machine}, {cpu}, QEMU {}", facts.qemu));
        }
        table.within(width)
    })
}

#[cfg(test)]
mod tests;
