//! `pageone checkpoint` and `pageone restore`: the RAM of a running guest into an mpool and back.
//!
//! 1. Every page that is there is stored, while the guest runs; those that it writes meanwhile are noted.
//! 2. Rounds: what was written is stored again, until what is left can be copied within the longest pause.
//! 3. The guest stops, what is left is copied into memory, the guest goes on. Only then is it stored.
//!
//! Pages that any checkpoint in the pool has already are not stored again ([`catalog`]).
//!
//! The kernel clears its notes of written pages when somebody reads them. The daemon reads them too, so it is asked to leave the process
//! alone while its checkpoint is taken ([`Hold`]). A guest does not stay stopped, whatever happens here ([`guard`]).

mod catalog;
mod guard;
mod source;

use std::path::{Path, PathBuf};
use std::sync::mpsc::{channel, sync_channel};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use dirty::DirtyTree;
use mpool::{Access, AlignedBuf, BLOCK, Mcache, Settings, Temperature};
use rustix::process::{getpriority_process, setpriority_process};
use serde_json::json;

pub(crate) use catalog::Catalog;
use catalog::{Writer, hash};
pub(crate) use guard::{Args as GuardArgs, run as guard};
use source::Source;

use crate::control::Hold;
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
    /// Stop the process for the whole time: for one that is no client, or writes faster than it can be stored
    #[arg(long)]
    stop: bool,
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

/// How long a daemon that does not know the process may take to meet it: agents look for one every 5 s at least.
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

/// Reads the pages of each batch in a thread of its own, while `put` takes what was read before. The buffers go round: new ones would
/// cost more than what is done with them.
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

/// Stores the pages of a set: first those that the pool has not; then those that look like a page of the pool are read again,
/// in the order in which the pool has them, and compared.
fn store(source: &Source, set: &DirtyTree, writer: &mut Writer) -> Result<Stored> {
    let all: Vec<u64> = set.iter().collect();
    let seed = writer.seed();
    let put = |pages: &[u64], bytes: &[u8]| writer.put(pages, bytes, &hashes(bytes, seed));
    let mut reading = pump(source, all.chunks(BATCH), |pages| pages.to_vec(), put)?;
    let off = writer.put_off();
    let pages = |off: &&[(u64, u64)]| off.iter().map(|(_, page)| *page).collect();
    reading += pump(source, off.chunks(BATCH), pages, |off, bytes| writer.put_again(off, bytes))?;
    Ok(Stored { pages: (all.len() + off.len()) as u64, reading })
}

/// Stores pages that have been read already; `pages` is sorted.
fn store_read(pages: &[u64], bytes: &[u8], writer: &mut Writer) -> Result<()> {
    writer.put(pages, bytes, &hashes(bytes, writer.seed()))?;
    let mut batch = AlignedBuf::zeroed(BATCH * BLOCK);
    for off in writer.put_off().chunks(BATCH) {
        for ((_, page), to) in off.iter().zip(batch.chunks_exact_mut(BLOCK)) {
            let at = pages.binary_search(page).map_err(|_| anyhow::anyhow!("page {page} was not read"))?;
            to.copy_from_slice(&bytes[at * BLOCK..(at + 1) * BLOCK]);
        }
        writer.put_again(off, &batch)?;
    }
    Ok(())
}

/// A buffer for what is copied during the pause of which `pages` pages are known, and some more. Its memory is there: getting it takes
/// longer than copying.
fn room(pages: u64) -> AlignedBuf {
    let mut bytes = AlignedBuf::zeroed((pages + pages / 4 + 4 * FEW) as usize * BLOCK);
    bytes.iter_mut().step_by(BLOCK).for_each(|byte| *byte = 1);
    bytes
}

/// Goes before everybody else while it is there: the guest stands, and waits for nothing but this. Without permission it changes nothing.
struct Urgent(Option<i32>);

impl Urgent {
    fn begin() -> Self {
        let before = getpriority_process(None).ok();
        Self(before.filter(|_| setpriority_process(None, -20).is_ok()))
    }
}

