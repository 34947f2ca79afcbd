//! `pageone doctor`: what keeps memory from being merged, on this host and in each guest that runs,
//! and what mends it.
//!
//! ```text
//!   checks    the kernel and this account: tried for real where that can be done
//!   daemon    limits and rights of the daemon that runs
//!   libvirt   what guests of libvirt need of the host
//!   module    the host's module, pageonefs, and its mounts
//!   guests    which processes are guests ──▶ guest: what holds for each
//!      │                                       ├─ process   /proc/PID: user, arguments, files
//!      │                                       ├─ memory    its smaps: of what kind its memory is
//!      │                                       ├─ device    whether its user may use userfaultfd
//!      └─ the daemon's status                  └─ denied    the kernel's log, and the guest's
//! ```
//!
//! Nothing is changed, no guest is stopped or asked. Files are read below a root directory, which
//! is `/` outside of tests. `--apply` runs those of the shown commands that harm nobody; see
//! [`report::Fix`].

mod checks;
mod daemon;
mod denied;
mod device;
mod fix;
mod guest;
mod guests;
mod libvirt;
mod memory;
mod module;
mod process;
mod report;

use std::path::{Path, PathBuf};

use ::guests::Found;
use anyhow::{Result, ensure};

use self::report::Report;
use crate::cmd::Json;
use crate::{Code, Coded, paths};

/// Options of `pageone doctor`.
#[derive(clap::Args)]
#[command(after_help = "Exit code: 0 nothing is in the way of merging; 1 something is, on the host or in a guest.")]
pub(crate) struct Args {
    #[command(flatten)]
    json: Json,
    /// Show only the commands that mend what was found
    #[arg(long, conflicts_with = "json")]
    fix: bool,
    /// Run those commands that harm nobody, say which, and look again. No guest and no service
    /// that runs is restarted, and no file of another package is changed
    #[arg(long, conflicts_with_all = ["fix", "json"])]
    apply: bool,
    /// Look at these processes only [default: every guest on this host]
    #[arg(value_name = "PID|NAME|UUID")]
    targets: Vec<String>,
}

/// Prints the checks.
///
/// # Errors
///
/// When something is in the way of merging: with [`Code::Failed`]; when a process does not exist:
/// with [`Code::NoClient`].
pub(crate) fn run(args: &Args, dir: Option<PathBuf>) -> Result<()> {
    let root = Path::new("/");
    let find = |target: &String| ::guests::find(root, target);
    let targets = args.targets.iter().map(find).collect::<Result<Vec<_>, _>>()?;
    let pids: Vec<i32> = targets.iter().map(Found::pid).collect::<Result<_, _>>()?;
    for pid in &pids {
        let is_there = root.join(format!("proc/{pid}")).exists();
        let what = || format!("there is no process {pid}; without a number `pageone doctor` looks at every guest");
        ensure!(is_there, Coded(Code::NoClient, what()));
    }
    let directories: Vec<PathBuf> = paths::candidates(dir).iter().map(std::path::absolute).collect::<Result<_, _>>()?;
    let mut report = examine(root, &directories, &pids);
    if args.fix {
        output::put!("{}", fix::script(&report))?;
    } else {
        if args.apply && fix::apply(&report)? > 0 {
            report = examine(root, &directories, &pids);
        }
        args.json.print(&report, || report.to_string())?;
    }
    match report.in_the_way() {
        Some(what) => Err(Coded(Code::Failed, what).into()),
        None => Ok(()),
    }
}

/// Looks at the host and at its guests, or at these processes.
fn examine(root: &Path, directories: &[PathBuf], pids: &[i32]) -> Report {
    let status = control::client::status(directories);
    let mut host = checks::all(&status, module::can_merge(root));
    host.extend(daemon::checks(root, directories));
    host.extend(libvirt::checks(root));
    host.extend(module::checks(root, directories));
    let (found, hidden) = guests::find(root, status.as_ref().ok(), pids);
    let world = guest::World::new(root, directories, status.as_ref().ok());
    let guests = found.iter().map(|found| guest::examine(&world, found)).collect();
    Report { host, guests, hidden }
}
