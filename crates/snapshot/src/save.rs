//! Storing a guest with its devices while it runs.
//!
//! 1. QEMU is asked what would refuse ([`Guest::open`]): before anything is stopped.
//! 2. The guest's RAM is stored while it runs, in rounds (`checkpoint::take`).
//! 3. The pause ([`Pausing`]): QEMU stops the guest and finishes what its disks have begun; images
//!    are put over the disks; QEMU writes its device stream into a pipe; the last pages are copied;
//!    the guest goes on. The pages come last, since saving devices may write to RAM.
//! 4. The last pages, the map and the record are stored.
//!
//! Until the record is written the [`guard`](crate::guard) puts everything back if this fails or
//! the program is killed. From then on an image over a disk stays: the snapshot has the one below.

use std::error::Error;
use std::ffi::OsString;
use std::io::{self, Read};
use std::path::PathBuf;
use std::thread::JoinHandle;
use std::time::Duration;

use checkpoint::{Checkpoint, Frozen, Halt, Phases, Source, StoreError, TakeError, Taken, Warning, Writer};
use kmem::Range;
use serde_json::{Value, json};

use crate::disks::{self, DiskError, Overlay, Running};
use crate::facts::Facts;
use crate::guard::{Guard, Lock, PATIENCE, Task};
use crate::monitor::{Monitor, MonitorError};
use crate::prepare;
use crate::record::{Description, Disk, Record};
use crate::reflink;
use crate::words::{options, parts};

/// Name of the pipe in QEMU.
pub(crate) const PIPE: &str = "pageone-stream";
/// Bytes that a pipe holds, at most: QEMU waits less often.
const PIPE_BYTES: usize = 1 << 20;
/// How long QEMU may take for its device stream.
const STREAM: Duration = Duration::from_secs(30);
/// QEMU's limit on the bytes a second of a migration, for the device stream: none that counts.
const BANDWIDTH: u64 = 1 << 40;