impl Drop for Urgent {
    fn drop(&mut self) {
        if let Some(before) = self.0 {
            let _ = setpriority_process(None, before);
        }
    }
}

/// Stores a checkpoint.
pub(crate) fn run(args: &Args, dir: Option<PathBuf>) -> Result<()> {
    let (start, mut phases) = (Instant::now(), Phases::new());
    let pid = find_process(&args.target)?;
    let source = Source::find(pid)?;
    ensure!(
        source.tracked || args.stop,
        "nothing tracks what process {pid} writes: start it with `pageone run`, or let it be stopped for the whole time with --stop"
    );
    let program = program(pid).unwrap_or_else(|| "process".into());
    let seconds = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH)?.as_secs();
    let name = args.name.clone().unwrap_or_else(|| format!("{program}-{pid}-{seconds}"));
    let pool = args.names.open(&args.to, Access::Exclusive)?;
    let pages = source.pages();
    let mut writer = Catalog::open(&pool)?.begin(&name, pages as usize)?;
    phases.end("open");

    let set = || DirtyTree::new(pages).context("cannot make a set of pages");
    let mut rounds = 0;
    let (pause, last);
    if args.stop {
        let resume = source.to_resume();
        let _guard = guard::Guard::start(&resume)?;
        let stopped = source.stop()?;
        let all = set()?;
        source.populated(&source.files()?, &all)?;
        last = store(&source, &all, &mut writer)?.pages;
        pause = stopped.resume();
    } else {
        let directories = paths::candidates(dir);
        let hold = Hold::ask(&directories, pid, MEETING)?;
        let resume = source.to_resume();
        let _guard = guard::Guard::start(&resume)?;
        // From here on every write is noted; then everything is copied.
        phases.end("hold");
        let mut merged = source.files()?;
        source.written(true, &set()?)?;
        let all = set()?;
        source.populated(&source.files()?, &all)?;
        phases.end("scan");
        let mut stored = store(&source, &all, &mut writer)?;
        phases.end("first_pass");
        let budget = Duration::from_millis(args.max_pause).saturating_sub(STOPPING);
        // What is written while the rest is copied during the pause comes on top.
        let fits = |each: Duration| (budget.as_nanos() / each.max(PAGE_COPY).as_nanos() / 2) as u64;
        let mut before = u64::MAX;
        let rest = loop {
            rounds += 1;
            let written = set()?;
            source.written(true, &written)?;
            // An agent may have finished a batch that it had, and with it notes of writes: what it mapped counts as written.
            let files = source.files()?;
            files.difference(&merged).for_each(|part| written.insert_range(part.first, part.pages));
            merged = files;
            let count = written.count();
            // As fast as it went just now, others having worked too.
            let each = stored.reading / stored.pages.clamp(1, u64::from(u32::MAX)) as u32;
            // As long as rounds get shorter, so does the pause.
            if count <= fits(each) && (count <= FEW || count > before / 2) {
                break written;
            }
            before = count;
            if rounds >= ROUNDS {
                ensure!(
                    count <= fits(PAGE_COPY),
                    "the guest writes faster than it can be stored: {count} pages are left after {rounds} rounds; use --max-pause {} or --stop",
                    2 * count / 1000 + 20
                );
                break written;
            }
            stored = store(&source, &written, &mut writer)?;
        };
        phases.end("rounds");
        ensure!(
            !resume.is_empty() || source.is_stopped(),
            "process {pid} was stopped and went on meanwhile: take the checkpoint again"
        );
        let mut bytes = room(rest.count());
        let urgent = Urgent::begin();
        let stopped = source.stop()?;
        phases.end("pause_stop");
        source.written(false, &rest)?;
        phases.end("pause_written");
        let files = source.files()?;
        files.difference(&merged).for_each(|part| rest.insert_range(part.first, part.pages));
        phases.end("pause_files");
        // What was given back since (by a balloon, say) is zeros now, as reading tells.
        let now = set()?;
        source.populated(&files, &now)?;
        all.iter().filter(|&page| !now.contains(page)).for_each(|page| {
            rest.insert(page);
        });
        phases.end("pause_populated");
        let list: Vec<u64> = rest.iter().collect();
        if bytes.len() < list.len() * BLOCK {
            bytes = AlignedBuf::zeroed(list.len() * BLOCK);
        }
        let bytes = &mut bytes[..list.len() * BLOCK];
        source.read(&list, bytes)?;
        pause = stopped.resume();
        phases.end("pause_read");
        let alone = match &hold {
            Some(hold) => hold.lasts(),
            None => Hold::ask(&directories, pid, Duration::ZERO)?.is_none(),
        };
        ensure!(
            alone,
            "a daemon was started, or ended, meanwhile, and may have cleared notes of writes: take the checkpoint again"
        );
        last = list.len() as u64;
        drop(urgent);
        store_read(&list, bytes, &mut writer)?;
    }
    let regions = source.regions.iter().map(|r| (r.start as u64, r.len as u64)).collect();
    let checkpoint = writer.commit(format!("{program} {pid}"), regions)?;
    phases.end("commit");
    let stored = (checkpoint.new_pages + checkpoint.map_pages()) * BLOCK as u64;
    let (seconds, pause_ms) = (start.elapsed().as_secs_f64(), pause.as_secs_f64() * 1e3);
    if args.json {
        let out = json!({
            "name": checkpoint.name, "memory_bytes": checkpoint.bytes(), "stored_bytes": stored, "seconds": seconds,
            "pause_ms": pause_ms, "rounds": rounds, "pages_in_pause": last, "phases": phases.all,
        });
        println!("{out}");
    } else {
        println!(
            "{}: {} of memory, {} stored, {seconds:.2} s, {rounds} rounds, stopped for {pause_ms:.1} ms",
            checkpoint.name,
            size(checkpoint.bytes()),
            size(stored)
        );
    }
    Ok(())
}

