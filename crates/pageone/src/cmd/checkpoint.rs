//! `pageone checkpoint` and `pageone restore`: the memory of a running guest into a pool and back.

use std::error::Error;
use std::path::{Path, PathBuf};
use std::sync::OnceLock;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use checkpoint::serve::Readers;
use checkpoint::{
    ByStopping, Catalog, Changes, Checkpoint, Frozen, Options, Phases, Source, Store, StoreError, TakeError, Taken,
    Warning,
};
use control::client::Freeze;
use control::units::{counted, size};
use mpool::{Access, Pool};
use output::OutputFile;
use parking_lot::Mutex;
use serde_json::json;
use snapshot::archive::ArchiveError;
use snapshot::save::SaveError;

use crate::cmd::pool::Names;
use crate::cmd::{Force, Json, Written};
use crate::exit::{Code, Coded};
use crate::paths;

/// Options of `pageone checkpoint`.
#[derive(clap::Args)]
pub(crate) struct Args {
    #[command(flatten)]
    names: Names,
    /// Process; name or UUID of a guest, or name of a program (the last part of its path). Several
    /// are stored at once, as many as there are CPUs
    #[arg(value_name = "PID|NAME|UUID", required = true)]
    targets: Vec<String>,
    /// Pool: name, or path of its capacity class
    #[arg(long, value_name = "POOL")]
    to: String,
    /// Name of the checkpoint, of one process, up to 127 bytes [default: NAME-PID-SECONDS]
    #[arg(long, value_parser = super::checkpoint_name)]
    name: Option<String>,
    /// The longest pause, in milliseconds
    #[arg(long, default_value_t = 100)]
    max_pause: u64,
    /// Stop the process for the whole time: for one that is no client, or writes faster than it can
    /// be stored
    #[arg(long)]
    stop: bool,
    /// Read and compare all of the memory, also what has not changed since the last checkpoint
    #[arg(long)]
    full: bool,
    #[command(flatten)]
    json: Json,
}

/// Options of `pageone restore`.
#[derive(clap::Args)]
#[command(
    after_help = "JSON: `name`, `memory_bytes`, and `regions`: `offset` in the file, `bytes`, and `address` in the \
                        process; on standard error if the memory goes to standard output."
)]
pub(crate) struct RestoreArgs {
    #[command(flatten)]
    names: Names,
    /// Pool: name, or path of its capacity class
    #[arg(value_name = "POOL")]
    from: String,
    /// The checkpoint
    checkpoint: String,
    /// File for the memory: all regions, one behind the other; zeros become holes
    #[arg(long, value_name = "FILE")]
    to: PathBuf,
    #[command(flatten)]
    force: Force,
    #[command(flatten)]
    json: Json,
}

/// How long a daemon that does not know the process may take to register it: agents look for a
/// daemon every 5 s at least.
const MEETING: Duration = Duration::from_secs(6);

/// The daemon's freeze of a process, if there is a daemon.
pub(crate) struct Daemon {
    directories: Vec<PathBuf>,
    pid: i32,
    tracked: bool,
    freeze: Option<Freeze>,
}

impl Daemon {
    pub(crate) fn ask(directories: Vec<PathBuf>, source: &Source) -> Result<Self> {
        let (pid, tracked) = (source.pid(), source.is_tracked());
        let freeze = if tracked { Freeze::ask(&directories, pid, MEETING)? } else { None };
        Ok(Self { directories, pid, tracked, freeze })
    }

    /// Has the daemon note from now on what the process changes, for the next checkpoint; ends the
    /// freeze.
    pub(crate) fn note_changes(self, pool: &Pool, checkpoint: &Checkpoint, source: &Source, taken: &Taken) {
        let noted = taken.written.is_some() || !source.may_do_direct_io();
        if let Some(freeze) = self.freeze.filter(|_| noted && !source.is_pinned()) {
            // Without a mark the next checkpoint reads everything.
            let _ = freeze.mark(Catalog::label(pool, checkpoint), taken.written.clone());
        }
    }
}

