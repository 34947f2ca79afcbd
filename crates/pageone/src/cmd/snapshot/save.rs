//! `pageone snapshot save`.

use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use anyhow::{Result, ensure};
use checkpoint::{Catalog, Phases, Source, Store, Warning};
use control::units::size;
use mpool::Access;
use snapshot::rights::Asked;
use snapshot::save::{Guest, Options, SaveError};

use super::recycling;
use crate::cmd::checkpoint::{Daemon, explain, report};
use crate::cmd::pool::{Names, Storing, Turns};
use crate::cmd::{Json, Quiet};
use crate::paths;

/// How long the loading of a guest's memory may stand still: storage may stall.
const STUCK: Duration = Duration::from_secs(60);

/// Options of `pageone snapshot save`.
#[derive(clap::Args)]
pub(crate) struct Args {
    #[command(flatten)]
    names: Names,
    /// The guest's process, name or UUID, or the name of its program (the last part of its path)
    #[arg(value_name = "PID|NAME|UUID")]
    target: String,
    /// Pool: name, or path of its capacity class
    #[arg(long, value_name = "POOL")]
    to: String,
    /// Name of the snapshot, up to 127 bytes [default: guest-PID-SECONDS]
    #[arg(long, value_parser = crate::cmd::checkpoint_name)]
    name: Option<String>,
    /// The longest time for copying memory while the guest stands, in milliseconds
    #[arg(long, default_value_t = 100)]
    max_pause: u64,
    /// Read and compare all of the memory, also what has not changed since the last snapshot
    #[arg(long)]
    full: bool,
    /// Store it although no clone would start, or would be like it
    #[arg(long)]
    force: bool,
    /// Try a clone also of a guest in a container, or whose words may reach more of the host
    #[arg(long)]
    trust: bool,
    #[command(flatten)]
    quiet: Quiet,
    #[command(flatten)]
    json: Json,
}

/// Stores a guest.
pub(super) fn run(args: &Args, dir: Option<PathBuf>) -> Result<()> {
    let (start, mut phases) = (Instant::now(), Phases::new());
    let target = guests::find(Path::new("/"), &args.target)?;
    let pid = target.pid()?;
    snapshot::save::wait_until_loaded(pid, STUCK)?;
    let seconds = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH)?.as_secs();
    let name = args.name.clone().unwrap_or_else(|| format!("guest-{pid}-{seconds}"));
    // What takes no guest's time is seen first. Nobody waits for a guest with the pool in hand.
    let mut found = args.names.find(&args.to)?;
    Catalog::open(&found.open_soon(Access::Shared)?)?.ensure_new(&name)?;
    let _unplugged = recycling::unplug(pid, dir.as_deref())?;
    phases.end("unplug");
    let mut guest = Guest::open(pid)?;
    match guest.try_clone(&Asked { trust: args.trust, ..Asked::default() }) {
        Err(error) if args.force => output::note!("forced: {:#}", anyhow::Error::from(error)),
        tried => tried?.map_or((), |why| {
            output::note!("no clone was tried: {:#}. --trust tries one", anyhow::Error::from(why));
        }),
    }
    guest.ask_for_driver();
    phases.end("trial");
    let source = guest.is_prepared().then(|| Source::open_within(pid, guest.ram())).transpose()?;
    if let Some(source) = &source {
        ensure!(source.is_tracked(), SaveError::Untracked(pid));
    } else {
        output::note!(
            "guest {pid} was not prepared: QEMU sends all of its RAM, {}, as for a migration, and the guest {} \
             meanwhile; one that is started by `pageone run --snapshots` stands for some milliseconds only",
            size(guest.ram().len as u64),
            // Else QEMU may miss what it writes.
            if guest.is_emulated()? { "stands (QEMU emulates it)" } else { "is slower" }
        );
    }
    let (turns, pool) = Turns::begin(found)?;
    let catalog = Catalog::open(&pool)?;
    let known: Vec<_> = super::all(&catalog).into_iter().filter_map(|(_, known)| known.ok()).collect();
    guest.check_layers(known.iter().flat_map(|(known, _)| &known.disks).flat_map(|disk| &disk.layers))?;
    drop((known, pool));
    let (store, turns) = (Store::new(catalog), Storing::new(turns, args.quiet));
    let progress = args.quiet.progress();
    let mut writer = store.begin(&name)?.showing(&progress).in_turns(&turns);
    phases.end("open");
    progress.begin(&format!("storing {name}"), Some(guest.ram().len as u64));
    let (guard, max_pause) = (&paths::guard(dir.as_deref())?, Duration::from_millis(args.max_pause));
    let ram = checkpoint::Options { stop: false, full: args.full, max_pause, guard };
    let options = Options { name: name.clone(), ram };
    let warn = &mut |warning: &Warning| output::note!("{warning}");
    let failed = |e: SaveError| {
        let outcome = match e.is_unknown() {
            true => format!(
                "whether snapshot {name} is stored is not known; the guest goes on, in new images of its disks' names"
            ),
            false => format!("snapshot {name} was not stored"),
        };
        explain(e.into(), &args.to).context(outcome)
    };
    let saved = match source {
        Some(mut source) => {
            let daemon = Daemon::ask(paths::candidates(dir), &source)?;
            phases.end("hold");
            let saved = guest.save(&options, &mut source, &daemon, writer, &mut phases, warn).map_err(failed)?;
            phases.end("commit");
            daemon.note_changes(store.view().pool(), &saved.checkpoint, &source, &saved.taken);
            saved
        }
        None => {
            // QEMU, which sends, may stop the guest at any moment.
            writer.keep_pool();
            let saved = guest.save_by_migration(&options, writer, &mut phases, warn).map_err(failed)?;
            phases.end("commit");
            saved
        }
    };
    drop(progress);
    report(args.json, (&saved.checkpoint, &saved.taken), Some(saved.stream), start, &phases)
}
