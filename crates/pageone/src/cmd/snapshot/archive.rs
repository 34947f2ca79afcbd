//! `pageone snapshot export` and `import`.

use std::fs::File;
use std::io::{self, Read};
use std::path::PathBuf;
use std::sync::Arc;

use anyhow::{Context, Result};
use checkpoint::{Catalog, Image, Store};
use control::units::size;
use mpool::Access;
use output::OutputFile;
use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM};
use snapshot::archive::{self, Exported, Place};

use super::Which;
use super::clones::Leased;
use crate::cmd::Force;
use crate::cmd::pool::Names;

/// Options of `pageone snapshot export`.
#[derive(clap::Args)]
pub(crate) struct ExportArgs {
    #[command(flatten)]
    snapshot: Which,
    /// File [default: standard output]
    #[arg(long, short, value_name = "FILE")]
    output: Option<PathBuf>,
    #[command(flatten)]
    force: Force,
}

/// Options of `pageone snapshot import`.
#[derive(clap::Args)]
pub(crate) struct ImportArgs {
    #[command(flatten)]
    names: Names,
    /// Pool: a name, or the path of its capacity class
    pool: String,
    /// File [default: standard input]
    file: Option<PathBuf>,
    /// Name of the snapshot [default: the one that it had]
    #[arg(long)]
    name: Option<String>,
    /// Directory for the images of its disks
    #[arg(long, value_name = "DIR")]
    disks: Option<PathBuf>,
}

/// Writes a snapshot as a tar archive. Its pool can be written meanwhile.
pub(super) fn export(args: &ExportArgs) -> Result<()> {
    let Leased { checkpoint, record, lease, .. } = Leased::of(&args.snapshot)?;
    let image = Image::of_lease(&lease)?;
    let what = Exported {
        name: &checkpoint.name,
        created: checkpoint.created,
        source: &checkpoint.source,
        regions: &checkpoint.regions,
        record: &record,
        image: &image,
    };
    // Before, so that nothing is written in vain, and after that: what was copied is what was
    // stored.
    let check = || record.description.disks.iter().try_for_each(|disk| snapshot::clone::check_image(disk).map(drop));
    check()?;
    let Some(path) = &args.output else {
        archive::export(&what, output::Stdout::lock())?;
        return Ok(check()?);
    };
    let out = OutputFile::create(path, args.force.existing())?;
    archive::export(&what, out.file())?;
    check()?;
    Ok(out.keep()?)
}

/// Stores a snapshot that an archive has.
pub(super) fn import(args: &ImportArgs) -> Result<()> {
    let from: Box<dyn Read> = match &args.file {
        Some(path) => Box::new(File::open(path).with_context(|| format!("cannot open {}", path.display()))?),
        None => Box::new(io::stdin().lock()),
    };
    // While the archive comes the pool is free for others.
    let pool = args.names.open_soon(&args.pool, Access::Shared)?;
    let (path, catalog) = (pool.path().to_owned(), Catalog::open(&pool)?);
    let known: Vec<String> = catalog.checkpoints().iter().map(|c| c.name.clone()).collect();
    drop((pool, catalog));
    let place = Place {
        pool: &path,
        disks: args.disks.as_deref(),
        name: args.name.as_deref(),
        is_taken: &|name| known.iter().any(|known| known == name),
    };
    let received = archive::receive(io::BufReader::with_capacity(1 << 20, from), &place)?;
    let pool = args.names.open_soon(&args.pool, Access::Exclusive)?;
    let store = Store::new(Catalog::open(&pool)?);
    // From here on it is done to the end, whatever signals come.
    let commits = || {
        for signal in [SIGINT, SIGTERM, SIGHUP] {
            let _ = signal_hook::flag::register(signal, Arc::default());
        }
    };
    let about = received.store(&store, commits)?;
    output::line!("{}: {} of memory, {} disks", about.name, size(about.bytes()), about.description.disks.len())?;
    Ok(())
}