/// Writes a checkpoint's memory to a file.
pub(crate) fn restore(args: &RestoreArgs) -> Result<()> {
    let pool = args.names.open(&args.from, Access::Shared)?;
    let catalog = Catalog::open(&pool)?;
    let checkpoint = catalog.find(&args.checkpoint)?;
    let map = catalog.map(checkpoint)?;
    write_image(&pool, &map, &args.to)?;
    let mut offset = 0;
    for (address, len) in &checkpoint.regions {
        println!("{offset:#14x} {len:#14x}  was at {address:#x}");
        offset += len;
    }
    Ok(())
}

/// The pages come from one mcache map of all data mblocks that the checkpoint needs.
fn write_image(pool: &mpool::Pool, map: &[u64], to: &Path) -> Result<()> {
    use std::os::unix::fs::FileExt;
    let file = std::fs::File::create(to).with_context(|| format!("cannot make {}", to.display()))?;
    file.set_len((map.len() * BLOCK) as u64)?;
    let mut ids: Vec<u64> = map.iter().filter(|&&at| at != 0).map(|at| at >> 16).collect();
    ids.sort_unstable();
    ids.dedup();
    if ids.is_empty() {
        return Ok(());
    }
    let cache = Mcache::new(Settings::default())?;
    let pages = cache.map(pool, &ids, Temperature::Cold)?;
    pages.advise(0, 0, 0, mpool::Advice::Sequential)?;
    let mut at = 0;
    while at < map.len() {
        if map[at] == 0 {
            at += 1;
            continue;
        }
        // Pages that lie one behind the other are written in one go.
        let run = (1..256).take_while(|&i| map.get(at + i) == Some(&(map[at] + i as u64))).count() + 1;
        let index = ids.binary_search(&(map[at] >> 16)).map_err(|_| anyhow::anyhow!("a data mblock is not mapped"))?;
        let bytes = pages.get(index, (map[at] & 0xFFFF) * BLOCK as u64, run * BLOCK)?;
        file.write_all_at(bytes, (at * BLOCK) as u64)?;
        at += run;
    }
    file.sync_data()?;
    Ok(())
}
