//! Storing a guest with its devices while it runs.
//!
//! 1. QEMU is asked what would refuse ([`Guest::open`]): before anything is stopped.
//! 2. The guest's RAM is stored while it runs, in rounds (`checkpoint::take`).
//! 3. The pause ([`Pausing`]): QEMU stops the guest and finishes what its disks have begun; images
//!    are put over the disks; QEMU writes its device stream into a pipe; the last pages are copied;
//!    the guest goes on. The pages come last, since saving devices may write to RAM.
//! 4. The last pages, the map and the record are stored.
//!
//! A guest that was not prepared is stored by QEMU's live migration ([`Guest::save_by_migration`]).
//!
//! Until the record is written a guard (crate `guard`) puts everything back if this fails or the
//! program is killed. From then on an image over a disk stays: the snapshot has the one below.

mod ahead;
mod migration;
mod process;

use std::borrow::Cow;
use std::error::Error;
use std::io::{self, PipeReader};
use std::panic::resume_unwind;
use std::path::PathBuf;
use std::thread::JoinHandle;
use std::time::Duration;

use checkpoint::{Checkpoint, Frozen, Halt, Phases, Source, StoreError, TakeError, Taken, Warning, Writer};
use guard::{Guard, GuardError};
use kmem::Range;
use kmem::account::Account;
use serde_json::{Value, json};

use crate::clone::{CloneError, trial};
use crate::disks::{self, DiskError, Overlay, Running};
use crate::facts::Facts;
use crate::monitor::{Capability, IGNORE_SHARED, Monitor, MonitorError, PIPE};
use crate::names::make_read_only;
use crate::ours::foreign;
use crate::prepare::{self, PrepareError};
use crate::record::{Description, Disk, Record};
use crate::reflink;
use crate::stream::{LONGEST, StreamError, devices};
use crate::undo::{Lock, Task, UndoError};
use guests::words::{options, parts};
pub(crate) use process::Seen;
pub use process::{is_recycled, wait_until_loaded, wait_until_put_back};

/// Bytes that a pipe holds, at most: QEMU waits less often.
const PIPE_BYTES: usize = 1 << 20;
/// How long QEMU may take for its device stream.
const STREAM: Duration = Duration::from_secs(30);
/// QEMU's limit on the bytes a second of a migration, for the device stream: none that counts.
const BANDWIDTH: u64 = 1 << 40;

