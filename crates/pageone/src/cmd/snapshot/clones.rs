//! `pageone snapshot run`: starts clones, and serves their memory as long as one of them runs, or
//! gives it to those that are merged.

use std::any::Any;
use std::ffi::OsString;
use std::fs::File;
use std::io;
use std::os::unix::fs::DirBuilderExt;
use std::os::unix::process::ExitStatusExt;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, anyhow, bail};
use checkpoint::{Catalog, Checkpoint, Image, ReadError};
use control::units::counted;
use kmem::ksm::{self, Ksm};
use kmem::procfs;
use serde_json::json;
use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM};
use snapshot::NoAgent;
use snapshot::clone::{Add, Clone, Links, Options, Own, Ram, Template, start};
use snapshot::memory::segments::Segments;
use snapshot::memory::{self, MemoryError, Server};
use snapshot::record::Record;
use snapshot::rights::{self, Account, Asked, Rights};
use wire::HugePages;

use super::Which;
use super::twins::Twins;
use crate::account::account;
use crate::cmd::{Json, run};
use crate::exit::{Code, Coded};
use crate::paths;

/// Time between two looks whether a clone has ended.
const NAP: Duration = Duration::from_millis(50);
/// The same while clones start.
const MOMENT: Duration = Duration::from_millis(2);
/// The kernel from which on KSM's mark on a process survives execve(2).
const KSM_KERNEL: (u32, u32) = (6, 10);

/// Options of `pageone snapshot run`.
#[derive(clap::Args)]
#[command(
    after_help = "JSON, a line for each guest as soon as it runs: `pid`, `name`, `uuid` (null: none), `directory`, \
                        `seconds` of its start. The output of one guest goes to a file, too."
)]
pub(crate) struct Args {
    #[command(flatten)]
    snapshot: Which,
    /// Number of guests; the output of more than one goes to a file for each
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..))]
    count: u32,
    /// Directory for the guests' own files, a directory for each: images over the disks, sockets,
    /// output [default: `clones` beside the directory of the pools' names]
    #[arg(long, value_name = "DIR")]
    files: Option<PathBuf>,
    /// Remove each guest's files when all have ended
    #[arg(long)]
    rm: bool,
    /// Start guests that differ from the one that was stored
    #[arg(long)]
    force: bool,
    /// Start guests although their kernels may make the same random numbers, keys too
    #[arg(long)]
    same_random: bool,
    /// Start guests whose network cards have no link: `set_link NAME on` on its monitor gives one
    #[arg(long)]
    links_down: bool,
    #[command(flatten)]
    merging: Merging,
    /// Let the kernel's KSM merge all memory of the guests' processes, QEMU's own as well. KSM must
    /// run, on Linux 6.10 or later
    #[arg(long, conflicts_with = "merge")]
    ksm: bool,
    #[command(flatten)]
    rights: AskedRights,
    #[command(flatten)]
    json: Json,
    /// Further options of QEMU
    #[arg(last = true, value_name = "QEMU OPTIONS")]
    extra: Vec<String>,
}

/// Whether guests are merged, and how.
#[derive(clap::Args)]
struct Merging {
    /// Give each guest RAM of its own, managed as by `pageone run --snapshots`: the guests are
    /// merged from the beginning, and can be stored again. The snapshot is read before they start
    #[arg(long)]
    merge: bool,
    /// Domain to join: guests merge only with others of their domain [default: all of this user's]
    #[arg(long, value_name = "NAME", requires = "merge")]
    domain: Option<String>,
    /// Take back what the guests free, as `pageone run --ppr` does. They cannot be stored again
    #[arg(long, requires = "merge")]
    ppr: bool,
}

/// As whom guests run.
#[derive(clap::Args)]
pub(super) struct AskedRights {
    /// Run guests as this account, a name or a number [default: the stored guest's; without root,
    /// yours]
    #[arg(long, value_name = "USER")]
    user: Option<String>,
    /// Take all that the snapshot says, also if it is another's: its program and options can do
    /// what the account may
    #[arg(long)]
    trust: bool,
}

