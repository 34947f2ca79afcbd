//! A device that fails while the pool works: dm-flakey.
//!
//! Each round a device that was well goes wrong at some moment: it drops what is written, or gives
//! errors. The file system is unmounted, the device is well again, and the pool is compared with
//! what was acknowledged: before the device dropped writes, or at any time when it gave errors.

use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::time::{Duration, Instant};

use anyhow::Result;

use crate::block::{FileSystem, Loop, Mapped, Mounted, SECTOR, directory, kernel_says, sparse};
use crate::promise::Promise;
use crate::work::{Journal, Worker, acknowledged, make};
use crate::{Random, Settings};

/// How a device fails.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Fault {
    /// It says that all is well, and keeps nothing: a power failure, seen from the medium.
    Drops,
    /// Writes fail.
    WriteErrors,
    /// Everything fails.
    Errors,
    /// Writes fail for a second, then none does for a second, and so on.
    Intervals,
}

const FAULTS: [Fault; 4] = [Fault::Drops, Fault::WriteErrors, Fault::Errors, Fault::Intervals];

/// The longest that a worker may take to see an error, and that one is waited for which goes away.
const PATIENCE: Duration = Duration::from_secs(20);

/// What was done.
#[derive(Debug, Default)]
pub(crate) struct Failed {
    pub(crate) rounds: u64,
    acknowledged: u64,
    /// Rounds in which an operation failed.
    refused: u64,
    /// Rounds in which the pool was opened again on the file system that had seen the errors.
    opened: u64,
    pub(crate) losses: Vec<String>,
}

impl std::fmt::Display for Failed {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Self { rounds, acknowledged, refused, opened, losses } = self;
        let losses = losses.len();
        write!(
            f,
            "{rounds} rounds, {acknowledged} operations acknowledged, {refused} rounds with errors, in {opened} the pool \
             was opened again without a mount, {losses} losses"
        )
    }
}

/// The device under the file system.
struct Device<'a> {
    under: &'a Loop,
    mapped: &'a Mapped,
    sectors: u64,
}

impl Device<'_> {
    fn table(&self, fault: Option<Fault>) -> String {
        let (sectors, under) = (self.sectors, self.under.path().display());
        // Up for 0 seconds, down for 3600.
        match fault {
            None => format!("0 {sectors} linear {under} 0"),
            Some(Fault::Drops) => format!("0 {sectors} flakey {under} 0 0 3600 1 drop_writes"),
            Some(Fault::WriteErrors) => format!("0 {sectors} flakey {under} 0 0 3600 1 error_writes"),
            Some(Fault::Errors) => format!("0 {sectors} flakey {under} 0 0 3600"),
            Some(Fault::Intervals) => format!("0 {sectors} flakey {under} 0 1 1 1 error_writes"),
        }
    }

    fn become_<T>(&self, fault: Option<Fault>, meanwhile: impl FnOnce() -> T) -> Result<T> {
        self.mapped.switch(&self.table(fault), meanwhile)
    }
}

/// The lane on one file system.
pub(crate) fn run(fs: &FileSystem, work: &Path, settings: &Settings) -> Result<Failed> {
    let root = directory(work.join("mounted"))?;
    drop(sparse(&work.join("flakey"), fs.bytes)?);
    let under = Loop::attach(&work.join("flakey"))?;
    fs.make(under.path())?;
    let sectors = fs.bytes / SECTOR;
    let table = format!("0 {sectors} linear {} 0", under.path().display());
    let mapped = Mapped::create(format!("flakey-{}", fs.name), &table)?;
    let device = Device { under: &under, mapped: &mapped, sectors };
    let mut random = Random::new(settings.seed ^ 0xf1a);
    let (mut done, mut promise) = (Failed::default(), Promise::default());
    for round in 0..settings.rounds {
        let fault = FAULTS[round as usize % FAULTS.len()];
        let mounted = fs.mount(mapped.path(), &root)?;
        if !promise.is_made() {
            let journal = Journal::default();
            make(&root, &journal)?;
            promise = promise.after(&journal.events());
        }
        let result = one_round(&device, mounted, &root, &mut promise, fault, &mut random, &mut done);
        device.become_(None, || ())?;
        let verified = result.and_then(|()| {
            let mounted = fs.mount(mapped.path(), &root)?;
            promise.verify(&root)?;
            mounted.unmount()
        });
        done.rounds += 1;
        if let Err(error) = verified {
            let loss = format!("{}: round {round}, {fault:?}: {error:#}", fs.name);
            println!("{loss}\n{}", kernel_says());
            done.losses.push(loss);
            // What is there is of no use for the rounds to come.
            break;
        }
    }
    let removed = mapped.remove();
    // After a loss something may still hold it.
    if done.losses.is_empty() { removed.map(|()| done) } else { Ok(done) }
}

/// Works until the device has failed. The file system is not mounted afterwards.
fn one_round(
    device: &Device<'_>,
    mounted: Mounted<'_>,
    root: &Path,
    promise: &mut Promise,
    fault: Fault,
    random: &mut Random,
    done: &mut Failed,
) -> Result<()> {
    let (journal, stop) = (Journal::default(), AtomicBool::new(false));
    let mut worker = Worker::new(root, &journal, promise, 1 + random.below(1 << 30))?;
    let (kept, worked) = std::thread::scope(|scope| {
        let thread = scope.spawn(|| {
            let worked = worker.work(u64::MAX, &stop);
            drop(worker);
            worked
        });
        std::thread::sleep(Duration::from_millis(300 + random.below(1500)));
        // What was acknowledged before the device dropped the first write.
        let kept = device.become_(Some(fault), || journal.events());
        let limit = if fault == Fault::Drops { Duration::from_millis(700) } else { PATIENCE };
        let began = Instant::now();
        while began.elapsed() < limit && !thread.is_finished() {
            std::thread::sleep(Duration::from_millis(20));
        }
        stop.store(true, Relaxed);
        (kept, thread.join())
    });
    let worked = worked.map_err(|_| anyhow::anyhow!("the worker panicked"))?;
    if let Err(e) = &worked {
        if format!("{e:#}").contains("WRONG BYTES") {
            return worked;
        }
        done.refused += 1;
    }
    let events = if fault == Fault::Drops { kept? } else { kept.map(|_| journal.events())? };
    done.acknowledged += acknowledged(&events);
    *promise = promise.after(&events);
    if fault != Fault::Drops {
        open_in_place(device, root, promise, fault, done)?;
    }
    mounted.unmount()
}

/// The device is well again, or now and then, and the pool is opened where the errors were: what it
/// holds must not be in the page cache only, for then the power fails.
fn open_in_place(
    device: &Device<'_>,
    root: &Path,
    promise: &mut Promise,
    fault: Fault,
    done: &mut Failed,
) -> Result<()> {
    if fault != Fault::Intervals {
        device.become_(None, || ())?;
    }
    let began = Instant::now();
    loop {
        if promise.verify(root).is_ok() {
            done.opened += 1;
            break;
        }
        // The file system may have stopped for good; and while the device gives errors, anything
        // may be refused. The next mount tells.
        if fault != Fault::Intervals || began.elapsed() > Duration::from_secs(6) {
            break;
        }
    }
    device.become_(Some(Fault::Drops), || ())
}
