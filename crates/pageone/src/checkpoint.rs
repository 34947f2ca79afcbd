//! `pageone checkpoint` and `pageone restore`: the RAM of a running guest into an mpool and back.
//!
//! 1. Every page that is there is stored, while the guest runs; those that it writes meanwhile are
//!    noted.
//! 2. Rounds: what was written is stored again, until what is left can be copied within the longest
//!    pause.
//! 3. The guest stops, what is left is copied into memory, the guest goes on. Only then is it
//!    stored.
//!
//! Pages that any checkpoint in the pool has already are not stored again ([`catalog`]). What the
//! daemon knows to be unchanged since the last checkpoint is not even read.
//!
//! The kernel clears its notes of written pages when somebody reads them. The daemon reads them
//! too, so it is asked to leave the process alone while its checkpoint is taken ([`Freeze`]). A guest
//! does not stay stopped, whatever happens here ([`guard`]).
//!
//! *Direct I/O.* The kernel notes a page when a request takes hold of it; the device may write to
//! it later, when it has been stored and the note is cleared. So in a process that may do direct
//! I/O what was noted in any round is copied once more while it stands, the latest first, as far as
//! the pause allows.

mod catalog;
mod guard;
mod source;

use std::path::{Path, PathBuf};
use std::sync::mpsc::{channel, sync_channel};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use dirty::DirtyTree;
use mpool::{Access, AlignedBuf, BLOCK, Mcache, Settings};
use serde_json::json;

pub(crate) use catalog::Catalog;
use catalog::{Checkpoint, PutOff, Writer, hash};
pub(crate) use guard::{Args as GuardArgs, run as guard};
use source::Source;

use control::ChangeLog;
use control::client::Freeze;

use crate::paths;
use crate::pool::{Names, size};

/// Options of `pageone checkpoint`.
#[derive(clap::Args)]
pub(crate) struct Args {
    #[command(flatten)]
    names: Names,
    /// Process, or the name that it was started by (the last part of its program's path)
    #[arg(value_name = "PID|NAME")]
    target: String,
    /// Pool: a name, or the path of its capacity class
    #[arg(long, value_name = "POOL")]
    to: String,
    /// Name of the checkpoint [default: PROGRAM-PID-SECONDS]
    #[arg(long)]
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
    /// One JSON object
    #[arg(long)]
    json: bool,
}

/// Options of `pageone restore`.
#[derive(clap::Args)]
pub(crate) struct RestoreArgs {
    #[command(flatten)]
    names: Names,
    /// Pool: a name, or the path of its capacity class
    #[arg(value_name = "POOL")]
    from: String,
    /// The checkpoint
    checkpoint: String,
    /// File for the memory: all regions, one behind the other; zeros become holes
    #[arg(long, value_name = "FILE")]
    to: PathBuf,
}

/// Pages read at a time: few enough to be in the processor's cache still when they are stored.
const BATCH: usize = 256;
/// Batches read ahead.
const QUEUE: usize = 4;
/// Rounds after which a guest counts as one that writes too fast.
const ROUNDS: usize = 12;
/// With so few pages left another round gains nothing.
const FEW: u64 = 1024;
/// What copying a page during the pause is reckoned at, at least; 0.64 µs were measured.
const PAGE_COPY: Duration = Duration::from_micros(1);
/// What stopping and scanning is reckoned at.
const STOPPING: Duration = Duration::from_millis(10);
/// How often the process is stopped, when each time the agent or the guest gave memory back or took
/// some in hand.
const STOPS: usize = 4;

/// How long a daemon that does not know the process may take to meet it: agents look for one every
/// 5 s at least.
const MEETING: Duration = Duration::from_secs(6);

/// Where the time goes.
struct Phases {
    since: Instant,
    all: serde_json::Map<String, serde_json::Value>,
}

impl Phases {
    fn new() -> Self {
        Self { since: Instant::now(), all: serde_json::Map::new() }
    }

    /// Ends a phase.
    fn end(&mut self, name: &str) {
        let now = Instant::now();
        let before = self.all.get(name).and_then(serde_json::Value::as_f64).unwrap_or(0.0);
        self.all.insert(name.into(), (before + (now - self.since).as_secs_f64()).into());
        self.since = now;
    }
}