impl AskedRights {
    fn asked(&self) -> Result<Asked> {
        let user = self.user.as_deref();
        let unknown = |name: &str| Coded(Code::Usage, format!("no account is called {name}"));
        let named = |name: &str| account(Path::new("/"), name).ok_or_else(|| unknown(name));
        Ok(Asked { user: user.map(named).transpose()?, trust: self.trust })
    }
}

/// Starts clones and waits for their end.
pub(super) fn run(args: &Args, dir: Option<PathBuf>) -> Result<()> {
    let leased = Leased::of(&args.snapshot)?;
    let rights = &leased.rights(&args.rights)?;
    let twins = Twins::of(&leased.label)?;
    if !args.same_random {
        twins.refuse(&leased.record.description, args.count)?;
    }
    let Leased { record, lease, label, pool, .. } = leased;
    if args.ksm {
        give_to_ksm()?;
    }
    let environment = || run::agent(args.merging.domain.as_deref(), HugePages::default(), dir, run::Start::IfNone);
    let environment = args.merging.merge.then(environment).transpose().context("the guests cannot be merged")?;
    // From here on, what is started ends with the clones.
    let _twins = match twins.hold() {
        Err(error) if !(args.same_random || record.description.reseeds) => return Err(error),
        held => held,
    };
    // It is loaded while the page server starts.
    let template = (args.count > 1 && !args.merging.merge).then(|| template(&record, rights));
    let add = |command: &mut Command, words: &[String]| recycle(&record, command, words);
    let files = directory(args.files.as_deref(), &args.snapshot)?;
    let working_set = files.join(format!(".working-set-{}", label.replace('/', "-")));
    // Held until all guests have ended: their disks may need what the snapshot keeps.
    let held = lease.try_clone()?;
    let (mut source, server) = match environment {
        Some(environment) => {
            let name = format!("{label} {}", args.merging.domain.as_deref().unwrap_or_default());
            (Source::Segments(Box::new(Segments::of(&Image::of_lease(&lease)?, &name)?), environment), None)
        }
        None => {
            let (file, server) = ram((&pool, &args.snapshot.name), lease, Some(&working_set))?;
            (Source::File(file), Some(server))
        }
    };
    // Before the first guest: a signal must not leave guests without memory.
    let (ends, renew) = (Arc::new(AtomicBool::new(false)), Arc::new(AtomicBool::new(false)));
    for (signal, flag) in [(SIGINT, &ends), (SIGTERM, &ends), (SIGHUP, &renew)] {
        signal_hook::flag::register(signal, flag.clone())?;
    }
    let mut watch = Watch::new(server, renew);
    let template = template.and_then(loaded);
    let own;
    let ram = match &source {
        Source::Segments(segments, environment) => {
            let add: Option<&Add<'_>> = if args.merging.ppr { Some(&add) } else { None };
            own = Own { environment, add, segments };
            Ram::Own(&own)
        }
        Source::File(file) => Ram::Shared(file),
    };
    let (attached, template) = (args.count == 1 && !args.json.is_asked(), template.as_ref());
    let links = if args.links_down { Links::Down } else { Links::Kept };
    let (extra, force) = (&args.extra[..], args.force);
    let options = Options { record: &record, rights, ram, extra, force, attached, links, template };
    let directories = new_directories(&files, &args.snapshot.name, args.count);
    let start = || start_all(&options, &directories, &working_set, args.json);
    let (mut clones, failed) = watch.during(start).unwrap_or_else(|| (Vec::new(), vec![panicked()]));
    let crashed = wait(&mut clones, &ends, &mut watch, &mut source);
    drop(held);
    if args.rm {
        directories.iter().for_each(|directory| remove(directory));
    }
    let (all, count) = (failed.len(), args.count);
    match failed.into_iter().next() {
        Some(error) if count == 1 => Err(error),
        Some(error) => Err(error.context(format!("{all} of {count} guests were not started"))),
        None if crashed > 0 => bail!("{} failed", counted(crashed, "guest")),
        None => Ok(()),
    }
}