impl Frozen for Daemon {
    fn is_held(&self) -> bool {
        self.freeze.is_some()
    }

    fn changes(&self) -> Option<Changes<'_>> {
        let log = self.freeze.as_ref()?.changes.as_ref()?;
        Some(Changes { label: &log.label, changed: &log.changed })
    }

    fn lasted(&self) -> Result<bool, Box<dyn Error + Send + Sync>> {
        match &self.freeze {
            Some(freeze) => Ok(freeze.lasts()),
            None => Ok(!self.tracked || Freeze::ask(&self.directories, self.pid, Duration::ZERO)?.is_none()),
        }
    }
}

/// The name of a guest, or of a program.
fn called(pid: i32) -> String {
    let program = || {
        let path = std::fs::read_link(format!("/proc/{pid}/exe")).ok()?;
        Some(path.file_name()?.to_string_lossy().into_owned())
    };
    let own = guests::Names::of(Path::new("/"), pid).name;
    own.or_else(program).unwrap_or_else(|| "process".into())
}

/// What a checkpoint is called that nobody names: short, and of characters that need no quotes.
fn default_name(called: &str, pid: i32, seconds: u64) -> String {
    let kept = |c: char| if c.is_ascii_alphanumeric() || "-_.".contains(c) { c } else { '-' };
    let called: String = called.trim_start_matches('.').chars().map(kept).take(18).collect();
    format!("{called}-{pid}-{seconds}")
}

/// The pool of a command.
struct Opened {
    pool: Pool,
    store: Store,
    /// Serves restores to other programs meanwhile. `None`: they have to wait.
    readers: Option<Readers>,
}

/// A command that stores checkpoints.
struct Command<'a> {
    args: &'a Args,
    dir: Option<PathBuf>,
    directories: Vec<PathBuf>,
    opened: OnceLock<Opened>,
    /// Held while the pool is opened.
    opening: Mutex<()>,
}

/// Stores checkpoints.
pub(crate) fn run(args: &Args, dir: Option<PathBuf>) -> Result<()> {
    let count = args.targets.len();
    let why =
        format!("--name names one checkpoint, and there are {count} processes: leave it out, or store them one by one");
    ensure!(args.name.is_none() || count == 1, Coded(Code::Usage, why));
    let directories = paths::candidates(dir.clone());
    let command = Command { args, dir, directories, opened: OnceLock::new(), opening: Mutex::new(()) };
    match &args.targets[..] {
        [target] => command.store(target),
        targets => command.store_all(targets),
    }
}

