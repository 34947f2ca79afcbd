//! Storing a guest whose free pages are taken back.
//!
//! The device in which it marks them cannot be stored. A process of its own ([`guard`]) unplugs it,
//! and plugs it in when the one that stores the guest has ended, also if that is killed.

use std::io::{BufRead, BufReader, Read};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};

use anyhow::{Context, Result, anyhow};

use crate::paths;

/// What the guard says when the device is unplugged.
const DONE: &str = "unplugged";

/// The device is unplugged. Dropping this has it plugged in, and waits for that.
pub(super) struct Unplugged(Child);

/// Unplugs the device, if the guest has it.
pub(super) fn unplug(pid: i32, dir: Option<&Path>) -> Result<Option<Unplugged>> {
    if !snapshot::save::is_recycled(pid)? {
        return Ok(None);
    }
    let directories = paths::candidates(dir.map(Path::to_owned));
    let status = control::client::status(&directories)?;
    let client = status.clients().find(|client| client.pid == pid);
    // The user has paused it, and resumes it.
    if client
        .and_then(|client| client.recycling.as_ref())
        .is_some_and(|recycling| recycling.state == control::RecyclerState::Paused)
    {
        return Ok(None);
    }
    let mut guard = Command::new(std::env::current_exe().context("cannot find this program")?);
    if let Some(dir) = dir {
        guard.arg("--dir").arg(dir);
    }
    guard.arg("ppr-guard").arg(pid.to_string()).stdin(Stdio::piped()).stdout(Stdio::piped());
    let mut unplugged = Unplugged(guard.spawn().context("cannot start what plugs the device in again")?);
    let mut said = String::new();
    unplugged.0.stdout.take().map(BufReader::new).map(|mut out| out.read_line(&mut said)).transpose()?;
    if said.trim() != DONE {
        let error = anyhow!("{}", said.trim());
        return Err(error.context("the device for its free pages cannot be unplugged"));
    }
    Ok(Some(unplugged))
}

impl Drop for Unplugged {
    fn drop(&mut self) {
        drop(self.0.stdin.take());
        let _ = self.0.wait();
    }
}

/// Unplugs the device, says so, and plugs it in when standard input ends.
pub(crate) fn guard(pid: i32, dir: Option<PathBuf>) -> Result<()> {
    guard::stand_alone();
    let directories = paths::candidates(dir);
    let paused = control::client::pause(&directories, pid);
    let said = match &paused {
        Ok(()) => DONE.into(),
        Err(error) => error.to_string().replace('\n', " "),
    };
    // The one that stores the guest may have been killed.
    let _ = output::line!("{said}");
    if paused.is_err() {
        return Ok(());
    }
    // What ends the reading is that nobody holds the other end any more.
    let _ = std::io::stdin().read_to_end(&mut Vec::new());
    let resumed = snapshot::save::wait_until_put_back(pid)
        .map_err(anyhow::Error::from)
        .and_then(|()| Ok(control::client::resume(&directories, pid)?));
    resumed.with_context(|| format!("free pages are not taken back now: `pageone ppr resume {pid}` tries it again"))
}
