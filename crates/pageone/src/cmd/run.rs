//! `pageone run`: starts a program with the agent in it.
//!
//! The program runs in any case, unless it would write into a snapshot's image. If something fails
//! on the way, the program is not merged, and a line on standard error says why.

mod module;
pub(crate) mod ppr;
mod qemu;
mod snapshots;

use std::ffi::{OsStr, OsString};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use clap::builder::{PossibleValuesParser, TypedValueParser};
use kmem::peer::{Peer, is_trusted};
use wire::HugePages;

pub(crate) use self::module::MOUNT;
use crate::{paths, program};

/// Time within which a daemon that was started here must answer.
const START_TIME: Duration = Duration::from_secs(5);
/// The same, for one that another command started, when the own one has ended.
const OTHERS_START: Duration = Duration::from_millis(300);

/// Options of `pageone run`.
#[derive(clap::Args)]
pub(crate) struct Args {
    /// Domain to join: clients merge only with others of their domain [default: all of this user's]
    #[arg(long, value_name = "NAME")]
    domain: Option<String>,
    /// `split` leaves the program without the huge pages that it asks for. `keep` lets it have
    /// them; the daemon's configuration says whether any are split
    #[arg(long, value_name = "POLICY", default_value_t = HugePages::Split, value_parser = policies())]
    huge_pages: HugePages,
    /// What merges. `pageone`: the daemon, what the program marks. `module`: the daemon, below the
    /// mappings, by our module for the kernel (QEMU only). `ksm`: the kernel's KSM, all of the
    /// program's memory (Linux 6.10 or later)
    #[arg(long, value_name = "NAME", value_enum, default_value_t = Backend::Pageone)]
    backend: Backend,
    /// Take back what the guest frees (QEMU only): adds a device that the guest's driver marks its
    /// free pages in, and for guests without the driver what `--free-page-reporting` adds
    #[arg(long)]
    ppr: bool,
    /// Let the guest report free blocks without a driver of ours (QEMU only): adds a balloon with
    /// free page reporting, unless the command line has a balloon
    #[arg(long)]
    free_page_reporting: bool,
    /// Seconds within which a page that the guest frees is back [default: the daemon's]
    #[arg(long, value_name = "S", requires = "ppr")]
    reclaim_period: Option<f64>,
    /// Make the guest one that `pageone snapshot save` can store with its devices (QEMU only)
    #[arg(long)]
    snapshots: bool,
    /// Do not start a daemon; the program joins one as soon as it runs
    #[arg(long)]
    no_start: bool,
    /// The program and its arguments
    #[arg(required = true, trailing_var_arg = true, allow_hyphen_values = true, value_name = "PROGRAM")]
    program: Vec<OsString>,
}

/// What merges.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
enum Backend {
    Pageone,
    Module,
    Ksm,
}

/// Whether a daemon is started.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Start {
    IfNone,
    Never,
}

fn policies() -> impl TypedValueParser<Value = HugePages> {
    PossibleValuesParser::new(HugePages::names()).try_map(|name| name.parse::<HugePages>())
}

/// Replaces this process by the program. Nothing is started for one that cannot be.
pub(crate) fn run(args: &Args, dir: Option<PathBuf>) -> Result<()> {
    if let Err(error) = program::check(&args.program[0]) {
        end(&args.program[0], &error);
    }
    if args.snapshots {
        snapshots::refuse_stored(&args.program[1..])?;
    }
    let mut command = Command::new(&args.program[0]);
    let for_snapshots = dir.clone();
    let domain = args.domain.as_deref();
    let start = if args.no_start { Start::Never } else { Start::IfNone };
    let prepared = match args.backend {
        Backend::Ksm => crate::cmd::ksm::enable(domain),
        Backend::Module => module::prepare(&mut command, &args.program, domain, dir, start),
        Backend::Pageone => agent(domain, args.huge_pages, dir, start).map(|all| set(&mut command, all)),
    };
    let program = args.program[0].to_string_lossy();
    if let Err(e) = &prepared {
        crate::cmd::warn(&format!("{program} runs without merging: "), e);
    }
    let mut ram = None;
    if args.snapshots {
        let ready = match (&prepared, args.backend) {
            (Ok(()), Backend::Pageone) => snapshots::prepare(&mut command, &args.program, for_snapshots),
            _ => Err(anyhow::anyhow!("that takes PageONE's agent in it")),
        };
        match ready {
            Ok(prepared) => ram = Some(prepared),
            Err(e) => crate::cmd::warn(&format!("{program} runs without snapshots: "), &e),
        }
    }
    // After the daemon was started, which must not inherit these descriptors. They are closed if
    // the program cannot be started.
    let mut inherited = None;
    command.args(&args.program[1..]);
    // Before the device for free pages, which a QEMU that waits for a migration has not got: the
    // balloon has the same address with and without.
    if args.ppr || args.free_page_reporting {
        qemu::add_reporting(&mut command, &args.program[0], &args.program[1..]);
    }
    if args.ppr && args.backend == Backend::Ksm {
        output::note!(
            "{program} runs without recycling: that takes --backend pageone or module; --free-page-reporting does not"
        );
    } else if args.ppr {
        let words = &args.program[1..];
        let worker = match args.backend {
            Backend::Module if prepared.is_ok() => Ok(ppr::Worker::Daemon),
            Backend::Module => Err(anyhow::anyhow!("its RAM does not lie in a mount of pageonefs")),
            _ => {
                ppr::warn_of(words);
                Ok(ppr::Worker::Agent)
            }
        };
        let prepare = |worker| ppr::prepare(&mut command, &args.program[0], words, worker, args.reclaim_period);
        match worker.and_then(prepare) {
            Ok(fds) => inherited = Some(fds),
            Err(e) => crate::cmd::warn(&format!("{program} runs without recycling: "), &e),
        }
    }
    let error = command.exec();
    drop((inherited, ram));
    end(&args.program[0], &error)
}