impl Command<'_> {
    /// Stores checkpoints of several processes, as many at once as there are CPUs. One that fails
    /// does not hold up the others.
    fn store_all(&self, targets: &[String]) -> Result<()> {
        let threads = std::thread::available_parallelism().map_or(1, |cpus| cpus.get()).min(targets.len());
        let (next, failed, alone) = (AtomicUsize::new(0), AtomicUsize::new(0), Mutex::new(Vec::new()));
        let fail = |target: &str, error: &anyhow::Error| {
            super::warn(&format!("{target}: "), error);
            failed.fetch_add(1, Ordering::Relaxed);
        };
        std::thread::scope(|scope| {
            for _ in 0..threads {
                scope.spawn(|| {
                    while let Some(target) = targets.get(next.fetch_add(1, Ordering::Relaxed)) {
                        match self.store(target) {
                            Ok(()) => {}
                            Err(error) if is_of_others(&error) => alone.lock().push(target),
                            Err(error) => fail(target, &error),
                        }
                    }
                });
            }
        });
        // What the others took while they were being stored may be free now.
        for target in alone.into_inner() {
            if let Err(error) = self.store(target) {
                fail(target, &error);
            }
        }
        let failed = failed.into_inner();
        ensure!(failed == 0, "{failed} of {} checkpoints were not stored", targets.len());
        Ok(())
    }

    /// Stores a checkpoint of a process.
    fn store(&self, target: &str) -> Result<()> {
        let taken = self.take(self.args.full, target);
        if let Some(error) = taken.as_ref().err().filter(|error| is_earlier(error)) {
            output::note!("{target}: {error:#}; all of the memory is read");
            return self.take(true, target);
        }
        taken
    }

    /// The pool, opened by the first checkpoint that needs it.
    fn open(&self) -> Result<&Opened> {
        let _one = self.opening.lock();
        if let Some(opened) = self.opened.get() {
            return Ok(opened);
        }
        let pool = self.args.names.open_soon(&self.args.to, Access::Exclusive)?;
        let catalog = Catalog::open(&pool)?;
        let readers = Readers::serve(pool.path(), catalog.view()).ok();
        Ok(self.opened.get_or_init(|| Opened { pool, store: Store::new(catalog), readers }))
    }

    /// Stores a checkpoint of a process; `full`: reads all of its memory.
    fn take(&self, full: bool, target: &str) -> Result<()> {
        let args = self.args;
        let (start, mut phases) = (Instant::now(), Phases::new());
        let found = guests::find(Path::new("/"), target)?;
        let mut source = Source::open(found.pid()?)?;
        // It is still the process that was found.
        let pid = found.pid()?;
        ensure!(
            source.is_tracked() || args.stop,
            "nothing tracks what process {pid} writes: start it with `pageone run`, or let it be stopped for the whole time with --stop"
        );
        let called = called(pid);
        let seconds = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH)?.as_secs();
        let name = args.name.clone().unwrap_or_else(|| default_name(&called, pid, seconds));
        let opened = self.open()?;
        let mut writer = opened.store.begin(&name)?;
        phases.end("open");
        let daemon = Daemon::ask(self.directories.clone(), &source)?;
        phases.end("hold");
        let (guard, max_pause) = (&paths::guard(self.dir.as_deref())?, Duration::from_millis(args.max_pause));
        let options = Options { stop: args.stop, full, max_pause, guard };
        // Of several, each message says which process it is about.
        let about = if args.targets.len() > 1 { format!("{target}: ") } else { String::new() };
        let warn = |warning: &Warning| output::note!("{about}{warning}");
        let (halt, mut tell) = (&mut ByStopping, warn);
        let taken = checkpoint::take(&options, &mut source, &daemon, halt, &mut writer, &mut phases, &mut tell);
        let taken = match taken {
            Ok(taken) => taken,
            Err(e) => {
                drop(writer);
                return Err(explain(e.into(), &args.to)).with_context(|| format!("checkpoint {name} was not stored"));
            }
        };
        guard.done();
        writer.warnings().iter().for_each(warn);
        let stored = writer.commit(format!("{called} {pid}"), source.addresses());
        let checkpoint = stored.map_err(|e| explain(e.into(), &args.to))?;
        if let Some(readers) = &opened.readers {
            readers.publish(|| opened.store.view());
        }
        phases.end("commit");
        daemon.note_changes(&opened.pool, &checkpoint, &source, &taken);
        report(args.json, (&checkpoint, &taken), None, start, &phases)
    }
}

/// Whether the checkpoint may be stored when no other one is.
fn is_of_others(error: &anyhow::Error) -> bool {
    let stored = error.downcast_ref::<StoreError>().is_some_and(StoreError::is_of_others);
    stored || matches!(error.downcast_ref(), Some(TakeError::Store(error)) if error.is_of_others())
}

/// Whether the checkpoint can be stored if all of the memory is read.
fn is_earlier(error: &anyhow::Error) -> bool {
    error.downcast_ref().is_some_and(StoreError::is_earlier)
}