/// Finds a process by its number or its program's name.
fn find_process(target: &str) -> Result<i32> {
    if let Ok(pid) = target.parse() {
        return Ok(pid);
    }
    let mut found = Vec::new();
    for entry in std::fs::read_dir("/proc")?.flatten() {
        let Some(pid) = entry.file_name().to_str().and_then(|name| name.parse::<i32>().ok()) else { continue };
        if program(pid).as_deref() == Some(target) {
            found.push(pid);
        }
    }
    match found[..] {
        [pid] => Ok(pid),
        [] => bail!("no process is called {target}"),
        _ => bail!("several processes are called {target}: {found:?}; say which"),
    }
}

fn program(pid: i32) -> Option<String> {
    let path = std::fs::read_link(format!("/proc/{pid}/exe")).ok()?;
    Some(path.file_name()?.to_string_lossy().into_owned())
}

/// What storing pages took.
struct Stored {
    pages: u64,
    /// Reading them from the guest, alone.
    reading: Duration,
}

fn hashes(bytes: &[u8], seed: u64) -> Vec<Option<u128>> {
    bytes.chunks_exact(BLOCK).map(|page| hash(page, seed)).collect()
}

/// Reads the pages of each batch in a thread of its own, while `put` takes what was read before.
/// The buffers go round: new ones would cost more than what is done with them.
fn pump<T: Send>(
    source: &Source,
    batches: impl Iterator<Item = T> + Send,
    pages: impl Fn(&T) -> Vec<u64> + Send,
    mut put: impl FnMut(T, &[u8]) -> Result<()>,
) -> Result<Duration> {
    std::thread::scope(|scope| {
        let (to, from) = sync_channel(QUEUE);
        let (back, free) = channel::<AlignedBuf>();
        let reader = scope.spawn(move || -> Result<Duration> {
            let mut reading = Duration::ZERO;
            for batch in batches {
                let start = Instant::now();
                let mut buffer = free.try_recv().unwrap_or_else(|_| AlignedBuf::zeroed(BATCH * BLOCK));
                let pages = pages(&batch);
                source.read(&pages, &mut buffer[..pages.len() * BLOCK])?;
                reading += start.elapsed();
                if to.send((batch, buffer, pages.len())).is_err() {
                    break; // Storing failed, and says why.
                }
            }
            Ok(reading)
        });
        for (batch, buffer, pages) in from {
            put(batch, &buffer[..pages * BLOCK])?;
            // The reader may be at its end.
            let _ = back.send(buffer);
        }
        reader.join().map_err(|_| anyhow::anyhow!("reading the guest's memory panicked"))?
    })
}

/// Stores the pages of a set: first those that the pool has not; then those that look like a page
/// of the pool are read again, in the order in which the pool has them, and compared.
fn store(source: &Source, set: &DirtyTree, writer: &mut Writer) -> Result<Stored> {
    let all: Vec<u64> = set.iter().collect();
    let seed = writer.seed();
    let put = |pages: &[u64], bytes: &[u8]| writer.put(pages, bytes, &hashes(bytes, seed));
    let mut reading = pump(source, all.chunks(BATCH), |pages| pages.to_vec(), put)?;
    let off = writer.put_off();
    let pages = |off: &&[PutOff]| off.iter().map(|off| off.page).collect();
    reading += pump(source, off.chunks(BATCH), pages, |off, bytes| writer.put_again(off, bytes))?;
    Ok(Stored { pages: (all.len() + off.len()) as u64, reading })
}

/// Stores pages that have been read already; `pages` is sorted.
fn store_read(pages: &[u64], bytes: &[u8], writer: &mut Writer) -> Result<()> {
    writer.put(pages, bytes, &hashes(bytes, writer.seed()))?;
    let mut batch = AlignedBuf::zeroed(BATCH * BLOCK);
    for off in writer.put_off().chunks(BATCH) {
        for (PutOff { page, .. }, to) in off.iter().zip(batch.chunks_exact_mut(BLOCK)) {
            let at = pages.binary_search(page).map_err(|_| anyhow::anyhow!("page {page} was not read"))?;
            to.copy_from_slice(&bytes[at * BLOCK..(at + 1) * BLOCK]);
        }
        writer.put_again(off, &batch)?;
    }
    Ok(())
}

/// A buffer for what is copied during the pause of which `pages` pages are known, and some more.
/// Its memory is there: getting it takes longer than copying.
fn room(pages: u64) -> AlignedBuf {
    let mut bytes = AlignedBuf::zeroed((pages + pages / 4 + FEW) as usize * BLOCK);
    bytes.iter_mut().step_by(BLOCK).for_each(|byte| *byte = 1);
    bytes
}