/// Starts a clone for each directory. Gives those that run, and why the others do not.
fn start_all(
    options: &Options<'_>,
    directories: &[PathBuf],
    working_set: &Path,
    json: Json,
) -> (Vec<Clone>, Vec<anyhow::Error>) {
    let started: Vec<Result<Started>> = std::thread::scope(|scope| {
        if let Ram::Shared(file) = options.ram {
            scope.spawn(|| memory::prefetch(file, working_set));
        }
        let threads: Vec<_> =
            directories.iter().map(|directory| scope.spawn(|| one(options, directory, json))).collect();
        threads.into_iter().map(|thread| thread.join().unwrap_or_else(|_| Err(panicked()))).collect()
    });
    let (mut clones, mut failed, mut clocks) = (Vec::new(), Vec::new(), Vec::new());
    for clone in started {
        match clone {
            Ok((clone, clock)) => {
                clones.push(clone);
                clocks.extend(clock);
            }
            Err(error) => failed.push(error),
        }
    }
    if let Some(why) = clocks.first() {
        let guests = counted(clocks.len(), "guest");
        output::note!("of {guests} the clock stands at the snapshot's time ({why}): a time daemon in it must set it");
    }
    (clones, failed)
}

/// The template, when QEMU is loaded in it; else says why it is not.
fn loaded(template: Result<Template, String>) -> Option<Template> {
    let wait = |template: Template| template.wait().map(|()| template).map_err(|error| error.to_string());
    template.and_then(wait).inspect_err(|why| output::note!("each guest loads QEMU for itself: {why}")).ok()
}

/// QEMU, loaded for all guests; or why it cannot be.
fn template(record: &Record, rights: &Rights) -> Result<Template, String> {
    let library = paths::template_library().ok_or("libpageone_template.so is not beside the agent's library")?;
    let description = &record.description;
    Template::start(&library, &description.program, &description.directory, rights).map_err(|error| error.to_string())
}

/// Has KSM merge all memory of the processes that are started from now on.
fn give_to_ksm() -> Result<()> {
    let (major, minor, release) = procfs::kernel_release();
    if (major, minor) < KSM_KERNEL {
        let why = format!("--ksm needs Linux 6.10 or later, where QEMU inherits KSM's mark, and this is {release}");
        return Err(Coded(Code::HostLacks, why).into());
    }
    ksm::merge_all_memory().context("the guests cannot be merged")?;
    if !Ksm::open().and_then(|ksm| ksm.run()).is_ok_and(|run| run == 1) {
        output::note!("KSM is stopped, so nothing is merged yet: write 1 to /sys/kernel/mm/ksm/run");
    }
    Ok(())
}

/// Removes the files of a guest that has ended. A snapshot of it needs the images that lie there.
fn remove(directory: &Path) {
    let all = || std::fs::read_dir(directory).into_iter().flatten().flatten();
    let images = all().filter(|entry| entry.path().extension().is_some_and(|end| end == "qcow2")).count();
    let disks = all().filter(|entry| snapshot::clone::is_own_image(&entry.file_name())).count();
    if images > disks {
        output::note!("{} stays: a snapshot of the guest may need the images in it", directory.display());
    } else {
        let _ = std::fs::remove_dir_all(directory);
    }
}

/// What a clone is started with whose free pages are taken back.
fn recycle(record: &Record, command: &mut Command, words: &[String]) -> io::Result<Box<dyn Any>> {
    let words: Vec<OsString> = words.iter().map(OsString::from).collect();
    if run::ppr::lacks_port(&words) {
        return Err(io::Error::other(
            "the guest's machine is a q35, and has no port for --ppr: start the guest that is stored with `pageone run --snapshots --ppr`",
        ));
    }
    let program = record.description.program.as_os_str();
    run::ppr::prepare(command, program, &words, run::ppr::Worker::Agent, None)
        .map(|fds| Box::new(fds) as Box<dyn Any>)
        .map_err(|error| io::Error::other(format!("{error:#}")))
}

/// Where the clones' RAM comes from.
enum Source {
    /// Segments, and the environment that puts the agent into QEMU.
    Segments(Box<Segments>, Vec<(OsString, Option<OsString>)>),
    /// The file that the page server serves.
    File(File),
}