/// Says why the program does not run, and ends as a shell does.
fn end(program: &OsStr, error: &std::io::Error) -> ! {
    let (code, why) = match error.kind() {
        std::io::ErrorKind::NotFound if error.get_ref().is_none() => {
            (127, "it is not there, nor in PATH: give its path".into())
        }
        std::io::ErrorKind::NotFound => (127, error.to_string()),
        _ => (126, error.to_string()),
    };
    output::note!("cannot run {}: {why}", program.to_string_lossy());
    std::process::exit(code)
}

/// Checks that this kernel lets this account merge.
pub(crate) fn check_kernel() -> Result<()> {
    use kmem::uffd::{Features, Uffd};
    if let Some(release) = kmem::pagemap::too_old() {
        anyhow::bail!(
            "Linux {release} is too old; 6.7 or later is needed (Debian 12 has one in \
                       bookworm-backports; on 6.1 a QEMU merges with --backend module)"
        );
    }
    kmem::check_page_size(kmem::page_size())?;
    Uffd::new(Features::WP | Features::WP_ASYNC | Features::WP_UNPOPULATED)?;
    Ok(())
}

/// Variables of the environment that put the agent into a program. Those without a value are to be
/// removed.
pub(crate) type Environment = Vec<(OsString, Option<OsString>)>;

/// The environment for the agent, whose daemon runs, or is started as `start` says.
pub(crate) fn agent(
    domain: Option<&str>,
    huge_pages: HugePages,
    dir: Option<PathBuf>,
    start: Start,
) -> Result<Environment> {
    check_kernel()?;
    let library = paths::agent_library()?;
    let candidates = paths::candidates(dir);
    let directory = match running(&candidates, is_trusted) {
        Some(directory) => directory,
        None if start == Start::Never => candidates.first().cloned().unwrap_or_else(paths::own_directory),
        None => {
            // The explicit directory, or the user's own; never another user's.
            let own = if candidates.len() == 1 { candidates[0].clone() } else { paths::own_directory() };
            start_daemon(&own)?;
            own
        }
    };
    let mut preload = library.into_os_string();
    if let Some(before) = std::env::var_os("LD_PRELOAD").filter(|v| !v.is_empty()) {
        preload.push(":");
        preload.push(before);
    }
    let socket = std::path::absolute(directory.join(engine::AGENT_SOCKET))?;
    Ok(vec![
        ("LD_PRELOAD".into(), Some(preload)),
        (wire::ENV_SOCKET.into(), Some(socket.into())),
        (wire::ENV_HUGE_PAGES.into(), Some(huge_pages.name().into())),
        (wire::ENV_DOMAIN.into(), domain.map(Into::into)),
    ])
}

fn set(command: &mut Command, environment: Environment) {
    for (name, value) in environment {
        match value {
            Some(value) => command.env(name, value),
            None => command.env_remove(name),
        };
    }
}

/// The first of the directories in which a daemon answers whose user is `believed`.
pub(crate) fn running(directories: &[PathBuf], believed: fn(u32) -> bool) -> Option<PathBuf> {
    let answers = |dir: &&PathBuf| {
        let peer = kmem::seqpacket::Conn::connect(&dir.join(engine::AGENT_SOCKET)).and_then(Peer::of);
        peer.is_ok_and(|peer| believed(peer.uid))
    };
    directories.iter().find(answers).cloned()
}

/// Starts a daemon for this user, which ends when it has had no client for a minute.
fn start_daemon(directory: &Path) -> Result<()> {
    let log = directory.join("daemon.log");
    let out = paths::open_own(directory, "daemon.log")?;
    let program = std::env::current_exe().context("cannot find this program")?;
    let mut daemon = Command::new(program);
    daemon.arg("--dir").arg(directory).args(["daemon", "--exit-when-idle", "60"]);
    daemon.stdin(Stdio::null()).stdout(Stdio::null()).stderr(out).env_remove("LD_PRELOAD");
    let mut daemon = guard::apart(&mut daemon).spawn().context("cannot start a daemon")?;
    let mut deadline = Instant::now() + START_TIME;
    while Instant::now() < deadline {
        if running(&[directory.to_path_buf()], is_trusted).is_some() {
            output::note!("started a daemon; its log is {}", log.display());
            return Ok(());
        }
        // One that another command has started at the same moment may be about to answer.
        if matches!(daemon.try_wait(), Ok(Some(_))) {
            deadline = deadline.min(Instant::now() + OTHERS_START);
        }
        std::thread::sleep(Duration::from_millis(20));
    }
    anyhow::bail!("the daemon did not start; see {}", log.display())
}
