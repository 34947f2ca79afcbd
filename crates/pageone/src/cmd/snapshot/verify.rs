//! `pageone snapshot verify`: sees that a guest goes on from a snapshot.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use checkpoint::Image;
use control::units::size;
use mpool::{AlignedBuf, BLOCK};
use serde_json::json;
use signal_hook::consts::{SIGHUP, SIGINT, SIGQUIT, SIGTERM};
use snapshot::clone::{Options, Passing, Ram, check_image, start};

use super::Which;
use super::clones::{self, AskedRights, Leased, Watch};
use crate::cmd::{Json, Quiet};

/// Pages that are read at once.
const AT_ONCE: u64 = 256;

/// Options of `pageone snapshot verify`.
#[derive(clap::Args)]
pub(crate) struct Args {
    #[command(flatten)]
    snapshot: Which,
    /// Seconds for which the guest runs
    #[arg(long, value_name = "N", default_value_t = 2, value_parser = clap::value_parser!(u32).range(1..))]
    seconds: u32,
    /// Read the memory and look for the disks' images; start nothing
    #[arg(long, conflicts_with_all = ["seconds", "files", "user", "trust", "extra"])]
    read_only: bool,
    /// Directory for the guest's own files [default: `clones` beside the directory of the
    /// pools' names]
    #[arg(long, value_name = "DIR")]
    files: Option<PathBuf>,
    #[command(flatten)]
    rights: AskedRights,
    #[command(flatten)]
    quiet: Quiet,
    #[command(flatten)]
    json: Json,
    /// Further options of QEMU
    #[arg(last = true, value_name = "QEMU OPTIONS")]
    extra: Vec<String>,
}

/// Reads all of the memory, and lets a clone run for a while; it is gone afterwards.
pub(super) fn run(args: &Args) -> Result<()> {
    let begin = Instant::now();
    let leased = Leased::of(&args.snapshot)?;
    let rights = (!args.read_only).then(|| leased.rights(&args.rights)).transpose()?;
    let Leased { record, lease, pool, .. } = leased;
    let image = Image::of_lease(&lease)?;
    let progress = args.quiet.progress();
    progress.begin("reading the memory", Some(image.pages() * BLOCK as u64));
    let mut bytes = AlignedBuf::zeroed(AT_ONCE as usize * BLOCK);
    for first in (0..image.pages()).step_by(AT_ONCE as usize) {
        image.read(first, &mut bytes)?;
        progress.inc(bytes.len() as u64);
    }
    drop(progress);
    // Headers name files: they lead to none that the guest could not read.
    let account = rights.as_ref().map_or_else(|| record.description.reader(), |rights| Ok(rights.account.clone()))?;
    account.with_files(|| Ok(record.description.disks.iter().try_for_each(|disk| check_image(disk).map(drop))))??;
    let mut what = "its memory can be read";
    if let Some(rights) = &rights {
        let (ram, server) = clones::ram((&pool, &args.snapshot.name), lease, None)?;
        let files = clones::directory(args.files.as_deref(), &args.snapshot)?;
        let name = format!("verify-{}-{}", snapshot::file_name(&args.snapshot.name), std::process::id());
        let options = Options { extra: &args.extra, ..Options::passing(&record, rights, Ram::Passing(&ram)) };
        let time = Duration::from_secs(args.seconds.into());
        // A signal must not leave a guest and its server.
        let ends = Arc::new(AtomicUsize::new(0));
        for signal in [SIGHUP, SIGINT, SIGQUIT, SIGTERM] {
            signal_hook::flag::register_usize(signal, ends.clone(), signal as usize)?;
        }
        let verified = Watch::new(Some(server), Arc::default()).during(|| go_on(&options, &files, &name, time));
        let signal = ends.load(Ordering::Relaxed) as i32;
        if signal != 0 {
            let _ = std::fs::remove_dir_all(files.join(&name));
            signal_hook::low_level::emulate_default_handler(signal)?;
        }
        let agent = verified
            .unwrap_or_else(|| bail!("starting a clone panicked"))
            .with_context(|| format!("no guest goes on from snapshot {}", args.snapshot.name))?;
        what = if agent { "a guest goes on from it, and its agent answers" } else { "a guest goes on from it" };
    }
    let (name, read, seconds) = (&args.snapshot.name, image.pages() * BLOCK as u64, begin.elapsed().as_secs_f64());
    let value = json!({ "name": name, "verified": what, "memory_bytes": read, "seconds": seconds });
    args.json.line(&value, || format!("{name}: {what}; {} read, {seconds:.1} s", size(read)))
}

/// Lets a clone run for this time; gives whether it has an agent, which answers. Its files stay if
/// it does not work then: what it has said is among them.
fn go_on(options: &Options<'_>, files: &Path, name: &str, time: Duration) -> Result<bool> {
    let passing = Passing::new(files)?;
    let mut clone = start(options, &passing.inner(name))?;
    let verified = clone.verify(time).map_err(anyhow::Error::from).and_then(|()| Ok(clone.ping()?.is_none()));
    clone.process.kill();
    verified.inspect_err(|_| passing.keep(name))
}