/// What came of it.
struct Taken {
    /// How long the process stood, at the longest.
    pause: Duration,
    rounds: usize,
    /// Pages copied while it stood.
    last: u64,
    /// Pages that were not read: the daemon knows that they have not changed since the last
    /// checkpoint.
    unchanged: u64,
    /// What was found written, in a process that may do direct I/O.
    written: Option<Vec<(u64, u64)>>,
}

/// Stores a checkpoint.
pub(crate) fn run(args: &Args, dir: Option<PathBuf>) -> Result<()> {
    let (start, mut phases) = (Instant::now(), Phases::new());
    let pid = find_process(&args.target)?;
    let mut source = Source::open(pid)?;
    ensure!(
        source.tracked || args.stop,
        "nothing tracks what process {pid} writes: start it with `pageone run`, or let it be stopped for the whole time with --stop"
    );
    let program = program(pid).unwrap_or_else(|| "process".into());
    let seconds = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH)?.as_secs();
    let name = args.name.clone().unwrap_or_else(|| format!("{program}-{pid}-{seconds}"));
    let pool = args.names.open(&args.to, Access::Exclusive)?;
    let mut writer = Catalog::open(&pool)?.begin(&name)?;
    phases.end("open");
    let directories = paths::candidates(dir);
    let mut hold = if source.tracked { Freeze::ask(&directories, pid, MEETING)? } else { None };
    phases.end("hold");
    let taken = take(args, &mut source, hold.as_mut(), &directories, &mut writer, &mut phases);
    let taken = match taken {
        Ok(taken) => taken,
        Err(e) => {
            writer.abandon();
            return Err(e).with_context(|| format!("checkpoint {name} was not stored"));
        }
    };
    let checkpoint = writer.commit(format!("{program} {pid}"), source.addresses()).map_err(|e| full(e, &args.to))?;
    phases.end("commit");
    let noted = taken.written.is_some() || !source.may_do_direct_io();
    if let Some(hold) = hold.filter(|_| noted && !source.is_pinned()) {
        // Without a mark the next checkpoint reads everything.
        let _ = hold.mark(Catalog::label(&pool, &checkpoint), taken.written.clone());
    }
    report(args, &checkpoint, &taken, start.elapsed(), phases);
    Ok(())
}

/// Says what helps against a full pool.
fn full(error: anyhow::Error, pool: &str) -> anyhow::Error {
    match error.downcast_ref() {
        Some(mpool::ObjectError::Full { .. }) => error
            .context(format!("pool {pool} is full: `pageone pool rm {pool} CHECKPOINT` removes an earlier checkpoint")),
        _ => error,
    }
}

fn report(args: &Args, checkpoint: &Checkpoint, taken: &Taken, time: Duration, phases: Phases) {
    let stored = (checkpoint.new_pages + checkpoint.map_pages()) * BLOCK as u64;
    let (seconds, pause_ms) = (time.as_secs_f64(), taken.pause.as_secs_f64() * 1e3);
    if args.json {
        let out = json!({
            "name": checkpoint.name, "memory_bytes": checkpoint.bytes(), "stored_bytes": stored, "seconds": seconds,
            "pause_ms": pause_ms, "rounds": taken.rounds, "pages_in_pause": taken.last, "pages_unchanged": taken.unchanged,
            "phases": phases.all,
        });
        println!("{out}");
    } else {
        println!(
            "{}: {} of memory, {} stored, {seconds:.2} s, {} rounds, stopped for {pause_ms:.1} ms",
            checkpoint.name,
            size(checkpoint.bytes()),
            size(stored),
            taken.rounds
        );
    }
}

/// Stores the memory, all but committing it.
fn take(
    args: &Args,
    source: &mut Source,
    hold: Option<&mut Freeze>,
    directories: &[PathBuf],
    writer: &mut Writer,
    phases: &mut Phases,
) -> Result<Taken> {
    // Only now: the agent is at rest.
    source.find_at_rest(source.tracked && hold.is_none())?;
    writer.set_pages(source.pages() as usize);
    let taken = if args.stop {
        take_stopped(source, writer).map_err(|e| full(e, &args.to))?
    } else {
        take_running(
            args,
            source,
            hold.as_deref().map(|hold| hold.changes.as_ref()).unwrap_or_default(),
            writer,
            phases,
        )
        .map_err(|e| full(e, &args.to))?
    };
    let alone = match &hold {
        Some(hold) => hold.lasts(),
        None => !source.tracked || Freeze::ask(directories, source.pid, Duration::ZERO)?.is_none(),
    };
    ensure!(
        alone,
        "a daemon was started, or ended, meanwhile, and may have cleared notes of writes: take the checkpoint again"
    );
    Ok(taken)
}

