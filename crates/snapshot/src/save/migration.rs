//! Storing a guest that was not prepared.
//!
//! QEMU migrates it, live, into a pipe. What comes out is split: RAM goes into the pool page by
//! page, the rest is the device stream ([`stream`](crate::stream)). When little is left, QEMU stops
//! the guest and waits (`pause-before-switchover`): images are put over the disks; QEMU sends the
//! rest; the guest goes on. What comes in the pause is kept in memory, and stored later.
//!
//! It costs what a migration costs: QEMU sends all of the RAM each time, the guest's writes are
//! tracked meanwhile, and it stands for as long as QEMU takes for the rest.
//!
//! An emulated guest (TCG) stands all the while. QEMU 7.2 lost its writes in 1 of 60 migrations on
//! a busy host: a processor's TLB may let a page be written unseen just after QEMU has read its
//! dirty bit (`notdirty_write` in `accel/tcg/cputlb.c`).

use std::collections::BTreeMap;
use std::io::{self, PipeReader};
use std::panic::resume_unwind;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::time::{Duration, Instant};

use checkpoint::{Phases, Taken, Warning, Writer};
use dirty::DirtyTree;
use guard::Guard;
use mpool::{AlignedBuf, BLOCK};
use serde_json::{Value, json};

use super::{BANDWIDTH, Guest, Options, PIPE, STREAM, SaveError, Saved, Task};
use crate::monitor::{Capability, IGNORE_SHARED, Monitor, PAUSES_FIRST};
use crate::stream::{StreamError, split};

/// Pages that are stored at once: 1 MiB.
const BATCH: usize = 256;
/// Batches that wait to be stored, at most, while the guest runs.
const QUEUE: u64 = 16;
/// Time between two looks at the migration, or whether a batch was stored.
const NAP: Duration = Duration::from_millis(2);
/// Rounds after which a guest is too fast.
const ROUNDS: u64 = 30;
/// Capabilities that leave the stream as it is.
const HARMLESS: [&str; 4] = [IGNORE_SHARED, PAUSES_FIRST, "events", "auto-converge"];

/// What is done with a guest, who puts it back, and the stream that it has.
type Whom<'a> = (&'a mut Task, &'a Guard, Option<&'a PipeReader>);

/// Pages that were read: their numbers, which ascend, and their bytes.
struct Batch {
    pages: Vec<u64>,
    bytes: AlignedBuf,
    in_pause: bool,
}

/// What the threads tell each other.
#[derive(Default)]
struct Flow {
    /// The guest stands, or storing has ended: nothing may wait for the pool.
    stands: AtomicBool,
    /// Batches that wait to be stored.
    waiting: AtomicU64,
}

/// Collects pages in batches.
struct Batches<'a> {
    flow: &'a Flow,
    to: Sender<Batch>,
    /// Pages that were stored: only these must be stored when they are zeros.
    filled: DirtyTree,
    /// The place of each page among the bytes.
    places: BTreeMap<u64, usize>,
    bytes: AlignedBuf,
}

impl Batches<'_> {
    /// Takes a page. Gives whether it will be stored.
    fn add(&mut self, page: u64, content: Option<&[u8; BLOCK]>) -> bool {
        if content.is_none() && !self.filled.contains(page) {
            return true;
        }
        self.filled.insert(page);
        let next = self.places.len();
        let place = *self.places.entry(page).or_insert(next);
        let to = &mut self.bytes[place * BLOCK..][..BLOCK];
        match content {
            Some(bytes) => to.copy_from_slice(bytes),
            None => to.fill(0),
        }
        self.places.len() < BATCH || self.send()
    }

    fn send(&mut self) -> bool {
        let stands = || self.flow.stands.load(Ordering::Acquire);
        while self.flow.waiting.load(Ordering::Acquire) >= QUEUE && !stands() {
            std::thread::sleep(NAP);
        }
        let mut bytes = AlignedBuf::zeroed(self.places.len() * BLOCK);
        for (to, place) in bytes.chunks_exact_mut(BLOCK).zip(self.places.values()) {
            to.copy_from_slice(&self.bytes[place * BLOCK..][..BLOCK]);
        }
        let pages = std::mem::take(&mut self.places).into_keys().collect();
        self.flow.waiting.fetch_add(1, Ordering::AcqRel);
        self.to.send(Batch { pages, bytes, in_pause: stands() }).is_ok()
    }
}