/// Adds the remedy to the error of a full pool.
pub(crate) fn explain(error: anyhow::Error, pool: &str) -> anyhow::Error {
    let take = match error.downcast_ref() {
        Some(SaveError::Take(error)) => Some(error),
        _ => error.downcast_ref::<TakeError>(),
    };
    let store = match (error.downcast_ref(), error.downcast_ref()) {
        (Some(SaveError::Store(error)), _) | (_, Some(ArchiveError::Store(error))) => Some(error),
        _ => error.downcast_ref::<StoreError>(),
    };
    if !take.is_some_and(TakeError::is_full) && !store.is_some_and(StoreError::is_full) {
        return error;
    }
    error.context(format!(
        "pool {pool} is full: make room on its file system, or remove what it has (`pageone pool rm {pool} NAME`, `pageone \
         snapshot rm {pool} NAME`)"
    ))
}

/// Says what was stored since `start`; `stream`: bytes of a snapshot's devices.
pub(crate) fn report(
    json: Json,
    (checkpoint, taken): (&Checkpoint, &Taken),
    stream: Option<usize>,
    start: Instant,
    phases: &Phases,
) -> Result<()> {
    let (memory, stored) = (checkpoint.bytes(), checkpoint.stored_bytes());
    let (seconds, pause_ms) = (start.elapsed().as_secs_f64(), taken.pause.as_secs_f64() * 1e3);
    let phases: serde_json::Map<_, _> =
        phases.seconds().iter().map(|&(name, seconds)| (name.into(), seconds.into())).collect();
    let mut value = json!({
        "name": checkpoint.name, "memory_bytes": memory, "stored_bytes": stored, "seconds": seconds,
        "pause_ms": pause_ms, "rounds": taken.rounds, "pages_in_pause": taken.in_pause, "pages_unchanged": taken.unchanged,
        "phases": phases,
    });
    if let Some(bytes) = stream {
        value["stream_bytes"] = bytes.into();
    }
    json.line(&value, || {
        let devices = stream.map_or(String::new(), |bytes| format!(" devices {},", size(bytes as u64)));
        format!(
            "{}: {} of memory, {} stored,{devices} {seconds:.2} s, {}, stopped for {pause_ms:.1} ms",
            checkpoint.name,
            size(memory),
            size(stored),
            counted(taken.rounds, "round")
        )
    })
}

/// Writes a checkpoint's memory to a file.
pub(crate) fn restore(args: &RestoreArgs) -> Result<()> {
    let not_written = || format!("{} was not written", args.to.display());
    let out = OutputFile::create(&args.to, args.force.existing())?;
    let own = |pool: Pool| -> Result<_> {
        let catalog = Catalog::open(&pool)?;
        let checkpoint = catalog.find(&args.checkpoint)?;
        if let Some(damage) = catalog.damage() {
            output::note!("{damage}");
        }
        catalog.write_image(checkpoint, out.file())?;
        Ok(checkpoint.regions.clone())
    };
    let served = |path: &Path| checkpoint::serve::restore(path, &args.checkpoint, out.file());
    let regions = args.names.read(&args.from, own, served).with_context(not_written)?;
    let written = Written::of(&out);
    out.keep()?;
    let place = |behind: &mut u64, &(address, len): &(u64, u64)| {
        let offset = *behind;
        *behind += len;
        Some((offset, len, address))
    };
    let placed: Vec<_> = regions.iter().scan(0, place).collect();
    let one = |&(offset, len, address): &(u64, u64, u64)| json!({ "offset": offset, "bytes": len, "address": address });
    let (memory, all): (u64, Vec<_>) = (regions.iter().map(|(_, len)| len).sum(), placed.iter().map(one).collect());
    let value = json!({ "name": args.checkpoint, "memory_bytes": memory, "regions": all });
    let line = |(offset, len, address): &(u64, u64, u64)| format!("{offset:#14x} {len:#14x}  was at {address:#x}\n");
    args.json.beside(written, &value, || placed.iter().map(line).collect())
}