/// A clone, and why its clock is not set.
type Started = (Clone, Option<String>);

fn panicked() -> anyhow::Error {
    anyhow!("starting a clone panicked")
}

/// A snapshot that can be read although its pool is not open, so that others can write to that.
pub(super) struct Leased {
    pub(super) checkpoint: Checkpoint,
    pub(super) record: Record,
    pub(super) lease: File,
    /// See [`Catalog::label`].
    label: String,
    /// The directory of the pool's capacity class.
    pub(super) pool: PathBuf,
    /// Those of all its classes.
    directories: Vec<PathBuf>,
}

impl Leased {
    pub(super) fn of(which: &Which) -> Result<Self> {
        let (pool, catalog) = which.open_soon()?;
        let (checkpoint, record) = which.find(&catalog)?;
        let lease = catalog.image(checkpoint)?.lease(&pool)?;
        let label = Catalog::label(&pool, checkpoint);
        let directories =
            pool.usage()?.classes.into_iter().filter(|class| class.present).map(|class| class.path).collect();
        Ok(Self { checkpoint: checkpoint.clone(), record, lease, label, pool: pool.path().into(), directories })
    }

    /// As whom its guests run.
    pub(super) fn rights(&self, asked: &AskedRights) -> Result<Rights> {
        Ok(Rights::of(&self.record.description, &self.directories, asked.asked()?)?)
    }

    /// As whom its images are copied.
    pub(super) fn reader(&self, asked: &Asked) -> Result<Account> {
        Ok(rights::reader(&self.record.description, &self.directories, asked)?)
    }
}

/// A snapshot's memory as a file, and the server that reads it.
///
/// `of`: pool and snapshot, for lists of processes. `working_set`: where the server lists what
/// is read first.
pub(super) fn ram(of: (&Path, &str), lease: File, working_set: Option<&Path>) -> Result<(File, Server)> {
    let own = std::env::current_exe().context("cannot find this program")?;
    let mut words = vec![own.into(), "snapshot-server".into(), of.0.into(), of.1.into()];
    words.extend(working_set.iter().flat_map(|list| ["--record".into(), list.into()]));
    memory::start(words, lease).map_err(|e| match e {
        MemoryError::Fuse(_) => anyhow::Error::from(Coded(Code::HostLacks, e.to_string())),
        MemoryError::Server(_) => e.into(),
    })
}

/// The directory for clones' files, which is made. They are worth keeping: it is not in memory.
pub(super) fn directory(files: Option<&Path>, of: &Which) -> Result<PathBuf> {
    let files = files.map_or_else(|| of.names.directory().with_file_name("clones"), Path::to_owned);
    let files = std::path::absolute(files)?;
    // Guests may be of other accounts, which must get to their own.
    let made = std::fs::DirBuilder::new().recursive(true).mode(0o711).create(&files);
    made.with_context(|| format!("cannot create {}", files.display()))?;
    paths::check_owner(&files, "--files")?;
    Ok(files)
}

/// Directories for clones that are not there yet: a process had this one's number before, perhaps.
fn new_directories(files: &Path, snapshot: &str, count: u32) -> Vec<PathBuf> {
    let name = format!("{}-{}", snapshot::file_name(snapshot), std::process::id());
    let named = |name: String| (1..=count).map(|number| files.join(format!("{name}-{number}"))).collect::<Vec<_>>();
    let first = named(name.clone());
    let others = (2..=u32::MAX).map(|time| named(format!("{name}.{time}")));
    let is_new = |all: &Vec<PathBuf>| !all.iter().any(|directory| directory.exists());
    std::iter::once(first).chain(others).find(is_new).unwrap_or_default()
}