/// Splits QEMU's stream; gives the device stream. It is read to its end, whatever becomes of it:
/// the guard has the pipe too, so QEMU would not fail, but wait.
fn read(mut out: PipeReader, ram: u64, flow: &Flow, to: Sender<Batch>) -> Result<Vec<u8>, SaveError> {
    let read = read_pages(&out, ram, flow, to);
    let _ = io::copy(&mut out, &mut io::sink());
    read
}

fn read_pages(out: &PipeReader, ram: u64, flow: &Flow, to: Sender<Batch>) -> Result<Vec<u8>, SaveError> {
    let filled = DirtyTree::new(ram / BLOCK as u64).map_err(checkpoint::TakeError::from)?;
    let bytes = AlignedBuf::zeroed(BATCH * BLOCK);
    let mut batches = Batches { flow, to, filled, places: BTreeMap::new(), bytes };
    let rest = split(out, ram, |page, content: Option<&[u8; BLOCK]>| batches.add(page, content))?;
    if batches.send() { Ok(rest) } else { Err(StreamError::Read(io::ErrorKind::BrokenPipe.into()).into()) }
}

/// Stores batches until there are no more; gives the number of pages that came in the pause.
fn store(
    from: Receiver<Batch>,
    flow: &Flow,
    writer: &mut Writer<'_>,
    warn: &mut dyn FnMut(&Warning),
) -> Result<u64, SaveError> {
    let mut in_pause = 0;
    let stored = from.iter().try_for_each(|batch| {
        checkpoint::store_read(&batch.pages, &batch.bytes, writer, warn)?;
        flow.waiting.fetch_sub(1, Ordering::AcqRel);
        in_pause += if batch.in_pause { batch.pages.len() as u64 } else { 0 };
        Ok(())
    });
    flow.stands.store(true, Ordering::Release);
    stored.map(|()| in_pause)
}

impl Guest {
    /// Whether it is emulated, and so stands while it is sent.
    ///
    /// # Errors
    /// If QEMU does not answer.
    pub fn is_emulated(&mut self) -> Result<bool, SaveError> {
        Ok(self.qmp.execute("query-kvm", json!({}))?["enabled"] != true)
    }

    /// Stores a guest that was not prepared. Its pause is about `options.ram.max_pause` at most,
    /// and what its disks and devices take, unless it is emulated.
    ///
    /// # Errors
    /// If it cannot be stored. Then it goes on as if nothing had been tried.
    pub fn save_by_migration(
        mut self,
        options: &Options<'_>,
        mut writer: Writer<'_>,
        phases: &mut Phases,
        warn: &mut dyn FnMut(&Warning),
    ) -> Result<Saved, SaveError> {
        self.refuse_capabilities()?;
        let downtime = self.settings()?["downtime-limit"].as_u64().unwrap_or(300);
        let (mut task, guard) = (self.begin(options, Some(downtime))?, options.ram.guard);
        let addresses = vec![(self.ram.start as u64, self.ram.len as u64)];
        let taken = self.migrate(options, &mut task, &mut writer, warn);
        phases.end("migration");
        let taken = taken.and_then(|taken| self.reset(&task).map(|()| taken));
        self.finish(taken, task, guard, writer, addresses, warn)
    }

    /// Some capabilities change the stream, or release the guest's RAM.
    fn refuse_capabilities(&mut self) -> Result<(), SaveError> {
        let all = self.qmp.execute("query-migrate-capabilities", json!({}))?;
        let on = all.as_array().into_iter().flatten().filter(|one| one["state"] == true);
        let mut names = on.filter_map(|one| one["capability"].as_str());
        names.find(|name| !HARMLESS.contains(name)).map_or(Ok(()), |name| Err(SaveError::Capability(name.into())))
    }

