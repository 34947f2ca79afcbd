//! A power failure at every flush.
//!
//! The workload runs on dm-log-writes. Then the log is done again on a copy of the device, up to
//! each point at which more became durable, and the pool there is checked. Twice: as the log says,
//! and with a part of what was on its way to the medium.

use std::fs::File;
use std::path::Path;
use std::sync::atomic::AtomicBool;

use anyhow::{Context, Result, bail, ensure};

use crate::block::{FileSystem, Loop, Mapped, SECTOR, copy, directory, kernel_says, sparse};
use crate::log::{Entry, WriteLog};
use crate::promise::{Event, Operation, Promise};
use crate::work::{Journal, Worker, acknowledged, make};
use crate::{Random, Settings};

/// Bytes that the log of writes may have; the file is sparse.
const LOG_BYTES: u64 = 2 << 30;
/// States that contradict what was acknowledged are checked this often, to see that it is noticed.
const LIES: u64 = 3;

/// What was done.
#[derive(Debug, Default)]
pub(crate) struct Replayed {
    flushes: u64,
    pub(crate) checks: u64,
    partial: u64,
    acknowledged: u64,
    lies: u64,
    pub(crate) losses: Vec<String>,
}

impl std::fmt::Display for Replayed {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Self { flushes, checks, partial, acknowledged, lies, losses } = self;
        let losses = losses.len();
        write!(
            f,
            "{acknowledged} operations acknowledged, {flushes} flushes, {checks} of them replayed, {partial} with a part \
             of what came next, {losses} losses; {lies} of {LIES} lies noticed"
        )
    }
}

/// A point of the log: all entries before `end` are on the medium.
struct Point {
    end: usize,
    /// Entries from `end` up to here are on their way: nothing made them durable.
    next: usize,
    /// Events before it.
    events: usize,
}

/// The points at which something became durable, or was acknowledged, and no more is written.
fn points(entries: &[Entry]) -> Vec<Point> {
    let (mut points, mut events, mut began) = (Vec::new(), 0, false);
    for (i, entry) in entries.iter().enumerate() {
        events = entry.mark.unwrap_or(events);
        began |= entry.mark.is_some();
        let is_last = !entries.get(i + 1).is_some_and(Entry::is_mark);
        if began && (entry.is_durable() || entry.is_mark()) && is_last {
            let rest = entries[i + 1..].iter().take_while(|entry| !entry.is_durable() && !entry.is_mark());
            points.push(Point { end: i + 1, next: i + 1 + rest.count(), events });
        }
    }
    points
}

/// Runs the workload on a file system that is on dm-log-writes.
fn record(fs: &FileSystem, work: &Path, root: &Path, settings: &Settings) -> Result<(Vec<Event>, WriteLog, File)> {
    let sectors = fs.bytes / SECTOR;
    let (device, image) = (sparse(&work.join("device"), fs.bytes)?, sparse(&work.join("image"), fs.bytes)?);
    let log = sparse(&work.join("log"), LOG_BYTES)?;
    let (under, writes) = (Loop::attach(&work.join("device"))?, Loop::attach(&work.join("log"))?);
    fs.make(under.path())?;
    copy(&device, &image)?;
    let table = format!("0 {sectors} log-writes {} {}", under.path().display(), writes.path().display());
    let mapped = Mapped::create(format!("medium-{}", fs.name), &table)?;
    let journal = Journal::with_marks(mapped.messages()?);
    let mounted = fs.mount(mapped.path(), root)?;
    make(root, &journal)?;
    let promise = Promise::default().after(&journal.events());
    let mut worker = Worker::new(root, &journal, &promise, settings.seed)?;
    worker.work(settings.steps, &AtomicBool::new(false)).context("the workload")?;
    drop(worker);
    mounted.unmount()?;
    let events = journal.events();
    drop(journal);
    mapped.remove()?;
    Ok((events, WriteLog::read(log)?, image))
}

/// The lane on one file system.
pub(crate) fn run(fs: &FileSystem, work: &Path, settings: &Settings) -> Result<Replayed> {
    let root = directory(work.join("mounted"))?;
    let (events, log, image) = record(fs, work, &root, settings)?;
    let points = points(&log.entries);
    ensure!(!points.is_empty(), "the device was never flushed");
    let flushes = log.entries.iter().filter(|entry| entry.is_durable()).count() as u64;
    println!("{}: {} events, {flushes} flushes, {} points", fs.name, events.len(), points.len());
    let mut done = Replayed { flushes, acknowledged: acknowledged(&events), ..Replayed::default() };
    let scratch = sparse(&work.join("device"), fs.bytes)?;
    let device = Loop::attach(&work.join("device"))?;
    let mut random = Random::new(settings.seed);
    let (last, lies) = lies(&points, &events).context("too few steps: nothing was committed")?;
    let mut at = 0;
    for (number, point) in points.iter().enumerate() {
        for entry in &log.entries[at..point.end] {
            log.apply(entry, &image)?;
        }
        at = point.end;
        let promise = Promise::default().after(&events[..point.events]);
        if lies.contains(&number) {
            copy(&image, &scratch)?;
            // As if what was acknowledged after this had been so now.
            let lie = Promise::default().after(&events[..=last]);
            done.lies += u64::from(verify(fs, &device, &root, lie).is_err());
        }
        if !(number as u64).is_multiple_of(settings.every) {
            continue;
        }
        copy(&image, &scratch)?;
        let result = verify(fs, &device, &root, promise.clone());
        done.checks += 1;
        done.note(fs, number, point, &events, "", result);
        if point.next > point.end {
            copy(&image, &scratch)?;
            log.apply_some(&log.entries[point.end..point.next], &scratch, &mut random)?;
            let result = verify(fs, &device, &root, promise);
            done.partial += 1;
            done.note(fs, number, point, &events, ", and a part of the next writes", result);
        }
        if done.losses.len() > 4 {
            bail!("{} losses: the rest is not tried", done.losses.len());
        }
    }
    ensure!(done.lies == LIES, "only {} of {LIES} lies were noticed: the lane sees nothing", done.lies);
    Ok(done)
}

/// The last event that acknowledges a commit, and points before that began.
fn lies(points: &[Point], events: &[Event]) -> Option<(usize, Vec<usize>)> {
    let commit = |event: &Event| match &event.operation {
        Operation::Commit(ids) => Some(ids.clone()),
        _ => None,
    };
    let last = events.iter().rposition(|event| event.done && commit(event).is_some())?;
    let began = events.iter().position(|event| !event.done && commit(event) == commit(&events[last]))?;
    let early = points.iter().take_while(|point| point.events <= began).count();
    Some((last, (1..=LIES as usize).map(|i| early * i / (LIES as usize + 1)).collect()))
}

/// Mounts the device, and compares the pool with what was promised.
fn verify(fs: &FileSystem, device: &Loop, root: &Path, mut promise: Promise) -> Result<()> {
    let mounted = fs.mount(device.path(), root)?;
    promise.verify(root)?;
    mounted.unmount()
}

impl Replayed {
    fn note(&mut self, fs: &FileSystem, number: usize, point: &Point, events: &[Event], how: &str, result: Result<()>) {
        let Err(error) = result else { return };
        let last = point.events.checked_sub(1).and_then(|last| events.get(last));
        let loss = format!("{}: flush {number}{how}, after {last:?}: {error:#}", fs.name);
        println!("{loss}\n{}", kernel_says());
        self.losses.push(loss);
    }
}
