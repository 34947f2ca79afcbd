//! New guests that go on where a snapshot was taken.
//!
//! QEMU is started with the source's words, in which whatever two guests cannot both have is made
//! new ([`rewrite`]). It waits for a device stream. Before it gets one, it is asked what it is made
//! of: QEMU takes the state of another guest without a word in many cases ([`Facts`]). Then it
//! reads the stream from a pipe, and goes on. Its RAM is a private mapping of the snapshot's, or
//! [its own](Own).

mod cards;
mod directory;
mod images;
mod own;
mod process;
mod rewrite;
mod template;
pub(crate) mod trial;

use std::ffi::OsString;
use std::fs::File;
use std::io::{self, Write};
use std::os::fd::{AsFd, AsRawFd};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::Mutex;
use std::time::Duration;

use kmem::account::end_with_caller;
use rustix::io::FdFlags;
use serde_json::json;

use crate::agent::{Agent, AgentError, NoAgent, Port};
use crate::facts::Facts;
use crate::monitor::{Capability, IGNORE_SHARED, Monitor, MonitorError, PIPE};
use crate::prepare::{CLONE, START, memory, monitor_words, ram_words};
use crate::qcow2;
use crate::record::{Description, Layer, Record};
use crate::rights::Rights;
use directory::{begin_in, hand_over, new_directory, tail};
use own::Maps;
use process::{ignore_huge_pages, spawn_without_huge_pages};
use rewrite::{overlay, reached_from_here, rewrite};

pub use directory::Passing;
pub use images::check_image;
pub(crate) use images::{check_layer, check_layers};
pub use own::{Add, Own};
pub use process::Process;
pub use rewrite::is_own_image;
pub use template::Template;

/// How long QEMU may take to read its device stream.
const LOAD: Duration = Duration::from_secs(60);
/// Numbers of descriptors.
const STDOUT: i32 = 1;
const STDERR: i32 = 2;

/// Why a clone does not run.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs, reason = "each sentence says what it is")]
pub enum CloneError {
    #[error("cannot make {} for the clone", what.display())]
    Make { what: PathBuf, source: io::Error },
    #[error("the image {} can't be used, and a clone needs it; put it back, readable for the clone's user \
             (`pageone snapshot ls POOL --json` names the images)", image.display())]
    Image { image: PathBuf, source: io::Error },
    #[error(
        "the image {image} is not what was stored: somebody has written to it, or it is a copy (written at {now}, {now_len} bytes \
             long, not at {then} and {len}). Put back a copy of the stored one, with its time (`cp -p`); if it has the same bytes, \
             `touch -d @{then} {image}` says so",
        image = .0.image.display(), then = images::time(.0), len = .0.len, now = images::time(.1), now_len = .1.len
    )]
    Changed(Layer, Layer),
    #[error(
        "the image {} shows other files than when it was stored: somebody has changed its header. Put back a copy of the stored \
             one, with its time (`cp -p`)", .0.display()
    )]
    Shows(PathBuf),
    #[error(
        "the guest runs as uid {uid}, who cannot enter {}: `chmod o+x` it and those above it, or name another directory with \
         --files", directory.display()
    )]
    Enter { directory: PathBuf, uid: u32, source: io::Error },
    #[error("cannot run {}", program.display())]
    Run { program: PathBuf, source: io::Error },
    #[error(
        "this guest would differ from the one that was stored: {}. QEMU would not notice, and the guest might fail later; \
         --force starts it all the same", .0.join("; ")
    )]
    Differs(Vec<String>),
    #[error(
        "the command line starts another one: {}. Unplug what was plugged in, or start the guest with it", .0.join("; ")
    )]
    Unlike(Vec<String>),
    #[error("the name of the monitor's socket {} is too long: name another directory with --files", .0.display())]
    Socket(PathBuf),
    #[error(
        "PageONE's library in the clone does not load its memory: it is of another version, or {} cannot have it", .0.display()
    )]
    NotLoaded(PathBuf),
    #[error("the clone does not start{}", said(.output))]
    Qmp { source: MonitorError, output: String },
}

fn said(output: &str) -> String {
    if output.is_empty() { String::new() } else { format!(". QEMU says: {output}") }
}

/// How clones are started.
pub struct Options<'a> {
    /// The snapshot.
    pub record: &'a Record,
    /// As whom it runs.
    pub rights: &'a Rights,
    /// Further words of QEMU's command line.
    pub extra: &'a [String],
    /// Whether one that differs is started.
    pub force: bool,
    /// Whether standard input and output are this program's. Else there is no input, and the output
    /// goes to `output.log` in the clone's directory.
    pub attached: bool,
    /// Its RAM.
    pub ram: Ram<'a>,
    /// Whether its network cards have a link.
    pub links: Links,
    /// What is copied for clones that share the snapshot's. `None`: each loads QEMU anew.
    pub template: Option<&'a Template>,
}