/// Starts a clone, says so, and has its clock set. One of which that cannot be said ends.
fn one(options: &Options<'_>, directory: &Path, json: Json) -> Result<Started> {
    let begin = Instant::now();
    let mut clone = start(options, directory)?;
    let seconds = begin.elapsed().as_secs_f64();
    if !clone.differences.is_empty() {
        output::note!("forced: {}", clone.differences.join("; "));
    }
    let (pid, ms, files) = (clone.process.id(), seconds * 1e3, directory.display());
    output::note!("guest {pid} runs after {ms:.0} ms; its files: {files}");
    if json.is_asked() {
        let guests::Names { name, uuid } = guests::Names::of(Path::new("/"), pid as i32);
        let value = json!({
            "pid": pid, "name": name, "uuid": uuid, "directory": files.to_string(), "seconds": seconds,
        });
        json.line(&value, String::new).inspect_err(|_| clone.process.kill())?;
    }
    let clock = match clone.set_clock() {
        Ok(None) => None,
        Ok(Some(NoAgent::Port)) => Some("QEMU's words have no port for qemu-guest-agent".into()),
        Ok(Some(NoAgent::Program)) => Some("no qemu-guest-agent runs in them".into()),
        Err(error) => Some(error.to_string()),
    };
    Ok((clone, clock))
}

/// The page server: its process reads the snapshot's pages for the kernel.
pub(crate) fn serve(lease: i32, record: Option<&Path>) -> Result<()> {
    // The lease is the descriptor that was inherited, which stays open: this is another one of the
    // same file.
    let image = || -> Result<Image> { Ok(Image::of_lease(&File::open(format!("/proc/self/fd/{lease}"))?)?) };
    let report = |error: ReadError| {
        output::note!("a guest needs a page that cannot be read, and ends: {:#}", anyhow::Error::from(error));
    };
    let record = record.filter(|list| !list.exists());
    let served = image().and_then(|image| Ok(memory::serve(&image, &report, record)?));
    served.context("cannot serve the guests' memory")
}

/// Sees to it that the page server runs.
pub(super) struct Watch {
    /// `None`: the guests need none.
    server: Option<Server>,
    /// Whether it is to be replaced.
    renew: Arc<AtomicBool>,
}

impl Watch {
    pub(super) fn new(server: Option<Server>, renew: Arc<AtomicBool>) -> Self {
        Self { server, renew }
    }

    /// Sees to it while something is done that may need the memory. `None`: that panicked.
    pub(super) fn during<T: Send>(&mut self, work: impl FnOnce() -> T + Send) -> Option<T> {
        std::thread::scope(|scope| {
            let thread = scope.spawn(work);
            while !thread.is_finished() {
                self.look();
                std::thread::sleep(MOMENT);
            }
            thread.join().ok()
        })
    }

    fn look(&mut self) {
        let is_told = self.renew.swap(false, Ordering::Relaxed);
        let Some(server) = &mut self.server else { return };
        if is_told {
            server.replace();
        }
        match server.watch() {
            Some((_, Err(error))) => output::note!("guests wait: the page server cannot be started: {error}"),
            Some((status, Ok(()))) => output::note!("the page server has ended, {status}; another one goes on"),
            None => {}
        }
    }
}

/// Waits until all clones have ended. After a signal it ends them. Says how those have ended that
/// failed, and gives their number.
fn wait(clones: &mut Vec<Clone>, ends: &AtomicBool, watch: &mut Watch, source: &mut Source) -> usize {
    let (mut told, mut failed) = (false, 0);
    while !clones.is_empty() {
        if ends.load(Ordering::Relaxed) && !std::mem::replace(&mut told, true) {
            clones.iter().for_each(|clone| clone.process.signal(SIGTERM));
        }
        clones.retain_mut(|clone| {
            let Some(status) = clone.process.ended() else { return true };
            if !(status.success() || told && status.signal() == Some(SIGTERM)) {
                output::note!("guest {} has ended, {status}", clone.process.id());
                failed += 1;
            }
            false
        });
        watch.look();
        if let Source::Segments(segments, _) = source {
            segments.watch();
        }
        std::thread::sleep(NAP);
    }
    failed
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_files_of_an_earlier_clone_are_not_a_new_ones() {
        let dir = tempfile::tempdir().unwrap();
        let first = new_directories(dir.path(), "one", 2);
        std::fs::create_dir(&first[1]).unwrap();
        let second = new_directories(dir.path(), "one", 2);
        assert!(second.len() == 2 && second.iter().all(|new| !first.contains(new)), "{second:?}");
    }
}