    /// Gives what it has found, and the device stream.
    fn migrate(
        &mut self,
        options: &Options<'_>,
        task: &mut Task,
        writer: &mut Writer<'_>,
        warn: &mut dyn FnMut(&Warning),
    ) -> Result<(Taken, Vec<u8>), SaveError> {
        writer.set_pages(self.ram.len / BLOCK);
        self.make_images(task, options.ram.guard)?;
        let pause_ms = options.ram.max_pause.as_millis() as u64;
        self.qmp.set_capability(IGNORE_SHARED, Capability::On)?;
        self.qmp.set_capability(PAUSES_FIRST, Capability::On)?;
        let parameters = json!({ "max-bandwidth": BANDWIDTH, "downtime-limit": pause_ms });
        self.qmp.execute("migrate-set-parameters", parameters)?;
        let (out, ram) = (self.pipe(task, options.ram.guard)?, self.ram.len as u64);
        let (flow, (to, from), again) = (Flow::default(), channel(), out.try_clone().map_err(SaveError::Stream)?);
        let (read, stored, driven) = std::thread::scope(|scope| {
            let reader = scope.spawn(|| read(out, ram, &flow, to));
            let driver = scope.spawn(|| self.drive((task, options.ram.guard, Some(&again)), &flow));
            let stored = store(from, &flow, writer, warn);
            let read = reader.join().unwrap_or_else(|panic| resume_unwind(panic));
            (read, stored, driver.join().unwrap_or_else(|panic| resume_unwind(panic)))
        });
        // When one fails, the others fail after it, and know less.
        let in_pause = stored?;
        let bytes = match (read, driven.as_ref()) {
            (Err(SaveError::Split(StreamError::Read(_))), Err(_)) => Vec::new(),
            (read, _) => read?,
        };
        let (pause, rounds) = driven?;
        Ok((Taken { pause, rounds: rounds as usize, in_pause, unchanged: 0, written: None }, bytes))
    }

    /// Has QEMU send the guest; gives the pause, and the number of rounds.
    fn drive(&mut self, whom: Whom<'_>, flow: &Flow) -> Result<(Duration, u64), SaveError> {
        let guard = whom.1;
        let driven = self.try_to_drive(whom, flow);
        if driven.is_err() {
            // The reader waits for an end that QEMU has not taken.
            let _ = self.qmp.execute("closefd", json!({ "fdname": PIPE }));
            let _ = self.qmp.execute("migrate_cancel", json!({}));
            // Its guard has let the guest go on, and ended the monitor's session.
            guard.is_there()?;
        }
        driven
    }

    fn try_to_drive(&mut self, (task, guard, out): Whom<'_>, flow: &Flow) -> Result<(Duration, u64), SaveError> {
        // QEMU stops the guest by itself.
        guard.stands(guard::PROMISE)?;
        let mut begin = Instant::now();
        let is_emulated = self.is_emulated()?;
        if is_emulated {
            self.qmp.execute("stop", json!({}))?;
        }
        self.qmp.execute("migrate", json!({ "uri": format!("fd:{PIPE}") }))?;
        let mut sent = Value::Null;
        let rounds = loop {
            let (now, ran, has_ended) = (Instant::now(), task.ran, flow.stands.load(Ordering::Acquire));
            if !is_emulated {
                self.look(task)?;
            }
            if task.ran != ran {
                task.watch(guard, &self.qmp, &self.lock, out)?;
            }
            let answer = self.qmp.execute("query-migrate", json!({}))?;
            let rounds = answer["ram"]["dirty-sync-count"].as_u64().unwrap_or(0);
            if answer["status"] == "pre-switchover" {
                break rounds;
            }
            if Monitor::is_over(&answer) {
                return Err(Monitor::why(&answer).into());
            }
            if has_ended {
                return Err(StreamError::Read(io::ErrorKind::BrokenPipe.into()).into());
            }
            if rounds > ROUNDS {
                return Err(too_fast(&answer["ram"], rounds));
            }
            // It is stopped between two looks.
            begin = if is_emulated { begin } else { now };
            // One that stands does not wait for a pool that stalls.
            if !is_emulated || answer["ram"]["transferred"] != sent {
                guard.beat();
            }
            sent = answer["ram"]["transferred"].clone();
            std::thread::sleep(NAP);
        };
        flow.stands.store(true, Ordering::Release);
        self.cover(&task.overlays)?;
        self.qmp.execute("migrate-continue", json!({ "state": "pre-switchover" }))?;
        self.qmp.migrated(STREAM)?;
        if task.ran && self.qmp.execute("cont", json!({})).is_err() {
            task.go_on(&mut self.qmp)?;
        }
        let pause = begin.elapsed();
        guard.runs()?;
        Ok((pause, rounds))
    }
}

/// What QEMU says of the RAM of a guest that is too fast.
fn too_fast(ram: &Value, rounds: u64) -> SaveError {
    let left = ram["remaining"].as_u64().unwrap_or(0);
    // Megabits a second.
    let seconds = left as f64 * 8.0 / (ram["mbps"].as_f64().unwrap_or(0.0) * 1e6).max(1e6);
    SaveError::TooFast { pages: left / BLOCK as u64, rounds, pause_ms: (seconds * 2e3).ceil() as u64 }
}

#[cfg(test)]
mod tests;