/// Why a guest cannot be stored, or was not.
#[derive(Debug, thiserror::Error)]
pub enum SaveError {
    /// Its command line cannot be read.
    #[error("no process {pid}, or not one whose command line may be read")]
    NoProcess {
        /// The process.
        pid: i32,
        /// Why.
        source: io::Error,
    },
    /// It was started without `--snapshots`.
    #[error(
        "process {0} was not prepared: start the guest with `pageone run --snapshots -- qemu-system-x86_64 …`; \
         `pageone checkpoint` stores its RAM alone"
    )]
    Unprepared(i32),
    /// QEMU says that devices of it cannot be stored.
    #[error("this guest cannot be stored, QEMU says: {0}; start it without that device")]
    Blocked(String),
    /// It uses a descriptor that whoever started it has opened.
    #[error("{0}: a clone would not have this descriptor; name a file or a network instead")]
    Descriptor(String),
    /// Where its RAM lies is not known.
    #[error("QEMU does not say where the guest's RAM is: has the guest started?")]
    Ram,
    /// The agent is not in it, or manages only a part of the RAM.
    #[error(
        "not all of the RAM of process {0} is tracked, so it cannot be stored while it runs: `pageone doctor --guest {0}` says \
         what is in the way"
    )]
    Untracked(i32),
    /// Disks cannot be stored.
    #[error(transparent)]
    Disk(#[from] DiskError),
    /// QEMU does not do what it is asked.
    #[error(transparent)]
    Qmp(#[from] MonitorError),
    /// Somebody else is at it.
    #[error("another snapshot of process {0} is being taken, or put back after a failure; wait for its end")]
    Busy(i32),
    /// There is no guard.
    #[error("cannot start the guard of the snapshot")]
    Guard(#[source] io::Error),
    /// The RAM cannot be stored.
    #[error(transparent)]
    Take(#[from] TakeError),
    /// The device stream cannot be read.
    #[error("cannot read the device stream")]
    Stream(#[source] io::Error),
    /// The pool is full, or cannot be written.
    #[error(transparent)]
    Store(#[from] StoreError),
}

/// How a guest is stored.
#[derive(Clone, Debug)]
pub struct Options {
    /// The snapshot's name.
    pub name: String,
    /// How the RAM is stored.
    pub ram: checkpoint::Options,
    /// The program that runs the [`guard`](crate::guard), and its first arguments.
    pub guard: Vec<OsString>,
}

/// A running guest that can be stored.
pub struct Guest {
    pid: i32,
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

impl Guest {
    /// Looks whether a guest can be stored, without changing anything.
    ///
    /// # Errors
    /// If it cannot; the message says why.
    pub fn open(pid: i32) -> Result<Self, SaveError> {
        let cannot = |source| SaveError::NoProcess { pid, source };
        let line = std::fs::read(format!("/proc/{pid}/cmdline")).map_err(cannot)?;
        let program = std::fs::read_link(format!("/proc/{pid}/exe")).map_err(cannot)?;
        let directory = std::fs::read_link(format!("/proc/{pid}/cwd")).map_err(cannot)?;
        let words: Vec<String> =
            line.split(|byte| *byte == 0).skip(1).map(|word| String::from_utf8_lossy(word).into_owned()).collect();
        // Behind the last zero nothing comes.
        let words = &words[..words.len().saturating_sub(1)];
        let socket = prepare::socket(words).ok_or(SaveError::Unprepared(pid))?;
        let own = prepare::without_ours(words);
        let inherits = |part: &str| ["fd=", "fds=", "vhostfd=", "vhostfds="].iter().any(|key| part.starts_with(key));
        let descriptor = |value: &str| parts(value).any(inherits) || value.contains("/dev/fdset/");
        if let Some(option) = options(&own).find(|option| descriptor(option.value)) {
            return Err(SaveError::Descriptor(format!("-{} {}", option.name, option.value)));
        }
        let lock = Lock::take(&socket, pid, PATIENCE)?;
        let qmp = Monitor::connect(&socket, pid)?;
        let facts = Facts::default();
        let description = Description { program, directory, words: own, facts, disks: Vec::new() };
        Self::ask(pid, lock, qmp, socket, description)
    }

    /// Asks QEMU what is not known yet.
    fn ask(pid: i32, lock: Lock, mut qmp: Monitor, socket: PathBuf, described: Description) -> Result<Self, SaveError> {
        let migration = qmp.execute("query-migrate", json!({}))?;
        let reasons: Vec<&str> =
            migration["blocked-reasons"].as_array().into_iter().flatten().filter_map(Value::as_str).collect();
        if !reasons.is_empty() {
            return Err(SaveError::Blocked(reasons.join("; ")));
        }
        let disks = disks::find(&mut qmp, &described.words, &described.directory)?;
        let facts = Facts::of(&mut qmp)?;
        let start = qmp.first_page()?.ok_or(SaveError::Ram)?;
        let ram = Range::new(start as usize, facts.ram as usize);
        let description = Description { facts, ..described };
        Ok(Self { pid, lock, qmp, socket, description, disks, ram })
    }

    /// Where its RAM lies in its process.
    pub fn ram(&self) -> Range {
        self.ram
    }

    /// The kind of its machine and QEMU's version, for people.
    pub fn facts(&self) -> &Facts {
        &self.description.facts
    }

    /// Stores it. `source` is its RAM ([`Guest::ram`]), and `writer` the checkpoint.
    ///
    /// # Errors
    /// If it cannot be stored. Then it goes on as if nothing had been tried.
    pub fn save(
        mut self,
        options: &Options,
        source: &mut Source,
        frozen: &dyn Frozen,
        mut writer: Writer<'_>,
        phases: &mut Phases,
        warn: &mut dyn FnMut(&Warning),
    ) -> Result<Saved, SaveError> {
        let settings = self.qmp.execute("query-migrate-parameters", json!({}))?;
        let overlays: Vec<Overlay> = self.disks.iter().map(|disk| disk.overlay(&options.name, 0)).collect();
        let (socket, pid) = (self.socket.clone(), self.pid);
        let bandwidth = settings["max-bandwidth"].as_u64().unwrap_or(128 << 20);
        let ran = self.qmp.state()? == "running";
        // Another snapshot's images of this name stay, whatever becomes of this one.
        overlays.iter().try_for_each(Overlay::ensure_new)?;
        let task = Task { socket, pid, ran, bandwidth, overlays };
        let mut guard = Guard::start(&options.guard, &task, &self.lock).map_err(SaveError::Guard)?;
        let (name, stream) = (options.name.clone(), None);
        let mut pausing = Pausing { guest: &mut self, guard: &mut guard, task, name, halts: 0, stream };
        let taken = pausing.prepare().and_then(|()| {
            let taken = checkpoint::take(&options.ram, source, frozen, &mut pausing, &mut writer, phases, warn)?;
            if !source.is_tracked()
                || source.addresses() != [(pausing.guest.ram.start as u64, pausing.guest.ram.len as u64)]
            {
                return Err(SaveError::Untracked(pid));
            }
            pausing.task.reset(&mut pausing.guest.qmp)?;
            for Disk { image, .. } in pausing.guest.description.disks.iter().filter(|disk| disk.raw) {
                let failed = |source| DiskError::Make { image: image.clone(), source };
                reflink::sync(image).map_err(failed)?;
            }
            Ok((taken, pausing.bytes().map_err(SaveError::Stream)?))
        });
        let Pausing { task, .. } = pausing;
        let (taken, bytes) = match taken {
            Ok(taken) => taken,
            Err(error) => {
                drop(writer);
                // QEMU serves one client: now it is the guard's turn.
                drop(self.qmp);
                drop(guard);
                return Err(error);
            }
        };
        writer.warnings().iter().for_each(warn);
        let stream = bytes.len();
        writer.keep_beside(Record { description: self.description.clone(), stream: bytes }.encode());
        // Once the record is written, a disk's image must not be changed any more.
        guard.done();
        let program = self.description.program.file_name().unwrap_or_default().to_string_lossy().into_owned();
        let stored = writer.commit(format!("{program} {pid}"), source.addresses());
        match stored {
            Ok(checkpoint) => Ok(Saved { checkpoint, taken, stream }),
            Err(error) => {
                task.undo(&mut self.qmp)?;
                Err(error.into())
            }
        }
    }
}

/// A guest that is being stored.
struct Pausing<'a> {
    guest: &'a mut Guest,
    guard: &'a mut Guard,
    task: Task,
    name: String,
    /// How often it was stopped.
    halts: usize,
    /// Reads the device stream.
    stream: Option<JoinHandle<io::Result<Vec<u8>>>>,
}

impl Pausing<'_> {
    /// The device stream of the last halt.
    fn bytes(&mut self) -> io::Result<Vec<u8>> {
        let reader = self.stream.take().ok_or(io::ErrorKind::NotFound)?;
        reader.join().unwrap_or_else(|_| Err(io::ErrorKind::Other.into()))
    }

    /// Sets what need not be set in the pause.
    fn prepare(&mut self) -> Result<(), SaveError> {
        for (disk, overlay) in self.guest.disks.iter().zip(&self.task.overlays) {
            disk.make(overlay)?;
        }
        self.guest.qmp.set_ignore_shared(true)?;
        self.guest.qmp.execute("migrate-set-parameters", json!({ "max-bandwidth": BANDWIDTH }))?;
        Ok(())
    }

    fn try_halt(&mut self) -> Result<(), SaveError> {
        if self.halts > 0 && !self.guest.disks.is_empty() {
            self.cover_again()?;
        }
        let Guest { qmp, disks, description, .. } = &mut *self.guest;
        if self.task.ran {
            qmp.execute("stop", json!({}))?;
        }
        description.disks.clear();
        let overlays = &self.task.overlays[self.task.overlays.len() - disks.len()..];
        for (disk, overlay) in disks.iter().zip(overlays) {
            disk.cover(qmp, overlay)?;
            description.disks.push(Disk { word: disk.word.clone(), image: disk.stored(overlay), raw: disk.raw });
        }
        self.halts += 1;
        let (mut out, into) = io::pipe().map_err(SaveError::Stream)?;
        // A smaller one takes longer.
        let _ = rustix::pipe::fcntl_setpipe_size(&into, PIPE_BYTES);
        qmp.give(PIPE, &into)?;
        drop(into);
        self.stream = Some(std::thread::spawn(move || {
            let mut bytes = Vec::new();
            out.read_to_end(&mut bytes).map(|_| bytes)
        }));
        qmp.execute("migrate", json!({ "uri": format!("fd:{PIPE}") }))?;
        qmp.migrated(STREAM)?;
        Ok(())
    }

    /// The guest has run since images were put over its disks: these get others.
    fn cover_again(&mut self) -> Result<(), SaveError> {
        let Guest { qmp, description, .. } = &mut *self.guest;
        let disks = disks::find(qmp, &description.words, &description.directory)?;
        for disk in &disks {
            let overlay = disk.overlay(&self.name, self.halts);
            if !disk.raw {
                disk.make(&overlay)?;
            }
            self.task.overlays.push(overlay);
        }
        self.guest.disks = disks;
        self.guard.task(&self.task).map_err(SaveError::Guard)
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
mod tests {
    use std::process::{Command, Stdio};

    use checkpoint::{Catalog, Changes, Store};
    use mpool::Pool;

    use super::*;
    use crate::fake;

    /// A guest whose QEMU answers questions about these things as given, and all others with
    /// nothing.
    fn guest(answers: &'static [(&str, &str)]) -> Result<Guest, SaveError> {
        let qmp = fake::qemu(move |asked| {
            let text = answers.iter().find(|(name, _)| *name == asked).map_or("{}", |(_, text)| text);
            serde_json::from_str(text).unwrap()
        });
        let (program, directory) = ("/usr/bin/qemu-system-x86_64".into(), "/".into());
        let description =
            Description { program, directory, words: Vec::new(), facts: Facts::default(), disks: Vec::new() };
        Guest::ask(1, lock(), qmp, "/nonexistent/guest.qmp".into(), description)
    }

    fn lock() -> Lock {
        let dir = tempfile::tempdir().unwrap();
        Lock::take(&dir.path().join("guest.qmp"), 1, PATIENCE).unwrap()
    }

    const RUNS: &[(&str, &str)] = &[
        ("human-monitor-command", "\"Host virtual address for 0x0 (ram) is 0x7f0000000000\""),
        ("query-status", "{ \"status\": \"paused\" }"),
    ];

    fn refused(guest: Result<Guest, SaveError>) -> SaveError {
        guest.map(drop).unwrap_err()
    }

    #[test]
    fn a_process_that_is_no_prepared_guest_is_refused() {
        let error = refused(Guest::open(i32::MAX));
        assert!(matches!(error, SaveError::NoProcess { .. }), "{error}");
        assert!(error.to_string().ends_with("or not one whose command line may be read"), "{error}");
        let error = refused(Guest::open(std::process::id() as i32));
        assert!(matches!(error, SaveError::Unprepared(_)), "{error}");
        assert!(error.to_string().contains("was not prepared: start the guest with `pageone run"), "{error}");
        // The shell has the words of a guest with a descriptor that it was given.
        let mut command = Command::new("sh");
        command.args(["-c", "echo ready; read line; true", "sh", "-chardev"]);
        command.arg(format!("socket,id={},path=/nonexistent/guest.qmp", prepare::MONITOR));
        command.args(["-netdev", "tap,id=n,fd=3"]).stdin(Stdio::piped()).stdout(Stdio::piped());
        let mut shell = command.spawn().unwrap();
        // Before its first word the words may not be there yet.
        shell.stdout.as_mut().unwrap().read_exact(&mut [0; 5]).unwrap();
        let error = refused(Guest::open(shell.id() as i32));
        drop(shell.stdin.take());
        shell.wait().unwrap();
        assert!(matches!(error, SaveError::Descriptor(_)), "{error}");
        assert!(error.to_string().starts_with("-netdev tap,id=n,fd=3: a clone would not have this"), "{error}");
    }

    #[test]
    fn what_qemu_says_is_in_the_way_is_said() {
        let error = refused(guest(&[("query-migrate", "{ \"blocked-reasons\": [\"one\", \"two\"] }")]));
        assert!(matches!(error, SaveError::Blocked(_)), "{error}");
        assert!(error.to_string().starts_with("this guest cannot be stored, QEMU says: one; two;"), "{error}");
        let error = refused(guest(&[("human-monitor-command", "\"No memory is mapped at address 0x0\"")]));
        assert!(matches!(error, SaveError::Ram), "{error}");
        assert_eq!(error.to_string(), "QEMU does not say where the guest's RAM is: has the guest started?");
        assert!(guest(RUNS).is_ok());
    }

    struct NoDaemon;

    impl Frozen for NoDaemon {
        fn is_held(&self) -> bool {
            false
        }

        fn changes(&self) -> Option<Changes<'_>> {
            None
        }

        fn lasted(&self) -> Result<bool, Box<dyn Error + Send + Sync>> {
            Ok(true)
        }
    }

    #[test]
    fn without_a_guard_a_guest_is_not_stopped() {
        let dir = tempfile::tempdir().unwrap();
        let pool = Pool::create(&dir.path().join("pool"), "test").unwrap();
        let store = Store::new(Catalog::open(&pool).unwrap());
        // A process that has memory to store.
        let memory = vec![1_u8; 32 << 20];
        let mut source = Source::open(std::process::id() as i32).unwrap();
        let guard = vec!["/nonexistent/pageone".into()];
        let ram = checkpoint::Options { stop: false, full: false, max_pause: Duration::ZERO, guard: guard.clone() };
        let options = Options { name: "one".into(), ram, guard };
        let (writer, phases) = (store.begin("one").unwrap(), &mut Phases::new());
        let saved = guest(RUNS).unwrap().save(&options, &mut source, &NoDaemon, writer, phases, &mut |_| {});
        let error = saved.map(drop).unwrap_err();
        assert!(matches!(error, SaveError::Guard(_)), "{error}");
        assert_eq!(error.to_string(), "cannot start the guard of the snapshot");
        assert!(memory.iter().all(|byte| *byte == 1) && store.view().checkpoints().is_empty());
    }

    #[test]
    fn without_a_pipe_there_is_no_device_stream() {
        let test = || {
            let mut guest = guest(RUNS).unwrap();
            let (socket, name, stream) = ("/nonexistent/guest.qmp".into(), "one".into(), None);
            let task = Task { socket, pid: i32::MAX, ran: false, bandwidth: 0, overlays: Vec::new() };
            let guard = ["sh", "-c", "while read line; do echo ready; done"].map(OsString::from);
            let mut guard = Guard::start(&guard, &task, &lock()).unwrap();
            let mut pausing = Pausing { guest: &mut guest, guard: &mut guard, task, name, halts: 0, stream };
            kmem::testing::refuse(libc::SYS_pipe2, None, libc::EMFILE);
            pausing.try_halt().unwrap_err()
        };
        // The kernel refuses this thread pipes from then on.
        let error = std::thread::scope(|scope| scope.spawn(test).join().unwrap());
        assert!(matches!(error, SaveError::Stream(_)), "{error}");
        assert_eq!(error.to_string(), "cannot read the device stream");
    }
}