impl<'a> Options<'a> {
    /// How one is started that nobody is to hear of.
    pub fn passing(record: &'a Record, rights: &'a Rights, ram: Ram<'a>) -> Self {
        Self { record, rights, extra: &[], force: false, attached: false, ram, links: Links::Down, template: None }
    }
}

/// Whether a clone's network cards have a link. As it goes on it announces its source's addresses.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Links {
    /// As the source had.
    Kept,
    /// None: what the guest sends is dropped.
    Down,
}

/// Where a clone's RAM comes from.
#[derive(Clone, Copy)]
pub enum Ram<'a> {
    /// A private mapping of this file, the snapshot's.
    Shared(&'a File),
    /// The same, of one that ends with the thread that starts it.
    Passing(&'a File),
    /// The same, of one that is only tried.
    Tried(&'a File),
    /// Its own, from segments that its agent maps.
    Own(&'a Own<'a>),
}

/// A clone that runs.
pub struct Clone {
    /// QEMU.
    pub process: Process,
    /// In what it differs from the source, if that was forced.
    pub differences: Vec<String>,
    /// Its monitor, once it goes on.
    monitor: Option<Monitor>,
    /// Where its agent listens.
    port: Option<Port>,
}

/// Why a clone that was started is not as it should be.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs, reason = "each sentence says what it is")]
pub enum VerifyError {
    #[error("the clone is {0} after its start, and not running; its output says why")]
    State(String),
    #[error("the clone's processors have executed nothing in {} s; output.log in its directory may say more; \
             take the snapshot again while the guest works", .0.as_secs_f64())]
    Still(Duration),
    #[error(transparent)]
    Qmp(#[from] MonitorError),
}

impl Clone {
    /// Lets the guest run for this time, and sees that it still runs then, and that its processors
    /// have worked.
    ///
    /// # Errors
    /// If it does not.
    pub fn verify(&mut self, time: Duration) -> Result<(), VerifyError> {
        let Some(monitor) = self.monitor.as_mut() else { return Err(VerifyError::State("not started".into())) };
        let pid = self.process.id() as i32;
        let worked = |monitor: &mut Monitor| -> Result<Duration, VerifyError> {
            let all = monitor.execute("query-cpus-fast", json!({}))?;
            let threads = all.as_array().into_iter().flatten().filter_map(|one| one["thread-id"].as_i64());
            Ok(threads.filter_map(|tid| thread_run_time(pid, tid as i32).ok()).sum())
        };
        let before = worked(monitor)?;
        std::thread::sleep(time);
        let state = monitor.state()?;
        if state != "running" {
            return Err(VerifyError::State(state));
        }
        if worked(monitor)? == before { Err(VerifyError::Still(time)) } else { Ok(()) }
    }
}

impl Clone {
    /// Has the guest's agent set its clocks to this host's. Gives why there is no agent.
    ///
    /// # Errors
    /// If the agent cannot be asked, does not answer, or refuses.
    pub fn set_clock(&mut self) -> Result<Option<NoAgent>, AgentError> {
        self.ask(Agent::set_time)
    }

    /// Sees that the guest's agent answers. Gives why there is none.
    ///
    /// # Errors
    /// If the agent cannot be asked, or does not answer.
    pub fn ping(&mut self) -> Result<Option<NoAgent>, AgentError> {
        self.ask(Agent::ping)
    }

    fn ask(&mut self, what: fn(&mut Agent) -> Result<(), AgentError>) -> Result<Option<NoAgent>, AgentError> {
        let (Some(port), Some(monitor)) = (&self.port, &mut self.monitor) else { return Ok(Some(NoAgent::Port)) };
        if !port.is_open(monitor)? {
            return Ok(Some(NoAgent::Program));
        }
        Agent::connect(&port.socket, self.process.id()).and_then(|mut agent| what(&mut agent)).map(|()| None)
    }
}

/// The time that a thread of a process has spent on a CPU (`schedstat`, to the nanosecond).
pub(crate) fn thread_run_time(pid: i32, tid: i32) -> io::Result<Duration> {
    let text = std::fs::read_to_string(format!("/proc/{pid}/task/{tid}/schedstat"))?;
    let nanos = text.split(' ').next().and_then(|number| number.parse().ok());
    nanos.map(Duration::from_nanos).ok_or_else(|| io::ErrorKind::InvalidData.into())
}

/// Held from the time when descriptors can be inherited until the program that is to inherit them
/// has started: another clone's program would have them too.
static INHERITED: Mutex<()> = Mutex::new(());

fn make(what: &Path) -> impl FnOnce(io::Error) -> CloneError + use<> {
    let what = what.to_owned();
    move |source| CloneError::Make { what, source }
}

/// Starts a clone, whose own files are in `directory`, which is made.
///
/// # Errors
/// If it does not run. Then QEMU has ended, and the directory is gone, if this has made it.
pub fn start(options: &Options<'_>, directory: &Path) -> Result<Clone, CloneError> {
    let description = &options.record.description;
    // QEMU would end, with a sentence that does not help.
    let ram = [&description.words[..], options.extra].concat();
    let ram = Facts { ram: memory(&ram).unwrap_or(description.facts.ram), ..description.facts.clone() };
    let differs = description.facts.differences(&ram);
    if !differs.is_empty() {
        return Err(CloneError::Differs(differs));
    }
    if matches!(options.ram, Ram::Own(_)) && !own::fits(directory) {
        return Err(CloneError::Socket(own::socket(directory)));
    }
    new_directory(directory)?;
    let account = &options.rights.account;
    let started = hand_over(directory, account).and_then(|()| start_in(options, directory));
    started.inspect_err(|_| drop(std::fs::remove_dir_all(directory)))
}

/// Starts a clone in its directory, which is there.
fn start_in(options: &Options<'_>, directory: &Path) -> Result<Clone, CloneError> {
    let description = &options.record.description;
    let account = &options.rights.account;
    let images = || {
        description.disks.iter().enumerate().try_for_each(|(number, disk)| {
            let (size, image) = (check_image(disk)?, overlay(directory, number));
            qcow2::create(&image, size, Some((&disk.image, disk.raw)), 0o600).map_err(make(&image))
        })
    };
    account.with_files(|| Ok(images())).map_err(make(directory))??;
    let log = directory.join("output.log");
    let (process, ours, maps) = spawn(options, directory, &log).map_err(run_error(description))?;
    let port = Port::find(&rewrite(description, directory));
    let mut clone = Clone { process, differences: Vec::new(), monitor: None, port };
    let error = match resume(options, ours, maps, &mut clone.differences) {
        Ok(monitor) => {
            clone.monitor = Some(monitor);
            return Ok(clone);
        }
        Err(error) => error,
    };
    clone.process.kill();
    Err(match error {
        Failed::Differs => CloneError::Differs(clone.differences),
        Failed::NotLoaded => CloneError::NotLoaded(description.program.clone()),
        Failed::Qmp(source) => {
            CloneError::Qmp { source, output: account.with_files(|| Ok(tail(&log))).unwrap_or_default() }
        }
    })
}

fn run_error(description: &Description) -> impl FnOnce((Option<PathBuf>, io::Error)) -> CloneError + '_ {
    |(what, source)| match what {
        None => CloneError::Run { program: description.program.clone(), source },
        Some(what) => CloneError::Make { what, source },
    }
}

/// QEMU, our end of its monitor, and whether an agent maps its RAM, if that is its own.
type Spawned = (Process, UnixStream, Option<Maps>);

/// Starts QEMU. What failed, if not the program itself.
fn spawn(options: &Options<'_>, directory: &Path, log: &Path) -> Result<Spawned, (Option<PathBuf>, io::Error)> {
    let description = &options.record.description;
    let monitor = |source| (Some("a monitor".into()), source);
    let (ours, theirs) = UnixStream::pair().map_err(monitor)?;
    let mut command = options.rights.command(&description.program);
    let bytes = description.facts.ram;
    let (mut words, mut inherited, maps) = match options.ram {
        Ram::Own(own) => {
            let prepared = own.prepare(&mut command, bytes, directory).map_err(monitor)?;
            (prepared.words, prepared.inherited, Some(prepared.maps))
        }
        Ram::Shared(ram) | Ram::Passing(ram) | Ram::Tried(ram) => {
            let ram = ram.as_fd().try_clone_to_owned().map_err(monitor)?;
            let mut words = ram_words(bytes, ram.as_raw_fd(), "off");
            if own::fits(directory) {
                words.extend(monitor_words(CLONE, &own::socket(directory)));
            }
            (words, vec![ram], None)
        }
    };
    words.extend([
        "-chardev".into(),
        format!("socket,id={START},fd={}", theirs.as_raw_fd()),
        "-mon".into(),
        format!("chardev={START},mode=control"),
    ]);
    let own = rewrite(description, directory);
    // What others wrote, and what is nobody's to reach, is reached from this host alone.
    let is_here = options.rights.is_confined || matches!(options.ram, Ram::Tried(_));
    words.extend(if is_here { reached_from_here(&own) } else { own });
    words.extend(["-incoming".into(), "defer".into()]);
    words.extend(options.extra.iter().cloned());
    inherited.push(theirs.into());
    let log = if options.attached {
        None
    } else {
        let made = options.rights.account.with_files(|| output::file::create_new(log));
        Some(made.map_err(|e| (Some(log.to_owned()), e))?)
    };
    if let (Ram::Shared(_), Some(template), Some(log)) = (options.ram, options.template, &log) {
        let program = [description.program.clone().into_os_string()];
        let all: Vec<OsString> = program.into_iter().chain(words.iter().map(OsString::from)).collect();
        let mut fds = vec![(log.as_fd(), STDOUT), (log.as_fd(), STDERR)];
        fds.extend(inherited.iter().map(|fd| (fd.as_fd(), fd.as_raw_fd())));
        // One that cannot be had as a copy is started.
        if let Ok(process) = template.copy(&all, &fds) {
            return Ok((process, ours, maps));
        }
    }
    // Else a name without a slash would be a file of the record's choice.
    let place = if options.rights.is_confined { directory } else { &description.directory };
    let _place = begin_in(command.args(&words), &options.rights.account, &[place, directory]).map_err(monitor)?;
    if let Some(log) = log {
        let both = log.try_clone().map_err(monitor)?;
        command.stdin(Stdio::null()).stdout(log).stderr(both);
    }
    let _one = INHERITED.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
    for fd in &inherited {
        rustix::io::fcntl_setfd(fd, FdFlags::empty()).map_err(|e| monitor(e.into()))?;
    }
    let child = match options.ram {
        Ram::Own(own) => {
            let added = own.add.map(|add| add(&mut command, &words)).transpose().map_err(monitor)?;
            let child = command.spawn();
            drop(added);
            child
        }
        Ram::Passing(_) => {
            ignore_huge_pages();
            end_with_caller(&mut command).and_then(Command::spawn)
        }
        Ram::Tried(_) => options.rights.spawn_alone(&mut command),
        Ram::Shared(_) => spawn_without_huge_pages(&mut command),
    };
    let process = child.and_then(Process::child).map_err(|source| (None, source))?;
    Ok((process, ours, maps))
}

enum Failed {
    Differs,
    NotLoaded,
    Qmp(MonitorError),
}

impl<E: Into<MonitorError>> From<E> for Failed {
    fn from(error: E) -> Self {
        Self::Qmp(error.into())
    }
}

/// Gives a QEMU that waits the device stream, and lets the guest go on.
fn resume(
    options: &Options<'_>,
    monitor: UnixStream,
    maps: Option<Maps>,
    differences: &mut Vec<String>,
) -> Result<Monitor, Failed> {
    let mut qmp = Monitor::begin(monitor)?;
    *differences = options.record.description.facts.differences(&Facts::of(&mut qmp)?);
    if !differences.is_empty() && !options.force {
        return Err(Failed::Differs);
    }
    if maps.is_some_and(|maps| !maps.ask()) {
        return Err(Failed::NotLoaded);
    }
    qmp.set_capability(IGNORE_SHARED, Capability::On)?;
    // Before QEMU announces the guest, which it does as soon as it has the devices.
    if options.links == Links::Down {
        let text = qmp.execute("human-monitor-command", json!({ "command-line": "info network" }))?;
        for name in ends(text.as_str().unwrap_or_default()) {
            qmp.execute("set_link", json!({ "name": name, "up": false }))?;
        }
    }
    let (out, mut into) = io::pipe()?;
    qmp.give(PIPE, &out)?;
    drop(out);
    std::thread::scope(|scope| {
        // A QEMU that has ended, or that refuses the stream, does not read it to its end.
        scope.spawn(move || drop(into.write_all(&options.record.stream)));
        let loaded =
            qmp.execute("migrate-incoming", json!({ "uri": format!("fd:{PIPE}") })).and_then(|_| qmp.migrated(LOAD));
        if loaded.is_err() {
            let _ = qmp.execute("closefd", json!({ "fdname": PIPE }));
            let _ = qmp.execute("quit", json!({}));
        }
        loaded
    })?;
    qmp.set_capability(IGNORE_SHARED, Capability::Off)?;
    qmp.execute("cont", json!({}))?;
    Ok(qmp)
}

/// The names in QEMU's list of the ends of its networks: cards, and below each what it leads to.
fn ends(text: &str) -> impl Iterator<Item = &str> {
    text.lines().filter_map(|line| line.split_once(": index=")?.0.rsplit([' ', '\\']).next())
}

#[cfg(test)]
mod tests;
