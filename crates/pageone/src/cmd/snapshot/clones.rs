//! `pageone snapshot run`: starts clones, and serves their memory as long as one of them runs.

use std::os::unix::fs::DirBuilderExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use checkpoint::Catalog;
use kmem::pidfd::PidFd;
use mpool::Access;
use signal_hook::consts::{SIGINT, SIGTERM};
use snapshot::clone::{Clone, Options, start};
use snapshot::memory;

use crate::cmd::pool::Names;
use crate::exit::{Code, Coded};
use crate::paths;

/// Time between two looks whether a clone has ended.
const NAP: Duration = Duration::from_millis(50);

/// Options of `pageone snapshot run`.
#[derive(clap::Args)]
pub(crate) struct Args {
    #[command(flatten)]
    names: Names,
    /// Pool: a name, or the path of its capacity class
    pool: String,
    /// The snapshot
    name: String,
    /// Number of guests; the output of more than one goes to a file for each
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..))]
    count: u32,
    /// Directory for the guests' own files, a directory for each: images over the disks, sockets,
    /// output [default: clones in the daemon's directory]
    #[arg(long, value_name = "DIR")]
    files: Option<PathBuf>,
    /// Remove each guest's files when all have ended
    #[arg(long)]
    rm: bool,
    /// Start guests that differ from the one that was stored
    #[arg(long)]
    force: bool,
    /// Further options of QEMU
    #[arg(last = true, value_name = "QEMU OPTIONS")]
    extra: Vec<String>,
}

/// Starts clones and waits for their end.
pub(super) fn run(args: &Args, dir: Option<PathBuf>) -> Result<()> {
    let pool = args.names.open(&args.pool, Access::Shared)?;
    let catalog = Catalog::open(&pool)?;
    let checkpoint = catalog.find(&args.name)?;
    let record = super::read(&catalog, checkpoint)?;
    let report = |error: checkpoint::ReadError| {
        eprintln!("pageone: a guest needs a page that cannot be read, and ends: {:#}", anyhow::Error::from(error));
    };
    let ram = memory::serve(catalog.image(checkpoint)?, Box::new(report)).map_err(|e| {
        Coded(
            Code::HostLacks,
            format!("cannot serve the guests' memory through FUSE: {e}; that takes root, and the kernel's module fuse"),
        )
    })?;
    let files = args.files.clone().unwrap_or_else(|| dir.unwrap_or_else(paths::own_directory).join("clones"));
    let files = std::path::absolute(files)?;
    let made = std::fs::DirBuilder::new().recursive(true).mode(0o700).create(&files);
    made.with_context(|| format!("cannot create {}", files.display()))?;
    paths::check_owner(&files)?;
    // Before the first guest: a signal must not leave guests without memory.
    let ends = Arc::new(AtomicBool::new(false));
    for signal in [SIGINT, SIGTERM] {
        signal_hook::flag::register(signal, ends.clone())?;
    }
    let attached = args.count == 1;
    let options = Options { record: &record, ram: &ram, extra: &args.extra, force: args.force, attached };
    let directories: Vec<PathBuf> = (1..=args.count)
        .map(|number| files.join(format!("{}-{}-{number}", snapshot::file_name(&args.name), std::process::id())))
        .collect();
    let started: Vec<Result<Clone>> = std::thread::scope(|scope| {
        let threads: Vec<_> = directories.iter().map(|directory| scope.spawn(|| one(&options, directory))).collect();
        threads.into_iter().map(|thread| thread.join().unwrap_or_else(|_| bail!("starting a clone panicked"))).collect()
    });
    let (mut clones, mut failed) = (Vec::new(), Vec::new());
    for clone in started {
        match clone {
            Ok(clone) => clones.push(clone),
            Err(error) => failed.push(error),
        }
    }
    wait(&mut clones, &ends);
    if args.rm {
        directories.iter().for_each(|directory| drop(std::fs::remove_dir_all(directory)));
    }
    let (all, count) = (failed.len(), args.count);
    match failed.into_iter().next() {
        Some(error) if count == 1 => Err(error),
        Some(error) => Err(error.context(format!("{all} of {count} guests were not started"))),
        None => Ok(()),
    }
}

/// Starts a clone, and says so.
fn one(options: &Options<'_>, directory: &Path) -> Result<Clone> {
    let begin = Instant::now();
    let clone = start(options, directory).inspect_err(|_| {
        // What QEMU said is in the error.
        let _ = std::fs::remove_dir_all(directory);
    })?;
    let ms = begin.elapsed().as_secs_f64() * 1e3;
    if !clone.differences.is_empty() {
        eprintln!("pageone: forced: {}", clone.differences.join("; "));
    }
    eprintln!("pageone: guest {} runs after {ms:.0} ms; its files: {}", clone.child.id(), directory.display());
    Ok(clone)
}

/// Waits until all clones have ended. After a signal it ends them.
fn wait(clones: &mut [Clone], ends: &AtomicBool) {
    let mut told = false;
    while clones.iter_mut().any(|clone| matches!(clone.child.try_wait(), Ok(None))) {
        if ends.load(Ordering::Relaxed) && !std::mem::replace(&mut told, true) {
            for clone in &mut *clones {
                if let Ok(None) = clone.child.try_wait()
                    && let Ok(process) = PidFd::open(clone.child.id() as i32)
                {
                    let _ = process.send_signal(SIGTERM);
                }
            }
        }
        std::thread::sleep(NAP);
    }
}
