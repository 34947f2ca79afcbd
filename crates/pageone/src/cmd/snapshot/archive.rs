//! `pageone snapshot export` and `import`.

use std::fs::File;
use std::io::{self, Read};
use std::path::PathBuf;
use std::sync::Arc;

use anyhow::{Context, Result};
use checkpoint::{Catalog, Image, Store};
use control::units::{counted, size};
use mpool::Access;
use output::OutputFile;
use serde_json::json;
use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM};
use snapshot::archive::{self, Exported, Place};
use snapshot::rights::Asked;

use super::Which;
use super::clones::Leased;
use crate::cmd::checkpoint::explain;
use crate::cmd::pool::{Names, Storing, Turns};
use crate::cmd::{Force, Json, Quiet, Written};

/// Options of `pageone snapshot export`.
#[derive(clap::Args)]
#[command(
    after_help = "JSON: `name`, `memory_bytes`, `disks` (their number); on standard error if the archive goes to \
                        standard output."
)]
pub(crate) struct ExportArgs {
    #[command(flatten)]
    snapshot: Which,
    /// File [default: standard output]
    #[arg(long, short, value_name = "FILE")]
    output: Option<PathBuf>,
    #[command(flatten)]
    force: Force,
    /// Copy all that the images show, also if the snapshot is another's
    #[arg(long)]
    trust: bool,
    #[command(flatten)]
    quiet: Quiet,
    #[command(flatten)]
    json: Json,
}

/// Options of `pageone snapshot import`.
#[derive(clap::Args)]
pub(crate) struct ImportArgs {
    #[command(flatten)]
    names: Names,
    /// Pool: name, or path of its capacity class
    pool: String,
    /// File [default: standard input]
    file: Option<PathBuf>,
    /// Name of the snapshot, up to 127 bytes [default: the one that it had]
    #[arg(long, value_parser = crate::cmd::checkpoint_name)]
    name: Option<String>,
    /// Directory for the images of its disks
    #[arg(long, value_name = "DIR")]
    disks: Option<PathBuf>,
    #[command(flatten)]
    quiet: Quiet,
    #[command(flatten)]
    json: Json,
}

/// Writes a snapshot as a tar archive. Its pool can be written meanwhile.
pub(super) fn export(args: &ExportArgs) -> Result<()> {
    let leased = Leased::of(&args.snapshot)?;
    let account = &leased.reader(&Asked { trust: args.trust, ..Asked::default() })?;
    let Leased { checkpoint, record, lease, .. } = leased;
    let image = Image::of_lease(&lease)?;
    let what = Exported {
        name: &checkpoint.name,
        created: checkpoint.created,
        source: &checkpoint.source,
        regions: &checkpoint.regions,
        record: &record,
        image: &image,
        account,
    };
    let progress = args.quiet.progress();
    let written = match &args.output {
        None => {
            archive::export(&what, output::Stdout::lock(), &progress)?;
            Written::ToStdout
        }
        Some(path) => {
            let out = OutputFile::create(path, args.force.existing())?;
            let written = Written::of(&out);
            archive::export(&what, out.file(), &progress)?;
            out.keep()?;
            written
        }
    };
    drop(progress);
    args.json.beside(written, &value(&checkpoint.name, checkpoint.bytes(), record.description.disks.len()), String::new)
}

/// A snapshot in an archive, for programs.
fn value(name: &str, memory: u64, disks: usize) -> serde_json::Value {
    json!({ "name": name, "memory_bytes": memory, "disks": disks })
}

/// Stores a snapshot that an archive has.
pub(super) fn import(args: &ImportArgs) -> Result<()> {
    let progress = args.quiet.progress();
    let (from, bytes): (Box<dyn Read>, Option<u64>) = match &args.file {
        Some(path) => {
            let file = File::open(path).with_context(|| format!("cannot open {}", path.display()))?;
            let bytes = file.metadata().ok().filter(|meta| meta.is_file()).map(|meta| meta.len());
            (Box::new(file), bytes)
        }
        None => (Box::new(io::stdin().lock()), None),
    };
    progress.begin("reading the archive", bytes);
    // While the archive comes the pool is free for others.
    let mut found = args.names.find(&args.pool)?;
    let pool = found.open_soon(Access::Shared)?;
    let (path, catalog) = (pool.path().to_owned(), Catalog::open(&pool)?);
    let known: Vec<String> = catalog.checkpoints().iter().map(|c| c.name.clone()).collect();
    drop((pool, catalog));
    let place = Place {
        pool: &path,
        disks: args.disks.as_deref(),
        name: args.name.as_deref(),
        is_taken: &|name| known.iter().any(|known| known == name),
    };
    let received = archive::receive(io::BufReader::with_capacity(1 << 20, progress.wrap_read(from)), &place)?;
    let (turns, pool) = Turns::begin(found)?;
    let (store, turns) = (Store::new(Catalog::open(&pool)?), Storing::new(turns, args.quiet));
    // The store has it, and closes it for others.
    drop(pool);
    // From here on it is done to the end, whatever signals come.
    let commits = || {
        for signal in [SIGINT, SIGTERM, SIGHUP] {
            let _ = signal_hook::flag::register(signal, Arc::default());
        }
    };
    let stored = received.store((&store, Some(&turns)), &progress, commits);
    let about = stored.map_err(|error| explain(error.into(), &args.pool))?;
    drop(progress);
    let (memory, disks) = (about.bytes(), about.description.disks.len());
    args.json.line(&value(&about.name, memory, disks), || {
        format!("{}: {} of memory, {}", about.name, size(memory), counted(disks, "disk"))
    })
}

#[cfg(test)]
mod tests;