fn set(source: &Source) -> Result<DirtyTree> {
    DirtyTree::new(source.pages()).context("cannot make a set of pages")
}

fn take_stopped(source: &Source, writer: &mut Writer) -> Result<Taken> {
    let mut guard = guard::Guard::start(&source.to_resume())?;
    guard.ready()?;
    let stopped = source.stop()?;
    ensure!(!source.tracked || source.is_tracked()?, "the agent is changing mappings: take the checkpoint again");
    let all = set(source)?;
    source.populated(&source.files()?, &all)?;
    let last = store(source, &all, writer)?.pages;
    Ok(Taken { pause: stopped.resume(), rounds: 0, last, unchanged: 0, written: None })
}

/// Notes the unchanged pages as they were; gives how many, and the rest of `all`.
fn carry(
    source: &Source,
    since: &ChangeLog,
    map: &[u64],
    all: &DirtyTree,
    noted: &DirtyTree,
    writer: &mut Writer,
) -> Result<(u64, DirtyTree)> {
    let (changed, rest) = (set(source)?, set(source)?);
    source.insert(&since.changed, &changed);
    changed.unite(noted);
    let mut unchanged = 0;
    for page in all.iter() {
        if changed.contains(page) {
            rest.insert(page);
        } else {
            writer.carry(page, map[page as usize]);
            unchanged += 1;
        }
    }
    Ok((unchanged, rest))
}