/// Why a guest cannot be stored, or was not.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs, reason = "each sentence says what it is")]
pub enum SaveError {
    #[error(
        "no process {pid}, or not one whose command line may be read: name a guest that runs, by its number \
             or its program's name, as its owner or root"
    )]
    NoProcess { pid: i32, source: io::Error },
    #[error(
        "process {pid} is no guest that can be stored: a setuid program has the words of whoever started it. Start QEMU as one account"
    )]
    Accounts { pid: i32, source: io::Error },
    #[error("process {pid} runs {}, which is no QEMU: name the guest's own process", program.display())]
    NotQemu { pid: i32, program: PathBuf },
    #[error(
        "process {0} has become another program meanwhile, or another one began to listen on its monitor: try again when it stays"
    )]
    Another(i32),
    #[error(
        "{}, which the guest runs, can be changed by others than you and root ({}), and clones would run it: start the guest \
         with a program that they cannot change", program.display(), what.display()
    )]
    Program { program: PathBuf, what: PathBuf },
    #[error("{}, which the guest runs, is not there any more, and clones would need it: put it back", program.display())]
    NoProgram { program: PathBuf, source: io::Error },
    #[error(
        "{0}: QEMU connects there, where a clone would find nobody, or this guest's partner: let QEMU listen (server=on), or \
         start the guest without it"
    )]
    Connects(String),
    #[error(
        "the memory of guest {pid} is being loaded, and that has not gone on for {seconds} s: let the guest go on if it \
         is stopped, look whether its pool answers, and try again"
    )]
    Loading { pid: i32, seconds: u64 },
    #[error("no clone of this guest would start as it is now. Change that, or store it all the same with --force")]
    NeverRuns(#[source] CloneError),
    #[error(transparent)]
    Image(#[from] CloneError),
    #[error(
        "process {0} was not prepared, and its command line names no socket of QMP: start the guest with `pageone run \
         --snapshots -- qemu-system-x86_64 …`, or with `-qmp unix:SOCKET,server=on,wait=off`; `pageone checkpoint` stores its \
         RAM alone"
    )]
    Unprepared(i32),
    #[error("a guest that was not prepared cannot be stored with this: {0}")]
    Words(#[from] PrepareError),
    #[error("the guest is {0}; neither it nor clones of it would go on: wake it (`system_wakeup`) or start it again")]
    State(String),
    #[error("the guest's migration capability {0} is on, with which it cannot be stored; turn it off")]
    Capability(String),
    #[error(
        "the guest writes faster than QEMU can send it: {pages} pages are left after {rounds} rounds; use --max-pause \
         {pause_ms}, or stop it meanwhile"
    )]
    TooFast { pages: u64, rounds: u64, pause_ms: u64 },
    #[error(transparent)]
    Split(#[from] StreamError),
    #[error("this guest cannot be stored, QEMU says: {0}; start it without that device")]
    Blocked(String),
    #[error("{0}: a clone would not have this descriptor; name a file or a network instead")]
    Descriptor(String),
    #[error("QEMU does not say where the guest's RAM is: has the guest started? Wait until it has, and try again")]
    Ram,
    #[error(
        "not all of the RAM of process {0} is tracked, so it cannot be stored while it runs: `pageone doctor --guest {0}` says \
         what is in the way"
    )]
    Untracked(i32),
    #[error(transparent)]
    Disk(#[from] DiskError),
    #[error(transparent)]
    Qmp(#[from] MonitorError),
    #[error(transparent)]
    Undo(#[from] UndoError),
    #[error(transparent)]
    Guard(#[from] GuardError),
    #[error(transparent)]
    Take(#[from] TakeError),
    #[error("cannot read the device stream")]
    Stream(#[source] io::Error),
    #[error(transparent)]
    Store(#[from] StoreError),
}

/// How a guest is stored.
#[derive(Clone)]
pub struct Options<'a> {
    /// The snapshot's name.
    pub name: String,
    /// How the RAM is stored. Its guard also puts back what QEMU was told.
    pub ram: checkpoint::Options<'a>,
}

/// A running guest that can be stored.
pub struct Guest {
    pid: i32,
    is_prepared: bool,
    lock: Lock,
    qmp: Monitor,
    socket: PathBuf,
    description: Description,
    disks: Vec<Running>,
    ram: Range,
}

/// A stored guest.
#[derive(Debug)]
pub struct Saved {
    /// Its checkpoint.
    pub checkpoint: Checkpoint,
    /// What taking it has found.
    pub taken: Taken,
    /// Bytes of the device stream.
    pub stream: usize,
}

impl SaveError {
    /// Whether the guest may be stored, or not ([`StoreError::Unknown`]).
    pub fn is_unknown(&self) -> bool {
        matches!(self, Self::Store(error) if error.is_unknown())
    }
}

impl Guest {
    /// Looks whether a guest can be stored, without changing anything.
    ///
    /// # Errors
    /// If it cannot; the message says why.
    pub fn open(pid: i32) -> Result<Self, SaveError> {
        let seen = Seen::of(pid)?;
        match foreign(&seen.program) {
            Ok(Some(what)) => return Err(SaveError::Program { program: seen.program, what }),
            Ok(None) => {}
            Err(source) => return Err(SaveError::NoProgram { program: seen.program, source }),
        }
        let own = trial::plain(prepare::without_ours(&seen.words));
        if let Some(word) = trial::connects(&own) {
            return Err(SaveError::Connects(word));
        }
        let is_prepared = prepare::socket(&seen.words).is_some();
        let socket = seen.socket().ok_or(SaveError::Unprepared(pid))?;
        if !is_prepared {
            prepare::look_for_obstacles(&own)?;
        }
        let inherits =
            |part: Cow<'_, str>| ["fd=", "fds=", "vhostfd=", "vhostfds="].iter().any(|key| part.starts_with(key));
        let descriptor = |value: &str| parts(value).any(inherits) || value.contains("/dev/fdset/");
        if let Some(option) = options(&own).find(|option| descriptor(option.value)) {
            return Err(SaveError::Descriptor(format!("-{} {}", option.name, option.value)));
        }
        let (lock, qmp) = seen.connect(&socket)?;
        let Seen { program, directory, source, .. } = seen;
        let description =
            Description { program, directory, words: own, source: Some(source), ..Description::default() };
        Ok(Self { is_prepared, ..Self::ask(pid, lock, qmp, socket, description)? })
    }

    /// Asks QEMU what is not known yet.
    fn ask(pid: i32, lock: Lock, mut qmp: Monitor, socket: PathBuf, described: Description) -> Result<Self, SaveError> {
        let migration = qmp.execute("query-migrate", json!({}))?;
        let reasons: Vec<&str> =
            migration["blocked-reasons"].as_array().into_iter().flatten().filter_map(Value::as_str).collect();
        if !reasons.is_empty() {
            return Err(SaveError::Blocked(reasons.join("; ")));
        }
        let disks = disks::find(&mut qmp, pid, &described.words, &described.directory)?;
        let facts = Facts::of(&mut qmp)?;
        let start = qmp.first_page()?.ok_or(SaveError::Ram)?;
        let ram = Range::new(start as usize, facts.ram as usize);
        let description = Description { facts, ..described };
        Ok(Self { pid, is_prepared: true, lock, qmp, socket, description, disks, ram })
    }

    /// Whether it was started by `pageone run --snapshots`. If not, it is stored by
    /// [`Guest::save_by_migration`].
    pub fn is_prepared(&self) -> bool {
        self.is_prepared
    }

    /// Where its RAM lies in its process.
    pub fn ram(&self) -> Range {
        self.ram
    }

    /// The kind of its machine and QEMU's version, for people.
    pub fn facts(&self) -> &Facts {
        &self.description.facts
    }

    /// Stores it, if it is prepared. `source` is its RAM ([`Guest::ram`]), and `writer` the
    /// checkpoint.
    ///
    /// # Errors
    /// If it cannot be stored. Then it goes on as if nothing had been tried.
    pub fn save(
        mut self,
        options: &Options<'_>,
        source: &mut Source,
        frozen: &dyn Frozen,
        mut writer: Writer<'_>,
        phases: &mut Phases,
        warn: &mut dyn FnMut(&Warning),
    ) -> Result<Saved, SaveError> {
        let (task, guard) = (self.begin(options, None)?, options.ram.guard);
        let pid = self.pid;
        let (name, stream) = (options.name.clone(), None);
        let mut pausing = Pausing { guest: &mut self, guard, task, name, halts: 0, stream };
        let taken = pausing.prepare().and_then(|()| {
            let taken = checkpoint::take(&options.ram, source, frozen, &mut pausing, &mut writer, phases, warn)?;
            if !source.is_tracked()
                || source.addresses() != [(pausing.guest.ram.start as u64, pausing.guest.ram.len as u64)]
            {
                return Err(SaveError::Untracked(pid));
            }
            pausing.guest.reset(&pausing.task)?;
            Ok((taken, pausing.bytes()?))
        });
        let Pausing { task, .. } = pausing;
        self.finish(taken, task, guard, writer, source.addresses(), warn)
    }

    /// As whom it runs.
    fn account(&self) -> Result<Account, SaveError> {
        self.description.reader().map_err(|source| SaveError::NoProcess { pid: self.pid, source })
    }

    /// Makes the files of images over the disks. The guard is told which of them were made.
    fn make_images(&self, task: &mut Task, guard: &Guard) -> Result<(), SaveError> {
        let account = self.account()?;
        let made = self.disks.iter().zip(&mut task.overlays).try_for_each(|(disk, to)| disk.make(to, &account));
        task.watch(guard, &self.qmp, &self.lock, None)?;
        Ok(made?)
    }

    /// Begins: tells the guard. `downtime`: QEMU's limit on the pause so far, for a live migration.
    fn begin(&mut self, options: &Options<'_>, downtime: Option<u64>) -> Result<Task, SaveError> {
        disks::ensure_fast(&self.disks, options.ram.max_pause)?;
        let settings = self.settings()?;
        let overlays = disks::overlays(&self.disks, |disk, others| disk.first_overlay(&options.name, others));
        let (socket, pid) = (self.socket.clone(), self.pid);
        let bandwidth = settings["max-bandwidth"].as_u64().unwrap_or(128 << 20);
        let mut task = Task { socket, pid, ran: false, bandwidth, overlays, downtime };
        self.look(&mut task)?;
        task.watch(options.ram.guard, &self.qmp, &self.lock, None)?;
        Ok(task)
    }

    /// QEMU's settings of migrations.
    fn settings(&mut self) -> Result<Value, MonitorError> {
        self.qmp.execute("query-migrate-parameters", json!({}))
    }

    /// QEMU is given the end of a pipe that it writes to; gives the other one, which the guard has,
    /// too.
    fn pipe(&mut self, task: &Task, guard: &Guard) -> Result<PipeReader, SaveError> {
        let (out, into) = io::pipe().map_err(SaveError::Stream)?;
        // A smaller one takes longer.
        let _ = rustix::pipe::fcntl_setpipe_size(&into, PIPE_BYTES);
        self.qmp.give(PIPE, &into)?;
        task.watch(guard, &self.qmp, &self.lock, Some(&out))?;
        Ok(out)
    }

    /// Puts images over the disks of the guest, which stands. Their files are there.
    fn cover(&mut self, overlays: &[Overlay]) -> Result<(), SaveError> {
        disks::ensure_same(&self.disks, &mut self.qmp)?;
        self.description.disks.clear();
        for (disk, overlay) in self.disks.iter().zip(overlays) {
            disk.cover(&mut self.qmp, overlay)?;
            let image = overlay.stored().to_owned();
            self.description.disks.push(Disk { word: disk.word.clone(), image, raw: disk.raw, ..Disk::default() });
        }
        Ok(())
    }

    /// When the guest goes on again: puts back QEMU's settings, and makes its disks last.
    fn reset(&mut self, task: &Task) -> Result<(), SaveError> {
        task.reset(&mut self.qmp)?;
        let (account, failed) = (self.account()?, |(image, source)| DiskError::Make { image, source });
        // Of a guest that was halted twice each disk has two.
        let all: Vec<PathBuf> = task.overlays.iter().map(|overlay| overlay.stored().to_owned()).collect();
        for image in &all {
            make_read_only(image).and_then(|()| reflink::sync(image)).map_err(|e| failed((image.clone(), e)))?;
        }
        for disk in &mut self.description.disks {
            disk.note_layers(&account).map_err(failed)?;
            disk.own = disk.layers.iter().take_while(|layer| all.contains(&layer.image)).count();
        }
        Ok(())
    }

    /// Writes the record, or leaves it to the guard to put everything back. `taken`: what taking it
    /// has found, and the device stream.
    fn finish(
        mut self,
        taken: Result<(Taken, Vec<u8>), SaveError>,
        task: Task,
        guard: &Guard,
        mut writer: Writer<'_>,
        addresses: Vec<(u64, u64)>,
        warn: &mut dyn FnMut(&Warning),
    ) -> Result<Saved, SaveError> {
        let (taken, bytes) = taken?;
        writer.warnings().iter().for_each(warn);
        let stream = bytes.len();
        writer.keep_beside(Record { description: self.description.clone(), stream: bytes }.encode());
        let program = self.description.program.file_name().unwrap_or_default().to_string_lossy().into_owned();
        let commit = || {
            task.leave_images(guard, &self.qmp, &self.lock)?;
            Ok::<_, SaveError>(writer.commit(format!("{program} {}", self.pid), addresses)?)
        };
        let stored = match commit() {
            Ok(checkpoint) => {
                self.keep(&task.overlays);
                if !task.ran && !task.overlays.is_empty() {
                    output::note!("the guest stands; until it goes on, QEMU locks none of its disks: open no image");
                }
                Ok(Saved { checkpoint, taken, stream })
            }
            // The images over the disks stay: if the snapshot is there, it has those below.
            Err(error) if error.is_unknown() => Err(error),
            Err(error) => {
                // Without a guard it is tried all the same.
                let _ = task.watch(guard, &self.qmp, &self.lock, None);
                task.undo(&mut self.qmp, guard)?;
                Err(error)
            }
        };
        guard.done();
        stored
    }

    /// The snapshot is stored: QEMU is to keep its images as they are.
    fn keep(&mut self, overlays: &[Overlay]) {
        for overlay in overlays {
            if let Err(error) = overlay.keep(&mut self.qmp) {
                output::note!(
                    "until the guest is started again, commit nothing into {}, which QEMU does not lock: {error}",
                    overlay.stored().display()
                );
            }
        }
        let last = overlays.len().saturating_sub(self.disks.len());
        overlays[last..].iter().for_each(|overlay| overlay.sweep(self.pid));
    }
}

/// A guest that is being stored.
struct Pausing<'a> {
    guest: &'a mut Guest,
    guard: &'a Guard,
    task: Task,
    name: String,
    /// How often it was stopped.
    halts: usize,
    /// Reads the device stream.
    stream: Option<JoinHandle<Result<Vec<u8>, StreamError>>>,
}

impl Pausing<'_> {
    /// The device stream of the last halt.
    fn bytes(&mut self) -> Result<Vec<u8>, StreamError> {
        let reader = self.stream.take().ok_or(io::Error::from(io::ErrorKind::NotFound))?;
        reader.join().unwrap_or_else(|panic| resume_unwind(panic))
    }

    /// Sets what need not be set in the pause.
    fn prepare(&mut self) -> Result<(), SaveError> {
        self.guest.make_images(&mut self.task, self.guard)?;
        self.guest.qmp.set_capability(IGNORE_SHARED, Capability::On)?;
        self.guest.qmp.execute("migrate-set-parameters", json!({ "max-bandwidth": BANDWIDTH }))?;
        Ok(())
    }

    fn try_halt(&mut self) -> Result<(), SaveError> {
        if self.halts > 0 && !self.guest.disks.is_empty() {
            self.cover_again()?;
        }
        self.guest.look(&mut self.task)?;
        let out = self.guest.pipe(&self.task, self.guard)?;
        if self.task.ran {
            self.guest.qmp.execute("stop", json!({}))?;
            self.guard.is_there()?;
        }
        let overlays = &self.task.overlays[self.task.overlays.len() - self.guest.disks.len()..];
        self.guard.beat();
        self.guest.cover(overlays)?;
        self.guard.beat();
        self.halts += 1;
        let qmp = &mut self.guest.qmp;
        self.stream = Some(std::thread::spawn(move || devices(out, LONGEST)));
        qmp.execute("migrate", json!({ "uri": format!("fd:{PIPE}") }))?;
        qmp.migrated(STREAM)?;
        Ok(())
    }

    /// The guest has run since images were put over its disks: these get others.
    fn cover_again(&mut self) -> Result<(), SaveError> {
        let account = self.guest.account()?;
        let Guest { qmp, description, lock, .. } = &mut *self.guest;
        let disks = disks::find(qmp, self.task.pid, &description.words, &description.directory)?;
        // The copy of a raw disk is the same one each time, with other bytes.
        let copy = |disk: &Running| self.task.overlays.iter().find(|overlay| overlay.is_copy_of(disk)).cloned();
        let one = |disk: &Running, others: &[Overlay]| copy(disk).unwrap_or_else(|| disk.overlay(&self.name, others));
        let mut overlays = disks::overlays(&disks, one);
        self.task.overlays.extend(overlays.iter().cloned());
        self.task.watch(self.guard, qmp, lock, None)?;
        let mut new = disks.iter().zip(&mut overlays).filter(|(disk, _)| !disk.raw);
        new.try_for_each(|(disk, overlay)| disk.make(overlay, &account))?;
        self.guest.disks = disks;
        Ok(())
    }
}

impl Halt for Pausing<'_> {
    fn halt(&mut self) -> Result<(), Box<dyn Error + Send + Sync>> {
        self.try_halt().map_err(|error| {
            // The reader waits for an end that QEMU has not taken.
            let _ = self.guest.qmp.execute("closefd", json!({ "fdname": PIPE }));
            let _ = self.task.go_on(&mut self.guest.qmp);
            error.into()
        })
    }

    fn go_on(&mut self) -> Result<(), Box<dyn Error + Send + Sync>> {
        // Asking for the guest's state first would take as long again.
        if self.task.ran && self.guest.qmp.execute("cont", json!({})).is_err() {
            self.task.go_on(&mut self.guest.qmp)?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests;