fn take_running(
    args: &Args,
    source: &mut Source,
    since: Option<&ChangeLog>,
    writer: &mut Writer,
    phases: &mut Phases,
) -> Result<Taken> {
    let pid = source.pid;
    let resume = source.to_resume();
    let mut guard = guard::Guard::start(&resume)?;
    let direct = source.may_do_direct_io();
    // From here on every write is noted; then everything is copied. As a rule what is merged stays as
    // it is, the agent being at rest; whether it did is looked at when all is done.
    let mut merged = source.merged().clone();
    let noted = set(source)?;
    source.written(&noted)?;
    let all = set(source)?;
    source.populated(&merged, &all)?;
    phases.end("scan");
    let earlier = match since.filter(|_| !args.full && !source.is_pinned()) {
        Some(since) => writer.earlier(&since.label, &source.addresses()).map(|map| map.map(|map| (since, map))),
        None => Ok(None),
    };
    let earlier = earlier.unwrap_or_else(|e| {
        eprintln!("pageone: {e:#}; all of the memory is read");
        None
    });
    let (unchanged, mut stored) = match earlier {
        Some((since, map)) => {
            let (unchanged, rest) = carry(source, since, &map, &all, &noted, writer)?;
            (unchanged, store(source, &rest, writer)?)
        }
        None => (0, store(source, &all, writer)?),
    };
    phases.end("first_pass");
    let budget = Duration::from_millis(args.max_pause).saturating_sub(STOPPING);
    // What is written while the rest is copied during the pause comes on top.
    let fits = |each: Duration| (budget.as_nanos() / each.max(PAGE_COPY).as_nanos() / 2) as u64;
    let mut before = u64::MAX;
    let mut rounds = 0;
    // What each round found, the first look too.
    let mut found = vec![noted];
    let (rest, each) = loop {
        rounds += 1;
        let written = set(source)?;
        source.written(&written)?;
        let count = written.count();
        // As fast as it went just now, others having worked too.
        let each = stored.reading / stored.pages.clamp(1, u64::from(u32::MAX)) as u32;
        // As long as rounds get shorter, so does the pause.
        if count <= fits(each) && (count <= FEW || count > before / 2) {
            break (written, each);
        }
        before = count;
        if rounds >= ROUNDS {
            ensure!(
                count <= fits(PAGE_COPY),
                "the guest writes faster than it can be stored: {count} pages are left after {rounds} rounds; use --max-pause {} or --stop",
                2 * count / 1000 + 20
            );
            break (written, each);
        }
        stored = store(source, &written, writer)?;
        found.push(written);
    };
    let mut written = None;
    if direct {
        let noted = set(source)?;
        noted.unite(&rest);
        for older in found.iter().rev() {
            noted.unite(older);
            if noted.count() <= fits(each) {
                rest.unite(older);
            }
        }
        written = Some(source.parts(&noted));
    }
    drop(found);
    phases.end("rounds");
    ensure!(
        !resume.is_empty() || source.is_stopped(),
        "process {pid} was stopped and went on meanwhile: take the checkpoint again"
    );
    guard.ready()?;
    phases.end("guard");
    let mut pause = Duration::ZERO;
    let mut bytes;
    let mut stops = 0;
    let list: Vec<u64> = loop {
        stops += 1;
        bytes = room(rest.count());
        phases.end("room");
        // The guest stands, and waits for nothing but this.
        let first = guard::First::begin(None);
        let stopped = source.stop()?;
        phases.end("pause_stop");
        // Asking for the mappings takes longest; as a rule they are what they were before, as is looked at
        // afterwards.
        let files = if stops < STOPS { None } else { Some(source.files()?) };
        let now = set(source)?;
        source.look(files.as_ref().unwrap_or(&merged), &rest, &now)?;
        let tracked = source.is_tracked()?;
        files
            .iter()
            .flat_map(|files| files.difference(&merged))
            .for_each(|part| rest.insert_range(part.first, part.pages));
        // What was given back since (by a balloon, say) is zeros now, as reading tells.
        let gone: Vec<u64> = all.iter().filter(|&page| !now.contains(page)).collect();
        gone.into_iter().for_each(|page| {
            rest.insert(page);
        });
        phases.end("pause_look");
        let list: Vec<u64> = rest.iter().collect();
        if bytes.len() < list.len() * BLOCK {
            bytes = AlignedBuf::zeroed(list.len() * BLOCK);
        }
        source.read(&list, &mut bytes[..list.len() * BLOCK])?;
        pause = pause.max(stopped.resume());
        drop(first);
        phases.end("pause_read");
        ensure!(
            source.is_as_found()?,
            "process {pid} has mapped or unmapped memory meanwhile: take the checkpoint again"
        );
        let after = source.merged();
        if tracked && (files.is_some() || *after == merged) {
            break list;
        }
        ensure!(stops < STOPS, "the agent in process {pid} is changing mappings: take the checkpoint again");
        after.difference(&merged).for_each(|part| rest.insert_range(part.first, part.pages));
        merged = after.clone();
    };
    phases.end("look_again");
    store_read(&list, &bytes[..list.len() * BLOCK], writer)?;
    phases.end("store_rest");
    Ok(Taken { pause, rounds, last: list.len() as u64, unchanged, written })
}

/// Writes a checkpoint's memory to a file.
pub(crate) fn restore(args: &RestoreArgs) -> Result<()> {
    let pool = args.names.open(&args.from, Access::Shared)?;
    let catalog = Catalog::open(&pool)?;
    let checkpoint = catalog.find(&args.checkpoint)?;
    if let Some(damage) = catalog.damage() {
        eprintln!("pageone: {damage}");
    }
    // Under another name until it is whole: a part of a memory is no memory.
    let mut part = args.to.clone().into_os_string();
    part.push(".part");
    let part = PathBuf::from(part);
    let written = write_image(&catalog, checkpoint, &part);
    if let Err(e) = written.and_then(|()| Ok(std::fs::rename(&part, &args.to)?)) {
        let _ = std::fs::remove_file(&part);
        return Err(e).with_context(|| format!("{} was not written", args.to.display()));
    }
    let mut offset = 0;
    for (address, len) in &checkpoint.regions {
        println!("{offset:#14x} {len:#14x}  was at {address:#x}");
        offset += len;
    }
    Ok(())
}

fn write_image(catalog: &Catalog, checkpoint: &Checkpoint, to: &Path) -> Result<()> {
    use std::os::unix::fs::FileExt;
    let file = std::fs::File::create(to).with_context(|| format!("cannot make {}", to.display()))?;
    file.set_len(checkpoint.bytes())?;
    let cache = Mcache::new(Settings::default())?;
    catalog.each_run(&cache, checkpoint, |offset, bytes| Ok(file.write_all_at(bytes, offset)?))?;
    Ok(file.sync_data()?)
}
